"""Bits per byte against scores of whole windows by transformers."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Made, make

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.models import PromptError
from graphwright.models.tokenizer import byte_tokenizer_json

TEXT = topics.topics["yield"][:500] + "é😀"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path: Path = tmp_path_factory.mktemp("bytewise")
    made = make(path, "llama", vocab_size=256, max_position_embeddings=512)
    (path / "tokenizer.json").write_text(byte_tokenizer_json())
    return made


def nats(made: Made, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """Σ -ln p over every token but the first, each scored in the first window that reaches it."""
    total, upto, start = 0.0, 1, 0
    window = min(window, len(ids))
    while upto < len(ids):
        start = min(start, len(ids) - window)
        piece = ids[start : start + window]
        logp = torch.log_softmax(torch.tensor(made.logits(np.array([piece]))[0]).double(), -1)
        for at in range(upto - start, window):
            total -= float(logp[at - 1, piece[at]])
        upto, start = start + window, start + stride
    return total, len(ids) - 1


@pytest.mark.parametrize(
    ("length", "window", "stride"),
    [(2, 32, 16), (20, 32, 16), (32, 32, 16), (33, 32, 16), (100, 32, 16), (None, 64, 48), (300, 256, 128)],
)
def test_perplexity_and_bits_per_byte_match_transformers(
    bytewise: Made, length: int | None, window: int, stride: int
) -> None:
    m = gw.open(bytewise.path)
    text = TEXT[:length]
    ids = list(text.encode())
    done = m.perplexity(text, window=window, stride=stride)
    expected, count = nats(bytewise, ids, window, stride)
    assert (done.tokens, done.bytes) == (count, count)
    assert done.nats == pytest.approx(expected, rel=1e-5)
    assert done.bits_per_byte == pytest.approx(expected / log(2) / count, rel=1e-5)
    assert done.perplexity == pytest.approx(exp(expected / count), rel=1e-5)
    assert "bits per byte" in str(done)


def test_progress_is_reported(bytewise: Made) -> None:
    seen = []
    gw.open(bytewise.path).perplexity(TEXT, window=32, stride=16, progress=seen.append)
    assert seen[-1].done == seen[-1].total
    assert [p.done for p in seen] == sorted(p.done for p in seen)


@pytest.mark.parametrize("text", ["", "a"])
def test_too_short_texts_are_refused(text: str, bytewise: Made) -> None:
    with pytest.raises(PromptError):
        gw.open(bytewise.path).perplexity(text)


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 0), (8, 9), (0, 1)])
def test_invalid_windows_and_strides_are_refused(window: int, stride: int, bytewise: Made) -> None:
    with pytest.raises(UsageError):
        gw.open(bytewise.path).perplexity(TEXT, window=window, stride=stride)


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 2.5}, {"window": "a"}, {"window": 32, "stride": 1.5}])
def test_options_of_wrong_types_are_refused(options: dict[str, Any], bytewise: Made) -> None:
    with pytest.raises(UsageError, match=next(reversed(options))):
        gw.open(bytewise.path).perplexity(TEXT, **options)


def test_texts_and_ids_are_scored_as_windows_of_their_own(bytewise: Made, tmp_path: Path) -> None:
    m = gw.open(bytewise.path)
    parts = [TEXT[:90], TEXT[90:130], TEXT[130:160]]
    apart = [m.perplexity(part, window=32, stride=16) for part in parts]
    rows = [list(part.encode()) for part in parts]
    for given in (parts, rows):
        done = m.perplexity(given, window=32, stride=16, batch=3)
        assert done.nats == pytest.approx(sum(one.nats for one in apart), rel=1e-6)
        assert (done.tokens, done.bytes) == (sum(o.tokens for o in apart), sum(o.bytes for o in apart))
    ids = np.array(rows[0])
    for given in (ids, ids[None], gw.tensor(ids), ids.tolist()):
        assert m.perplexity(given, window=32, stride=16) == apart[0]
    m.tokenizer = None
    blind = m.perplexity(ids, window=32, stride=16)
    assert blind.nats == apart[0].nats
    assert (blind.bytes, np.isnan(blind.bits_per_byte)) == (0, True)
    assert str(blind).startswith("perplexity ")
    with pytest.raises(UsageError, match="without a tokenizer"):
        m.perplexity(TEXT)
    with pytest.raises(PromptError, match="neither text nor token ids"):
        m.perplexity(np.ones((2, 8)))
    with pytest.raises(PromptError, match="text 1"):
        m.perplexity([rows[0], [3]])


def test_a_format_applies_to_both_figures(bytewise: Made) -> None:
    done = gw.open(bytewise.path).perplexity(TEXT[:60])
    assert f"{done:.2f}".startswith(f"{done.bits_per_byte:.2f} bits per byte (perplexity {done.perplexity:.2f}, ")
    assert f"{done}" == str(done)
