"""Architecture search: several methods with the same budget of training steps, always including random search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphwright.errors import UsageError
from graphwright.program.cost import parameters
from graphwright.report import ReportBase
from graphwright.structure.errors import NotScalar, whole
from graphwright.structure.searching.methods import METHODS
from graphwright.structure.searching.trial import Trials

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.program.editing.journal import Journal
    from graphwright.progress import Report
    from graphwright.structure.graph import Task
    from graphwright.structure.searching.candidates import Candidates
    from graphwright.structure.searching.trial import Batch, Batches


@dataclass(frozen=True, slots=True)
class SearchRow:
    """One method's result: validation loss, training steps, chosen candidates, parameters."""

    method: str
    loss: float
    steps: int
    chosen: tuple[str, ...]
    params: int


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(ReportBase):
    """Result of a search.

    Attributes:
        program: with the chosen structure, trained from the start's initial weights.
        chosen: names of candidates.
        loss: on the validation batch.
        curve: (steps, validation loss) of every scored structure.
        table: a row per method, the requested one first.
    """

    program: Program
    chosen: tuple[str, ...]
    loss: float
    curve: list[tuple[int, float]]
    table: list[SearchRow]
    HIDDEN: ClassVar = ("program",)

    @property
    def journal(self) -> Journal:
        """The edits from the start to the structure."""
        return self.program.journal

    def __str__(self) -> str:
        lines = [f"{'method':<10}{'loss':>12}{'steps':>8}{'params':>9}  chosen"]
        lines += [f"{r.method:<10}{r.loss:>12.5g}{r.steps:>8}{r.params:>9}  {', '.join(r.chosen) or 'none'}"
                  for r in self.table]  # fmt: skip
        return "\n".join(lines)


def search(
    program: Program,
    candidates: Candidates,
    train: Batches | Batch,
    valid: Batch,
    method: str = "gates",
    budget: int = 4000,
    seed: int = 0,
    *,
    task: Task | None = None,
    lr: float = 0.01,
    beside: Sequence[str] = ("random", "evolve"),
    report: Report | None = None,
) -> SearchResult:
    """Find which candidates a program should have.

    Args:
        program: the start; not changed.
        candidates: `skips(...)`, `ops(...)`, `widths(...)`, ...
        train: a function of a random generator that returns a batch (arrays by name), or one batch for all steps.
        valid: a batch for validation only; structures are compared by the task's loss on it.
        method: of `METHODS`.
        budget: training steps of each method, including retraining.
        seed: of batches and draws.
        task: name of a scalar output, or a function of (outputs, batch); by default the first scalar output.
        lr: of Adam on the weights.
        beside: methods to compare with; `random` is always one of them.
    Raises: UsageError, NotScalar.
    """
    if method not in METHODS or any(m not in METHODS for m in beside):
        raise UsageError("unknown method", expected=", ".join(METHODS), got=f"{method}, {', '.join(beside)}")
    whole("budget", budget, 40)
    whole("seed", seed)
    if not hasattr(candidates, "names") or not isinstance(valid, Mapping):
        raise UsageError("candidates or validation batch are invalid", got=(candidates, type(valid)),
                         expected="skips(...), ops(...), ..., and arrays by name")  # fmt: skip
    scalars = [n for n, v in zip(program.output_names(), program.outputs(), strict=True) if not program.spec(v).shape]
    task = task or next(iter(scalars), None)
    if task is None:
        raise NotScalar("the program has no scalar output", where=program.name, fix="search(..., task=...)")
    batches: Batches = train if callable(train) else lambda rng: train
    candidates.names(program)
    rows, best = [], None
    for name in dict.fromkeys((method, "random", *beside)):
        t = Trials(program, candidates, batches, valid, task, budget, seed, lr, report)
        found = METHODS[name](t)
        rows.append(SearchRow(name, found.loss, t.spent, found.chosen, parameters(found.program)))
        if best is None:
            best = SearchResult(found.program, found.chosen, found.loss, t.curve, rows)
    assert best is not None
    return best
