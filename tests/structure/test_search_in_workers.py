"""Searches by workers: the bits of one process for any number of workers, and workers that die."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import search_tasks as tasks

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.structure import searching as ss
from graphwright.structure.searching import methods
from graphwright.structure.searching.trials import Trials
from graphwright.testing.planted import BLOCK_NAMES, SkipTeacher, chain
from graphwright.workers import Failed, WorkerError
from in_process_pool import Shuffled


@cache
def problem() -> tuple[gw.Program, Any, Any]:
    """A start program, a teacher, and a validation batch."""
    teacher = SkipTeacher(0, ss.skips(BLOCK_NAMES), 3)
    return chain(5), teacher, teacher.batch(np.random.default_rng(7))


def search(method: str = "gates", **options: Any) -> ss.SearchResult:
    start, teacher, valid = problem()
    given: dict[str, Any] = {"task": teacher.task, "beside": ("grow", "random", "evolve"), **options}
    return ss.search(start, ss.skips(BLOCK_NAMES), given.pop("train", teacher.batch), valid, method, 40, 3, **given)


def facts(result: ss.SearchResult) -> dict[str, Any]:
    entries = [(e.why, e.author, e.tool) for e in result.journal]
    weights = {key: variable.numpy().tobytes() for key, variable in result.program.variables().items()}
    return {"chosen": result.chosen, "loss": result.loss, "curve": result.curve, "table": result.table,
            "failures": result.failures, "hash": result.program.hash(), "weights": weights,
            "journal": entries}  # fmt: skip


@cache
def alone() -> dict[str, Any]:
    return facts(search())


def test_workers_give_the_bits_of_one_process():
    shuffled = Shuffled(3)
    assert facts(search(workers=shuffled)) == alone()
    assert shuffled.calls > 3


def test_two_processes_give_the_bits_of_one_process_and_one_may_be_killed(pool, tmp_path):
    seen = []
    train = tasks.KilledOnce(problem()[1], str(tmp_path))
    assert facts(search(train=train, workers=pool, progress=seen.append)) == alone()
    assert len(list(tmp_path.iterdir())) == 1  # it was killed
    assert seen


@pytest.mark.deep
@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_of_the_search_give_the_bits_of_one_process(count):
    assert facts(search(workers=count)) == alone()


@pytest.mark.ray
def test_ray_gives_the_bits_of_one_process():
    assert facts(search(workers="ray")) == alone()


def test_one_batch_for_all_steps_can_be_sent(pool):
    given: dict[str, Any] = {"train": problem()[2], "beside": ()}
    assert facts(search("random", workers=pool, **given)) == facts(search("random", **given))


# -- lost workers ------------------------------------------------------------------------------------------------------
def test_structures_without_a_result_rank_last(monkeypatch):
    result = search("random", beside=(), workers=Shuffled(2, lost=2))
    plain = search("random", beside=())
    losses = [loss for _, loss in result.curve]
    assert sorted(losses)[2:] == [np.inf] * 2
    assert all(a in (b, np.inf) for a, (_, b) in zip(losses, plain.curve, strict=True))
    assert result.loss == min(losses)
    assert [text.partition(": ")[2] for text in result.failures] == ["lost"] * 2
    assert "failed: random, structure" in str(result)
    with pytest.raises(WorkerError, match="no structure has a loss"):
        search("random", beside=(), workers=Shuffled(2, lost=4))


@pytest.mark.deep
def test_a_method_without_a_result_is_an_error_if_it_is_the_one_asked_for():
    class LosesEvolve(Shuffled):
        def map(self, function: Any, items: Any, common: Any = None, *, retries: int = 1, each: Any = None) -> Any:
            found = super().map(function, items, common)
            gone = getattr(items[0], "__name__", "") in ("gates", "evolve")
            return [Failed("killed") if gone and item is ss.METHODS["evolve"] else one
                    for item, one in zip(items, found, strict=True)]  # fmt: skip

    result = search("random", beside=("evolve",), workers=LosesEvolve(2))
    row = result.table[-1]
    assert (row.method, row.loss, row.steps, row.chosen) == ("evolve", np.inf, 0, ())
    assert result.failures == ["evolve: killed"]
    assert result.loss == {row.method: row.loss for row in alone()["table"]}["random"]
    with pytest.raises(WorkerError, match="the method has no result") as caught:
        search("evolve", beside=(), workers=LosesEvolve(2))
    assert "evolve" in str(caught.value.where)


# -- what is sent ------------------------------------------------------------------------------------------------------
def test_functions_that_workers_cannot_import_are_refused_before_the_search():
    teacher = problem()[1]
    seen = []
    with pytest.raises(UsageError, match="cannot be sent to a worker process") as caught:
        search(train=lambda rng: teacher.batch(rng), workers=2, progress=seen.append)
    assert "lambda" in str(caught.value.got)
    assert "top level of a module" in str(caught.value.fix)
    assert not seen
    with pytest.raises(UsageError, match="names no workers"):
        search(workers="several")


def test_warnings_of_a_method_in_a_worker_are_shown_here(pool, monkeypatch):
    monkeypatch.setitem(ss.METHODS, "all_open", tasks.all_open)
    monkeypatch.setattr(methods, "_WHOLE", {"all_open"})
    start, teacher, valid = problem()
    with pytest.warns(ss.Collapsed, match="14 of 15 chosen candidates add no parameters"):
        ss.search(start, tasks.Half(BLOCK_NAMES), teacher.batch, valid, "all_open", 40, 0, task=teacher.task, lr=1e-3,
                  beside=(), workers=pool)  # fmt: skip


def test_methods_of_your_own_use_workers(monkeypatch):
    def three(t: Trials) -> Any:
        names = t.candidates.names(t.start)
        return min(t.outcomes([(a,) for a in names[:3]], 10), key=lambda found: found.loss)

    monkeypatch.setattr(methods, "_WHOLE", methods._WHOLE.copy())
    monkeypatch.setitem(ss.METHODS, "three", None)
    ss.method("three")(three)
    shuffled = Shuffled(2)
    assert facts(search("three", beside=(), workers=shuffled)) == facts(search("three", beside=()))
    assert shuffled.calls == 4  # the arrival, no whole method, three, random
    monkeypatch.setitem(ss.METHODS, "misfit", None)
    ss.method("misfit", whole=True)(tasks.misfit)
    with pytest.raises(UsageError, match=r"does not return an outcome of `Trials.outcome`"):
        search("misfit", beside=(), workers=Shuffled(1))
