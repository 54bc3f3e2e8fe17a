"""Units: a selection of heads, neurons, channels, experts or layers, to count, show, cut or gate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import get
from graphwright.program import errors
from graphwright.program.editing.replace import boundary, redirect
from graphwright.program.gates import GateOptions
from graphwright.program.kinds import KINDS, STORED
from graphwright.report import listed, wrapped
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.gates import GateKeywords
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection


@dataclass(frozen=True, slots=True, repr=False)
class Units:
    """A selection of units of axes, given by axis name, and of layers, given by the path of their list (`layers`)."""

    program: Program
    chosen: Mapping[str, tuple[int, ...]]  # axis or list of layers -> indices of the chosen units, ascending
    sizes: Mapping[str, int]  # axis or list of layers -> number of all its units

    @staticmethod
    def of(p: Program, groups: Iterable[AxisGroup]) -> Units:
        """Return a selection of all units of the given axes."""
        sizes = {group.name: group.size for group in groups}
        return Units(p, {name: tuple(range(n)) for name, n in sizes.items()}, sizes)

    @staticmethod
    def within(selection: Selection, kind: str) -> Units:
        """Return the units of one kind that selected nodes produce; if they produce none, the units that they read.

        A selected weight produces the units of an axis if not all its readers sum over the axis, else it reads them.
        """
        selection.names()  # raises StaleSelection
        p, inside = selection.program, set(selection.nodes)
        found = [g for g in p.axes().values() if kind in g.kinds]
        weights = {g.name: [m for m in g.members if m.key is not None and m.value.node in inside] for g in found}
        summed = p.axes().summed
        made = [g for g in found
                if any(not summed.get((m.value.node, m.dim, a)) for m in weights[g.name] for a in g.atoms)]  # fmt: skip
        return Units.of(p, made or [g for g in found if weights[g.name]])

    # -- looking -----------------------------------------------------------------------------------------------------
    @property
    def count(self) -> int:
        """Number of selected units of all axes."""
        return sum(map(len, self.chosen.values()))

    def names(self) -> list[str]:
        """Return a name for each unit, such as `layers.0.attn.heads[3]`."""
        return [f"{name}[{i}]" for name, ids in self.chosen.items() for i in ids]

    def show(self) -> Units:
        """Print the selected units, one line per axis; return self."""
        print(self)  # the one method whose job is to print
        return self

    def assert_count(self, n: int) -> Units:
        """Return self if `n` units are selected. Raises: CountMismatch otherwise."""
        if self.count != n:
            got = f"{self.count}: {self.names()[:10]}"
            raise errors.CountMismatch("unexpected number of selected units", expected=n, got=got)
        return self

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, i) for name, ids in self.chosen.items() for i in ids)

    def __str__(self) -> str:
        width = max(map(len, self.chosen), default=0)
        lines = [f"{name:<{width}}  {len(ids):>6} of {self.sizes[name]:<6} {runs(ids)[:60]}"
                 for name, ids in self.chosen.items()]  # fmt: skip
        return wrapped("\n".join(listed(lines, "more axes"))) or "(no units)"

    def __repr__(self) -> str:
        few = ", ".join(list(self.chosen)[:3]) + (", ..." if len(self.chosen) > 3 else "")
        return f"Units({self.count} of {self.program.name!r}{': ' + few if few else ''})"

    # -- choosing ----------------------------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Units:
        """Select some of the units of each axis by an int, several ints, a slice or a mask. Raises: UnitRange."""
        chosen = {name: tuple(ids[i] for i in numbers(index, len(ids), name)) for name, ids in self.chosen.items()}
        return Units(self.program, chosen, self.sizes)

    def __or__(self, other: Units) -> Units:
        return self._with(other, lambda a, b: a | b)

    def __and__(self, other: Units) -> Units:
        return self._with(other, lambda a, b: a & b)

    def __sub__(self, other: Units) -> Units:
        return self._with(other, lambda a, b: a - b)

    def __invert__(self) -> Units:
        """Return the units of the same axes that are not in this selection."""
        whole = {name: tuple(range(n)) for name, n in self.sizes.items()}
        return Units(self.program, whole, self.sizes) - self

    def _with(self, other: Units, combine: Any) -> Units:
        if not isinstance(other, Units) or other.program is not self.program:
            what = "units of different programs" if isinstance(other, Units) else "units with an object of another type"
            raise errors.ForeignNode(f"cannot combine {what}", where=repr(self), got=repr(other)[:120])
        sizes = {**self.sizes, **other.sizes}
        chosen = {n: combine(set(self.chosen.get(n, ())), set(other.chosen.get(n, ()))) for n in sizes}
        return Units(self.program, {n: tuple(sorted(ids)) for n, ids in chosen.items()}, sizes)

    # -- edits -------------------------------------------------------------------------------------------------------
    def edit(self, why: str, *, allow_empty: bool = False) -> Transaction:
        """Open an edit of the program. Raises: EmptySelection if no unit is selected, unless `allow_empty`."""
        self.check_nonempty(allow_empty)
        return self.program.edit(why)

    def prune(
        self,
        *,
        keep: Any = None,
        drop: Any = None,
        why: str | None = None,
        ragged: bool = False,
        allow_empty: bool = False,
    ) -> Units:
        """Cut units in one edit; return the units that were cut.

        Args:
            keep: which of the selected units to keep: an int, several ints, a slice or a mask.
            drop: which of the selected units to cut. Without `keep` and `drop`, all selected units are cut.
            why: reason for the edit, written to the journal.
            ragged: allow key heads with unequal numbers of query heads.
            allow_empty: do nothing, instead of raising EmptySelection, if there are no units to cut.
        Raises: EmptySelection; UsageError if both `keep` and `drop` are given; the errors of `Transaction.cut_units`.
        """
        if keep is not None and drop is not None:
            raise UsageError("both keep and drop are given", expected="only one of keep and drop")
        gone = self if drop is None else self[drop]
        if keep is not None:
            gone = self - self[keep]
        gone.check_nonempty(allow_empty)
        if gone.count:
            with self.program.edit(why or f"prune {gone.count} of {', '.join(list(gone.chosen)[:3])}") as e:
                e.cut_units(gone, ragged=ragged)
        return gone

    @keywords(GateOptions)
    def gate(
        self, kind: str = "hard_concrete", *, why: str | None = None, **options: Unpack[GateKeywords]
    ) -> tuple[NodeId, ...]:
        """Gate the units of whole axes, or layers, in one edit; see `Transaction.gate`. Return the gates' handles."""
        self.check_nonempty()
        with self.program.edit(why or f"gates on {', '.join(list(self.chosen)[:3])}") as e:
            return e.gate(self, kind, **options)

    def check_nonempty(self, allow_empty: bool = False) -> None:
        """Raise EmptySelection if no unit is selected and `allow_empty` is False."""
        if not self.count and not allow_empty:
            known = ", ".join(list(self.sizes or self.program.axes())[:6])
            raise errors.EmptySelection("no units are selected", where=self.program.name, expected=f"units of {known}")


