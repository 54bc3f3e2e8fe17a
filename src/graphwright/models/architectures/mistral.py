"""Mistral: no biases, and one window for all layers if the config sets one."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, register
from graphwright.models.architectures.config import Config
from graphwright.models.architectures.decoder import KEYS, Decoder, build_decoder, read_decoder

_WINDOW = 4096  # if the field is absent; null means no window


def windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Window per layer: `sliding_window` for all."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return (None,) * layers
    return (config.size("sliding_window", _WINDOW),) * layers


def read(config: Config) -> Decoder:
    """Read the config; 8 key heads by default."""
    return read_decoder(config, layer_windows=windows, kv_heads=8, longest=131072)


MISTRAL = register(Architecture("mistral", ("MistralForCausalLM",), ("mistral",), read, KEYS, build_decoder))
