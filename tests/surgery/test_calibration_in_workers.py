"""Calibration by workers: the bits of one process for any number of workers, and workers that die."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from calibration_tasks import KillsOne, product
from prune_models import convolutional, gpt2_like, images

import graphwright as gw
from graphwright import surgery as sg
from graphwright import workers
from graphwright.array.threads import ThreadCounts, thread_counts, using_threads
from graphwright.errors import UsageError
from graphwright.surgery.spread import spread
from graphwright.workers import WorkerError
from in_process_pool import Shuffled
from seeds import some

IDS = np.random.default_rng(0).integers(0, 29, (520, 16))  # four chunks to learn from, two held out


def _prune(
    program: Callable[[], gw.Program], source: Any, share: float = 0.3, **options: Any
) -> Callable[..., tuple[gw.Program, Any]]:
    def run(**given: Any) -> tuple[gw.Program, Any]:
        p = program()
        return p, sg.prune(p, share, sg.Calibration(source, **given), timed=False, **options)

    return run


def _compress(**given: Any) -> tuple[gw.Program, Any]:
    p = gpt2_like()
    return p, sg.compress(p, "h.*.mlp", "asvd", sg.Ratio(0.2), calibration=sg.Calibration(IDS, **given), min_dim=8)


RUNS: dict[str, Callable[..., tuple[gw.Program, Any]]] = {
    "text": _prune(gpt2_like, IDS),
    "gradients": _prune(gpt2_like, IDS, method="taylor"),
    "modules": _prune(lambda: gpt2_like(layers=5), IDS, 0.1, recipe="modules"),  # more than the shortlist has
    "images": _prune(convolutional, images(50_000)),
    "matrices": _compress,
}


def facts(made: tuple[gw.Program, Any]) -> dict[str, Any]:
    p, report = made
    found = {key: value for key, value in report.to_json().items() if key not in ("seconds", "journal", "rows")}
    found["rows"] = [
        {k: v for k, v in row.items() if k not in ("speed", "slower")} for row in report.to_json().get("rows", [])
    ]
    weights = {key: variable.numpy().tobytes() for key, variable in p.variables().items()}
    return {"report": found, "hash": p.hash(), "weights": weights, "why": [entry.why for entry in p.journal]}


@cache
def alone(kind: str) -> dict[str, Any]:
    return facts(RUNS[kind]())


@pytest.mark.parametrize("kind", some(RUNS, 2))
def test_workers_give_the_bits_of_one_process(kind):
    shuffled = Shuffled(3)
    assert facts(RUNS[kind](workers=shuffled)) == alone(kind)
    assert shuffled.calls > 0


@pytest.mark.deep  # in every run a worker of a search is killed
def test_two_processes_give_the_bits_of_one_process_and_one_may_be_killed(pool, tmp_path):
    assert facts(RUNS["text"](workers=KillsOne(pool, tmp_path))) == alone("text")
    assert len(pool.pids) == 2
    assert (tmp_path / "killed").exists()


@pytest.mark.deep
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", RUNS)
def test_processes_of_the_calibration_give_the_bits_of_one_process(kind, count):
    assert facts(RUNS[kind](workers=count)) == alone(kind)


@pytest.mark.ray
@pytest.mark.parametrize("kind", RUNS)
def test_ray_gives_the_bits_of_one_process(kind):
    assert facts(RUNS[kind](workers="ray")) == alone(kind)


def test_scores_of_an_axis_use_workers():
    p = gpt2_like()
    shuffled = Shuffled(2)
    for method in ("obs", "taylor"):
        found = [
            sg.scores(p.axes()["h.1.mlp.neurons"], sg.Calibration(IDS, workers=w), method) for w in (None, shuffled)
        ]
        assert found[0].tobytes() == found[1].tobytes()
    assert shuffled.calls > 2


def test_workers_use_the_numbers_of_threads_of_this_process(pool):
    """OpenBLAS adds up the entries of products of these sizes in another order on two threads."""
    a = np.random.default_rng(0).normal(size=(1000, 333))
    assert pool.threads == 1 or thread_counts().products != 2
    for counts in (ThreadCounts(1, 1), ThreadCounts(2, 2)):
        with using_threads(counts):
            expected = product(None, a)
            assert expected[0].kernels == counts.kernels
            assert list(spread(pool, product, [a, a], None)) == [expected] * 2


def test_a_chunk_without_a_result_is_an_error_and_nothing_changes():
    p = gpt2_like()
    before = p.hash()
    for lost in (1, 7):
        data = sg.Calibration(IDS, workers=Shuffled(2, lost=lost))
        with pytest.raises(WorkerError, match="a task has no result") as caught:
            sg.prune(p, 0.3, data, timed=False)
        assert str(caught.value.where).startswith("chunk ")
        assert caught.value.got == "lost"
        with pytest.raises(WorkerError, match="a task has no result"):
            sg.compress(p, "h.*.mlp", "asvd", sg.Ratio(0.2), calibration=sg.Calibration(IDS, workers=Shuffled(2, 1)),
                        min_dim=8)  # fmt: skip
    assert (p.hash(), len(p.journal)) == (before, 0)


def test_functions_that_workers_cannot_import_are_refused(pool):
    p = gpt2_like()
    stream = sg.Calibration(IDS, workers=pool).stream(p)
    with pytest.raises(UsageError, match="cannot be sent to a worker process") as caught:
        list(stream.each(lambda feeds, found: 0, [p.output("logits")]))
    assert "top level of a module" in str(caught.value.fix)
    with pytest.raises(UsageError, match="names no workers"):
        sg.Calibration(IDS, workers="several")


def test_one_chunk_stays_in_this_process_and_own_workers_end_with_the_data():
    shuffled = Shuffled(2)
    sg.prune(gpt2_like(), 0.3, sg.Calibration(IDS[:60], workers=shuffled), timed=False)
    assert shuffled.calls == 0
    data = sg.Calibration(IDS, workers=2)
    own, closed = data.pool, []
    assert isinstance(own, workers.Processes)
    own.close = lambda: closed.append(True)
    del data
    assert own.pids == []
