"""A small model of two blocks whose heads and experts each token chooses. Not a test file."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.autograd import Tensor
from graphwright.models.open import config_from, create

VOCAB, WIDTH, HEADS, EXPERTS = 101, 16, 6, 8
FIELDS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip


class Decoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        given = {"heads": HEADS, "head_dim": 4, "experts": EXPERTS, "hidden": 6, "k0": 2, **options}
        self.embed = nn.Embedding(VOCAB, WIDTH, name="embed.", seed=3)
        self.layers = [ex.DynONN(WIDTH, **given, name=f"layers.{i}.", seed=i) for i in range(2)]
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False, name="lm_head.", seed=5)

    def forward(self, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions=positions)
        return {"logits": self.lm_head(self.norm(x))}


def some_ids(batch: int, time: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, time))


def dynamic_model(**options: Any) -> gw.Model:
    """A calibrated model; options are those of `DynONN`."""
    ids = some_ids(4, 32, seed=0)
    feeds = {"ids": ids, "positions": np.broadcast_to(np.arange(32), ids.shape).copy()}
    p = gw.trace(Decoder(**options), *feeds.values(), sizes=dict.fromkeys(feeds, ("B", "T")))
    ex.calibrate(p, feeds, k0=2)
    return create(config_from(FIELDS)).with_program(p)
