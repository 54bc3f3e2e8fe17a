"""Mutations of recurrent cells, in programs on sequences [batch, steps, units] of a fixed size.

A cell is in a block `b<number>`: its unrolled steps are ordinary nodes (`b1.gru...`), and a linear layer `b1.to` reads
its result. A closed-form continuous-time (CfC) cell reads the time before each step from the node `elapsed`
[batch, steps, 1], if there is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright import nn
from graphwright.array.spec import Spec
from graphwright.autograd import ones, stack
from graphwright.errors import UsageError
from graphwright.evolve.mutations.layers import output_sum
from graphwright.evolve.mutations.registry import CELLS, free_part, in_cell, linears, mutation, over_time
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program import Program, Transaction
from graphwright.program.builder import record
from graphwright.program.kinds import STORED
from graphwright.program.op_graph import Value


def _cfc(inputs: int, units: int) -> nn.CfCCell:
    return nn.CfCCell(inputs, units, backbone_units=units)


_CELLS: dict[str, Any] = dict(zip(CELLS, (nn.RNNCell, nn.GRUCell, nn.LSTMCell, _cfc), strict=True))


def _unrolled(cell: Any, x: Any, elapsed: Any = None) -> Any:
    """Run a cell over x [B, T, inputs]; a CfC cell reads the times between steps [B, T, 1], by default 1."""
    timed = isinstance(cell, nn.CfCCell)
    state, unit, found = cell.start(x) if timed else None, ones(x.shape[0], 1, dtype=x.dtype), []
    for t in range(x.shape[1]):
        if timed:
            h, state = cell(x[:, t], state, unit if elapsed is None else elapsed[:, t])
        else:
            state = cell(x[:, t], state)
            h = state[0] if isinstance(state, tuple) else state
        found.append(h)
    return stack(found, 1)


def cells(p: Program) -> list[NodeId]:
    """Return the output layer of each recurrent cell: the linear layer that reads the result of its steps."""
    return [n for n in linears(p) if p.path(n).endswith(".to") and _inside(p, n)]


def kind_of(p: Program, site: Any) -> str:
    """Return the kind (rnn, gru, lstm or cfc) of the cell that a linear layer reads."""
    return p.path(_inside(p, p.node(site))[0]).split(".")[1]


@mutation("insert_cell", sites=over_time, weight=0.10, refine=0.06, adds=True)
def insert_cell(
    e: Transaction, site: Any, rng: np.random.Generator, cell: str | None = None, units: int | None = None,
    block: str | None = None,
) -> None:  # fmt: skip
    """Add W₂ h to the result of a linear layer on a sequence; h is the output of a new recurrent cell, and W₂ = 0."""
    p = e.program
    node = p.node(site)
    if node not in over_time(p):
        raise UsageError("a cell cannot be inserted at this node", where=p.path(node),
                         got=f"{p.op(node)} on {p.spec(p.operands(node)[0])}",
                         expected="a linear layer on [batch, steps, units]")  # fmt: skip
    x, total = p.operands(node)[0], output_sum(e, node)
    base, size = block or free_part(p), units or int(rng.choice([4, 8, 16]))
    out, kind = int(p.spec(node).shape[2]), p.spec(x).dtype.numpy
    # a temporary linear layer, so that the one after the cell gets its spec
    held = e.param(f"{base}.seat.weight", np.zeros((size, int(p.spec(x).shape[2])), kind))
    seat = e.add("linear", x, held, name=f"{base}.seat")
    after = e.add("linear", seat, e.param(f"{base}.to.weight", np.zeros((out, size), kind)), name=f"{base}.to")
    e.connect(after, total)
    _put(e, [held, seat], base, cell or str(rng.choice(CELLS)), x, size, rng)


@mutation("cell_type", sites=cells, weight=0.10)
def cell_type(e: Transaction, site: Any, rng: np.random.Generator, cell: str | None = None) -> list[str]:
    """Replace a cell by one of a different kind with the same size and new weights; keep the linear layer after it.

    Returns: keys of the removed weights.
    """
    p = e.program
    node = p.node(site)
    if node not in cells(p):
        expected = ", ".join(map(p.path, cells(p))) or "a layer that `insert_cell` added"
        raise UsageError("this node is not the output layer of a recurrent cell", where=p.path(node), expected=expected)
    base, inside = p.path(node).removesuffix(".to"), _inside(p, node)
    others = [k for k in CELLS if k != kind_of(p, node)]
    dropped = [p.key(n) for n in inside if p.op(n) == "param"]
    reads = {v for n in inside for v in p.operands(n) if v.node not in inside}
    (x,) = reads - {_elapsed(p)} or reads
    size = int(p.spec(p.operands(node)[0]).shape[2])
    _put(e, inside, base, cell or str(rng.choice(others)), x, size, rng)
    return dropped


def _inside(p: Program, node: NodeId) -> list[NodeId]:
    """Return the nodes of the cell that a linear layer reads, in program order; [] if it reads no cell."""
    head = p.path(node).removesuffix(".to")
    return [n for n in p.order() if p.path(n).startswith(f"{head}.") and in_cell(p, n)]


def _put(
    e: Transaction, nodes: list[NodeId], base: str, cell: str, x: Value, units: int, rng: np.random.Generator
) -> None:
    """Replace `nodes` by the unrolled steps of a new cell that reads `x`; their names start with `<base>.<cell>.`."""
    if cell not in CELLS:
        raise UsageError("unknown kind of cell", expected=", ".join(CELLS), got=cell)
    spec, reads = e.spec(x), {"x": x}
    made = _CELLS[cell](int(spec.shape[2]), units)
    if cell == "cfc" and (time := _elapsed(e.program)) is not None:
        wanted = Spec((*spec.shape[:2], 1), spec.dtype)
        if e.spec(time) != wanted:
            raise UsageError("elapsed times have the wrong shape", where="elapsed", expected=wanted, got=e.spec(time))
        reads["elapsed"] = time
    sub = record(lambda *values: _unrolled(made, *values), tuple(map(e.spec, reads.values())), names=tuple(reads))[0]
    bound = units**-0.5
    with sub.edit("names and weights") as s:
        for n, name in _names(sub).items():
            if sub.op(n) == "param":
                s.set_weight(n, rng.uniform(-bound, bound, sub.spec(n).sizes).astype(spec.dtype.numpy))
            path = f"{base}.{cell}.{name}"
            s.rename(n, path, key=path if sub.op(n) in STORED else None)
    e.replace(nodes, sub, match=reads)


def _elapsed(p: Program) -> Value | None:
    return next((Value(n) for n in p.nodes() if p.path(n) == "elapsed"), None)


def _names(sub: Program) -> dict[NodeId, str]:
    """Map the nodes of an unrolled cell to names `step.<t>.<op>`, equal in all steps, so that pictures fold steps."""
    reads, ends, order = set(sub.inputs()), {v.node for v in sub.outputs()}, list(sub.order())
    steps: dict[NodeId, int] = {}
    for n in order:
        if reads & {*sub.producers(n)}:
            steps[n] = int(sub.attrs(n)["start"]) if traits(sub.op(n)).slices else 0
        elif n not in reads and n not in ends and sub.op(n) not in STORED:
            steps[n] = max((steps[p] for p in sub.producers(n) if p in steps), default=0)
    for n in reversed(order):  # a node belongs to the first step that reads it
        after = [steps.get(c, -1) for c in sub.consumers(n)]
        if n in steps and after:
            steps[n] = max(steps[n], min(after))
    names: dict[NodeId, str] = {}
    counts: dict[str, int] = {}
    for n in order:
        if n not in reads:
            name = f"step.{steps[n]}.{sub.op(n)}" if n in steps else sub.path(n)
            counts[name] = counts.get(name, 0) + 1
            names[n] = name if counts[name] == 1 else f"{name}_{counts[name]}"
    return names
