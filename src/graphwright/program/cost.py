"""The cost of a program: its parameters, its bytes, and the FLOPs of one run, which the cost rule of each op gives.

Every weight counts once, however often it is read; an op counts if an output or an assignment needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphwright.array.sizes import names_of
from graphwright.ops import get
from graphwright.program.fitting_sizes import fitting_sizes
from graphwright.program.kinds import KINDS
from graphwright.program.op_graph import Value
from graphwright.program.patterns import pattern_at, visible

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program.program import Program


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Number of parameters, stored bytes, and floating-point operations (`flops`) of one run."""

    params: int | float
    bytes: int | float
    flops: int | float


def size(p: Program, nodes: Collection[NodeId] | None = None) -> ModelSize:
    """Return the size of a program or of some nodes; flops are of one token or sample, at the sizes of `ones`."""
    weights, ops = counted(p, nodes)
    specs, dims = [p.spec(n) for n in weights], ones(p)
    return ModelSize(sum(s.size for s in specs), sum(s.nbytes for s in specs), sum(op_flops(p, n, dims) for n in ops))


def flops(p: Program, dims: Mapping[str, int]) -> int:
    """Return the floating-point operations of one run, without dead ops; `dims` maps named dimensions to sizes."""
    return sum(op_flops(p, node, dims) for node in counted(p)[1])


def parameters(p: Program) -> int:
    """Return the number of entries of all params."""
    return sum(p.spec(n).size for n in counted(p)[0])


def counted(p: Program, nodes: Collection[NodeId] | None = None) -> tuple[list[NodeId], list[NodeId]]:
    """Return (one param node per weight, the ops that a run needs, in topological order), only of `nodes` if given."""
    inside = set(p.nodes() if nodes is None else nodes)
    needed = p.reachable([*p.outputs(), *p.assigns()]) & inside
    keyed = {p.key(n): n for n in reversed(p.params()) if n in inside}
    return list(reversed(keyed.values())), [n for n in p.order() if n in needed and p.op(n) not in KINDS]


def ones(p: Program) -> dict[str, int]:
    """Map each named size to 1, for one token or one sample, or to the smallest number at which the program can run."""
    texts = {d for n in p.nodes() for s in p.specs(n) for d in s.shape if isinstance(d, str)}
    return fitting_sizes(p, dict.fromkeys((name for text in sorted(texts) for name in names_of(text)), 1))


def op_flops(
    p: Program, node: NodeId, dims: Mapping[str, int], spec: Callable[[Value], Spec] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Return the FLOPs of one op; `spec(value)` and `attrs` replace the specs of its values and its attributes."""
    spec = spec or (lambda v: p.specs(v.node)[v.port])
    ins = [spec(v).bind(dict(dims)) for v in p.operands(node)]
    outs = [spec(Value(node, i)).bind(dict(dims)) for i in range(len(p.specs(node)))]
    flops = get(p.op(node)).cost(ins, outs, p.attrs(node) if attrs is None else attrs).flops
    return round(flops * share_of_pairs(p, node, ins))


def share_of_pairs(p: Program, node: NodeId, ins: Sequence[Spec]) -> float:
    """Return the share of the pairs of tokens that an op computes, 1 for ops without a pattern.

    The cost rule of attention over a pattern counts all pairs, because edges are data. `ins` are specs without names.
    """
    table = get(p.op(node)).traits.table
    pattern = None if table is None else pattern_at(p, p.operands(node)[table].node)
    return 1.0 if pattern is None else visible(pattern, ins[0].sizes[2], ins[1].sizes[2])
