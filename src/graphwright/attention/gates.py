"""Trained gates on the edges of a pattern, in the table of gates of the program that owns the pattern.

Kinds, optimizer, penalties and policies are those of `graphwright.structure`. Gates inside a softmax are decided
relative to the largest of their row: the softmax ignores a factor that a whole row shares, so a penalty shrinks all
gates of a row together, and a cut at a fixed probability would delete the edges that matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.array.formulas.gates import GATE_KINDS
from graphwright.attention.attend import Where
from graphwright.autograd import Tensor, no_grad
from graphwright.errors import UsageError
from graphwright.graph import EdgeArray, Mask
from graphwright.patterns import Pattern, masks
from graphwright.patterns.table import FULL
from graphwright.program.editing.gate_slots import free_slots, use_slots
from graphwright.program.editing.pattern_gates import gate_edges
from graphwright.program.gates import FREE, STATE, Gate, gate_node
from graphwright.program.op_graph import Value
from graphwright.program.patterns import PatternOwner
from graphwright.program.run import tensors

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program

Array = npt.NDArray[Any]


@checked
def gate(
    pattern: Pattern, kind: str = "sigmoid", where: Where = "exp", *, tie: Literal["offset"] | None = None,
    edges: Any = None, init: Any = None, group: str | None = None,
) -> NodeId:  # fmt: skip
    """Put trained gates on edges of a pattern of a program, in one edit; all attentions over the pattern read them.

    The cost of a gate is the number of pairs of tokens that its edges allow.

    Args:
        kind: kind of gate, see docs/structure.md; a `scale` gate only with where="weight".
        where: "exp": gates multiply the exponentials, and the softmax renormalises; "weight": the normalised weights.
        tie: None: a gate per edge; "offset": one for all edges of a plane with the same query block - key block.
        edges: the edges, as `pattern.cut` takes them; by default all.
        init: initial logit, one number or one per gate; by default that of the kind.
        group: name of a group of gates that share a temperature.
    Returns: the handle of the gate. `e.ungate(handle)` removes the gates.
    Raises: UsageError if no program owns the pattern, no attention reads it, or it has gates; GateNotAllowed for a
        signed gate inside the softmax; DeadGate for logits that are not finite. Then nothing changes.
    """
    p, key = program_with(pattern)
    if (facts := GATE_KINDS.get(kind)) is None:
        raise UsageError("unknown kind of gate", expected=", ".join(GATE_KINDS), got=kind)
    with p.edit(f"{kind} gates on the edges of {key}", author="gate") as e, pattern.transaction("gates") as pe:
        chosen = _chosen(pattern, edges)
        if not len(chosen):
            raise UsageError("nothing to gate: no edge is chosen", where=key)
        slots = _slots(pattern, chosen, tie)
        start = np.asarray(facts.start if init is None else init, np.float64)
        inits = np.broadcast_to(start, (int(slots.max()) + 1,))
        pe.set(chosen, gate=slots)
        costs = np.bincount(slots, allowed_pairs(pattern, chosen)).astype(np.int64)
        return gate_edges(e, key, kind, where, inits, costs, group)


def program_with(pattern: Pattern) -> tuple[Program, str]:
    """Return the program that owns a pattern, and its key there. Raises: UsageError without such a program."""
    p = pattern.owner.program if isinstance(pattern.owner, PatternOwner) else None
    key = None if p is None else next((key for key, known in p.patterns.items() if known is pattern), None)
    if p is None or key is None:
        fix = "program = gw.trace(function that calls attend(...)), or attention.sparsify(model, ...)"
        raise UsageError("no program owns the pattern, and gates are weights of a program", where=pattern.name or None,
                         fix=fix)  # fmt: skip
    return p, key


def gate_of(pattern: Pattern) -> tuple[Program, str, Gate] | None:
    """Return the program, the key and the gate of a pattern; None if its edges have no gates."""
    if not isinstance(pattern.owner, PatternOwner) or pattern.owner.program is None:
        return None
    p, key = program_with(pattern)
    found = next((one for one in p.gates().values() if one.over == "pattern" and one.owner == key), None)
    return None if found is None else (p, key, found)


def follow(p: Program, key: str, found: Gate, pattern: Pattern, added: EdgeArray) -> None:
    """Free the gates of edges that are gone, and give new edges open ones, in the open edit of the program."""
    e = p.history.open
    assert e is not None, "gates follow edges in an edit of the program"
    unused = np.setdiff1d(np.flatnonzero(found.rows[:, STATE] != FREE), np.asarray(pattern.edges["gate"]))
    if len(unused):
        free_slots(e, found, unused)
    if len(added):
        start = GATE_KINDS[found.kind].start or 1.0
        slots = use_slots(e, p.gates().at(found.port), len(added), start, allowed_pairs(pattern, added))
        with pattern.transaction("gates") as pe:
            pe.set(added, gate=slots)


def allowed_pairs(pattern: Pattern, edges: EdgeArray) -> npt.NDArray[np.int64]:
    """Return the number of pairs of tokens that each edge allows."""
    blocks, frame = pattern.held(edges.index), pattern.frame
    (i0, i1), (j0, j1) = frame.query_span(blocks.q), frame.key_span(blocks.k)
    found = ((i1 - i0 + 1) * (j1 - j0 + 1)).astype(np.int64)
    some = np.flatnonzero(blocks.kind != FULL)
    for part in masks.chunks(len(some), pattern.block):
        at = some[part]
        found[at] = masks.tokens(blocks.take(at), pattern.base, frame).sum((1, 2))
    return found


def values(p: Program, found: Gate) -> Tensor:
    """Return the present values of a gate, in the present mode of the program's gates."""
    port = Value(gate_node(p), found.port)
    with no_grad():
        return tensors(p, {}, {}, [port])[port]


def _chosen(pattern: Pattern, edges: Any) -> EdgeArray:
    if edges is None:
        return pattern.edges()
    if isinstance(edges, Mask):
        return EdgeArray(edges.ids)
    given = np.atleast_1d(np.asarray(edges))
    return EdgeArray(np.asarray(pattern.edges())[given] if given.dtype == bool else given)


def _slots(pattern: Pattern, edges: EdgeArray, tie: str | None) -> npt.NDArray[np.int64]:
    """Return the slot of the gate of each edge."""
    if tie is None:
        return np.arange(len(edges))
    at = np.searchsorted(pattern.edges().index, edges.index)
    plane, query, key = pattern.pairs().astype(np.int64)[np.minimum(at, len(pattern) - 1)].T
    return np.unique(plane * (2 * max(pattern.blocks) + 1) + query - key, return_inverse=True)[1]
