"""The solve rate of grid tasks: exact matches of a model's answers, with a vote over the symmetries of a square."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from graphwright.arguments import checked
from graphwright.data import GridError, GridTask, GridTasks, read_answer
from graphwright.data.grid_tasks import SYMMETRIES, Grid, inverse, transformed
from graphwright.errors import UsageError
from graphwright.lifecycle.on_policy import EXTRA
from graphwright.models.generation.batched import GreedyBatch
from graphwright.report import Report, ShortTuple
from graphwright.settings import AtLeastOne

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True, repr=False)
class SolveRate(Report):
    """How many grid tasks a model solves. A task is solved if each of its questions is: one of the tries is the answer.

    Attributes:
        tasks, solved: number of tasks, of different names, and of solved ones.
        questions, correct: number of questions, and of right answers.
        tries: number of answers that count for each question.
        voting: whether the tries are the result of a vote.
        unreadable: share of outputs that do not encode a grid.
        names: names of the solved tasks.
        answers: the tries of each question; `task.to_svg(guess)` draws one.
    """

    tasks: int
    solved: int
    questions: int
    correct: int
    tries: int
    voting: bool
    unreadable: float
    names: tuple[str, ...]
    answers: Sequence[tuple[Grid, ...]]
    FIGURES: ClassVar = ("rate",)
    HIDDEN: ClassVar = ("answers",)

    @property
    def rate(self) -> float:
        """Share of tasks that are solved."""
        return self.solved / self.tasks

    def _text(self) -> str:
        how = (
            f"{self.tries} {'try' if self.tries == 1 else 'tries'}, {'a vote of 8 views' if self.voting else 'greedy'}"
        )
        rows = [f"solved       {self.solved} of {self.tasks} tasks, {self.rate:.1%} ({how})"]
        if self.questions != self.tasks:
            rows.append(f"questions    {self.correct} of {self.questions}")
        return "\n".join([*rows, f"unreadable   {self.unreadable:.1%} of outputs"])


def vote(grids: Sequence[Grid | None], tries: int = 2) -> tuple[Grid, ...]:
    """Return up to `tries` different grids: those that occur most often, of equal counts the earlier one first."""
    counts: dict[tuple[tuple[int, ...], bytes], int] = {}
    first: dict[tuple[tuple[int, ...], bytes], Grid] = {}
    for grid in grids:
        if grid is not None:
            key = grid.shape, np.ascontiguousarray(grid).tobytes()
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, grid)
    best = sorted(counts, key=lambda key: -counts[key])
    return tuple(first[key] for key in best[:tries])


@checked
def exact_match(
    model: Model, tasks: GridTasks | Sequence[GridTask], *, tries: AtLeastOne = 2, voting: bool = True,
    count: AtLeastOne | None = None, batch: AtLeastOne = 16, max_new_tokens: AtLeastOne | None = None,
) -> SolveRate:  # fmt: skip
    """Measure how many grid tasks a model solves with greedy answers.

    With `voting` a question is asked in the 8 symmetric views of the task; each answer is brought back and is one vote.

    Args:
        tasks: grid tasks; questions of one name are one task.
        tries: number of answers that count; without `voting` there is one.
        count: largest number of questions; None for all.
        batch: number of prompts that run together.
        max_new_tokens: limit on an answer; by default that of the longest right answer, plus 2.
    Raises: PromptError for ids that the model does not have; NonFinite; UsageError for no tasks.
    """
    chosen = [tasks[i] for i in range(len(tasks) if count is None else min(count, len(tasks)))]
    if not chosen:
        raise UsageError("there are no tasks", where="tasks", expected="at least one")
    views = range(SYMMETRIES if voting else 1)
    prompts = [task.transformed(view).encode()[0] for task in chosen for view in views]
    longest = max(len(task.encode()[1]) for task in chosen) + EXTRA
    outputs = GreedyBatch(model, batch)(prompts, [max_new_tokens or longest] * len(prompts))
    found = [_read(ids, view) for ids, view in zip(outputs, [*views] * len(chosen), strict=True)]
    n = len(views)
    answers = ShortTuple(vote(found[i * n : (i + 1) * n], tries if voting else 1) for i in range(len(chosen)))
    right = [any(np.array_equal(g, task.answer) for g in grids) for task, grids in zip(chosen, answers, strict=True)]
    names: dict[str, bool] = {}
    for i, (task, fine) in enumerate(zip(chosen, right, strict=True)):
        name = task.name or f"task {i}"
        names[name] = names.get(name, True) and fine
    solved = ShortTuple(name for name, fine in names.items() if fine)
    lost = sum(grid is None for grid in found) / len(found)
    return SolveRate(
        len(names), len(solved), len(chosen), sum(right), tries if voting else 1, voting, lost, solved, answers
    )


def _read(ids: np.ndarray, view: int) -> Grid | None:
    """Return the grid of an output in the view of the task itself, or None if the output is not a grid."""
    try:
        return transformed(read_answer(ids), inverse(view))
    except GridError:
        return None
