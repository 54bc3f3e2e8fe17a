"""Generation: equal to a decoding loop and to transformers, with a given cache, and its record."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from time import sleep
from typing import Any
from weakref import ref

import numpy as np
import pytest
from checkpoints import Made, some_ids

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.models import CacheFull, NonFinite, PromptError, Sampling
from graphwright.models.generation.generate import GenerationOptions
from graphwright.models.generation.text import vocabulary
from graphwright.models.metrics import log_softmax
from graphwright.plan import Plan

pytestmark = pytest.mark.usefixtures("young_heap")

PROMPT = some_ids((7,))


def forcing(text: bytes, after: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A processor that makes the output these bytes."""

    def force(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        forced = np.full_like(z, -1e4)
        forced[text[(len(ids) - after) % len(text)]] = 0
        return forced

    return force


# -- equal to other ways -----------------------------------------------------------------------------------------------
def test_the_sampling_rules_are_a_part_of_the_options() -> None:
    assert GenerationOptions(temperature=0.5, stop="x").sampling == Sampling(temperature=0.5)


def test_generate_equals_a_decoding_loop_and_full_runs(model: gw.Model) -> None:
    done = model.generate(PROMPT, 20)
    cache, ids = model.new_cache(40, kind="static"), list(PROMPT)
    logits = model.prefill(cache, PROMPT)[0]
    for token in done.ids:
        assert token == int(np.argmax(logits)) == int(np.argmax(model.logits(ids)[-1]))
        ids.append(token)
        logits = cache.step(np.array([[token]])).to_numpy("float32")[0, -1]
    cache.reset()
    model.prefill(cache, PROMPT)
    assert list(model.decode(cache, 20)) == done.ids
    assert (done.finish_reason, done.prompt_tokens, done.cache_tokens) == ("length", 7, 26)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-windows", "qwen3"])
def test_64_greedy_ids_equal_transformers(name: str, made: Callable[[str], Made]) -> None:
    m, c = gw.open(made(name).path), made(name)
    ours, theirs = m.generate(PROMPT, 64).ids, c.greedy(PROMPT, 64)
    if ours != theirs:  # only where two tokens are as good
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        top = np.sort(m.logits([*PROMPT, *ours[:at]])[-1])[-2:]
        pytest.fail(f"{name} differs at {at}, margin {top[1] - top[0]:.2e}")


def test_equal_seeds_give_equal_ids_and_other_seeds_other_ids(model: gw.Model) -> None:
    a, b, c = (model.generate(PROMPT, 30, temperature=1.5, seed=s).ids for s in (4, 4, 5))
    assert a == b != c


def test_sample_i_equals_a_single_run_with_stream_i(model: gw.Model) -> None:
    runs = 0
    original = gw.models.StaticCache.prefill

    def counted(self: gw.models.StaticCache, *args: Any, **options: Any) -> np.ndarray:
        nonlocal runs
        runs += 1
        return original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gw.models.StaticCache, "prefill", counted)
        several = model.generate_many(PROMPT, 4, 12, temperature=1.5, seed=2)
    assert runs == 1
    assert [g.stream for g in several] == [0, 1, 2, 3]
    assert len({tuple(g.ids) for g in several}) == 4
    for i, sample in enumerate(several):
        assert model.generate(PROMPT, 12, temperature=1.5, seed=2, first_stream=i).ids == sample.ids


def test_decode_samples_the_same_tokens_as_generate(model: gw.Model) -> None:
    cache = model.new_cache(40, kind="static")
    model.prefill(cache, PROMPT)
    rules = {"temperature": 1.3, "seed": 6, "repetition_penalty": 1.2, "presence": 0.4}
    assert list(model.decode(cache, 15, stream=2, **rules)) == model.generate(PROMPT, 15, first_stream=2, **rules).ids


def test_logprobs_equal_an_uncached_run(model: gw.Model) -> None:
    done = model.generate(PROMPT, 9, temperature=1.0, top_k=5, logprobs=3)
    rows = model.logits([*PROMPT, *done.ids])[len(PROMPT) - 1 : -1]
    for i, token in enumerate(done.ids):
        expected = log_softmax(rows[i])
        assert done.logprobs[i] == pytest.approx(expected[token], abs=1e-5)
        assert [t for t, _ in done.top[i]] == np.argsort(-expected, kind="stable")[:3].tolist()
        np.testing.assert_allclose([p for _, p in done.top[i]], np.sort(expected)[::-1][:3], atol=1e-5)


