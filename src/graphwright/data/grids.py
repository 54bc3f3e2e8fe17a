"""Procedural grid tasks: a table of kinds, each a rule in NumPy, and a dataset whose item depends on seed and index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from graphwright.array import random
from graphwright.data.grid_tasks import (
    COLOURS,
    MOST_SIDE,
    SYMMETRIES,
    Grid,
    GridError,
    GridTask,
    GridTasks,
    check_field,
    inverse,
    transformed,
)


# -- input grids, from uniform numbers [side² + 4] -------------------------------------------------------------------
def _noise(u: np.ndarray, side: int, colours: int) -> Grid:
    """All colours with equal probability."""
    return (u[: side * side] * colours).astype(np.int64).reshape(side, side)


def _sparse(u: np.ndarray, side: int, colours: int) -> Grid:
    """Half of the cells are background."""
    found = (u[: side * side] * 2 * (colours - 1)).astype(np.int64).reshape(side, side)
    return np.where(found < colours - 1, found + 1, 0)


def _boxed(u: np.ndarray, side: int, colours: int) -> Grid:
    """A filled box without background colour, anywhere on the background."""
    height, width = (1 + int(x * side) for x in u[-2:])
    top, left = int(u[-4] * (side - height + 1)), int(u[-3] * (side - width + 1))
    found = np.zeros((side, side), np.int64)
    inside = 1 + _noise(u, side, colours - 1)
    found[top : top + height, left : left + width] = inside[top : top + height, left : left + width]
    return found


def _few(u: np.ndarray, side: int, colours: int) -> Grid:
    """One to `side` cells of one colour."""
    found = np.zeros(side * side, np.int64)
    found[np.argsort(u[: side * side], kind="stable")[: 1 + int(u[-1] * side)]] = 1 + int(u[-2] * (colours - 1))
    return found.reshape(side, side)


# -- rules ----------------------------------------------------------------------------------------------------------
Rule = Callable[[Grid, np.ndarray, int], Grid]
"""A function of the grid, random words of the task uint32 [11] and the number of colours."""


def _recolour(x: Grid, words: np.ndarray, colours: int) -> Grid:
    cycle, table = np.argsort(words[:colours], kind="stable"), np.arange(COLOURS)
    table[cycle] = np.roll(cycle, 1)  # one cycle through all colours: no colour stays
    return table[x]


def _shift(x: Grid, words: np.ndarray, colours: int) -> Grid:
    height, width = x.shape
    by = 1 + int(words[0]) % max(height * width - 1, 1)  # not the shift by nothing
    return np.roll(x, divmod(by, width), (0, 1))


def _crop(x: Grid, words: np.ndarray, colours: int) -> Grid:
    rows, columns = (np.flatnonzero(x.any(axis)) for axis in (1, 0))
    return x[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _gravity(x: Grid, words: np.ndarray, colours: int) -> Grid:
    return np.take_along_axis(x, np.argsort(x > 0, axis=0, kind="stable"), 0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of task: its rule, how input grids are drawn, and the size of an output beside that of an input."""

    rule: Rule
    inputs: Callable[[np.ndarray, int, int], Grid] = _noise
    growth: int = 1


KINDS = {
    "copy": Kind(lambda x, words, colours: x),
    "flip": Kind(lambda x, words, colours: x[:, ::-1]),
    "rotate": Kind(lambda x, words, colours: np.rot90(x, 1 + words[0] % 3)),
    "transpose": Kind(lambda x, words, colours: x.T),
    "recolour": Kind(_recolour),
    "shift": Kind(_shift),
    "crop": Kind(_crop, _boxed),
    "mirror": Kind(lambda x, words, colours: np.hstack([x, x[:, ::-1]]), growth=2),
    "gravity": Kind(_gravity, _sparse),
    "count": Kind(lambda x, words, colours: np.full((1, np.count_nonzero(x)), x.max()), _few),
}
"""Kind by name. A rule is stated in one frame; a task has it in one of the eight frames of a square, so that flips are
also upside down, gravity pulls to any side, and a symmetry of a task is again a task of its kind."""


class ProceduralTasks(GridTasks):
    """The dataset of `grids`, which states the arguments."""

    def __init__(
        self, kinds: tuple[str, ...], side: int, colours: int, pairs: int, seed: int, count: int, fixed: bool
    ) -> None:
        self.kinds, self.side, self.colours, self.pairs = kinds, side, colours, pairs
        self.seed, self.count, self.fixed = seed, count, fixed

    def __len__(self) -> int:
        """Return the number of tasks."""
        return self.count

    def _task(self, index: int) -> GridTask:
        name = self.kinds[index % len(self.kinds)]
        kind, shape = KINDS[name], (self.pairs + 1, self.side**2 + 4)
        seed, step = (0, 0) if self.fixed else (self.seed, index)
        words = random.bits(COLOURS + 1, seed=seed, stream=random.stream_of(f"data.grids.{name}"), step=step)
        frame = 0 if self.fixed else int(words[-1]) % SYMMETRIES
        u = random.uniform(
            shape[0] * shape[1], seed=self.seed, stream=random.stream_of(f"data.grids.{name}.cells"), step=index
        )
        grids = []
        for row in u.reshape(shape):
            given = kind.inputs(row, self.side, self.colours)
            made = kind.rule(transformed(given, frame), words, self.colours)
            grids.append((given, transformed(made, inverse(frame))))
        question, answer = grids.pop()
        return GridTask(tuple(grids), question, answer, f"{name}-{index}")


def grids(
    kind: str | Sequence[str], side: int = 4, colours: int = COLOURS, pairs: int = 2, seed: int = 0, *,
    count: int = 100_000, fixed: bool = False,
) -> ProceduralTasks:  # fmt: skip
    """Return a dataset of procedural grid tasks; a task depends on the arguments and its index only.

    | kind | rule |
    | --- | --- |
    | copy, flip, rotate, transpose | a symmetry of the square: the same one for all grids of a task |
    | recolour | a permutation of the colours without fixed points |
    | shift | rows and columns moved, those that leave a side enter at the opposite one |
    | crop | the bounding box of all that is not background |
    | mirror | the grid and beside it its mirror image |
    | gravity | all that is not background falls to one side |
    | count | a bar as long as there are cells of a colour |

    Args:
        kind: a kind, or several, which take turns.
        side: cells per side of an input grid, 2 to 30 (15 for `mirror`).
        colours: number of colours with the background, 2 to 10.
        pairs: number of demonstration pairs.
        seed: seed of the tasks.
        count: number of tasks.
        fixed: use one rule for all tasks of a kind, whatever the seed, so that it can be learned without pairs.
    Raises: GridError, whose `where` is the invalid argument.
    """
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    if not kinds or not all(name in KINDS for name in kinds):
        raise GridError("unknown kind of task", where="kind", expected=", ".join(KINDS), got=repr(kind))
    check_field("side", side, 2, MOST_SIDE // max(KINDS[name].growth for name in kinds))
    check_field("colours", colours, 2, COLOURS)
    check_field("pairs", pairs, 0, 100)
    check_field("seed", seed, 0, 2**63 - 1)
    check_field("count", count, 1, 2**32 - 1)
    if not isinstance(fixed, bool):
        raise GridError("the argument has another type", where="fixed", expected="True or False", got=repr(fixed))
    return ProceduralTasks(kinds, side, colours, pairs, seed, count, fixed)
