"""Cutting, growing and permuting units inside an open edit: each solves for axes and makes one `ResizeAxis`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.ops import call, get
from graphwright.ops.terms import Atom, Product, Term, atoms, known, spread
from graphwright.program.axes.axes import Axes, AxisGroup
from graphwright.program.axes.layers import remove_layers
from graphwright.program.axes.resize import kept, resize
from graphwright.program.axes.solve_axes import Said, origin
from graphwright.program.axes.units import Units, runs
from graphwright.program.errors import EmptyAxis, FrozenAxis, RaggedUnit
from graphwright.program.kinds import KINDS
from graphwright.program.selection import StaleSelection

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction


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
    if any(p.op(n) != "sdpa" for n in here):
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
