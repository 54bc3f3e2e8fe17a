"""Methods of a tensor against those of torch and numpy, and the values that they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.array import bfloat16, float32, int64
from graphwright.autograd import Tensor, arange, full, grad, no_grad, ones, tensor, zeros
from graphwright.errors import DTypeError, ShapeError, UsageError
from values import array_of, grad_of

SHAPE = (3, 4, 5)


def pair(shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, torch.Tensor]:
    values = np.random.default_rng(0).uniform(0.2, 2, shape)
    return tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)


def assert_like_torch(fn: Callable[[Any], Any], shape: tuple[int, ...] = SHAPE) -> None:
    """The same values and, where there is one, the same gradient."""
    ours, theirs = pair(shape)
    a, b = fn(ours), fn(theirs)
    np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-12)
    if b.dtype.is_floating_point:
        seed = np.random.default_rng(1).normal(size=a.shape)
        b.backward(torch.tensor(seed))
        np.testing.assert_allclose(grad(a, ours, [tensor(seed)])[0].numpy(), grad_of(theirs).numpy(), rtol=1e-10)
    else:
        assert not a.requires_grad


# -- indexing ----------------------------------------------------------------------------------------------------------
def indices(rank: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of ints, slices, None and at most one ellipsis."""
    one = st.one_of(
        st.integers(-3, 2),
        st.builds(slice, st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6), st.none() | st.integers(1, 3)),
    )
    parts = st.lists(one, max_size=rank).flatmap(
        lambda kept: st.tuples(st.just(kept), st.lists(st.integers(0, len(kept)), max_size=2), st.booleans())
    )

    def put(drawn: tuple[list[Any], list[int], bool]) -> tuple[Any, ...]:
        kept, inserts, dots = drawn
        result = list(kept)
        for at in inserts:
            result.insert(at, None)
        if dots:
            result.insert(len(result) // 2, Ellipsis)
        return tuple(result)

    return parts.map(put)


@given(index=indices(3))
@example(index=(..., 1))
@example(index=(None, 2, ..., None, slice(1, None, 2)))
@example(index=(slice(3, 1),))
def test_indexing_matches_torch(index: tuple[Any, ...]) -> None:
    assert_like_torch(lambda x: x[index])


def test_single_and_numpy_integer_indices_are_accepted() -> None:
    assert_like_torch(lambda x: x[1])
    assert_like_torch(lambda x: x[...])
    x, _ = pair()
    assert np.array_equal(x[np.int64(-1)].numpy(), x.numpy()[-1])
    assert array_of(x[1, :, 2:]).storage is array_of(x).storage  # a view


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (..., 0, ...), 3, -4, (slice(None), 4)])
def test_an_index_out_of_range_is_refused(index: Any) -> None:
    with pytest.raises(ShapeError):
        pair()[0][index]


@pytest.mark.parametrize("index", ["a", 1.0])
def test_an_invalid_index_type_is_refused(index: Any) -> None:
    with pytest.raises(UsageError, match="invalid index"):
        pair()[0][index]


def like(x: Any, ids: Any) -> Any:
    """An index tensor of the library of x."""
    return tensor(ids) if isinstance(x, Tensor) else torch.tensor(ids)


