"""The KV cache: equal to uncached runs at every step, and going back."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cache_bits import rows, state
from checkpoints import Made, relative, some_ids

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.models import CacheFull, NonFinite, PagedCache, PromptError, StaleCache
from graphwright.models.generation.cached_program import LENGTH
from graphwright.models.inspect import flops

IDS = some_ids((2, 47))


# -- the same numbers --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mistral-window", "qwen2-windows", "qwen3", "rope-yarn"])
def test_40_steps_equal_uncached_logits(name: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    whole, cache = m.logits(IDS), m.new_cache(47, batch=2, kind="static")
    first = cache.step(IDS[:, :7], all_logits=True).to_numpy("float32")
    assert relative(first, whole[:, :7]) < 1e-5
    for t in range(7, 47):
        step = cache.step(IDS[:, t : t + 1]).to_numpy("float32")
        assert step.shape == (2, 1, 97)
        assert relative(step[:, 0], whole[:, t]) < 1e-5
    np.testing.assert_array_equal(cache.tokens, IDS)
    assert cache.length == 47


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama", "float32"),
        ("llama-tied", "bfloat16"),
        ("llama-tied", "int8"),
        ("mistral-window", "bfloat16"),
        ("qwen2-windows", "int8"),
        ("qwen3", "float32"),
        ("rope-yarn", "bfloat16"),
    ],
)
def test_a_decode_step_is_one_native_call(name: str, weights: str, kind: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path, dtype="bfloat16" if weights == "bfloat16" else "float32", compute="float32")
    if weights == "int8":
        m.quantize()
    cache: Any = m.new_cache(20, kind=cast("Any", kind))
    rows = cache if kind == "static" else cache.sequence()
    for ids in (IDS[:1, :3], IDS[:1, 3:4]):
        rows.step(ids)
    space = cache.steps.spaces[True, 1, 1].space
    assert len(space.kernels.calls) == space.plan.schedule.dispatches == 1, space.plan.segments
    assert space.kernels.fed is not None, "it reads its inputs in place"


def test_40_steps_in_float64_equal_uncached_logits(made: Callable[[str], Made]) -> None:
    m = gw.open(made("qwen2-windows").path, dtype="float64", compute="float64")
    positions = np.broadcast_to(np.arange(47), (2, 47)).copy()
    whole = m.program.run(ids=IDS, positions=positions)["logits"].to_numpy()
    cache = m.new_cache(47, batch=2, kind="static")
    cache.step(IDS[:, :7])
    for t in range(7, 47):
        assert relative(cache.step(IDS[:, t : t + 1]).to_numpy()[:, 0], whole[:, t]) < 1e-10


def test_a_bfloat16_cache_matches_uncached_logits(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path, compute="bfloat16")
    whole, cache = m.logits(IDS), m.new_cache(47, batch=2, kind="static")
    assert cache.nbytes == 2 * 47 * m.inspect().kv_bytes_per_token + 8
    cache.step(IDS[:, :20])
    for t in range(20, 47):
        assert relative(cache.step(IDS[:, t : t + 1]).to_numpy("float32")[:, 0], whole[:, t]) < 3e-2


@pytest.mark.parametrize("chunk", [1, 7, 16, 47, 512])
def test_chunked_prefill_equals_one_prefill(chunk: int, model: gw.Model) -> None:
    whole, cache = model.new_cache(47, batch=2, kind="static"), model.new_cache(47, batch=2, kind="static")
    expected = whole.step(IDS).to_numpy("float32")[:, -1]
    assert relative(model.prefill(cache, IDS, chunk=chunk), expected) < 1e-5
    for i in range(3):
        for ours, theirs in zip(
            rows(cache, f"layers.{i}.attn.sdpa"), rows(whole, f"layers.{i}.attn.sdpa"), strict=True
        ):
            assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", ["rope-dynamic", "rope-longrope-long"])
def test_dynamic_rope_frequencies_are_those_of_the_whole_prompt(name: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    theirs = made(name).logits(IDS)[:, -1]
    assert relative(m.prefill(m.new_cache(47, batch=2, kind="static"), IDS, chunk=7), theirs) < 5e-6


def test_model_that_no_longer_reads_its_ids_still_generates(model: gw.Model) -> None:
    p = model.program
    with p.edit("cut both branches") as e:
        for edge in p.in_edges("layers.2.out"):
            e.cut(edge)
    assert not model.logits(IDS).any()
    assert not model.logits(IDS, np.ones_like(IDS)).any()
    assert not model.prefill(model.new_cache(9, batch=2, kind="static"), IDS[:, :9]).any()
    assert model.generate(IDS[0, :9], 3).ids == [0, 0, 0]


def test_head_runs_on_the_last_row_only(model: gw.Model) -> None:
    cache = model.new_cache(47, kind="static")
    last = cache.step(IDS[:1]).to_numpy("float32")
    cache.reset()
    whole = cache.step(IDS[:1], all_logits=True).to_numpy("float32")
    assert (last.shape, whole.shape) == ((1, 1, 97), (1, 47, 97))
    assert relative(last[:, 0], whole[:, -1]) < 1e-6
    counted = [flops(cache.steps.derived(last_only).program, {"B": 1, "T": 47}) for last_only in (True, False)]
    assert counted[1] - counted[0] == 2 * 46 * 48 * 97 - 2 * 97  # from the last row an id is drawn


def test_reprefill_gives_the_bits_of_a_fresh_prefill(model: gw.Model) -> None:
    cache = model.new_cache(47, batch=2, kind="static")
    for t in range(30):
        cache.step(IDS[:, t : t + 1])
    with model.program.edit("upstream") as e:
        e.set_weight("layers.0.mlp.up.weight", lambda w: w * 1.5)
    model.reprefill(cache)
    fresh = model.new_cache(47, batch=2, kind="static")
    model.prefill(fresh, IDS[:, :30])
    assert state(cache) == state(fresh)
    np.testing.assert_array_equal(cache.last_logits(), fresh.last_logits())


# -- unequal layers ----------------------------------------------------------------------------------------------------
def test_caches_support_layers_of_different_sizes_and_without_attention(model: gw.Model) -> None:
    """Layer 0 keeps one of two groups, layer 1 has narrower values, layer 2 no attention."""
    p = model.program
    with p.edit("prune") as e:
        for n in "kv":
            e.set_weight(f"layers.0.attn.{n}.weight", lambda w: w[:10])
        e.set_weight("layers.0.attn.q.weight", lambda w: w[:30])
        e.set_weight("layers.0.attn.o.weight", lambda w: w[:, :30])
        for n, count in (("q", 3), ("k", 1), ("v", 1)):
            e.set_attr(f"layers.0.attn.{n}_split", sizes=(count, 10))
        e.set_weight("layers.1.attn.v.weight", lambda w: w[:14])
        e.set_attr("layers.1.attn.v_split", sizes=(2, 7))
        e.set_weight("layers.1.attn.o.weight", lambda w: w[:, :42])
        e.cut(p.in_edges("layers.2.mid")[1])
    whole, cache = model.logits(IDS), model.new_cache(47, batch=2, kind="static")
    shapes = {k: v.shape for k, v in cache.variables.items() if k != LENGTH}
    assert shapes == {
        "cache.layers.0.attn.sdpa.k": (2, 1, 47, 10),
        "cache.layers.0.attn.sdpa.v": (2, 1, 47, 10),
        "cache.layers.1.attn.sdpa.k": (2, 2, 47, 10),
        "cache.layers.1.attn.sdpa.v": (2, 2, 47, 7),
    }
    cache.step(IDS[:, :9])
    for t in range(9, 47):
        assert relative(cache.step(IDS[:, t : t + 1]).to_numpy("float32")[:, 0], whole[:, t]) < 1e-5


def test_one_cache_follows_an_edit_of_its_shapes(model: gw.Model) -> None:
    cache = model.new_cache(47, kind="static")
    model.prefill(cache, IDS[:1, :9])
    with model.program.edit("cut attention") as e:
        e.cut(model.program.in_edges("layers.1.mid")[1])
    model.reprefill(cache)
    assert len(cache.variables) == 5
    assert relative(cache.last_logits(), model.logits(IDS[:1, :9])[:, -1]) < 1e-5
    model.program.undo()
    model.reprefill(cache)
    assert len(cache.variables) == 7
    assert relative(cache.last_logits(), model.logits(IDS[:1, :9])[:, -1]) < 1e-5


@pytest.mark.parametrize("change", [{"causal": False}])
def test_non_causal_attention_cannot_be_cached(change: dict, model: gw.Model) -> None:
    with model.program.edit("look ahead") as e:
        e.set_attr("layers.1.attn.sdpa", **change)
    with pytest.raises(UsageError) as caught:
        model.new_cache(9, kind="static")
    assert caught.value.where == "layers.1.attn.sdpa"


# -- going back --------------------------------------------------------------------------------------------------------
def test_restore_accepts_snapshots_only(model: gw.Model) -> None:
    with pytest.raises(UsageError, match="Snapshot"):
        model.new_cache(4, kind="static").restore(3)  # pyright: ignore[reportArgumentType]  # wrong on purpose


def test_truncate_snapshot_and_restore_are_exact(model: gw.Model) -> None:
    cache = model.new_cache(47, kind="static")
    model.prefill(cache, IDS[:1, :10])
    mark, bits = cache.snapshot(), state(cache)
    futures = []
    for _ in range(2):
        futures.append(list(model.decode(cache, 5)))
        cache.restore(mark)
        assert state(cache) == bits
    assert futures[0] == futures[1]
    cache.truncate(4)
    with pytest.raises(UsageError) as caught:
        cache.restore(mark)
    assert "prefill" in str(caught.value.fix)
    cache.step(IDS[:1, 20:26])  # ten rows again, others
    with pytest.raises(UsageError, match="overwritten"):
        cache.restore(mark)
    with pytest.raises(CacheFull) as full:
        cache.truncate(11)
    assert full.value.expected == "0..10"
    with pytest.raises(UsageError, match="out of range") as wrong:
        cache.truncate(-1)
    assert not isinstance(wrong.value, CacheFull)
    assert wrong.value.where == "length"


def test_entries_past_the_length_are_not_read(model: gw.Model) -> None:
    """NaN rows left by a spoilt model would pass a mask that multiplies by zero."""
    cache = model.new_cache(20, kind="static")
    model.prefill(cache, IDS[:1, :5])
    with model.program.edit("spoil") as e:
        e.set_weight("layers.2.attn.v.weight", lambda w: w * np.nan)
    with pytest.raises(NonFinite):
        model.reprefill(cache)
    model.program.undo()
    model.reprefill(cache)
    expected = model.logits(IDS[:1, :5])[:, -1]
    assert relative(cache.last_logits(), expected) < 1e-5
    for key, variable in cache.variables.items():
        if key != LENGTH:
            assert not variable.numpy()[:, :, 5:].any()


def test_overflow_is_refused_and_the_cache_unchanged(model: gw.Model) -> None:
    cache = model.new_cache(8, kind="static")
    model.prefill(cache, IDS[:1, :6])
    bits = state(cache)
    for attempt in (lambda: cache.step(IDS[:1, :3]), lambda: cache.prefill(IDS[:1, :3], chunk=1)):
        with pytest.raises(CacheFull) as caught:
            attempt()
        assert (caught.value.expected, caught.value.got) == ("<= 2", 3)
        assert state(cache) == bits
    cache.step(IDS[:1, 6:8])
    assert cache.length == cache.capacity


@pytest.mark.parametrize(
    "ids", [np.zeros((1, 0), np.int64), np.array([[97]]), np.array([[-1]]), np.array([[0.5]]), np.array([[1], [2]])]
)
def test_ids_are_checked_before_anything_is_written(ids: np.ndarray, model: gw.Model) -> None:
    cache = model.new_cache(8, kind="static")
    model.prefill(cache, IDS[:1, :3])
    bits = state(cache)
    with pytest.raises(PromptError):
        cache.step(ids)
    assert state(cache) == bits


def test_empty_cache_has_no_logits(model: gw.Model) -> None:
    with pytest.raises(PromptError):
        model.new_cache(4, kind="static").last_logits()
    for sizes in ((0, 1), (4, 0)):
        with pytest.raises(UsageError):
            model.new_cache(*sizes, kind="static")
    with pytest.raises(UsageError):
        model.new_cache(4, kind="static").prefill(IDS[:1, :2], chunk=0)


@pytest.mark.parametrize("vm", [True, False])
def test_casts_of_weights_are_shared_by_all_executables(
    vm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkpoints import make

    if not vm:
        monkeypatch.setenv("GRAPHWRIGHT_NATIVE", "0")
    make(tmp_path, "llama", dtype="bfloat16")
    m = gw.open(tmp_path)
    cache = m.new_cache(9, kind="static")
    for n in (3, 1, 2):
        cache.step(IDS[:1, :n])
    spaces = [fed.space for fed in cache.steps.spaces.values()]
    assert len(spaces) == 3
    folded = [{id(s) for s in w.kernels._memory.values()} for w in spaces]
    assert folded[0] == folded[1] == folded[2]
    assert (len(folded[0]) > 10) != vm  # the VM reads matrices as they are stored
    weight = m.program.weights["lm_head.weight"]
    for times in (2, 4):  # the first write copies the mapped weight, the second is in place
        before = m.logits(IDS[:1, :3])[:, -1]
        weight.assign((weight.to("float32") * 2).to("bfloat16"))
        cache.reset()
        assert relative(cache.step(IDS[:1, :3]).to_numpy("float32")[:, -1], 2 * before) < 1e-5, times


def test_deterministic_steps_have_the_same_bits_with_and_without_native_code(tmp_path: Path) -> None:
    from checkpoints import make

    make(tmp_path, "llama", dtype="bfloat16")
    found: dict[str, list[Any]] = {}
    for native in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRAPHWRIGHT_NATIVE", native)
            m = gw.open(tmp_path)
            caches = [m.new_cache(30, kind=kind, deterministic=True) for kind in ("static", "paged")]
            bits = [m.prefill(c.sequence() if isinstance(c, PagedCache) else c, IDS[:1, :9]).tobytes() for c in caches]
            result = m.generate(IDS[0, :9], 8, deterministic=True, logprobs=1)
            found[native] = [bits, result.ids, result.logprobs]
            kinds = {s.kind for c in caches for fed in c.steps.spaces.values() for s in fed.space.plan.segments}
            assert kinds == {"aten"}
    assert found["0"] == found["1"]


def test_a_given_cache_must_be_deterministic_if_the_text_is_to_be(model: gw.Model) -> None:
    with pytest.raises(UsageError, match=r"new_cache\(tokens, deterministic=True\)"):
        model.generate(IDS[0, :4], 2, cache=model.new_cache(20, kind="static"), deterministic=True)
    cache = model.new_cache(20, kind="static", deterministic=True)
    assert model.generate(IDS[0, :4], 2, cache=cache, deterministic=True).ids == model.generate(IDS[0, :4], 2).ids


def test_caches_of_one_size_share_their_plans(model: gw.Model) -> None:
    a, b, c = model.new_cache(20, kind="static"), model.new_cache(20, kind="static"), model.new_cache(30, kind="static")
    assert a.steps.derived() is b.steps.derived() is not c.steps.derived()
    model.prefill(a, IDS[:1, :5])
    model.prefill(b, IDS[:1, 5:10])
    plans = [next(iter(cache.steps.spaces.values())).space.plan for cache in (a, b)]
    assert plans[0] is plans[1]
    assert not np.array_equal(a.last_logits(), b.last_logits())
    for cache, ids in ((a, IDS[:1, :5]), (b, IDS[:1, 5:10])):
        assert relative(cache.last_logits(), model.logits(ids)[:, -1]) < 1e-5


def test_cache_of_another_model_is_refused(model: gw.Model, made: Callable[[str], Made]) -> None:
    other = gw.open(made("llama").path, compute="bfloat16")
    cache = model.new_cache(9, kind="static")
    model.prefill(cache, [1, 2])
    for attempt in (
        lambda: other.prefill(cache, [3]),
        lambda: other.generate([1, 2], 2, cache=cache),
        lambda: list(other.decode(cache, 1)),
        lambda: other.reprefill(cache),
    ):
        with pytest.raises(StaleCache, match="a different model"):
            attempt()
    assert cache.length == 2


@pytest.mark.parametrize("capacity", [1.5, "9", 10**15])
def test_invalid_capacities_are_refused(capacity: Any, model: gw.Model) -> None:
    with pytest.raises(UsageError) as caught:
        model.new_cache(capacity, kind="static")
    assert caught.value.where == "tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", "3"),
        ("max_new_tokens", 1.5),
        ("logprobs", 2.5),
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("seed", 1.5),
        ("cache", 3),
    ],
)
def test_options_of_invalid_types_are_refused(name: str, value: Any, model: gw.Model) -> None:
    options: dict[str, Any] = {"max_new_tokens": 2, name: value}
    with pytest.raises(UsageError):
        model.generate([1, 2], **options)


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_100_steps_allocate_no_tensor(kind: str, model: gw.Model) -> None:
    from graphwright.array.cpu import tensor_allocations

    cache: Any = model.new_cache(160, kind="static") if kind == "static" else model.new_cache(160).sequence()
    token = IDS[:1, :1]
    for _ in range(3):
        cache.step(token)
    assert tensor_allocations(lambda: [cache.step(token) for _ in range(100)]) == []
    assert cache.length == 103


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_prompts_of_lengths_5_1_1_5_use_two_plans(kind: str, model: gw.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphwright.plan import make_plan

    made: list[Any] = []
    whole = model.logits(IDS[:1, :12])[0]
    cache: Any = model.new_cache(30, kind="static") if kind == "static" else model.new_cache(30).sequence()

    def counted(p: gw.Program, *args: Any, **options: Any) -> Any:
        made.append(p)
        return make_plan(p, *args, **options)

    monkeypatch.setattr(import_module("graphwright.plan.compile"), "make_plan", counted)
    done = 0
    for rows_now in (5, 1, 1, 5):
        logits = cache.step(IDS[:1, done : done + rows_now]).to_numpy("float32")[0, -1]
        done += rows_now
        assert relative(logits, whole[done - 1]) < 1e-5
    assert len(made) == 2
    assert len(set(made)) == 1  # of one program, over the same states


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("value", [-1, 0, 2**45, 2**62, 2**70, 1.5, "8", True, float("nan"), b"x", [3], np.array(5)])
def test_impossible_sizes_of_a_cache_are_usage_errors(model: gw.Model, kind: Any, value: Any) -> None:
    new_cache: Any = model.new_cache
    with pytest.raises(UsageError) as caught:
        new_cache(value, kind=kind)
    assert caught.value.got is not None
    with pytest.raises(UsageError, match="batch"):
        new_cache(8, value, kind=kind)
    if kind == "paged":
        for name in ("blocks", "nbytes"):
            if name == "blocks" or not isinstance(value, int) or value < 2**45:
                with pytest.raises(UsageError):
                    new_cache(**{name: value})
        for none in ({"block": None}, {"block": value}, {"batch": None}):
            with pytest.raises(UsageError):
                new_cache(8, **none)
