"""L-BFGS against torch: the same trajectory, and the same number of calls of the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import UsageError

START = np.array([-1.2, 1.0, 0.3, 2.0])


def rosenbrock(x: Any) -> Any:
    """Σ 100 (x' - x²)² + (1 - x)²."""
    a, b = x[:-1], x[1:]
    return (100 * (b - a * a) ** 2 + (1 - a) ** 2).sum()


def run(
    lib: Any, optimizer: Any, steps: int, options: dict[str, Any]
) -> tuple[list[float], list[np.ndarray], int, Any]:
    x = lib.nn.Parameter(lib.tensor(START, dtype=lib.float64))
    opt = optimizer([x], **options)
    losses, points, calls = [], [], 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = rosenbrock(x)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(float(opt.step(closure)))
        points.append(x.detach().numpy().copy())
    return losses, points, calls, opt


CASES = [
    {"line_search_fn": "strong_wolfe"},
    {"line_search_fn": "strong_wolfe", "history_size": 2, "max_iter": 7},
    {"line_search_fn": "strong_wolfe", "lr": 0.01, "max_iter": 3, "max_eval": 4},
    {"lr": 0.001, "max_iter": 5},
    {"lr": 0.1, "max_iter": 4, "history_size": 3, "tolerance_change": 1e-3},
]


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("options", CASES, ids=str)
def test_steps_match_torch(options: dict[str, Any]) -> None:
    losses, points, calls, _ = run(gw, gw.optim.LBFGS, 6, options)
    wanted, theirs, count, _ = run(torch, torch.optim.LBFGS, 6, options)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    np.testing.assert_allclose(points, theirs, rtol=1e-6)
    assert calls == count


def test_a_loaded_state_continues_the_run() -> None:
    options = {"line_search_fn": "strong_wolfe", "max_iter": 4}
    _, points, _, opt = run(gw, gw.optim.LBFGS, 2, options)
    state = opt.state_dict()
    x = gw.nn.Parameter(gw.tensor(points[-1]))
    other = gw.optim.LBFGS([x], **options)
    other.load_state_dict(state)

    def closure() -> Any:
        other.zero_grad()
        loss = rosenbrock(x)
        loss.backward()
        return loss

    other.step(closure)
    assert np.array_equal(x.detach().numpy(), run(gw, gw.optim.LBFGS, 3, options)[1][-1])


def test_invalid_uses_are_refused() -> None:
    x = gw.nn.Parameter(gw.zeros(2))
    with pytest.raises(UsageError, match="closure"):
        gw.optim.LBFGS([x]).step()
    with pytest.raises(UsageError, match="one parameter group"):
        gw.optim.LBFGS([{"params": [x]}, {"params": [gw.nn.Parameter(gw.zeros(1))]}])
    with pytest.raises(UsageError, match="line_search_fn"):
        gw.optim.LBFGS([x], line_search_fn="armijo")
