"""Qwen3: RMSNorm over each head of q and k before RoPE; head_dim 128 by default."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, register
from graphwright.models.architectures.config import Config
from graphwright.models.architectures.decoder import KEYS, Decoder, build_decoder, read_decoder
from graphwright.models.architectures.qwen2 import windows


def read(config: Config) -> Decoder:
    """Read the config: `attention_bias` adds biases to q, k, v and o."""
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config,
        layer_windows=windows,
        head_dim=128,
        kv_heads=32,
        vocab=151936,
        longest=32768,
        q_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


QWEN3 = register(Architecture("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), read, KEYS, build_decoder))
