"""DivideAxes and GatherAxes: each rank keeps its share of the units of some axes, and the ranks join them again.

The journal's record of the edit is equal on all ranks, though what remains differs. Neither edit holds an array:
dividing slices the weights, and gathering, which undoes it, collects the present values of all ranks. So undoing a
division is a collective, which every rank must reach. Moments of optimizers are joined when the optimizer next uses
them, which is another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import Device, NDArray, empty, from_numpy
from graphwright.array.world import WrongWorld, divide_ranks, world
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops.axes import Atom, Concatenation, Product, Term, spread
from graphwright.program.axes.resize import ResizeAxis, ResizedWeight, resize
from graphwright.program.editing import fields as f
from graphwright.program.editing.edits import Annotation, Edit, RecordReader, SetWeight
from graphwright.program.editing.fields import each
from graphwright.program.errors import ReplayConflict
from graphwright.program.files import forms
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.program.axes.axes import Axes
    from graphwright.program.editing.journal import Entry
    from graphwright.program.program import Program


DIVIDED = "divided"
"""Attribute of the nodes of weights that are divided: pairs (dimension, its entries on each rank)."""


class Share(NamedTuple):
    """How the units of an axis are divided: the name of the axis, and the number of units of each rank, in order."""

    axis: str
    units: tuple[int, ...]

    def of(self, part: int) -> range:
        """Return the units of a part, of all units."""
        ends = list(accumulate(self.units, initial=0))
        return range(ends[part], ends[part + 1])

    def check(self) -> None:
        """Raise WrongWorld if the run divides models among another number of ranks."""
        if len(self.units) != world().parts:
            raise WrongWorld("the units are divided among another number of ranks than models of the run are",
                             where=self.axis, expected=f"{world().parts} ranks",
                             got=f"{len(self.units)} shares")  # fmt: skip


class DividedWeight(NamedTuple):
    """A weight along divided axes: its key, and per divided dimension the indices of each rank, in order."""

    key: str
    dims: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]

    def shape(self, array: NDArray, part: int) -> tuple[int, ...]:
        """Return the shape of a part, given the array of this one."""
        sizes = dict(enumerate(array.shape)) | {dim: len(parts[part]) for dim, parts in self.dims}
        return tuple(sizes.values())

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole weight, given that of a part."""
        sizes = dict(enumerate(shape)) | {dim: sum(map(len, parts)) for dim, parts in self.dims}
        return tuple(sizes.values())

    def part(self, array: NDArray, number: int) -> NDArray:
        """Return a part of the whole weight, or of a moment of it."""
        return part_of(array, {dim: np.asarray(parts[number], np.int64) for dim, parts in self.dims})


_UNITS = each(f.plain(forms.integer, 0, 1 << 40))
_DIM = f.plain(forms.integer, 0, forms.MAX_RANK)
_ATTRS = each(f.row(f.NODE, f.ATTRS))


