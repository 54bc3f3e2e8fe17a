"""Modules: names, sharing, lists and dicts, and states that load as a whole or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.errors import UsageError
from values import grad_of

X = Tensor(from_numpy(np.ones((2, 3), np.float32)))


def parameter(*shape: int) -> Parameter:
    return Parameter(from_numpy(np.ones(shape, np.float32)))


class Block(nn.Module):
    def __init__(self) -> None:
        self.inner = nn.Linear(3, 3)
        self.scale = parameter(3)

    def forward(self, x):
        return self.inner(x) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        self.first = Block()
        self.rows = [Block(), Block()]
        self.by_name = {"a": Block(), "b": [nn.Linear(3, 3)]}
        self.free = [parameter(3), parameter(3)]
        self.named = {"gain": parameter(3)}
        self.sizes = [1, 2, "text"]

    def forward(self, x):
        x = self.first(x)
        for block in (*self.rows, self.by_name["a"], *self.by_name["b"]):
            x = block(x)
        return x * self.free[0] * self.free[1] * self.named["gain"]


NAMES = [
    "free.0",
    "free.1",
    "named.gain",
    "first.scale",
    "first.inner.weight",
    "first.inner.bias",
    "rows.0.scale",
    "rows.0.inner.weight",
    "rows.0.inner.bias",
    "rows.1.scale",
    "rows.1.inner.weight",
    "rows.1.inner.bias",
    "by_name.a.scale",
    "by_name.a.inner.weight",
    "by_name.a.inner.bias",
    "by_name.b.0.weight",
    "by_name.b.0.bias",
]


def test_each_parameter_has_its_dotted_name_in_lists_and_dicts_too():
    net = Net()
    assert [name for name, _ in net.named_parameters()] == NAMES
    assert len(list(net.parameters())) == len(NAMES)
    assert [p.name for p in net.parameters()] == NAMES


def test_traced_nodes_have_the_names_of_modules():
    p = gw.trace(Net(), X)
    assert {p.key(n) for n in p.params()} == set(NAMES)
    assert p.select("rows.1.inner.*", op="linear").count == 1
    assert p.select("by_name.b.0.*", op="linear").count == 1
    assert p.select("first.*", op="mul").count == 1


class Gather(nn.Module):
    """Modules in every kind of container, called by the module that holds the container or by one further out."""

    def __init__(self) -> None:
        self.blocks: Any = nn.ModuleList([Block(), nn.ModuleList([Block()])])
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 2)})
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.outer = Block()
        right: Any = Block()
        right.shared = self.outer.inner
        self.left, self.right = nn.ModuleList([self.body]), right

    def forward(self, x):
        for block in (self.blocks[0], *self.blocks[1]):
            x = block(x)
        for layer in self.body:
            x = layer(x)
        return self.heads["a"](self.outer.inner(self.left[0](x)))


def test_traced_nodes_have_the_paths_of_modules_in_containers():
    """The ops of a module are named like its parameters, whichever module calls it."""
    net = Gather()
    p = gw.trace(net, X)
    linears = p.of_kind("linear")
    assert {p.path(n).rpartition(".")[0] for n in linears} <= {k.rpartition(".")[0] for k, _ in net.named_parameters()}
    assert [p.path(n) for n in linears] == [
        *("blocks.0.inner.linear", "blocks.1.0.inner.linear", "body.0.linear"),
        *("body.0.linear_2", "outer.inner.linear", "heads.a.linear"),
    ]
    assert p.select("blocks.*", op="mul").names() == ["blocks.0.mul", "blocks.1.0.mul"]
    p = gw.tape(net(gw.tensor(X)).sum())
    assert [p.path(n) for n in p.of_kind("mul")] == ["blocks.0.mul", "blocks.1.0.mul"]
    assert [p.path(n) for n in p.of_kind("tanh")] == ["body.1.tanh", "body.1.tanh_2"]


def test_a_shared_module_is_named_after_the_module_that_calls_it():
    class Two(nn.Module):
        def __init__(self) -> None:
            self.a, self.b = nn.Sequential(nn.Linear(3, 3)), nn.Sequential()
            self.b.append(self.a[0])

        def forward(self, x):
            return self.b(self.a(x))

    assert [p.path(n) for p in (gw.trace(Two(), X),) for n in p.of_kind("linear")] == ["a.0.linear", "b.0.linear"]


def test_a_shared_module_is_listed_once_and_trained_once():
    shared = nn.Linear(3, 3)

    class Twice(nn.Module):
        def __init__(self) -> None:
            self.a, self.b = shared, [shared]

        def forward(self, x):
            return self.b[0](self.a(x))

    net = Twice()
    assert [name for name, _ in net.named_parameters()] == ["a.weight", "a.bias"]
    p = gw.trace(net, X)
    assert len(p.params()) == 2
    net(X).sum().backward()
    one = grad_of(shared.weight).numpy()
    assert shared.bias is not None
    w, b = shared.weight.numpy(), shared.bias.numpy()
    h = X.numpy() @ w.T + b
    expected = np.ones((2, 3)).T @ h + (np.ones((2, 3)) @ w).T @ X.numpy()
    np.testing.assert_allclose(one, expected, rtol=1e-5)


def test_a_tied_parameter_is_one_node():
    class Tied(nn.Module):
        def __init__(self) -> None:
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    p = gw.trace(Tied(), Tensor(from_numpy(np.array([1, 2]))))
    assert [p.key(n) for n in p.params()] == ["embed.weight"]


def test_a_state_round_trips_and_is_a_copy():
    a, b = Net(), Net()
    for p in a.parameters():
        p.assign(Tensor(from_numpy(np.random.default_rng(0).normal(size=p.shape).astype(np.float32))))
    state = a.state_dict()
    b.load_state_dict(state)
    np.testing.assert_array_equal(a(X).numpy(), b(X).numpy())
    for p in a.parameters():
        p.assign(Tensor(from_numpy(np.zeros(p.shape, np.float32))))
    assert np.abs(b(X).numpy()).max() > 0
    assert np.abs(state["first.scale"].numpy()).max() > 0


def test_a_mismatched_state_changes_nothing_and_lists_all_problems():
    net = Net()
    before = {name: t.numpy() for name, t in net.state_dict().items()}
    state: dict[str, np.ndarray] = {name: np.full(t.shape, 9, np.float32) for name, t in net.state_dict().items()}
    del state["free.0"]
    state["surplus"] = np.zeros(3, np.float32)
    state["first.scale"] = np.zeros(4, np.float32)
    state["rows.0.scale"] = np.zeros(3, np.float64)
    with pytest.raises(UsageError) as error:
        net.load_state_dict(state)
    for words in ("missing: free.0", "unexpected: surplus", "first.scale: expected f32[3], got f32[4]", "rows.0.scale"):
        assert words in str(error.value)
    for name, t in net.state_dict().items():
        np.testing.assert_array_equal(t.numpy(), before[name])


def test_a_module_without_forward_raises():
    with pytest.raises(NotImplementedError, match="Module does not define forward"):
        nn.Module()(X)


# -- buffers, ties, modes, dtypes --------------------------------------------------------------------------------------
class Carrying(nn.Module):
    """A tied weight, a persistent buffer in a list, one that is not, and children in containers."""

    def __init__(self) -> None:
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.counts = [nn.Buffer(from_numpy(np.zeros(2, np.int64)))]
        self.scale = nn.Buffer(from_numpy(np.ones(3, np.float32)), persistent=False)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.named = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Residual(nn.Linear(3, 3))})

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.named["b"](self.named["a"](x)))


IDS = Tensor(from_numpy(np.array([1, 4])))
KEYS = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "named.b.inner.weight"]


def test_state_dict_contains_persistent_buffers_and_ties_once():
    net = Carrying()
    assert set(net.state_dict()) == {"embed.weight", "counts.0", *KEYS, "named.b.inner.bias"}
    assert [n for n, _ in net.named_buffers()] == ["counts.0", "scale"]
    assert set(net.variables()) == {*net.state_dict(), "head.weight"}
    assert len(net.layers) == 2
    net.layers.append(nn.Linear(3, 3))
    assert "layers.2.bias" in net.state_dict()
    assert list(net.named) == ["a", "b"]


def test_a_tied_weight_loads_by_any_of_its_names():
    net = Carrying()
    state = {n: t.numpy() for n, t in net.state_dict().items()}
    state["head.weight"] = state.pop("embed.weight") + 1
    assert net.load_state_dict(state) == ([], [])
    np.testing.assert_array_equal(net.embed.weight.numpy(), state["head.weight"])


def test_a_non_strict_load_returns_missing_and_unexpected_names():
    net = Carrying()
    missing, unexpected = net.load_state_dict({"counts.0": np.array([1, 2]), "more": np.ones(1)}, strict=False)
    assert unexpected == ["more"]
    assert set(missing) == set(net.state_dict()) - {"counts.0"}
    assert net.counts[0].tolist() == [1, 2]
    with pytest.raises(UsageError, match=r"counts\.0: expected i64\[2\], got f32\[2\]"):
        net.load_state_dict({"counts.0": np.ones(2, np.float32)}, strict=False)


def test_train_and_eval_reach_all_descendants_and_recompile():
    class Doubling(nn.Module):
        def forward(self, x):
            return x * 2.0 if self.trains else x

    net = nn.Sequential(nn.ModuleList([Doubling()])[0], Doubling())
    run = gw.compile(net)
    assert run(X).numpy()[0, 0] == 4
    assert net.eval() is net
    assert not any(m.training for m in net.modules())
    assert run(X).numpy()[0, 0] == 1
    with gw.mode("train"):
        assert run(X).numpy()[0, 0] == 4
    assert run(X).numpy()[0, 0] == 1
    net.train()
    with gw.mode("eval"):
        assert run(X).numpy()[0, 0] == 1
    assert run(X).numpy()[0, 0] == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_to_keeps_objects_ties_and_optimizers(compiled):
    from graphwright.optim import AdamW

    net = Carrying()
    opt = AdamW(net, 0.1, weight_decay=0.0)
    before = dict(net.variables())

    def step(ids):
        opt.zero_grad()
        net(ids).float().sum().backward()
        opt.step()

    run = gw.compile(step) if compiled else step
    run(IDS)
    moments = opt.state_of(net.embed.weight).moments["m"].numpy().copy()
    assert net.to("bfloat16") is net
    assert {n: id(v) for n, v in net.variables().items()} == {n: id(v) for n, v in before.items()}
    assert net.head.weight is net.embed.weight
    assert (net.embed.weight.dtype.name, net.scale.dtype.name) == ("bfloat16", "bfloat16")
    assert net.counts[0].dtype.name == "int64"
    run(IDS)
    state = opt.state_of(net.embed.weight)
    assert state.master is not None
    assert state.steps.item() == 2
    assert state.moments["m"].dtype.name == "float32"
    assert np.abs(state.moments["m"].numpy() - 0.9 * moments).max() < 1
    assert state.moments["m"].numpy()[1].any()
    with pytest.raises(UsageError, match="floating"):
        net.to("int64")


def test_requires_grad_freezes_and_unfreezes():
    net = Carrying().requires_grad_(False)
    assert not net(IDS).requires_grad
    assert net.requires_grad_()(IDS).requires_grad


def test_structure_hash_covers_names_ties_and_specs():
    a, b = Carrying(), Carrying()
    assert a.structure_hash() == b.structure_hash()
    b.head.weight = nn.Linear(3, 5).weight
    assert a.structure_hash() != b.structure_hash()
    assert a.to("float64").structure_hash() != Carrying().structure_hash()
