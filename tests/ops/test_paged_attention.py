"""Attention over blocks of a pool against dense attention in float64: tiles, windows, groups, dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphwright.array import DType, NDArray, bfloat16, empty, float16, float32, float64, from_numpy
from graphwright.ops import call


def held_as(x: np.ndarray, kind: DType) -> NDArray:
    return empty(x.shape, kind).copy_from(from_numpy(x))


def numbers(x: NDArray) -> np.ndarray:
    return x.to_numpy("float32" if x.dtype.as_bits else None).astype("f8")


@settings(deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(-1, 40), st.integers(240, 530)), min_size=1, max_size=3),
    queries=st.sampled_from([1, 1, 2, 17]),
    heads=st.sampled_from([(1, 1), (2, 3), (8, 1)]),
    block=st.sampled_from([1, 3, 16, 128, 300]),
    window=st.one_of(st.none(), st.integers(1, 400)),
    softcap=st.sampled_from([None, None, 0.9, 30.0]),
    sunk=st.booleans(),
    kinds=st.sampled_from([(float64, float64), (float32, float32), (float32, bfloat16), (bfloat16, float16)]),
    seed=st.integers(0, 99),
)
@example(
    lengths=[255, 256], queries=2, heads=(2, 3), block=16, window=None, softcap=None, sunk=False,
    kinds=(float32, float32), seed=0,
)  # fmt: skip
@example(
    lengths=[520], queries=17, heads=(1, 1), block=1, window=5, softcap=0.5, sunk=False, kinds=(float64, float64),
    seed=1,
)  # fmt: skip
@example(
    lengths=[256, -1, 3], queries=2, heads=(2, 3), block=16, window=9, softcap=None, sunk=True,
    kinds=(float64, float64), seed=1,
)  # fmt: skip
def test_tiled_paged_attention_matches_dense_attention(
    lengths: list[int],
    queries: int,
    heads: tuple[int, int],
    block: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    kinds: tuple[DType, DType],
    seed: int,
) -> None:
    rng, (groups, share), (kind, held) = np.random.default_rng(seed), heads, kinds
    need = [-(-(n + queries) // block) if n >= 0 else 0 for n in lengths]
    order = rng.permutation(sum(need) + 2).astype(np.int32)
    table = np.full((len(lengths), max(need) + 1), -1, np.int32)
    pools = [np.full((len(order), groups, block, d), np.nan) for d in (4, 6)]  # unused rows are NaN
    dense = []
    for b, (n, count) in enumerate(zip(lengths, need, strict=True)):
        table[b, :count], order = order[:count], order[count:]
        total = n + queries if n >= 0 else 0
        rows = [numbers(held_as(rng.normal(size=(groups, total, d)), held)) for d in (4, 6)]
        for pool, some in zip(pools, rows, strict=True):
            for at in range(total):
                pool[table[b, at // block], :, at % block] = some[:, at]
        dense.append(rows)
    q = held_as(rng.normal(size=(len(lengths), groups * share, queries, 4)), kind)
    paging = from_numpy(table), from_numpy(np.array(lengths, np.int32))
    rules = {"scale": 0.7, "window": window, "softcap": softcap}
    sinks = [held_as(2 * rng.normal(size=groups * share), kind)] if sunk else []
    found = call("sdpa_paged", q, *(held_as(p, held) for p in pools), *paging, *sinks, **rules)
    assert found.dtype is kind
    tolerance = {float64: 1e-12, float32: 2e-6, bfloat16: 8e-3}[kind]
    for b, n in enumerate(lengths):
        mine = numbers(found)[b]
        if n < 0:
            assert not mine.any()
            continue
        k, v = (torch.tensor(t).repeat_interleave(share, 0) for t in dense[b])
        ahead = torch.arange(n + queries) - (n + torch.arange(queries)).unsqueeze(1)
        hidden = (ahead > 0) | (ahead <= -(window or n + queries))
        scores = 0.7 * torch.tensor(numbers(q)[b]) @ k.transpose(1, 2)
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(hidden, -torch.inf)
        more = [torch.tensor(numbers(x)).view(-1, 1, 1).expand(-1, queries, 1) for x in sinks]
        weights = torch.cat([scores, *more], -1).softmax(-1)[..., : n + queries]
        np.testing.assert_allclose(mine, (weights @ v).numpy(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_query_heads_read_the_key_head_of_their_group(groups: int) -> None:
    """Each key head holds one number: repeated and tiled heads would be told apart."""
    pool = np.broadcast_to(np.arange(groups, dtype="f4")[:, None, None], (2, groups, 4, 3)).copy()
    ins = (np.ones((1, 3 * groups, 1, 3), "f4"), pool, pool, np.array([[1, 0]], "i4"), np.array([5], "i4"))
    out = call("sdpa_paged", *map(from_numpy, ins), scale=1.0)
    assert out.to_numpy()[0, :, 0, 0].tolist() == [h // 3 for h in range(3 * groups)]


def test_entries_are_rounded_when_they_are_written() -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 5, 3)).astype("f4")
    paging = np.array([[2, 0]], "i4"), np.array([2], "i4")
    out = call("kv_append_paged", held_as(np.zeros((3, 2, 4, 3)), bfloat16), *map(from_numpy, (x, *paging)))
    found = out.to_numpy("float32")
    want = torch.tensor(x).to(torch.bfloat16).float().numpy()[0]
    assert np.array_equal(found[2, :, 2:], want[:, :2])
    assert np.array_equal(found[0, :, :3], want[:, 2:])
    assert not found[1].any()
    assert not found[2, :, :2].any()
