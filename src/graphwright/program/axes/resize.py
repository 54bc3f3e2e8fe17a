"""ResizeAxis: the primitive edit that gives every weight of some axes other places, and ops between them the sizes.

Cutting, growing and permuting units are all this one edit: each axis says, for each new place, the place it had or -1.
Weights that keep all their bytes in places are sliced, never computed; the inverse holds the arrays from before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import CPU, NDArray, Spec, from_numpy
from graphwright.autograd import Tensor
from graphwright.autograd.variable import inverse, remapped
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call, get, traits
from graphwright.ops.axes import Atom, Product, atoms, known, resized, resolve, spread
from graphwright.program.axes.axes import Axes
from graphwright.program.axes.solve_axes import Said, origin
from graphwright.program.axes.units import Units, remove_layers, runs
from graphwright.program.errors import EmptyAxis, FrozenAxis, RaggedUnit
from graphwright.program.hashing import LARGE, encode_attrs, side_by_side
from graphwright.program.kinds import KINDS, STORED
from graphwright.program.op_graph import Value
from graphwright.program.selection import StaleSelection
from graphwright.program.weights import as_array, hollow_array, is_hollow, payload_json

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.ops.axes import Term
    from graphwright.program.axes.axes import Axes, AxisGroup
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

Numbers = tuple[int, ...]
New = Callable[[str, NDArray, Mapping[int, np.ndarray]], np.ndarray]
"""(key, old array, axis -> places) -> an array of the new shape whose entries at new places are taken."""


class Resized(NamedTuple):
    """One axis: its name, its size before, and for each new place the old one or -1."""

    axis: str
    of: int
    places: Numbers


class Sliced(NamedTuple):
    """One weight: its key, its value after, and for each dimension that changes the old place of each new one or -1."""

    key: str
    array: NDArray
    places: tuple[tuple[int, Numbers], ...]


@dataclass(frozen=True, slots=True)
class ResizeAxis:
    """Resize axes: new values for all weights along them, and attributes that are their sizes.

    Attributes:
        axes: what was resized, by name.
        weights: the values after.
        attrs: nodes and all their attributes after.
        correct: whether norms over a resized axis were corrected.
        inputs: of the program that have another size after, with their spec.
    """

    axes: tuple[Resized, ...]
    weights: tuple[Sliced, ...]
    attrs: tuple[tuple[NodeId, Mapping[str, Any]], ...]
    correct: bool = True
    inputs: tuple[tuple[NodeId, tuple[Spec, ...]], ...] = ()

    def check(self, p: Program) -> None:
        """Raises: ShapeError for places and values that do not fit the weights."""
        for key, array, places in self.weights:
            before = p.weights[key].shape
            after = list(before)
            for dim, old in places:
                after[dim] = len(old)
                if old and not -1 <= min(old) <= max(old) < before[dim]:
                    raise ShapeError(
                        "a place outside the weight", where=f"{key}, dimension {dim}", expected=before[dim]
                    )
            if tuple(after) != array.shape:
                raise ShapeError("places and value differ", where=key, expected=tuple(after), got=array.spec)
        for node, attrs in self.attrs:
            p.node(node)
            encode_attrs(attrs)
        for node, _ in self.inputs:
            p.node(node)

    def invert(self, p: Program) -> ResizeAxis:
        """The values and sizes that are there now."""
        weights = []
        for key, _, places in self.weights:
            present = p.weights.array(key)
            back = tuple((dim, _back(old, present.shape[dim])) for dim, old in places)
            weights.append(Sliced(key, present, back))
        axes = tuple(Resized(a.axis, len(a.places), _back(a.places, a.of)) for a in self.axes)
        inputs = tuple((n, p.specs(n)) for n, _ in self.inputs)
        return ResizeAxis(axes, tuple(weights), tuple((n, p.attrs(n)) for n, _ in self.attrs), self.correct, inputs)

    def apply(self, p: Program) -> None:
        """Give weights and nodes their values; what follows them by shape is told by the variables' lineage."""
        back = p.graveyard.mode in ("undo", "roll back")
        readers = self._readers(p)
        for key, array, places in self.weights:
            maps = {dim: np.asarray(old, np.int64) for dim, old in places}
            p.weights[key].reshape_to(array, maps, back=back)
            for node in readers[key]:
                p.update_node(node, specs=(array.spec,))
        for node, attrs in self.attrs:
            p.update_node(node, attrs=dict(attrs))
        for node, specs in self.inputs:
            p.update_node(node, specs=specs)

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        """Nodes of the weights, and those with other attributes."""
        own = (n for n, _ in (*self.attrs, *self.inputs))
        return (*(n for found in self._readers(p).values() for n in found), *own)

    def _readers(self, p: Program) -> dict[str, list[NodeId]]:
        """Key -> nodes that stand for the weight, of all weights in one walk."""
        readers: dict[str, list[NodeId]] = {w.key: [] for w in self.weights}
        for kind in sorted(STORED):
            for node in p.of_kind(kind):
                readers.get(p.key(node), []).append(node)
        return readers

    def to_json(self, p: Program) -> dict[str, Any]:
        """Axes by name and places; values only where some are new: the others are the places of what is there."""
        nodes = self.touches(p)
        fresh = [w for w in self.weights if any(-1 in old for _, old in w.places)]
        return {
            "edit": "ResizeAxis",
            "axes": [{"axis": a.axis, "of": a.of, "places": runs(a.places)} for a in self.axes],
            "keys": [w.key for w in self.weights],
            "paths": [p.path(n) for n in nodes],
            "handles": [[n.index, n.generation] for n in nodes],
            "payloads": {w.key: payload_json(p.weights, w.array) for w in fresh},
            "correct": self.correct,
        }


