"""A segment: one training of a life, step by step, with a commit after each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphwright.autograd.random import Generator, rng
from graphwright.errors import NonFinite, UsageError
from graphwright.lifecycle.figures import Figures
from graphwright.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from graphwright.optim.step_terms import check_streak
from graphwright.program.editing.proposal import Proposal, apply_proposals

if TYPE_CHECKING:
    from graphwright.lifecycle.life import Life
    from graphwright.optim.training_step import CompiledStep
    from graphwright.program import Program

Schedule = LRScheduler | ReduceLROnPlateau
"""A learning-rate schedule, which a segment advances after each update; the latter by the loss."""


class Controller(Protocol):
    """What `Segment.step` accepts as `care`. Two methods are optional.

    `figures()` returns dicts of floats for the curve, one for each step since the last one that it reported, in order;
    it may return none for up to 256 steps. `finish()` is called before the segment ends, for events not yet reported.
    """

    def propose(self, view: Any) -> Iterable[Proposal]:
        """Return proposals; `view` is the segment: `program`, `train` and `age`."""
        ...


class Segment:
    """A training of a life; made by `Life.segment` and `Life.resume`. Leaving its `with` block ends it.

    An exception closes the life instead: open it again, and `resume` continues the segment.

    Attributes:
        life: the life.
        train: the compiled step.
        figures: totals, and the curve of the loss.
        schedule: a learning-rate schedule, or None.
        contract: what a training must share to resume this one.
        whole: False while a step runs, and after one that failed.
    """

    def __init__(
        self, life: Life, train: CompiledStep, figures: Figures, contract: Mapping[str, Any], data: Any,
        scheduler: Schedule | None, generator: Generator,
    ) -> None:  # fmt: skip
        self.schedule = scheduler
        self.life, self.train, self.figures, self.contract = life, train, figures, contract
        self.care: Controller | None = None  # of the last step
        self.whole = True
        loader = data if hasattr(data, "state_dict") and hasattr(data, "load_state_dict") else None
        self.parts = {"loader": loader, "scheduler": scheduler, "rng": generator}

    @property
    def program(self) -> Program:
        """The program of the life."""
        return self.life.program

    @property
    def age(self) -> int:
        """Age of the life in steps."""
        return self.life.age

    @property
    def steps(self) -> int:
        """Steps of this segment so far, over all processes that took part."""
        return self.figures.steps

    def step(self, batch: Mapping[str, Any] | Sequence[Any], care: Controller | None = None) -> float:
        """Train on one batch, advance the schedule, apply what `care` proposes as one edit, and commit; return loss.

        If a commit cannot be written, as on a full disk, the training continues; `life.lag` and `life.reason` say so,
        and a later commit has everything.

        Args:
            batch: inputs of the step by name, or in the order of `train.inputs`.
            care: a controller.
        A step whose update a term skipped (see `experts.integrity`) returns NaN, is logged as a fault and committed;
        the schedule does not advance, and `care` is not asked.

        Raises: NonFinite for a loss that is not finite, if no term skips such updates; Diverged at the fifth skipped
            update in a row; both before the commit, so that the last commit has the weights before it; FeedError.
        """
        life = self._open()
        feeds = self._feeds(batch)
        life._log_edits()
        self.whole = False
        loss = float(self.train(feeds).item())
        if not isfinite(loss):
            self._check(loss)
        life.age += 1
        proposals = self._decided(loss, care) if isfinite(loss) else []
        first = next((a for a in map(np.shape, feeds.values()) if a), ())
        counted = next((f for f in feeds.values() if "int" in str(getattr(f, "dtype", ""))), None)
        tokens = 0 if counted is None else int(np.prod(np.shape(counted)))
        self.figures.add(loss, first[0] if first else 1, tokens)
        self.care, measure = care, getattr(care, "figures", None)
        rows = () if measure is None else measure()
        if rows or measure is None:
            self.figures.enter(rows)
        if proposals:
            self._apply(proposals, type(care).__name__)
        self.whole = True
        life._commit_step()
        return loss

    def _check(self, loss: float) -> None:
        """Log a step whose update was skipped. Raises: NonFinite if it was not; Diverged after too many in a row."""
        life, streak = self.life, self.figures.streak + 1
        where, last = f"step {life.age + 1} of {life.name}", f"its last commit is step {life.store.last.step}"
        if not self.train.skipped:
            raise NonFinite("the loss is not finite", where=where, got=loss, fix=f"open the life again: {last}")
        check_streak(streak, where, f"; open the life again: {last}")
        facts = {"reason": "loss or gradients not finite, update skipped", "streak": streak}
        life.log.add("fault", life.age + 1, facts)

    def _decided(self, loss: float, care: Controller | None) -> list[Proposal]:
        """Advance the schedule; return what the controller proposes."""
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(loss)
        elif self.schedule is not None:
            self.schedule.step()
        return [] if care is None else list(care.propose(self))

    def end(self) -> None:
        """End the segment: log it, and write everything. Raises: UnwritableTarget."""
        life, figures = self._open(), self.figures
        if (finish := getattr(self.care, "finish", None)) is not None:
            self._apply(list(finish()), type(self.care).__name__)
        measure = getattr(self.care, "figures", None)
        figures.enter(() if measure is None else measure())
        figures.ended = True
        alarms = sum(e.kind == "alarm" for e in life.log if e.step > figures.start)
        facts = {**figures.to_json(), "alarms": alarms}
        facts |= {"curve": {"stride": figures.curve.stride, "points": figures.curve.points}}
        facts |= {"measured": figures.summary(), "rank_correlations": figures.curve.rank_correlations()}
        del facts["ended"], facts["streak"], facts["waiting"]
        life.log.add("segment_end", life.age, facts)
        life._leave(self)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.life.training is self:
            if kind is None:
                self.end()
            else:
                self.life._suspend()

    def training(self) -> dict[str, Any]:
        """Return contract and figures, for a commit."""
        return {"contract": self.contract, "segment": self.figures.to_json()}

    def _open(self) -> Life:
        if self.life.training is not self:
            raise UsageError("the segment is over", where=self.life.name, fix="life.segment(...) or life.resume(...)")
        return self.life

    def _feeds(self, batch: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            return dict(batch)
        names = tuple(self.train.inputs)
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        if len(values) != len(names):
            raise UsageError("the batch has another number of entries than the step has inputs", got=len(values),
                             expected=", ".join(names), fix="pass a dict by name")  # fmt: skip
        return dict(zip(names, values, strict=True))

    def _apply(self, proposals: Sequence[Proposal], tool: str) -> None:
        life = self.life
        life._log_edits()
        entry = apply_proposals(life.program, proposals, tool, life.age)
        if entry is not None:
            life._take_edits()
            self.train.refresh()  # the commit has the states of new experts
        for x in proposals:
            link = {} if entry is None or x.apply is None else {"entry": entry.seq, "hash": entry.hash}
            life.log.add(
                x.event, max(life.age - x.steps_ago, 0), {**x.facts, "name": x.name, "reason": x.reason, **link}
            )


def key_of(p: Program, generator: Generator) -> str | None:
    """Return the key of the weight that is the key of a generator; None if the program does not use it."""
    return next((key for key, variable in p.weights.items() if variable is generator.key), None)


def default_generator() -> Generator:
    """Return the default random generator."""
    return rng
