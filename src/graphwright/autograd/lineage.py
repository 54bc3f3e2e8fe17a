"""How a variable came by its shape: which place each of its entries had before an edit moved, removed or added some.

Every edit of a shape is a step from the shape before; an undo goes back to that very step. So between any two shapes
that a variable has had there is a path, and what belongs to its entries (moments of an optimizer) can follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

Step = tuple[tuple[int, ...], dict[int, np.ndarray]]
"""The shape before, and axis -> for each place after it the one it had, or -1 for a new one."""


class Lineage:
    """A shape that an edit gave a variable.

    Attributes:
        before: the shape that it came from; None for the first one.
        sizes: the shape before, as numbers.
        places: axis -> for each new place the old one, or -1 for one that is new; axes left out are as they were.
    """

    __slots__ = ("before", "places", "sizes")

    def __init__(self, before: Lineage | None, sizes: tuple[int, ...], places: Mapping[int, np.ndarray]) -> None:
        self.before, self.sizes, self.places = before, sizes, dict(places)

    def there(self) -> Step:
        """From the shape before to this one."""
        return self.sizes, self.places

    def back(self) -> Step:
        """From this shape to the one before: for each old place the new one, or -1 for what was removed."""
        after = tuple(len(self.places[i]) if i in self.places else n for i, n in enumerate(self.sizes))
        return after, {axis: inverse(places, self.sizes[axis]) for axis, places in self.places.items()}


def inverse(places: np.ndarray, size: int) -> np.ndarray:
    """For each of `size` old places the new one, or -1; of several the first."""
    found = np.full(size, -1, np.int64)
    kept = np.flatnonzero(places >= 0)[::-1]
    found[places[kept]] = kept
    return found


def path(old: Lineage | None, new: Lineage | None) -> Iterator[Step]:
    """Steps that lead from one shape of a variable to another."""
    above = list(_up(new))
    step = old
    while step is not None and step not in above:
        yield step.back()
        step = step.before
    for link in reversed(above[: above.index(step)]):
        assert link is not None
        yield link.there()


def moved(host: np.ndarray, places: Mapping[int, np.ndarray]) -> np.ndarray:
    """An array with its entries at other places, new ones zero."""
    for axis, old in places.items():
        host = np.take(host, np.maximum(old, 0), axis) if host.shape[axis] else np.zeros_like(
            host, shape=(*host.shape[:axis], len(old), *host.shape[axis + 1 :]))  # fmt: skip
        host[(slice(None),) * axis + (old < 0,)] = 0
    return host


def _up(step: Lineage | None) -> Iterator[Lineage | None]:
    while step is not None:
        yield step
        step = step.before
    yield None
