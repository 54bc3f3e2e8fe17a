"""Sequences of several lengths in one batch: each as it would be alone; padding moves nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population.runner import Cases, Lesson, fit, outputs
from graphwright.array.population.table import tabulate
from graphwright.evolve.evolution import Evolution
from graphwright.evolve.neurons.genomes import genome, take
from graphwright.evolve.neurons.program import founder

N, T = 21, 6
rng = np.random.default_rng(0)
LENGTHS = rng.integers(1, T + 1, N)
X = rng.normal(size=(N, T, 2)).astype(np.float32)
PADDED = np.arange(T) >= LENGTHS[:, None]
SEEN = ("tanh", "sigmoid49", "relu", "silu", "identity")  # to the bit the same on the VM


@pytest.fixture(scope="module")
def run() -> Any:
    """Genomes whose delayed links read inputs, neurons and outputs."""
    task = ev.Task(X, (X > 0).astype(int), lengths=LENGTHS, split="same", name="padded")
    settings = ev.NEAT(population=12, split_link=0.4, add_link=0.6, delays=0.6, activation=SEEN, output="identity")
    run: Any = Evolution(task, None, settings, seed=3)
    run.run(20, target=2.0)
    assert run.genes.link_delay.max() >= 1
    return run


def of_length(x: np.ndarray, value: float) -> np.ndarray:
    """The same sequences with other values after their ends."""
    return np.where(PADDED[..., None], np.float32(value), x)


def test_padded_batch_matches_single_sequences_bit_for_bit(run):
    answers = outputs(run.table, run.genes, Cases.of(of_length(X, 99.0)))
    for k, length in enumerate(LENGTHS):
        alone = outputs(run.table, run.genes, Cases.of(X[k : k + 1, :length]))
        np.testing.assert_array_equal(answers[:, k, :length], alone[:, 0])
    seen = 0
    for g in range(12):
        p = founder(genome(run.genes, g, 2, 2), batch=1)
        if not p.states():
            continue
        for k in np.argsort(LENGTHS)[[0, N // 2, N - 1]]:  # a program alone has its state for itself
            step = gw.compile(p.fork("alone"), executor="vm")
            for t in range(LENGTHS[k]):
                assert step(x=X[k : k + 1, t])["y"].numpy().tobytes() == answers[g, k, t].tobytes()
            seen += 1
    assert seen >= 9


@pytest.mark.parametrize("loss", ["bce", "mse", "cross_entropy"])
def test_padding_does_not_affect_loss_gradient_and_update(run, loss):
    y = (X > 0).astype(np.float32) if loss != "cross_entropy" else np.eye(2, dtype=np.float32)[(X[..., 0] > 0) * 1]
    counts = (~PADDED).astype(np.float32)
    trained = []
    for padding, label in ((0.0, 0.0), (-7.5, 1.0)):
        genes = take(run.genes, np.arange(12))
        lesson = Lesson.of(of_length(X, padding), of_length(y, label), loss, counts)
        losses = fit(tabulate(genes, 2, 2), genes, lesson, np.full(12, 3), np.full(12, 0.01))
        trained.append((losses.tobytes(), *(column.tobytes() for column in genes)))
    assert trained[0] == trained[1]


def test_the_gradient_of_a_batch_is_the_sum_over_its_sequences(run):
    y = (X > 0).astype(np.float32)

    def gradient(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        genes = take(run.genes, np.arange(12))
        for moments in (genes.first, genes.second, genes.steps):
            moments[:] = 0
        losses = fit(tabulate(genes, 2, 2), genes, Lesson.of(x, y, "bce", counts), np.ones(12, int), np.zeros(12), 0.0)
        return losses[:, 0], genes.first / np.float32(0.1)  # the first moment after one step is a tenth of the gradient

    whole = gradient(of_length(X, 5.0), y, (~PADDED).astype(np.float32))
    alone = [gradient(X[k : k + 1, :n], y[k : k + 1, :n], np.ones((1, n))) for k, n in enumerate(LENGTHS)]
    share = LENGTHS / LENGTHS.sum()
    for ours, theirs in zip(whole, zip(*alone, strict=True), strict=True):
        np.testing.assert_allclose(ours, np.tensordot(share, theirs, 1), rtol=1e-4, atol=1e-6)


def test_padding_of_layers_over_time_has_no_gradient():
    """The masked loss ignores answers after the end of a sequence."""
    from graphwright.evolve.layers.train import _over_time

    counts = (~PADDED).astype(np.float32)
    found = []
    for padding in (0.0, 3.0):
        answer = gw.tensor(of_length(X, padding), requires_grad=True)
        loss = _over_time(answer, gw.tensor((X > 0).astype(np.float32)), gw.tensor(counts), "bce")
        loss.backward()
        assert answer.grad is not None
        assert (answer.grad.numpy()[PADDED] == 0).all()
        found.append((loss.item(), answer.grad.numpy().tobytes()))
    assert found[0] == found[1]
