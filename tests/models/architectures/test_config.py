"""Config fields absent, null and explicit; both ages of config; wrong values."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from checkpoints import CLASSES, SIZES, Made, edit_config, some_ids

import graphwright as gw
from graphwright.models import ConfigError, ModelNotFound, TensorMismatch, architectures
from graphwright.models.architectures.architecture import Config
from seeds import DEEP

PLAIN = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
IDS = some_ids((1, 9))


def dims(family: str, **fields: Any) -> Any:
    config = Config({"model_type": family, **PLAIN, **fields}, b"", Path("config.json"))
    return architectures()[family].read(config)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize(
    "field",
    [
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "sliding_window",
    ],
)
def test_absent_fields_take_the_default_of_the_class(family: str, field: str) -> None:
    heads = {"num_attention_heads": 32, "hidden_size": 320}
    theirs = getattr(transformers, f"{CLASSES[family]}Config")(**{**PLAIN, **heads})
    ours = dims(family, **heads)
    if field == "sliding_window":
        assert ours.windows == ((4096,) * 3 if family == "mistral" else (None,) * 3)
        return
    name = {
        "num_key_value_heads": "kv_heads",
        "tie_word_embeddings": "tied",
        "hidden_act": "activation",
        "rms_norm_eps": "eps",
        "max_position_embeddings": "positions",
    }.get(field, field)
    expected = getattr(theirs, field, None)
    assert getattr(ours, name) == (theirs.hidden_size // theirs.num_attention_heads if expected is None else expected)


@pytest.mark.parametrize("family", CLASSES)
def test_null_fields_follow_from_the_other_sizes(family: str) -> None:
    ours = dims(
        family,
        num_key_value_heads=None,
        head_dim=None,
        tie_word_embeddings=None,
        hidden_act=None,
        rms_norm_eps=None,
        sliding_window=None,
    )
    assert (ours.kv_heads, ours.head_dim, ours.tied) == (6, 8, False)
    eps = getattr(transformers, f"{CLASSES[family]}Config")().rms_norm_eps
    assert (ours.activation, ours.eps, ours.windows) == ("silu", eps, (None,) * 3)


@pytest.mark.parametrize("family", CLASSES)
def test_explicit_fields_are_kept(family: str) -> None:
    head_dim = 8 if family == "olmoe" else 14  # it normalises hidden_size entries
    ours = dims(
        family,
        num_key_value_heads=3,
        head_dim=head_dim,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.5,
        max_position_embeddings=17,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    )
    assert (ours.kv_heads, ours.head_dim, ours.tied, ours.activation) == (3, head_dim, True, "gelu")
    assert (ours.eps, ours.positions) == (0.5, 17)
    every, some = dict.fromkeys(("mistral", "mixtral", "qwen3_moe"), (7,) * 3), {"qwen2_moe": (7, None, None)}
    none = dict.fromkeys(("llama", "olmoe"), (None,) * 3)
    assert ours.windows == {**every, **some, **none}.get(family, (None, 7, 7))


def test_layer_types_take_precedence_over_max_window_layers() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    ours = dims(
        "qwen2",
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=0,
        layer_types=types,
    )
    assert ours.windows == (7, None, None)


def test_the_window_is_off_unless_enabled() -> None:
    assert dims("qwen2", num_key_value_heads=2, sliding_window=7, max_window_layers=0).windows == (None,) * 3
    assert dims("qwen3", num_key_value_heads=2, sliding_window=7, max_window_layers=0).windows == (None,) * 3


def test_both_spellings_of_a_config_give_equal_logits(made: Callable[[str], Made], copy: Callable[[str], Path]) -> None:
    path = copy("rope-llama3")
    config = json.loads((path / "config.json").read_text())
    new = dict(config["rope_parameters"])
    theta = new.pop("rope_theta")
    edit_config(path, remove=("rope_parameters", "dtype"), rope_theta=theta, rope_scaling=new, torch_dtype="float32")
    np.testing.assert_array_equal(gw.open(path).logits(IDS), gw.open(made("rope-llama3").path).logits(IDS))


def test_the_config_keeps_the_raw_bytes(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama").path)
    assert m.config.raw == (made("llama").path / "config.json").read_bytes()
    assert m.config["vocab_size"] == 97
    assert len(m.config) == len(list(m.config))
    assert "attention_bias" in repr(m.config)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": "48"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": "snake"}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "full_attention", "square"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"head_dim": 7}, "rotated entries"),
        ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window"),
    ],
)
def test_invalid_values_raise_config_error(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dims("qwen2", **{"num_key_value_heads": 2, **fields})
    assert named in caught.value.what
    assert caught.value.where == "config.json"
    assert caught.value.expected is not None
    assert caught.value.got is not None or None in fields.values()


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', "\xff", '"' + "x" * (9 << 20) + '"', "[" * 40])
def test_unreadable_configs_raise_config_error(text: str, copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    (path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        gw.open(path)
    assert caught.value.where == str(path / "config.json")
    assert caught.value.got
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_config_raises_config_error(copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    (path / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="config"):
        gw.open(path)


UNREAD = {"pretraining_tp"}  # it splits products without changing them


@pytest.mark.parametrize("family", CLASSES)
def test_sizes_are_checked_against_the_headers_before_anything_grows_with_them(
    family: str, copy: Callable[[str], Path]
) -> None:
    path = copy(family)
    fields = json.loads((path / "config.json").read_text())
    sizes = [name for name, value in fields.items() if type(value) is int]
    assert {"num_hidden_layers", "vocab_size", "num_attention_heads"} <= set(sizes)
    values = [2**20, 2**63, 0, -1, "8", None]
    values += [100_000, 2**31, 10**30, 1.5, True, math.nan, [], {}] if DEEP else []
    refused = set()
    tracemalloc.start()
    try:
        for name in sizes:
            for value in values:
                (path / "config.json").write_text(json.dumps({**fields, name: value}))
                tracemalloc.reset_peak()
                try:
                    gw.open(path)
                except (ConfigError, TensorMismatch):
                    refused.add(name)
                assert tracemalloc.get_traced_memory()[1] < 100 << 20, (name, value)
    finally:
        tracemalloc.stop()
    assert refused >= {name for name in sizes if not name.endswith("_token_id") and name not in UNREAD}