def resize(
    found: Axes, places: Mapping[str, Sequence[int]], *, correct: bool = True, new: New | None = None
) -> ResizeAxis:
    """The edit that gives axes other places.

    Args:
        found: axes of the program as it is now.
        places: axis, of one atom -> for each new place the old one, or -1.
        correct: keep norms over a resized axis exact where the units that go are zero: scale · √(D/d), eps · D/d.
        new: gives the values at new places; zeros by default.
    Raises: FrozenAxis where a norm's scale is no weight, or one that others read too.
    """
    p, solution = found.program, found.solution
    maps: dict[Atom, np.ndarray] = {found[n].atoms[0]: np.asarray(old, np.int64) for n, old in places.items()}
    renumbered = _renumbered(found, maps)
    factors = _corrections(found, maps) if correct else {}
    changes = {
        key: {dim: spread(term, maps) for dim, term in enumerate(dims) if any(a in maps for a in atoms(term))}
        for key, dims in found.weights.items()
    }

    def sliced(key: str) -> Sliced:
        if key in renumbered:
            return Sliced(key, from_numpy(renumbered[key]), _numbers(changes[key]))
        return _sliced(p, key, changes[key], factors.get(key), new)

    keys = [key for key, changed in changes.items() if changed or key in renumbered]
    weights = side_by_side(sliced, keys) if new is None and _large(p, keys) else [sliced(key) for key in keys]
    for w in weights:
        if w.key not in renumbered and w.key not in factors and not is_hollow(w.array):
            changed = changes[w.key]
            if new is None or all((old >= 0).all() for old in changed.values()):
                p.weights.refer_slice(w.array, p.weights.array(w.key), changed)
    attrs: dict[NodeId, dict[str, Any]] = {}
    for node, attr, term in solution.sizes:
        terms = [resolve(t) for t in (term if isinstance(term, tuple) else (term,))]
        if any(a in maps for t in terms for a in atoms(t)):
            sizes = tuple(resized(t, maps) for t in terms)
            attrs.setdefault(node, dict(p.attrs(node)))[attr] = sizes if isinstance(term, tuple) else sizes[0]
    for node, c in solution.corrections if correct else ():
        ratio = _ratio(resolve(c.term), maps)
        if ratio != 1:
            attrs.setdefault(node, dict(p.attrs(node)))[c.attr] = p.attrs(node)[c.attr] * ratio
    axes = tuple(Resized(n, found[n].size, tuple(map(int, old))) for n, old in places.items())
    return ResizeAxis(axes, tuple(weights), tuple(attrs.items()), correct, tuple(_inputs(found, maps)))


