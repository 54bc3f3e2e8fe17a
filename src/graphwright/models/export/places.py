"""Where the units of a program go in a template: neurons, heads and channels at the places that they were cut from.

Any places would do, as a sum has no order; those of the source keep untouched rows in their rows. They are known while
the program that was opened is edited; of a program that was saved and loaded, units stand one behind another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.autograd import Variable
from graphwright.models.export.reading import TRUNK, Reading, key_heads
from graphwright.program import Value
from graphwright.program.kinds import STORED

Places = dict[str, np.ndarray]
"""Dimension name -> for each place of the template the place here, or -1 for none."""


def places_of(reading: Reading, slot: int, dims: Any) -> Places | str:
    """Where the sizes of one branch go in a template of sizes `dims`; or why they do not fit."""
    part, sizes, found = reading.part(slot), reading.sizes[slot], Places()
    assert part is not None
    for name, size in sizes.items():
        wanted = int(getattr(dims, name))
        if name in ("heads", "kv_heads"):
            continue
        if size > wanted:
            return f"{size} along {name}, where the class has {wanted}"
        known = _before(reading, TRUNK if name == "hidden" else slot, name, wanted)
        here = np.arange(size) if known is None else known
        found[name] = np.full(wanted, -1)
        found[name][here] = np.arange(size)
    if "heads" in sizes:
        table = key_heads(reading.program, part, sizes["heads"], sizes["kv_heads"])
        known = _before(reading, slot, "heads", dims.heads)
        made = heads_places(table, sizes["kv_heads"], dims.heads, dims.kv_heads, known)
        if made is None:
            given = f"{sizes['heads']} query heads on {sizes['kv_heads']} key heads"
            return f"{given}, where the class has {dims.heads} on {dims.kv_heads}"
        found["heads"], found["kv_heads"] = made
    return found


def heads_places(
    table: np.ndarray, kv_here: int, heads: int, kv_heads: int, before: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Where query heads and key heads go in a template of even groups; None if they do not fit.

    A key head that more query heads read than a group has is repeated.

    Args:
        table: for each query head here the key head it reads.
        kv_here: number of key heads here.
        heads, kv_heads: of the template.
        before: for each query head here its place in the source, where that is known.
    Returns: for each query head and each key head of the template the one here, or -1.
    """
    each = heads // kv_heads
    queries, keys = np.full((kv_heads, each), -1), np.full(kv_heads, -1)
    if before is not None:
        readers = [set(table[before // each == group].tolist()) for group in range(kv_heads)]
        if all(len(read) <= 1 for read in readers):
            queries.reshape(-1)[before] = np.arange(len(table))
            return queries.reshape(-1), np.array([next(iter(read), -1) for read in readers])
    groups = [np.flatnonzero(table == k) for k in range(kv_here)]
    chunks = [(k, g[i : i + each]) for k, g in enumerate(groups) for i in range(0, len(g), each)]
    if len(chunks) > kv_heads:
        return None
    for at, (k, chunk) in enumerate(chunks):
        keys[at] = k
        queries[at, : len(chunk)] = chunk
    return queries.reshape(-1), keys


def _before(reading: Reading, slot: int, name: str, wanted: int) -> np.ndarray | None:
    """For each unit here its place in the source, if a weight knows it and all lie within the template."""
    part, p = reading.part(slot), reading.program
    terms = {path: dims for path, _, _, dims in reading.arch.weights(reading.dims)}
    for path, bound in part.weights.items() if part is not None else ():
        if not isinstance(bound, Value) or p.op(bound.node) not in STORED:
            continue
        for dim, term in enumerate(terms[path]):
            first, _, each = term.partition("*")
            if first != name:
                continue
            places = _origin(p.weights[p.key(bound.node)], dim)
            unit = int(getattr(reading.dims, each)) if each else 1
            known = None if places is None else places[::unit] // unit
            if known is not None and _inside(known, wanted):
                return known
    return None


def _inside(places: np.ndarray, size: int) -> bool:
    """True for different places from 0 to size - 1."""
    return len(np.unique(places)) == len(places) and bool(((places >= 0) & (places < size)).all())


def _origin(variable: Variable, dim: int) -> np.ndarray | None:
    """For each place along an axis of a weight the one it had at first, -1 for a new one; None if it is not known."""
    places, step = np.arange(variable.shape[dim]), variable.lineage
    while step is not None:
        back = np.asarray(step.places[dim]) if dim in step.places else np.arange(step.sizes[dim])
        if len(places) and places.max() >= len(back):
            return None  # another shape was set in between
        places = np.where(places < 0, -1, back[places])
        step = step.before
    return places


def misfits(reading: Reading, dims: Any) -> list[tuple[int, str]]:
    """Branches that do not fit into a template of sizes `dims`, each with the reason."""
    slots = [i for i in range(TRUNK, len(reading.slots)) if reading.part(i) is not None]
    return [(i, found) for i in slots if isinstance(found := places_of(reading, i, dims), str)]