@dataclass(frozen=True, slots=True)
class _OfShares(Edit):
    packed = {
        "shares": each(f.row(f.TEXT, _UNITS, make=Share)),
        "weights": each(f.row(f.TEXT, each(f.row(_DIM, each(f.INDICES))), make=DividedWeight)),
        "whole": _ATTRS,
        "local": _ATTRS,
        "structure": f.TEXT,
    }
    shares: tuple[Share, ...]
    weights: tuple[DividedWeight, ...]
    whole: tuple[tuple[NodeId, Mapping[str, Any]], ...]  # attributes with the sizes of the whole axes
    local: tuple[tuple[NodeId, Mapping[str, Any]], ...]  # attributes with those of this rank
    structure: str  # hash of the structure of the whole program

    @property
    def written(self) -> tuple[str, ...]:
        return tuple(w.key for w in self.weights)

    def replaced(self, p: Program) -> tuple[str, ...]:
        return ()

    def check(self, p: Program) -> None:
        for share in self.shares:
            share.check()

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return self._resized(p, {}).touches(p)

    def _resized(self, p: Program, arrays: Mapping[str, ResizedWeight]) -> ResizeAxis:
        """Return the edit that sets arrays, by key, and the attributes that this edit leaves."""
        given = [arrays.get(w.key) or ResizedWeight(w.key, p.weights.array(w.key), ()) for w in self.weights]
        return ResizeAxis((), tuple(given), self.left, correct=False)

    @property
    def left(self) -> tuple[tuple[NodeId, Mapping[str, Any]], ...]:
        """The attributes that the edit leaves."""
        raise NotImplementedError

    def to_json(self, p: Program) -> dict[str, Any]:
        shares = [[share.axis, list(share.units)] for share in self.shares]
        return {"edit": type(self).__name__, "shares": shares, "keys": [w.key for w in self.weights],
                "structure": self.structure}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DivideAxes(_OfShares):
    """Keep this rank's share of the units of axes; the other units are on other ranks."""

    @property
    def left(self) -> tuple[tuple[NodeId, Mapping[str, Any]], ...]:
        return self.local

    def invert(self, p: Program) -> GatherAxes:
        return GatherAxes(self.shares, self.weights, self.whole, self.local, self.structure)

    def apply(self, p: Program) -> None:
        own, made = world().part, {}
        for w in self.weights:
            array = p.weights.array(w.key)
            changed = {dim: np.asarray(parts[own], np.int64) for dim, parts in w.dims}
            part = part_of(array, changed)
            p.weights.refer_slice(part, array, changed)
            made[w.key] = ResizedWeight(w.key, part, tuple((dim, parts[own]) for dim, parts in w.dims))
        joins = {w.key: partial(_joined_state, w, p.weights.array(w.key).device) for w in self.weights}
        self._resized(p, made).apply(p, joins)

    @classmethod
    def read(cls, r: RecordReader, record: Mapping[str, Any]) -> DivideAxes:
        """Return the recorded edit for this rank."""
        shares = [Share(*row) for row in _shares(record)]
        return divided(r.program, shares, forms.text(record["structure"], "structure"))


@dataclass(frozen=True, slots=True)
class GatherAxes(_OfShares):
    """Join the shares of all ranks again. Raises: RankLost, with the program unchanged."""

    @property
    def left(self) -> tuple[tuple[NodeId, Mapping[str, Any]], ...]:
        return self.whole

    def invert(self, p: Program) -> DivideAxes:
        return DivideAxes(self.shares, self.weights, self.whole, self.local, self.structure)

    def apply(self, p: Program) -> None:
        made = {w.key: ResizedWeight(w.key, joined(w, p.weights.array(w.key)), self._own(w)) for w in self.weights}
        self._resized(p, made).apply(p)

    def _own(self, w: DividedWeight) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return per dimension for each new index the index in this rank's part, or -1."""
        found = []
        for dim, parts in w.dims:
            old = np.full(sum(map(len, parts)), -1, np.int64)
            own = parts[world().part]
            old[list(own)] = np.arange(len(own))
            found.append((dim, tuple(old.tolist())))
        return tuple(found)

    @classmethod
    def read(cls, r: RecordReader, record: Mapping[str, Any]) -> GatherAxes:
        """Raise ReplayConflict: a record does not say which entries the other ranks have."""
        raise ReplayConflict("an edit that gathers divided units cannot be replayed", got=record.get("shares"),
                             fix="undo the division instead")  # fmt: skip


def part_of(array: NDArray, changed: Mapping[int, np.ndarray]) -> NDArray:
    """Return the entries of `changed`, dimension -> indices.

    Consecutive rows of a mapped file stay mapped: the other rows are never read.
    """
    rows = changed.get(0)
    consecutive = rows is not None and len(changed) == 1 and bool((np.diff(rows) == 1).all())
    if rows is not None and consecutive and array.storage.kind == "mapped" and array.contiguous:
        stride = array.strides[0]
        shape = (len(rows), *array.shape[1:])
        return NDArray(array.storage, array.dtype, shape, array.strides, array.offset + int(rows[0]) * stride)
    host = array.to_numpy(bits=True)
    for dim, old in changed.items():
        host = np.take(host, old, axis=dim)
    part = from_numpy(np.ascontiguousarray(host), bits=array.dtype)
    return part if part.device == array.device else part.to(array.device)


