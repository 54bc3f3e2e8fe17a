"""Attention of the VM, forward and backward, beside the ATen kernels: sizes around a block, masks, groups, strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vm_forms import encode, low, vm

from graphwright.array import CPU, NDArray, backend, from_numpy
from graphwright.array.vm.encode.operands import View
from graphwright.array.vm.running.segment import VmSegment
from graphwright.ops import OPS, compute


def view(array: NDArray) -> View:
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def run(name: str, arrays: list[NDArray], attrs: dict[str, Any]) -> list[np.ndarray]:
    specs = OPS[name].specs([a.spec for a in arrays], attrs)
    outs = [from_numpy(np.full(s.sizes, np.nan, "f4")) for s in specs]
    rows = encode(name, [view(o) for o in outs], [view(a) for a in arrays], attrs)
    assert rows is not None
    VmSegment([rows])()
    return [o.to_numpy() for o in outs]


def agree(arrays: list[NDArray], **options: Any) -> None:
    attrs = OPS["sdpa"].complete({"scale": 0.3, **options})
    (mine,) = run("sdpa", arrays, attrs)
    (other,) = compute(OPS["sdpa"], arrays, attrs)
    np.testing.assert_allclose(mine, other.to_numpy(), rtol=2e-5, atol=1e-5)
    grad = from_numpy(np.random.default_rng(1).normal(size=mine.shape).astype("f4"))
    grads = [*arrays, other, grad]
    truth = compute(OPS["sdpa_backward"], grads, attrs)
    for ours, theirs in zip(run("sdpa_backward", grads, attrs), truth, strict=True):
        np.testing.assert_allclose(ours, theirs.to_numpy(), rtol=1e-4, atol=2e-5)


def operands(queries: int, keys: int, deep: int = 8, wide: int = 8, heads: int = 4, groups: int = 2) -> list[NDArray]:
    rng = np.random.default_rng(0)
    shapes = ((2, heads, queries, deep), (2, groups, keys, deep), (2, groups, keys, wide))
    return [from_numpy(rng.normal(size=s).astype("f4")) for s in shapes]


LENGTHS = [(1, 1), (1, 130), (63, 63), (64, 64), (65, 65), (130, 130), (70, 200), (90, 20), (20, 900)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_any_numbers_of_queries_and_keys_match_aten(queries: int, keys: int, causal: bool) -> None:
    agree(operands(queries, keys), causal=causal)


@pytest.mark.parametrize(("deep", "wide"), [(1, 1), (17, 5), (32, 32), (64, 64), (80, 128)])
def test_any_head_size_matches_aten(deep: int, wide: int) -> None:
    agree(operands(70, 70, deep, wide))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 2), (3, 3), (4, 1)])
def test_grouped_heads_match_aten(heads: int, groups: int) -> None:
    agree(operands(66, 66, heads=heads, groups=groups))


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 1000])
def test_windows_count_the_query_itself(window: int) -> None:
    agree(operands(200, 200), window=window)


def test_padding_masks_and_start_positions_match_aten() -> None:
    rng = np.random.default_rng(2)
    for seen in (rng.random((2, 150)) < 0.6, np.zeros((2, 150), bool)):
        agree([*operands(70, 150), from_numpy(seen)], optional=("key_mask",))
    agree([*operands(70, 150), from_numpy(np.asarray(3))], optional=("q_start",))
    agree([*operands(70, 150), from_numpy(np.asarray(40))], optional=("q_start",), window=30)
    agree([*operands(70, 150), from_numpy(seen), from_numpy(np.asarray(80))], optional=("key_mask", "q_start"))


def test_strided_keys_and_values_match_aten() -> None:
    q, _, _ = operands(70, 70)
    both = np.random.default_rng(0).normal(size=(2, 70, 2, 2, 8)).astype("f4")
    k, v = (from_numpy(both[:, :, i].transpose(0, 2, 1, 3)) for i in (0, 1))
    agree([q, k, v])


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"optional": ("key_mask",)}, {"causal": False}])
def test_bfloat16_is_computed_in_float32_and_rounded_once(options: dict[str, Any]) -> None:
    """Beside the float32 kernels on the same numbers; rounding costs half a unit of the last of 8 bits."""
    wide = [a.to_numpy() for a in operands(70, 70, 17, 5)]
    wide[1] = np.ascontiguousarray(wide[1].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # as in a projection
    extra = [from_numpy(np.random.default_rng(2).random((2, 70)) < 0.6)] if "optional" in options else []
    attrs = OPS["sdpa"].complete({"scale": 0.3, **options})
    narrow = [low(x) for x in wide]
    exact = [from_numpy(a.to_numpy("float32")) for a in narrow]
    (mine,) = vm("sdpa", [*narrow, *extra], attrs) or [None]
    assert mine is not None
    (truth,) = compute(OPS["sdpa"], [*exact, *extra], attrs)
    np.testing.assert_allclose(mine.to_numpy("float32"), truth.to_numpy(), rtol=2.0**-8, atol=1e-5)
    grad = low(np.random.default_rng(1).normal(size=mine.shape))
    ours = vm("sdpa_backward", [*narrow, *extra, mine, grad], attrs)
    given = [from_numpy(a.to_numpy("float32")) for a in (mine, grad)]
    for found, other in zip(ours or (), compute(OPS["sdpa_backward"], [*exact, *extra, *given], attrs), strict=True):
        np.testing.assert_allclose(found.to_numpy("float32"), other.to_numpy(), rtol=2.0**-8, atol=2e-5)


def test_few_bfloat16_queries_do_not_widen_all_keys() -> None:
    attrs = OPS["sdpa"].complete({"scale": 0.3})
    assert vm("sdpa", [low(a.to_numpy()) for a in operands(1, 70)], attrs) is None


def test_large_scores_do_not_overflow() -> None:
    q, k, v = operands(130, 130)
    arrays = [from_numpy(100 * q.to_numpy()), k, v]
    attrs = OPS["sdpa"].complete({"scale": 1.0})
    np.testing.assert_allclose(
        run("sdpa", arrays, attrs)[0], compute(OPS["sdpa"], arrays, attrs)[0].to_numpy(), rtol=1e-3, atol=1e-4
    )


def test_nan_reaches_only_the_queries_that_see_it() -> None:
    q, k, v = operands(130, 130, heads=2, groups=1)
    values = v.to_numpy().copy()
    values[0, 0, 100, 3] = np.nan
    (mine,) = run("sdpa", [q, k, from_numpy(values)], OPS["sdpa"].complete({"scale": 0.3}))
    assert np.isnan(mine[0, :, 100:, 3]).all()
    assert np.isfinite(mine[0, :, :64]).all()
    assert np.isfinite(mine[1]).all()


def test_block_table_selects_key_blocks() -> None:
    q, k, v = operands(150, 150, heads=2, groups=2)
    lists = [[0], [0, 1], [0, 2]]
    starts = np.cumsum([0, *map(len, lists)])
    table = np.concatenate([starts, *lists]).astype(np.int64)
    out = from_numpy(np.full((2, 2, 150, 8), np.nan, "f4"))
    attrs = OPS["sdpa"].complete({"scale": 0.3})
    rows = encode("sdpa", [view(out)], [view(a) for a in (q, k, v)], attrs)
    assert rows is not None
    rows[0][14] = table.ctypes.data
    VmSegment([rows])()
    positions = np.arange(150)
    seen = np.tril(np.ones((150, 150), bool))
    for block, keys in enumerate(lists):
        seen[positions // 64 == block] &= np.isin(positions // 64, keys)
    s = np.where(seen, 0.3 * (q.to_numpy() @ k.to_numpy().swapaxes(-1, -2)), -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(out.to_numpy(), (w / w.sum(-1, keepdims=True)) @ v.to_numpy(), rtol=1e-5, atol=1e-6)
