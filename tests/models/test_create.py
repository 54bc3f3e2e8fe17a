"""A model from a config alone: first values per name, and a model that transformers takes as its own."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import torch
import transformers

import graphwright as gw
from graphwright.models import ConfigError, UnsupportedArchitecture
from graphwright.models.export.write import write_model
from graphwright.models.open import config_from, create
from graphwright.models.tokenizer import need_tokenizer

FIELDS = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **checkpoints.SIZES}


def test_initial_values_are_normal_numbers_ones_and_zeros():
    fields = {**FIELDS, "attention_bias": True, "mlp_bias": True, "initializer_range": 0.1, "vocab_size": 2000}
    m = create(config_from(fields), seed=3)
    for key in m.program.weights:
        if key == "rope.frequencies":
            continue
        value = m.program.weights.array(key)
        host = value.to_numpy()
        assert value.dtype is gw.float32
        if key.endswith(".bias"):
            assert not host.any()
        elif host.ndim == 1:
            assert (host == 1).all()
        else:
            assert host.std() == pytest.approx(0.1, rel=0.05)
            assert abs(host.mean()) < 0.005
    a, b = (m.program.weights.array(f"model.layers.{i}.mlp.up_proj.weight").to_numpy() for i in (0, 1))
    assert not np.array_equal(a, b)


def test_a_seed_determines_all_weights_and_more_layers_change_none():
    first = create(config_from(FIELDS), seed=1)
    assert first.program.hash() == create(config_from(FIELDS), seed=1).program.hash()
    assert first.program.hash() != create(config_from(FIELDS), seed=2).program.hash()
    deeper = create(config_from({**FIELDS, "num_hidden_layers": 5}), seed=1)
    for key in first.program.weights:
        a, b = (m.program.weights.array(key).to_numpy() for m in (first, deeper))
        np.testing.assert_array_equal(a, b)


CREATED = [
    pytest.param(*item, marks=pytest.mark.deep if item[0].startswith("qwen2") else [])
    for item in checkpoints.CLASSES.items()
]


@pytest.mark.parametrize(("family", "name"), CREATED)
def test_transformers_loads_a_created_model(tmp_path, family, name):
    fields = {**FIELDS, "architectures": [f"{name}ForCausalLM"], "model_type": family, "head_dim": 8}
    m = create(config_from(fields), seed=1)
    (tmp_path / "out").mkdir()
    write_model(m, tmp_path / "out")
    theirs, facts = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # a pair
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    ids = checkpoints.some_ids((2, 9))
    with torch.no_grad():
        assert checkpoints.relative(m.logits(ids), theirs(torch.tensor(ids)).logits.numpy()) < 2e-5


def test_a_vocabulary_of_bytes_gets_the_byte_tokenizer():
    assert create(config_from(FIELDS)).tokenizer is None
    m = create(config_from({**FIELDS, "vocab_size": 256}))
    assert need_tokenizer(m).encode("hé") == [104, 195, 169]


def test_inconsistent_configs_are_refused():
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        create(config_from({**FIELDS, "num_key_value_heads": 4}))
    with pytest.raises(UnsupportedArchitecture):
        create(config_from({**FIELDS, "architectures": ["MadeUpForCausalLM"], "model_type": "made_up"}))
