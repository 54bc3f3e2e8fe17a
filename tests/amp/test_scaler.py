"""Loss scaling: the scale over time, eagerly and as state in a plan; skipped steps change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.amp import GradScaler, autocast
from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.errors import UsageError
from graphwright.optim import AdamW, clip_grad_norm_
from values import grad_of

SCRIPT = [1, 1, np.inf, 1, 1, 1, np.nan, np.inf, 1, 1, 1, 1]
"""What the loss is multiplied with, step by step; growth after two good steps in a row."""
SCALES = [8, 16, 8, 8, 16, 16, 8, 4, 4, 8, 8, 16]


def parameter() -> Parameter:
    return Parameter(from_numpy(np.array([1.0, 2.0], np.float32)), name="p")


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_scripted_infinities_match_torch(compiled, clip):
    p, theirs = parameter(), torch.tensor([1.0, 2.0], requires_grad=True)
    opt, scaler = AdamW([p], 0.1), GradScaler(8.0, growth_interval=2)
    other, reference = torch.optim.AdamW([theirs], 0.1), torch.amp.GradScaler("cpu", 8.0, growth_interval=2)

    def step(factor):
        opt.zero_grad()
        scaler.scale((p * p).sum() * factor).backward()
        if clip:
            scaler.unscale_(opt)
            clip_grad_norm_([p], 1.0)
        scaler.step(opt)
        scaler.update()

    run: Any = gw.compile(step) if compiled else step
    for k, factor in enumerate(SCRIPT):
        run(Tensor(from_numpy(np.float32(factor))))
        other.zero_grad()
        reference.scale((theirs * theirs).sum() * float(factor)).backward()
        if clip:
            reference.unscale_(other)
            torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        reference.step(other)
        reference.update()
        assert scaler.get_scale() == reference.get_scale() == SCALES[k], k
        np.testing.assert_allclose(p.numpy(), theirs.detach().numpy(), rtol=1e-6)
    assert opt.state_of(p).steps.item() == sum(np.isfinite(SCRIPT))
    if compiled:
        assert run.traces == 1


def test_small_float16_gradients_survive_with_a_scale():
    def gradient(scaler: GradScaler) -> float:
        p = Parameter(from_numpy(np.full((1, 1), 1e-4, np.float32)))
        opt = AdamW([p])
        with autocast("float16"):
            y = Tensor(from_numpy(np.full((1, 1), 1e-4, np.float32))) @ p
        scaler.scale((y * 1e-4).sum()).backward()
        scaler.unscale_(opt)
        return grad_of(p).item()

    assert gradient(GradScaler(enabled=False)) == 0.0
    assert gradient(GradScaler(2.0**14)) == pytest.approx(1e-8, rel=1e-2)


def test_a_disabled_scaler_does_nothing():
    p = parameter()
    scaler = GradScaler(enabled=False)
    loss = (p * p).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    opt = AdamW([p], 0.1)
    scaler.unscale_(opt)
    np.testing.assert_array_equal(grad_of(p).numpy(), [2, 4])
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert opt.state_of(p).steps.item() == 1


def test_calls_out_of_order_are_refused():
    p = parameter()
    opt, scaler = AdamW([p]), GradScaler()
    with pytest.raises(UsageError, match="backward"):
        scaler.unscale_(opt)
    with pytest.raises(UsageError, match=r"no step\(\) was run"):
        scaler.update()
    scaler.scale((p * p).sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(UsageError, match="already"):
        scaler.unscale_(opt)
    refused: list[dict[str, Any]] = [
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
    ]
    for wrong in refused:
        with pytest.raises(UsageError, match="out of range"):
            GradScaler(**wrong)


def test_a_device_in_place_of_the_scale_is_refused() -> None:
    with pytest.raises(UsageError, match="leave the device out"):
        GradScaler("cpu")  # pyright: ignore[reportArgumentType]
