"""Axes of programs whose groups are known, and of random ones: a cut equals a mask, and undo gives every byte back."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import graphwright as gw
from axis_samples import RandomNet, agree, perceptron, run, traced
from graphwright import nn
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.program import Builder, FrozenAxis, Program, RaggedUnit, UnknownAxis

RNG = np.random.default_rng(0)


class Head(nn.Module):
    """A module between two linear maps, so that its axes are neither inputs nor outputs."""

    def __init__(self, width: int, inner: nn.Module, out: int) -> None:
        self.first, self.inner, self.last = nn.Linear(3, width), inner, nn.Linear(out, 2)

    def forward(self, x: gw.Tensor, *more: gw.Tensor) -> gw.Tensor:
        y = self.inner(self.first(x), *more)
        return self.last((y[0] if isinstance(y, tuple) else y).tanh())


class Fused(nn.Module):
    """Attention with q, k and v in one weight, heads by reshape and permute."""

    def __init__(self) -> None:
        self.qkv, self.o = nn.Linear(8, 36), nn.Linear(12, 8)

    def forward(self, x: gw.Tensor) -> gw.Tensor:
        rows, cols = x.shape[:2]
        both = self.qkv(x)
        q, k, v = (both[:, :, i * 12 : i * 12 + 12].reshape(rows, cols, 3, 4).permute(0, 2, 1, 3) for i in range(3))
        mixed = (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v
        return self.o(mixed.permute(0, 2, 1, 3).reshape(rows, cols, 12))


class Timed(nn.Module):
    def __init__(self) -> None:
        self.cell, self.last = nn.CfC(3, 6, backbone_units=10), nn.Linear(6, 2)

    def forward(self, x: gw.Tensor, dt: gw.Tensor) -> gw.Tensor:
        return self.last(self.cell(x, None, dt)[0])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12 * 9, 10),
    ).eval()  # fmt: skip


NETS = {
    "cnn": (convolutions, [RNG.normal(size=(2, 3, 8, 8))]),
    "fused": (lambda: Head(8, Fused(), 8), [RNG.normal(size=(2, 5, 3))]),
    "grouped": (lambda: Head(8, nn.MultiHeadAttention(8, 4, kv_heads=2), 8), [RNG.normal(size=(2, 5, 3))]),
    "lstm": (lambda: Head(4, nn.LSTM(4, 6, 2, batch_first=True), 6), [RNG.normal(size=(2, 4, 3))]),
    "gru": (lambda: Head(4, nn.GRU(4, 6, batch_first=True), 6), [RNG.normal(size=(2, 4, 3))]),
    "rnn": (lambda: Head(4, nn.RNN(4, 6, batch_first=True), 6), [RNG.normal(size=(2, 4, 3))]),
    "cfc": (Timed, [RNG.normal(size=(2, 4, 3)), RNG.random((2, 4))]),
    "moe": (lambda: Head(8, nn.MoE(8, 10, 4, 2), 8), [RNG.normal(size=(5, 3))]),
}
EXPECTED = {
    "cnn": {"0.channels", "0.channel_groups", "5.channels"},
    "fused": {"first.neurons", "inner.heads", "inner.o.neurons"},
    "grouped": {"inner.heads", "inner.kv_groups", "inner.queries", "first.neurons"},
    "lstm": {"first.neurons", "inner.weight_ih_l0:0", "inner.weight_ih_l1:0"},
    "gru": {"first.neurons", "inner.neurons"},
    "rnn": {"first.neurons", "inner.neurons"},
    "cfc": {"cell.cells.0.neurons", "cell.cells.0.ff1.neurons"},
    "moe": {"first.neurons", "inner.experts"},
}


@pytest.mark.parametrize("name", NETS)
def test_masked_and_cut_units_of_modules_give_equal_results(name):
    make, examples = NETS[name]
    p = traced(make(), *examples)
    feeds = dict(zip(p.input_names(), examples, strict=True))
    assert set(p.axes()) >= EXPECTED[name], str(p.axes())
    rng, cut = np.random.default_rng(1), 0
    for group in list(p.axes().values()):
        if group.frozen or group.mixed:
            continue
        units = group.units(rng.choice(group.size, max(1, group.size // 3), replace=False).tolist())
        try:
            agree(p, units, feeds, 1e-10)
            cut += 1
        except RaggedUnit:
            assert len(group.atoms) >= 2
    assert cut


@given(seed=st.integers(0, 10_000), draw=st.integers(0, 2**31))
def test_masked_and_cut_units_of_random_programs_give_equal_results(seed, draw):
    p = RandomNet(seed).program
    rng = np.random.default_rng(draw)
    free = [g for g in p.axes().values() if not g.frozen and g.exact]
    assume(free)
    group = free[rng.integers(len(free))]
    units = group.units(rng.choice(group.size, rng.integers(1, group.size), replace=False).tolist())
    try:
        agree(p, units, {"x": rng.normal(size=(4, 6))}, 1e-10)
    except RaggedUnit:
        assert len(group.atoms) >= 2


@given(seed=st.integers(0, 10_000), draw=st.integers(0, 2**31))
def test_permuting_and_growing_keep_the_function(seed, draw):
    p = RandomNet(seed).program
    rng = np.random.default_rng(draw)
    x = {"x": rng.normal(size=(4, 6))}
    before, expected = p.hash(), run(p, x)["y"]
    free = [g for g in p.axes().values() if not g.frozen and len(g.atoms) == 1]
    assume(free)
    group = free[rng.integers(len(free))]
    with p.edit("permute") as e:
        e.permute(group.name, rng.permutation(group.size).tolist())
    np.testing.assert_allclose(run(p, x)["y"], expected, rtol=0, atol=1e-10, err_msg=group.name)
    for init in ("zero_out", "duplicate"):
        with contextlib.suppress(UsageError), p.edit("grow") as e:  # refused where the function would change
            e.grow(group.name, 2, init, seed=draw)
        np.testing.assert_allclose(run(p, x)["y"], expected, rtol=0, atol=1e-9, err_msg=f"{init} {group.name}")
    p.undo(len(p.history.undoable))
    assert p.hash() == before


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), draw=st.integers(0, 2**31))
def test_plans_and_gradients_follow_a_cut_and_its_undo(seed, draw):
    """Plans and gradients updated by edits equal those of a fresh fork."""
    p = RandomNet(seed).program
    rng = np.random.default_rng(draw)
    x = {"x": rng.normal(size=(4, 6))}
    free = [g for g in p.axes().values() if not g.frozen and len(g.atoms) == 1]
    assume(free)
    group = free[rng.integers(len(free))]

    def compare() -> None:
        np.testing.assert_allclose(p.compile(x=(4, 6))(x)["y"].to_numpy(), run(p, x)["y"], rtol=0, atol=1e-9)
        names = [p.path(n) for n in p.params()]
        updated, fresh = (q.grad(["y"], names) for q in (p, p.fork()))
        for name, value in run(fresh, x).items():
            np.testing.assert_allclose(run(updated, x)[name], value, rtol=0, atol=1e-9)

    compare()
    group.units([int(rng.integers(group.size))]).prune()
    compare()
    p.undo()
    compare()


# -- what couples ------------------------------------------------------------------------------------------------------
def test_equal_sizes_do_not_couple_axes():
    """Vocabulary, hidden and inner width are all 8: the groups are those of other sizes."""

    def built(vocab: int, hidden: int, inner: int) -> Program:
        b = Builder("sizes")
        table = b.param("embed.weight", np.ones((vocab, hidden), "f4"))
        x = b.embedding(table, b.input("ids", ("B", "T"), "int64"), name="embed")
        up, down = (
            b.param("mlp.up", np.ones((inner, hidden), "f4")),
            b.param("mlp.down", np.ones((hidden, inner), "f4")),
        )
        x = b.junction(x, b.linear(b.tanh(b.linear(x, up)), down), name="out")
        b.output(b.linear(x, b.param("head", np.ones((vocab, hidden), "f4"))), "y")
        return b.build()

    def groups(p: Program) -> list[set[str]]:
        return [{str(m) for m in g.members} for g in p.axes().values()]

    assert groups(built(8, 8, 8)) == groups(built(7, 5, 11))
    assert len(groups(built(8, 8, 8))) == 4


def test_axes_do_not_depend_on_names():
    """Every node renamed: the same groups by members' handles."""
    p = perceptron()
    before = [{(m.value, m.dim) for m in g.members} for g in p.axes().values()]
    with p.edit("rename") as e:
        for i, node in enumerate(p.nodes()):
            e.rename(node, f"n{i}")
    assert [{(m.value, m.dim) for m in g.members} for g in p.axes().values()] == before