# -- methods -----------------------------------------------------------------------------------------------------------
METHODS: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(1),
    "argmax of the last axis": lambda x: x.argmax(-1),
    "amax": lambda x: x.amax(1),
    "amax of two axes": lambda x: x.amax((0, 2), keepdims=True) if isinstance(x, Tensor) else x.amax((0, 2), True),
    "reshape": lambda x: x.reshape(5, 12),
    "reshape, a tuple": lambda x: x.reshape((5, 12)),
    "reshape, one size left open": lambda x: x.reshape(2, -1, 5),
    "view": lambda x: x.view(60),
    "permute": lambda x: x.permute(2, 0, 1),
    "squeeze of nothing": lambda x: x.squeeze(1),
    "squeeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(),
    "squeeze of one axis": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(-1),
    "flatten": lambda x: x.flatten(),
    "flatten of two axes": lambda x: x.flatten(1, -1),
    "diagonal": lambda x: x.diagonal(1, -1, 0),
    "narrow": lambda x: x.narrow(-1, 1, 3),
    "split": lambda x: x.split(3, 1)[1],
    "split by sizes": lambda x: x.split([1, 0, 4], -1)[2],
    "chunk": lambda x: x.chunk(3, -1)[2],
    "flip": lambda x: x.flip(0, -1),
    "flip, a tuple": lambda x: x.flip((1,)),
    "roll": lambda x: x.roll((2, -1), (0, 2)),
    "roll of the flat array": lambda x: x.roll(7),
    "tile": lambda x: x.tile(2, 3),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, -2),
    "repeat_interleave of the flat array": lambda x: x.repeat_interleave(2),
    "tril": lambda x: x.tril(-1),
    "triu": lambda x: x.triu(1),
    "gather": lambda x: x.gather(1, like(x, [[[0, 3, 3]], [[1, 1, 1]]])),
    "scatter": lambda x: x.scatter(-1, like(x, [[[0, 3]]]), 2.0),
    "scatter_add": lambda x: x.scatter_add(0, like(x, [[[2, 2, 0]], [[2, 1, 0]]]), x[1:, :1, 2:]),
    "index_select": lambda x: x.index_select(1, like(x, [2, 0, 2])),
    "index_add": lambda x: x.index_add(-1, like(x, [1, 4, 1]), x[..., :3]),
    "masked_fill": lambda x: x.masked_fill(x > 1.0, -7.0),
    "where an index array stands": lambda x: x[like(x, [0, 2]), :, like(x, [[1], [0]])],
    "permute, a tuple": lambda x: x.permute((2, 0, -2)),
    "transpose": lambda x: x.transpose(0, -1),
    "T": lambda x: x.T if isinstance(x, Tensor) else x.permute(2, 1, 0),
    "expand": lambda x: x[:, :1].expand(3, 6, 5),
    "expand_keeps": lambda x: x[:, :1].expand((3, -1, 6, -1)),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "log": lambda x: x.log(),
    "sqrt": lambda x: x.sqrt(),
    "exp": lambda x: x.exp(),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "relu": lambda x: (x - 1).relu(),
    "softmax": lambda x: x.softmax(-1),
    "softmax of the last axis": lambda x: x.softmax(2),
    "softmax of another axis": lambda x: x.softmax(1),
    "mean": lambda x: x.mean(1),
    "float": lambda x: x.float().to(x.dtype),
    "less": lambda x: x < 1.0,
    "at most": lambda x: x <= x.transpose(0, 1).transpose(0, 1),
    "greater": lambda x: x > 1.0,
    "at least": lambda x: x >= x + 0.0,
    "divided": lambda x: 1.0 - x / 3.0,
    "negated": lambda x: -x * 2.0,
}


@pytest.mark.parametrize("name", METHODS)
def test_shape_methods_match_torch(name: str) -> None:
    assert_like_torch(METHODS[name])


def test_a_size_that_cannot_be_inferred_is_refused() -> None:
    x, _ = pair()
    for sizes in ((-1, -1, 5), (7, -1), (0, -1)):
        with pytest.raises(ShapeError, match="-1"):
            x.reshape(*sizes)


def test_contiguous_returns_self_if_possible() -> None:
    x, _ = pair()
    assert x.contiguous() is x
    transposed = x.transpose(0, 1)
    assert array_of(transposed.contiguous()).contiguous
    assert not array_of(transposed).contiguous


# -- leaving tensor land -----------------------------------------------------------------------------------------------
def test_one_element_converts_to_a_number() -> None:
    assert (int(tensor([7])), float(tensor(2.5)), bool(tensor([[0]])), tensor([True]).item()) == (7, 2.5, False, True)
    for convert in (int, float, bool, Tensor.item):
        with pytest.raises(ShapeError, match="one element"):
            convert(tensor([1.0, 2.0]))


def test_length_is_that_of_the_first_axis() -> None:
    assert len(zeros(4, 2)) == 4
    with pytest.raises(UsageError, match="0-d tensor"):
        len(tensor(1.0))


def test_numpy_converts_a_tensor() -> None:
    x = tensor([[1.0, 2.0]])
    assert np.asarray(x).base is not None or np.shares_memory(np.asarray(x), x.numpy())
    assert not np.shares_memory(np.array(x, copy=True), x.numpy())
    assert np.array(x, dtype=np.float64).dtype == np.float64
    low = tensor([1.5]).to("bfloat16")
    assert np.asarray(low).dtype == np.float32
    assert np.asarray(low).tolist() == np.asarray(low, dtype=np.float64).tolist() == low.tolist() == [1.5]


def test_the_repr_of_a_tensor_shows_values_and_spec() -> None:
    assert repr(tensor([1.0, 2.5])) == "Tensor([1. , 2.5])"
    assert repr(tensor([1], requires_grad=False)) == "Tensor([1], dtype=int64)"
    assert repr(tensor([1.5], dtype="bfloat16", requires_grad=True)) == (
        "Tensor([1.5], dtype=bfloat16, requires_grad=True)"
    )
    assert "..." in repr(zeros(100))
    seen = []
    gw.trace(lambda x: seen.append((repr(x), x.symbolic, x.is_leaf)), zeros(2, 3))
    assert seen == [("Tensor(f32[2, 3], traced)", True, True)]
    x, _ = pair()
    assert x.is_leaf
    assert not (x * 2.0).is_leaf


# -- making them -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16", "int64", "bool"])
def test_filled_tensors_match_torch(kind: str) -> None:
    wanted = getattr(torch, kind)
    for ours, theirs in [
        (zeros(2, 3, dtype=kind), torch.zeros(2, 3, dtype=wanted)),
        (ones(3, dtype=kind), torch.ones(3, dtype=wanted)),
        (full((2, 1), 3.14159, kind), torch.full((2, 1), 3.14159, dtype=wanted)),
    ]:
        assert ours.dtype.name.rstrip("_") == kind
        wide = "float32" if kind == "bfloat16" else None
        assert np.array_equal(ours.numpy(wide), theirs.float().numpy() if wide else theirs.numpy())


