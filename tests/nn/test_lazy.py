"""Lazy modules against torch: their parameters after the first call, and what they are then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.nn import lazy

ARGS: dict[str, tuple[Any, ...]] = {"LazyLinear": (5,), "Conv": (6, 3), "Norm": ()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", lazy.__all__)
def test_the_first_call_makes_the_module_of_torch(name: str) -> None:
    args = next(a for key, a in ARGS.items() if key in name)
    rank = int(name[-2]) if name[-2].isdigit() else 0
    x = np.random.default_rng(0).standard_normal((2, 4, *(5,) * rank)).astype("f4")
    mine, theirs = getattr(gw.nn, name)(*args), getattr(torch.nn, name)(*args)
    wanted = theirs(torch.tensor(x))
    assert not mine.state_dict()
    gw.manual_seed(0)
    found = mine(gw.tensor(x))
    assert type(mine) is getattr(gw.nn, name.removeprefix("Lazy"))
    assert found.shape == tuple(wanted.shape)
    shapes = [{n: tuple(v.shape) for n, v in net.state_dict().items()} for net in (mine, theirs)]
    assert shapes[0] == shapes[1]
    gw.manual_seed(0)
    options = {"affine": True, "track_running_stats": True} if "Instance" in name else {}
    same = type(mine)(4, *args, **options)(gw.tensor(x))
    assert np.array_equal(found.detach().numpy(), same.detach().numpy())


def test_a_network_is_trained_after_its_first_call() -> None:
    net = gw.nn.Sequential(gw.nn.LazyConv2d(3, 3), gw.nn.LazyBatchNorm2d(), gw.nn.Flatten(), gw.nn.LazyLinear(2)).eval()
    x = gw.randn(4, 1, 5, 5)
    net(x)
    assert [m.training for m in net.modules()] == [False] * 5
    assert [n for n, _ in net.named_parameters()][-1] == "3.bias"
    opt = gw.optim.SGD(net.parameters(), lr=0.1)
    before = net(x).detach()
    (net(x) ** 2).sum().backward()
    opt.step()
    assert not bool((net(x).detach() == before).all())
    p = gw.trace(net, x)
    assert "3.weight" in p.weights


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(TypeError):
        gw.nn.LazyLinear()
    with pytest.raises(ShapeError, match="axes"):
        gw.nn.LazyConv2d(2, 3)(gw.zeros(3))
    with pytest.raises(UsageError, match="once"):
        gw.trace(gw.nn.LazyLinear(2), gw.zeros(1, 3))
