"""The paged cache: equal to uncached runs, shared and copied as it should be, honest after an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
from cache_bits import unknown_rows
from checkpoints import Made, relative, some_ids
from uneven import uneven

import graphwright as gw
from graphwright.errors import ComputeError, UsageError
from graphwright.models import BlockError, CacheFull, PagedCache, PromptError, SequenceReleased, StaleCache
from graphwright.models.generation.cached_program import CHOICE, LENGTHS, TABLE

IDS = some_ids((1, 60))[0]
EXECUTORS = pytest.mark.parametrize("vm", [True, False])


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def choose(vm: bool) -> None:
        if not vm:
            monkeypatch.setenv("GRAPHWRIGHT_NATIVE", "0")

    return choose


def paged(m: gw.Model, tokens: int = 400, **options: Any) -> PagedCache:
    return m.new_cache(tokens, kind="paged", **{"poison": True, **options})


def refs(cache: PagedCache) -> int:
    return sum(cache.pool.refs(b) for b in range(cache.pool.cap))


# -- the same numbers --------------------------------------------------------------------------------------------------
@EXECUTORS
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-windows", "qwen3", "rope-yarn"])
def test_steps_equal_uncached_logits(name: str, vm: bool, made: Callable[[str], Made], executor: Any) -> None:
    executor(vm)
    m = gw.open(made(name).path)
    whole, s = m.logits(IDS), paged(m).sequence()
    first = s.step(IDS[None, :7], all_logits=True).to_numpy("float32")
    assert relative(first[0], whole[:7]) < 1e-5
    for t in range(7, 40):
        assert relative(s.step(IDS[None, t : t + 1]).to_numpy("float32")[0, 0], whole[t]) < 1e-5
    np.testing.assert_array_equal(s.tokens[0], IDS[:40])


def test_40_steps_in_float64_equal_uncached_logits(made: Callable[[str], Made]) -> None:
    m = gw.open(made("qwen2-windows").path, dtype="float64", compute="float64")
    positions = np.arange(47)[None]
    whole = m.program.run(ids=IDS[None, :47], positions=positions)["logits"].to_numpy()[0]
    s = paged(m).sequence()
    s.step(IDS[None, :7])
    for t in range(7, 47):
        assert relative(s.step(IDS[None, t : t + 1]).to_numpy()[0, 0], whole[t]) < 1e-10


@pytest.mark.parametrize("block", [1, 3, 16, 128])
def test_any_block_size_gives_equal_logits(block: int, model: gw.Model) -> None:
    s = paged(model, block=block).sequence()
    last = s.prefill(IDS[None, :33], chunk=10)
    assert relative(last[0], model.logits(IDS[:33])[-1]) < 1e-5
    assert len(s.table) == -(-33 // block)
    assert relative(s.step(IDS[None, 33:34]).to_numpy("float32")[0, 0], model.logits(IDS[:34])[-1]) < 1e-5


def test_pools_have_the_shapes_of_unequal_layers() -> None:
    p, ids = uneven(), some_ids((1, 40), vocab=30)
    cache = PagedCache(p, blocks=5, block=16, poison=True)
    s = cache.sequence()
    whole = p.run(ids=ids)["logits"].to_numpy()
    assert cache.pool.block_bytes == 4 * 16 * (4 * 32 + 24)
    assert cache.nbytes == 5 * cache.pool.block_bytes
    for t in range(40):
        assert relative(s.step(ids[:, t : t + 1]).to_numpy()[0, 0], whole[0, t]) < 1e-5
    k, v = s.gather("attn1")
    assert (k.shape, v.shape) == ((1, 40, 8), (1, 40, 16))
    for at in (0, 15, 16, 39):
        block, inside = s.lookup(at)
        assert (block, inside) == (s.table[at // 16], at % 16)
        assert np.array_equal(cache.variables["cache.attn1.k"].numpy()[block, :, inside], k[:, at])
    assert len(cache.variables) == 4


@EXECUTORS
def test_a_ragged_batch_equals_separate_runs_and_leaves_other_sequences_unchanged(
    vm: bool, model: gw.Model, executor: Any
) -> None:
    executor(vm)
    cache = paged(model)
    lengths = (1, 15, 16, 17, 48)
    batch = [cache.sequence() for _ in lengths]
    for s, n in zip(batch, lengths, strict=True):
        s.prefill(IDS[None, :n])
    outsider = batch[0].fork()
    before = [t.copy() for t in outsider.gather(0)]
    for t in range(3):
        logits = cache.step(batch, np.stack([IDS[None, n + t] for n in lengths])).to_numpy("float32")
        for row, n in zip(logits, lengths, strict=True):
            assert relative(row[0], model.logits(IDS[: n + t + 1])[-1]) < 1e-5
        batch, lengths = batch[1:], lengths[1:]  # one leaves
        lengths = tuple(lengths)
    assert all(np.array_equal(a, b) for a, b in zip(before, outsider.gather(0), strict=True))


def test_block_tables_are_inputs_and_pools_are_states_of_their_attention(model: gw.Model) -> None:
    """Sequences change rows from step to step; two pools of one shape are distinguished by their attention."""
    cache = paged(model, prefix_bytes=0)
    p = cache.steps.derived().program
    assert {p.path(n) for n in p.inputs()} == {"ids", "positions", TABLE, LENGTHS, *CHOICE}
    assert p.spec(p.value(TABLE)).shape == ("B", cache.pool.cap)
    paths = [f"layers.{i}.attn.sdpa" for i in range(3)]
    assert set(cache.variables) == {f"cache.{path}.{name}" for path in paths for name in "kv"}
    for path in paths:
        held = [p.path(v.node) for v in p.operands(p.node(path))[1:3]]
        assert held == [f"cache.{path}.{name}.grown" for name in "kv"]
        for name, grown in zip("kv", held, strict=True):
            assert p.path(p.operands(p.node(grown))[0].node) == f"cache.{path}.{name}"
    batch = [cache.sequence() for _ in range(3)]
    for i, s in enumerate(batch):
        s.prefill(IDS[None, i : i + 9])
    texts = [s.tokens[0].tolist() for s in batch]
    for t in range(4):
        order = np.random.default_rng(t).permutation(3)
        logits = cache.step([batch[i] for i in order], IDS[order + 3 * t][:, None]).to_numpy("float32")
        for row, i in zip(logits, order, strict=True):
            texts[i].append(int(IDS[i + 3 * t]))
            assert relative(row[0], model.logits(texts[i])[-1]) < 1e-5


# -- branching ---------------------------------------------------------------------------------------------------------
def test_forks_read_a_shared_block_up_to_their_own_length(model: gw.Model) -> None:
    """Forks that end at different rows of one block read their own, as long as no other sequence writes."""
    cache = paged(model, prefix_bytes=0)
    s = cache.sequence()
    s.prefill(IDS[None, :25])
    whole = [t.copy() for t in s.gather(1)]
    forks = {n: s.fork() for n in (25, 24, 18, 17)}
    for n, f in forks.items():
        f.truncate(n)
        assert f.table == s.table
        assert all(np.array_equal(a[:, :n], b) for a, b in zip(whole, f.gather(1), strict=True))
    assert cache.pool.refs(s.table[1]) == 5
    logits = cache.step(list(forks.values()), IDS[30:34, None]).to_numpy("float32")
    for row, n, token in zip(logits, forks, IDS[30:34], strict=True):
        assert relative(row[0], model.logits([*IDS[:n], token])[-1]) < 1e-5
    assert cache.pool.refs(s.table[1]) == 1


def test_a_fork_shares_every_block_and_copies_one_on_write(model: gw.Model) -> None:
    cache = paged(model)
    s = cache.sequence()
    s.prefill(IDS[None, :40])
    bits = [t.copy() for t in s.gather(1)]
    used = cache.pool.used
    forks = [s.fork() for _ in range(5)]
    assert cache.pool.used == used
    for i, f in enumerate(forks):
        f.step(np.array([[i]]))
        assert cache.pool.used == used + i + 1
        assert f.table[:2] == s.table[:2]
        assert f.table[2] != s.table[2]
    for i, f in enumerate(forks):
        assert relative(f.last_logits()[0], model.logits([*IDS[:40], i])[-1]) < 1e-5
    assert all(np.array_equal(a, b) for a, b in zip(bits, s.gather(1), strict=True))
    for f in (*forks, s):
        f.release()
        f.release()
    cache.prefix.clear()
    assert cache.pool.free == cache.pool.cap
    with pytest.raises(SequenceReleased):
        s.step(np.array([[1]]))
    assert s.tokens.shape == (1, 40)


def test_truncating_a_fork_leaves_the_parent(model: gw.Model) -> None:
    cache = paged(model, prefix_bytes=0)
    s = cache.sequence()
    s.prefill(IDS[None, :35])
    bits = [t.copy() for t in s.gather(2)]
    f = s.fork()
    f.truncate(20)
    assert (len(f.table), len(s.table)) == (2, 3)
    f.step(IDS[None, 50:51])
    assert relative(f.last_logits()[0], model.logits([*IDS[:20], IDS[50]])[-1]) < 1e-5
    assert all(np.array_equal(a, b) for a, b in zip(bits, s.gather(2), strict=True))
    f.truncate(0)
    assert f.table == []
    with pytest.raises(CacheFull):
        s.truncate(36)


def test_a_snapshot_can_be_restored_exactly_many_times(model: gw.Model) -> None:
    cache = paged(model)
    s = cache.sequence()
    s.prefill(IDS[None, :19])
    mark = s.snapshot()
    assert mark in cache.holders()
    runs = []
    for _ in range(3):
        s.restore(mark)
        runs.append((list(model.decode(s, 5, temperature=0.9, seed=3)), [t.tobytes() for t in s.gather(0)]))
    assert runs[0] == runs[1] == runs[2]
    mark.release()
    mark.release()
    assert cache.holders() == [s]
    with pytest.raises(SequenceReleased):
        s.restore(mark)
    with pytest.raises(UsageError):
        paged(model).sequence().restore(s.snapshot())


def test_blocks_without_owners_are_free(model: gw.Model) -> None:
    cache = paged(model, prefix_bytes=0)
    s = cache.sequence()
    s.prefill(IDS[None, :20])
    mark = s.snapshot()
    assert len(mark.table) == 2
    del s, mark
    assert cache.pool.free == cache.pool.cap

    def fails() -> None:
        with cache.sequence() as other:
            other.prefill(IDS[None, :20])
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fails()
    assert cache.pool.free == cache.pool.cap


# -- room --------------------------------------------------------------------------------------------------------------
def test_a_full_cache_raises_and_changes_nothing(model: gw.Model) -> None:
    cache = PagedCache(model.program, blocks=3, block=4, prefix_bytes=0)
    s, other = cache.sequence(), cache.sequence()
    s.prefill(IDS[None, :7])
    other.step(IDS[None, :1])
    bits, table = [t.copy() for t in s.gather(0)], list(s.table)
    for ids in (IDS[None, 7:9], IDS[None, 7:12]):
        with pytest.raises(CacheFull):
            s.step(ids)
        assert s.table == table
        assert s.length == 7
        assert all(np.array_equal(a, b) for a, b in zip(bits, s.gather(0), strict=True))
    with pytest.raises(CacheFull):
        cache.step([s, other], np.array([[1, 2], [1, 2]]))  # the second would fit
    assert (s.length, other.length, cache.pool.free) == (7, 1, 0)
    s.step(IDS[None, 7:8])
    assert relative(s.last_logits()[0], model.logits(IDS[:8])[-1]) < 1e-5
    fork = s.fork()
    fork.truncate(7)
    with pytest.raises(CacheFull):
        fork.reserve(1)  # no block is free for a copy of the shared one
    other.release()
    fork.reserve(1)
    fork.release()
    done = model.generate(IDS[:8], 2, cache=s)
    assert len(done.ids) == 2


def test_full_cache_error_contains_the_text_so_far(byte_model: gw.Model) -> None:
    cache = PagedCache(byte_model.program, blocks=2, block=4)
    byte_model.eos_ids = ()
    with pytest.raises(CacheFull) as caught:
        byte_model.generate("abcdef", 9, cache=cache.sequence())
    assert caught.value.partial == byte_model.generate("abcdef", 3).text


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"blocks": 1, "block": 0}, {"nbytes": 10}, {}, {"blocks": 1, "tokens": 1}]
)
def test_invalid_sizes_are_refused(wrong: dict[str, int], model: gw.Model) -> None:
    with pytest.raises(UsageError):
        PagedCache(model.program, **wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError):
        model.new_cache(4, kind="linked")  # pyright: ignore[reportCallIssue, reportArgumentType]


# -- prompts with one prefix -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [0, 15, 16, 40])
def test_a_shared_prefix_is_not_run_again(shared: int, model: gw.Model) -> None:
    cache = paged(model)
    with cache.sequence() as s:
        s.prefill(IDS[None, :45])
    ids = np.concatenate([IDS[:shared], some_ids((1, 20), seed=9)[0]])
    with cache.sequence() as t:
        last = t.prefill(ids[None])
        assert t.reused == shared // 16 * 16
        assert relative(last[0], model.logits(ids)[-1]) < 1e-5
        t.truncate(3)
        t.step(IDS[None, 5:6])  # writes a block of its own
    with cache.sequence() as u:
        u.prefill(IDS[None, :32])
        assert u.reused == 16  # a token is left to be run
        assert relative(u.last_logits()[0], model.logits(IDS[:32])[-1]) < 1e-5


def test_decoded_blocks_are_cached_and_evicted_when_memory_is_needed(model: gw.Model) -> None:
    cache = PagedCache(model.program, blocks=4, block=4)
    with cache.sequence() as s:
        s.prefill(IDS[None, :6])
        s.step(IDS[None, 6:7])
        s.step(IDS[None, 7:8])
    assert len(cache.prefix) == 2
    with cache.sequence() as s:
        s.prefill(some_ids((1, 13), seed=4))
        assert s.length == 13
    assert refs(cache) == len(cache.prefix)


def test_an_upstream_edit_invalidates_cached_blocks_and_undo_restores_them(model: gw.Model) -> None:
    cache = paged(model)

    def reused() -> int:
        with cache.sequence() as s:
            assert relative(s.prefill(IDS[None, :33])[0], model.logits(IDS[:33])[-1]) < 1e-5
            return s.reused

    assert reused() == 0
    for name, found in (("embed.weight", 0), ("lm_head.weight", 32)):
        with model.program.edit(name) as e:
            e.set_weight(name, lambda w: w * 1.5)
        assert reused() == found
        model.program.undo()
        assert reused() == 32


# -- after an edit -----------------------------------------------------------------------------------------------------
def test_stale_entries_are_refused_and_recomputed(model: gw.Model) -> None:
    cache = paged(model)
    s = cache.sequence()
    s.prefill(IDS[None, :20])
    with model.program.edit("an early MLP") as e:
        e.set_weight("layers.0.mlp.up.weight", lambda w: w * 1.5)
    with pytest.raises(StaleCache) as caught:
        s.step(IDS[None, 20:21])
    assert caught.value.layers == ("layers.1.attn.sdpa", "layers.2.attn.sdpa")
    assert s.length == 20
    fork = s.fork()
    fork.step(IDS[None, 20:21], allow_stale=True)
    assert fork.stale_runs == caught.value.layers
    model.reprefill(s)
    assert relative(s.step(IDS[None, 20:21]).to_numpy("float32")[0, 0], model.logits(IDS[:21])[-1]) < 1e-5
    with pytest.raises(StaleCache, match="a different model"):
        gw.open(model.directory).prefill(s, IDS[:2])


def test_after_a_head_is_removed_new_pools_are_made_once_no_block_is_in_use() -> None:
    p = uneven()
    cache = PagedCache(p, blocks=5, block=4)
    s = cache.sequence()
    s.prefill(np.arange(6)[None])
    with p.edit("the second attention reads one head of half the width") as e:
        e.set_weight("k1", lambda w: w[:4])
        e.set_weight("q1", lambda w: w[:16])
        for n in p.select("**", op="unflatten"):
            sizes = p.attrs(n)["sizes"]
            if sizes[1] == 8:
                e.set_attr(n, sizes=(sizes[0], 4))
    with pytest.raises(StaleCache):
        s.step(np.array([[1]]))
    with pytest.raises(StaleCache):
        cache.sequence().prefill(np.arange(6)[None])
    s.release()
    t = cache.sequence()
    last = t.prefill(np.arange(6)[None])
    assert relative(last[0], p.run(ids=np.arange(6)[None])["logits"].to_numpy()[0, -1]) < 1e-5


# -- faults and threads ------------------------------------------------------------------------------------------------
@EXECUTORS
def test_a_fault_at_any_call_changes_nothing(vm: bool, model: gw.Model, executor: Any) -> None:
    executor(vm)
    cache = paged(model, prefix_bytes=0)
    s = cache.sequence()
    s.prefill(IDS[None, :16])
    s.step(IDS[None, 16:17])
    s.truncate(16)
    (space,) = (w.space for (_, _, n), w in cache.steps.spaces.items() if n == 1)
    calls, bits = list(space.kernels.calls), [t.tobytes() for t in s.gather(1)]
    undisturbed = list(model.decode(s.fork(), 4))

    def fail() -> None:
        raise KeyboardInterrupt

    def failing_calls() -> Iterator[int]:
        for i in range(len(calls)):
            space.kernels.calls[i] = fail
            yield i
            space.kernels.calls[i] = calls[i]

    for _ in unknown_rows(space) if vm else failing_calls():
        with pytest.raises((ComputeError, KeyboardInterrupt)):
            s.step(IDS[None, 16:17])
        assert (s.length, len(s.table), cache.pool.used) == (16, 1, 1)
        assert [t.tobytes() for t in s.gather(1)] == bits
    assert list(model.decode(s, 4)) == undisturbed


def test_threads_may_decode_separate_sequences(model: gw.Model) -> None:
    cache = paged(model, tokens=900)
    parent = cache.sequence()
    parent.prefill(IDS[None, :20])
    expected, wrong = list(model.decode(parent.fork(), 6)), []

    def run() -> None:
        for _ in range(6):
            with parent.fork() as s:
                if list(model.decode(s, 6)) != expected:
                    wrong.append(1)

    threads = [Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    cache.prefix.clear()
    assert refs(cache) == len(parent.table)


# -- generating --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_generate_equals_a_manual_loop_and_transformers(name: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    m.eos_ids = ()
    cache = paged(m)
    prompt = IDS[:9]
    theirs = made(name).greedy(prompt, 32)
    one, two = (m.generate(prompt, 32, cache=c).ids for c in (cache.sequence(), None))
    s = cache.sequence()
    m.prefill(s, prompt)
    assert one == two == list(m.decode(s, 32)) == list(theirs)[:32]


def test_samples_share_one_prefill_and_free_their_blocks(model: gw.Model) -> None:
    cache = paged(model)
    with cache.sequence() as s:
        several = model.generate_many(IDS[:20], 3, 6, temperature=0.8, seed=5, cache=s)
        for i, sample in enumerate(several):
            alone = model.generate(IDS[:20], 6, temperature=0.8, seed=5, first_stream=i)
            assert sample.ids == alone.ids
    assert cache.holders() == []


def test_invalid_prompts_and_batches_are_refused(model: gw.Model) -> None:
    cache = paged(model)
    s = cache.sequence()
    with pytest.raises(PromptError):
        cache.step([s, s], np.array([[1], [1]]))
    with pytest.raises(PromptError):
        cache.step([s], np.array([[1], [1]]))
    with pytest.raises(BlockError):
        cache.step([paged(model).sequence()], np.array([[1]]))
    with pytest.raises(PromptError):
        s.step(np.array([[997]]))
    with pytest.raises(BlockError):
        s.lookup(0)
    assert s.length == 0
