"""Rotary frequencies of every scaling kind, from a config in either spelling. Formulas as in transformers, in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.models.config import Config
from graphwright.models.errors import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """What the rotary embedding needs to know.

    Attributes:
        kind: scaling kind.
        theta: base wavelength.
        dim: rotated entries of a head, even.
        scale: factor on cos and sin.
        frequencies: float32 [dim/2]; for kinds that depend on the length, those of short inputs.
        original: length up to which a length-dependent kind keeps them (`original_max_position_embeddings` for longrope,
            `max_position_embeddings` for dynamic).
        factor: scaling factor of the dynamic kind.
        long: float32 [dim/2] of longrope beyond `original`.
    """

    kind: str
    theta: float
    dim: int
    scale: float
    frequencies: np.ndarray
    original: int = 0
    factor: float = 1.0
    long: np.ndarray | None = None


def read_rope(config: Config, head_dim: int, theta_default: float = 10000.0) -> Rope:
    """The rotary embedding that a config asks for.

    Reads `rope_parameters`, or `rope_theta` with `rope_scaling` (which wins if both are there), `rope_type` or `type`.
    Raises: ConfigError naming the field; an unknown kind is never taken for the default.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ConfigError("field 'rope_parameters'", where=str(config.path), expected="an object", got=given)
    scaling: dict[str, Any] = {**(config.get("rope_parameters") or {}), **given}
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    theta = theta_default if theta is None else theta
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KINDS:
        raise ConfigError("this kind of RoPE scaling is not known", where=str(config.path), expected=", ".join(KINDS), got=kind)
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    reader = _Reader(config, scaling, float(theta), int(head_dim * (partial or 1.0)), head_dim)
    if reader.dim % 2 or reader.dim < 2:
        raise ConfigError("RoPE needs an even number of rotated entries", where=str(config.path), expected="even", got=reader.dim)
    return getattr(reader, f"_{kind}")()


class _Reader:
    def __init__(self, config: Config, scaling: Mapping[str, Any], theta: float, dim: int, head_dim: int) -> None:
        self.config, self.scaling, self.theta, self.dim, self.head_dim = config, scaling, theta, dim, head_dim
        self.longest = config.size("max_position_embeddings", 2048)

    def _number(self, name: str, default: float | None = None) -> float:
        value = self.scaling.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"RoPE field {name!r}", where=str(self.config.path), expected="a number", got=value)
        return float(value)

    def _original(self) -> int:
        value = self.scaling.get("original_max_position_embeddings") or self.config.get("original_max_position_embeddings")
        return int(value or self.longest)

    def _base(self, theta: float | None = None) -> np.ndarray:
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        return (np.float32(1.0) / np.float32(self.theta if theta is None else theta) ** exponent).astype(np.float32)

    def _default(self) -> Rope:
        return Rope("default", self.theta, self.dim, 1.0, self._base())

    def _linear(self) -> Rope:
        return Rope("linear", self.theta, self.dim, 1.0, self._base() / np.float32(self._number("factor")))

    def _dynamic(self) -> Rope:
        return Rope("dynamic", self.theta, self.dim, 1.0, self._base(), self.longest, self._number("factor"))

    def _llama3(self) -> Rope:
        f, factor = self._base(), self._number("factor")
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        wave = 2 * np.pi / f
        original = self._original()
        smooth = (original / wave - low) / (high - low)
        mixed = (1 - smooth) * (f / factor) + smooth * f
        scaled = np.where(wave > original / low, f / factor, np.where(wave < original / high, f, mixed))
        return Rope("llama3", self.theta, self.dim, 1.0, scaled.astype(np.float32))

    def _yarn(self) -> Rope:
        original = self._original()
        factor = self._number("factor", self.longest / original)
        attention, m, m_all = (self.scaling.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))

        def magnitude(by: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

        if attention is None:
            attention = magnitude(m) / magnitude(m_all) if m and m_all else magnitude(1.0)

        def turns(rotations: float) -> float:
            return self.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = turns(self.scaling.get("beta_fast") or 32), turns(self.scaling.get("beta_slow") or 1)
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high += 0.001 if low == high else 0
        ramp = np.clip((np.arange(self.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        keep = 1 - ramp
        base = (np.float32(self.theta) ** (np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim))).astype(np.float32)
        mixed = 1.0 / (factor * base) * (1 - keep) + 1.0 / base * keep
        return Rope("yarn", self.theta, self.dim, float(attention), mixed.astype(np.float32))

    def _longrope(self) -> Rope:
        original = self._original()
        factor = self._number("factor", self.longest / original)
        attention = self.scaling.get("attention_factor")
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        short, long = (self._factors(name) for name in ("short_factor", "long_factor"))
        base = np.float32(self.theta) ** (np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim))
        return Rope("longrope", self.theta, self.dim, float(attention), (1.0 / (short * base)).astype(np.float32), original,
                    long=(1.0 / (long * base)).astype(np.float32))  # fmt: skip

    def _factors(self, name: str) -> np.ndarray:
        value = self.scaling.get(name)
        if not isinstance(value, list) or len(value) != self.dim // 2:
            raise ConfigError(f"RoPE field {name!r}", where=str(self.config.path), expected=f"{self.dim // 2} numbers", got=value)
        return np.asarray(value, np.float32)

    def _proportional(self) -> Rope:
        part = self.scaling.get("partial_rotary_factor", self.config.get("partial_rotary_factor")) or 1.0
        angles = int(part * self.head_dim // 2)
        f = np.zeros(self.head_dim // 2, np.float32)
        f[:angles] = 1.0 / np.float32(self.theta) ** (np.arange(0, 2 * angles, 2, dtype=np.float32) / np.float32(self.head_dim))
        return Rope("proportional", self.theta, self.head_dim, 1.0, f / np.float32(self._number("factor", 1.0)))
