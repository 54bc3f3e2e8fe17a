"""Rotary frequencies: both spellings, what a config leaves out, and what it must not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graphwright.models import ConfigError
from graphwright.models.architectures.architecture import Config
from graphwright.models.architectures.rope import KINDS, read_rope

FULL: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 2.0, 3.0, 4.0, 5.0],
        "long_factor": [2.0, 2.0, 3.0, 4.0, 9.0],
    },
    "proportional": {"partial_rotary_factor": 0.7, "factor": 2.0},
}


def config(**fields: Any) -> Config:
    return Config({"max_position_embeddings": 64, **fields}, b"", Path("config.json"))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_frequencies_equal_transformers(kind: str) -> None:
    rope = read_rope(config(rope_parameters={"rope_type": kind, "rope_theta": 700.0, **FULL[kind]}), 10)
    theirs = transformers.LlamaConfig(
        hidden_size=60,
        num_attention_heads=6,
        head_dim=10,
        max_position_embeddings=64,
        rope_parameters={"rope_type": kind, "rope_theta": 700.0, **FULL[kind]},
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    np.testing.assert_allclose(rope.frequencies, frequencies.numpy(), rtol=3e-7)
    assert rope.scale == pytest.approx(scale)
    assert rope.frequencies.dtype == np.float32


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "proportional"])
def test_wide_frequencies_equal_the_formulas(kind: str) -> None:
    fields = {"rope_type": kind, "rope_theta": 700.0, **FULL.get(kind, {})}
    wide = read_rope(config(rope_parameters=fields), 10).wide
    assert wide is not None
    frequencies, scale = reference.rope({"rope_parameters": fields, "max_position_embeddings": 64}, 10, 10)
    np.testing.assert_allclose(wide.frequencies, frequencies, rtol=1e-14)
    assert wide.scale == pytest.approx(scale, rel=1e-15)
    if wide.long is not None:
        beyond = reference.rope({"rope_parameters": fields, "max_position_embeddings": 64}, 10, 17)[0]
        np.testing.assert_allclose(wide.long, beyond, rtol=1e-14)


@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", list(FULL))
def test_both_config_forms_give_equal_frequencies(kind: str, name: str) -> None:
    new = read_rope(config(rope_parameters={"rope_type": kind, "rope_theta": 700.0, **FULL[kind]}), 10)
    old = read_rope(config(rope_theta=700.0, rope_scaling={name: kind, **FULL[kind]}), 10)
    assert (new.kind, new.theta, new.scale) == (old.kind, old.theta, old.scale)
    np.testing.assert_array_equal(new.frequencies, old.frequencies)


def test_rope_scaling_wins_over_rope_parameters() -> None:
    both = config(
        rope_parameters={"rope_type": "yarn", "rope_theta": 9.0, "factor": 3.0},
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    rope = read_rope(both, 8)
    assert (rope.kind, rope.theta) == ("linear", 10000.0)


PECULIAR: dict[str, dict[str, Any]] = {
    "both spellings": {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}, "rope_scaling": FULL["linear"]},
    "both, one with type": {
        "rope_theta": 300.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
        "rope_scaling": {"type": "linear", "factor": 3.0},
    },
    "part of the head, by default": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "part of the head, outside": {"partial_rotary_factor": 0.3},
    **{
        f"{kind}, original length twice": {
            "rope_theta": 500.0,
            "original_max_position_embeddings": 24,
            "rope_scaling": {"rope_type": kind, **FULL[kind]},
        }
        for kind in ("llama3", "yarn", "longrope")
    },
    "both names of the kind": {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
    "theta inside and outside": {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
}


@pytest.mark.parametrize("name", PECULIAR)
def test_unusual_fields_are_read_as_by_transformers(name: str) -> None:
    fields = json.dumps({"max_position_embeddings": 64, "head_dim": 10, "hidden_size": 60, **PECULIAR[name]})
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict({"num_attention_heads": 6, **json.loads(fields)}))
    rope = read_rope(config(**json.loads(fields)), 10)
    np.testing.assert_allclose(rope.frequencies, theirs.original_inv_freq.numpy(), rtol=1e-6)
    assert rope.scale == pytest.approx(theirs.attention_scaling)
    if rope.long is not None:
        assert rope.original == theirs.config.to_dict()["rope_parameters"]["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("fields", "theta"), [({}, 10000.0), ({"rope_theta": None}, 10000.0), ({"rope_theta": 5e5}, 5e5)]
)
def test_theta_may_be_absent_null_or_explicit(fields: dict[str, Any], theta: float) -> None:
    for scaling in ({}, {"rope_scaling": None}, {"rope_parameters": None}):
        rope = read_rope(config(**fields, **scaling), 8)
        assert (rope.kind, rope.theta, rope.scale) == ("default", theta, 1.0)


def test_the_yarn_factor_follows_from_the_lengths() -> None:
    silent = read_rope(config(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 16}), 10)
    explicit = read_rope(
        config(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 16, "factor": 4.0}), 10
    )
    np.testing.assert_array_equal(silent.frequencies, explicit.frequencies)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "unheard", "factor": 2.0}},
        {"rope_scaling": {"type": None, "factor": 2.0}},
        {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
        {"rope_scaling": "linear"},
        {"rope_parameters": [1]},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_theta": "big"},
        {"rope_theta": 0},
        {"rope_theta": True},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "linear", "factor": -1}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        {"rope_scaling": {**FULL["longrope"], "rope_type": "longrope", "short_factor": [1.0]}},
        {"rope_scaling": {**FULL["longrope"], "rope_type": "longrope", "long_factor": ["a"] * 5}},
        {"rope_scaling": {**FULL["yarn"], "rope_type": "yarn", "beta_fast": "x"}},
        {"rope_scaling": {**FULL["yarn"], "rope_type": "yarn", "attention_factor": float("inf")}},
        {"rope_scaling": {**FULL["yarn"], "rope_type": "yarn", "attention_factor": -1}},
        {"rope_scaling": {**FULL["yarn"], "rope_type": "yarn", "truncate": "x"}},
        {"partial_rotary_factor": 0.3, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 3.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 10**400},
        {"rope_theta": 1e-300},
        {"rope_theta": 1, "rope_scaling": {**FULL["yarn"], "rope_type": "yarn"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 1e-320}},
        {"rope_scaling": {**FULL["longrope"], "rope_type": "longrope", "original_max_position_embeddings": 1}},
        {"max_position_embeddings": 0},
    ],
    ids=lambda f: json.dumps(f)[:40],
)
def test_invalid_fields_raise_config_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rope(config(**fields), 10)
    assert caught.value.where == "config.json"
    assert caught.value.expected is not None
