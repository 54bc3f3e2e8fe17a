"""Decoding token by token equals a forward pass over all tokens: results and lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.attention import NativeSparse, NativeSparseDecoder
from graphwright.errors import ShapeError, UsageError
from seeds import deep

DIM = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "tau": {},
    "tile": {"granularity": "tile"},
    "topn": {"select": "topn", "n": 2},
    "mlp, own kv": {"compressor": "mlp", "shared_kv": False},
    "capped": {"most": 2},
}


def module(dtype: str = "float32", **options: Any) -> NativeSparse:
    small = {"head_dim": 4, "summary": 8, "stride": 4, "block": 8, "window": 10}
    return NativeSparse(DIM, 4, 2, **{**small, **options}, name="nsa.", seed=0, qk_gain=3.0).to(dtype).eval()


def tokens(time: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, time, DIM)).astype(dtype)


def read(made: Any, row: int) -> list[list[int]]:
    """The blocks of a row for each sequence and key head."""
    blocks = made.choice.blocks.numpy()[:, :, row].reshape(-1, made.choice.blocks.shape[3])
    return [sorted(int(j) for j in found if j >= 0) for found in blocks]


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_one_by_one_equal_a_forward_pass(name: str) -> None:
    time = 300 if name == "tau" else deep(300, 90)
    m, x = module(**VARIANTS[name]), tokens(time)
    mod = np.random.default_rng(1).uniform(0.3, 3, (2, time)).astype("f4") if m.psi is not None else None
    whole = m.attend(gw.tensor(x), None if mod is None else gw.tensor(mod))
    decoder = NativeSparseDecoder(m, batch=2, capacity=time + 4)
    tile = m.block if m.granularity == "tile" else 1
    for t in range(time):
        step = None if mod is None else gw.tensor(mod[:, t : t + 1])
        made = decoder.attend(gw.tensor(x[:, t : t + 1]), step)
        assert np.abs(made.out.numpy()[:, 0] - whole.out.numpy()[:, t]).max() < 1e-5, t
        assert read(made, 0) == read(whole, t // tile), t
    assert int(decoder.length.numpy()) == time


@pytest.mark.parametrize("name", ["tau", "tile"])
def test_a_traced_decoder_is_a_program_with_states(name: str) -> None:
    m, x = module(**VARIANTS[name]), tokens(40)
    whole = m(gw.tensor(x)).numpy()
    p = gw.trace(NativeSparseDecoder(m, batch=2, capacity=40), gw.tensor(x[:, :1]))
    for t in range(40):
        out = np.asarray(p.run({"x": x[:, t : t + 1]}, keep="outputs")["out"])
        assert np.abs(out[:, 0] - whole[:, t]).max() < 1e-5, t


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt", [1, 5, 8, 31, 32, 45])
def test_a_prompt_in_one_pass_continues_as_token_by_token(name: str, prompt: int) -> None:
    m, x = module(**VARIANTS[name]), tokens(60)
    mod = np.random.default_rng(1).uniform(0.3, 3, (2, 60)).astype("f4") if m.psi is not None else None
    part = lambda a, b: None if mod is None else gw.tensor(mod[:, a:b])  # noqa: E731
    whole = m.attend(gw.tensor(x), part(0, 60))
    decoder, tile = NativeSparseDecoder(m, batch=2, capacity=64), m.block if m.granularity == "tile" else 1
    decoder.prefill(gw.tensor(x[:, 20:]))  # of other sequences
    first = decoder.prefill(gw.tensor(x[:, :prompt]), part(0, prompt))
    assert np.abs(first.numpy() - whole.out.numpy()[:, :prompt]).max() < 1e-5
    for t in range(prompt, min(60, prompt + deep(60, 13))):  # a block has 8 tokens
        made = decoder.attend(gw.tensor(x[:, t : t + 1]), part(t, t + 1))
        assert np.abs(made.out.numpy()[:, 0] - whole.out.numpy()[:, t]).max() < 1e-5, t
        assert read(made, 0) == read(whole, t // tile), t


def test_reset_begins_again() -> None:
    m, x = module(granularity="tile"), tokens(30)
    decoder = NativeSparseDecoder(m, 2, 30)
    first, second = [], []
    for results in (first, second):
        results += [decoder(gw.tensor(x[:, t : t + 1])).numpy() for t in range(30)]
        decoder.reset()
    assert np.array_equal(first, second)


def test_short_capacity_and_bad_operands_are_refused() -> None:
    m, x = module(), gw.tensor(tokens(1))
    decoder = NativeSparseDecoder(m, 2, 2)
    for _ in range(2):
        decoder(x)
    with pytest.raises(IndexError):
        decoder(x)
    with pytest.raises(ShapeError, match="decoder"):
        decoder(gw.tensor(tokens(2)))
    with pytest.raises(ShapeError, match="prompt"):
        decoder.prefill(gw.tensor(tokens(3)))
    with pytest.raises(UsageError, match="capacity 0"):
        NativeSparseDecoder(m, 2, 0)