def _inputs(found: Axes, maps: Mapping[Atom, np.ndarray]) -> Iterator[tuple[NodeId, tuple[Spec, ...]]]:
    """Inputs of the program along a resized axis, with their spec after."""
    p = found.program
    for node in p.inputs():
        terms = found.solution.dims[Value(node)]
        if any(a in maps for t in terms for a in atoms(t)):
            yield node, (Spec(tuple(resized(t, maps) for t in terms), p.spec(node).dtype),)


def _large(p: Program, keys: Sequence[str]) -> bool:
    """Whether slicing these is worth threads; then files are mapped before threads read them."""
    arrays = [a for a in map(p.weights.array, keys) if not is_hollow(a)]
    if sum(a.nbytes for a in arrays) < LARGE or any(a.device != CPU for a in arrays):
        return False
    return all(a.storage.memory is not None for a in arrays)


def _sliced(
    p: Program, key: str, changed: Mapping[int, np.ndarray], factor: tuple[float, float] | None, new: New | None
) -> Sliced:
    array = p.weights.array(key)
    fresh = any((old < 0).any() for old in changed.values())
    if is_hollow(array):
        if fresh and new is not None:
            new(key, array, changed)  # for what it refuses
        made = hollow_array(tuple(len(changed.get(d, range(n))) for d, n in enumerate(array.shape)), array.dtype)
        p.weights.refer(made)
        return Sliced(key, made, _numbers(changed))
    host = remapped(array.to_numpy(bits=True), changed)
    made = from_numpy(np.ascontiguousarray(host), bits=array.dtype)
    if fresh and new is not None:
        wide = made.to_numpy("float64") if array.dtype.is_float else made.to_numpy()
        at_new = ~kept(host.shape, changed)
        made = as_array(np.where(at_new, new(key, array, changed), wide), array.dtype)
        exact = remapped(array.to_numpy(bits=True), changed)  # what stays keeps its bits
        made = from_numpy(np.where(at_new, made.to_numpy(bits=True), exact), bits=array.dtype)
    if factor is not None:
        scale, offset = factor
        made = as_array((made.to_numpy("float64") + offset) * scale - offset, array.dtype)
    if made.device != array.device:
        made = made.to(array.device)
    return Sliced(key, made, _numbers(changed))


def _numbers(changed: Mapping[int, np.ndarray]) -> tuple[tuple[int, Numbers], ...]:
    return tuple((dim, tuple(old.tolist())) for dim, old in changed.items())


def _renumbered(found: Axes, maps: dict[Atom, np.ndarray]) -> dict[str, np.ndarray]:
    """Tables that name places of a resized axis, with the new numbers; entries go with the places that they name.

    Their own axes are added to `maps`. Raises: FrozenAxis, EmptyAxis where entries can't go.
    """
    tables: dict[str, np.ndarray] = {}
    for key, axis, entries in ((t.key, resolve(t.axis), resolve(t.entries)) for t in found.solution.lookups):
        if not isinstance(axis, Atom) or not isinstance(entries, Atom) or (axis not in maps and entries not in maps):
            continue
        table = found.program.weights.array(key).to_numpy()
        number = inverse(maps[axis], known(axis)) if axis in maps else np.arange(known(axis))
        stays = maps.get(entries, np.arange(known(entries)))
        stays = stays[(stays >= 0) & (number[table[stays]] >= 0)]
        group = found[found.names[entries]] if entries in found.names else None
        if len(stays) < known(entries) and (group is None or group.frozen):
            why = group.frozen[0] if group is not None else "it is no axis"
            raise FrozenAxis("what names the units that go can't go with them", where=key, got=why)
        if not len(stays):
            raise EmptyAxis("nothing would be left of what names the units", where=key)
        maps[entries] = stays
        tables[key] = number[table[stays]]
    return tables


def kept(shape: Iterable[int], changed: Mapping[int, np.ndarray]) -> np.ndarray:
    """Which entries of a new shape come from old ones."""
    stays = np.ones(tuple(shape), bool)
    for dim, old in changed.items():
        stays[(slice(None),) * dim + (old < 0,)] = False
    return stays


def _ratio(term: Any, maps: Mapping[Atom, np.ndarray]) -> float:
    return known(term) / max(int(resized(term, maps)), 1) if any(a in maps for a in atoms(term)) else 1


