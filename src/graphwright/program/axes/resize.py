"""ResizeAxis: the primitive edit that re-indexes every weight along some axes and updates the sizes in attributes.

Cutting, growing and permuting units all use this edit: for each new index along an axis it lists the old index, or -1
for a new unit. Weights are sliced, so remaining entries do not change a bit; the inverse edit holds the old arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import CPU, NDArray, Spec, from_numpy
from graphwright.autograd import Tensor
from graphwright.autograd.variable import Join, inverse, remapped
from graphwright.errors import ShapeError, UsageError
from graphwright.graph import NodeId
from graphwright.ops import call, get, traits
from graphwright.ops.axes import Atom, IndexMap, Product, Term, atoms, known, resized, resolve, spread
from graphwright.program import gates as g
from graphwright.program.axes.solve_axes import AtomNotes, origin
from graphwright.program.axes.units import Units, parsed, remove_layers, runs
from graphwright.program.editing import fields as f
from graphwright.program.editing.edits import Edit, RecordReader, RemoveEdge, Rewire
from graphwright.program.editing.fields import each
from graphwright.program.editing.replace import remove_unread
from graphwright.program.errors import EmptyAxis, FrozenAxis, RaggedUnit, ReplayConflict, StaleSelection
from graphwright.program.files import forms
from graphwright.program.files.forms import handle_form
from graphwright.program.hashing import LARGE, encode_attrs, side_by_side
from graphwright.program.kinds import KINDS, STORED
from graphwright.program.op_graph import Ref, Value
from graphwright.program.primitives import update_node
from graphwright.program.weights import abstract_array, as_array, is_abstract, payload_json

if TYPE_CHECKING:
    from graphwright.program.axes.axes import Axes, AxisGroup
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

Numbers = tuple[int, ...]
Maps = Mapping[int, np.ndarray]  # dimension -> for each new index the old one, or -1
New = Callable[[str, NDArray, Maps], np.ndarray]
"""(key, old array, dimension -> old indices) -> an array of the new shape; only its entries of new units are used."""
_DIM = f.plain(forms.integer, 0, forms.MAX_RANK)


class ResizedAxis(NamedTuple):
    """A resized axis: its name, its old size `of`, and for each new index the `old` index, or -1 for a new unit."""

    axis: str
    of: int
    old: Numbers


class ResizedWeight(NamedTuple):
    """A resized weight: key, new array, and `dims`: (changed dimension, old index of each new index, or -1) pairs."""

    key: str
    array: NDArray
    dims: tuple[tuple[int, Numbers], ...]


@dataclass(frozen=True, slots=True)
class ResizeAxis(Edit):
    """Resize or reorder axes: set new values of all weights along them and of the attributes that hold their sizes."""

    packed = {
        "axes": each(f.row(f.TEXT, f.INTEGER, f.INDICES, make=ResizedAxis)),
        "weights": each(f.row(f.TEXT, f.ARRAY, each(f.row(_DIM, f.INDICES)), make=ResizedWeight)),
        "attrs": each(f.row(f.NODE, f.ATTRS)),
        "correct": f.FLAG,
        "inputs": each(f.row(f.NODE, f.SPECS)),
    }
    axes: tuple[ResizedAxis, ...]
    weights: tuple[ResizedWeight, ...]  # the new values
    attrs: tuple[tuple[NodeId, Mapping[str, Any]], ...]  # (node, all its new attributes)
    correct: bool = True  # whether norms over a resized axis are corrected
    inputs: tuple[tuple[NodeId, tuple[Spec, ...]], ...] = ()  # inputs whose specs change, with new ones

    @property
    def written(self) -> tuple[str, ...]:
        return tuple(w.key for w in self.weights)

    @property
    def payloads(self) -> tuple[NDArray, ...]:
        return tuple(w.array for w in self.weights)

    def with_payloads(self, swaps: Mapping[int, NDArray]) -> ResizeAxis:
        return replace(self, weights=tuple(w._replace(array=swaps.get(id(w.array), w.array)) for w in self.weights))

    def check(self, p: Program) -> None:
        for key, array, dims in self.weights:
            before = p.weights[key].shape
            after = list(before)
            for dim, old in dims:
                after[dim] = len(old)
                if old and not -1 <= min(old) <= max(old) < before[dim]:
                    expected, got = f"-1 (a new unit) to {before[dim] - 1}", f"{min(old)} to {max(old)}"
                    raise ShapeError("the index of an old unit is out of range", where=f"{key}, dimension {dim}",
                                     expected=expected, got=got)  # fmt: skip
            if tuple(after) != array.shape:
                raise ShapeError("the new array has the wrong shape", where=key, expected=tuple(after), got=array.shape)
        for _, attrs in self.attrs:
            encode_attrs(attrs)
        for node, _ in (*self.attrs, *self.inputs):
            p.node(node)

    def invert(self, p: Program) -> ResizeAxis:
        def back(old: Numbers, size: int) -> Numbers:
            return tuple(inverse(np.asarray(old, np.int64), size).tolist())

        present = [p.weights.array(w.key) for w in self.weights]
        pairs = zip(self.weights, present, strict=True)
        old_dims = [tuple((dim, back(old, a.shape[dim])) for dim, old in w.dims) for w, a in pairs]
        weights = tuple(map(ResizedWeight, self.written, present, old_dims))
        axes = tuple(ResizedAxis(a.axis, len(a.old), back(a.old, a.of)) for a in self.axes)
        attrs, inputs = tuple((n, p.attrs(n)) for n, _ in self.attrs), tuple((n, p.specs(n)) for n, _ in self.inputs)
        return ResizeAxis(axes, weights, attrs, self.correct, inputs)

    def apply(self, p: Program, joins: Mapping[str, Join] | None = None) -> None:
        """Set weights and attributes. Variables record how entries moved, so that optimizers can move their state.

        `joins`: of weights of which other processes keep the entries that go, see `Variable.reshape_to`.
        """
        back = p.tombstones.mode in ("undo", "roll back")
        readers = self._readers(p)
        for key, array, dims in self.weights:
            maps = {dim: np.asarray(old, np.int64) for dim, old in dims}
            p.weights[key].reshape_to(array, maps, back=back, join=(joins or {}).get(key))
            for node in readers[key]:
                update_node(p, node, specs=(array.spec,))
        for node, attrs in self.attrs:
            update_node(p, node, attrs=dict(attrs))
        for node, specs in self.inputs:
            update_node(p, node, specs=specs)

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        own = (n for n, _ in (*self.attrs, *self.inputs))
        return (*(n for found in self._readers(p).values() for n in found), *own)

    def _readers(self, p: Program) -> dict[str, list[NodeId]]:
        """Return a dict from the key of each weight of the edit to the param, const and state nodes that read it."""
        readers: dict[str, list[NodeId]] = {w.key: [] for w in self.weights}
        for kind in sorted(STORED):
            for node in p.of_kind(kind):
                readers.get(p.key(node), []).append(node)
        return readers

    def to_json(self, p: Program) -> dict[str, Any]:
        nodes = self.touches(p)
        fresh = [w for w in self.weights if any(-1 in old for _, old in w.dims)]  # replay recomputes the others
        return {
            "edit": "ResizeAxis",
            "axes": [{"axis": a.axis, "of": a.of, "indices": runs(a.old)} for a in self.axes],
            "keys": [w.key for w in self.weights],
            "paths": [p.path(n) for n in nodes],
            "handles": [handle_form(n) for n in nodes],
            "payloads": {w.key: payload_json(p.weights, w.array) for w in fresh},
            "correct": self.correct,
        }

    @classmethod
    def read(cls, r: RecordReader, record: Mapping[str, Any]) -> Edit:
        """Return the recorded edit. Arrays are computed from the program; the record only has values of new units."""
        found, brought, old = r.program.axes(), forms.table(record["payloads"], None, "payloads"), {}
        for row in forms.array(record["axes"], None, "axes"):
            group = found[row["axis"]]
            if group.size != row["of"]:
                raise UsageError("the axis does not have the size recorded in the journal",
                                 where=group.name, expected=row["of"], got=group.size)  # fmt: skip
            _check_single(group)
            old[group.name] = parsed(row["indices"])
            if any(not -1 <= i < group.size for i in old[group.name]):
                raise UsageError("a unit index in the journal is out of range", where=group.name,
                                 expected=f"-1 to {group.size - 1}", got=row["indices"][:80])  # fmt: skip

        def new(key: str, array: NDArray, dims: Maps) -> np.ndarray:
            value = r.payload(brought[key]).to_numpy("float64")
            wanted = _new_shape(array, dims)
            if value.shape != wanted:
                what = "the recorded value has the wrong shape"
                raise ReplayConflict(what, where=key, expected=wanted, got=value.shape)
            return value

        return resize(found, old, correct=forms.flag(record["correct"], "correct"), new=new)


def resize(
    found: Axes, indices: Mapping[str, Sequence[int]], *, correct: bool = True, new: New | None = None
) -> ResizeAxis:
    """Return the edit that resizes or reorders axes of a program in its present state.

    Args:
        indices: dict from the name of an axis, not of a product of axes such as grouped query heads, to a list: for
            each new index the old index of the unit, -1 for a new unit.
        correct: for norms over an axis resized from D to d, multiply the scale by √(D/d) and eps by D/d. Results are
            then unchanged if the removed units are always zero.
        new: called with (key, old array, {dimension: old index of each new index}); returns an array of the new shape,
            of which only the entries of new units are used. By default these are zeros.
    Raises: FrozenAxis if a norm cannot be corrected or a table that indexes an axis cannot be resized; EmptyAxis if
        such a table would become empty.
    """
    p, solution = found.program, found.solution
    maps: dict[Atom, np.ndarray] = {found[n].atoms[0]: np.asarray(old, np.int64) for n, old in indices.items()}
    renumbered = _renumbered(found, maps)
    factors = _corrections(found, maps) if correct else {}
    weights = found.weights.items()
    changes = {key: {d: spread(t, maps) for d, t in enumerate(dims) if _along([t], maps)} for key, dims in weights}

    def sliced(key: str) -> ResizedWeight:
        if key in renumbered:
            return ResizedWeight(key, from_numpy(renumbered[key]), _numbers(changes[key]))
        return _sliced(p, key, changes[key], factors.get(key), new)

    keys = [key for key, changed in changes.items() if changed or key in renumbered]
    made = side_by_side(sliced, keys) if new is None and _large(p, keys) else [sliced(key) for key in keys]
    for w in made:
        if w.key not in renumbered and w.key not in factors and not is_abstract(w.array):
            changed = changes[w.key]
            if new is None or all((old >= 0).all() for old in changed.values()):
                p.weights.refer_slice(w.array, p.weights.array(w.key), changed)
    attrs: dict[NodeId, dict[str, Any]] = {}
    for node, attr, term in solution.sizes:
        terms = [resolve(t) for t in (term if isinstance(term, tuple) else (term,))]
        if _along(terms, maps):
            sizes = tuple(resized(t, maps) for t in terms)
            attrs.setdefault(node, dict(p.attrs(node)))[attr] = sizes if isinstance(term, tuple) else sizes[0]
    for node, c in solution.corrections if correct else ():
        ratio = _ratio(resolve(c.term), maps)
        if ratio != 1:
            attrs.setdefault(node, dict(p.attrs(node)))[c.attr] = p.attrs(node)[c.attr] * ratio
    axes = tuple(ResizedAxis(n, found[n].size, tuple(map(int, old))) for n, old in indices.items())
    inputs = [(node, solution.dims[Value(node)]) for node in p.inputs()]
    new_specs = {n: Spec(tuple(resized(t, maps) for t in ts), p.spec(n).dtype) for n, ts in inputs if _along(ts, maps)}
    specs = tuple((node, (spec,)) for node, spec in new_specs.items())
    return ResizeAxis(axes, tuple(made), tuple(attrs.items()), correct, specs)


def resize_units(
    e: Transaction, found: Axes, indices: Mapping[str, Sequence[int]], *, correct: bool = True, new: New | None = None,
    operands: Callable[[NodeId, int], Sequence[Ref]] | None = None,
) -> None:  # fmt: skip
    """Resize or reorder axes as `resize`, and with them the operands that an axis counts in groups.

    A weight that no node reads afterwards is removed. `operands` returns, for (node, unit after the resize), the values
    that a new unit's group of operands gets; it is called only for new units, which must follow the old ones.
    """
    p = e.program
    maps = {found[n].atoms[0]: np.asarray(old, np.int64) for n, old in indices.items()}
    e.do(resize(found, indices, correct=correct, new=new))
    for group in (c for c in found.solution.groups if _along([resolve(c.axis)], maps)):
        old = spread(resolve(group.axis), maps).tolist()
        edges = [x for x in p.in_edges(group.node) if p.edge_port(x) >= group.first]
        port = group.first + group.width * ((p.edge_port(edges[-1]) - group.first) // group.width + 1)
        units = [edges[i : i + group.width] for i in range(0, len(edges), group.width)]
        sources = [[p.edge_value(x) for x in unit] for unit in units]
        kept = [u for u in old if u >= 0]
        gone = [value for u, values in enumerate(sources) if u not in set(kept) for value in values]
        for u in set(range(len(units))) - set(kept):
            for edge in units[u]:
                e.do(RemoveEdge(edge))
        for index, u in zip(sorted(kept), kept, strict=True):
            for edge, value in zip(units[index], sources[u], strict=True):
                if index != u:
                    e.do(Rewire(edge, value))
        e.touched[group.node] = None
        for value in gone:
            if value.node in p.graph:
                remove_unread(e, value)
        fresh = [u for u, before in enumerate(old) if before < 0]
        if fresh and (operands is None or fresh[0] != len(kept)):
            raise UsageError("units that are operands of their own cannot be added along an axis",
                             where=found.names.get(next(iter(atoms(resolve(group.axis)))), p.path(group.node)),
                             fix="experts are added by graphwright.experts.add")  # fmt: skip
        for u in fresh:
            assert operands is not None
            for value in operands(group.node, u):
                e.add_edge(p.value(value), group.node, port)
                port += 1


def _along(terms: Iterable[Term], maps: IndexMap) -> bool:
    return any(a in maps for t in terms for a in atoms(t))


def _large(p: Program, keys: Sequence[str]) -> bool:
    """Map the files of these weights; return True if all are on the CPU and together large enough for threads."""
    arrays = [a for a in map(p.weights.array, keys) if not is_abstract(a)]
    if sum(a.nbytes for a in arrays) < LARGE or any(a.device != CPU for a in arrays):
        return False
    return all(a.storage.memory is not None for a in arrays)


def _sliced(p: Program, key: str, changed: Maps, factor: tuple[float, float] | None, new: New | None) -> ResizedWeight:
    array = p.weights.array(key)
    fresh = any((old < 0).any() for old in changed.values())
    if is_abstract(array):
        if fresh and new is not None:
            new(key, array, changed)  # only for the errors that it raises
        made = abstract_array(_new_shape(array, changed), array.dtype)
        p.weights.refer(made)
        return ResizedWeight(key, made, _numbers(changed))
    host = remapped(array.to_numpy(bits=True), changed)
    if fresh and new is not None:  # old entries keep their bits
        at_new = ~old_entries(host.shape, changed)
        host[at_new] = as_array(np.asarray(new(key, array, changed))[at_new], array.dtype).to_numpy(bits=True)
    made = from_numpy(np.ascontiguousarray(host), bits=array.dtype)
    if factor is not None:
        scale, offset = factor
        made = as_array((made.to_numpy("float64") + offset) * scale - offset, array.dtype)
    if made.device != array.device:
        made = made.to(array.device)
    return ResizedWeight(key, made, _numbers(changed))


def _new_shape(array: NDArray, changed: Maps) -> tuple[int, ...]:
    return tuple(len(changed[d]) if d in changed else n for d, n in enumerate(array.shape))


def _numbers(changed: Maps) -> tuple[tuple[int, Numbers], ...]:
    return tuple((dim, tuple(old.tolist())) for dim, old in changed.items())


def _renumbered(found: Axes, maps: dict[Atom, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a dict from key to new value of each constant table of indices into a resized axis.

    Entries that index removed units are dropped. `maps`: resized atom -> old index of each new index; the dimension of
    each table is added to it. Raises: FrozenAxis if a table cannot be resized, EmptyAxis if it would become empty.
    """
    tables: dict[str, np.ndarray] = {}
    for key, axis, entries in ((t.key, resolve(t.axis), resolve(t.entries)) for t in found.solution.lookups):
        if not any(atom in maps for term in (axis, entries) for atom in atoms(term)):
            continue
        table = found.program.weights.array(key).to_numpy()
        number, stays = inverse(spread(axis, maps), known(axis)), spread(entries, maps)
        if not isinstance(entries, Atom):
            if (stays < 0).any() or (number[table[stays]] < 0).any():
                raise FrozenAxis("cannot remove or add single entries of this index table", where=key,
                                 got="a reshape splits its dimension")  # fmt: skip
            tables[key] = number[table[stays]]
            continue
        stays = stays[(stays >= 0) & (number[table[stays]] >= 0)]
        group = found[found.names[entries]] if entries in found.names else None
        if len(stays) < known(entries) and (group is None or group.frozen):
            why = group.frozen[0] if group is not None else "the dimension of the table is not an axis"
            raise FrozenAxis("cannot remove the table entries that index the removed units", where=key, got=why)
        if not len(stays):
            raise EmptyAxis("all entries of this index table point to removed units", where=key, fix="cut fewer units")
        maps[entries] = stays
        tables[key] = number[table[stays]]
    return tables


