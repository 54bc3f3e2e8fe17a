"""Qwen2 and Qwen2.5: biases on q, k, v; windows on the upper layers if `use_sliding_window`."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, register
from graphwright.models.architectures.config import Config
from graphwright.models.architectures.decoder import KEYS, Decoder, build_decoder, layer_types, read_decoder

_WINDOW, _FIRST = 4096, 28  # if the fields are absent


def windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Window per layer: layers from `max_window_layers` on, unless `layer_types` overrides this."""
    used = config.flag("use_sliding_window", False) and not (
        "sliding_window" in config and config["sliding_window"] is None
    )
    window = config.size("sliding_window", _WINDOW) if used else None
    first = config.size("max_window_layers", _FIRST, least=0)
    return layer_types(config, layers, window, lambda i: i >= first)


def read(config: Config) -> Decoder:
    """Read the config; 32 key heads by default, as in the class."""
    return read_decoder(config, layer_windows=windows, kv_heads=32, vocab=151936, longest=32768, q_bias=True)


QWEN2 = register(Architecture("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), read, KEYS, build_decoder))
