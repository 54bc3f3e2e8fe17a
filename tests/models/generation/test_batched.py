"""Greedy continuations of several prompts beside `generate` of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checkpoints import Made

import graphwright as gw
from graphwright.models import NonFinite, PromptError
from graphwright.models.generation.batched import GreedyBatch
from graphwright.models.generation.cache import StaticCache


def separate(model: gw.Model, prompts: list[np.ndarray], limits: list[int]) -> list[list[int]]:
    return [
        model.generate(ids, limit, deterministic=True).ids if limit else []
        for ids, limit in zip(prompts, limits, strict=True)
    ]


@pytest.mark.parametrize("feature", ["llama", "rope-dynamic", "mistral-window"])
def test_rows_of_any_lengths_are_those_of_generate(made: Callable[[str], Made], feature: str) -> None:
    model, rng = gw.open(made(feature).path), np.random.default_rng(0)
    model.eos_ids = tuple(range(0, 97, 9))
    batch = GreedyBatch(model, 4)
    for lengths, limits in (
        ([5, 5, 5], [3, 9, 20]),
        ([1, 17, 4, 4, 9, 30, 2], [20, 20, 1, 20, 0, 20, 20]),
        ([40, 3], [5, 20]),
        ([6], [1]),
    ):
        prompts = [rng.integers(0, 97, n) for n in lengths]
        found = batch(prompts, limits)
        assert [ids.tolist() for ids in found] == separate(model, prompts, limits)
        assert all(ids.dtype == np.int64 for ids in found)


def test_it_follows_the_weights_and_ends_where_the_model_ends(made: Callable[[str], Made]) -> None:
    model, rng = gw.open(made("llama").path), np.random.default_rng(1)
    prompts = [rng.integers(0, 97, n) for n in (4, 8, 6)]
    batch = GreedyBatch(model)
    before = batch(prompts, [24] * 3)
    assert [len(ids) for ids in before] == [24] * 3  # no token ends a text
    model.eos_ids = (int(before[1][5]),)
    (short,) = batch(prompts[1:2], [24])
    first = int(np.argmax(before[1] == before[1][5]))
    assert short.tolist() == before[1][: first + 1].tolist()
    model.eos_ids = ()
    with model.edit("other values") as e:
        e.set_weight("model.layers.1.mlp.down_proj.weight", lambda w: -3 * w)
    after = batch(prompts, [24] * 3)
    assert [ids.tolist() for ids in after] == separate(model, prompts, [24] * 3)
    assert [ids.tolist() for ids in after] != [ids.tolist() for ids in before]


def test_nothing_runs_long_after_all_rows_have_ended(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lengths = gw.open(made("llama").path), []
    prompts, advance = [np.array([5, 6, 7])] * 3, StaticCache.advance

    def counted(self: StaticCache, count: int, *rest: Any, **options: Any) -> np.ndarray:
        ids = advance(self, count, *rest, **options)
        lengths.append(ids.shape[1])
        return ids

    monkeypatch.setattr(StaticCache, "advance", counted)
    whole = GreedyBatch(model)(prompts, [60] * 3)[0]
    assert sum(lengths) == 59
    for at in (0, 1, 4, 20):
        lengths.clear()
        model.eos_ids = (int(whole[at]),)
        (found, *_) = GreedyBatch(model)(prompts, [60] * 3)
        assert sum(lengths) == -(-(len(found) - 1) // 16) * 16


def test_bad_prompts_and_weights_are_typed_errors(made: Callable[[str], Made]) -> None:
    model = gw.open(made("llama").path)
    batch = GreedyBatch(model)
    for ids in ([], [97], [-1], [0.5]):
        with pytest.raises(PromptError):
            batch([np.array([1, 2]), np.array(ids)], [3, 3])
    assert batch([], []) == []
    with model.edit("a NaN") as e:
        e.set_weight("model.norm.weight", lambda w: w * np.nan)
    with pytest.raises(NonFinite):
        batch([np.array([1, 2])], [3])
