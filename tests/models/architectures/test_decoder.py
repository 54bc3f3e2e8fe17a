"""Parity of every feature with transformers in float32 and with an independent float64 forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import checkpoints
import numpy as np
import pytest
import reference
from checkpoints import FEATURES, Made, relative, some_ids

import graphwright as gw
from graphwright.models.generation.cached_program import with_padding

IDS = some_ids((2, 37))
PADDED = np.stack([np.arange(37) >= 9, np.ones(37, bool)])
FAMILIES = ("llama", "mistral-window", "qwen2-windows", "qwen3")


@pytest.fixture(params=FEATURES)
def checkpoint(request: pytest.FixtureRequest, made: Callable[[str], Made]) -> Made:
    return made(request.param)


def test_logits_equal_transformers(checkpoint: Made) -> None:
    assert relative(gw.open(checkpoint.path).logits(IDS), checkpoint.logits(IDS)) < 5e-6


def test_padded_logits_equal_transformers(checkpoint: Made) -> None:
    ours, theirs = gw.open(checkpoint.path).logits(IDS, PADDED), checkpoint.logits(IDS, PADDED)
    assert relative(ours[PADDED], theirs[PADDED]) < 5e-6


@pytest.mark.parametrize("name", ["rope-dynamic", "rope-longrope-long"])
def test_padding_does_not_advance_positions(name: str, made: Callable[[str], Made]) -> None:
    """Only 12 true tokens: the frequencies are those of short inputs, at any position of the tokens."""
    c, mask = made(name), np.stack([np.arange(37) >= 25] * 2)
    ours = gw.open(c.path).logits(IDS, mask)
    assert relative(ours[mask], c.logits(IDS, mask)[mask]) < 5e-6
    assert relative(ours[:, 25:], gw.open(c.path).logits(IDS[:, 25:])) < 5e-6


@pytest.mark.parametrize("padded", [False, True])
def test_float64_program_equals_the_numpy_forward(checkpoint: Made, padded: bool) -> None:
    m = gw.open(checkpoint.path, dtype="float64", compute="float64")
    mask = PADDED if padded else np.ones_like(PADDED)
    p = with_padding(m.program) if padded else m.program
    extra: dict[str, Any] = {"mask": mask} if padded else {}
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    ours = p.run(ids=IDS, positions=positions, **extra)["logits"].to_numpy()
    assert ours.dtype == np.float64
    assert relative(ours[mask], reference.forward(checkpoint.path, IDS, mask)[mask]) < 1e-10


def test_greedy_ids_equal_transformers(checkpoint: Made) -> None:
    prompt, steps = IDS[0, :7], 24
    ours, theirs = gw.open(checkpoint.path).generate(prompt, steps), checkpoint.greedy(prompt, steps)
    assert ours.ids == theirs


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_stored_weights_are_widened_exactly(name: str, stored: str, tmp_path) -> None:
    family, fields = FEATURES[name]
    c = checkpoints.make(tmp_path, family, dtype=stored, **fields)
    m = gw.open(tmp_path)
    assert {m.program.spec(n).dtype.name for n in m.program.params()} == {stored}
    assert relative(m.logits(IDS), c.logits(IDS)) < 5e-6


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_low_precision_logits_match_float32_within_rounding(
    name: str, compute: str, made: Callable[[str], Made]
) -> None:
    m = gw.open(made(name).path, compute=compute)
    assert m.program.spec("layers.1.mid").dtype.name == compute
    assert relative(m.logits(IDS), made(name).logits(IDS)) < 3e-2


@pytest.mark.parametrize("rows", [4, 5, 6])
def test_window_counts_the_query_itself(rows: int, made: Callable[[str], Made]) -> None:
    """With window 5 the first of 5 rows still sees all, the 6th no longer the first."""
    c = made("mistral-window")
    ids = some_ids((1, rows))
    other = ids.copy()
    other[0, 0] = (ids[0, 0] + 1) % 97
    m = gw.open(c.path)
    with m.program.edit("one layer sees the embedding alone") as e:
        for i in (1, 2):
            for junction in ("mid", "out"):
                e.cut(m.program.in_edges(f"layers.{i}.{junction}")[1])
    a, b = m.logits(ids), m.logits(other)
    assert np.array_equal(a[0, -1], b[0, -1]) == (rows > 5)
    assert relative(gw.open(c.path).logits(ids), c.logits(ids)) < 5e-6


def test_sharded_and_single_files_give_equal_logits(made: Callable[[str], Made], tmp_path) -> None:
    family, fields = FEATURES["llama"]
    checkpoints.make(tmp_path, family, shard="60KB", **fields)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert np.array_equal(gw.open(tmp_path).logits(IDS), gw.open(made("llama").path).logits(IDS))


def test_one_token_as_row_or_batch_gives_equal_logits(made: Callable[[str], Made]) -> None:
    m = gw.open(made("qwen3").path)
    assert m.logits([5]).shape == (1, 97)
    assert m.logits([[5]]).shape == (1, 1, 97)
    assert relative(m.logits([5])[None], made("qwen3").logits(np.array([[5]]))) < 5e-6
