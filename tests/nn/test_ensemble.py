"""Ensembles against the members by themselves: values, gradients, whole trainings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.program import NotStackable

nn, F = gw.nn, gw.nn.functional
COUNT = 3
WRONG: Any = 3


class Net(nn.Module):
    """Axes by number and from the end, a gather, shapes in attributes, tied weights."""

    def __init__(self):
        super().__init__()
        self.table, self.proj, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, ids):
        x = self.table(ids)  # [B, T, 4]
        h = self.norm(x + self.proj(x).relu())
        scores = F.softmax(h @ h.transpose(1, 2), -1)
        pooled = (scores @ h).mean(1).reshape(-1, 2, 2).sum(1)
        return pooled.flatten(1), h.amax(2) @ gw.ones(3, 2)


def conv():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def normed():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))


CASES = {
    "mlp": (mlp, lambda: gw.randn(6, 4)),
    "conv": (conv, lambda: gw.randn(5, 1, 6, 6)),
    "attention": (Net, lambda: gw.randint(0, 7, (5, 3))),
    "batch norm": (normed, lambda: gw.randn(6, 4)),
    "recurrent": (lambda: nn.GRU(4, 5), lambda: gw.randn(3, 2, 4)),
}


def members(make):
    found = []
    for k in range(COUNT):
        gw.manual_seed(k)
        found.append(make())
    return found


def tensors(result) -> list:
    """All tensors of a result, in order."""
    if isinstance(result, dict):
        result = tuple(result.values())
    return [t for r in result for t in tensors(r)] if isinstance(result, tuple | list) else [result]


def squares(values) -> gw.Tensor:
    return gw.stack([(v * v).sum() for v in values]).sum()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_each_member(case, shared):
    make, example = CASES[case]
    models = members(make)
    inputs = [example()] * COUNT if shared else [example() for _ in range(COUNT)]
    ensemble = nn.Ensemble(models, inputs[0], shared=None if shared else ())
    outs = tensors(ensemble(inputs[0] if shared else gw.stack(inputs)))
    squares(outs).backward()
    for k, (model, x) in enumerate(zip(models, inputs, strict=True)):
        expected = tensors(model(x))
        assert len(expected) == len(outs)
        for mine, theirs in zip(outs, expected, strict=True):
            np.testing.assert_allclose(mine[k].detach().numpy(), theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
        squares(expected).backward()
        for name, parameter in model.named_parameters():
            found = ensemble.program.weights[name].grad.numpy()[k]
            np.testing.assert_allclose(found, parameter.grad.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", [mlp, normed])
def test_training_together_is_training_apart(make, compiled):
    x, y = gw.randn(16, 4), gw.randn(16, 2)
    models, twins = members(make), members(make)
    ensemble = nn.Ensemble(models, x)

    def train(call, parameters, loss_of):
        optimizer = gw.optim.Adam(parameters, lr=1e-2)

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(call(x), y)
            loss.backward()
            optimizer.step()
            return loss

        run = gw.compile(step) if compiled else step
        return [run(x, y).numpy() for _ in range(10)]

    train(ensemble, list(ensemble.parameters()), lambda out, y: ((out - y) ** 2).mean((1, 2)).sum())
    for twin in twins:
        train(twin, list(twin.parameters()), lambda out, y: ((out - y) ** 2).mean())
    before = [m[0].weight.numpy().copy() for m in models]
    ensemble.unstack()
    for model, twin, old in zip(models, twins, before, strict=True):
        assert np.abs(model[0].weight.numpy() - old).max() > 1e-2
        ours, theirs = model.state_dict(), twin.state_dict()
        for name in theirs:
            np.testing.assert_allclose(
                np.asarray(ours[name]), np.asarray(theirs[name]), rtol=1e-3, atol=1e-4, err_msg=name
            )


@pytest.mark.parametrize(("case", "each"), [("attention", 0), ("batch norm", 0), ("conv", 2 * COUNT)])
def test_only_ops_without_an_axis_for_members_run_once_per_member(case, each):
    make, example = CASES[case]
    p = nn.Ensemble(members(make), example()).program
    slices = [p.path(n) for n in p.of_traits(slices=True)]
    assert len(slices) == each, slices  # of weight and bias of the convolution
    assert sum(p.op(n) == "conv" for n in p.nodes()) == each // 2


def test_any_batch_size_with_a_named_size():
    models = members(mlp)
    ensemble = nn.Ensemble(models, gw.rand(4, 4), sizes={"x": ("B", 4)})
    x = gw.randn(9, 4)
    np.testing.assert_allclose(ensemble(x)[2].detach().numpy(), models[2](x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_programs_and_paths():
    programs = [gw.trace(m, gw.rand(6, 4)) for m in members(mlp)]
    ensemble = nn.Ensemble(programs)
    p = ensemble.program
    assert [p.path(n) for n in p.nodes() if p.op(n) == "tanh"] == ["1.tanh"]
    assert len(ensemble) == COUNT
    assert p.spec("0.linear").shape == (COUNT, 6, 8)
    assert p.spec("0.weight").shape == (COUNT, 8, 4)
    assert p.spec(p.input_names()[0]).shape == (6, 4)
    assert not p.of_traits(slices=True)
    assert p.validate().ok


def test_equal_consts_and_what_follows_from_shared_inputs_are_not_stacked():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x.exp() + 1.0)

    p = nn.Ensemble(members(Shifted), gw.rand(6, 4)).program
    assert p.spec("exp").shape == (6, 4)
    assert p.spec("linear.linear").shape == (COUNT, 6, 2)


def dropout():
    return nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.Ensemble(members(dropout), gw.rand(6, 4)), NotStackable, "1.dropout: op 'dropout' draws random"),
        (lambda: nn.Ensemble([nn.Linear(4, 2), nn.Linear(4, 3)], gw.rand(6, 4)), NotStackable, "program 1 has another"),
        (lambda: nn.Ensemble([], gw.rand(6, 4)), UsageError, "at least one"),
        (lambda: nn.Ensemble([nn.Linear(4, 2), WRONG], gw.rand(6, 4)), UsageError, "int"),
        (lambda: nn.Ensemble(members(mlp), gw.rand(6, 4))(*[gw.rand(6, 4)] * 2), UsageError, "too many inputs"),
        (lambda: nn.Ensemble(members(mlp), gw.rand(6, 4), shared=("z",)), UsageError, "unknown inputs"),
    ],
)
def test_models_that_cannot_be_stacked_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_models_in_inference_mode_with_dropout_are_stacked():
    models = [m.eval() for m in members(dropout)]
    x = gw.rand(6, 4)
    out = nn.Ensemble(models, x)(x)
    np.testing.assert_allclose(out[1].detach().numpy(), models[1](x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_key_that_is_the_path_of_another_weight():
    """Keys of weights are independent of the paths of their nodes: here the key of `b` is the path of `a`."""

    def member(seed: int) -> gw.Program:
        rng, b = np.random.default_rng(seed), gw.Builder("member")
        x = b.input("x", ("N", 3))
        first = b.param("a", rng.normal(size=(3, 3)).astype("f4"), key="k")
        second = b.param("b", rng.normal(size=(3, 3)).astype("f4"), key="a")
        b.output(b.linear(b.tanh(b.linear(x, first)), second), "y")
        return b.build()

    members, x = [member(1), member(2)], np.random.default_rng(0).normal(size=(4, 3)).astype("f4")
    stacked = np.asarray(gw.nn.Ensemble(members)(x))
    np.testing.assert_allclose(stacked, [np.asarray(p(x=x)["y"]) for p in members], rtol=1e-5)


def test_helper_nodes_leave_names_and_keys_of_the_members_alone():
    def member(scale: float):
        b = gw.Builder("member")
        x, w = b.input("x", (2, 3)), b.param("w", np.full(3, scale, "f4"))
        h = b.mul(x, w, name="a")  # stacked, `a` gets a node `a.unsqueeze`; the norm a const `norm.const`
        h = b.rms_norm(b.tanh(h, name="a.unsqueeze"), b.param("norm.scale", np.full(3, scale, "f4")), name="norm")
        b.output(b.add(h, b.param("norm.const", np.full(3, scale, "f4")), name="y"), "y")
        p = b.build()
        with p.edit("leave the key only") as e:
            e.rename("norm.const", "shift")
        return p

    members = [member(1.0), member(2.0)]
    whole, x = gw.program.stack(members), np.arange(6, dtype="f4").reshape(2, 3)
    assert len({whole.path(n) for n in whole.nodes()}) == len(whole)
    got = whole.run(x=x)["y"]
    for k, p in enumerate(members):
        np.testing.assert_allclose(np.asarray(got)[k], p.run(x=x)["y"], rtol=1e-6)