def test_details_list_the_chain_of_ops_that_couples_members():
    p = perceptron()
    assert p.axes()["first.neurons"].details().splitlines() == [
        "first.neurons: 5 neurons",
        "  first.weight[0] = first.neurons",
        "  first.bias[0] = first.neurons, as first.weight[0] because linear",
        "  second.weight[1] = first.neurons, as first.weight[0] because linear, tanh, linear",
    ]


def test_axes_can_be_listed_and_looked_up():
    p = perceptron()
    axes = p.axes()
    assert list(axes) == ["first.neurons", "first.weight:1", "second.units"]
    assert str(axes).splitlines()[0].split() == ["first.neurons", "5", "neurons", "3", "weights"]
    assert [g.name for g in axes.of("second.weight", -1)] == ["first.neurons"]
    assert p.axes() is axes
    with pytest.raises(UnknownAxis) as caught:
        axes["first.neuron"]
    assert "first.neurons" in str(caught.value)
    with pytest.raises(UsageError):
        axes.of("second.weight", 2)


@pytest.mark.parametrize(
    ("axis", "why"),
    [("first.weight:1", "x (input) is an input of the program"), ("second.units", "is the output 'y' of the program")],
)
def test_inputs_and_outputs_are_frozen_with_a_reason(axis, why):
    p = perceptron()
    before = p.hash()
    for verb in (lambda e: e.cut_units(p.axes()[axis].units([0])), lambda e: e.grow(axis, 1),
                 lambda e: e.permute(axis, [1, 0])):  # fmt: skip
        with pytest.raises(FrozenAxis) as caught, p.edit("frozen") as e:
            verb(e)
        assert why in str(caught.value)
        assert axis in str(caught.value)
    assert p.hash() == before


