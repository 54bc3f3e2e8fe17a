"""Methods of modules against torch's: paths, registration, hooks, dtypes, gradients, copies, text."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.array import DeviceUnavailable
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
    layer: Any = mine.get_submodule("0.0")
    assert layer.weight is mine.get_parameter("0.0.weight")
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
        net.register_parameter("other", np.ones(1))  # pyright: ignore[reportArgumentType]


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


def test_parameters_and_buffers_by_prefix_and_level_match_torch() -> None:
    mine, theirs = pair()
    for options in ({}, {"prefix": "net"}, {"recurse": False}, {"prefix": "net", "recurse": False}):
        for inner, other in ((mine, theirs), (mine.get_submodule("0.2"), theirs.get_submodule("0.2"))):
            for method in ("named_parameters", "named_buffers"):
                found = [(n, v.shape) for n, v in getattr(inner, method)(**options)]
                assert found == [(n, tuple(v.shape)) for n, v in getattr(other, method)(**options)]
            for method in ("parameters", "buffers"):
                recurse = options.get("recurse", True)
                assert len(list(getattr(inner, method)(recurse))) == len(list(getattr(other, method)(recurse)))
    for nn in (gw.nn, torch.nn):
        layer: Any = nn.Linear(2, 2)
        both: Any = nn.Sequential(layer, layer)
        assert [n for n, _ in both.named_parameters(remove_duplicate=False)] == [
            "0.weight", "0.bias", "1.weight", "1.bias",
        ]  # fmt: skip
        assert [n for n, _ in both.named_modules(remove_duplicate=False)] == ["", "0", "1"]


def test_states_have_a_prefix_and_may_be_assigned() -> None:
    mine, theirs = pair()
    assert list(mine.state_dict(prefix="net.")) == list(theirs.state_dict(prefix="net."))
    weight = mine.get_parameter("1.weight")
    assert mine.state_dict(keep_vars=True)["1.weight"] is weight
    doubles = {n: v.double() if v.dtype.is_float else v for n, v in mine.state_dict().items()}
    with pytest.raises(UsageError, match="f64"):
        mine.load_state_dict(doubles)
    mine.load_state_dict(doubles, assign=True)
    assert mine.get_parameter("1.weight") is weight
    assert weight.dtype is gw.float64


def test_modules_move_and_convert_in_every_spelling_of_torch() -> None:
    for mine in (
        gw.nn.Linear(2, 3).to(device="cpu", dtype=gw.float64),
        gw.nn.Linear(2, 3).to(gw.device("cpu"), gw.float64, non_blocking=True),
        gw.nn.Linear(2, 3).to(gw.zeros(1, dtype=gw.float64)),
        gw.nn.Linear(2, 3).type(gw.float64).cpu(),
    ):
        assert mine.weight.dtype is gw.float64
    with pytest.raises(DeviceUnavailable):
        gw.nn.Linear(2, 3).cuda(7)


def test_a_submodule_is_replaced_by_its_path() -> None:
    for nn in (gw.nn, torch.nn):
        net: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.ReLU())
        net.set_submodule("0.0", nn.Linear(2, 5))
        net.set_submodule("1", nn.Linear(5, 4))
        assert [p.shape[0] for p in net.parameters()] == [5, 5, 4, 4]
        with pytest.raises((UsageError, ValueError, AttributeError)):
            net.set_submodule("", nn.ReLU())


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_backward_hooks_get_and_replace_the_gradients_of_torch() -> None:
    seen: list[list[Any]] = []
    grads: list[list[Any]] = []
    mine, theirs = pair()
    for net, lib in ((mine, gw), (theirs, torch)):
        net: Any
        notes: list[Any] = []
        plain = lambda ts: [None if t is None else np.asarray(t) for t in ts]  # noqa: E731
        net[1].register_full_backward_hook(lambda m, gi, go, n=notes, f=plain: n.append(("a", f(gi), f(go))))
        handle = net[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        net[1].register_full_backward_hook(lambda m, gi, go, n=notes, f=plain: n.append(("b", f(gi), f(go))))
        net[1].register_full_backward_hook(lambda m, gi, go, n=notes: n.append("first"), prepend=True)
        net[0][0].register_full_backward_hook(lambda m, gi, go, n=notes, f=plain: n.append(("c", f(gi), f(go))))
        for _ in range(2):
            (net(lib.tensor(X)) ** 2).sum().backward()
            handle.remove()
        seen.append(notes)
        grads.append([np.asarray(p.grad) for p in net.parameters()])
    assert len(seen[0]) == len(seen[1]) == 8
    for a, b in zip(seen[0], seen[1], strict=True):
        assert a[0] == b[0]
        for left, right in zip(a[1:], b[1:], strict=True) if a != "first" else ():
            for x, y in zip(left, right, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "Linear": (2, 3), "Bilinear": (2, 3, 4), "Conv2d": (2, 4, 3), "ConvTranspose1d": (2, 4, 3), "Embedding": (5, 3),
    "EmbeddingBag": (5, 3), "GroupNorm": (2, 4), "LayerNorm": (4,), "RMSNorm": (4,), "BatchNorm2d": (3,),
    "InstanceNorm1d": (3,), "RNN": (2, 3), "LSTM": (2, 3), "GRU": (2, 3), "RNNCell": (2, 3), "PReLU": (2,),
    "MultiheadAttention": (4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_layers_have_the_attributes_of_torch(name: str) -> None:
    mine, theirs = (getattr(nn, name)(*ATTRIBUTES[name]) for nn in (gw.nn, torch.nn))
    for key, value in vars(theirs).items():
        if not key.startswith("_") and isinstance(value, int | float | str | tuple):
            assert getattr(mine, key) == value, key


@pytest.mark.parametrize("name", [n for n in ATTRIBUTES if n != "MultiheadAttention"])
def test_parameters_are_reset_to_those_of_a_new_module(name: str) -> None:
    options = {"track_running_stats": True, "affine": True} if name == "InstanceNorm1d" else {}
    made: Any = getattr(gw.nn, name)(*ATTRIBUTES[name], **options)
    for v in made.state_dict(keep_vars=True).values():
        v.assign(v.detach() + 1)
    gw.manual_seed(5)
    new = getattr(gw.nn, name)(*ATTRIBUTES[name], **options).state_dict()
    gw.manual_seed(5)
    made.reset_parameters()
    for key, value in made.state_dict().items():
        assert bool((value == new[key]).all()), key


def test_weights_of_recurrent_layers_are_listed_as_in_torch() -> None:
    for nn in (gw.nn, torch.nn):
        made: Any = nn.LSTM(2, 3, 2, bidirectional=True)
        made.flatten_parameters()
        assert [[tuple(p.shape) for p in group] for group in made.all_weights] == [
            [(12, size), (12, 3), (12,), (12,)] for size in (2, 2, 6, 6)
        ]
