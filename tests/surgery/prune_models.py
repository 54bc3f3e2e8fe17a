"""Small models to prune: in the manner of GPT-2 (fused q-k-v, biases, LayerNorm), a convolutional net, an MLP."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright.program import Builder, Program


def gpt2_like(seed: int = 0, layers: int = 2, width: int = 16, vocab: int = 29, dtype: str = "f4") -> Program:
    """ids [B, T] -> logits: fused q-k-v with biases, two heads, LayerNorm, GELU; no positions but the causal mask."""
    rng, b = np.random.default_rng(seed), Builder("gpt2-like")
    ids = b.input("ids", ("B", "T"), "int64")

    def weight(name: str, *shape: int, scale: float | None = None) -> Any:
        return b.param(name, (rng.normal(size=shape) * (scale or shape[-1] ** -0.5)).astype(dtype))

    x = b.embedding(weight("embed.weight", vocab, width, scale=1.0), ids, name="embed")
    for i in range(layers):
        at = f"h.{i}"

        def norm(x: Any, name: str) -> Any:
            scale = b.param(f"{name}.weight", np.ones(width, dtype))
            return b.layer_norm(x, scale, weight(f"{name}.bias", width, scale=0.1), name=name)

        qkv = b.linear(norm(x, f"{at}.ln_1"), weight(f"{at}.attn.qkv.weight", 3 * width, width),
                       weight(f"{at}.attn.qkv.bias", 3 * width, scale=0.1), name=f"{at}.attn.qkv")  # fmt: skip
        parts = []
        for j in range(3):
            part = b.slice(qkv, axis=2, start=j * width, size=width, name=f"{at}.attn.part{j}")
            split = b.unflatten(part, axis=-1, sizes=(2, width // 2), name=f"{at}.attn.split{j}")
            parts.append(b.permute(split, axes=(0, 2, 1, 3), name=f"{at}.attn.heads{j}"))
        mixed = b.sdpa(*parts, scale=(width // 2) ** -0.5, causal=True, name=f"{at}.attn.sdpa")
        rows = b.flatten(
            b.permute(mixed, axes=(0, 2, 1, 3), name=f"{at}.attn.back"), start=2, end=3, name=f"{at}.attn.rows"
        )
        out = b.linear(rows, weight(f"{at}.attn.o.weight", width, width), weight(f"{at}.attn.o.bias", width, scale=0.1),
                       name=f"{at}.attn.o")  # fmt: skip
        x = b.junction(x, out, name=f"{at}.mid")
        h = b.linear(norm(x, f"{at}.ln_2"), weight(f"{at}.mlp.fc.weight", 4 * width, width),
                     weight(f"{at}.mlp.fc.bias", 4 * width, scale=0.3), name=f"{at}.mlp.fc")  # fmt: skip
        h = b.linear(b.gelu(h, name=f"{at}.mlp.act"), weight(f"{at}.mlp.proj.weight", width, 4 * width),
                     weight(f"{at}.mlp.proj.bias", width, scale=0.1), name=f"{at}.mlp.proj")  # fmt: skip
        x = b.junction(x, h, name=f"{at}.out")
    b.output(b.linear(x, weight("head.weight", vocab, width), name="head"), "logits")
    return b.build()


def convolutional(dtype: str = "f4") -> Program:
    """x [B, 2, 9, 9] -> conv (stride 2) -> ReLU -> conv -> ReLU -> flatten -> linear -> y [B, 3]."""
    rng, b = np.random.default_rng(1), Builder("convolutional")
    x = b.input("x", ("B", 2, 9, 9), "float64" if dtype == "f8" else "float32")

    def weight(name: str, *shape: int) -> Any:
        return b.param(name, (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(dtype))

    h = b.conv(x, weight("first.weight", 8, 2, 3, 3), weight("first.bias", 8), stride=2, padding=1, name="first")
    h = b.conv(b.relu(h, name="act1"), weight("second.weight", 6, 8, 2, 2), weight("second.bias", 6), name="second")
    h = b.flatten(b.relu(h, name="act2"), start=1, end=3, name="flat")
    b.output(b.linear(h, weight("last.weight", 3, 6 * 16), weight("last.bias", 3), name="last"), "y")
    return b.build()


def images(n: int, seed: int = 0, dtype: str = "f4") -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(n, 2, 9, 9)).astype(dtype)}


def correlated(units: int = 48, source: int = 20, dtype: str = "f8", seed: int = 0) -> Program:
    """x [B, source] -> `units` ReLU units -> y [B, 8]: more units than the data has dimensions."""
    rng, b = np.random.default_rng(seed), Builder("correlated")
    x = b.input("x", ("B", source), "float64" if dtype == "f8" else "float32")
    up = b.param("up.weight", (rng.normal(size=(units, source)) / source**0.5).astype(dtype))
    down = b.param("down.weight", (rng.normal(size=(8, units)) / units**0.5).astype(dtype))
    b.output(b.linear(b.relu(b.linear(x, up, name="up"), name="act"), down, name="down"), "y")
    return b.build()


def outputs(p: gw.Program, feeds: dict[str, Any]) -> np.ndarray:
    return p.run(feeds)[p.output_names()[0]].to_numpy("float64")
