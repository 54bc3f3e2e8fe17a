"""nonzero and repeat_interleave, whose result sizes are data: eager, bounded, in traces and plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.autograd import TraceError
from graphwright.errors import IndexOutOfRange, ShapeError, UsageError
from values import grad_of

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(shape=SHAPES, size=st.integers(0, 30), fill=st.integers(-1, 3), seed=st.integers(0, 99))
def test_nonzero_matches_torch(shape: tuple[int, ...], size: int, fill: int, seed: int) -> None:
    host = np.random.default_rng(seed).choice([0.0, -0.0, 1.0, np.nan, -np.inf], shape)
    theirs = torch.from_numpy(np.asarray(host))
    for kind in ("float64", "bfloat16", "int64", "bool"):
        given_, other = np.nan_to_num(host) if kind == "int64" else host, theirs
        x = gw.tensor(given_).to(kind)
        other = theirs if kind != "int64" else torch.from_numpy(np.asarray(given_)).to(torch.int64)
        assert gw.nonzero(x).tolist() == torch.nonzero(other).tolist()
        bounded = gw.nonzero(x, size=size, fill=fill)
        assert bounded.shape == (size, len(shape))
        assert bounded.tolist() == torch.nonzero_static(other, size=size, fill_value=fill).tolist()


def test_nonzero_with_size_can_be_traced() -> None:
    x = gw.tensor([[0.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    p = gw.trace(lambda x: x.nonzero(size=4), x)
    for values in (x, x * 0, x + 1):
        found = p(x=values)["out"].tolist()
        assert found == torch.nonzero_static(torch.from_numpy(values.numpy().copy()), size=4).tolist()
        assert p.compile(x=(2, 3))({"x": values})["out"].to_numpy().tolist() == found
    with pytest.raises(TraceError):
        gw.trace(lambda x: x.nonzero(), x)


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_repeat_interleave_by_counts(data: st.DataObject, shape: tuple[int, ...]) -> None:
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    n = int(np.prod(shape)) if axis is None else shape[axis]
    sizes = data.draw(st.sampled_from([1, n]))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=sizes, max_size=sizes))
    host = np.random.default_rng(n).normal(size=shape)
    ours, theirs = gw.tensor(host, requires_grad=True), torch.tensor(host, requires_grad=True)
    made = ours.repeat_interleave(gw.tensor(counts, "int64"), axis)
    truth = theirs.repeat_interleave(torch.tensor(counts), axis)
    np.testing.assert_array_equal(made.numpy(), truth.detach().numpy())
    seed = np.random.default_rng(1).normal(size=made.shape)
    made.backward(gw.tensor(seed))
    truth.backward(torch.from_numpy(seed))
    np.testing.assert_allclose(grad_of(ours).numpy(), grad_of(theirs).numpy(), rtol=1e-12)

    total = made.shape[0 if axis is None else axis]
    p = gw.trace(lambda x, c: gw.repeat_interleave(x, c, axis, output_size=total), host, np.array(counts))
    np.testing.assert_array_equal(p(x=host, c=np.array(counts))["out"].numpy(), made.numpy())


def test_traced_counts_need_the_right_total() -> None:
    x, counts = np.arange(3.0), np.array([1, 0, 2])
    p = gw.trace(lambda x, c: gw.repeat_interleave(x, c, 0, output_size=3), x, counts)
    assert p(x=x, c=np.array([0, 3, 0]))["out"].tolist() == [1, 1, 1]
    for other in ([1, 0, 1], [2, 0, 2], [0, 0, 0]):
        with pytest.raises(IndexOutOfRange):
            p(x=x, c=np.array(other))
    with pytest.raises(TraceError):
        gw.trace(lambda x, c: gw.repeat_interleave(x, c), x, counts)


def test_invalid_counts_are_refused() -> None:
    x = gw.tensor([1.0, 2.0])
    with pytest.raises(ShapeError, match="repeats has a wrong length"):
        x.repeat_interleave(gw.tensor([1, 2, 3]))
    with pytest.raises(ShapeError, match="negative count"):
        x.repeat_interleave(gw.tensor([1, -1]))
    with pytest.raises(UsageError, match="not the sum"):
        gw.repeat_interleave(x, gw.tensor([1, 1]), output_size=3)
