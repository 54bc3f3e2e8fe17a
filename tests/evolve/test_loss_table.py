"""The table of losses: training minimises the error that tasks report, and torch has the same values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import graphwright as gw
from graphwright.evolve.tasks.losses import LOSSES
from graphwright.testing.oracle import assert_close

rng = np.random.default_rng(0)
OUTPUTS = rng.normal(size=(7, 3)) * 3
RAW = {
    "mse": rng.normal(size=(7, 3)),
    "bce": rng.uniform(0, 1, (7, 3)),
    "cross_entropy": np.array([0, 2, 1, 1, 0, 2, 2]),
}
TORCH = {
    "mse": lambda y, wanted: F.mse_loss(y, wanted),
    "bce": lambda y, wanted: F.binary_cross_entropy_with_logits(y, wanted),
    "cross_entropy": lambda y, wanted: F.cross_entropy(y, wanted),
}
SQUASHED = {"mse": lambda y: y, "bce": torch.sigmoid, "cross_entropy": lambda y: y.softmax(-1)}


@pytest.mark.parametrize("name", LOSSES)
def test_training_minimises_the_error_that_tasks_report(name: str) -> None:
    loss = LOSSES[name]
    wanted = loss.targets(RAW[name], "a task")[0].astype(float)
    y, given = torch.from_numpy(OUTPUTS), torch.from_numpy(wanted)
    reported = loss.error(loss.predictions(OUTPUTS), wanted)
    assert reported.mean() == pytest.approx(TORCH[name](y, given).item(), rel=1e-12)
    for targets in (loss.labels(wanted), wanted):  # of a task and of a head
        assert_close(loss.trained[name](gw.tensor(OUTPUTS), gw.tensor(targets)), reported.mean(), rtol=1e-12)
    assert_close(loss.steps(gw.tensor(OUTPUTS[:, None]), gw.tensor(wanted[:, None])), reported[:, None], rtol=1e-12)
    assert_close(loss.predictions(OUTPUTS), SQUASHED[name](y), rtol=1e-12)
    assert next(iter(loss.trained)) == name


@pytest.mark.parametrize("name", LOSSES)
def test_squared_errors_are_trained_on_predictions(name: str) -> None:
    loss = LOSSES[name]
    wanted = loss.targets(RAW[name], "a task")[0].astype(float)
    expected = F.mse_loss(SQUASHED[name](torch.from_numpy(OUTPUTS)), torch.from_numpy(wanted))
    assert_close(loss.trained["mse"](gw.tensor(OUTPUTS), gw.tensor(wanted)), expected, rtol=1e-12)


def test_huber_loss_is_available_for_regression_only() -> None:
    assert [name for name, loss in LOSSES.items() if "huber" in loss.trained] == ["mse"]
    y, wanted = torch.from_numpy(OUTPUTS), torch.from_numpy(RAW["mse"])
    found = LOSSES["mse"].trained["huber"](gw.tensor(OUTPUTS), gw.tensor(RAW["mse"]))
    assert_close(found, F.huber_loss(y, wanted), rtol=1e-12)
