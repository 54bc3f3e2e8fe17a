"""Traces with named sizes: equal to the module at other sizes, and refused where a size is part of the code."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphwright as gw
import graphwright.nn.functional as F
from graphwright import nn
from graphwright.autograd import TraceError
from graphwright.errors import ShapeError, UsageError
from graphwright.models.onnx import run_onnx
from graphwright.program.weights import abstract_array
from values import grad_of

RNG = np.random.default_rng(0)
WIDTH = 4
SHAPES = [(2, 6, WIDTH), (3, 7, WIDTH), (1, 1, WIDTH), (5, 19, WIDTH), (4, 2, WIDTH)]
NAMES = ("B", "T", WIDTH)


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
        return self.lin(self.norm(self.conv(x)).relu().reshape(x.shape[0], -1))


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
            value = found[out]
            value = value if isinstance(value, np.ndarray) else value.to_numpy()
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_at_other_sizes_are_those_of_the_module():
    net = Mixer()
    p, x = gw.trace(net, np.zeros((2, 5, 8), "f4"), sizes={"x": ("B", "T", 8)}), RNG.normal(size=(3, 4, 8)).astype("f4")
    leaf = gw.tensor(x, requires_grad=True)
    net(leaf)[0].sum().backward()
    g = p.grad("out", ["x", "up.weight"], {"B": 3, "T": 4})
    for found in (g.run(x=x), g.compile(x=x.shape)(x=x)):
        np.testing.assert_allclose(found["grad.x"].to_numpy(), grad_of(leaf).numpy(), rtol=1e-4, atol=1e-5)
        wanted = grad_of(net.up.weight).numpy()
        np.testing.assert_allclose(found["grad.up.weight"].to_numpy(), wanted, rtol=1e-4, atol=1e-4)


# -- code with sizes in it ---------------------------------------------------------------------------------------------
class With(nn.Module):
    """A function of x and of modules that it uses."""

    def __init__(self, fn, **modules) -> None:
        self.fn = fn
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.fn(self, x)


def scores(x):
    return x @ x.transpose(1, 2)


def causal(m, x):
    n = x.shape[1]
    return scores(x).masked_fill(gw.tril(gw.ones(n, n)) == 0, float("-inf")).softmax(-1) @ x


FOLLOWED = {
    # products
    "batch times length": lambda x: x.reshape(x.shape[0] * x.shape[1], WIDTH).tanh(),
    "flatten": lambda x: x.flatten(0, 1).unflatten(0, (x.shape[0], x.shape[1])).sum(1),
    "view(-1)": lambda x: x.view(-1, WIDTH).view(*x.shape).view(x.shape[0], -1, 2).sum(1),
    "heads in the batch": lambda x: (
        x.reshape(*x.shape[:2], 2, 2).permute(0, 2, 1, 3).reshape(-1, x.shape[1], 2).softmax(1)
    ),
    "linear on rows": With(lambda m, x: m.lin(x.view(-1, WIDTH)).view(*x.shape[:2], 3), lin=nn.Linear(WIDTH, 3)),
    "gram matrix": lambda x: (x.flatten(0, 1).T @ x.flatten(0, 1)) / (x.shape[0] * x.shape[1] - 0.5),
    # means and other numbers of a size
    "mean": lambda x: x.mean() + x.mean(0) + x.mean((0, 1)),
    "variance": lambda x: x.var(1, unbiased=False) + x.std(unbiased=False),
    "sum over size": lambda x: x.sum() / x.shape[0] + x.sum(1) / (x.numel() // WIDTH),
    "one over size": lambda x: x * (1 / x.shape[0]) - x.shape[1] * x + (2 - x.shape[1] / 3) + x.shape[1] % 3,
    "root of a size": lambda x: x / x.shape[1] ** 0.5 + x * np.sqrt(x.shape[0]) / np.prod(x.shape[:2]),
    "mean squared error": lambda x: F.mse_loss(x, x.detach() * 2) + F.smooth_l1_loss(x, x.detach() + 2),
    "cross entropy": lambda x: F.cross_entropy(x.view(-1, WIDTH), x.detach().argmin(-1).view(-1)),
    "ignored targets": lambda x: F.cross_entropy(x.flatten(0, 1) * 3, x.argmin(-1).flatten(), label_smoothing=0.1),
    "batch mean": lambda x: F.kl_div(x.log_softmax(-1), x.detach().flip(1).softmax(-1), reduction="batchmean"),
    "norms": With(lambda m, x: m.norm(x) + F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2),
                  norm=nn.LayerNorm(WIDTH)),
    # positions and masks
    "causal mask": partial(causal, None),
    "causal attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "boolean mask": lambda x: scores(x).masked_fill(gw.ones(x.shape[1], x.shape[1], dtype=gw.bool).triu(1), -9.0),
    "a slice of a mask": With(lambda m, x: scores(x) * m.mask[: x.shape[1], : x.shape[1]],
                              mask=nn.Buffer(gw.tril(gw.ones(20, 20)))),
    "a slice of a constant": With(lambda m, x: x + m.table[0][: x.shape[1]], table=[gw.rand(20, WIDTH)]),
    "ranges": lambda x: (
        x * gw.arange(1, x.shape[1] + 1).unsqueeze(1) + gw.arange(x.shape[1] - 1, -1, -1, dtype=gw.float32).unsqueeze(1)
    ),
    "every second number": lambda x: x[:, ::2] * gw.arange(0, x.shape[1], 2).unsqueeze(1),
    "identity": lambda x: scores(x) + gw.eye(x.shape[1]) + gw.full((x.shape[0], 1, 1), 2.5),
    "distances": lambda x: scores(x) - (gw.arange(x.shape[1]).unsqueeze(1) - gw.arange(x.shape[1])).abs(),
    "position table": With(lambda m, x: x + m.pos.weight[: x.shape[1]] + m.pos(gw.arange(x.shape[1])),
                           pos=nn.Embedding(20, WIDTH)),
    "comparison with a size": lambda x: gw.where(gw.arange(x.shape[1]).unsqueeze(1) < x.shape[1] - 1, x, 0.0),
    "rotary attention": With(lambda m, x: m.mixer(x),
                             mixer=nn.MultiHeadAttention(WIDTH, 2, rope=nn.RotaryEmbedding(2), window=3)),
    "filled with a size": lambda x: (
        x.masked_fill(x > 0, x.shape[1]) + gw.full((x.shape[0], 1, 1), 1 / x.shape[1]) + gw.full_like(x, x.shape[0])
    ),
    "similarity": lambda x: F.cosine_similarity(x, x.flip(1), dim=-1),
    "contrastive loss": lambda x: F.cross_entropy(F.normalize(x[:, 0]) @ F.normalize(x[:, -1]).T, gw.arange(x.size(0))),
    # parts
    "numbered entries": lambda x: x[gw.arange(x.shape[0]), x.shape[1] - 1] + x[:, gw.arange(x.shape[1]) - 1].sum(1),
    "narrowed": lambda x: x.narrow(1, 0, x.shape[1] - 1).sum(1) + x.split([1, x.shape[1] - 1], 1)[1].sum(1),
    "without the first": lambda x: x[:, 1:].sum(1) + x[:, : x.shape[1] - 1].mean(2, keepdim=True).sum(1) + x[:, -1],
    "differences": lambda x: (x[:, 1:] - x[:, :-1]).abs().sum(1),
    "the middle": lambda x: x[:, x.shape[1] // 2] + x[:, : x.shape[1] // 2].sum(1),
    "rotated": lambda x: gw.cat([x[:, -1:], x[:, :-1]], 1) + x.roll(1, 1),
    "without the last five": lambda x: F.pad(x, (0, 0, 5, 0))[:, :-5].reshape(x.shape[0], -1, 2).sum(1),
    "repeated": lambda x: x.repeat(1, 2, 1).sum(1) + x[:, :1].repeat(1, x.shape[1], 1).sum(1),
    "twice each": lambda x: x.repeat_interleave(2, 1),
    "expanded": lambda x: x.mean(1, keepdim=True).expand(-1, x.shape[1], -1) + x[:, :1].expand_as(x),
    "joined": lambda x: gw.cat([x, x * 2, x[:, :1], x.new_zeros(x.shape[0], 1, WIDTH)], 1),
    "padded": lambda x: F.pad(x, (0, 0, 2, 1), value=1.5)[:, : x.shape[1]] + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "diagonal": lambda x: scores(x).diagonal(0, 1, 2) + scores(x)[:, 0],
    # windows
    "convolution": With(lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2) + x,
                        conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "strided convolution": With(lambda m, x: m.conv(x.transpose(1, 2)),
                                conv=nn.Conv1d(WIDTH, 3, 3, stride=2, padding=1)),
    "transposed convolution": With(lambda m, x: m.conv(x.transpose(1, 2)),
                                   conv=nn.ConvTranspose1d(WIDTH, 3, 2, stride=2)),
    "causal convolution": With(lambda m, x: m.conv(F.pad(x.transpose(1, 2), (2, 0))), conv=nn.Conv1d(WIDTH, 3, 3)),
    "pooling": lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1) + F.avg_pool1d(x.transpose(1, 2), 3, 1, 1),
    "global pooling": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1) + F.adaptive_max_pool1d(x.mT, 1),
    # branches that all sizes take
    "an assertion": lambda x: x * 2 if x.shape[2] == WIDTH and x.shape[1] >= 1 and x.shape == x.shape else x,
    "a name": lambda x: x if f"{x.shape[1]}" == "nothing" else -x,
}  # fmt: skip
NOT_IN_ONNX = {"cross entropy", "ignored targets", "contrastive loss", "diagonal", "rotated", "numbered entries"}


def numbers(tensor) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else tensor.to_numpy()


@pytest.mark.parametrize("name", FOLLOWED)
def test_code_that_computes_with_sizes_follows_them(name, tmp_path):
    fn = FOLLOWED[name]
    p = gw.trace(fn, np.zeros(SHAPES[0], "f4"), sizes={"x": NAMES})
    assert p.spec("x").shape == NAMES
    p.save(tmp_path / "saved")
    q = gw.load(tmp_path / "saved")
    assert q.hash() == p.hash()
    reader = next(n for n in q.order() if [*q.operands(n)][:1] == [q.value("x")])
    with q.edit("the same, computed otherwise") as e:
        for _ in range(2):
            e.insert(q.in_edges(reader)[0], "neg")
    still = q.eval()
    assert p.axes() is not None
    file = None if name in NOT_IN_ONNX else p.to_onnx(tmp_path / "net.onnx")
    for shape in SHAPES:
        x = RNG.normal(size=shape).astype("f4")
        leaf = gw.tensor(x, requires_grad=True)
        wanted = fn(leaf)
        wanted.sum().backward()
        runs = [p.run(x=x), p.compile(x=shape)(x=x), still.run(x=x)]
        runs += [] if file is None else run_onnx(file, [{"x": x}])
        for found in runs:
            assert numbers(found["out"]).shape == wanted.shape
            np.testing.assert_allclose(numbers(found["out"]), wanted.numpy(), rtol=1e-4, atol=1e-5)
        slope = p.grad("out", ["x"], {"B": shape[0], "T": shape[1]})
        for found in (slope.run(x=x), *([slope.compile(x=shape)(x=x)] if shape == SHAPES[1] else [])):
            np.testing.assert_allclose(found["grad.x"].to_numpy(), grad_of(leaf).numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FOLLOWED)
def test_gradients_that_traced_code_takes_follow_sizes(name):
    fn = FOLLOWED[name]

    def slope(x):
        x = (x * 1).detach().requires_grad_()
        return gw.autograd.grad(fn(x).sum(), x)[0]

    if name in ("diagonal", "strided convolution"):  # a step or a rest that depends on the size
        with pytest.raises(TraceError, match="as a Python number"):
            gw.trace(slope, np.zeros(SHAPES[0], "f4"), sizes={"x": NAMES})
        return
    p = gw.trace(slope, np.zeros(SHAPES[0], "f4"), sizes={"x": NAMES})
    for shape in SHAPES[1:4]:
        x = RNG.normal(size=shape).astype("f4")
        leaf = gw.tensor(x, requires_grad=True)
        fn(leaf).sum().backward()
        for found in (p.run(x=x), p.compile(x=shape)(x=x)):
            np.testing.assert_allclose(found["out"].to_numpy(), grad_of(leaf).numpy(), rtol=1e-3, atol=1e-4)


TAKEN = "takes the named size T as a Python number"
REFUSED = {
    "a loop": (lambda x: sum((x[:, i] for i in range(x.shape[1])), x[:, 0]), TAKEN),
    "len": (lambda x: x / len(x), r"len\(\) needs a Python number.*named size B"),
    "float": (lambda x: x * float(x.shape[1]), TAKEN),
    "int": (lambda x: x if int(x.shape[1]) < 9 else -x, TAKEN),
    "a key": (lambda x: {5: x}.get(x.shape[1], -x), TAKEN),
    "numpy": (lambda x: x * gw.tensor(np.minimum(np.arange(x.shape[1]), 20))[:, None], "as a Python number"),
    "numpy ones": (lambda x: x * gw.tensor(np.ones((x.shape[1], 1), "f4")), TAKEN),
    "a logarithm": (lambda x: x * np.log(x.shape[1]), TAKEN),
    "a branch": (lambda x: x.exp() if x.shape[1] > 40 else x.tanh(), r"where T = 41 .*compares T with 40"),
    "a branch at one": (lambda x: x * 2 if x.shape[0] == 1 else x, r"where B = 1 .*compares B with 1"),
    "an even size": (lambda x: x if x.shape[1] % 2 else x * 2, r"where T = "),
    "two sizes": (lambda x: x if x.shape[0] < x.shape[1] else -x, r"where [BT] = "),
    "nested branches": (lambda x: x if x.shape[1] < 50 else (x if x.shape[1] < 70 else -x), "where T = 70 "),
    "branches together": (lambda x: -x if (x.shape[1] > 40) + (x.shape[0] > 3) == 2 else x, r"where B = 4, T = 41 "),
    "branches within": (lambda x: x if x.shape[0] < 4 or x.shape[1] < 41 else -x, r"where B = 4, T = 41 "),
    "a product": (lambda x: x if x.shape[0] * x.shape[1] != 35 else -x, r"compares B\*T with 35"),
    "a larger product": (lambda x: x if x.shape[0] * x.shape[1] != 1000 else -x, r"compares B\*T with 1000"),
    "a square": (lambda x: x if x.shape[1] ** 2 != 90000 else -x, r"where T = 300 "),
    "an equation": (lambda x: x if x.shape[1] ** 2 != 2 else -x, "for which sizes they are equal is not known"),
    "a large size": (lambda x: x if x.shape[1] != 12345 else -x, r"where T = 12345 "),
    "a minimum": (lambda x: x[:, : min(x.shape[1], 9)], r"compares T with 9"),
    "a maximum": (lambda x: x * max(x.shape[1], 30), r"compares T with 30"),
    "a crop": (lambda x: x[:, :8], r"compares T with 8"),
    "the last few": (lambda x: x[:, -8:], r"compares T with 8"),
    "squeeze": (lambda x: x.squeeze(0), r"where B = 1 "),
    "a list of sizes": (lambda x: x * gw.tensor([x.shape[1], 1, 1, 1]), "numbers that depend on named sizes"),
    "rounded": (lambda x: x * round(x.shape[1] / 2), "as a Python number"),
    "an exponent": (lambda x: x * 2 ** x.shape[1], "takes the named size T as a Python number"),
    "random numbers": (lambda x: x + gw.rand(x.shape[0], 1, 1), "takes the named size B as a Python number"),
    "a split": (lambda x: x.split(2, 1)[0], TAKEN),
    "a fixed shape": (lambda x: x.reshape(3, 4, WIDTH), "different numbers of elements"),
    "another size": (lambda x: x.reshape(x.shape[1], x.shape[0] + 4, WIDTH), "different numbers of elements"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_holds_for_some_sizes_only_is_refused(name):
    fn, text = REFUSED[name]
    with pytest.raises(gw.GraphwrightError, match=f"(?s){text}") as caught:
        gw.trace(fn, np.ones(SHAPES[0], "f4"), sizes={"x": NAMES})
    assert caught.value.where or caught.value.fix


def test_a_loop_of_a_layer_over_a_named_size_is_refused():
    with pytest.raises(TraceError, match=TAKEN):
        gw.trace(nn.LSTM(3, 4, batch_first=True), np.zeros((2, 6, 3), "f4"), sizes={"x": ("B", "T", 3)})


def test_a_refusal_names_the_line_and_the_way_out():
    def forward(x):
        return x if x.shape[1] < 50 else -x

    with pytest.raises(TraceError) as caught:
        gw.trace(forward, np.ones(SHAPES[0], "f4"), sizes={"x": NAMES})
    line = forward.__code__.co_firstlineno + 1
    assert f"test_named_sizes.py:{line} compares T with 50" in str(caught.value)
    assert caught.value.fix == "replace the branch by tensor operations that hold for every size, or leave T fixed"


def test_constants_without_bytes_are_equal_if_they_are_the_same_array():
    one, other = (gw.Tensor(abstract_array((WIDTH,), gw.float32)) for _ in range(2))
    table = [one]
    p = gw.trace(lambda x: x + (one if x.shape[1] < 50 else table[0]), np.ones(SHAPES[0], "f4"), sizes={"x": NAMES})
    assert p.spec("x").shape == NAMES
    with pytest.raises(TraceError, match="compares T with 50"):
        gw.trace(lambda x: x + one if x.shape[1] < 50 else x + other, np.ones(SHAPES[0], "f4"), sizes={"x": NAMES})


def test_sizes_that_the_code_refuses_need_no_program():
    """As nanoGPT: an assertion about the length limits the sizes, and does not make the trace invalid."""
    table = nn.Embedding(12, WIDTH)

    def forward(x):
        assert x.shape[1] <= 12, "too long"
        return x + table(gw.arange(x.shape[1]))

    for length in (6, 12):
        p = gw.trace(forward, np.zeros((2, length, WIDTH), "f4"), sizes={"x": NAMES})
        x = RNG.normal(size=(3, 11, WIDTH)).astype("f4")
        np.testing.assert_array_equal(p.run(x=x)["out"].to_numpy(), forward(gw.tensor(x)).numpy())
        with pytest.raises(gw.GraphwrightError, match="index"):
            p.run(x=np.zeros((1, 13, WIDTH), "f4"))


def test_a_size_that_decides_nothing_costs_one_trace():
    calls = []

    def forward(x):
        calls.append(x.shape)
        return x.reshape(x.shape[0] * x.shape[1], WIDTH) / x.shape[0]

    gw.trace(forward, np.zeros(SHAPES[0], "f4"), sizes={"x": NAMES})
    assert len(calls) == 1


def test_a_size_that_is_minus_one_for_short_inputs_is_no_placeholder():
    p = gw.trace(lambda x: x[:-5].reshape(x.shape[0] - 5, 3), np.ones((6, 3), "f4"), sizes={"x": ("T", 3)})
    assert p.run(x=np.ones((9, 3), "f4"))["out"].shape == (4, 3)
    with pytest.raises(ShapeError, match="T-5 is negative"):
        p.run(x=np.ones((4, 3), "f4"))


@pytest.mark.parametrize(("fn", "short"), [
    (lambda x: x[2] + x[-1], 2), (lambda x: x[:, 1:][3:], 2), (lambda x: x[-3:], 2), (lambda x: x[2:4], 3),
    (lambda x: F.avg_pool1d(x.T, 3), 2), (lambda x: F.conv1d(x.T[None], gw.ones(1, 3, 4)), 3),
])  # fmt: skip
def test_an_entry_that_a_shorter_input_lacks_is_an_error_of_the_run(fn, short):
    p = gw.trace(fn, np.ones((6, 3), "f4"), sizes={"x": ("T", 3)})
    x = RNG.normal(size=(9, 3)).astype("f4")
    for found in (p.run(x=x), p.compile(x=x.shape)(x=x)):
        np.testing.assert_allclose(found["out"].to_numpy(), fn(gw.tensor(x)).numpy(), rtol=1e-5)
    for run in (p.run, lambda x: p.compile(x=x.shape)(x=x)):
        with pytest.raises(ShapeError, match=r"slice|negative|window|pool"):
            run(x=x[:short])


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
    for sizes in ({"y": ("B", 3)}, {"x": ("B",)}, {"x": ("B", 4)}, {"x": ("B", "B")}, {"x": ("B*T", 3)}):
        with pytest.raises(UsageError):
            gw.trace(lambda x: -x, x, sizes=sizes)
    assert gw.trace(lambda x: x @ x.T, x, sizes={"x": ("B", None)}).spec("x").shape == ("B", 3)


def test_units_are_cut_and_grown_across_joined_sizes():
    """The channels that follow the rows of view(B * T, C) are one axis with those before."""

    def forward(m, x):
        h = m.up(x).tanh()
        h = gw.cat([h, h[:, :1]], 1)[:, 1:]
        return m.down(h.reshape(x.shape[0] * x.shape[1], -1)).view(x.shape[0], -1, 3)

    p = gw.trace(
        With(forward, up=nn.Linear(WIDTH, 6), down=nn.Linear(6, 3)), np.zeros(SHAPES[0], "f4"), sizes={"x": NAMES}
    )
    inputs = [RNG.normal(size=shape).astype("f4") for shape in SHAPES]
    whole = [p.run(x=x)["out"].to_numpy() for x in inputs]
    with p.edit("wider") as e:
        e.grow("up.neurons", 3)
    for x, wanted in zip(inputs, whole, strict=True):
        np.testing.assert_allclose(p.run(x=x)["out"].to_numpy(), wanted, atol=1e-5)
    p.undo()
    with p.edit("without two units") as e:
        e.set_weight("down.weight", lambda w: np.asarray(w) * np.array([1, 0, 1, 1, 0, 1], "f4"))
    zeroed = [p.run(x=x)["out"].to_numpy() for x in inputs]
    p.undo()
    with p.edit("cut two units") as e:
        e.cut_units(p.axes()["up.neurons"].units([1, 4]))
    assert p.weights["down.weight"].shape == (3, 4)
    for x, wanted in zip(inputs, zeroed, strict=True):
        np.testing.assert_allclose(p.compile(x=x.shape)(x=x)["out"].to_numpy(), wanted, atol=1e-5)


def test_a_program_with_named_sizes_runs_in_a_trace_with_other_names():
    inner = gw.trace(lambda x: x.flatten(0, 1) / x.shape[1], np.zeros(SHAPES[0], "f4"), sizes={"x": ("N", "L", WIDTH)})
    p = gw.trace(lambda x: inner(x=x)["out"], np.zeros(SHAPES[0], "f4"), sizes={"x": NAMES})
    assert p.spec(p.output("out")).shape == ("B*T", WIDTH)
    for shape in SHAPES:
        x = RNG.normal(size=shape).astype("f4")
        np.testing.assert_allclose(p.run(x=x)["out"].to_numpy(), x.reshape(-1, WIDTH) / shape[1], rtol=1e-6)


# -- training ----------------------------------------------------------------------------------------------------------
class Language(nn.Module):
    """A small language model with learned positions and rotary attention."""

    def __init__(self) -> None:
        gw.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(5, 8), nn.Embedding(16, 8)
        feed_forward = nn.SwiGLU(8, 12)
        self.block = nn.TransformerBlock(nn.MultiHeadAttention(8, 2), feed_forward, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(gw.arange(ids.shape[1]))
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits.view(-1, 5), targets.view(-1))


LENGTHS = [(2, 6), (3, 4), (1, 1), (4, 9), (2, 6)]


def batches():
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 5, shape), rng.integers(0, 5, shape)) for shape in LENGTHS]


def eager_training(net, optimizer):
    for ids, targets in batches():
        optimizer.zero_grad()
        loss = net(gw.tensor(ids), gw.tensor(targets))
        loss.backward()
        optimizer.step()
        yield loss.item()


def same_weights(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        np.testing.assert_allclose(p.numpy(), q.numpy(), rtol=1e-4, atol=1e-5)


def test_a_compiled_training_step_with_named_sizes_equals_the_eager_one():
    net, twin = Language(), Language()
    same_weights(net, twin)
    optimizer = gw.optim.AdamW(list(net.parameters()), lr=0.01)

    def step(ids, targets):
        optimizer.zero_grad()
        loss = net(ids, targets)
        loss.backward()
        optimizer.step()
        return loss

    compiled = gw.compile(step, sizes={"ids": ("B", "T"), "targets": ("B", "T")})
    losses = [compiled(*batch).item() for batch in batches()]
    np.testing.assert_allclose(losses, [*eager_training(twin, gw.optim.AdamW(list(twin.parameters()), lr=0.01))],
                               rtol=1e-5)  # fmt: skip
    same_weights(net, twin)
    assert compiled.traces == 1


def test_a_traced_program_trains_at_every_size():
    net, twin = Language(), Language()
    ids = np.zeros((2, 5), np.int64)
    p = gw.trace(net, ids, ids, sizes={"ids": ("B", "T"), "targets": ("B", "T")})
    optimizer, losses = gw.optim.AdamW(p, lr=0.01), []
    for ids, targets in batches():
        step = gw.optim.compile_step(p, "out", optimizer, {"ids": ids, "targets": targets})
        losses.append(step(ids=ids, targets=targets).item())
    np.testing.assert_allclose(losses, [*eager_training(twin, gw.optim.AdamW(list(twin.parameters()), lr=0.01))],
                               rtol=1e-5)  # fmt: skip
    same_weights(net, twin)


def test_batch_statistics_count_the_rows_of_the_run():
    net, twin = (nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH)) for _ in range(2))
    p = gw.trace(net, np.zeros(SHAPES[0], "f4"), sizes={"x": NAMES})
    for shape in (s for s in SHAPES if s[0] * s[1] > 1):
        x = RNG.normal(size=shape).astype("f4")
        np.testing.assert_allclose(p.run(x=x)["out"].to_numpy(), twin(gw.tensor(x)).numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(net[1].running_var.numpy(), twin[1].running_var.numpy(), rtol=1e-5)
        still = p.eval().run(x=x)["out"].to_numpy()
        np.testing.assert_allclose(still, twin.eval()(gw.tensor(x)).numpy(), rtol=1e-4, atol=1e-5)
        twin.train()


# -- random code -------------------------------------------------------------------------------------------------------
PIECES = {  # [B, T, C] -> [B, T, C] for every size
    "rows": lambda x: x.reshape(x.shape[0] * x.shape[1], -1).tanh().reshape(*x.shape),
    "flat": lambda x: x.flatten(0, 1).softmax(-1).unflatten(0, (-1, x.shape[1])),
    "turned": lambda x: x.transpose(0, 1).reshape(-1, x.shape[2]).view(x.shape[1], x.shape[0], -1).transpose(0, 1),
    "centred": lambda x: x - x.mean((0, 1)) + x.sum(1, keepdim=True) / x.shape[1],
    "scaled": lambda x: x * (3 / (x.shape[0] + x.shape[1])) + x.numel() / x.shape[0] ** 2 * 0.01,
    "masked": lambda x: (scores(x) * gw.tril(gw.ones(x.shape[1], x.shape[1]))).tanh() @ x,
    "numbered": lambda x: x + gw.arange(x.shape[1]).unsqueeze(1) / x.shape[1],
    "shifted": lambda x: gw.cat([x[:, -1:], x[:, : x.shape[1] - 1]], 1),
    "padded": lambda x: F.pad(x, (0, 0, 1, 1))[:, 1:-1] + F.pad(x, (0, 0, 2, 0))[:, :-2],
    "doubled": lambda x: gw.cat([x, -x], 1)[:, x.shape[1] :] + x.repeat(1, 3, 1)[:, x.shape[1] : 2 * x.shape[1]],
    "pooled": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2) + x.amax(1, keepdim=True),
    "halves": lambda x: gw.cat([x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1),
    "alternating": lambda x: gw.stack([x, x * 2], 2).flatten(1, 2)[:, ::2],
    "batch shift": lambda x: gw.cat([x[1:], x[:1]], 0) * 0.5,
}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
       end=st.sampled_from(["mean", "loss", "none"]), first=st.tuples(st.integers(1, 5), st.integers(1, 5)),
       others=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=2, max_size=2))  # fmt: skip
def test_random_code_follows_its_sizes(names, end, first, others):
    def forward(x):
        for name in names:
            x = PIECES[name](x)
        if end == "loss":
            return F.cross_entropy(x.reshape(-1, WIDTH), x.detach().argmin(-1).reshape(-1))
        return x.mean() if end == "mean" else x

    p = gw.trace(forward, np.zeros((*first, WIDTH), "f8"), sizes={"x": NAMES})
    for shape in ((*size, WIDTH) for size in [(1, 1), *others]):
        x = RNG.normal(size=shape)
        leaf = gw.tensor(x, requires_grad=True)
        wanted = forward(leaf)
        wanted.sum().backward()
        for found in (p.run(x=x), p.compile(x=shape)(x=x)):
            np.testing.assert_allclose(found["out"].to_numpy(), wanted.numpy(), rtol=1e-6, atol=1e-9)
        slope = p.grad("out", ["x"], {"B": shape[0], "T": shape[1]}).run(x=x)["grad.x"].to_numpy()
        np.testing.assert_allclose(slope, grad_of(leaf).numpy(), rtol=1e-6, atol=1e-9)