# -- a given cache -----------------------------------------------------------------------------------------------------
def test_the_cache_is_reused_up_to_the_common_prefix(model: gw.Model) -> None:
    cache = model.new_cache(60, kind="static")
    first = model.generate(PROMPT, 8, cache=cache)
    assert (first.reused_tokens, first.cache_tokens, first.cache_capacity) == (0, 14, 60)
    longer = [*PROMPT, *first.ids, 5]
    second = model.generate(longer, 8, cache=cache)
    assert (second.reused_tokens, second.ids) == (14, model.generate(longer, 8).ids)
    other = [*PROMPT[:3], 1, 2]
    third = model.generate(other, 8, cache=cache)
    assert (third.reused_tokens, third.ids) == (3, model.generate(other, 8).ids)
    assert model.generate(other[:2], 4, cache=cache).reused_tokens == 1  # one token is always run


def test_prompts_longer_than_the_cache_are_refused(model: gw.Model) -> None:
    cache = model.new_cache(5, kind="static")
    cache.prefill(PROMPT[None, :2])
    with pytest.raises(PromptError) as caught:
        model.generate(PROMPT, 3, cache=cache)
    assert (caught.value.expected, caught.value.got, cache.length) == ("<= 5", 7, 2)


def test_full_cache_error_contains_the_text_so_far(byte_model: gw.Model) -> None:
    whole = byte_model.generate("hello", 30, processors=[forcing(b"text ", 5)])
    cache = byte_model.new_cache(12, kind="static")
    with pytest.raises(CacheFull) as caught:
        byte_model.generate("hello", 30, cache=cache, processors=[forcing(b"text ", 5)])
    assert caught.value.partial == whole.text[:8]
    assert cache.length == 12


def test_cache_of_several_sequences_is_refused(model: gw.Model) -> None:
    cache = model.new_cache(9, batch=2, kind="static")
    with pytest.raises(PromptError):
        model.generate(PROMPT, 2, cache=cache)
    with pytest.raises(PromptError):
        next(model.decode(cache, 1))


# -- the record --------------------------------------------------------------------------------------------------------
def test_generate_keeps_no_model_alive(made: Callable[[str], Made]) -> None:
    model = gw.open(made("llama").path)
    model.generate(PROMPT, max_new_tokens=2)
    program = ref(model.program)
    del model
    gc.collect()
    assert program() is None


def test_set_up_is_timed_apart_from_the_prompt_and_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pause = gw.open("bundled"), 0.25
    slow: list[None] = []
    executable = Plan.new_executable

    def slow_executable(plan: Plan, variables: Any) -> object:
        slow.append(sleep(pause))
        return executable(plan, variables)

    monkeypatch.setattr(Plan, "new_executable", slow_executable)
    first = model.generate("to be, or", 3)
    assert len(slow) == 2  # a plan for the prompt, and one for a token
    assert first.setup_s >= 2 * pause
    assert max(first.prefill_s, first.decode_s, *first.token_s) < pause


def test_the_result_records_bytes_times_and_options(model: gw.Model) -> None:
    done = model.generate(PROMPT, 5, temperature=0.7, seed=3)
    touched = sum(m.bytes for m in model.inspect().tensors) - 96 * 48 * 4  # one row of the embedding
    assert done.bytes_per_token == touched + model.inspect().kv_bytes_per_token * (7 + 11) // 2
    assert done.sampling == Sampling(temperature=0.7, seed=3)
    assert done.prefill_s > 0
    assert done.decode_s > 0
    assert done.tokens_per_s == pytest.approx(4 / done.decode_s)
    assert len(done.token_s) == 5
    assert 0 < sum(done.token_s) <= done.decode_s
    assert done.reached(1e9) == pytest.approx(done.tokens_per_s * done.bytes_per_token / 1e9)
    assert len(done.fingerprint) == 32
    assert done.stale_layers == ()
    assert json.loads(json.dumps(done.to_json()))["ids"] == done.ids
    assert str(done) == ""
    with model.program.edit("head alone") as e:
        e.set_weight("lm_head.weight", lambda w: w * 2)
    assert model.generate(PROMPT, 5).fingerprint == done.fingerprint
    with model.program.edit("embedding") as e:
        e.set_weight("embed.weight", lambda w: w * 2)
    assert model.generate(PROMPT, 5).fingerprint != done.fingerprint