def old_entries(shape: Iterable[int], changed: Maps) -> np.ndarray:
    """Return a boolean array of this shape: False for entries of new units (old index -1 in `changed`), else True."""
    stays = np.ones(tuple(shape), bool)
    for dim, old in changed.items():
        stays[(slice(None),) * dim + (old < 0,)] = False
    return stays


def _ratio(term: Term, maps: IndexMap) -> float:
    return known(term) / max(int(resized(term, maps)), 1) if _along([term], maps) else 1


def _corrections(found: Axes, maps: IndexMap) -> dict[str, tuple[float, float]]:
    """Return {key of a norm's scale: (correction factor, constant that the norm adds to it)}; `maps`: resized axes."""
    p, factors = found.program, dict[str, tuple[float, float]]()
    readers: Counter[NodeId] = Counter()

    def refused(what: str, where: str) -> FrozenAxis:
        what = f"cannot adjust the scale of a norm to the new size of its axis: {what}"
        return FrozenAxis(what, where=where, fix="if units are cut, pass correct=False to cut_units")

    for node, c in found.solution.corrections:
        ratio = _ratio(resolve(c.term), maps)
        if ratio == 1:
            continue
        scale = origin(p, p.operands(node)[c.port])
        where = f"{p.path(node)} ({p.op(node)})"
        if scale is None:
            raise refused("the scale of the norm is computed, not a weight", where)
        factor = ratio**0.5, c.offset
        if factors.setdefault(p.key(scale), factor) != factor:
            raise refused("another norm reads the same scale and needs a different factor", where)
        readers[scale] += 1
    for scale, count in readers.items():
        if count != found.readers(scale):
            raise refused("nodes other than the resized norms read the scale", p.path(scale))
    return factors


