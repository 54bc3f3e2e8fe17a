"""Mixed precision as an edit: golden casts, the bits of autocast, and undo."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import amp, nn
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import DTypeError

X = Tensor(from_numpy(np.random.default_rng(0).normal(size=(2, 5, 8)).astype("f4")))


class Net(nn.Module):
    """Products that share an input, a norm, attention, a softmax, a mean, a sum of both dtypes."""

    def __init__(self) -> None:
        gw.manual_seed(0)
        self.norm = nn.RMSNorm(8)
        self.attention = nn.MultiHeadAttention(8, 2, rope=nn.RotaryEmbedding(4))
        self.up = nn.Linear(8, 6)

    def forward(self, x):
        h = gw.ops.call("junction", x, self.attention(self.norm(x)))
        return (self.up(h).tanh().softmax() * 2.0).mean(axis=1)


def casts(p: gw.Program) -> list[str]:
    return [f"{p.path(p.operands(n)[0])} -> {p.spec(n).dtype.name}" for n in p.order() if p.op(n) == "cast"]


GOLDEN = [
    "attention.q.weight -> bfloat16",
    "attention.k.weight -> bfloat16",
    "attention.v.weight -> bfloat16",
    "norm.rms_norm -> bfloat16",
    "attention.permute -> float32",
    "attention.permute_2 -> float32",
    "attention.rope -> bfloat16",
    "attention.rope_2 -> bfloat16",
    "attention.out.weight -> bfloat16",
    "attention.out.linear -> float32",
    "junction -> bfloat16",
    "up.weight -> bfloat16",
    "up.bias -> bfloat16",
    "tanh -> float32",
]


def test_apply_inserts_the_expected_casts_and_undo_restores_the_hash():
    p = gw.trace(Net(), X)
    before = p.hash()
    assert casts(p) == []
    entry = amp.apply(p, "bfloat16")
    assert entry is not None
    assert sorted(casts(p)) == sorted(GOLDEN)
    assert {e["edit"] for e in entry.edits} == {"AddNode", "AddEdge", "Rewire"}
    p.undo()
    assert p.hash() == before
    p.redo()
    assert sorted(casts(p)) == sorted(GOLDEN)


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_results_and_gradients_equal_autocast_bit_for_bit(low):
    net = Net()
    p = gw.trace(net, X)
    amp.apply(p, low)
    with amp.autocast(low):
        eager = net(X)
        traced = gw.trace(net, X)
    np.testing.assert_array_equal(p(x=X)["out"].numpy(), eager.numpy())
    assert {str(p.spec(n)) for n in p.order()} == {str(traced.spec(n)) for n in traced.order()}
    (eager * eager).sum().backward()
    theirs = {q.name: q.grad for q in net.parameters()}
    for q in net.parameters():
        q.grad = None
    y = p(x=X)["out"]
    (y * y).sum().backward()
    for q in net.parameters():
        assert q.grad is not None
        other = theirs[q.name]
        assert other is not None
        np.testing.assert_allclose(q.grad.numpy(), other.numpy(), rtol=0.05, atol=0.02 * np.abs(other.numpy()).max())


def test_applying_twice_adds_nothing():
    p = gw.trace(Net(), X)
    amp.apply(p)
    once = casts(p)
    assert amp.apply(p) is None
    assert casts(p) == once


def test_apply_joins_an_open_edit_and_fails_atomically():
    p = gw.trace(Net(), X)
    before = p.hash()

    def both():
        with p.edit("both"):
            assert amp.apply(p) is None
            raise KeyError

    with pytest.raises(KeyError):
        both()
    assert p.hash() == before
    with pytest.raises(DTypeError, match="invalid dtype of autocast"):
        amp.apply(p, "float32")
