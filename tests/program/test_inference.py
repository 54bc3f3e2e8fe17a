"""The inference form of a program: what torch computes after `module.eval()`, from the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import graphwright as gw
from graphwright import nn
from graphwright.program import Program

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3, 5, 5)).astype("f4")


class Net(nn.Module):
    def __init__(self: Any, lib: Any) -> None:
        if lib is torch.nn:
            torch.nn.Module.__init__(self)
        self.conv, self.norm, self.drop = lib.Conv2d(3, 4, 3), lib.BatchNorm2d(4), lib.Dropout(0.4)
        self.lin, self.out = lib.Linear(36, 8), lib.BatchNorm1d(8)

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x))).tanh()
        return self.drop(self.out(self.lin(x.reshape(len(x), -1))))


class Torch(torch.nn.Module):
    __init__, forward = Net.__init__, Net.forward


def pair() -> tuple[Net, torch.nn.Module]:
    ours, theirs = Net(nn), Torch(torch.nn)
    state = {k: RNG.uniform(0.5, 1.5, v.shape).astype(v.numpy().dtype) for k, v in theirs.state_dict().items()}
    ours.load_state_dict(state)
    theirs.load_state_dict({k: torch.tensor(v) for k, v in state.items()})
    return ours, theirs.eval()


def test_the_inference_form_computes_what_torch_computes_in_evaluation():
    ours, theirs = pair()
    p = gw.trace(ours, X)
    assert p.of_traits(training_only=True)
    still, before = p.eval(), p.hash()
    expected = theirs(torch.tensor(X)).detach().numpy()
    for found in (still.run(x=X), still.compile(x=X.shape)(x=X), still.run(x=X)):
        np.testing.assert_allclose(found["out"].to_numpy(), expected, rtol=2e-5, atol=2e-5)
    assert not still.assigns()
    assert not still.of_traits(training_only=True)
    assert not still.of_traits(batch_statistics=True)
    assert still.validate().ok
    assert (still.input_names(), still.output_names(), p.hash()) == (p.input_names(), p.output_names(), before)
    assert all(still.weights[key] is p.weights[key] for key in still.weights)
    assert set(still.weights) == {k for k, _ in theirs.named_parameters()} | {
        f"{norm}.running_{what}" for norm in ("norm", "out") for what in ("mean", "var")
    }


def test_the_inference_form_follows_training():
    ours, _ = pair()
    p = gw.trace(ours, X)
    still, before = p.eval(), {k: v.data.to_numpy().copy() for k, v in p.weights.items()}
    p.compile(x=X.shape)(x=X)
    ours.eval()
    assert not np.array_equal(before["norm.running_mean"], p.weights["norm.running_mean"].data.to_numpy())
    np.testing.assert_allclose(still.run(x=X)["out"].to_numpy(), ours(gw.tensor(X)).numpy(), rtol=1e-5, atol=1e-5)


def counter() -> Program:
    b = gw.Builder("counter")
    x, n, key = b.input("x", (2,)), b.state("n", np.zeros((), np.float32)), b.state("key", np.zeros(2, np.int64))
    y, _ = b.dropout(b.mul(x, n), key, p=0.5, stream=0)
    b.assign(n, b.add(n, b.const("one", np.float32(1))))
    b.assign(key, b.add(key, b.const("next", np.ones(2, np.int64))))
    b.output(b.tanh(y), "y")
    return b.build()


def test_states_that_outputs_depend_on_are_still_assigned():
    p = counter()
    still = p.eval()
    assert [still.path(n) for n in still.states()] == ["n"]
    x = np.array([0.5, -1], np.float32)
    run = still.compile(x=(2,))
    found = [run(x=x)["y"].to_numpy().copy() for _ in range(3)]
    np.testing.assert_allclose(found, [np.tanh(k * x) for k in range(3)], rtol=1e-6)
