"""`x.data` in torch's spelling: methods and operators of tensors, without a tape, over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from values import array_of

LINES = """
p.data.normal_(0, 0).add_(2.0)
p.data.fill_(0.5)
p.data[0].zero_()
p.data.copy_(0.9 * q.data + (1.0 - 0.9) * p.data)
p.data.mul_(0.5).add_(q.data, alpha=0.1)
p.data.clamp_(-0.1, 0.1)
p.data.sub_(q.data)
p.data += 1
p.data -= 0.1 * q.data
p.data *= q.data
p.data /= 2
p.data = p.data - 0.1 * q.data
p.data = q.data.clone()
p.data = -abs(p.data) ** 2
p.data = p.data.masked_fill(q.data > 0, -1.0)
nn.init.constant_(p.data, 3.0)
""".strip().splitlines()
VALUES = """
p.data.norm()
p.data.max(1)[1]
(p.data > 0).float()
p.data.eq(q.data.view_as(p.data)).sum()
p.data @ q.data.t()
p.data.clone().cpu()
2 / p.data
1 - p.data
""".strip().splitlines()
P, Q = (np.random.default_rng(seed).standard_normal((3, 4)).astype("f4") for seed in (0, 1))


def space(lib: Any, parameter: Any) -> dict[str, Any]:
    return {"p": parameter(lib.tensor(P)), "q": parameter(lib.tensor(Q)), "nn": lib.nn}


@pytest.mark.parametrize("line", LINES)
def test_writes_to_data_change_the_parameter_as_in_torch(line: str) -> None:
    mine, theirs = space(gw, gw.nn.Parameter), space(torch, torch.nn.Parameter)
    held = mine["p"]
    for names in (mine, theirs):
        exec(line, names)
    assert mine["p"] is held
    assert mine["p"].grad_fn is None
    np.testing.assert_allclose(held.detach().numpy(), theirs["p"].detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("text", VALUES)
def test_values_of_data_are_those_of_torch_and_not_on_the_tape(text: str) -> None:
    mine, theirs = space(gw, gw.nn.Parameter), space(torch, torch.nn.Parameter)
    value = eval(text, mine)
    assert isinstance(value, gw.Tensor)
    assert not value.requires_grad
    np.testing.assert_allclose(value.numpy(), eval(text, theirs).numpy(), rtol=1e-6)


def test_a_write_to_data_is_seen_by_the_next_backward() -> None:
    p = gw.nn.Parameter(np.ones(3, "f4"))
    y = (p * p).sum()
    p.data.mul_(2.0)
    with pytest.raises(gw.autograd.ModifiedSinceForward):
        y.backward()


def test_operators_with_numpy_arrays_stay_numpy() -> None:
    data = array_of(gw.tensor(P))
    assert isinstance(data - Q, np.ndarray)
    assert isinstance(Q - data, np.ndarray)
    with pytest.raises(AttributeError, match="no_such"):
        data.no_such  # noqa: B018