def test_an_op_without_a_rule_freezes_its_axes():
    b = Builder("pair")
    x = b.input("x", (4, 3), "float64")
    h = b.linear(x, b.param("w", np.ones((6, 3))), name="h")
    cut = b.pad_backward(h, widths=((1, 1),), name="cut")
    b.output(b.linear(cut, b.param("v", np.ones((2, 4)))), "y")
    group = b.build().axes()["w:0"]
    assert any("pad_backward" in reason and "no rule" in reason for reason in group.frozen)


def test_cut_experts_equal_experts_without_tokens():
    make, (x,) = NETS["moe"]
    p = traced(make(), x)
    masked = p.fork()
    with masked.edit("mask") as e:
        (node,) = masked.select(op="softmax")
        (edge,) = masked.in_edges(node)
        low = e.const("low", np.array([0.0, -1e30, 0.0, 0.0]))
        e.rewire(edge, e.add("add", masked.edge_value(edge), low, name="masked"))
    name = p.input_names()[0]
    before = p.hash()
    gone = p.select("inner").experts[1].prune()
    assert gone.names() == ["inner.experts[1]"]
    keys = {k.split(".")[2] for k in p.weights if k.startswith("inner.experts")}
    assert keys == {"0", "2", "3"}
    assert p.weights["inner.router.weight"].shape == (3, 8)
    np.testing.assert_allclose(run(p, {name: x})["out"], run(masked, {name: x})["out"], rtol=0, atol=1e-12)
    p.undo()
    assert p.hash() == before


class Looked(nn.Module):
    """A row of a table for the better of two choices by one map, or the last row for tokens that are not valid."""

    def __init__(self, optional: bool) -> None:
        self.first, self.optional, self.table = nn.Linear(3, 5), optional, nn.Embedding(5, 4)

    def forward(self, x: gw.Tensor, valid: gw.Tensor) -> gw.Tensor:
        scores = self.first(x)
        best = call("argmax", scores, axis=-1)
        other = call("full_like", best, value=-1) if self.optional else call("argmin", scores, axis=-1)
        return self.table(call("where", valid, best, other))


def test_indices_of_one_axis_or_another_couple_it_unless_they_may_be_minus_1():
    x, valid = RNG.normal(size=(7, 3)), np.arange(7) % 3 > 0
    p = traced(Looked(False), x, valid)
    (member,) = p.axes().of("table.weight", 0)
    assert member is p.axes().of("first.weight", 0)[0]
    assert not member.frozen
    p = traced(Looked(True), x, valid)
    assert any("by index" in reason for reason in p.axes().of("table.weight", 0)[0].frozen)


def test_fewer_experts_than_top_k_raises():
    make, (x,) = NETS["moe"]
    p = traced(make(), x)
    before = p.hash()
    with pytest.raises(UsageError, match="topk"):
        p.select("inner").experts[1:].prune()
    assert p.hash() == before


def test_grouped_channels_are_cut_per_group_or_with_the_group():
    """A whole group makes channels of its own, so that it is no set of the channels that it reads."""
    convs = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1, groups=2), nn.Flatten(), nn.Linear(16, 2))
    x = RNG.normal(size=(2, 3, 2, 2))
    p = traced(convs, x)
    feeds = {p.input_names()[0]: x}
    channels = p.axes()["0.channels"].units()
    for refused in ([0, 1, 2], [0], [0, 4]):
        with pytest.raises(RaggedUnit, match="unequal"):
            channels[refused].prune()
    agree(p, channels[[1, 4]], feeds, 1e-10)
    agree(p, p.axes()["0.channel_groups"].units([1]), feeds, 1e-10)