def joined(w: DividedWeight, array: NDArray) -> NDArray:
    """Return the whole weight, of the parts of all ranks of a copy, which call it together. Raises: RankLost."""
    whole = assembled(w, array, keep=True)
    assert whole is not None
    return whole if whole.device == array.device else whole.to(array.device)


def assembled(w: DividedWeight, array: NDArray, *, keep: bool) -> NDArray | None:
    """Return the whole weight on the host, or None without `keep`, which sends this rank's part alone.

    All ranks of a copy call it. Raises: RankLost.
    """
    here, own = world(), dict(w.dims)
    whole = np.empty(w.whole_shape(array.shape), array.to_numpy(bits=True).dtype) if keep else None
    for number in range(here.parts):
        part = array.copy() if number == here.part else empty(w.shape(array, number), array.dtype, array.device)
        if here.model is not None:
            here.model.broadcast(part.impl, number, f"gathering {w.key}").wait()
        if whole is not None:
            index = [np.asarray(own[d][number]) if d in own else np.arange(n) for d, n in enumerate(array.shape)]
            whole[np.ix_(*index)] = part.to_numpy(bits=True)
    return None if whole is None else from_numpy(whole, bits=array.dtype)


def _joined_state(w: DividedWeight, device: Device, part: np.ndarray) -> np.ndarray:
    """Return a whole moment of a weight, of the parts of all ranks."""
    return joined(w, from_numpy(part).to(device)).to_numpy()


def divided(p: Program, shares: Sequence[Share], structure: str) -> DivideAxes:
    """Return the edit that keeps this rank's share of axes of a program in its present state; all ranks call it.

    Args:
        structure: hash of the structure of the program before any edit of the division.
    Raises: UsageError if shares are not all units of an axis, or cannot be divided; WrongWorld; the errors of `resize`.
    """
    found, here = p.axes(), divide_ranks(len(shares[0].units)) if shares else world()
    for share in shares:
        group = found[share.axis]
        share.check()
        if group.size != sum(share.units) or min(share.units) < 1:
            raise UsageError("the shares are not all units of the axis, at least one a rank", where=share.axis,
                             expected=group.size, got=" + ".join(map(str, share.units)))  # fmt: skip
    along = {found[share.axis].atoms[0]: share.axis for share in shares}
    for atom, axis in along.items():
        if why := obstacle(found, atom, along):
            raise UsageError("the units of the axis cannot be divided", where=axis, got=why)
    maps = [{found[s.axis].atoms[0]: np.asarray(s.of(part)) for s in shares} for part in range(here.parts)]
    mine = resize(found, {s.axis: s.of(here.part) for s in shares}, correct=False)
    weights = []
    for w in mine.weights:
        terms = found.weights[w.key]
        dims = [(dim, tuple(tuple(spread(terms[dim], m).tolist()) for m in maps)) for dim, _ in w.dims]
        weights.append(DividedWeight(w.key, tuple(dims)))
    marks = {w.key: tuple((dim, tuple(map(len, parts))) for dim, parts in w.dims) for w in weights}
    stored = [(n, marks[p.key(n)]) for kind in sorted(STORED) for n in p.of_kind(kind) if p.key(n) in marks]
    local = (*mine.attrs, *((node, {**p.attrs(node), DIVIDED: mark}) for node, mark in stored))
    whole = tuple((node, dict(p.attrs(node))) for node, _ in local)
    return DivideAxes(tuple(shares), tuple(weights), whole, local, structure)