def numbers(index: Any, count: int, name: str) -> tuple[int, ...]:
    """Return the sorted indices that an int, several ints, a slice or a mask selects of `count` units; `name`: axis."""
    if isinstance(index, slice):
        return tuple(sorted(range(count)[index]))
    expected = "an int, several ints, a slice or a mask"
    unsupported = UsageError("invalid index of units", where=name, expected=expected, got=index)
    if isinstance(index, bool) or not isinstance(index, int | np.integer | Sequence | np.ndarray | set | frozenset):
        raise unsupported
    given = np.asarray(sorted(index) if isinstance(index, set | frozenset | range) else index)
    if given.dtype == np.bool_:
        if given.shape != (count,):
            raise errors.UnitRange("the mask does not have one entry per unit", where=name, expected=(count,),
                                   got=given.shape)  # fmt: skip
        return tuple(int(i) for i in np.flatnonzero(given))
    if given.size and given.dtype.kind not in "iu":
        raise unsupported
    flat = given.reshape(-1).astype(np.int64)
    if ((flat < -count) | (flat >= count)).any():
        raise errors.UnitRange("unit index out of range", where=name, expected=f"{-count} <= index < {count}",
                               got=index)  # fmt: skip
    return tuple(sorted({int(i) % count for i in flat}))


def runs(indices: Sequence[int]) -> str:
    """Format unit indices as text, such as `0-4 6 8-9`. Three indices -1 in a row (new units) become `+3`."""
    parts: list[str] = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0] if pair[1] >= 0 else None):
        numbers = [number for _, number in run]
        first, last = numbers[0], numbers[-1]
        parts.append(f"+{len(numbers)}" if first < 0 else f"{first}" if first == last else f"{first}-{last}")
    return " ".join(parts)