def cut_units(
    e: Transaction, units: Units, *, ragged: bool = False, correct: bool = True, allow_io: bool = False
) -> None:
    """Remove units of axes from every weight along these axes, and remove layers.

    Args:
        units: such as `program.axes()["layers.1.attn.heads"].units([3])` or `program.select("layers.1.attn").heads[3]`.
        ragged: allow key heads with unequal numbers of query heads; a table then maps query heads to key heads.
        correct: adjust RMSNorms over a cut axis, so that results are unchanged if the removed units are always zero.
        allow_io: also resize inputs and outputs of the program.
    Raises: EmptySelection; FrozenAxis with the reason; RaggedUnit; EmptyAxis if no unit of an axis would be left;
        StaleSelection if an axis was resized since the units were selected.
    """
    if not isinstance(units, Units) or units.program is not e.program:
        raise UsageError("`units` is not a selection of units of this program",
                         got=repr(units)[:80], expected="program.axes()[name].units(ids)")  # fmt: skip
    units.check_nonempty()
    found = e.program.axes()
    keeps: dict[str, np.ndarray] = {}
    for name, ids in units.chosen.items():
        if not ids:
            continue
        if name not in found:
            remove_layers(e, name, ids, units.sizes[name])
            continue
        group = _resizable(found, name, allow_io)
        if group.size != units.sizes[name]:
            raise StaleSelection("the axis was resized since the units were selected",
                                 where=name, expected=units.sizes[name], got=group.size)  # fmt: skip
        keep = ~np.isin(np.arange(group.size), ids)
        if not keep.any():
            raise EmptyAxis("cannot remove all units of an axis", where=name, got=runs(ids),
                            fix="remove the whole module: cut its edge into the next junction")  # fmt: skip
        apart = _apart(group, keep)
        if apart is None and ragged and group.kind == "heads":
            made = _tabulate(e, group)
            rest = Units(e.program, {made: ids}, {made: group.size})
            cut_units(e, rest, ragged=False, correct=correct, allow_io=allow_io)
            found = e.program.axes()
            continue
        if apart is None:
            raise _ragged_unit(group, ids)
        for atom, stays in zip(group.atoms, apart, strict=True):
            keeps[found.names[atom]] = keeps.get(found.names[atom], True) & stays
    indices = {name: tuple(np.flatnonzero(stays).tolist()) for name, stays in keeps.items() if not stays.all()}
    if indices:
        resize_units(e, e.program.axes(), indices, correct=correct)


