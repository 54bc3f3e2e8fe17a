"""Grid tasks like those of ARC: demonstration pairs and a question as token ids, their symmetries, and a drawing.

Invariant: `decode` and `encode` are exact inverses.
Source: Chollet 2019, "On the Measure of Intelligence".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.array import random
from graphwright.autograd import Tensor
from graphwright.data.loader import Dataset, pad
from graphwright.errors import IndexOutOfRange, UsageError
from graphwright.program.draw.shapes import Shape, label, picture, shape

COLOURS = 10
"""Colours are the ids 0 to 9; colour 0 is the background."""
ROW, PAIR, ANSWER, END, PAD = range(COLOURS, COLOURS + 5)
"""Ids of the row end, the pair end, the mark before an output grid, the end of the answer, and padding."""
VOCABULARY = COLOURS + 5
MOST_SIDE = 30
SYMMETRIES = 8
"""Number of symmetries of a square, the dihedral group D8."""

Grid = np.ndarray
"""Colours, uint8 [height, width], 1 to 30 cells a side."""


class GridError(UsageError):
    """A field of a grid task, or an argument of the functions that make grid tasks, is invalid; `where` names it."""


def checked_grid(value: Any, field: str) -> Grid:
    """Return a read-only copy of a grid. Raises: GridError for another shape, dtype or colour; `field` names it."""
    try:
        grid = np.asarray(value)
    except ValueError as error:
        raise GridError("the rows have different lengths", where=field) from error
    if grid.ndim != 2 or grid.dtype.kind not in "iu" or not all(1 <= n <= MOST_SIDE for n in grid.shape):
        raise GridError("this is not a grid", where=field, got=f"{grid.dtype} {list(grid.shape)}",
                        expected=f"integers [height, width], each side 1 to {MOST_SIDE}")  # fmt: skip
    if grid.min() < 0 or grid.max() >= COLOURS:
        raise GridError("a colour is out of range", where=field, expected=f"0..{COLOURS - 1}",
                        got=int(grid[(grid < 0) | (grid >= COLOURS)][0]))  # fmt: skip
    grid = grid.astype(np.uint8)
    grid.flags.writeable = False
    return grid


def transformed(grid: Grid, symmetry: int) -> Grid:
    """Return the grid, transposed if `symmetry` >= 4, after `symmetry` % 4 quarter turns counterclockwise."""
    return np.rot90(grid.T if symmetry >= 4 else grid, symmetry % 4)


def inverse(symmetry: int) -> int:
    """Return the symmetry that reverts another one; a reflection reverts itself."""
    return (4 - symmetry) % 4 if symmetry < 4 else symmetry


@dataclass(frozen=True, eq=False, repr=False)
class GridTask:
    """Demonstration pairs of one rule, a question and its answer; tasks are equal if their grids are.

    Attributes:
        pairs: demonstrations, each (input grid, output grid).
        question, answer: the input grid to be answered, and the output grid.
        name: name of the task; several questions of one task share it.
    Raises: GridError.
    """

    pairs: tuple[tuple[Grid, Grid], ...]
    question: Grid
    answer: Grid
    name: str = ""

    def __post_init__(self) -> None:
        sides = ("input", "output")
        pairs = tuple(
            tuple(checked_grid(g, f"pairs[{i}].{side}") for g, side in zip(pair, sides, strict=True))
            for i, pair in enumerate(self.pairs)
        )
        object.__setattr__(self, "pairs", pairs)
        for name in ("question", "answer"):
            object.__setattr__(self, name, checked_grid(getattr(self, name), name))

    @property
    def grids(self) -> list[Grid]:
        """All grids: input and output of each pair, the question and the answer."""
        return [*(grid for pair in self.pairs for grid in pair), self.question, self.answer]

    def encode(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of prompt and answer, int64 [P] and [A].

        A grid is its rows, each followed by `ROW`. A pair is its input, `ANSWER`, its output and `PAIR`. The prompt is
        all pairs, the question and `ANSWER`; the answer is the output grid and `END`.
        """
        prompt: list[int] = []
        for given, made in self.pairs:
            prompt += [*_rows(given), ANSWER, *_rows(made), PAIR]
        prompt += [*_rows(self.question), ANSWER]
        return np.array(prompt, np.int64), np.array([*_rows(self.answer), END], np.int64)

    @staticmethod
    def decode(prompt: Any, answer: Any, name: str = "") -> GridTask:
        """Return the task of encoded ids, ignoring padding at the end. Raises: GridError if the ids are invalid."""
        ids = _unpadded(prompt)
        if not len(ids) or ids[-1] != ANSWER:
            raise GridError("the prompt does not end with ANSWER", where="prompt", expected=ANSWER, got=ids[-1:])
        *pairs, question = _split(ids[:-1], PAIR)
        grids = []
        for i, pair in enumerate(pairs):
            sides = _split(pair, ANSWER)
            if len(sides) != 2:
                got = f"{len(sides) - 1} times ANSWER"
                raise GridError("a pair is not an input and an output", where=f"pairs[{i}]", expected="once", got=got)
            grids.append((_grid(sides[0], f"pairs[{i}].input"), _grid(sides[1], f"pairs[{i}].output")))
        return GridTask(tuple(grids), _grid(question, "question"), read_answer(answer), name)

    def transformed(self, symmetry: int = 0, palette: Sequence[int] | np.ndarray | None = None) -> GridTask:
        """Return the task with a symmetry applied to all grids, and each colour c replaced by palette[c].

        Args:
            symmetry: 0 to 7, see `transformed`.
            palette: a permutation of the 10 colours that keeps the background 0, so that the kind of rule stays.
        Raises: GridError.
        """
        if symmetry not in range(SYMMETRIES):
            raise GridError("unknown symmetry", where="symmetry", expected=f"0..{SYMMETRIES - 1}", got=symmetry)
        table = np.arange(COLOURS) if palette is None else np.asarray(palette)
        if table.shape != (COLOURS,) or sorted(table.tolist()) != list(range(COLOURS)) or table[0]:
            expected = "a permutation of 0..9 that keeps 0"
            raise GridError("invalid palette", where="palette", expected=expected, got=table.tolist())

        def change(grid: Grid) -> Grid:
            return table[transformed(grid, symmetry)]

        pairs = tuple((change(given), change(made)) for given, made in self.pairs)
        return GridTask(pairs, change(self.question), change(self.answer), self.name)

    def to_svg(self, guess: Grid | None = None) -> str:
        """Draw the pairs, the question and the answer as SVG, and a `guess` beside the answer."""
        columns: list[tuple[str, Grid | None, Grid]] = [(f"pair {i + 1}", *pair) for i, pair in enumerate(self.pairs)]
        columns.append(("question", self.question, self.answer))
        if guess is not None:
            right = np.array_equal(guess, self.answer)
            columns.append((f"guess: {'right' if right else 'wrong'}", None, checked_grid(guess, "guess")))
        cell = max(4, min(22, 190 // max(max(g.shape) for g in self.grids)))
        top = 40 + cell * max(g.shape[0] for _, g, _ in columns if g is not None)
        drawn: list[Shape] = []
        left = 14
        for title, given, made in columns:
            wide = max(g.shape[1] for g in (given, made) if g is not None)
            drawn.append(label(left, 18, title, class_="n"))
            drawn += [] if given is None else _cells(given, left, 28, cell)
            arrow = left + (wide if given is None else given.shape[1]) * cell / 2
            drawn += [] if given is None else [label(arrow, top + 8, "↓", "middle")]
            drawn += _cells(made, left, top + 20, cell)
            left += max(wide * cell, 76) + 26
        height = top + 34 + cell * max(made.shape[0] for _, _, made in columns)
        return picture(left - 12, height, drawn, {"text": {"font_size": 12, "fill": "#24292f"},
                                                  "n": {"font_weight": "bold"}})  # fmt: skip

    def _repr_html_(self) -> str:
        return self.to_svg()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GridTask) and self._bytes() == other._bytes()

    def __hash__(self) -> int:
        return hash(self._bytes())

    def _bytes(self) -> bytes:
        return np.concatenate(self.encode()).tobytes()

    def __repr__(self) -> str:
        (h, w), (oh, ow) = self.question.shape, self.answer.shape
        return f"GridTask({self.name!r}, {len(self.pairs)} pairs, {h} x {w} -> {oh} x {ow})"


def read_answer(ids: Any) -> Grid:
    """Return the grid of an answer's ids, which end with `END`. Raises: GridError if they are not a grid."""
    ids = _unpadded(ids)
    if not len(ids) or ids[-1] != END:
        raise GridError("the answer does not end with END", where="answer", expected=END, got=ids[-1:])
    return _grid(ids[:-1], "answer")


def _rows(grid: Grid) -> list[int]:
    return np.pad(grid.astype(np.int64), ((0, 0), (0, 1)), constant_values=ROW).reshape(-1).tolist()


def _unpadded(ids: Any) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise GridError("this is not a row of ids", expected="integers [T]", got=f"{ids.dtype} {list(ids.shape)}")
    tokens = np.flatnonzero(ids != PAD)
    return ids[: tokens[-1] + 1] if len(tokens) else ids[:0]


def _split(ids: np.ndarray, mark: int) -> list[np.ndarray]:
    at = np.flatnonzero(ids == mark)
    return [part if not i else part[1:] for i, part in enumerate(np.split(ids, at))]


def _grid(ids: np.ndarray, field: str) -> Grid:
    if not len(ids) or ids[-1] != ROW:
        raise GridError("a grid does not end with ROW", where=field, expected=ROW, got=ids[-1:])
    return checked_grid([row.tolist() for row in _split(ids[:-1], ROW)], field)


_PAINT = (
    "#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00", "#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25",
)  # fmt: skip


def _cells(grid: Grid, left: float, top: float, cell: int) -> list[Shape]:
    return [
        shape("rect", x=left + x * cell, y=top + y * cell, width=cell, height=cell, fill=_PAINT[colour],
              stroke="#6e7781", stroke_width=0.75)
        for y, row in enumerate(grid.tolist()) for x, colour in enumerate(row)
    ]  # fmt: skip


# -- datasets ----------------------------------------------------------------------------------------------------------
class GridTasks(Dataset):
    """A dataset of grid tasks: items are `GridTask`s, batches are padded ids; subclasses define `_task`."""

    def _task(self, index: int) -> GridTask:
        raise NotImplementedError

    def __getitem__(self, index: int) -> GridTask:
        """Return one task. Raises: IndexOutOfRange."""
        if not 0 <= index < len(self):
            raise IndexOutOfRange("the index of a task is out of range", expected=f"0..{len(self) - 1}", got=index)
        return self._task(int(index))

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return tasks as {"prompt": int64 [B, P], "answer": int64 [B, A]}; rows end with `PAD`."""
        return collate_tasks([self[int(i)] for i in indices])


def collate_tasks(tasks: Sequence[GridTask]) -> dict[str, Tensor]:
    """Return tasks as {"prompt": int64 [B, P], "answer": int64 [B, A]}, padded with `PAD`; a `collate_fn`."""
    prompts, answers = zip(*(task.encode() for task in tasks), strict=True)
    return {"prompt": pad(prompts, PAD)[0], "answer": pad(answers, PAD)[0]}


class ListedTasks(GridTasks):
    """A list of grid tasks as a dataset."""

    def __init__(self, tasks: Sequence[GridTask]) -> None:
        self.tasks = tuple(tasks)

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.tasks)

    def _task(self, index: int) -> GridTask:
        return self.tasks[index]


class AugmentedTasks(GridTasks):
    """Random variants of grid tasks: item i is task i mod n under a symmetry and a palette drawn from (seed, i).

    Args:
        tasks: n tasks.
        copies: number of variants of each task.
        seed: seed of the draws.
        colours: colours 1 to `colours` - 1 are permuted; the background 0 and the others stay.
    Raises: GridError.
    """

    def __init__(
        self, tasks: Sequence[GridTask] | GridTasks, copies: int, *, seed: int = 0, colours: int = COLOURS
    ) -> None:
        check_field("copies", copies, 1, 2**31 - 1)
        check_field("colours", colours, 2, COLOURS)
        check_field("seed", seed, 0, 2**63 - 1)
        self.tasks, self.copies, self.seed, self.colours = tasks, copies, seed, colours

    def __len__(self) -> int:
        """Return n times `copies`."""
        return len(self.tasks) * self.copies

    def _task(self, index: int) -> GridTask:
        words = random.bits(COLOURS, seed=self.seed, stream=random.stream_of("data.grids.variant"), step=index)
        palette = np.arange(COLOURS)
        palette[1 : self.colours] = 1 + np.argsort(words[1 : self.colours], kind="stable")
        return self.tasks[index % len(self.tasks)].transformed(int(words[0]) % SYMMETRIES, palette)


def check_field(field: str, value: Any, low: int, high: int) -> None:
    """Raise GridError unless the argument `field` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        expected = f"a whole number from {low} to {high}"
        raise GridError("the argument is out of range", where=field, expected=expected, got=repr(value))
