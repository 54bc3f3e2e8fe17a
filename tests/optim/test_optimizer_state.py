"""State dicts, groups and closures of optimizers in torch's spelling."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import UsageError

X = np.random.default_rng(0).standard_normal((8, 3)).astype("f4")


def training(kind: str, options: dict[str, Any]) -> tuple[Any, Any]:
    gw.manual_seed(0)
    net = gw.nn.Sequential(gw.nn.Linear(3, 4), gw.nn.Tanh(), gw.nn.Linear(4, 1))
    groups = [{"params": net[0].parameters(), "lr": 0.03}, {"params": net[2].parameters()}]
    return net, getattr(gw.optim, kind)(groups, lr=0.01, **options)


def train(net: Any, opt: Any, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        (net(gw.tensor(X)) ** 2).mean().backward()
        opt.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("NAdam", {}), ("Rprop", {}), ("RMSprop", {})],
)
def test_a_loaded_state_continues_the_training(kind: str, options: dict[str, Any]) -> None:
    net, opt = training(kind, options)
    train(net, opt, 3)
    weights, state = net.state_dict(), opt.state_dict()
    opt.lr *= 0.5
    state_after = opt.state_dict()
    train(net, opt, 2)
    again, other = training(kind, options)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    assert [g["lr"] for g in other.param_groups] == [0.03, 0.01]
    other.load_state_dict(state_after)
    train(again, other, 2)
    for name, value in net.state_dict().items():
        assert bool((value == again.state_dict()[name]).all()), name


def test_a_deep_copy_of_model_and_optimizer_continues_the_training() -> None:
    net, opt = training("Adam", {"amsgrad": True})
    train(net, opt, 3)
    again, other = deepcopy((net, opt))
    train(net, opt, 2)
    train(again, other, 2)
    assert len(other.state) == 4
    for name, value in net.state_dict().items():
        assert bool((value == again.state_dict()[name]).all()), name


def test_the_form_is_that_of_torch() -> None:
    net, opt = training("Adam", {})
    train(net, opt, 2)
    mine = opt.state_dict()
    other = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    theirs = torch.optim.Adam([{"params": m.parameters()} for m in other], lr=0.01).state_dict()
    assert mine.keys() == theirs.keys()
    assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
    assert {i: s["step"].item() for i, s in mine["state"].items()} == dict.fromkeys(range(4), 2.0)
    assert opt.defaults["lr"] == 0.01
    assert opt.defaults["betas"] == (0.9, 0.999)
    assert opt.param_groups[0].get("lr") == 0.03
    assert opt.param_groups[0].get("none", 5) == 5
    assert dict(opt.param_groups[0].items())["eps"] == 1e-8


def test_16_bit_states_keep_their_masters() -> None:
    p = gw.nn.Parameter(gw.ones(3, dtype=gw.bfloat16))
    opt = gw.optim.Adam([p], lr=1e-4)
    for _ in range(3):
        p.grad = gw.ones(3)
        opt.step()
    q = gw.nn.Parameter(p.detach().clone())
    other = gw.optim.Adam([q], lr=1e-4)
    other.load_state_dict(opt.state_dict())
    held, master = other.state[q].master, opt.state[p].master
    assert held is not None
    assert master is not None
    assert np.array_equal(held.numpy(), master.numpy())
    assert held.numpy()[0] != 1.0


def test_states_that_do_not_fit_change_nothing() -> None:
    net, opt = training("Adam", {})
    train(net, opt, 1)
    state = opt.state_dict()
    _, other = training("Adam", {"eps": 1e-3})
    with pytest.raises(UsageError, match="eps"):
        other.load_state_dict(state)
    with pytest.raises(UsageError, match="groups"):
        gw.optim.Adam(net.parameters(), lr=0.01).load_state_dict(state)
    _, third = training("Adam", {})
    broken = {**state, "state": {**state["state"], 1: {**state["state"][1], "m": gw.zeros(7)}}}
    with pytest.raises(UsageError, match="parameter 1"):
        third.load_state_dict(broken)
    assert not third.state


def test_groups_are_added_as_in_torch() -> None:
    mine, theirs = gw.nn.Parameter(gw.ones(2)), torch.nn.Parameter(torch.ones(2))
    opts = gw.optim.SGD([mine], lr=0.1, momentum=0.9), torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    added = gw.nn.Parameter(gw.ones(3)), torch.nn.Parameter(torch.ones(3))
    for opt, p, q in zip(opts, (mine, theirs), added, strict=True):
        opt.add_param_group({"params": q, "lr": 0.5})  # type: ignore[attr-defined]
        for _ in range(2):
            opt.step(lambda opt=opt, p=p, q=q: _loss(opt, p, q))
        with pytest.raises((UsageError, ValueError)):
            opt.add_param_group({"params": [p]})
        assert len(opt.param_groups) == 2
    for a, b in zip((mine, added[0]), (theirs, added[1]), strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b.detach().numpy(), rtol=1e-6)


def _loss(opt: Any, p: Any, q: Any) -> Any:
    opt.zero_grad()
    loss = (p * p).sum() + (q * q * q).sum()
    loss.backward()
    return loss
