"""Runs that meet: two registries become one, by structure, and genomes of the other run get its numbers.

>>> run.registry, numbers = islands.merge(run.registry, other.registry)
>>> guests = islands.renumbered(other.genes, numbers)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.population.names import LINK_COLUMNS, NODE_COLUMNS
from graphwright.evolve.errors import RegistryConflict
from graphwright.evolve.genomes import BIAS, HAND, IN, LINK, OUT, SPLIT, number, with_room


def merge(mine: Any, other: Any) -> tuple[Any, np.ndarray]:
    """One registry of all that two runs know; both are left as they are, and `mine` keeps its numbers.

    Keys name structure by numbers, so a key of `other` is looked up with those that its parts have got by then. A
    neuron made by hand is known by a digest of such numbers, which can't be translated: it is the same in both only
    where the runs have the same past.

    Args:
        mine, other: `run.registry` of runs with the same inputs and outputs.
    Returns: the registry; by number in `other` the number there, int64 [numbers of other], no two alike.
    Raises: RegistryConflict for other inputs or outputs.
    """
    ends, others = _ends(mine), _ends(other)
    if ends != others:
        raise RegistryConflict("runs that meet have the same inputs and outputs", expected=ends, got=others)
    merged, used = type(mine)(*(column.copy() for column in mine)), int(other.count[0])
    merged = with_room(merged, used)
    numbers, same = np.zeros(used, np.int64), True
    for n, (kind, a, b, c) in enumerate(other.keys[:used].tolist()):
        if kind == LINK:
            a, b = int(numbers[a]), int(numbers[b])
        elif kind == SPLIT:
            a = int(numbers[a])
        elif kind == HAND and not (same and mine.keys[n].tolist() == [kind, a, b, c]):
            b = _unused(merged, a)
        numbers[n] = number(merged, kind, a, b, c)
        same = same and int(numbers[n]) == n
    return merged, numbers


def renumbered(genes: Any, numbers: np.ndarray) -> Any:
    """A population under other numbers, each genome in their order; weights and moments go along.

    Sums of a neuron run in the order of its links' numbers, so that answers may differ in their last bits.
    """
    parts: dict[str, np.ndarray] = {"node_off": genes.node_off, "link_off": genes.link_off}
    for off, columns, ids in (("node_off", NODE_COLUMNS, "node_id"), ("link_off", LINK_COLUMNS, "link_id")):
        new = numbers[getattr(genes, ids)]
        order = np.lexsort((new, np.repeat(np.arange(len(genes.node_off) - 1), np.diff(getattr(genes, off)))))
        parts |= {name: getattr(genes, name)[order] for name in columns}
    for name in ("node_id", "link_id", "link_src", "link_dst"):
        parts[name] = numbers[parts[name]].astype(np.int32)
    return type(genes)(**parts)


def _ends(registry: Any) -> tuple[int, int]:
    """How many inputs and outputs a registry begins with."""
    kinds = registry.keys[: int(registry.count[0]), 0].tolist()
    assert kinds.count(BIAS) == 1
    return kinds.count(IN), kinds.count(OUT)


def _unused(registry: Any, digest: int) -> int:
    """The next count that no neuron by hand of this digest has."""
    keys = registry.keys[: int(registry.count[0])]
    return int(((keys[:, 0] == HAND) & (keys[:, 1] == digest)).sum())
