"""The Backend protocol is enough: with one of numpy a network and a transformer train, and nothing above it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn, optim
from graphwright.array import CPU, Device, DType, MissingKernel, NDArray, Spec, Storage
from graphwright.array import backend as backend_of
from graphwright.array.backend import Attrs, Call, Needs, use
from graphwright.autograd import Tensor, support, tensor
from graphwright.autograd.apply import scalar
from graphwright.autograd.random import rng
from graphwright.ops import OPS, call

Arrays = Sequence[np.ndarray]
Bind = Callable[[Arrays, Arrays, Attrs], Call]
KERNELS: dict[str, Bind] = {}

for _name, _ufunc in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "eq": np.equal,
    "le": np.less_equal,
}.items():
    KERNELS[_name] = lambda outs, ins, attrs, f=_ufunc: partial(f, *ins, out=outs[0])


def kernel(name: str) -> Callable[[Bind], Bind]:
    def enter(bind: Bind) -> Bind:
        KERNELS[name] = bind
        return bind

    return enter


@kernel("cast")
@kernel("copy")
def copy(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return partial(np.copyto, outs[0], ins[0], casting="unsafe")


@kernel("full_like")
def full_like(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return partial(outs[0].fill, attrs["value"])


@kernel("sigmoid")
def sigmoid(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    def run() -> None:
        small = np.exp(-np.abs(ins[0]))
        outs[0][...] = np.where(ins[0] >= 0, 1, small) / (1 + small)

    return run


@kernel("rsqrt")
def rsqrt(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return lambda: np.divide(1, np.sqrt(ins[0]), out=outs[0])


@kernel("pad_slice")
def pad_slice(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    axis, start, step = attrs["axis"] % ins[0].ndim, attrs["start"], attrs["step"]
    index = (slice(None),) * axis + (slice(start, start + step * ins[0].shape[axis], step),)

    def run() -> None:
        outs[0].fill(0)
        outs[0][index] = ins[0]

    return run


@kernel("where")
def where(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return lambda: np.copyto(outs[0], np.where(*ins))


@kernel("sum")
def sum_(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return partial(np.sum, ins[0], axis=attrs["axes"], keepdims=attrs["keepdims"], out=outs[0])


@kernel("mean")
def mean(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return partial(np.mean, ins[0], axis=attrs["axes"], keepdims=attrs["keepdims"], out=outs[0])


@kernel("amax")
def amax(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return partial(np.amax, ins[0], axis=attrs["axes"], keepdims=attrs["keepdims"], out=outs[0])


@kernel("matmul")
def matmul(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return lambda: np.copyto(outs[0], np.matmul(*ins))


@kernel("linear")
def linear(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    x, w, *b = ins
    return lambda: np.copyto(outs[0], x @ w.T + (b[0] if b else 0))


@kernel("embedding")
def embedding(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    return lambda: np.copyto(outs[0], ins[0][ins[1]])


@kernel("embedding_backward")
def embedding_backward(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    def run() -> None:
        outs[0].fill(0)
        np.add.at(outs[0], ins[1], ins[0])

    return run


def _probabilities(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _target(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.eye(scores.shape[-1], dtype=scores.dtype)[targets]


@kernel("cross_entropy")
def cross_entropy(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    def run() -> None:
        top = ins[0].max(-1)
        outs[1][...] = np.log(np.exp(ins[0] - top[..., None]).sum(-1)) + top
        outs[0][...] = outs[1] - (ins[0] * _target(ins[0], ins[1])).sum(-1)

    return run


@kernel("cross_entropy_backward")
def cross_entropy_backward(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    scores, targets, *_, g = ins
    return lambda: np.copyto(outs[0], g[..., None] * (_probabilities(scores) - _target(scores, targets)))


@kernel("adamw_step")
def adamw_step(outs: Arrays, ins: Arrays, attrs: Attrs) -> Call:
    (lr, found), b1, b2, n = ins[:2], attrs["beta1"], attrs["beta2"], len(outs) // 4

    def run() -> None:
        if found != 0:
            return
        for i in range(n):
            g, param, m, v, step = ins[2 + i :: n]
            new, first, second, count = outs[i::n]
            first[...], second[...], count[...] = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, step + 1
            size = first / (1 - b1**count) / (np.sqrt(second / (1 - b2**count)) + attrs["eps"])
            new[...] = param * (1 - lr * attrs["weight_decay"]) - lr * size

    return run


class NumpyBackend:
    """numpy for everything."""

    device = CPU
    fuses = False
    driver = None
    stream = 0

    def allocate(self, nbytes: int) -> Storage:
        return Storage(np.zeros(nbytes, np.uint8), nbytes, CPU, kind="owned")

    def empty(self, shape: tuple[int, ...], dtype: DType) -> NDArray:
        return NDArray(self.allocate(prod(shape) * dtype.itemsize), dtype, shape)

    def wrap(self, array: NDArray) -> np.ndarray:
        flat = np.frombuffer(array.storage.memory, np.uint8)
        flat = flat[: len(flat) // array.dtype.itemsize * array.dtype.itemsize].view(array.dtype.numpy)
        strides = [s * array.dtype.itemsize for s in array.strides]
        return np.lib.stride_tricks.as_strided(flat[array.offset :], array.shape, strides)

    def copy(self, target: NDArray, source: NDArray) -> None:
        np.copyto(target.impl, source.impl, casting="unsafe")

    def to_host(self, array: NDArray) -> np.ndarray:
        return array.impl

    def adopt(self, other: Any) -> NDArray:
        return gw.array.from_numpy(np.from_dlpack(other))

    def address(self, array: NDArray) -> int:
        return array.impl.ctypes.data

    def workspace(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        return []

    def needs(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
        return Needs()

    def bind(
        self, name: str, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray] = ()
    ) -> list[Call]:
        if name not in KERNELS or any(a.dtype.as_bits for a in (*outs, *ins)):
            raise MissingKernel("numpy has no kernel of this name", where=name)
        return [np.errstate(all="ignore")(KERNELS[name]([o.impl for o in outs], [i.impl for i in ins], attrs))]

    def bind_fused(self, kernel: Any, memory: Sequence[NDArray], written: Sequence[bool]) -> list[Call]:
        raise MissingKernel("numpy has no generated kernels")

    def fresh(self, name: str, ins: Sequence[NDArray], attrs: Attrs) -> None:
        return None

    def has_kernel(self, name: str) -> bool:
        return name in KERNELS

    def kernels(self) -> frozenset[str]:
        return frozenset(KERNELS)


@pytest.fixture
def on_numpy() -> Iterator[None]:
    """Everything inside runs on numpy; arrays made before keep handles of the other backend, and are forgotten."""
    torchs = backend_of(CPU)
    for backend in (NumpyBackend(), torchs):
        scalar.cache_clear()
        use(CPU, backend)
        rng._key.data = gw.array.from_numpy(np.zeros(2, np.int64))
        if backend is not torchs:
            yield


# -- what is trained ---------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """One layer of a transformer: causal attention with two heads, then a gated network."""

    def __init__(self, dim: int, length: int) -> None:
        self.norms = [nn.RMSNorm(dim), nn.RMSNorm(dim)]
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.gate = nn.Linear(dim, 2 * dim, name="up"), nn.Linear(dim, 2 * dim, name="gate")
        self.down = nn.Linear(2 * dim, dim)
        self.mask = tensor(np.tril(np.ones((length, length), bool)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norms[0](x)).reshape(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        scores = (q @ k.transpose(-1, -2)) * (d // 2) ** -0.5
        weights = call("where", self.mask, scores, -1e9).softmax()
        x = x + self.out((weights @ v).permute(0, 2, 1, 3).reshape(b, t, d))
        h = self.norms[1](x)
        return x + self.down(call("silu", self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Two blocks over 11 symbols."""

    def __init__(self) -> None:
        self.table = nn.Embedding(11, 16)
        self.blocks = [Block(16, 8), Block(16, 8)]
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Task = tuple[nn.Module, np.ndarray, np.ndarray]


