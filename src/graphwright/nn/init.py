"""Initial values: one Philox stream per parameter name, so that adding a layer changes no other layer's numbers."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from graphwright.array import NDArray, from_numpy, random


def normal(shape: tuple[int, ...], name: str, *, std: float = 0.02, seed: int = 0) -> NDArray:
    """N(0, std²) float32."""
    values = random.normal(prod(shape), seed=seed, stream=random.stream_of(name)).reshape(shape)
    return from_numpy(values * np.float32(std))


def kaiming_uniform(shape: tuple[int, ...], name: str, *, fan_in: int, seed: int = 0) -> NDArray:
    """Uniform in ±1/√fan_in float32: torch's default for linear layers."""
    values = random.uniform(prod(shape), seed=seed, stream=random.stream_of(name)).reshape(shape)
    return from_numpy((values * 2 - 1) * np.float32(1 / sqrt(fan_in)))


def full(shape: tuple[int, ...], value: float) -> NDArray:
    """One value, float32."""
    return from_numpy(np.full(shape, value, np.float32))