def test_a_tied_embedding_is_counted_once(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama-tied").path)
    done = m.generate(PROMPT, 1)
    assert done.bytes_per_token == m.inspect().nbytes + m.inspect().kv_bytes_per_token * 7


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "prompt", [[], np.zeros((1, 0), int), [97], [-1], [1.5], [[1, 2], [3, 4]], [[1], [2, 3]], ["a"]]
)
def test_invalid_prompts_are_refused(prompt: object, model: gw.Model) -> None:
    with pytest.raises(PromptError):
        model.generate(prompt, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": -1},
        {"logprobs": -1},
        {"top_p": 0.0},
        {"temperature": -1.0},
        {"stop": [""]},
        {"stop": "x"},
        {"stop": None},
        {"stop": [1]},
        {"stream": True},
        {"cancel": 3},
        {"first_stream": "a"},
        {"processors": None},
    ],
)
def test_options_out_of_range_are_refused(options: dict, model: gw.Model) -> None:
    with pytest.raises(UsageError):
        model.generate(PROMPT, **options)


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_numbers_of_samples_out_of_range_are_refused(n: int, model: gw.Model) -> None:
    with pytest.raises(UsageError, match="n: "):
        model.generate_many(PROMPT, n)


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"steps": 1.5}, {"stream": "x"}])
def test_invalid_arguments_of_decode_are_refused(wrong: dict, model: gw.Model) -> None:
    cache = model.new_cache(8, kind="static")
    model.prefill(cache, PROMPT)
    with pytest.raises(UsageError, match=next(iter(wrong))):
        model.decode(cache, **wrong)
    for call in (cache.truncate, lambda n: cache.prefill(PROMPT[None], chunk=n)):
        with pytest.raises(UsageError):
            call(1.5)  # pyright: ignore[reportArgumentType]  # wrong on purpose
    assert cache.length == len(PROMPT)


def test_a_nan_weight_is_named_and_the_cache_unchanged(model: gw.Model) -> None:
    """A NaN in a row of the embedding shows only when that token is chosen."""
    whole = model.generate(PROMPT, 12).ids
    at = next(i for i, t in enumerate(whole) if t not in PROMPT.tolist())
    key = model.program.key(model.program.node("embed.weight"))

    def spoil(w: np.ndarray) -> np.ndarray:
        w[whole[at], 5] = np.nan
        return w

    with model.program.edit("spoil") as e:
        e.set_weight("embed.weight", spoil)
    cache = model.new_cache(30, kind="static")
    with pytest.raises(NonFinite) as caught:
        model.generate(PROMPT, 12, cache=cache)
    assert caught.value.where == key
    assert "1 values" in str(caught.value.got)
    assert cache.tokens[0].tolist() == [*PROMPT, *whole[:at]]
    model.program.undo()
    model.reprefill(cache)
    assert list(model.decode(cache, 12 - at)) == whole[at:]


def test_an_open_edit_changes_the_vocabulary_until_it_is_rolled_back() -> None:
    program = gw.open("bundled").program

    def failing_edit() -> None:
        with program.edit("more rows") as e:
            e.set_weight("embed.weight", lambda w: np.concatenate([w, w[:10]]))
            assert vocabulary(program) == 266
            raise ZeroDivisionError

    assert vocabulary(program) == 256
    with pytest.raises(ZeroDivisionError):
        failing_edit()
    assert vocabulary(program) == 256


def test_reprs_count_long_lists(model: gw.Model) -> None:
    done = gw.open("bundled").generate("to be, or not to be", 100)
    plan = model.program.compile(ids=(1, 4), positions=(1, 4))
    assert repr(done).startswith("GenerationResult(")
    assert "100 tokens, length" in repr(done)
    assert repr(model.keys).startswith(f"{{{len(model.keys)} entries")
    assert repr(plan.instrs).startswith(f"({len(plan.instrs)} entries")
    assert max(len(repr(value)) for value in (done, model.keys, plan.instrs)) < 400
    assert model.keys == dict(model.keys)
