"""Candidates of a search: skips between blocks, alternative ops, units of axes.

A candidate is identified by its name. All candidates can be added with gates, to be trained; or chosen ones without
gates. Each is one edit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import Value
from graphwright.program.editing.replace import redirect

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.array.spec import Dim
    from graphwright.program import Program
    from graphwright.program.editing.transaction import Transaction

Z0 = 1.0
"""Initial logit of candidates with weights (open probability 0.73), whose weights learn the scale."""


CandidateGates = dict[str, tuple[NodeId, int]]
"""Name of a candidate -> handle of its gate, and number of its element."""


class Candidates(Protocol):
    """A set of candidates."""

    def names(self, p: Program) -> list[str]:
        """Names of all candidates, in a fixed order. Raises: UsageError if a candidate does not fit the program."""
        ...

    def gate(self, p: Program) -> CandidateGates:
        """Add all candidates with gates, in one edit of author `gate`; return their gates."""
        ...

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        """Add the chosen candidates without gates, in one edit."""
        ...

    def free(self, p: Program, name: str) -> bool:
        """Whether a candidate adds no parameters."""
        ...


@dataclass(frozen=True)
class Skips:
    """Skip connections; made by `skips`.

    Attributes:
        blocks: names of values in order, the input first.
        min_gap: smallest distance of the two ends.
        seed: of projections.
    """

    blocks: tuple[str, ...]
    min_gap: int = 2
    seed: int = 0

    def names(self, p: Program) -> list[str]:
        """`source -> target` for every pair far enough apart."""
        ends = [(a, b) for i, a in enumerate(self.blocks) for b in self.blocks[i + self.min_gap :]]
        for name in self.blocks:
            spec = p.spec(name)
            if not spec.dtype.is_float or not spec.shape:
                raise UsageError("a skip needs floating features", where=name, got=spec)
        for a, b in ends:
            projection(p.spec(a), p.spec(b), f"{a} -> {b}")
        return [f"{a} -> {b}" for a, b in ends]

    def gate(self, p: Program) -> CandidateGates:
        """See `Candidates`."""
        names = self.names(p)
        into = Counter(name.split(" -> ")[1] for name in names)
        with p.edit("candidate skips", author="gate") as e:
            found: CandidateGates = {}
            for name in names:
                # each of k skips starts open by 1/(k+1), so that together they do not outweigh the block's own value
                z = -log(into[name.split(" -> ")[1]]) if self.free(p, name) else Z0
                found[name] = (e.gate(self._add(e, name), "sigmoid", init=z, cost="one"), 0)
        return found

    def compete(self, p: Program) -> CandidateGates:
        """Add all skips; skips into one block share a choice, whose last option is no skip."""
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
        """See `Candidates`."""
        wanted = [name for name in self.names(p) if name in chosen]
        if wanted:
            with p.edit(f"{len(wanted)} skips", author=author) as e:
                for name in wanted:
                    self._add(e, name)

    def free(self, p: Program, name: str) -> bool:
        """Whether both ends have the same shape."""
        source, target = name.split(" -> ")
        return p.spec(source).shape == p.spec(target).shape

    def _add(self, e: Transaction, name: str) -> Any:
        """The edge of a skip, through a projection if the shapes differ."""
        p = e.program
        source, target = name.split(" -> ")
        total = _junction(e, p.node(target))
        value: Any = junction_of(p, p.node(source)) or p.node(source)
        made = projection(p.spec(source), p.spec(target), name)
        if made is not None:
            base = f"{p.path(total)}.from_{source.replace('.', '_')}"
            rng = np.random.Generator(np.random.Philox(key=[self.seed, self.names(p).index(name)]))
            drawn = rng.uniform(-1, 1, made.weight) / np.sqrt(made.weight[1])
            weight = e.param(f"{base}.weight", drawn.astype(p.spec(source).dtype.numpy))
            value = e.add(made.op, value, weight, name=base, **made.attrs)
        return e.connect(value, total)

    def ends(self, p: Program, name: str) -> tuple[NodeId, NodeId | None]:
        """Source of a skip, and the junction that it enters, if it exists."""
        source, target = (p.node(part) for part in name.split(" -> "))
        return junction_of(p, source) or source, junction_of(p, target)

    def open(self, p: Program) -> None:
        """Add the junctions that skips enter; the function stays the same."""
        with p.edit("junctions for skips", author="gate") as e:
            for name in self.names(p):
                _junction(e, p.node(name.split(" -> ")[1]))


class Projection(NamedTuple):
    """The op of a skip between different shapes: shape of its weight, and attributes."""

    op: str
    weight: tuple[int, ...]
    attrs: dict[str, Any]


def projection(source: Spec, target: Spec, name: str) -> Projection | None:
    """A projection between shapes: a linear map of the last axis or a convolution of kernel 1; None if they are equal.

    Shapes that differ in the last axis only are rows of features; others are images [batch, channels, size...], whose
    sizes a stride may reduce. Raises: UsageError if neither fits.
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
    raise UsageError("no projection exists between these shapes", where=name, expected=target, got=source,
                     fix="remove one of the two from the blocks, or give them one shape")  # fmt: skip


