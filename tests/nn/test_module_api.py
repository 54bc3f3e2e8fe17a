"""Methods of modules against torch's: paths, registration, hooks, dtypes, gradients, copies, text."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.autograd import tensor
from graphwright.errors import UsageError
from graphwright.nn.module import Module
from graphwright.testing.oracle import assert_close

X = np.random.default_rng(0).standard_normal((3, 4)).astype("f4")


def pair() -> tuple[Module, torch.nn.Module]:
    """The same network here and in torch, with equal weights."""
    nets: list[Any] = []
    for nn in (gw.nn, torch.nn):
        body: Any = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5))
        nets.append(nn.Sequential(body, nn.Linear(5, 2)))
    mine, theirs = nets
    mine.load_state_dict({k: v.numpy() for k, v in theirs.state_dict().items()})
    return mine, theirs


def test_names_of_modules_match_torch() -> None:
    mine, theirs = pair()
    assert [n for n, _ in mine.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert [n for n, _ in mine.named_modules("net")] == [n for n, _ in theirs.named_modules(prefix="net")]
    assert [n for n, _ in mine.named_children()] == [n for n, _ in theirs.named_children()]
    assert [type(m).__name__ for m in mine.children()] == [type(m).__name__ for m in theirs.children()]
    seen: list[str] = []
    wanted: list[str] = []
    assert mine.apply(lambda m: seen.append(type(m).__name__)) is mine
    theirs.apply(lambda m: wanted.append(type(m).__name__))
    assert seen == wanted


def test_a_shared_module_is_listed_once_as_in_torch() -> None:
    for nn in (gw.nn, torch.nn):
        layer: Any = nn.Linear(2, 2)
        both: Any = nn.Sequential(layer, layer)
        assert [n for n, _ in both.named_modules()] == ["", "0"]
        assert len(list(both.children())) == 1


def test_paths_lead_to_modules_parameters_and_buffers() -> None:
    mine, _ = pair()
    assert mine.get_submodule("") is mine
    assert mine.get_submodule("0.0").weight is mine.get_parameter("0.0.weight")  # type: ignore[attr-defined]
    assert mine.get_buffer("0.2.running_mean").shape == (5,)
    with pytest.raises(UsageError, match=r"0\.0\.weight"):
        mine.get_parameter("0.0.weights")
    with pytest.raises(UsageError, match="submodule"):
        mine.get_submodule("3")


def test_registered_attributes_are_saved() -> None:
    net = Module()
    net.register_buffer("scale", np.ones(2, "f4"))
    net.register_buffer("cache", np.ones(2, "f4"), persistent=False)
    net.register_parameter("bias", None)
    net.register_parameter("weight", gw.nn.Parameter(np.ones(3, "f4")))
    net.add_module("inner", gw.nn.Linear(2, 1))
    assert list(net.state_dict()) == ["scale", "weight", "inner.weight", "inner.bias"]
    assert [n for n, _ in net.named_buffers()] == ["scale", "cache"]
    for name in ("", "a.b", "forward"):
        with pytest.raises(UsageError, match="name"):
            net.register_buffer(name, None)
    with pytest.raises(UsageError, match="no parameter"):
        net.register_parameter("other", np.ones(1))  # type: ignore[arg-type]


def hooked(net: Any) -> list[Any]:
    """Register hooks of all kinds that scale arguments and results."""
    return [
        net.register_forward_pre_hook(lambda m, args: args[0] * 2.0),
        net.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] + 1.0,), kwargs), with_kwargs=True),
        net.register_forward_hook(lambda m, args, out: out * args[0].sum()),
        net.register_forward_hook(lambda m, args, kwargs, out: None, with_kwargs=True),
    ]


def test_hooks_change_arguments_and_results_as_in_torch() -> None:
    mine, theirs = pair()
    x, t = tensor(X), torch.from_numpy(X)
    plain = mine.eval()(x)
    ours, others = hooked(mine.get_submodule("0.0")), hooked(theirs.eval().get_submodule("0.0"))
    assert_close(mine(x), theirs(t).detach(), rtol=1e-5, atol=1e-5)
    (traced,) = gw.trace(mine, X)(x=X).values()
    assert_close(traced, theirs(t).detach(), rtol=1e-5, atol=1e-5)
    for handle in ours[:2] + others[:2]:
        handle.remove()
    assert_close(mine(x), theirs(t).detach(), rtol=1e-5, atol=1e-5)
    for handle in ours:
        handle.remove()
    assert_close(mine(x), plain, rtol=0)


def test_dtypes_and_gradients() -> None:
    mine, _ = pair()
    for name in ("half", "bfloat16", "double", "float"):
        assert getattr(mine, name)() is mine
        wanted = {"half": "float16", "double": "float64", "float": "float32"}.get(name, name)
        assert {str(p.dtype).removeprefix("gw.") for p in mine.parameters()} == {wanted}
    assert str(mine.get_buffer("0.2.num_batches_tracked").dtype).endswith("int64")
    mine(tensor(X)).sum().backward()
    mine.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.numpy().any() for p in mine.parameters())
    mine.zero_grad()
    assert all(p.grad is None for p in mine.parameters())


def test_a_deep_copy_has_weights_of_its_own() -> None:
    mine, _ = pair()
    mine.eval()
    before = mine(tensor(X))
    twin = copy.deepcopy(mine)
    assert_close(twin(tensor(X)), before, rtol=0)
    with gw.no_grad():
        for p in twin.parameters():
            p.copy_(p * 0.0)
    assert_close(mine(tensor(X)), before, rtol=0)


def test_steps_of_a_deep_copy_are_seen_by_eager_code() -> None:
    twin = copy.deepcopy(pair()[0])
    gw.compile(twin)(tensor(X))
    mean, seen = (twin.get_buffer(f"0.2.{name}") for name in ("running_mean", "num_batches_tracked"))
    assert_close(mean * 1.0, mean.numpy(), rtol=0)
    assert seen.clone().item() == 1


def test_loading_a_state_returns_the_keys_that_do_not_fit() -> None:
    mine, theirs = pair()
    state = theirs.state_dict()
    assert repr(mine.load_state_dict(state)) == "<All keys matched successfully>"
    state["other"] = state.pop("1.bias")
    found, wanted = (net.load_state_dict(state, strict=False) for net in (mine, theirs))
    assert (found.missing_keys, found.unexpected_keys) == (wanted.missing_keys, wanted.unexpected_keys)
    assert "1.bias" in repr(found)


def test_repr_has_paths_shapes_and_counts() -> None:
    net = gw.nn.Sequential(gw.nn.Linear(4, 2), gw.nn.HuberLoss(delta=0.5))
    assert repr(net) == (
        "Sequential(  # 10 parameters\n"
        "  (0): Linear(weight=[2, 4], bias=[2])\n"
        "  (1): HuberLoss(reduction='mean', delta=0.5)\n"
        ")"
    )