def permute(e: Transaction, axis: str, order: Sequence[int], *, allow_io: bool = False) -> None:
    """Reorder the units of an axis: new unit i is the old unit `order[i]`. The results of the program are unchanged.

    With `allow_io`, inputs and outputs of the program are reordered too.
    Raises: FrozenAxis; UsageError if `order` is not a permutation.
    """
    found = e.program.axes()
    group = _resizable(found, axis, allow_io)
    indices = [int(i) for i in order]
    _check_single(group)
    if sorted(indices) != list(range(group.size)):
        expected = f"each of 0 to {group.size - 1} once"
        raise UsageError("`order` is not a permutation of the units", where=axis, expected=expected, got=indices[:20])
    resize_units(e, found, {axis: indices})


def grow(e: Transaction, axis: str, n: int, init: str = "zero_out", *, seed: int = 0, allow_io: bool = False) -> None:
    """Add `n` units at the end of an axis; the results of the program are unchanged.

    Args:
        axis: name in `program.axes()`.
        init: "zero_out": weights that produce the new units are random and weights that read them are zero, or the
            reverse if a norm runs over the axis. "duplicate": new units are copies of randomly chosen units; weights
            that read a unit are split among the unit and its copies, in random proportions.
        seed: seed of the random numbers.
        allow_io: also resize inputs and outputs of the program.
    Raises: FrozenAxis; UsageError for invalid arguments, or if new units would change the results.
    """
    found = e.program.axes()
    group = _resizable(found, axis, allow_io)
    _check_single(group)
    if init not in ("zero_out", "duplicate"):
        raise UsageError("unknown value of init", where=axis, expected="zero_out or duplicate", got=init)
    if type(n) is not int or n < 1:
        raise UsageError("invalid number of new units", where=axis, expected="an integer >= 1", got=n)
    _Growth(e, found, group, n, seed).make(init)


