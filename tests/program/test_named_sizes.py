"""Traces with named sizes: equal to the module at other sizes, and refused where a size is part of the code."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.autograd import TraceError
from graphwright.errors import UsageError
from graphwright.models.onnx import run_onnx

RNG = np.random.default_rng(0)


class Mixer(nn.Module):
    def __init__(self) -> None:
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.up(self.norm(x)).reshape(batch, length, 3, 4).permute(0, 2, 1, 3)
        scores = (heads @ heads.permute(0, 1, 3, 2)).softmax(-1)
        mixed = (scores @ heads).permute(0, 2, 1, 3).reshape(batch, length, 12)
        return x + self.down(mixed) + gw.zeros(batch, length, 8), x.mean((0, 1))


class Conv(nn.Module):
    def __init__(self) -> None:
        self.conv, self.norm, self.lin = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(100, 2)

    def forward(self, x):
        return self.lin(self.norm(self.conv(x)).relu().reshape(len(x), -1))


CASES = {
    "mixer": (Mixer(), (2, 5, 8), ("B", "T", 8), [(2, 5, 8), (3, 7, 8), (1, 1, 8)]),
    "conv": (Conv().eval(), (2, 3, 5, 5), ("N", None, 5, None), [(2, 3, 5, 5), (7, 3, 5, 5)]),
    "lstm": (nn.LSTM(3, 4, 2), (2, 6, 3), ("B", 6, 3), [(2, 6, 3), (5, 6, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trace_with_named_sizes_equals_the_module_at_other_sizes(name, tmp_path):
    net, shape, sizes, shapes = CASES[name]
    p = gw.trace(net, np.zeros(shape, "f4"), sizes={"x": sizes})
    assert p.spec("x").shape == tuple(d if want is None else want for want, d in zip(sizes, shape, strict=True))
    assert p.validate().ok
    file, out = p.to_onnx(tmp_path / "net.onnx"), p.output_names()[0]
    for case in shapes:
        x = RNG.normal(size=case).astype("f4")
        wanted = net(gw.tensor(x))
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).numpy()
        for found in (p.run(x=x), p.compile(x=case)(x=x), run_onnx(file, [{"x": x}])[0]):
            found = found[out] if isinstance(found[out], np.ndarray) else found[out].to_numpy()
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_at_other_sizes_are_those_of_the_module():
    net = Mixer()
    p, x = gw.trace(net, np.zeros((2, 5, 8), "f4"), sizes={"x": ("B", "T", 8)}), RNG.normal(size=(3, 4, 8)).astype("f4")
    leaf = gw.tensor(x, requires_grad=True)
    net(leaf)[0].sum().backward()
    g = p.grad("out", ["x", "up.weight"], {"B": 3, "T": 4})
    for found in (g.run(x=x), g.compile(x=x.shape)(x=x)):
        np.testing.assert_allclose(found["grad.x"].to_numpy(), leaf.grad.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["grad.up.weight"].to_numpy(), net.up.weight.grad.numpy(), rtol=1e-4, atol=1e-4)


BAKED = {
    "a factor": lambda x: x * x.shape[0],
    "a loop": lambda x: sum((x * k for k in range(len(x))), x),
    "positions": lambda x: x + gw.arange(x.shape[0]).reshape(-1, 1).to("float32"),
    "a product": lambda x: x.reshape(x.shape[0] * x.shape[1]),
    "a slice": lambda x: x[:2],
    "a branch": lambda x: x.exp() if len(x) > 4 else x.tanh(),
    "a check": lambda x: x.reshape(2, 2, 3),
}


@pytest.mark.parametrize("name", BAKED)
def test_code_that_contains_the_size_is_refused(name):
    with pytest.raises(TraceError, match="named size B") as caught:
        gw.trace(BAKED[name], np.ones((4, 3), "f4"), sizes={"x": ("B", 3)})
    assert caught.value.where


def test_sizes_that_do_not_match_the_example_are_refused():
    x = np.ones((4, 3), "f4")
    for sizes in ({"y": ("B", 3)}, {"x": ("B",)}, {"x": ("B", 4)}, {"x": ("B", "B")}):
        with pytest.raises(UsageError):
            gw.trace(lambda x: -x, x, sizes=sizes)
    assert gw.trace(lambda x: x @ x.T, x, sizes={"x": ("B", None)}).spec("x").shape == ("B", 3)
