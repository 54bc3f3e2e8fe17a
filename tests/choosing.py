"""The choice of the next id by numpy, rule after rule and with whole sorts: the oracle of the op `sample_token`."""

from __future__ import annotations

import numpy as np

from graphwright.array.random import bits


def gumbel(n: int, **key: int) -> np.ndarray:
    """Samples -ln(-ln u), float32, of 24 random bits: u is in (0, 1)."""
    u = ((bits(n, **key) >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    return -np.log(-np.log(u)).astype(np.float32)


def penalised(z: np.ndarray, rules: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Logits after the penalties; pairs (id, count in the output) up to the first id below 0."""
    repetition, presence, frequency = rules[:3]
    z = z.copy()
    for index, count in seen:
        if index < 0:
            break
        z[index] = z[index] / repetition if z[index] > 0 else z[index] * repetition
        if count:
            z[index] -= presence + frequency * np.float32(count)
    return z


def shares(z: np.ndarray) -> np.ndarray:
    """The softmax, in float64 of exponentials of float32."""
    with np.errstate(over="ignore"):  # -inf is what becomes of the distance of two huge ones
        e = np.exp(z - z.max()).astype(np.float64)
    return e / e.sum()


def filtered(z: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """-inf where a filter drops an entry."""
    z = z.copy()
    if 0 < top_k < z.size:
        z[np.argsort(-z, kind="stable")[top_k:]] = -np.inf
    if top_p < 1:
        order = np.argsort(-z, kind="stable")
        reached = np.cumsum(shares(z)[order]).astype(np.float32)
        z[order[1:][reached[:-1] >= np.float32(top_p)]] = -np.inf
    if min_p > 0:
        z[np.exp(z - z.max()) < np.float32(min_p)] = -np.inf
    return z


def chosen(logits: np.ndarray, rules: np.ndarray, keys: np.ndarray, seen: np.ndarray) -> tuple[int, np.ndarray]:
    """Id and kept logits of one row."""
    seed, stream, position, top_k = (int(k) for k in keys)
    temperature, top_p, min_p = rules[3:]
    if position < 0:
        return -1, logits
    with np.errstate(all="ignore"):
        z = penalised(logits, rules, seen)
        if temperature:
            z = z / temperature
    if np.isnan(z).any() or not np.isfinite(z.max()):
        return -1, z
    if not temperature:
        return int(np.argmax(z)), z
    z = filtered(z, top_k, top_p, min_p)
    noise = gumbel(z.size, seed=seed % 2**64, stream=stream, step=position)
    return int(np.argmax(z + noise)), z