def _check_single(group: AxisGroup) -> None:
    if len(group.atoms) != 1:
        parts = ", ".join(group.axes.names[a] for a in group.atoms)
        raise UsageError("cannot permute or grow an axis that is the product of two axes", where=group.name,
                         expected=f"one of {parts}")  # fmt: skip


def _resizable(found: Axes, name: str, allow_io: bool) -> AxisGroup:
    group = found[name]
    bound = [why for why in group.frozen if not (allow_io and why in group.ends)]
    if bound:
        fix = "pass allow_io=True to resize inputs and outputs too" if set(bound) <= set(group.ends) else None
        fix = "model.resize_vocab(n) resizes the vocabulary of a model" if group.kind == "vocabulary" else fix
        raise FrozenAxis("the axis cannot be resized", where=name, got="; ".join(bound[:3]), fix=fix)
    return group


def _apart(group: AxisGroup, keep: np.ndarray) -> list[np.ndarray] | None:
    """Split a mask of the units to keep into one mask per atom, such as one over kv groups and one over their queries.

    Return None if the mask is not the outer product of such masks, or if it would remove all channels of a group of a
    grouped convolution. The group would still produce output channels, so remove it as a unit of the axis of groups.
    """
    grid = keep.reshape([int(a.size) for a in group.atoms])
    dims = range(grid.ndim)
    sides = [np.asarray(grid.any(axis=tuple(d for d in dims if d != axis))) for axis in dims]
    whole = reduce(np.multiply.outer, sides)
    bound = group.kind == "channels" and not all(side.all() for side in sides[:-1])
    return sides if (whole == grid).all() and not bound else None