@pytest.mark.parametrize("args", [(5,), (2, 5), (1, 8, 3), (0.0, 1.0, 0.25), (5, 0, -2)])
def test_arange_matches_torch(args: tuple[float, ...]) -> None:
    ours, theirs = arange(*args), torch.arange(*args)
    assert ours.tolist() == theirs.tolist()
    assert ours.dtype is (int64 if theirs.dtype == torch.int64 else float32)


def test_arange_refuses_a_step_that_cannot_reach_stop() -> None:
    for args in ((0, 5, 0), (0, 5, -1), (5, 0, 2)):
        with pytest.raises(UsageError):
            arange(*args)
    with pytest.raises(UsageError):
        gw.linspace(0, 1, -1)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_linspace_matches_torch(count: int) -> None:
    np.testing.assert_allclose(gw.linspace(-1, 2, count).numpy(), torch.linspace(-1, 2, count).numpy(), rtol=1e-6)


@pytest.mark.parametrize("size", [(3,), (2, 4), (3, 0)])
@pytest.mark.parametrize("kind", ["bfloat16", "int64", "bool"])
def test_eye_matches_torch(size: tuple[int, ...], kind: str) -> None:
    theirs = torch.eye(*size, dtype=getattr(torch, kind))
    ours = gw.eye(*size, dtype=kind)
    assert ours.dtype.name == kind
    assert ours.tolist() == theirs.tolist()


def test_like_factories_match_torch() -> None:
    x = tensor(np.ones((2, 3)))
    for made, value in ((gw.zeros_like(x), 0.0), (gw.ones_like(x), 1.0), (gw.full_like(x, 2.5), 2.5)):
        assert made.spec == x.spec
        assert made.tolist() == np.full((2, 3), value).tolist()
    assert gw.zeros_like(x, "int64").dtype is int64
    assert gw.empty_like(x).spec == gw.empty(2, 3, dtype="float64").spec == x.spec
    assert all(
        make(requires_grad=True).requires_grad
        for make in (partial(gw.empty, 2), partial(gw.zeros_like, x), partial(gw.eye, 2), partial(gw.linspace, 0, 1, 3))
    )


def test_tensor_copies_its_data() -> None:
    host = np.ones(3, np.float32)
    first = tensor(host)
    for source in (host, first, first.data):
        made = tensor(source)
        assert not np.shares_memory(made.numpy(), first.numpy())
        assert not np.shares_memory(made.numpy(), host)
    assert tensor(first, dtype="bfloat16").dtype is bfloat16


@pytest.mark.parametrize("value", ["text", [object()], [[1, 2], [3]], {"a": 1}])
def test_tensor_refuses_values_that_are_not_numbers(value: Any) -> None:
    with pytest.raises((UsageError, ValueError)):
        tensor(value)


def test_integer_tensors_cannot_require_gradients() -> None:
    with pytest.raises(DTypeError, match="floating"):
        tensor([1, 2], requires_grad=True)
    with no_grad():
        assert not (tensor([1.0], requires_grad=True) * 2.0).requires_grad


def test_iteration_follows_the_first_axis() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    first, *rest = tensor(x)
    assert [r.numpy().tolist() for r in (first, *rest)] == x.tolist()
    assert gw.compile(lambda t: sum(t))(tensor(x)).numpy().tolist() == x.sum(0).tolist()
    with pytest.raises(UsageError, match="length of a 0-d"):
        list(tensor(np.float32(1.0)))


@pytest.mark.parametrize("spec", ["", ".3f", "10.2e", ">12", "+.1%"])
def test_a_loss_is_formatted_as_in_torch(spec: str):
    number = np.array(2.345678, np.float32)
    if spec:
        assert format(tensor(number), spec) == format(torch.tensor(number), spec)
    else:
        assert f"{tensor(number)}" == str(tensor(number))
    assert round(tensor(number), 2) == round(number.item(), 2)
    assert format(tensor([number]), ".3f") == "2.346"
    with pytest.raises(ShapeError, match="exactly one element"):
        format(ones(3), ".3f")


def test_a_tensor_of_a_list_names_the_function_that_converts() -> None:
    for data in ([1.0, 2.0], 3, np.ones(2), None):
        with pytest.raises(UsageError, match=r"gw\.tensor"):
            gw.Tensor(data)  # pyright: ignore[reportArgumentType]


def test_to_copies_on_request() -> None:
    x = ones(2)
    assert x.to("cpu") is x
    for made in (
        x.to("cpu", copy=True),
        x.to(copy=True),
        x.to(dtype=float32, copy=True),
        x.to("cpu", "float32", False, True),
    ):
        made += 1.0
        assert (made.tolist(), x.tolist()) == ([2, 2], [1, 1])
    assert x.to("cpu", non_blocking=True) is x
