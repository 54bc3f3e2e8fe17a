"""An independent forward pass in float64 NumPy, written from the formulas of §3.1 and §3.2 and the file alone."""

from __future__ import annotations

import json
from math import erf, log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file


def weights(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory, as float64."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        found.update({k: v.double().numpy() for k, v in load_file(file).items()})
    return found


def forward(path: Path, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Logits [B, T, V]; keys where `mask` is false are hidden, positions count the true entries."""
    c, w = json.loads((path / "config.json").read_text()), weights(path)
    mask = np.ones(ids.shape, bool) if mask is None else mask
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or c["hidden_size"] // heads
    frequencies, scale = rope(c, d, int(positions.max()) + 1)
    angle = positions[..., None] * frequencies
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"], c)
        q, k, v = (split(linear(h, w, f"{p}self_attn.{n}_proj"), d) for n in "qkv")
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(q, w[p + "self_attn.q_norm.weight"], c), norm(k, w[p + "self_attn.k_norm.weight"], c)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        a = attend(q, np.repeat(k, heads // groups, 1), np.repeat(v, heads // groups, 1), mask, window(c, i), d)
        x = x + linear(a, w, f"{p}self_attn.o_proj")
        h = norm(x, w[p + "post_attention_layernorm.weight"], c)
        gate = activation(c["hidden_act"], linear(h, w, f"{p}mlp.gate_proj"))
        x = x + linear(gate * linear(h, w, f"{p}mlp.up_proj"), w, f"{p}mlp.down_proj")
    head = "model.embed_tokens.weight" if c.get("tie_word_embeddings") else "lm_head.weight"
    return norm(x, w["model.norm.weight"], c) @ w[head].T


def linear(x: np.ndarray, w: dict[str, np.ndarray], key: str) -> np.ndarray:
    return x @ w[key + ".weight"].T + w.get(key + ".bias", 0.0)


def norm(x: np.ndarray, weight: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * weight


def split(x: np.ndarray, d: int) -> np.ndarray:
    """[B, T, H·d] as [B, H, T, d]."""
    return x.reshape(*x.shape[:2], -1, d).swapaxes(1, 2)


def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate pairs half a head apart."""
    half = cos.shape[-1]
    a, b, cos, sin = x[..., :half], x[..., half:], cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, width: int | None, d: int) -> np.ndarray:
    """Causal attention, merged heads; a query that sees no key gives zeros."""
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None]
    seen = (j <= i) if width is None else (j <= i) & (j > i - width)
    seen = seen[None, None] & mask[:, None, None, :]
    s = np.where(seen, q @ k.swapaxes(2, 3) / sqrt(d), -np.inf)
    e = np.where(seen, np.exp(s - np.where(seen.any(-1, keepdims=True), s.max(-1, keepdims=True), 0.0)), 0.0)
    p = e / np.maximum(e.sum(-1, keepdims=True), 1e-300)
    out = (p @ v).swapaxes(1, 2)
    return out.reshape(*out.shape[:2], -1)


def window(c: dict[str, Any], layer: int) -> int | None:
    """Keys that a query of this layer sees, its own included."""
    if c["model_type"] == "mistral":
        return c["sliding_window"]
    if c["model_type"] == "llama":
        return None
    types = c.get("layer_types")
    slides = types[layer] == "sliding_attention" if types else layer >= c["max_window_layers"]
    return c["sliding_window"] if c["use_sliding_window"] and slides else None


def activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(erf)(x / sqrt(2)))
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
    return {"relu": lambda x: np.maximum(x, 0), "tanh": np.tanh}[name](x)


def rope(c: dict[str, Any], d: int, length: int) -> tuple[np.ndarray, float]:
    """Frequencies [d/2] for inputs of this length, and the factor on cos and sin."""
    r = c["rope_parameters"]
    kind, theta, longest = r["rope_type"], r["rope_theta"], c["max_position_embeddings"]
    original = r.get("original_max_position_embeddings", longest)
    f = theta ** (-np.arange(0, d, 2) / d)
    if kind == "linear":
        return f / r["factor"], 1.0
    if kind == "dynamic":
        scale = r["factor"] * max(length, longest) / longest - (r["factor"] - 1)
        return (theta * scale ** (d / (d - 2))) ** (-np.arange(0, d, 2) / d), 1.0
    if kind == "llama3":
        wave, low, high = 2 * pi / f, original / r["low_freq_factor"], original / r["high_freq_factor"]
        t = (original / wave - r["low_freq_factor"]) / (r["high_freq_factor"] - r["low_freq_factor"])
        between = f * ((1 - t) / r["factor"] + t)
        return np.where(wave > low, f / r["factor"], np.where(wave < high, f, between)), 1.0
    if kind == "yarn":
        return yarn(r, f, theta, d, original)
    if kind == "longrope":
        factors = r["long_factor"] if length > original else r["short_factor"]
        s = r["factor"]
        return f / np.array(factors), 1.0 if s <= 1 else sqrt(1 + log(s) / log(original))
    assert kind == "default"
    return f, 1.0


def yarn(r: dict[str, Any], f: np.ndarray, theta: float, d: int, original: int) -> tuple[np.ndarray, float]:
    s = r["factor"]

    def correction(turns: float) -> float:
        return d * log(original / (2 * pi * turns)) / (2 * log(theta))

    low, high = correction(r.get("beta_fast") or 32), correction(r.get("beta_slow") or 1)
    if r.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    q = np.clip((np.arange(d // 2) - low) / (high - low + (0.001 if high == low else 0)), 0, 1)

    def g(m: float) -> float:
        return 1.0 if s <= 1 else 0.1 * m * log(s) + 1

    scale = g(r["mscale"]) / g(r["mscale_all_dim"]) if r.get("mscale") and r.get("mscale_all_dim") else g(1.0)
    return f * (1 - q + q / s), r.get("attention_factor") or scale