def _corrections(found: Axes, maps: Mapping[Atom, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Weight -> (factor, what is added to it where it is used) of norms over a resized axis."""
    p, factors = found.program, {}
    readers: dict[NodeId, int] = {}
    for node, c in found.solution.corrections:
        ratio = _ratio(resolve(c.term), maps)
        if ratio == 1:
            continue
        scale = origin(p, p.operands(node)[c.port])
        where = f"{p.path(node)} ({p.op(node)})"
        if scale is None:
            raise FrozenAxis(
                "the norm's scale is computed, so that it can't be corrected",
                where=where,
                fix="cut_units(correct=False)",
            )
        if factors.setdefault(p.key(scale), (ratio**0.5, c.offset)) != (ratio**0.5, c.offset):
            raise FrozenAxis("two norms of other sizes share their scale", where=where, fix="cut_units(correct=False)")
        readers[scale] = readers.get(scale, 0) + 1
    for scale, count in readers.items():
        if count != found.readers(scale):
            raise FrozenAxis(
                "the scale of a norm is read by others too, so that it can't be corrected",
                where=p.path(scale),
                fix="cut_units(correct=False)",
            )
    return factors


def _back(old: Numbers, size: int) -> Numbers:
    return tuple(inverse(np.asarray(old, np.int64), size).tolist())


def by_name(found: Axes, form: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[int]]:
    """Axis -> places of a journal record, on a program that may not be the one it was made on.

    Raises: UnknownAxis, FrozenAxis; UsageError for an axis of another size.
    """
    from graphwright.program.axes.units import parsed

    places: dict[str, Sequence[int]] = {}
    for row in form:
        group = found[row["axis"]]
        if group.size != row["of"] or len(group.atoms) != 1:
            raise UsageError("the axis has another size here", where=group.name, expected=row["of"], got=group.size)
        places[group.name] = parsed(row["places"])
        if any(not -1 <= i < group.size for i in places[group.name]):
            raise UsageError("a place outside the axis", where=group.name, expected=f"-1 to {group.size - 1}")
    return places


def cut_units(e: Transaction, units: Units, *, ragged: bool, correct: bool, allow_io: bool) -> None:
    """See `Transaction.cut_units`."""
    if not isinstance(units, Units) or units.program is not e.program:
        raise UsageError("not units of this program", got=repr(units)[:80], expected="program.axes()[name].units(ids)")
    units.needed()
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
            raise StaleSelection(
                "the axis has another size by now", where=name, expected=units.sizes[name], got=group.size
            )
        keep = np.ones(group.size, bool)
        keep[list(ids)] = False
        if not keep.any():
            raise EmptyAxis("the last unit of an axis stays", where=name, expected="a unit that is kept",
                            got=runs(ids), fix="cut the edge of its module into the junction behind it")  # fmt: skip
        apart = _apart(group, keep)
        if apart is None and ragged and group.kind == "heads":
            made = _loosen(e, group)
            rest = Units(e.program, {made: ids}, {made: group.size})
            cut_units(e, rest, ragged=False, correct=correct, allow_io=allow_io)
            found = e.program.axes()
            continue
        if apart is None:
            raise _unequal(group, ids)
        for atom, stays in zip(group.atoms, apart, strict=True):
            keeps[found.names[atom]] = keeps.get(found.names[atom], True) & stays
    places = {name: tuple(np.flatnonzero(stays).tolist()) for name, stays in keeps.items() if not stays.all()}
    if places:
        e.do(resize(e.program.axes(), places, correct=correct))


def permute(e: Transaction, axis: str, order: Sequence[int], allow_io: bool) -> None:
    """See `Transaction.permute`."""
    found = e.program.axes()
    group = _resizable(found, axis, allow_io)
    places = [int(i) for i in order]
    if len(group.atoms) != 1 or sorted(places) != list(range(group.size)):
        of = "one axis" if len(group.atoms) == 1 else f"one of {', '.join(found.names[a] for a in group.atoms)}"
        raise UsageError("not an order of units", where=axis, expected=f"each of 0 to {group.size - 1} once, of {of}")
    e.do(resize(found, {axis: places}))


def grow(e: Transaction, axis: str, n: int, init: str, seed: int, allow_io: bool) -> None:
    """See `Transaction.grow`."""
    found = e.program.axes()
    group = _resizable(found, axis, allow_io)
    if init not in ("zero_out", "duplicate") or type(n) is not int or n < 1 or len(group.atoms) != 1:
        raise UsageError(
            "an axis grows by units, zero_out or duplicate", where=axis, got=f"{n} {init}",
            expected="n >= 1" if len(group.atoms) == 1 else ", ".join(found.names[a] for a in group.atoms),
        )  # fmt: skip
    _Growth(e, found, group, n, seed).make(init)


def _resizable(found: Axes, name: str, allow_io: bool) -> AxisGroup:
    group = found[name]
    bound = [why for why in group.frozen if not (allow_io and why in group.ends)]
    if bound:
        fix = "allow_io=True changes inputs and outputs too" if set(bound) <= set(group.ends) else None
        raise FrozenAxis("the axis can't be resized", where=name, got="; ".join(bound[:3]), fix=fix)
    return group


def _apart(group: AxisGroup, keep: np.ndarray) -> list[np.ndarray] | None:
    """What is kept, as units kept of each of the group's axes; None if that is not all combinations of them.

    A group of channels makes others as well, so that it goes as a unit of its own axis only.
    """
    grid = keep.reshape([int(a.size) for a in group.atoms])
    dims = range(grid.ndim)
    sides = [np.asarray(grid.any(axis=tuple(d for d in dims if d != axis))) for axis in dims]
    whole = np.ones((), bool)
    for side in sides:
        whole = np.multiply.outer(whole, side)
    bound = group.kind == "channels" and not all(side.all() for side in sides[:-1])
    return sides if (whole == grid).all() and not bound else None


def _unequal(group: AxisGroup, ids: Sequence[int]) -> RaggedUnit:
    names = [group.axes.names[a] for a in group.atoms]
    shape = [int(a.size) for a in group.atoms]
    one = [f"unit {i} of {name}" for i, name in zip(np.unravel_index(ids[0], shape), names, strict=True)]
    loose = ", or cut_units(ragged=True)" if group.kind == "heads" else ""
    whole = f"all {shape[-1]} of one of {names[0]}, or " if group.kind == "heads" else ""
    return RaggedUnit(
        f"{names[0]} would have {group.kind} in unequal number",
        where=group.name,
        expected=f"{whole}the same one of each of {names[0]}",
        got=runs(tuple(ids)),
        fix=" or ".join(one) + loose,
    )


def _loosen(e: Transaction, group: AxisGroup) -> str:
    """Let each query head read its key head by a table: the same function. Returns the heads' axis."""
    p, each = e.program, int(group.atoms[1].size)
    here = [n for n, kind, term in group.axes.solution.composites
            if kind == "heads" and tuple(atoms(term)) == group.atoms]  # fmt: skip
    if any(not traits(p.op(n)).attention for n in here):
        raise RaggedUnit("only attention itself reads key heads by a table", where=group.name)
    dims = group.axes.solution.dims
    weight = next(m for m in group.members if m.key and set(group.atoms) <= set(atoms(dims[m.value][m.dim])))
    for node in here:
        path = p.path(node)
        table = e.const(p.free_name(f"{path}.key_head"), np.arange(group.size) // each)
        for edge in p.in_edges(node)[1:3]:
            rows = e.add(
                "index",
                p.edge_value(edge),
                table,
                axis=1,
                name=p.free_name(f"{path}.{'_kv'[p.edge_port(edge)]}_of_head"),
            )
            e.rewire(edge, rows)
    found = e.program.axes()
    return next(g.name for g in found.of(p.path(weight.value.node), weight.dim) if g.size == group.size)


class _Growth:
    """More units at the end of an axis: where new ones are zero, random or copies."""

    def __init__(self, e: Transaction, found: Axes, group: AxisGroup, n: int, seed: int) -> None:
        self.e, self.found, self.group, self.n = e, found, group, n
        self.rng = np.random.default_rng(seed)
        self.atom = group.atoms[0]
        self.chosen = self.rng.integers(0, group.size, n)  # what a duplicate is of
        self.consumers = self._consumers()

    def _consumers(self) -> dict[str, set[int]]:
        """Weight -> dimensions that a sum over the axis reads. Raises: UsageError where a sum reads none."""
        p, found = self.e.program, {}
        for node, ends in self.found.solution.said.get(self.atom, Said()).summed:
            operands = p.operands(node)
            weights = [(w, dim) for port, dim in ends if (w := origin(p, operands[port])) is not None]
            alone = [(w, dim) for w, dim in weights if self.found.summed[w, dim, self.atom]]
            if not alone and not (weights and self.group.mixed):
                raise UsageError(
                    "no weight reads the axis alone, so that new units would change the function",
                    where=f"{self.group.name}, {p.path(node)} ({p.op(node)})",
                )
            for w, dim in alone:
                found.setdefault(p.key(w), set()).add(dim)
        return found

    def make(self, init: str) -> None:
        group = self.group
        if init == "duplicate" and group.mixed:
            raise UsageError("copies of a unit change what a norm sees", where=group.name, got=group.mixed[0],
                             fix='grow(init="zero_out")')  # fmt: skip
        if group.mixed and not group.corrected:
            raise UsageError("more units change the function", where=group.name, got="; ".join(group.mixed[:3]))
        if group.mixed and (path := self._changes_zero()) is not None:
            raise UsageError("units that are 0 change the function: they are not 0 where a norm reads them",
                             where=group.name, got=path)  # fmt: skip
        fill = self._copies if init == "duplicate" else self._zero_out
        self.e.do(resize(self.found, {group.name: [*range(group.size), *[-1] * self.n]}, new=fill))
        if init == "duplicate":
            self._share()

    def _zero_out(self, key: str, array: NDArray, places: Mapping[int, np.ndarray]) -> np.ndarray:
        """Random rows where units are made, zeros where they are read; under a norm the other way round."""
        shape = tuple(len(places[d]) if d in places else n for d, n in enumerate(array.shape))
        old = array.to_numpy("float64")
        if len(shape) < 2:
            level = old.mean() if not self.group.mixed or key in self._scales() else 0.0
            return np.full(shape, level)
        read = self.consumers.get(key, set())
        zero = {d: old for d, old in places.items() if (d in read) != bool(self.group.mixed)}
        return np.where(kept(shape, zero), self.rng.normal(0.0, old.std() or 1.0, shape), 0.0)

    def _scales(self) -> set[str]:
        """Keys of the scales of norms that can be corrected."""
        p = self.e.program
        operands = [p.operands(node)[c.port] for node, c in self.found.solution.corrections]
        return {p.key(weight) for v in operands if (weight := origin(p, v)) is not None}

    def _changes_zero(self) -> str | None:
        """The path of an op that makes something else of new channels that are zero, if there is one."""
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

    def _copies(self, key: str, array: NDArray, places: Mapping[int, np.ndarray]) -> np.ndarray:
        return _copied(array.to_numpy("float64"), self._sources(key, places))

    def _sources(self, key: str, places: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """As `places`, with the unit that is copied for each new one."""
        dims = self.found.weights[key]
        units = {self.atom: np.concatenate([np.arange(self.group.size), self.chosen])}
        return {dim: spread(dims[dim], units) for dim in places}

    def _share(self) -> None:
        """Let a unit and its copies have parts of what reads them that sum to the whole."""
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
                whole = by_place(after.weights[key][dim], group.atoms, part)
                shape = [-1 if d == dim else 1 for d in range(len(after.weights[key]))]
                scaled = after.program.weights.array(key).to_numpy("float64") * whole.reshape(shape)
                self.e.set_weight(key, scaled)


def _copied(host: np.ndarray, places: Mapping[int, np.ndarray]) -> np.ndarray:
    for dim, old in places.items():
        host = np.take(host, old, dim)
    return host


def by_place(term: Term, group: Sequence[Atom], part: np.ndarray) -> np.ndarray:
    """The numbers of an axis's units, at each place of a dimension; 1 where the dimension has no unit of it.

    Args:
        group: the atoms of the axis, which stand side by side where it is several.
        part: a number per unit.
    """
    if isinstance(term, Atom):
        return part if (term,) == tuple(group) else np.ones(known(term))
    if isinstance(term, Product):
        result, at = np.ones(1), 0
        while at < len(term.factors):
            several = len(group) > 1 and term.factors[at : at + len(group)] == tuple(group)
            here = part if several else by_place(term.factors[at], group, part)
            result = np.multiply.outer(result, here).reshape(-1)
            at += len(group) if several else 1
        return result
    return np.concatenate([by_place(t, group, part) for t in term.parts])
