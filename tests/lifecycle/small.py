"""Small models for these tests: a transformer, and tables whose predictions are known."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright.models.open import config_from, create

FIELDS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 15,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.1, "eos_token_id": 13,
    "pad_token_id": 14,
}  # fmt: skip


def transformer(seed: int = 0, **fields: Any) -> gw.Model:
    """A decoder of two layers over the tokens of grid tasks."""
    return create(config_from({**FIELDS, **fields}), seed=seed)


def bigram(logits: np.ndarray) -> gw.Model:
    """A model whose logits depend on the last token only: row i of `logits` [V, V] after token i."""
    b = gw.Builder("bigram")
    ids = b.input("ids", ("B", "T"), "int64")
    table = b.param("table", np.asarray(logits, np.float32))
    b.output(b.embedding(table, ids, name="scores"), name="logits")
    model = transformer()
    return model.with_program(b.build())


def follows(pairs: dict[int, int], size: int = 15, sure: float = 30.0) -> gw.Model:
    """A bigram model that continues token a with pairs[a], and is unsure after the other tokens."""
    logits = np.zeros((size, size))
    for a, b in pairs.items():
        logits[a, b] = sure
    return bigram(logits)
