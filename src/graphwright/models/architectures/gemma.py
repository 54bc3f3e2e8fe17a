"""The Gemma families: norms that scale by 1 + weight, embeddings times √hidden, a tied head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphwright.models.architectures.architecture import Architecture, Config
from graphwright.models.architectures.decoder import (
    ACTIVATIONS,
    KEYS,
    Decoder,
    build_decoder,
    layer_types,
    read_decoder,
    with_norms,
)
from graphwright.models.architectures.families import needed_window
from graphwright.models.architectures.rope import read_layer_ropes


def _gemma(
    config: Config, windows: Callable[[Config, int], tuple[int | None, ...]], activation: str = "hidden_activation",
    **more: Any,
) -> Decoder:  # fmt: skip
    """Read what all Gemmas share; `more` are fields of the family."""
    if config.get("use_bidirectional_attention"):
        raise config.invalid("use_bidirectional_attention", "false: attention is causal here", True)
    bias = config.flag("attention_bias", False)
    return read_decoder(config, windows, head_dim=256, tied=True, activation=(activation, "gelu_pytorch_tanh"),
                        norm="rms_offset", embed_scale=config.size("hidden_size") ** 0.5, q_bias=bias, o_bias=bias,
                        **more)  # fmt: skip


def _gemma1(config: Config) -> Decoder:
    """Read Gemma dimensions: no windows, and a norm before each branch."""
    dims = _gemma(config, lambda _, layers: (None,) * layers, "hidden_act", kv_heads=16, vocab=256000, longest=8192)
    exact = ACTIVATIONS[dims.activation][1] == {"approximate": "none"}  # the class takes the form with tanh for it
    return replace(dims, activation="gelu_pytorch_tanh") if exact else dims


def _gemma2(config: Config) -> Decoder:
    """Read Gemma 2 dimensions: windows in even layers, softcaps of scores and logits."""
    return _gemma(config, lambda c, layers: layer_types(c, layers, needed_window(c), lambda i: i % 2 == 0), kv_heads=4,
                  vocab=256000, longest=8192, score_cap=_cap(config, "attn_logit_softcapping", 50.0),
                  **_scores(config))  # fmt: skip


def _gemma3(config: Config) -> Decoder:
    """Read Gemma 3 dimensions: an RMSNorm of each head of q and k; windows with a RoPE of their own in most layers."""
    pattern = config.size("sliding_window_pattern", 6)
    dim, longest = config.size("head_dim", 256, most=1 << 16), 131072
    rope, local = read_layer_ropes(config, dim, longest, 1e6, 1e4)
    return _gemma(config, lambda c, layers: layer_types(c, layers, needed_window(c), lambda i: (i + 1) % pattern != 0),
                  kv_heads=4, vocab=262208, longest=longest, qk_norm=True, rope=rope, local_rope=local,
                  **_scores(config, None))  # fmt: skip


def _scores(config: Config, logit_cap: float | None = 30.0) -> dict[str, Any]:
    """Return the scale of scores, `query_pre_attn_scalar`^-½, and the softcap of logits with its default."""
    scale = config.number("query_pre_attn_scalar", 256.0, 1e38) ** -0.5
    return {"score_scale": scale, "logit_cap": _cap(config, "final_logit_softcapping", logit_cap)}


def _cap(config: Config, name: str, default: float | None) -> float | None:
    """Return a softcap; None if the config sets it to null."""
    silent = name not in config
    return default if silent else None if config[name] is None else config.number(name, most=1e30)


_SANDWICH = with_norms({
    "attn.norm": "input_layernorm", "attn.post_norm": "post_attention_layernorm",
    "mlp.norm": "pre_feedforward_layernorm", "mlp.post_norm": "post_feedforward_layernorm",
})  # fmt: skip
GEMMA = Architecture("gemma", ("GemmaForCausalLM",), ("gemma",), _gemma1, KEYS, build_decoder)
GEMMA2 = Architecture("gemma2", ("Gemma2ForCausalLM",), ("gemma2",), _gemma2, _SANDWICH, build_decoder,
                      multiples=(("hidden", "heads"),))  # fmt: skip
GEMMA3 = Architecture("gemma3", ("Gemma3ForCausalLM",), ("gemma3_text",), _gemma3, _SANDWICH, build_decoder,
                      multiples=(("hidden", "heads"),))  # fmt: skip
GEMMA_FAMILIES = GEMMA, GEMMA2, GEMMA3