def _stride(before: Dim, after: Dim) -> int:
    """The stride that reduces an axis to a size; 0 if no stride does."""
    if before == after:
        return 1
    if isinstance(before, str) or isinstance(after, str) or not after:
        return 0
    stride = -(-before // after)
    return stride if (before - 1) // stride + 1 == after else 0


def skips(blocks: Sequence[str], min_gap: int = 2, seed: int = 0) -> Skips:
    """All skips i -> j with j >= i + `min_gap`; acyclic by construction.

    Args:
        blocks: names of values in order, the input first; skips enter the sum after a block's value.
        seed: of projections, which connect different widths.
    """
    if isinstance(blocks, str) or len(set(blocks)) != len(blocks) or len(blocks) <= min_gap or min_gap < 1:
        raise UsageError("skips need more blocks, or a smaller gap", got=f"blocks {blocks!r}, min_gap {min_gap}",
                         expected=f"a list of more than {min_gap} different blocks, min_gap >= 1")  # fmt: skip
    return Skips(tuple(blocks), min_gap, seed)


@dataclass(frozen=True)
class Ops:
    """Alternatives for some ops; made by `ops`."""

    where: tuple[str, ...]
    options: tuple[str, ...]

    def names(self, p: Program) -> list[str]:
        """`path: op`."""
        return [f"{path}: {op}" for path in self.where for op in self.options]

    def gate(self, p: Program) -> CandidateGates:
        """See `Candidates`."""
        found: CandidateGates = {}
        with p.edit("candidate ops", author="gate") as e:
            for path in self.where:
                total = self._total(e, path)
                value = p.operands(p.node(path))[0]
                edges = [e.connect(self._option(e, value, path, op), total) for op in self.options]
                handle = e.gate(edges, "choice", cost="one")
                found |= {f"{path}: {op}": (handle, i) for i, op in enumerate(self.options)}
        return found

    def compete(self, p: Program) -> CandidateGates:
        """The same as `gate`: alternatives always share a choice."""
        return self.gate(p)

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        """See `Candidates`. Raises: UsageError unless one op per path is chosen."""
        with p.edit("chosen ops", author=author) as e:
            for path in self.where:
                mine = [op for op in self.options if f"{path}: {op}" in chosen]
                if len(mine) != 1:
                    raise UsageError(
                        "exactly one op per path must be chosen", where=path, got=", ".join(mine) or "none"
                    )
                total = self._total(e, path)
                value = p.operands(p.node(path))[0]
                e.connect(self._option(e, value, path, mine[0]), total)

    def free(self, p: Program, name: str) -> bool:
        """Always true: these ops have no parameters."""
        return True

    def _option(self, e: Transaction, value: Value, path: str, op: str) -> NodeId:
        name = e.program.free_name(f"{path}.{op}")
        return e.add(op, value, name=name)

    def _total(self, e: Transaction, path: str) -> NodeId:
        """An empty junction that is read instead of the op."""
        p = e.program
        node = p.node(path)
        total = e.add("junction", node, name=f"{path}.choice")
        redirect(e, {Value(node): Value(total)})
        e.cut(p.in_edges(total)[0])
        return total


def ops(where: str | Sequence[str], options: Sequence[str]) -> Ops:
    """Alternatives among unary ops for each op of `where`; `copy` passes the value on.

    Raises: UsageError for fewer than two options.
    """
    if len(set(options)) < 2:
        raise UsageError("a choice needs several options", expected="two or more ops", got=", ".join(options))
    return Ops((where,) if isinstance(where, str) else tuple(where), tuple(options))


@dataclass(frozen=True)
class UnitsOf:
    """Units of axes; made by `widths`, `heads` and `experts`."""

    axes: tuple[str, ...]
    kind: str = "hard_concrete"
    least: int = 1

    def names(self, p: Program) -> list[str]:
        """`axis[unit]`."""
        return [f"{name}[{i}]" for name in self.axes for i in range(p.axes()[name].size)]

    def gate(self, p: Program) -> CandidateGates:
        """See `Candidates`."""
        found: CandidateGates = {}
        with p.edit("candidate units", author="gate") as e:
            for name in self.axes:
                size = p.axes()[name].size
                (handle,) = e.gate(p.axes()[name].units(), self.kind, cost="params")
                found |= {f"{name}[{i}]": (handle, i) for i in range(size)}
        return found

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        """See `Candidates`: cut units that are not chosen, but keep at least `least` per axis."""
        with p.edit("chosen units", author=author) as e:
            for name in self.axes:
                size = p.axes()[name].size
                cut = [i for i in range(size) if f"{name}[{i}]" not in chosen]
                cut = cut[max(0, self.least - (size - len(cut))) :]
                if cut:
                    e.cut_units(p.axes()[name].units(cut))

    def free(self, p: Program, name: str) -> bool:
        """Always false: units have weights."""
        return False


def widths(*axes: str, least: int = 1) -> UnitsOf:
    """Units of axes; at least `least` of each axis stay."""
    return UnitsOf(tuple(axes), least=least)


def heads(*axes: str) -> UnitsOf:
    """Attention heads, by the names of their axes: `layers.0.attn.heads`."""
    return UnitsOf(tuple(axes))


def experts(*axes: str) -> UnitsOf:
    """Experts, by the names of their axes."""
    return UnitsOf(tuple(axes))


def junction_of(p: Program, node: NodeId) -> NodeId | None:
    """The junction of a block's value: the node itself, or its `.sum`."""
    if p.is_junction(node):
        return node
    readers = [n for n in p.consumers(node) if p.is_junction(n) and p.path(n) == f"{p.path(node)}.sum"]
    return readers[0] if readers else None


def _junction(e: Transaction, node: NodeId) -> NodeId:
    """See `junction_of`; a missing junction is created, and read instead of the block's value."""
    p = e.program
    there = junction_of(p, node)
    if there is not None:
        return there
    total = e.add("junction", node, name=f"{p.path(node)}.sum")
    redirect(e, {Value(node): Value(total)})
    return total