def mlp() -> Task:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("f4")
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)), x, x[:, :3].argmax(1)


def transformer() -> Task:
    ids = (np.arange(9) + np.random.default_rng(0).integers(0, 11, (16, 1))) % 11  # counts up from any symbol
    return Transformer(), ids[:, :-1], ids[:, 1:]


def train(
    make: Callable[[], tuple[nn.Module, np.ndarray, np.ndarray]], steps: int, *, planned: bool = False
) -> list[float]:
    gw.manual_seed(0)
    model, x, y = make()
    optimizer = optim.AdamW(model, lr=0.02)

    def step(x: Any, y: Any) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(gw.autograd.as_tensor(x)), gw.autograd.as_tensor(y), dim=-1)
        loss.backward()
        optimizer.step()
        return loss

    run = gw.compile(step, executor="aten") if planned else step
    return [run(x, y).item() for _ in range(steps)]


@pytest.mark.parametrize(("make", "steps"), [(mlp, 30), (transformer, 20)])
def test_training_on_numpy_matches_training_on_torch(make: Any, steps: int, request: pytest.FixtureRequest) -> None:
    theirs = train(make, steps)
    request.getfixturevalue("on_numpy")
    ours = train(make, steps)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert ours[-1] < ours[0] / 2


def test_a_plan_runs_on_numpy(on_numpy: None) -> None:
    np.testing.assert_allclose(train(mlp, 5, planned=True), train(mlp, 5), rtol=1e-6)


def test_support_reports_how_each_op_runs(on_numpy: None) -> None:
    table = support()
    assert set(table) == set(OPS)
    assert table["add"]["float32"] == table["linear"]["float64"] == "native"
    assert table["silu"]["float32"] == table["rms_norm"]["float32"] == "expanded"
    assert table["conv"]["float32"] == table["sort"]["float32"] == "missing"
    assert table["reshape"]["int8"] == "view"
    assert table["tanh"]["int64"] == "refused"
    with pytest.raises(MissingKernel):
        call("sort", tensor([1.0, 2.0]))
    values = tensor([[-1.0, 0.5, 2.0]])
    np.testing.assert_allclose(values.softmax().numpy(), _probabilities(values.numpy()), rtol=1e-6)


def test_support_is_equal_on_the_cpu_and_the_simulated_device() -> None:
    cpu, sim = support("cpu"), support(Device("sim"))
    assert cpu == sim
    assert all(how != "missing" for op in cpu.values() for kind, how in op.items() if kind in ("float32", "float64"))
    assert {how for op in support("meta").values() for how in op.values()} <= {"native", "view", "refused"}
