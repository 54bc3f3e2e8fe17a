"""What a search may add or leave out: skips between blocks, ops at a place, units of axes.

A candidate is known by its name. A set of candidates can be added to a program with gates, to be trained, or plainly,
as the structure that a set of chosen names stands for; each is one edit.
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
"""Where the logits of candidates with weights of their own begin: open by 0.73, as only these weights learn a scale."""


Places = dict[str, tuple[NodeId, int]]
"""Name of a candidate -> handle of its gate, and which element of it."""


class Candidates(Protocol):
    """Something to choose from."""

    def names(self, p: Program) -> list[str]:
        """All candidates on a program, in a fixed order. Raises: UsageError where they can't be."""
        ...

    def gate(self, p: Program) -> Places:
        """Add all of them, gated, by one edit of author `gate`; says which element of which gate each is."""
        ...

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        """Give a program without gates the structure that a set of names stands for, by one edit."""
        ...

    def free(self, p: Program, name: str) -> bool:
        """Whether a candidate adds no parameters."""
        ...


@dataclass(frozen=True)
class Skips:
    """Edges past blocks; made by `skips`.

    Attributes:
        blocks: names of values in order, the input first; min_gap: least distance of two ends.
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
                raise UsageError("a skip carries features", where=name, got=spec)
        for a, b in ends:
            projection(p.spec(a), p.spec(b), f"{a} -> {b}")
        return [f"{a} -> {b}" for a, b in ends]

    def gate(self, p: Program) -> Places:
        """See `Candidates`."""
        names = self.names(p)
        into = Counter(name.split(" -> ")[1] for name in names)
        with p.edit("candidate skips", author="gate") as e:
            found: Places = {}
            for name in names:
                # of k skips each is open by 1/(k+1): wide open, together they would drown the block's own value
                z = -log(into[name.split(" -> ")[1]]) if self.free(p, name) else Z0
                found[name] = (e.gate(self._add(e, name), "sigmoid", init=z, cost="one"), 0)
        return found

    def compete(self, p: Program) -> Places:
        """Add all of them; those into one block share a choice, whose last option is none of them."""
        found: Places = {}
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
        """Whether both ends are of one shape."""
        source, target = name.split(" -> ")
        return p.spec(source).shape == p.spec(target).shape

    def _add(self, e: Transaction, name: str) -> Any:
        """The edge of a skip, through a projection where the shapes differ."""
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
        """What a skip carries, and the junction that it enters, if there is one by now."""
        source, target = (p.node(part) for part in name.split(" -> "))
        return junction_of(p, source) or source, junction_of(p, target)

    def open(self, p: Program) -> None:
        """Give every end of a skip its junction; the function stays."""
        with p.edit("places for skips", author="gate") as e:
            for name in self.names(p):
                _junction(e, p.node(name.split(" -> ")[1]))


class Projection(NamedTuple):
    """The op of a skip between different shapes: its weight's shape and its attributes."""

    op: str
    weight: tuple[int, ...]
    attrs: dict[str, Any]


