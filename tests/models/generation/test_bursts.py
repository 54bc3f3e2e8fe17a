"""Several tokens in one go: the same ids, logits, texts and cache as token by token, wherever the text ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkpoints import some_ids

import graphwright as gw
from graphwright.errors import NonFinite, UsageError
from graphwright.models import Sampling, SamplingRequest

PROMPT = some_ids((3, 7))


def filled(m: gw.Model, rule: Sampling, rows: int = 1) -> tuple[Any, list[SamplingRequest]]:
    cache: Any = m.new_cache(60, rows, kind="static")
    requests = [SamplingRequest(rule, row, 7) for row in range(rows)]
    cache.step(PROMPT[:rows], requests=requests)
    return cache, requests


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("rule", [Sampling(), Sampling(temperature=1.2, seed=4, top_k=30)], ids=["greedy", "drawn"])
def test_ids_of_a_burst_equal_those_of_single_steps(rule: Sampling, rows: int, model: gw.Model) -> None:
    cache, requests = filled(model, rule, rows)
    other, _ = filled(model, rule, rows)
    for burst in (1, 5, 2, 9):
        ids = cache.advance(burst, requests)
        for i in range(burst):
            token = other.sampled(requests)[:, None]
            assert ids[:, i : i + 1].tolist() == token.tolist()
            other.step(token, requests=requests)
        assert cache.length == other.length
        assert cache.tokens.tolist() == other.tokens.tolist()
        assert cache.last_logits().tobytes() == other.last_logits().tobytes()
        assert all(
            np.array_equal(a.data.to_numpy(), other.variables[key].data.to_numpy())
            for key, a in cache.variables.items()
        )


def test_a_burst_stops_at_the_capacity(model: gw.Model) -> None:
    cache, requests = filled(model, Sampling())
    assert cache.advance(1000, requests).shape == (1, cache.capacity - 7)
    assert cache.length == cache.capacity


def in_bursts(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("graphwright.models.generation.generate.BURST", seconds)


@pytest.mark.parametrize("end", ["length", "eos", "stop"])
def test_a_text_ends_at_the_same_token_with_the_same_cache(
    end: str, byte_model: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {"temperature": 1.4, "seed": 3}
    found = byte_model.generate("abc", 30, **drawn)
    if end == "eos":
        monkeypatch.setattr(byte_model, "eos_ids", (found.ids[17],))
    if end == "stop":
        drawn["stop"] = found.text[11:13]
    made = []
    for seconds in (0.0, 1.0):
        in_bursts(monkeypatch, seconds)
        cache: Any = byte_model.new_cache(64, kind="static")
        pieces: list[str] = []
        done = byte_model.generate("abc", 30, cache=cache, stream=pieces.append, **drawn)
        assert done.finish_reason == end
        assert "".join(pieces) == done.text
        assert len(done.token_s) == len(done.ids)
        made.append((done.ids, done.text, cache.tokens.tolist(), cache.variables["cache.length"].item()))
    assert made[0] == made[1]
    assert len(made[0][0]) < 30 or end == "length"


def test_an_error_in_a_callback_leaves_the_tokens_before_it(
    byte_model: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = byte_model.generate("abc", 20).ids
    in_bursts(monkeypatch, 1.0)
    cache: Any = byte_model.new_cache(64, kind="static")
    pieces: list[str] = []

    def fail(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        byte_model.generate("abc", 20, cache=cache, stream=fail, stop=["never in this text"])
    held = cache.tokens[0, 3:].tolist()
    assert held == expected[: len(held)]
    assert byte_model.generate([*b"abc", *held], 20 - len(held), cache=cache).ids == expected[len(held) :]


def test_a_result_that_is_not_finite_leaves_the_cache_as_it_was(model: gw.Model) -> None:
    m = model.with_program(model.program.fork())
    cache, requests = filled(m, Sampling())
    ids = cache.advance(6, requests)[0]
    with m.program.edit("break the row of the fourth id") as e:
        e.set_weight("embed.weight", lambda w: np.where(np.arange(len(w))[:, None] == ids[3], np.inf, w))
    cache, _ = filled(m, Sampling())
    with pytest.raises(NonFinite):
        cache.advance(6, requests)
    assert cache.tokens.tolist() == PROMPT[:1].tolist()
    assert cache.length == cache.variables["cache.length"].item() == 7


@pytest.mark.parametrize("count", [1, 4])
def test_a_burst_needs_one_request_per_sequence(count: int, model: gw.Model) -> None:
    cache, requests = filled(model, Sampling(), 3)
    for wrong in ((), requests[:2], [*requests, requests[0]]):
        with pytest.raises(UsageError, match="sampling requests"):
            cache.advance(count, wrong)
    assert cache.length == 7