def parsed(form: str, limit: int = 1 << 24) -> tuple[int, ...]:
    """Parse the indices that `runs` formats. Raises: ValueError if the text is invalid or has over `limit` indices."""
    found: list[int] = []
    for part in form.split():
        match = re.fullmatch(r"(\+?)([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        new, first, last = match.groups() if match else ("", "1", "0")
        low, high = int(first), int(last or first)
        count = low if new else high - low + 1
        if count < 1 or (new and last) or len(found) + count > limit:
            raise ValueError(f"invalid list of indices: {form[:80]}")
        found += [-1] * count if new else range(low, high + 1)
    return tuple(found)


def layers(p: Program, nodes: Iterable[NodeId] | None = None) -> dict[str, list[int]]:
    """Return {path of a module list: sorted module numbers}; only modules that contain one of `nodes`, if given.

    Lists within modules count where most modules of the outer list cannot be removed, as in the stages of a ResNet.
    """
    within = frozenset(p.nodes() if nodes is None else nodes)
    found: dict[str, list[int]] = {}
    for prefix, modules in _lists(p, _modules(p, p.nodes())).items():
        if numbers := sorted(k for k, members in modules.items() if not within.isdisjoint(members)):
            found[prefix] = numbers
    return dict(sorted(found.items()))


def _lists(p: Program, found: dict[str, dict[int, list[NodeId]]]) -> dict[str, dict[int, list[NodeId]]]:
    """Return lists of modules; where fewer than half of the modules of a list are removable, the lists within them.

    A list stays if none of the lists within has a removable module.
    """
    made: dict[str, dict[int, list[NodeId]]] = {}
    for prefix, modules in found.items():
        inner: dict[str, dict[int, list[NodeId]]] = {}
        if 2 * sum(_removable(p, members) for members in modules.values()) < len(modules):
            for members in modules.values():
                inner |= _lists(p, _modules(p, members, prefix.count(".") + 1))
        removable = any(_removable(p, members) for rows in inner.values() for members in rows.values())
        made |= inner if removable else {prefix: modules}
    return made


def _modules(p: Program, nodes: Iterable[NodeId], skip: int = 0) -> dict[str, dict[int, list[NodeId]]]:
    """Return a dict from module list path to a dict from module number to the nodes of the module.

    Of each path the first number counts whose index is above `skip`.
    """
    found: dict[str, dict[int, list[NodeId]]] = {}
    for node in nodes:
        segments = p.path(node).split(".")
        at = next((i for i, s in enumerate(segments) if i > skip and s.isascii() and s.isdigit()), None)
        if at is not None:
            found.setdefault(".".join(segments[:at]), {}).setdefault(int(segments[at]), []).append(node)
    return found


def _removable(p: Program, nodes: Sequence[NodeId]) -> bool:
    """Return True if a residual path leads around the nodes of a module, to each of its results."""
    ops = [n for n in nodes if p.op(n) not in STORED]
    try:
        leaves = boundary(p, ops)[1]
    except errors.NotConvex:
        return False
    return bool(leaves) and all(_around(p, value, set(ops)) is not None for value in leaves)


def remove_layers(e: Transaction, prefix: str, ids: Sequence[int], count: int) -> None:
    """Remove the layers `ids` of the list `prefix` in an open edit; `count` is the expected length of the list.

    Raises: StaleSelection if the list has a different length; EmptyAxis if all layers would be removed; FrozenAxis if a
    layer has no residual path around it.
    """
    chosen = _chosen(e.program, prefix, ids, count)
    if len(ids) == count:
        raise errors.EmptyAxis("cannot remove all layers", where=prefix, got=f"all {count}")
    for number, nodes in chosen:
        _remove(e, nodes, f"{prefix}.{number}")


def _chosen(p: Program, prefix: str, ids: Sequence[int], count: int) -> list[tuple[int, list[NodeId]]]:
    """Return (number, nodes) of the layers at indices `ids`. Raises: StaleSelection if there are not `count` layers."""
    numbers = [i for i, part in enumerate(prefix.split(".")) if i and part.isdecimal()]  # of modules around the list
    inside = _modules(p, p.with_prefix(f"{prefix}."), numbers[-1] if numbers else 0).get(prefix, {})
    if len(inside) != count:
        if not inside:
            raise errors.StaleSelection("no axis or list of layers has this name", where=prefix, fix="select again")
        raise errors.StaleSelection("the number of layers has changed since they were selected", where=prefix,
                                    expected=count, got=len(inside))  # fmt: skip
    numbers = sorted(inside)
    return [(numbers[i], inside[numbers[i]]) for i in ids]


def branches(p: Program, prefix: str, ids: Sequence[int], count: int) -> list[tuple[int, list[EdgeId]]]:
    """Return (number, edges) of the layers `ids` of a list: the edges by which their branches enter the residual path.

    If these edges are cut, the output of a layer equals its input. `prefix`: path of the list, `count`: its expected
    length. Raises: StaleSelection; FrozenAxis if a layer has no residual path around it.
    """
    found = []
    for number, nodes in _chosen(p, prefix, ids, count):
        inside = {n for n in nodes if p.op(n) not in STORED}
        _, leaves = boundary(p, sorted(inside, key=p.order_labels.key))
        edges: dict[EdgeId, None] = {}
        for value in leaves:
            before = entering(p, value, inside)
            if before is None:
                raise errors.FrozenAxis("the layer has no residual path around it", where=f"{prefix}.{number}",
                                 got=f"no residual path to {p.path(value)}")  # fmt: skip
            _onto(p, value, before, inside, edges)
        found.append((number, list(edges)))
    return found


def _onto(p: Program, value: Value, before: Value, inside: set[NodeId], edges: dict[EdgeId, None]) -> bool:
    """Return True if `value` is `before` or a sum that contains it; add the edges of the other terms to `edges`."""
    if value == before:
        return True
    if value.node not in inside or not _sums(p, value.node):
        return False
    on = {edge: _onto(p, p.edge_value(edge), before, inside, edges) for edge in p.in_edges(value.node)}
    if any(on.values()):
        edges |= dict.fromkeys(edge for edge, there in on.items() if not there)
    return any(on.values())


def _remove(e: Transaction, nodes: list[NodeId], where: str) -> None:
    p = e.program
    ops, weights = ([n for n in nodes if (p.op(n) in STORED) == kind] for kind in (False, True))
    inside = set(ops)
    _, leaves = boundary(p, ops)
    around = {value: _around(p, value, inside) for value in leaves}
    lost = [v for v, before in around.items() if before is None]
    if lost or not around:
        path = ", ".join(p.path(v) for v in lost)
        got = f"no residual path to {path}" if lost else "no result of the layer is read"
        raise errors.FrozenAxis("the layer has no residual path around it", where=where, got=got)
    redirect(e, {value: before for value, before in around.items() if before is not None}, skip=ops)
    e.remove(sorted(ops, key=p.order_labels.key, reverse=True))
    e.remove([n for n in weights if not p.graph.out_degree(n)])


def _around(p: Program, value: Value, inside: set[NodeId]) -> Value | None:
    """Return the value that takes the role of a layer's result `value` without the layer; None if no value does.

    It is the one that enters the residual path, also where a norm or an activation follows the addition, as in BERT and
    ResNet.
    """
    return entering(p, value, inside) or entering(p, value, inside, after_sums=True)


def entering(p: Program, value: Value, inside: set[NodeId], after_sums: bool = False) -> Value | None:
    """Return the value from outside the layer that reaches `value` through sums alone; None if none or several do.

    `after_sums` also allows norms and activations after the sums.
    """
    stack, found = [(value, not after_sums)], set()
    while stack:
        here, summed = stack.pop()
        if here.node not in inside:
            same = p.spec(here) == p.spec(value) and p.op(here.node) not in STORED
            found |= {here} if same and summed else set()
        elif _sums(p, here.node):
            stack += [(v, True) for v in p.operands(here.node)]
        elif after_sums and _keeps_meaning(p, here.node):
            stack.append((p.operands(here.node)[0], summed))
    return found.pop() if len(found) == 1 else None


def _keeps_meaning(p: Program, node: NodeId) -> bool:
    """Return True for a norm, and for an elementwise op of one operand."""
    if p.op(node) in KINDS:
        return False
    traits = get(p.op(node)).traits
    return traits.normalises or (traits.elementwise and len(p.operands(node)) == 1)


def _sums(p: Program, node: NodeId) -> bool:
    return p.op(node) not in KINDS and (p.is_junction(node) or get(p.op(node)).traits.sums)