def obstacle(found: Axes, atom: Atom, others: Collection[Atom] = ()) -> str:
    """Return why the units of an axis, besides those of `others`, cannot be divided among ranks, or "" if they can.

    Each entry of a weight must be on one rank, and a value must depend on the units of one rank: neither a matrix from
    units to units nor a dimension with other entries beside those of the units can be divided.
    """
    divided = {atom, *others}
    for member in found.members_of(atom):
        terms = found.solution.dims[member.value]
        if len(units := [found.names[a] for term in terms for a in _factors(term, divided)]) > 1:
            return f"{member.path} depends on pairs of units, of {' and '.join(units)}"
        if member.key is not None and not _covers(terms[member.dim], divided):
            return f"{member} has other entries beside those of the units"
    return ""


def _factors(term: Term, divided: Collection[Atom]) -> list[Atom]:
    """Return the divided factors of a term; of a concatenation, those of the part that has most."""
    if isinstance(term, Atom):
        return [term] if term in divided else []
    if isinstance(term, Product):
        return [atom for factor in term.factors for atom in _factors(factor, divided)]
    return max((_factors(part, divided) for part in term.parts), key=len)


def _covers(term: Term, divided: Collection[Atom]) -> bool:
    """Return whether each entry along a term belongs to a divided unit."""
    if isinstance(term, Concatenation):
        return all(_covers(part, divided) for part in term.parts)
    if isinstance(term, Product):
        return any(_covers(factor, divided) for factor in term.factors)
    return term in divided


def divided_weights(p: Program) -> frozenset[str]:
    """Return the keys of the weights of which other ranks have parts."""
    return frozenset(p.key(n) for kind in STORED for n in p.of_kind(kind) if DIVIDED in p.attrs(n))


def is_divided(p: Program) -> bool:
    """Return whether units of the program are on other ranks."""
    return bool(divided_weights(p))


def common_structure(p: Program) -> str:
    """Return a hash that is equal on ranks with the same program, which may have different parts of divided weights."""
    if not is_divided(p):
        return p.structure_hash()
    found = blake2b(digest_size=16)
    for node in p.order():
        attrs = p.attrs(node)  # whole numbers among them may be sizes of a part
        common = {name: v for name, v in attrs.items() if isinstance(v, bool | float | str) or name == DIVIDED}
        found.update(repr((p.path(node), p.op(node), [p.path(v) for v in p.operands(node)], common)).encode())
    return found.hexdigest()


_VALUES = (SetWeight, Annotation)
"""Edits that leave the structure of a program as it is."""


def _entry(p: Program) -> tuple[Entry, DivideAxes] | None:
    """Return the journal entry and the edit by which a program was divided, None if it is whole.

    Raises: UsageError if its structure was edited afterwards, or if the history does not reach back.
    """
    if not is_divided(p):
        return None
    later = 0
    for entry in reversed(p.history.undoable):
        edits = () if entry.undo is None else entry.undo.forward
        if found := [x for x in edits if isinstance(x, DivideAxes)]:
            if later:
                raise UsageError("the structure of the program was edited after it was divided", where=p.name,
                                 got=f"{later} edits", fix="undo them, or divide the program last")  # fmt: skip
            return entry, found[-1]
        later += not all(isinstance(x, _VALUES) for x in edits)
    fix = "divide the program in this process, with an undo horizon that keeps the edit"
    raise UsageError("the history of the program has no division", where=p.name, fix=fix)


def division(p: Program) -> DivideAxes | None:
    """Return how a program is divided, None if it is whole.

    Raises: UsageError if its structure was edited afterwards, or if the history does not reach back.
    """
    found = _entry(p)
    return found and found[1]


@contextmanager
def gathered(p: Program) -> Iterator[None]:
    """Inside the block the program is whole, with the values of all ranks, to export it; every rank enters it.

    The program cannot be edited inside, and the journal does not show it. Moments of optimizers are joined if they are
    used inside. Raises: UsageError if the structure of the program was edited after the division, or while an edit is
    open; RankLost.
    """
    found = _entry(p)
    if found is None:
        yield
        return
    with p.history.without(found[0]):
        yield


def _shares(record: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    rows = [forms.array(row, 2) for row in forms.array(record["shares"], None, "shares")]
    return [(forms.text(axis), tuple(forms.integer(n, 1, 1 << 40) for n in forms.array(units))) for axis, units in rows]
