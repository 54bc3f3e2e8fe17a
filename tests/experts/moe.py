"""A small language model with two routed layers, as a program with named sizes."""

from __future__ import annotations

import numpy as np

import graphwright as gw
from graphwright import nn
from graphwright.autograd import Tensor
from graphwright.ops import call
from graphwright.program.program import Program

VOCAB, DIM, HIDDEN, EXPERTS, K = 31, 12, 8, 5, 2


class Layer(nn.Module):
    """Attention, then a mixture."""

    def __init__(self, **options) -> None:
        self.attn = nn.MultiHeadAttention(DIM, 2)
        self.norm, self.mlp = nn.RMSNorm(DIM), nn.MoE(DIM, HIDDEN, EXPERTS, **{"k": K, **options})

    def forward(self, x: Tensor) -> Tensor:
        x = call("junction", x, self.attn(x))
        return call("junction", x, self.mlp(self.norm(x)))


class Model(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int = 2, **options) -> None:
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = [Layer(**options) for _ in range(layers)]
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def ids(count: int = 4, length: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, length))


def program(dtype: str = "float64", layers: int = 2, seed: int = 0, **options) -> Program:
    gw.manual_seed(seed)
    model = Model(layers, **options).to(dtype)
    return gw.trace(model, ids(), sizes={"ids": ("B", "T")})


def logits(p: Program, tokens: np.ndarray | None = None) -> np.ndarray:
    return p.run({"ids": ids() if tokens is None else tokens}, keep="outputs")["logits"].to_numpy("float64")
