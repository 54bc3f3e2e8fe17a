"""Traces with named sizes: equal to the module at other sizes, and refused where a size is part of the code."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.autograd import TraceError
from graphwright.errors import UsageError
from graphwright.models.onnx import run_onnx
from values import grad_of

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


class Ends(nn.Module):
    """The first, the last and some other steps."""

    def __init__(self) -> None:
        self.lin = nn.Linear(3, 4)

    def forward(self, x):
        x = self.lin(x)
        return x[:, -1] + x[:, 0] * x[:, 1:4:2].sum(1) - x[:, -3:-1].prod(1)


class Positions(nn.Module):
    """Embeddings of positions, and positions as numbers."""

    def __init__(self) -> None:
        self.table = nn.Embedding(9, 3)

    def forward(self, x):
        length = x.shape[1]
        return x * gw.arange(length, dtype=gw.float32).reshape(1, length, 1) + self.table(gw.arange(length))


CASES = {
    "mixer": (Mixer(), (2, 5, 8), ("B", "T", 8), [(2, 5, 8), (3, 7, 8), (1, 1, 8)]),
    "conv": (Conv().eval(), (2, 3, 5, 5), ("N", None, 5, None), [(2, 3, 5, 5), (7, 3, 5, 5)]),
    "ends": (Ends(), (2, 6, 3), ("B", "T", 3), [(2, 6, 3), (5, 4, 3), (1, 9, 3)]),
    "positions": (Positions(), (2, 6, 3), ("B", "T", 3), [(2, 6, 3), (5, 1, 3), (1, 9, 3)]),
    "lstm": (nn.LSTM(3, 4, 2, batch_first=True), (2, 6, 3), ("B", 6, 3), [(2, 6, 3), (5, 6, 3)]),
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
    "a table": lambda x: x + gw.arange(1, 1 + x.shape[0]).reshape(-1, 1).to("float32"),
    "a product": lambda x: x.reshape(x.shape[0] * x.shape[1]),
    "the rest": lambda x: x[1:],
    "the middle": lambda x: x[len(x) // 2],
    "half": lambda x: x[: len(x) // 2],
    "a branch": lambda x: x.exp() if len(x) > 4 else x.tanh(),
    "a check": lambda x: x.reshape(2, 2, 3),
}


@pytest.mark.parametrize("name", BAKED)
def test_code_that_contains_the_size_is_refused(name):
    with pytest.raises(TraceError, match="named size B") as caught:
        gw.trace(BAKED[name], np.ones((4, 3), "f4"), sizes={"x": ("B", 3)})
    assert caught.value.where


def test_a_loop_over_a_named_size_is_named_with_the_ops_that_it_adds():
    with pytest.raises(TraceError, match="records other ops where T is 12 instead of 6, because a loop") as caught:
        gw.trace(nn.LSTM(3, 4, batch_first=True), np.zeros((2, 6, 3), "f4"), sizes={"x": ("B", "T", 3)})
    assert "leave T fixed" in str(caught.value.fix)


def test_an_entry_that_a_shorter_input_lacks_is_an_error_of_the_run():
    p = gw.trace(lambda x: x[2] + x[-1], np.ones((6, 3), "f4"), sizes={"x": ("T", 3)})
    x = RNG.normal(size=(3, 3)).astype("f4")
    np.testing.assert_array_equal(p.run(x=x)["out"].to_numpy(), x[2] + x[2])
    for run in (p.run, p.compile(x=(2, 3))):
        with pytest.raises(gw.GraphwrightError, match="index"):
            run(x=x[:2])


def test_gradients_and_axes_of_entries_of_a_named_size():
    net, x = Ends(), RNG.normal(size=(2, 5, 3)).astype("f4")
    p = gw.trace(net, np.zeros((2, 6, 3), "f4"), sizes={"x": ("B", "T", 3)})
    leaf = gw.tensor(x, requires_grad=True)
    net(leaf).sum().backward()
    found = p.grad("out", ["x"], {"B": 2, "T": 5}).run(x=x)["grad.x"].to_numpy()
    np.testing.assert_allclose(found, grad_of(leaf).numpy(), rtol=1e-4, atol=1e-5)
    assert p.axes()


def test_sizes_that_do_not_match_the_example_are_refused():
    x = np.ones((4, 3), "f4")
    for sizes in ({"y": ("B", 3)}, {"x": ("B",)}, {"x": ("B", 4)}, {"x": ("B", "B")}):
        with pytest.raises(UsageError):
            gw.trace(lambda x: -x, x, sizes=sizes)
    assert gw.trace(lambda x: x @ x.T, x, sizes={"x": ("B", None)}).spec("x").shape == ("B", 3)
