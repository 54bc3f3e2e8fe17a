"""Llama, and models of the same class: TinyLlama, SmolLM, Llama 2 and 3.x."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, register
from graphwright.models.architectures.config import Config
from graphwright.models.architectures.decoder import KEYS, Decoder, build_decoder, read_decoder


def read(config: Config) -> Decoder:
    """Read the config: `attention_bias` adds biases to q, k, v and o, `mlp_bias` to the MLP; there are no windows."""
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config,
        layer_windows=lambda _, layers: (None,) * layers,
        q_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


LLAMA = register(
    Architecture(
        "llama",
        ("LlamaForCausalLM",),
        ("llama",),
        read,
        KEYS,
        build_decoder,
        multiples=(("hidden", "heads"),),  # LlamaConfig.validate_architecture, whatever head_dim says
    )
)
