"""Candidates of an architecture search: skips between blocks, alternative ops, units of axes.

A candidate is identified by its name. One edit adds all candidates with gates, so that the gates can be trained, or the
chosen candidates without gates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple, Protocol

import numpy as np

from graphwright.array import Spec
from graphwright.array.spec import Dim
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.program import Program, Value
from graphwright.program.editing.replace import redirect
from graphwright.program.editing.transaction import Transaction

Z0 = 1.0
"""Initial logit (open probability 0.73) of candidates with weights of their own, which learn the scale."""


CandidateGates = dict[str, tuple[NodeId, int]]
"""Dict from names of candidates to pairs (handle of the gate, index of the element in the gate)."""


class Candidates(Protocol):
    """Protocol of a set of candidates.

    Methods:
        names: return the names of all candidates, in a fixed order. Raises: UsageError if one does not fit the program.
        gate: add all candidates with gates, in one edit of author `gate`; return a dict from names to gates.
        build: add the chosen candidates without gates, in one edit.
        free: return True if a candidate adds no parameters.
    """

    def names(self, p: Program) -> list[str]: ...
    def gate(self, p: Program) -> CandidateGates: ...
    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None: ...
    def free(self, p: Program, name: str) -> bool: ...


@dataclass(frozen=True)
class Skips:
    """Skip connections `source -> target` for all pairs of blocks at least `min_gap` apart; see the function `skips`.

    Attributes:
        blocks: names of values in order, the input first.
        min_gap: smallest difference of the positions of source and target in `blocks`.
        seed: seed of the initial weights of projections.
    """

    blocks: tuple[str, ...]
    min_gap: int = 2
    seed: int = 0

    def names(self, p: Program) -> list[str]:
        ends = [(a, b) for i, a in enumerate(self.blocks) for b in self.blocks[i + self.min_gap :]]
        for name in self.blocks:
            spec = p.spec(name)
            if not spec.dtype.is_float or not spec.shape:
                raise UsageError("a block in skips(blocks) is not a float tensor with axes", where=name, got=spec)
        for a, b in ends:
            projection(p.spec(a), p.spec(b), f"{a} -> {b}")
        return [f"{a} -> {b}" for a, b in ends]

    def gate(self, p: Program) -> CandidateGates:
        names = self.names(p)
        into = Counter(name.split(" -> ")[1] for name in names)
        found: CandidateGates = {}
        with p.edit("candidate skips", author="gate") as e:
            for name in names:
                # each of k skips starts open by 1/(k+1), so that together they do not outweigh the block's own value
                z = -log(into[name.split(" -> ")[1]]) if self.free(p, name) else Z0
                found[name] = (e.gate(self._add(e, name), "sigmoid", init=z, cost="one"), 0)
        return found

    def compete(self, p: Program) -> CandidateGates:
        """Add all skips with gates; skips into one block are options of a choice, whose last option is "no skip"."""
        found: CandidateGates = {}
        with p.edit("competing skips", author="gate") as e:
            for target in self.blocks[self.min_gap :]:
                mine = [n for n in self.names(p) if n.endswith(f" -> {target}")]
                edges = [self._add(e, n) for n in mine]
                total = _junction(e, p.node(target))
                nothing = e.add("junction", p.node(target), name=p.free_name(f"{p.path(total)}.none"))
                e.cut(p.in_edges(nothing)[0])
                handle = e.gate([*edges, e.connect(nothing, total)], "choice", cost="one")
                found |= {n: (handle, i) for i, n in enumerate(mine)}
        return found

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        if wanted := [name for name in self.names(p) if name in chosen]:
            with p.edit(f"{len(wanted)} skips", author=author) as e:
                for name in wanted:
                    self._add(e, name)

    def free(self, p: Program, name: str) -> bool:
        source, target = name.split(" -> ")
        return p.spec(source).shape == p.spec(target).shape

    def _add(self, e: Transaction, name: str) -> Any:
        """Add the edge of a skip, with a projection before it if the shapes differ; return the edge."""
        p = e.program
        source, target = name.split(" -> ")
        total = _junction(e, p.node(target))
        value: Any = junction_of(p, p.node(source)) or p.node(source)
        if (made := projection(p.spec(source), p.spec(target), name)) is not None:
            base = f"{p.path(total)}.from_{source.replace('.', '_')}"
            rng = np.random.Generator(np.random.Philox(key=[self.seed, self.names(p).index(name)]))
            drawn = rng.uniform(-1, 1, made.weight) / np.sqrt(made.weight[1])
            weight = e.param(f"{base}.weight", drawn.astype(p.spec(source).dtype.numpy))
            value = e.add(made.op, value, weight, name=base, **made.attrs)
        return e.connect(value, total)

    def ends(self, p: Program, name: str) -> tuple[NodeId, NodeId | None]:
        """Return the source node and the target junction of a skip; the junction is None if it does not exist yet."""
        source, target = (p.node(part) for part in name.split(" -> "))
        return junction_of(p, source) or source, junction_of(p, target)

    def open(self, p: Program) -> None:
        """Insert a junction after each block that skips can enter, for the skips to connect to. Results stay equal."""
        with p.edit("junctions for skips", author="gate") as e:
            for name in self.names(p):
                _junction(e, p.node(name.split(" -> ")[1]))


class Projection(NamedTuple):
    """The op in a skip connection between different shapes: name of the op, shape of its weight, and attributes."""

    op: str
    weight: tuple[int, ...]
    attrs: dict[str, Any]


def projection(source: Spec, target: Spec, name: str) -> Projection | None:
    """Return the op that maps one shape to another; None if the shapes are equal.

    The op is a linear map if only the last axis differs. Else it is a convolution of kernel size 1 between images
    [batch, channels, size...], whose stride may reduce the sizes. Raises: UsageError if neither op fits.
    """
    a, b = source.shape, target.shape
    if a == b:
        return None
    fits = len(a) == len(b) > 1 and source.dtype is target.dtype and a[0] == b[0]
    if fits and a[:-1] == b[:-1] and isinstance(a[-1], int) and isinstance(b[-1], int):
        return Projection("linear", (b[-1], a[-1]), {})
    if fits and len(a) > 2 and isinstance(a[1], int) and isinstance(b[1], int):
        stride = tuple(map(_stride, a[2:], b[2:]))
        if all(stride):
            return Projection("conv", (b[1], a[1], *(1 for _ in stride)), {"stride": stride})
    raise UsageError("no projection can map the source's shape to the target's shape", where=name,
                     expected=target, got=source, fix="remove one of the two from `blocks`")  # fmt: skip


def _stride(before: Dim, after: Dim) -> int:
    """Return the stride that reduces size `before` to size `after`; 0 if no stride does."""
    if before == after:
        return 1
    if isinstance(before, str) or isinstance(after, str) or not after:
        return 0
    stride = -(-before // after)
    return stride if (before - 1) // stride + 1 == after else 0


def skips(blocks: Sequence[str], min_gap: int = 2, seed: int = 0) -> Skips:
    """Return candidates for all skips from a block i to a block j >= i + `min_gap`; they cannot form cycles.

    Args:
        blocks: names of values in order, the input first; the results of skips are added to the value of a block.
        seed: seed of the initial weights of projections, which connect different shapes.
    Raises: UsageError if there are too few blocks for `min_gap`, a block is listed twice, or `min_gap` is below 1.
    """
    if isinstance(blocks, str) or len(set(blocks)) != len(blocks) or len(blocks) <= min_gap or min_gap < 1:
        raise UsageError("`blocks` or `min_gap` is invalid for skips", got=f"blocks {blocks!r}, min_gap {min_gap}",
                         expected=f"a list of more than {min_gap} different blocks, min_gap >= 1")  # fmt: skip
    return Skips(tuple(blocks), min_gap, seed)


@dataclass(frozen=True)
class Ops:
    """Candidates named `path: op`: alternatives to the op at a path, of which one is chosen; see the function `ops`."""

    where: tuple[str, ...]
    options: tuple[str, ...]

    def names(self, p: Program) -> list[str]:
        return [f"{path}: {op}" for path in self.where for op in self.options]

    def gate(self, p: Program) -> CandidateGates:
        found: CandidateGates = {}
        with p.edit("candidate ops", author="gate") as e:
            for path in self.where:
                handle = e.gate(self._connect(e, path, self.options), "choice", cost="one")
                found |= {f"{path}: {op}": (handle, i) for i, op in enumerate(self.options)}
        return found

    def compete(self, p: Program) -> CandidateGates:
        """Add all ops with gates, as `gate` does: the alternative ops at a path are options of one choice."""
        return self.gate(p)

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        with p.edit("chosen ops", author=author) as e:
            for path in self.where:
                mine = [op for op in self.options if f"{path}: {op}" in chosen]
                if len(mine) != 1:
                    got = ", ".join(mine) or "none"
                    raise UsageError("not exactly one op is chosen for this path", where=path, expected="1 op", got=got)
                self._connect(e, path, mine)

    def free(self, p: Program, name: str) -> bool:
        return True

    def _connect(self, e: Transaction, path: str, options: Sequence[str]) -> list[EdgeId]:
        """Replace an op by a junction that sums the ops `options` of the same operand; return edges to the junction."""
        p = e.program
        node = p.node(path)
        total, value = e.add("junction", node, name=f"{path}.choice"), p.operands(node)[0]
        redirect(e, {Value(node): Value(total)})
        e.cut(p.in_edges(total)[0])
        return [e.connect(e.add(op, value, name=p.free_name(f"{path}.{op}")), total) for op in options]


def ops(where: str | Sequence[str], options: Sequence[str]) -> Ops:
    """Return candidates that replace each op in `where` by one of several unary ops; `copy` is the identity.

    Raises: UsageError for fewer than two options.
    """
    if len(set(options)) < 2:
        raise UsageError("fewer than two options are given", expected="two different ops", got=", ".join(options))
    return Ops((where,) if isinstance(where, str) else tuple(where), tuple(options))


@dataclass(frozen=True)
class UnitsOf:
    """Candidates named `axis[unit]`: units, of which at least `least` per axis are kept; see the function `widths`."""

    axes: tuple[str, ...]
    kind: str = "hard_concrete"
    least: int = 1

    def names(self, p: Program) -> list[str]:
        return [f"{name}[{i}]" for name in self.axes for i in range(p.axes()[name].size)]

    def gate(self, p: Program) -> CandidateGates:
        found: CandidateGates = {}
        with p.edit("candidate units", author="gate") as e:
            for name in self.axes:
                axis = p.axes()[name]
                (handle,) = e.gate(axis.units(), self.kind, cost="params")
                found |= {f"{name}[{i}]": (handle, i) for i in range(axis.size)}
        return found

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        with p.edit("chosen units", author=author) as e:
            for name in self.axes:
                axis = p.axes()[name]
                cut = [i for i in range(axis.size) if f"{name}[{i}]" not in chosen]
                if cut := cut[max(0, self.least - (axis.size - len(cut))) :]:
                    e.cut_units(axis.units(cut))

    def free(self, p: Program, name: str) -> bool:
        return False


def widths(*axes: str, least: int = 1) -> UnitsOf:
    """Return all units of axes such as `layers.0.attn.heads` as candidates; at least `least` per axis are kept."""
    return UnitsOf(tuple(axes), least=least)


heads = experts = widths


def junction_of(p: Program, node: NodeId) -> NodeId | None:
    """Return the junction to which skips into a block connect: `node`, or its reader `<path>.sum`; None if missing."""
    if p.is_junction(node):
        return node
    readers = [n for n in p.consumers(node) if p.is_junction(n) and p.path(n) == f"{p.path(node)}.sum"]
    return readers[0] if readers else None


def _junction(e: Transaction, node: NodeId) -> NodeId:
    """Return the junction to which skips into a block connect; if missing, insert one after the block's `node`."""
    total = junction_of(e.program, node)
    if total is None:
        total = e.add("junction", node, name=f"{e.program.path(node)}.sum")
        redirect(e, {Value(node): Value(total)})
    return total
