"""Mistral: no biases, and one window for all layers where the config has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.models.architectures.architecture import Architecture, register
from graphwright.models.architectures.decoder import KEYS, build_decoder, read_decoder

if TYPE_CHECKING:
    from graphwright.models.architectures.config import Config
    from graphwright.models.architectures.decoder import Decoder

_WINDOW = 4096  # of a config that is silent; null means none


def windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """`sliding_window` for every layer."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return (None,) * layers
    return (config.size("sliding_window", _WINDOW),) * layers


def read(config: Config) -> Decoder:
    """Eight key heads where the config is silent."""
    return read_decoder(config, layer_windows=windows, kv_heads=8, longest=131072)


MISTRAL = register(Architecture("mistral", ("MistralForCausalLM",), ("mistral",), read, KEYS, build_decoder))