def _ragged_unit(group: AxisGroup, ids: Sequence[int]) -> RaggedUnit:
    names = [group.axes.names[a] for a in group.atoms]
    shape = [int(a.size) for a in group.atoms]
    one = [f"unit {i} of {name}" for i, name in zip(np.unravel_index(ids[0], shape), names, strict=True)]
    ragged = ", or call cut_units(..., ragged=True)" if group.kind == "heads" else ""
    whole = f"all {shape[-1]} {group.kind} of some units of {names[0]}, or " if group.kind == "heads" else ""
    return RaggedUnit(f"the units of {names[0]} would have unequal numbers of {group.kind}", where=group.name,
                      expected=f"{whole}the same {group.kind} of every unit", got=f"{group.kind} {runs(tuple(ids))}",
                      fix=f"cut {' or '.join(one)}{ragged}")  # fmt: skip


def _tabulate(e: Transaction, group: AxisGroup) -> str:
    """Insert a table that maps query heads to key heads; results stay equal. Return the name of the query-head axis."""
    p, each = e.program, int(group.atoms[1].size)
    here = [n for n, kind, term in group.axes.solution.composites
            if kind == "heads" and tuple(atoms(term)) == group.atoms]  # fmt: skip
    if other := next((n for n in here if not traits(p.op(n)).attention), None):
        got, fix = f"{p.path(other)} ({p.op(other)})", f"cut whole units of {group.axes.names[group.atoms[0]]}"
        raise RaggedUnit("ragged=True is impossible: an op other than attention splits this axis into heads",
                         where=group.name, got=got, fix=fix)  # fmt: skip
    dims = group.axes.solution.dims
    weight = next(m for m in group.members if m.key and set(group.atoms) <= set(atoms(dims[m.value][m.dim])))
    for node in here:
        path = p.path(node)
        table = e.const(p.free_name(f"{path}.key_head"), np.arange(group.size) // each)
        for edge in p.in_edges(node)[1:3]:
            name = p.free_name(f"{path}.{'_kv'[p.edge_port(edge)]}_of_head")
            e.rewire(edge, e.add("index", p.edge_value(edge), table, axis=1, name=name))
    found = e.program.axes()
    return next(g.name for g in found.of(p.path(weight.value.node), weight.dim) if g.size == group.size)


class _Growth:
    """Appends `n` units to one axis: copies of random units, or units with random and zero weights; see `grow`."""

    def __init__(self, e: Transaction, found: Axes, group: AxisGroup, n: int, seed: int) -> None:
        self.e, self.found, self.group, self.n = e, found, group, n
        self.rng = np.random.default_rng(seed)
        self.atom = group.atoms[0]
        self.chosen = self.rng.integers(0, group.size, n)  # the unit that each duplicate copies
        self.consumers = self._consumers()

    def _consumers(self) -> dict[str, set[int]]:
        """Return a dict from weight key to the dimensions along the axis that all readers of the weight sum over.

        Raises: UsageError if an op that sums over the axis reads no such weight; its zeros would cancel new units.
        """
        p, found = self.e.program, {}
        for node, ends in self.found.solution.notes.get(self.atom, AtomNotes()).summed:
            operands = p.operands(node)
            weights = [(w, dim) for port, dim in ends if (w := origin(p, operands[port])) is not None]
            alone = [(w, dim) for w, dim in weights if self.found.summed[w, dim, self.atom]]
            if not alone and not (weights and self.group.mixed):
                raise UsageError("cannot add units: this op sums over the axis, and new units would change its sum",
                                 expected="an operand that is a weight whose readers all sum over the axis",
                                 where=f"{self.group.name}, {p.path(node)} ({p.op(node)})")  # fmt: skip
            for w, dim in alone:
                found.setdefault(p.key(w), set()).add(dim)
        return found

    def make(self, init: str) -> None:
        group = self.group
        if init == "duplicate" and group.mixed:
            raise UsageError("duplicated units would change the result of an op", where=group.name, got=group.mixed[0],
                             fix='pass init="zero_out"' if group.corrected else None)  # fmt: skip
        if group.mixed and not group.corrected:
            raise UsageError("new units would change the result of an op, even if they are zero",
                             where=group.name, got="; ".join(group.mixed[:3]))  # fmt: skip
        if group.mixed and (path := self._changes_zero()) is not None:
            raise UsageError("new units would change the result of a norm: an op before it maps zero to nonzero values",
                             where=group.name, got=path)  # fmt: skip
        duplicate = init == "duplicate"

        def fill(key: str, array: NDArray, indices: Maps) -> np.ndarray:
            copy = duplicate or key in g.RESERVED
            value = self._copies(key, array, indices) if copy else self._zero_out(key, array, indices)
            return self._own_elements(value, indices[0] < 0, duplicate) if key == g.TABLE else value

        resize_units(self.e, self.found, {group.name: [*range(group.size), *[-1] * self.n]}, new=fill)
        if init == "duplicate":
            self._share()

    def _zero_out(self, key: str, array: NDArray, indices: Maps) -> np.ndarray:
        """Return an array of the new shape: random for new units if the weight produces them, zero if it reads them.

        If a norm runs over the axis, it is the reverse. In a vector, new entries are the mean of the old ones, or 0.
        """
        shape = _new_shape(array, indices)
        old = array.to_numpy("float64")
        if len(shape) < 2:
            p = self.e.program
            scales = [origin(p, p.operands(node)[c.port]) for node, c in self.found.solution.corrections]
            corrected = {p.key(weight) for weight in scales if weight is not None}
            level = old.mean() if not self.group.mixed or key in corrected else 0.0
            return np.full(shape, level)
        read = self.consumers.get(key, set())
        zero = {d: old for d, old in indices.items() if (d in read) != bool(self.group.mixed)}
        return np.where(old_entries(shape, zero), self.rng.normal(0.0, old.std() or 1.0, shape), 0.0)

    def _changes_zero(self) -> str | None:
        """Return the path of an elementwise op along the axis that maps zero to a nonzero value; None if no op does."""
        p, inside = self.e.program, {m.value for m in self.group.members}
        for member in self.group.members:
            node = member.value.node
            if p.op(node) in KINDS or not get(p.op(node)).traits.elementwise:
                continue
            made = [np.zeros(1) if v in inside else np.ones(1) for v in p.operands(node)]
            result = call(p.op(node), *(Tensor(from_numpy(x)) for x in made), **p.attrs(node))
            if np.any(result.numpy() != 0):
                return p.path(node)
        return None

    def _copies(self, key: str, array: NDArray, indices: Maps) -> np.ndarray:
        """Return a weight with its old entries, followed by copies of the entries of the units in `self.chosen`."""
        units = {self.atom: np.concatenate([np.arange(self.group.size), self.chosen])}
        old = {dim: spread(self.found.weights[key][dim], units) for dim in indices}
        return remapped(array.to_numpy("float64"), old)

    def _own_elements(self, table: np.ndarray, new: np.ndarray, duplicate: bool) -> np.ndarray:
        """Give new rows of the table of gates unused element numbers; let new units that start at zero train."""
        for slot in np.unique(table[new, g.SLOT]):
            rows = new & (table[:, g.SLOT] == slot)
            taken = table[~new & (table[:, g.SLOT] == slot), g.ELEMENT]
            table[rows, g.ELEMENT] = taken.max() + 1 + np.arange(rows.sum())
        if not duplicate:
            table[new, g.STATE] = g.SOFT
        return table

    def _share(self) -> None:
        """Split the weights that read a unit among the unit and its copies; the parts sum to the old weights."""
        count = np.bincount(self.chosen, minlength=self.group.size)
        part = np.ones(self.group.size + self.n)
        for unit in np.flatnonzero(count):
            copies = self.group.size + np.flatnonzero(self.chosen == unit)
            left = 1.0
            for copy in copies:
                part[copy] = left * self.rng.uniform(0.25, 0.75)
                left -= part[copy]
            part[unit] = left
        after = self.e.program.axes()
        group = after[self.group.name]
        for key, dims in self.consumers.items():
            for dim in dims:
                whole = by_index(after.weights[key][dim], group.atoms, part)
                shape = [-1 if d == dim else 1 for d in range(len(after.weights[key]))]
                scaled = after.program.weights.array(key).to_numpy("float64") * whole.reshape(shape)
                self.e.set_weight(key, scaled)


def by_index(term: Term, group: Sequence[Atom], part: np.ndarray) -> np.ndarray:
    """Return one factor per index of a dimension: `part[i]` for the indices of unit i of an axis, 1 for other indices.

    `term` describes the dimension by atoms (sizes that are not split further), `group` lists the atoms of the axis.
    """
    if isinstance(term, Atom):
        return part if (term,) == tuple(group) else np.ones(known(term))
    if isinstance(term, Product):
        result, at = np.ones(1), 0
        while at < len(term.factors):
            several = len(group) > 1 and term.factors[at : at + len(group)] == tuple(group)
            here = part if several else by_index(term.factors[at], group, part)
            result = np.multiply.outer(result, here).reshape(-1)
            at += len(group) if several else 1
        return result
    return np.concatenate([by_index(t, group, part) for t in term.parts])
