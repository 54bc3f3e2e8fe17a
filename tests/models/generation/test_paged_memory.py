"""The contents of the blocks of a paged cache: dtypes, bytes, rows as other caches have them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_bits import rows
from checkpoints import Made, relative, some_ids
from uneven import uneven

import graphwright as gw
from graphwright.array import dtype
from graphwright.array.cpu import tensor_allocations
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.models import BlockError, CacheFull, PagedCache, StaleCache

IDS = some_ids((1, 60))[0]


# -- dtypes ------------------------------------------------------------------------------------------------------------
def rounded(m: gw.Model, kind: str) -> gw.Model:
    """The model with keys and values rounded to a dtype and widened again, as nodes of its graph."""
    with m.program.edit(f"round to {kind}") as e:
        for node in m.program.of_kind("sdpa"):
            for edge in m.program.in_edges(node)[1:3]:
                low = e.insert(edge, "cast", dtype=kind)
                e.insert(m.program.out_edges(low)[0], "cast", dtype="float32")
    return m


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_entries_may_have_another_dtype(kind: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made("qwen2-windows").path)
    plain, cache = m.logits(IDS[:40]), m.new_cache(64, dtype=kind, poison=True)
    size = dtype(kind).itemsize
    assert {v.spec.dtype.name for v in cache.variables.values()} == {kind}
    assert cache.nbytes == sum(v.data.nbytes for v in cache.variables.values())
    assert cache.nbytes * 4 == 5 * 16 * size * m.inspect().kv_bytes_per_token
    s = cache.sequence()
    s.step(IDS[None, :7])
    with s.fork() as f:
        f.step(IDS[None, 7:8])  # a block is copied in this dtype
    found = np.stack([s.step(IDS[None, t : t + 1]).to_numpy("float32")[0, 0] for t in range(7, 40)])
    exact = cast_reference(made, kind)
    assert relative(found, exact[7:]) < (1e-5 if kind == "float32" else 2e-3)
    if kind != "float32":
        assert relative(found, plain[7:]) > 1e-4  # it is held as it says
    k, v = s.gather(0)
    assert k.shape[1] == v.shape[1] == 40
    assert k.dtype == ("float16" if kind == "float16" else "float32")
    assert np.isfinite(k.astype("f4")).all()


def cast_reference(made: Callable[[str], Made], kind: str) -> np.ndarray:
    m = gw.open(made("qwen2-windows").path)
    return m.logits(IDS[:40]) if kind == "float32" else rounded(m, kind).logits(IDS[:40])


def test_bfloat16_keys_are_widened_when_read(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path, compute="bfloat16")
    cache = m.new_cache(64, poison=True)
    s = cache.sequence()
    s.step(IDS[None, :20])
    static = m.new_cache(20, kind="static")
    static.step(IDS[None, :20])
    for ours, name in zip(s.gather("layers.1.attn.sdpa"), "kv", strict=True):
        theirs = static.variables[f"cache.layers.1.attn.sdpa.{name}"].data.to_numpy("float32")
        assert ours.dtype == np.float32
        assert relative(ours, theirs[0]) < 3e-2
    with cache.sequence() as t:
        t.append(*([s.gather(i)[j] for i in range(3)] for j in (0, 1)))
        for i in range(3):
            assert all(np.array_equal(a, b) for a, b in zip(s.gather(i), t.gather(i), strict=True))


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"dtype": "float64"}, {"dtype": "float16", "kind": "static"}])
def test_unsupported_dtypes_of_entries_are_refused(wrong: dict[str, Any], model: gw.Model) -> None:
    with pytest.raises(UsageError):
        model.new_cache(9, **wrong)


def test_another_activation_dtype_makes_the_cache_stale(model: gw.Model, made: Callable[[str], Made]) -> None:
    s = model.new_cache(64).sequence()
    s.step(IDS[None, :5])
    other = gw.open(made("llama").path, compute="bfloat16")
    assert not any(s.validity(other.program).values())
    with pytest.raises(StaleCache):
        other.decode(s, 1)


# -- sizes -------------------------------------------------------------------------------------------------------------
def test_capacity_is_given_in_tokens_blocks_or_bytes(model: gw.Model) -> None:
    per_block = 16 * model.inspect().kv_bytes_per_token
    assert model.new_cache(33).pool.cap == 3 + 1
    assert model.new_cache(33, 5).pool.cap == 3 + 5
    assert model.new_cache(blocks=7).nbytes == 7 * per_block
    assert model.new_cache(nbytes=4 * per_block + 1).pool.cap == 4
    more = [{"tokens": 1 << 50}, {"tokens": 8, "prefix_bytes": -1}, {"tokens": 8, "prefix_bytes": "all"}]
    for wrong in ({}, {"tokens": 3, "blocks": 2}, {"tokens": 8, "block": -1}, *more):
        with pytest.raises(UsageError):
            model.new_cache(**wrong)  # pyright: ignore[reportCallIssue, reportArgumentType]  # wrong on purpose


def test_a_hundred_forks_take_one_block_each(model: gw.Model) -> None:
    cache = model.new_cache(40, 130, prefix_bytes=0)
    s = cache.sequence()
    s.prefill(IDS[None, :40])
    shared = cache.pool.used
    forks = [s.fork() for _ in range(100)]
    assert tensor_allocations(lambda: [f.reserve(1) for f in forks]) == []
    assert cache.pool.used == shared + 100
    assert all(cache.pool.refs(b) == 101 for b in s.table[:2])
    assert cache.pool.refs(s.table[2]) == 1


# -- what is written ---------------------------------------------------------------------------------------------------
def raw(cache: PagedCache, block: int) -> list[np.ndarray]:
    return [v.data.to_numpy("float32")[block] for v in cache.variables.values()]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_copied_block_contains_the_used_entries_and_a_freed_one_none(kind: str, model: gw.Model) -> None:
    cache = model.new_cache(64, 2, block=8, dtype=kind, poison=True, prefix_bytes=0)
    s = cache.sequence()
    s.step(IDS[None, :15])
    s.truncate(11)  # entries after it have no owner
    f = s.fork()
    f.reserve(1)
    for old, new in zip(raw(cache, s.table[1]), raw(cache, f.table[1]), strict=True):
        assert np.array_equal(old[:, :3], new[:, :3])
        assert np.isnan(new[:, 3:]).all()
    gone = list(s.table)
    f.release()
    s.release()
    assert all(np.isnan(a).all() for b in gone for a in raw(cache, b))


def test_given_entries_are_appended_completely_or_not_at_all() -> None:
    cache = PagedCache(uneven(), blocks=6, block=4, poison=True)
    s, rng = cache.sequence(), np.random.default_rng(0)
    k = [rng.normal(size=(4, 9, 16)).astype("f4"), rng.normal(size=(1, 9, 8)).astype("f4")]
    v = [rng.normal(size=(4, 9, 16)).astype("f4"), rng.normal(size=(1, 9, 16)).astype("f4")]
    s.append(k, v, range(9))  # over three blocks
    s.append([a[:, :0] for a in k], [a[:, :0] for a in v])
    assert (s.length, len(s.table), s.tokens.tolist()) == (9, 3, [list(range(9))])
    for i in (0, 1):
        assert all(np.array_equal(a, b) for a, b in zip(s.gather(i), (k[i], v[i]), strict=True))
    bad_dtype, bad_shape = np.full((1, 9, 16), "x"), np.zeros((1, 9, 15), np.float32)
    for wrong, error in ((bad_dtype, DTypeError), (bad_shape, ShapeError), (np.zeros(3, "f4"), ShapeError)):
        with pytest.raises(error):
            s.append(k, [v[0], wrong])
        assert (s.length, len(s.table)) == (9, 3)
    with pytest.raises(CacheFull):
        s.append([a[:, :9].repeat(2, 1) for a in k], [a[:, :9].repeat(2, 1) for a in v])
    assert (s.length, len(s.table), cache.pool.free) == (9, 3, 3)
    pools = cache.pools()
    with pytest.MonkeyPatch.context() as patch:  # the second attention's pool cannot be written
        patch.setattr(cache, "pools", lambda: [*pools[:2], Unwritable(pools[2]), pools[3]])
        with pytest.raises(OSError, match="planted"):
            s.append(k, v)
    assert (s.length, s.tokens.shape[1], len(s.table)) == (9, 9, 3)
    for i in (0, 1):
        assert all(np.array_equal(a, b) for a, b in zip(s.gather(i), (k[i], v[i]), strict=True))


class Unwritable:
    """A pool that fails where rows are written."""

    def __init__(self, pool: Any) -> None:
        self.shape = pool.shape

    def __getitem__(self, index: Any) -> Any:
        raise OSError("planted")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_gathered_entries_equal_those_of_a_static_cache(length: int, model: gw.Model) -> None:
    s, static = model.new_cache(64, poison=True).sequence(), model.new_cache(64, kind="static")
    for cache in (s, static):
        model.prefill(cache, IDS[:length], chunk=7)
    for i in range(3):
        path = f"layers.{i}.attn.sdpa"
        views = s.kv(path)
        for ours, view, theirs in zip(s.gather(i), views, rows(static, path), strict=True):
            assert relative(ours, theirs[0]) < 1e-5
            assert np.array_equal(np.concatenate(view, axis=1), ours)
            assert not any(v.flags.writeable for v in view)
    block, inside = s.lookup(length - 1)
    assert (block, inside) == (s.table[(length - 1) // 16], (length - 1) % 16)
    for outside in (-1, length):
        with pytest.raises(BlockError):
            s.lookup(outside)


# -- streams -----------------------------------------------------------------------------------------------------------
def test_forks_sample_from_their_own_streams(model: gw.Model) -> None:
    rules = {"temperature": 3.0, "seed": 4}

    def drawn() -> list[list[int]]:
        s = model.new_cache(400, 4).sequence()
        model.prefill(s, IDS[:9])
        forks = [s.fork(), s.fork()]
        forks.append(forks[0].fork())
        assert [f.stream for f in (s, *forks)] == [0, 1, 2, 3]
        return [list(model.decode(f, 40, **rules)) for f in (s, *forks)]

    found = drawn()
    assert found == drawn()
    for i, ids in enumerate(found):
        assert ids == model.generate(IDS[:9], 40, first_stream=i, **rules).ids
        for other in found[:i]:
            assert sum(a == b for a, b in zip(ids, other, strict=True)) < 8  # of 40; by chance some 2


def test_restoring_a_snapshot_restores_the_random_position(model: gw.Model) -> None:
    s = model.new_cache(100).sequence()
    model.prefill(s, IDS[:9])
    f = s.fork()
    list(model.decode(f, 3, temperature=2.0))
    mark = f.snapshot()
    first = list(model.decode(f, 5, temperature=2.0))
    f.restore(mark)
    assert list(model.decode(f, 5, temperature=2.0)) == first
    assert f.stream == 1
    mark.release()
