"""Every way in which generation ends, and the state it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_config, some_ids

import graphwright as gw
from graphwright.models import ConfigError, PromptError, Sampling

PROMPT = some_ids((7,))


def forcing(text: bytes, after: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A processor that makes the output these bytes."""

    def force(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        forced = np.full_like(z, -1e4)
        forced[text[(len(ids) - after) % len(text)]] = 0
        return forced

    return force


# -- ends --------------------------------------------------------------------------------------------------------------
def test_generating_zero_tokens_returns_an_empty_result(byte_model: gw.Model) -> None:
    done = byte_model.generate("abc", 0)
    assert (done.ids, done.text, done.finish_reason, done.prompt_tokens) == ([], "", "length", 3)


def test_eos_as_first_token_ends_generation(model: gw.Model, copy: Callable[[str], Path]) -> None:
    first = model.generate(PROMPT, 1).ids[0]
    path = copy("llama")
    edit_config(path, eos_token_id=[first, 3])
    done = gw.open(path).generate(PROMPT, 9)
    assert (done.ids, done.finish_reason) == ([first], "eos")


def test_eos_of_generation_config_is_used_without_a_tokenizer(model: gw.Model, copy: Callable[[str], Path]) -> None:
    ids = model.generate(PROMPT, 12).ids
    path = copy("llama")
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ids[4], "do_sample": True, "temperature": 0.6})
    )
    m = gw.open(path)
    done = m.generate(PROMPT, 12)
    assert done.ids == ids[: ids.index(ids[4]) + 1]
    assert (done.finish_reason, done.sampling.temperature) == ("eos", 0.0)


def test_model_defaults_are_used_on_request_only(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    fields = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 9,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_length": 3,
    }
    (path / "generation_config.json").write_text(json.dumps(fields))
    m = gw.open(path)
    assert m.generate(PROMPT, 3).sampling == Sampling()
    used = m.generate(PROMPT, 3, use_model_defaults=True, top_k=4)
    assert used.sampling == Sampling(temperature=0.6, top_k=4, top_p=0.9, repetition_penalty=1.1)
    assert used.to_json()["sampling"]["temperature"] == 0.6
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 0.9}))  # and no temperature
    assert gw.open(path).generate(PROMPT, 3, use_model_defaults=True).sampling == Sampling(temperature=1, top_p=0.9)
    (path / "generation_config.json").write_text(json.dumps({**fields, "do_sample": False}))
    assert gw.open(path).generate(PROMPT, 3, use_model_defaults=True).sampling == Sampling(repetition_penalty=1.1)
    (path / "generation_config.json").write_text(json.dumps({"do_sample": "no"}))
    with pytest.raises(ConfigError, match="do_sample"):
        gw.open(path).generate(PROMPT, 3, use_model_defaults=True)


def test_stop_string_cuts_text_and_keeps_ids(byte_model: gw.Model) -> None:
    pieces: list[str] = []
    force = forcing(b"one<END>two", 2)
    done = byte_model.generate("ab", 30, processors=[force], stop=["<END>", "zzz"], stream=pieces.append)
    assert (done.text, done.finish_reason, bytes(done.ids)) == ("one", "stop", b"one<END>")
    assert "".join(pieces) == "one"
    assert byte_model.generate("ab", 30, processors=[force], stop="<END>").text == "one"


def test_streamed_pieces_add_up_to_the_text(byte_model: gw.Model) -> None:
    pieces: list[str] = []
    done = byte_model.generate("ab", 20, processors=[forcing("né😀".encode(), 2)], stream=pieces.append)
    assert "".join(pieces) == done.text == "né😀né😀né\ufffd"  # the last character was not finished


def test_empty_text_is_refused_with_a_fix(byte_model: gw.Model) -> None:
    with pytest.raises(PromptError, match="the prompt is empty") as caught:
        byte_model.generate("", 5)
    assert caught.value.fix == "give text, or the start token as ids: [0]"


def test_cancel_is_called_before_each_token(model: gw.Model) -> None:
    whole = model.generate(PROMPT, 10).ids
    for at in range(10):
        asked = iter([False] * at + [True])
        done = model.generate(PROMPT, 10, cancel=lambda asked=asked: next(asked))
        assert (done.ids, done.finish_reason) == (whole[:at], "cancelled")


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_cancelled_generation_continues_with_the_same_ids(kind: str, model: gw.Model) -> None:
    rules = {"temperature": 1.2, "seed": 8}
    whole = model.generate(PROMPT, 8, **rules).ids
    for at in range(8):
        cache: Any = model.new_cache(40, kind="static") if kind == "static" else model.new_cache(40).sequence()
        asked = iter([False] * at + [True])
        begun = model.generate(PROMPT, 8, cache=cache, cancel=lambda asked=asked: next(asked), **rules).ids
        rest = model.generate([*PROMPT, *begun], 8 - at, cache=cache, **rules)
        assert begun + rest.ids == whole
        assert rest.reused_tokens == len(PROMPT) + max(at - 1, 0) - (at == 0)  # what was chosen last had not been run


def test_generation_can_be_cancelled_from_another_thread(byte_model: gw.Model) -> None:
    byte_model.eos_ids = ()
    seen, stop = Event(), Event()

    def cancel() -> None:
        seen.wait()
        stop.set()

    def piece(text: str) -> None:
        seen.set()
        stop.wait()  # the next question is asked after the other thread's answer

    other = Thread(target=cancel)
    other.start()
    done = byte_model.generate("abc", 30, stream=piece, cancel=stop.is_set, processors=[forcing(b"x", 3)])
    other.join()
    assert (done.finish_reason, done.text) == ("cancelled", "x")


def test_closing_the_iterator_leaves_a_usable_cache(model: gw.Model) -> None:
    whole = model.generate(PROMPT, 10).ids
    for at in range(1, 10):
        cache = model.new_cache(20, kind="static")
        model.prefill(cache, PROMPT)
        tokens = model.decode(cache, 10)
        begun = [next(tokens) for _ in range(at)]
        tokens.close()
        assert cache.tokens[0].tolist() == [*PROMPT, *begun]
        assert begun + list(model.decode(cache, 10 - at)) == whole


def test_exception_in_stream_leaves_a_usable_cache(byte_model: gw.Model) -> None:
    whole = byte_model.generate("hello", 12).ids
    for at in range(3):
        cache, calls = byte_model.new_cache(40, kind="static"), 0

        def boom(piece: str, at: int = at) -> None:
            nonlocal calls
            calls += 1
            if calls > at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            byte_model.generate("hello", 12, stream=boom, cache=cache)
        assert cache.tokens[0].tolist() == [*b"hello", *whole][: cache.length]
        again = byte_model.generate("hello", 12, cache=cache)
        assert (again.ids, again.reused_tokens) == (whole, 4)
