"""OLMo 2 and 3: norms after the branches only, q and k normalised over all heads together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphwright.models.architectures.architecture import Architecture, Config
from graphwright.models.architectures.decoder import Decoder, build_decoder, layer_types, read_decoder, with_norms
from graphwright.models.architectures.families import needed_window
from graphwright.models.architectures.rope import read_layer_ropes

_LONGEST = 2048


def _olmo(config: Config, windows: Callable[[Config, int], tuple[int | None, ...]], **more: Any) -> Decoder:
    bias = config.flag("attention_bias", False)
    return read_decoder(config, windows, vocab=50304, longest=_LONGEST, eps=1e-5, norm="rms_wide", wide_rope=True,
                        projection_norm=True, q_bias=bias, o_bias=bias, **more)  # fmt: skip


def _olmo2(config: Config) -> Decoder:
    """Read OLMo 2 dimensions: no windows."""
    return _olmo(config, lambda _, layers: (None,) * layers)


def _olmo3(config: Config) -> Decoder:
    """Read OLMo 3 dimensions: windows in three of four layers; scaling of RoPE in the others only."""
    heads = config.size("num_attention_heads", most=1 << 20)
    dim = config.size("head_dim", config.size("hidden_size") // heads, most=1 << 16)
    rope, local = read_layer_ropes(config, dim, _LONGEST, 5e5, 5e5, local_name=None)
    return _olmo(config, lambda c, layers: layer_types(c, layers, needed_window(c), lambda i: (i + 1) % 4 != 0),
                 rope=rope, local_rope=local)  # fmt: skip


_KEYS = with_norms({"attn.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"})
OLMO2 = Architecture("olmo2", ("Olmo2ForCausalLM",), ("olmo2",), _olmo2, _KEYS, build_decoder)
OLMO3 = Architecture("olmo3", ("Olmo3ForCausalLM",), ("olmo3",), _olmo3, _KEYS, build_decoder)