def projection(source: Spec, target: Spec, name: str) -> Projection | None:
    """What leads from one shape to another one: a linear over the last axis or a kernel-1 convolution; None if equal.

    Shapes of three axes and more that agree but in the last one are rows of features, all others images
    [batch, channels, places...], whose places a stride may thin out. Raises: UsageError where neither fits.
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
    raise UsageError("no projection leads from one shape to the other", where=name, expected=target, got=source,
                     fix="leave one of the two out of the blocks, or bring them to one shape")  # fmt: skip


def _stride(before: Dim, after: Dim) -> int:
    """Every which place of an axis leaves so many of it; 0 if none does."""
    if before == after:
        return 1
    if isinstance(before, str) or isinstance(after, str) or not after:
        return 0
    stride = -(-before // after)
    return stride if (before - 1) // stride + 1 == after else 0


def skips(blocks: Sequence[str], min_gap: int = 2, seed: int = 0) -> Skips:
    """All edges i -> j with j at least `min_gap` behind i; acyclic by construction.

    Args:
        blocks: names of values in order, the input first; skips enter the sum behind a block's value.
        seed: of projections, which stand where two widths differ.
    """
    if isinstance(blocks, str) or len(set(blocks)) != len(blocks) or len(blocks) <= min_gap or min_gap < 1:
        raise UsageError("skips lead past something", got=f"blocks {blocks!r}, min_gap {min_gap}",
                         expected=f"a list of more than {min_gap} different blocks, min_gap >= 1")  # fmt: skip
    return Skips(tuple(blocks), min_gap, seed)


@dataclass(frozen=True)
class Ops:
    """One of several ops at each of some places; made by `ops`."""

    where: tuple[str, ...]
    options: tuple[str, ...]

    def names(self, p: Program) -> list[str]:
        """`place: op`."""
        return [f"{place}: {op}" for place in self.where for op in self.options]

    def gate(self, p: Program) -> Places:
        """See `Candidates`."""
        found: Places = {}
        with p.edit("candidate ops", author="gate") as e:
            for place in self.where:
                total = self._total(e, place)
                value = p.operands(p.node(place))[0]
                edges = [e.connect(self._option(e, value, place, op), total) for op in self.options]
                handle = e.gate(edges, "choice", cost="one")
                found |= {f"{place}: {op}": (handle, i) for i, op in enumerate(self.options)}
        return found

    def compete(self, p: Program) -> Places:
        """As `gate`: ops of one place share a choice anyway."""
        return self.gate(p)

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        """See `Candidates`. Raises: UsageError for a place with none or several."""
        with p.edit("chosen ops", author=author) as e:
            for place in self.where:
                mine = [op for op in self.options if f"{place}: {op}" in chosen]
                if len(mine) != 1:
                    raise UsageError("one op per place", where=place, got=", ".join(mine) or "none")
                total = self._total(e, place)
                value = p.operands(p.node(place))[0]
                e.connect(self._option(e, value, place, mine[0]), total)

    def free(self, p: Program, name: str) -> bool:
        """Ops here have no parameters."""
        return True

    def _option(self, e: Transaction, value: Value, place: str, op: str) -> NodeId:
        name = e.program.free_name(f"{place}.{op}")
        return e.add(op, value, name=name)

    def _total(self, e: Transaction, place: str) -> NodeId:
        """An empty junction that is read in place of the op."""
        p = e.program
        node = p.node(place)
        total = e.add("junction", node, name=f"{place}.choice")
        redirect(e, {Value(node): Value(total)})
        e.cut(p.in_edges(total)[0])
        return total


def ops(where: str | Sequence[str], options: Sequence[str]) -> Ops:
    """One of several unary ops in place of each op of `where`; `copy` passes the value on.

    Raises: UsageError for fewer than two options.
    """
    if len(set(options)) < 2:
        raise UsageError("a choice is between options", expected="two or more ops", got=", ".join(options))
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

    def gate(self, p: Program) -> Places:
        """See `Candidates`."""
        found: Places = {}
        with p.edit("candidate units", author="gate") as e:
            for name in self.axes:
                size = p.axes()[name].size
                (handle,) = e.gate(p.axes()[name].units(), self.kind, cost="params")
                found |= {f"{name}[{i}]": (handle, i) for i in range(size)}
        return found

    def build(self, p: Program, chosen: Collection[str], author: str = "gate") -> None:
        """See `Candidates`: units that are not chosen are cut, but for the first `least` of an axis."""
        with p.edit("chosen units", author=author) as e:
            for name in self.axes:
                size = p.axes()[name].size
                gone = [i for i in range(size) if f"{name}[{i}]" not in chosen]
                gone = gone[max(0, self.least - (size - len(gone))) :]
                if gone:
                    e.cut_units(p.axes()[name].units(gone))

    def free(self, p: Program, name: str) -> bool:
        """A unit has weights."""
        return False


def widths(*axes: str, least: int = 1) -> UnitsOf:
    """Units of axes, at least `least` of each stay."""
    return UnitsOf(tuple(axes), least=least)


def heads(*axes: str) -> UnitsOf:
    """Attention heads, by the names of their axes: `layers.0.attn.heads`."""
    return UnitsOf(tuple(axes))


def experts(*axes: str) -> UnitsOf:
    """Experts, by the names of their axes."""
    return UnitsOf(tuple(axes))


def junction_of(p: Program, node: NodeId) -> NodeId | None:
    """The junction that holds a block's value: itself, or the one that alone reads it."""
    if p.is_junction(node):
        return node
    readers = [n for n in p.consumers(node) if p.is_junction(n) and p.path(n) == f"{p.path(node)}.sum"]
    return readers[0] if readers else None


def _junction(e: Transaction, node: NodeId) -> NodeId:
    """See `junction_of`; a new one is read in place of the block's value."""
    p = e.program
    there = junction_of(p, node)
    if there is not None:
        return there
    total = e.add("junction", node, name=f"{p.path(node)}.sum")
    redirect(e, {Value(node): Value(total)})
    return total
