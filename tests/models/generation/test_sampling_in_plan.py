"""Ids that a step requests itself: those of the host, with nothing asked of it and nothing allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkpoints import some_ids

import graphwright as gw
from graphwright.array.cpu import tensor_allocations
from graphwright.errors import UsageError
from graphwright.models import NonFinite, PagedCache, Sampling, SamplingRequest

PROMPT = some_ids((7,))
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.4, "presence": 0.3, "frequency": 0.2},
    "drawn": {"temperature": 1.3, "seed": -5},
    "every rule": {
        "temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 2**63 + 7,
        "repetition_penalty": 1.2, "presence": 0.4, "frequency": 0.1,
    },
}  # fmt: skip


def filled(model: gw.Model, kind: str, ids: np.ndarray = PROMPT) -> Any:
    s: Any = model.new_cache(200, kind="static") if kind == "static" else model.new_cache(200).sequence()
    model.prefill(s, ids)
    return s


def on_host(s: Any, rule: Sampling, steps: int, stream: int = 0) -> list[int]:
    """Ids drawn from the logits that steps give."""
    start, found = s.length, []
    for _ in range(steps):
        tokens = s.tokens[0]
        found.append(rule.sample(s.last_logits()[0], s.length, stream, tokens[:start], tokens[start:]))
        s.step(np.array([found[-1:]]))
    return found


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("name", RULES)
def test_ids_sampled_in_the_plan_equal_those_of_the_host(
    name: str, kind: str, model: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = RULES[name]
    expected = on_host(filled(model, kind), Sampling(**rules), 40, 3)
    assert len(set(expected)) > 5
    asked = []
    sample = Sampling.sample
    monkeypatch.setattr(Sampling, "sample", lambda *args: asked.append(1) or sample(*args))
    assert list(model.decode(filled(model, kind), 40, stream=3, **rules)) == expected
    assert len(asked) == 1
    assert model.generate(PROMPT, 40, first_stream=3, cache=filled(model, kind), **rules).ids == expected
    assert len(asked) == 2


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("name", ["greedy", "every rule"])
def test_100_sampling_steps_allocate_no_tensor(name: str, kind: str, model: gw.Model) -> None:
    s, requests = filled(model, kind), (SamplingRequest(Sampling(**RULES[name]), prompt=len(PROMPT)),)

    def steps(count: int) -> None:
        for _ in range(count):
            s.step(s.sampled(requests)[None], requests=requests)

    steps(3)
    assert tensor_allocations(lambda: steps(100)) == []
    assert s.length == len(PROMPT) + 103


def test_a_batch_samples_the_same_ids_as_separate_runs(model: gw.Model) -> None:
    """Each by its own rules, and one leaves."""
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:], PROMPT[1:6]]
    cache = model.new_cache(400, kind="paged", prefix_bytes=0)
    batch = [cache.sequence() for _ in prompts]
    requests = [
        SamplingRequest(Sampling(**r), i, len(p)) for i, (r, p) in enumerate(zip(RULES.values(), prompts, strict=True))
    ]
    for s, p in zip(batch, prompts, strict=True):
        s.prefill(p[None])
    ids = np.array([s.sampled([d]) for s, d in zip(batch, requests, strict=True)])
    found = [[int(i)] for i in ids[:, 0]]
    for step in range(12):
        if step == 6:
            batch.pop(2)
        there = [i for i in range(4) if step < 6 or i != 2]
        cache.step(batch, [found[i][-1:] for i in there], requests=[requests[i] for i in there])
        for s, i in zip(batch, there, strict=True):
            found[i] += s.sampled([requests[i]]).tolist()
    for i, (rules, p) in enumerate(zip(RULES.values(), prompts, strict=True)):
        assert found[i] == model.generate(p, len(found[i]), first_stream=i, **rules).ids


def test_other_sampling_rules_need_no_new_plan(model: gw.Model) -> None:
    s = filled(model, "static")
    for rules in RULES.values():
        list(model.decode(s, 3, **rules))
    assert len(s.steps.spaces) == 2  # of the prompt and of a token


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_sampled_ids_are_dropped_with_their_entry(kind: str, model: gw.Model) -> None:
    rules = {**RULES["every rule"], "frequency": 2.0}
    s = filled(model, kind)
    mark = s.snapshot()
    for back in (lambda: s.truncate(len(PROMPT)), lambda: s.restore(mark)):
        list(model.decode(s, 30, **rules))
        back()
        again = {**rules, "seed": 3}
        assert list(model.decode(s, 30, **again)) == list(model.decode(filled(model, kind), 30, **again))
        s.truncate(len(PROMPT))


def test_after_an_edit_ids_are_sampled_again(model: gw.Model) -> None:
    s, greedy = filled(model, "static"), SamplingRequest()
    s.step(s.sampled([greedy])[None], requests=[greedy])
    with model.program.edit("turn the head") as e:
        e.set_weight("lm_head.weight", lambda w: -w)
    expected = int(np.argmax(model.logits(s.tokens)[0, -1]))
    assert next(model.decode(s, 1)) == expected


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_rules_that_give_non_finite_logits_raise_with_the_position(kind: str, model: gw.Model) -> None:
    """An id that was drawn once gains more than float32 holds: the second is drawn from infinity."""
    s = filled(model, kind)
    tokens = model.decode(s, 5, presence=-3e38, frequency=-3e38)
    first = next(tokens)
    with pytest.raises(NonFinite, match="after all rules") as caught:
        next(tokens)
    assert caught.value.where == "position 8"
    assert s.tokens[0].tolist() == [*PROMPT, first]
    assert list(model.decode(s, 5)) == list(model.decode(filled(model, kind, s.tokens[0, :8]), 5))


def test_processors_are_called_for_every_token(model: gw.Model) -> None:
    texts = []

    def noted(ids: np.ndarray, z: np.ndarray) -> np.ndarray:
        texts.append(ids.tolist())
        return z

    done = model.generate(PROMPT, 6, temperature=1.3, processors=[noted])
    assert texts == [[*PROMPT, *done.ids[:i]] for i in range(6)]
    assert done.ids == model.generate(PROMPT, 6, temperature=1.3).ids


def test_token_counts_grow_beyond_their_initial_capacity(model: gw.Model) -> None:
    """The pairs of (id, count) grow past 64; all 97 ids are seen."""
    text = np.concatenate([np.arange(97), PROMPT])
    rules: dict[str, Any] = {"repetition_penalty": 1.7, "frequency": 0.5}
    expected = on_host(filled(model, "static", text), Sampling(**rules), 10)
    assert list(model.decode(filled(model, "static", text), 10, **rules)) == expected


def test_every_sequence_needs_one_sampling_request(model: gw.Model) -> None:
    s = filled(model, "paged")
    with pytest.raises(UsageError, match="requests"):
        s.step(PROMPT[None, :1], requests=[SamplingRequest(), SamplingRequest()])
    with pytest.raises(UsageError, match="requests"):
        s.cache.step([s], PROMPT[None, :1], requests=[SamplingRequest(), SamplingRequest()])
    assert s.length == len(PROMPT)


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4}])
def test_texts_need_no_compiled_code(
    kind: Any, options: dict, model: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text() -> list[int]:
        cache = model.new_cache(60, kind=kind)
        one = cache.sequence() if isinstance(cache, PagedCache) else cache
        return model.generate(some_ids((1, 9))[0], 12, cache=one, **options).ids

    with_vm = text()
    monkeypatch.setenv("GRAPHWRIGHT_NATIVE", "0")
    monkeypatch.setattr("graphwright.array.vm.machine._compiled", lambda group: pytest.fail("compiles the VM"))
    assert text() == with_vm
