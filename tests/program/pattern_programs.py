"""Small programs that attend over a pattern, and what dense attention with its mask gives for them."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright.patterns import Pattern

HEADS, WIDTH = 2, 4
KEY = "window"


def program_of(pattern: Pattern, layers: int = 1, seed: int = 0) -> gw.Program:
    """Return a program of `layers` attentions over one pattern, on x [B, T, 8], with residual sums."""
    rng = np.random.default_rng(seed)
    b = gw.Builder("sparse")
    x = b.input("x", ("B", "T", HEADS * WIDTH))
    table = b.pattern(KEY, pattern)
    for i in range(layers):
        at = b.scope(f"layers.{i}")
        q, k, v = (_heads(at, x, name, rng) for name in "qkv")
        out = at.block_sdpa(q, k, v, table, scale=0.5, planes=pattern.planes, name="attention")[0]
        joined = at.flatten(at.permute(out, axes=(0, 2, 1, 3), name="rows"), start=2, end=3, name="joined")
        x = at.add(x, joined, name="out")
    b.output(x, "y")
    return b.build()


def _heads(b: Any, x: Any, name: str, rng: np.random.Generator) -> Any:
    weight = b.param(f"{name}.weight", rng.normal(size=(HEADS * WIDTH, HEADS * WIDTH)).astype("float32"))
    split = b.unflatten(b.linear(x, weight, name=name), axis=2, sizes=(HEADS, WIDTH), name=f"{name}.split")
    return b.permute(split, axes=(0, 2, 1, 3), name=f"{name}.heads")


def inputs(tokens: int, rows: int = 2, seed: int = 1) -> np.ndarray:
    """Return x float32 [rows, tokens, 8]."""
    return np.random.default_rng(seed).normal(size=(rows, tokens, HEADS * WIDTH)).astype("float32")


def dense(p: gw.Program, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return y of the program in float64, with the mask bool [planes, T, T] in place of the pattern."""
    y, tokens = x.astype(np.float64), x.shape[1]
    layers = sum(p.op(n) == "block_sdpa" for n in p.nodes())
    for i in range(layers):
        q, k, v = (
            (y @ p.weights.array(f"layers.{i}.{name}.weight").to_numpy().astype(np.float64).T)
            .reshape(len(x), tokens, HEADS, WIDTH)
            .transpose(0, 2, 1, 3)
            for name in "qkv"
        )
        scores = np.where(mask[None, :, :tokens, :tokens], 0.5 * q @ k.transpose(0, 1, 3, 2), -np.inf)
        largest = scores.max(-1, keepdims=True)
        e = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
        a = e / np.maximum(e.sum(-1, keepdims=True), 1e-300)
        y = y + (a @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return y
