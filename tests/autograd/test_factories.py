"""Factories: each against torch, on other devices, and into given memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.array import DTYPES, Device, DeviceMismatch
from graphwright.array import empty as empty_array
from graphwright.array.storage import poison
from graphwright.errors import DTypeError, OutOfMemory, ShapeError, UsageError
from graphwright.testing.oracle import poisoned
from values import array_of

x, y = gw.tensor(np.arange(6.0).reshape(2, 3)), torch.arange(6.0).reshape(2, 3)
ids, torch_ids = gw.tensor([0, 2, 1]), torch.tensor([0, 2, 1])
half = gw.full((2, 3), 0.5)

EXACT: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = {
    "zeros": (lambda **o: gw.zeros(2, 3, **o), lambda: torch.zeros(2, 3)),
    "ones": (lambda **o: gw.ones(2, 3, **o), lambda: torch.ones(2, 3)),
    "full": (lambda **o: gw.full((2, 3), 2.5, **o), lambda: torch.full((2, 3), 2.5)),
    "full of an int": (lambda **o: gw.full((2, 3), 7, **o), lambda: torch.full((2, 3), 7)),
    "full of a bool": (lambda **o: gw.full((2, 3), True, **o), lambda: torch.full((2, 3), True)),
    "eye": (lambda **o: gw.eye(2, 3, **o), lambda: torch.eye(2, 3)),
    "arange of ints": (lambda **o: gw.arange(1, 9, 3, **o), lambda: torch.arange(1, 9, 3)),
    "arange of floats": (lambda **o: gw.arange(0.5, 3.0, 0.5, **o), lambda: torch.arange(0.5, 3.0, 0.5)),
    "linspace": (lambda **o: gw.linspace(0, 3, 4, **o), lambda: torch.linspace(0, 3, 4)),
    "zeros_like": (lambda **o: gw.zeros_like(x, **o), lambda: torch.zeros_like(y)),
    "ones_like": (lambda **o: gw.ones_like(x, **o), lambda: torch.ones_like(y)),
    "full_like": (lambda **o: gw.full_like(x, 2.5, **o), lambda: torch.full_like(y, 2.5)),
}
PICKED: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = {
    "one_hot": (lambda **o: gw.one_hot(ids, 4, **o), lambda: torch.nn.functional.one_hot(torch_ids, 4)),
    "tril": (lambda **o: gw.tril(x, 1, **o), lambda: torch.tril(y, 1)),
    "triu": (lambda **o: gw.triu(x, -1, **o), lambda: torch.triu(y, -1)),
}
NOISE: dict[str, Callable[..., Any]] = {
    "rand": lambda **o: gw.rand(2, 3, **o),
    "randn": lambda **o: gw.randn(2, 3, **o),
    "gumbel": lambda **o: gw.gumbel(2, 3, **o),
    "randint": lambda **o: gw.randint(-3, 9, (2, 3), **o),
    "rand_like": lambda **o: gw.rand_like(x, **o),
    "randn_like": lambda **o: gw.randn_like(x, **o),
    "randint_like": lambda **o: gw.randint_like(x, -3, 9, **o),
    "bernoulli": lambda **o: gw.bernoulli(half, **o),
}
PLACED = [name for name in (*EXACT, *NOISE) if name != "bernoulli"]


def factory(name: str) -> Callable[..., Any]:
    return {**{k: v[0] for k, v in {**EXACT, **PICKED}.items()}, **NOISE}[name]


@pytest.fixture(autouse=True)
def seeded():
    with gw.fork_rng(5):
        yield


@pytest.mark.parametrize("name", [*EXACT, *PICKED])
def test_factories_match_torch(name: str) -> None:
    ours, theirs = factory(name)(), {**EXACT, **PICKED}[name][1]()
    kind = "float64" if name.endswith("_like") or name.startswith("tri") else str(theirs.dtype).removeprefix("torch.")
    assert ours.dtype.name == kind
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("name", EXACT)
def test_factories_take_a_dtype(name: str, kind: str) -> None:
    ours, theirs = factory(name)(dtype=kind), EXACT[name][1]().to(getattr(torch, kind))
    assert ours.dtype.name == kind
    np.testing.assert_array_equal(ours.to("float64").numpy(), theirs.double().numpy())


@pytest.mark.parametrize("name", PLACED)
def test_factories_take_a_device(name: str) -> None:
    with gw.fork_rng(5):
        here = factory(name)()
    with gw.fork_rng(5):
        there = factory(name)(device="sim")
    assert there.device == Device("sim")
    np.testing.assert_array_equal(there.numpy(), here.numpy())
    specs = factory(name)(device="meta")
    assert (specs.device, specs.spec) == (Device("meta"), here.spec)


def test_like_factories_use_the_device_of_the_tensor() -> None:
    far = x.to("sim")
    for made in (gw.zeros_like(far), gw.empty_like(far), gw.rand_like(far), gw.randint_like(far, 0, 3)):
        assert (made.device, made.spec) == (far.device, far.spec)
    assert gw.ones_like(far, device="cpu", dtype="int32").device == Device("cpu")


def test_noise_is_sampled_on_the_device_of_the_tensor() -> None:
    for draw in (
        gw.bernoulli,
        lambda p: gw.dropout(p, 0.5),
        lambda p: gw.multinomial(p, 2),
    ):
        with gw.fork_rng(5):
            here = draw(half)
        with gw.fork_rng(5):
            there = draw(half.to("sim"))
        assert there.device == Device("sim")
        np.testing.assert_array_equal(there.numpy(), here.numpy())


@pytest.mark.parametrize("name", [*EXACT, *PICKED, *NOISE])
def test_out_is_returned_and_fully_written(name: str) -> None:
    with gw.fork_rng(5):
        fresh = factory(name)()
    out = gw.Tensor(poisoned(empty_array(fresh.shape, fresh.dtype)))
    array = array_of(out)
    with gw.fork_rng(5):
        result = factory(name)(out=out)
    assert result is out
    assert array_of(out) is array
    np.testing.assert_array_equal(out.numpy(), fresh.numpy())


@pytest.mark.parametrize("name", [*EXACT, *PICKED, *NOISE])
def test_out_of_another_shape_is_refused_and_unchanged(name: str) -> None:
    out = gw.full((7, 7), 4.0, factory(name)().dtype)
    with pytest.raises(ShapeError, match="out does not match"):
        factory(name)(out=out)
    assert out.numpy().astype(bool).all()


@pytest.mark.parametrize("name", PLACED)
def test_dtype_and_device_default_to_those_of_out(name: str) -> None:
    kind = "float64" if name not in ("rand", "randn", "gumbel") else "float16"
    out = gw.zeros(*factory(name)().shape, dtype=kind, device="sim")
    assert factory(name)(out=out) is out
    assert out.dtype.name == kind
    with pytest.raises(ShapeError, match="out does not match"):
        factory(name)(out=out, dtype="float32")
    with pytest.raises(DeviceMismatch, match="requested device"):
        factory(name)(out=out, device="cpu")


@pytest.mark.parametrize("name", [n for n in PLACED if "rand" not in n or n in ("rand", "randn")])
def test_factories_take_requires_grad(name: str) -> None:
    made = factory(name)(dtype="float32", requires_grad=True)
    (made * 2).sum().backward()
    assert made.is_leaf
    assert (made.grad.numpy() == 2).all()


def test_requires_grad_needs_a_floating_dtype() -> None:
    with pytest.raises(DTypeError):
        gw.full((2,), 1, requires_grad=True)


@pytest.mark.parametrize("kind", DTYPES)
def test_empty_is_nan_under_poison(kind: str) -> None:
    with poison():
        for made in (
            gw.empty(3, 5, dtype=kind),
            gw.empty_like(gw.empty(4, dtype=kind)),
            gw.empty(2, dtype=kind, device="sim"),
        ):
            values = made.to("cpu").numpy("float32")
            assert np.isnan(values).all() if made.dtype.is_float or kind.startswith("float8") else values.all()
    with pytest.raises(KeyError), poison():
        raise KeyError
    assert not gw.zeros(3).numpy().any()


def test_poison_changes_no_result() -> None:
    net = nn.Sequential(nn.Linear(3, 4, seed=0), nn.Tanh(), nn.Linear(4, 2, seed=1))
    before = net(x.float()).numpy()
    with poison():
        np.testing.assert_array_equal(net(x.float()).numpy(), before)


def test_a_factory_in_a_trace_writes_to_a_traced_out() -> None:
    def step(a: Any) -> Any:
        b = a * 2
        gw.ones(3, out=b)
        return a + b

    given = gw.tensor([1.0, 2.0, 3.0])
    program = gw.trace(step, given)
    assert program(a=given)["out"].numpy().tolist() == [2, 3, 4]


def test_sizes_may_be_separate_or_a_tuple() -> None:
    for make in (gw.zeros, gw.ones, gw.empty, gw.rand, gw.randn, gw.autograd.gumbel):
        assert make(2, 3).shape == make((2, 3)).shape == make([2, 3]).shape == (2, 3)
        assert make().shape == make(()).shape == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: gw.zeros(-1),
        lambda: gw.ones(2.5),  # pyright: ignore[reportArgumentType]
        lambda: gw.full((2, -3), 1.0),
        lambda: gw.empty(3, "a"),  # pyright: ignore[reportArgumentType]
        lambda: gw.rand(-2),
        lambda: gw.randint(0, 2, (-1,)),
        lambda: gw.eye(-1),
        lambda: gw.eye(2, -1),
        lambda: gw.zeros((1, (2, 3))),  # pyright: ignore[reportArgumentType]
        lambda: gw.linspace(0, 1, 2.5),  # pyright: ignore[reportArgumentType]
    ],
)
def test_invalid_sizes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(gw.GraphwrightError):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: gw.zeros(1 << 62, 4),
        lambda: gw.zeros(1 << 63),
        lambda: gw.empty(1 << 45),
        lambda: gw.eye(1 << 30),
        lambda: gw.arange(10**18),
        lambda: gw.arange(10**30),
        lambda: gw.linspace(0, 1, 1 << 50),
        lambda: gw.ones(1).repeat(1 << 62),
        lambda: gw.zeros(2)[:, None].expand(2, 1 << 45) + 1,
        lambda: gw.zeros(2)[:, None].expand(2, 1 << 62).sum(),
        lambda: gw.rand(1 << 45),
    ],
)
def test_a_tensor_too_large_for_memory_raises(make: Callable[[], object]) -> None:
    with pytest.raises(OutOfMemory):
        make()


@pytest.mark.parametrize("stop", [float("inf"), float("nan")])
def test_arange_without_an_end_is_refused(stop: float) -> None:
    with pytest.raises(UsageError, match="arange"):
        gw.arange(0, stop)


@pytest.mark.parametrize(("value", "dtype"), [(300, "uint8"), (-1, "uint8"), (1 << 70, "int64")])
def test_a_value_outside_the_range_of_its_dtype_is_refused(value: int, dtype: str) -> None:
    with pytest.raises(DTypeError, match="cannot store"):
        gw.full((2,), value, dtype)
