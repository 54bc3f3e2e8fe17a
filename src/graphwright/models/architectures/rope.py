"""RoPE frequencies for every kind of scaling, in float32, by the formulas of transformers.

Programs that compute in float64 use a second set, computed by the same formulas in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphwright.models.architectures.architecture import LARGEST, Config
from graphwright.models.errors import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """Parameters of a rotary embedding.

    Attributes:
        kind: scaling kind.
        theta: base θ of the unscaled frequencies θ^(-2i/dim).
        dim: number of rotated entries of a head, even.
        scale: factor on cos and sin.
        frequencies: float32 [dim/2]; for kinds that depend on the length, the frequencies of short inputs.
        original: length up to which a length-dependent kind uses `frequencies` (`max_position_embeddings` for
            dynamic, `original_max_position_embeddings` for longrope).
        factor: scaling factor of the dynamic kind.
        long: float32 [dim/2], frequencies of longrope beyond `original`.
        wide: the same parameters with float64 frequencies.
    """

    kind: str
    theta: float
    dim: int
    scale: float
    frequencies: np.ndarray
    original: int = 0
    factor: float = 1.0
    long: np.ndarray | None = None
    wide: RopeFrequencies | None = None


def read_rope(
    config: Config, head_dim: int, longest: int = 2048, theta: float = 10000.0, partial: bool = False
) -> RopeFrequencies:
    """Read the rotary embedding of a config, for heads of `head_dim` entries.

    The scaling fields are in `rope_scaling` or else `rope_parameters`; the kind is their `rope_type` or else `type`.
    `longest` and `theta` are the family's defaults for `max_position_embeddings` and `rope_theta`. `partial` tells
    whether `partial_rotary_factor` counts for unscaled frequencies too.
    Raises: ConfigError for an invalid field or kind.
    """
    for name in ("rope_parameters", "rope_scaling"):
        given = {} if config.get(name) is None else config[name]
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise config.invalid(name, "one object for all layers, without objects inside", given)
    config.number("rope_theta", 1.0)  # checked also if the scaling fields override it
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = scaling["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError("unknown kind of RoPE scaling", where=str(config.path), expected=", ".join(KINDS), got=kind)
    given = config, scaling, head_dim, longest, theta, partial
    narrow, wide = (_RopeFields(*given, kind).read() for kind in (np.float32, np.float64))
    return replace(narrow, wide=wide)


def read_layer_ropes(
    config: Config, head_dim: int, longest: int, theta: float, local_theta: float,
    local_name: str | None = "rope_local_base_freq",
) -> tuple[RopeFrequencies, RopeFrequencies | None]:  # fmt: skip
    """Read the rotary embeddings of layers without and with a window; None if both are the same.

    `rope_parameters` has an object for each kind of layer. `rope_scaling`, which old configs have, only concerns layers
    without a window. The thetas are the family's defaults for `rope_theta` and, if there is one, `local_name`. Raises:
    ConfigError.
    """
    kinds = ("full_attention", "sliding_attention")
    given = {} if config.get("rope_parameters") is None else config["rope_parameters"]
    if not isinstance(given, Mapping) or not given.keys() <= set(kinds):
        raise config.invalid("rope_parameters", f"an object with {' and '.join(kinds)}", given)
    scaling = {} if config.get("rope_scaling") is None else config["rope_scaling"]
    if not isinstance(scaling, Mapping):
        raise config.invalid("rope_scaling", "an object", scaling)
    found = []
    bases = config.number("rope_theta", theta), config.number(local_name, local_theta) if local_name else local_theta
    for kind, more, base in zip(kinds, (scaling, {}), bases, strict=True):
        own = {"rope_type": "default"} if given.get(kind) is None else given[kind]
        if not isinstance(own, Mapping):
            raise config.invalid("rope_parameters", f"an object for {kind}", own)
        fields = {**config.fields, "rope_parameters": {**own, **more}, "rope_scaling": None, "rope_theta": None}
        found.append(read_rope(Config(fields, b"", config.path), head_dim, longest, base))
    rope, local = found
    same = rope.kind == local.kind == "default" and np.array_equal(rope.frequencies, local.frequencies)
    return rope, None if same else local


class _RopeFields:
    """The RoPE fields of a config; one method per kind of scaling computes the frequencies, in `float_type`."""

    def __init__(
        self, config: Config, scaling: Mapping[str, Any], head_dim: int, longest: int, theta: float, partial: bool,
        float_type: type[np.floating],
    ) -> None:  # fmt: skip
        self.config, self.scaling, self.head_dim, self.float = config, scaling, head_dim, float_type
        self.theta = self._number("rope_theta", theta, top_level=True)
        self.part = self._number("partial_rotary_factor", 1.0, top_level=True)
        self.longest = config.size("max_position_embeddings", longest)
        whole = scaling["rope_type"] in ("default", "proportional")[partial:]  # these kinds ignore the factor
        self.dim = head_dim if whole else int(head_dim * self.part)
        if self.dim % 2 or not 2 <= self.dim <= head_dim:
            raise ConfigError("the number of rotated entries of a head is odd or out of range", where=str(config.path),
                              expected=f"an even number in 2..{head_dim}",
                              got=f"{self.dim}: head_dim {head_dim} · partial_rotary_factor {self.part:g}")  # fmt: skip

    def read(self) -> RopeFrequencies:
        """Compute the frequencies by the formula of the kind. Raises: ConfigError if the frequencies are not finite."""
        try:
            with np.errstate(all="ignore"):
                rope: RopeFrequencies = getattr(self, f"_{self.scaling['rope_type']}")()
            if all(np.isfinite(f).all() for f in (rope.frequencies, rope.long, rope.scale) if f is not None):
                return rope
        except ConfigError:
            raise
        except (ZeroDivisionError, OverflowError, ValueError):
            pass
        what, got = "the RoPE fields give frequencies that are not finite", {"rope_theta": self.theta, **self.scaling}
        raise ConfigError(what, where=str(self.config.path), expected="numbers of moderate size", got=got)

    def _number(self, name: str, default: float | None = None, *, least: float = 0.0, top_level: bool = False) -> float:
        """Return a scaling field, a number > `least`; if absent, the config's field (if `top_level`) or the default."""
        value = self.scaling.get(name)
        if value is None and top_level:
            value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= LARGEST:
            raise self._invalid(name, "a number" if least == -math.inf else f"a number above {least:g}", value)
        return float(value)

    def _invalid(self, name: str, expected: str, got: object) -> ConfigError:
        return ConfigError(f"RoPE field {name!r} is invalid", where=str(self.config.path), expected=expected, got=got)

    def _optional(self, name: str, least: float = -math.inf) -> float | None:
        return None if self.scaling.get(name) is None else self._number(name, least=least)

    def _original(self) -> int:
        """Return `original_max_position_embeddings`, from the config or else from the scaling fields."""
        inside = self._number("original_max_position_embeddings", self.longest)
        return self.config.size("original_max_position_embeddings", int(inside))

    def _powers(self) -> np.ndarray:
        """Return θ^(2i/d) for all i < d/2."""
        exponent = np.arange(0, self.dim, 2, dtype=self.float) / self.float(self.dim)
        return (self.float(self.theta) ** exponent).astype(self.float)

    def _base(self) -> np.ndarray:
        return (self.float(1.0) / self._powers()).astype(self.float)

    def _made(self, frequencies: np.ndarray, scale: float = 1.0, **more: Any) -> RopeFrequencies:
        kind = self.scaling["rope_type"]
        return RopeFrequencies(kind, self.theta, self.dim, scale, frequencies.astype(self.float), **more)

    def _default(self) -> RopeFrequencies:
        return self._made(self._base())

    def _linear(self) -> RopeFrequencies:
        return self._made(self._base() / self.float(self._number("factor")))

    def _dynamic(self) -> RopeFrequencies:
        if self.dim == 2:
            what = "dynamic RoPE with only two rotated entries divides by zero"
            raise ConfigError(what, where=str(self.config.path), expected="at least 4 entries", got=self.dim)
        return self._made(self._base(), original=self.longest, factor=self._number("factor"))

    def _llama3(self) -> RopeFrequencies:
        f, factor = self._base(), self._number("factor")
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        if high <= low:
            raise ConfigError("RoPE field 'high_freq_factor' is not above 'low_freq_factor'",
                              where=str(self.config.path), expected=f"above {low}", got=high)  # fmt: skip
        wave = 2 * np.pi / f
        original = self._original()
        smooth = (original / wave - low) / (high - low)
        mixed = (1 - smooth) * (f / factor) + smooth * f
        return self._made(np.where(wave > original / low, f / factor, np.where(wave < original / high, f, mixed)))

    def _yarn(self) -> RopeFrequencies:
        original = self._original()
        factor = self._number("factor", self.longest / original)
        attention = self._optional("attention_factor", 0)
        m, m_all = self._optional("mscale"), self._optional("mscale_all_dim")
        truncate = self.scaling.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._invalid("truncate", "true or false", truncate)

        def magnitude(by: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

        def dimension_of(rotations: float) -> float:
            return self.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        if attention is None:
            attention = magnitude(m) / magnitude(m_all) if m and m_all else magnitude(1.0)
        low, high = dimension_of(self._number("beta_fast", 32)), dimension_of(self._number("beta_slow", 1))
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high += 0.001 if low == high else 0
        keep = 1 - np.clip((np.arange(self.dim // 2, dtype=self.float) - low) / (high - low), 0, 1)
        base = self._powers()
        return self._made(1.0 / (factor * base) * (1 - keep) + 1.0 / base * keep, attention)

    def _longrope(self) -> RopeFrequencies:
        original = self._original()
        factor = self._number("factor", self.longest / original)
        attention = self._optional("attention_factor", 0)
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        short, long = (1.0 / (self._factors(name) * self._powers()) for name in ("short_factor", "long_factor"))
        return self._made(short, attention, original=original, long=long.astype(self.float))

    def _factors(self, name: str) -> np.ndarray:
        value, count = self.scaling.get(name), self.dim // 2
        numbers = [v for v in value if type(v) in (int, float) and 0 < v < math.inf] if isinstance(value, list) else []
        if numbers != value or len(numbers) != count:
            raise self._invalid(name, f"{count} numbers above 0", value)
        return np.asarray(numbers, self.float)

    def _proportional(self) -> RopeFrequencies:
        f = self._base()
        f[int(self.part * self.head_dim // 2) :] = 0
        return self._made(f / self.float(self._number("factor", 1.0)))
