"""Convolution and pooling beyond the samples of their rows: any geometry, chunks, empty batches, ties."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch_ops import TORCH

from graphwright.array import Spec, float32, from_numpy
from graphwright.array.cpu import conv
from graphwright.array.cpu import conv as gathered
from graphwright.array.cpu.conv import Columns
from graphwright.array.cpu.kernel import KERNELS
from graphwright.array.layout import Window
from graphwright.errors import ShapeError
from graphwright.ops import OPS, call, compute
from graphwright.testing.oracle import assert_bits, assert_close


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@given(data=st.data())
def test_convolutions_of_any_geometry_match_torch(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    kernel, groups = each(1, 3), data.draw(st.sampled_from([1, 2, 4]))
    attrs = {"stride": each(1, 3), "padding": each(0, 2), "dilation": each(1, 2), "groups": groups}
    x = numbers((data.draw(st.integers(0, 3)), 4, *each(5, 7)))
    w = numbers((groups * data.draw(st.integers(1, 2)), 4 // groups, *kernel), 1)
    ours = call("conv", from_numpy(x), from_numpy(w), **attrs)
    theirs = getattr(F, f"conv{rank}d")(torch.from_numpy(x), torch.from_numpy(w), **attrs)
    assert_close(ours, theirs.numpy(), rtol=1e-12, atol=1e-12)
    rest = tuple(data.draw(st.integers(0, s - 1)) for s in attrs["stride"])
    back = call("conv_transpose", ours, from_numpy(w), **attrs, output_padding=rest)
    if len(x):  # torch refuses an empty batch
        wide = getattr(F, f"conv_transpose{rank}d")(theirs, torch.from_numpy(w), **attrs, output_padding=rest)
        assert_close(back, wide.numpy(), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("name", ["conv", "conv_transpose", "conv_weight", "unfold", "fold"])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    ("stride", "positions"), [(2, 5), (1, 9)]
)  # runs of channels are the longer, and those of positions
@pytest.mark.parametrize("short", [16, 0])  # a product for all samples of a chunk, and for each
def test_the_chunk_size_does_not_change_results(
    name: str, samples: int, stride: int, positions: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five samples, one or two at a time; the last chunk of two is not full."""
    attrs = OPS[name].complete({"stride": stride, "padding": 1, **GIVEN.get(name, {})})
    shapes = {
        "conv": [(5, 2, 9), (3, 2, 3)],
        "conv_transpose": [(5, 3, positions), (3, 2, 3)],
        "conv_weight": [(5, 2, 9), (5, 3, positions)],
        "unfold": [(5, 2, 9)],
        "fold": [(5, 6, positions)],
    }[name]
    arrays = [from_numpy(numbers(s, i)) for i, s in enumerate(shapes)]
    whole = compute(OPS[name], arrays, attrs)[0]
    forget(monkeypatch)
    monkeypatch.setattr(conv, "SHORT", short)
    monkeypatch.setattr(gathered, "COLUMN_BYTES", samples * 8 * 6 * positions)
    window = Window.of((3,), attrs)
    assert Columns(window, (5, 2, 9), 8).chunk == gathered.Gathered(window, (5, 2, 9), 8, 3).chunk == samples
    assert gathered.Gathered(window, (5, 2, 9), 8, 3).last == (stride == 2)
    assert_close(compute(OPS[name], arrays, attrs)[0], whole.to_numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_atens_convolutions_equal_those_by_columns(
    rank: int, groups: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three ops in float32: ATen's kernels, in new and in given memory, against columns in float64."""
    attrs = {"stride": 2, "padding": 1, "dilation": 1, "groups": groups}
    x, w = numbers((3, 8, *(7,) * rank)), numbers((16, 8 // groups, *(3,) * rank), 1)
    b = [numbers((16,), 2)] * bias
    g, back = numbers((3, 16, *(4,) * rank), 3), [numbers((8,), 4)] * bias
    monkeypatch.setattr(conv, "LARGE", 1)
    forget(monkeypatch)
    for name, operands, more in (
        ("conv", [x, w, *b], {}),
        ("conv_transpose", [g, w, *back], {"output_padding": 0}),
        ("conv_weight", [x, g], {"kernel": (3,) * rank}),
    ):
        exact = call(name, *map(from_numpy, operands), **attrs, **more)
        near = [from_numpy(a.astype("f4")) for a in operands]
        made = call(name, *near, **attrs, **more)
        assert_close(made, exact.to_numpy(), rtol=1e-5, atol=1e-5)
        assert_bits(call(name, *near, **attrs, **more, out=made.copy()), made.to_numpy())


@pytest.mark.parametrize(
    ("groups", "shape", "kernel", "direct"),
    [
        (1, (2, 8, 6, 6), 3, (False, False, False)),  # small
        (1, (4, 64, 16, 16), 3, (True, True, True)),
        (8, (2, 8, 6, 6), 3, (True, True, True)),
        (8, (2, 8, 6, 6), 5, (True, True, False)),
        (1, (4, 64, 16, 16), 1, (False, False, False)),  # a matrix product
        (1, (4, 64, 1, 1), 1, (True, True, True)),
    ],
)
def test_columns_need_scratch_and_atens_kernels_none(
    groups: int, shape: tuple[int, ...], kernel: int, direct: tuple[bool, ...]
) -> None:
    channels = shape[1]
    attrs = {"stride": 1, "padding": kernel // 2, "dilation": 1, "groups": groups}
    x, w = Spec(shape, float32), Spec((channels, channels // groups, kernel, kernel), float32)
    found = (
        conv._forward(x, w, attrs),
        conv._forward(x, w, {**attrs, "output_padding": 0}),
        conv._direct("conv_weight", shape, w.sizes, float32, attrs),
    )
    assert tuple(f is not None for f in found) == direct
    work = KERNELS["conv"].work
    assert work is not None
    assert not found[0] or work([x], [x, w], attrs) == []


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the cache of dispatch facts, scratch included, until the end of a test."""
    monkeypatch.setattr(sys.modules["graphwright.ops.call"], "_known", {})


GIVEN: dict[str, dict[str, Any]] = {
    "conv_weight": {"kernel": (3,)},
    "unfold": {"kernel": (3,)},
    "fold": {"kernel": (3,), "sizes": (9,)},
}


def test_max_pool_returns_the_first_of_equal_maxima() -> None:
    x = from_numpy(np.zeros((1, 1, 4, 4)))
    best, indices = call("max_pool", x, kernel=(2, 2))
    assert not best.to_numpy().any()
    assert indices.to_numpy().ravel().tolist() == [0, 2, 8, 10]


@pytest.mark.parametrize("shape", [(70, 1, 8, 8), (1, 277, 32, 32)])
def test_pooling_of_partial_blocks_matches_torch(shape: tuple[int, ...]) -> None:
    """70 are 64 and 6 abreast; 277 are blocks of 256, 16 and 5. NaN is the largest, as in torch."""
    x = numbers(shape).astype("f4")
    x[0, 0, 2, 3] = np.nan
    best, indices = call("max_pool", from_numpy(x), kernel=(2, 3), stride=(1, 2), padding=(1, 0))
    theirs = F.max_pool2d(torch.from_numpy(x), (2, 3), (1, 2), (1, 0), return_indices=True)
    assert_bits(best, theirs[0].numpy())
    assert_bits(indices, theirs[1].numpy())


def test_max_pool_never_returns_padding() -> None:
    best, indices = call("max_pool", from_numpy(np.full((1, 1, 3), -5.0)), kernel=(2,), stride=1, padding=1)
    assert set(best.to_numpy().ravel()) == {-5.0}
    assert indices.to_numpy().ravel().tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("name", ["max_pool", "avg_pool"])
def test_pooling_accepts_any_number_of_leading_axes(name: str) -> None:
    x = numbers((2, 3, 2, 5, 4))
    wide = call(name, from_numpy(x), kernel=(2, 3), stride=1)
    flat = call(name, from_numpy(x.reshape(12, 5, 4)), kernel=(2, 3), stride=1)
    for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (wide, flat)), strict=True):
        assert_bits(a, b.to_numpy().reshape(2, 3, 2, 4, 2))


@pytest.mark.parametrize("n", [1, 2, 5, 7, 12])
@pytest.mark.parametrize("m", [1, 2, 3, 7, 24])
@pytest.mark.parametrize("attrs", [{}, {"mode": "linear"}, {"mode": "linear", "align_corners": True}], ids=str)
def test_resampling_between_any_sizes_matches_torch(n: int, m: int, attrs: dict) -> None:
    x = numbers((2, 1, n))
    full = OPS["interpolate"].complete({"sizes": (m,), **attrs})
    theirs = TORCH["interpolate"]([torch.from_numpy(x)], full).numpy()
    assert_close(call("interpolate", from_numpy(x), **full), theirs, rtol=1e-11, atol=1e-12)
    means = F.adaptive_avg_pool1d(torch.from_numpy(x), m)
    assert_close(call("adaptive_avg_pool", from_numpy(x), sizes=(m,)), means.numpy(), rtol=1e-12)


def test_an_infinite_entry_affects_only_its_windows() -> None:
    x = from_numpy(np.array([[1.0, 2.0, 3.0, 4.0, np.inf]]))
    assert call("adaptive_avg_pool", x, sizes=(3,)).to_numpy().tolist() == [[1.5, 3.0, np.inf]]


def test_convolution_over_an_axis_of_named_size_has_a_computed_size() -> None:
    from graphwright.array import Spec, float32

    line, weight = Spec(("B", 2, "T"), float32), Spec((3, 2, 2), float32)
    for stride in (1, 2, 3):
        attrs = OPS["conv"].complete({"stride": stride, "padding": 1})
        (named,) = OPS["conv"].specs([line, weight], attrs)
        for n in range(1, 9):
            assert (named.bind({"B": 4, "T": n}),) == OPS["conv"].specs([Spec((4, 2, n), float32), weight], attrs)
    with pytest.raises(ShapeError, match="negative"):
        OPS["conv"].specs([line, weight], OPS["conv"].complete({}))[0].bind({"T": 0})
