"""The built-in families with routed layers, with a function for each that reads a `MoEDecoder` from its config."""

from __future__ import annotations

from collections.abc import Callable

from graphwright.models.architectures.architecture import FIELDS, Architecture, Config
from graphwright.models.architectures.decoder import layer_types, read_decoder
from graphwright.models.architectures.families import sliding_window
from graphwright.models.architectures.moe import (
    MoEDecoder,
    build_moe,
    jitter_note,
    moe_keys,
    moe_stacks,
    read_experts,
)
from graphwright.models.errors import ConfigError

_FIRST_FULL = 28  # default of Qwen2MoeConfig


def _mixtral(config: Config) -> MoEDecoder:
    """Read Mixtral dimensions: all layers are routed, and have the window if the config sets one."""
    window = sliding_window(config) if config.get("sliding_window") is not None else None
    return read_decoder(config, lambda _, layers: (window,) * layers, kv_heads=8, longest=131072, eps=1e-5, theta=1e6,
                        make=MoEDecoder, wide_weights=True,
                        **read_experts(config, config.size("intermediate_size"), experts=8, chosen=2))  # fmt: skip


def _qwen2_moe(config: Config) -> MoEDecoder:
    """Read Qwen2-MoE dimensions: a shared expert, dense layers, biases on q, k and v; windows in even layers."""
    shared = config.size("shared_expert_intermediate_size", 5632)
    return read_decoder(config, _alternate_windows, kv_heads=16, vocab=151936, longest=32768, make=MoEDecoder,
                        q_bias=config.flag("qkv_bias", True), shared_width=shared, normalize=_normalize(config),
                        **read_experts(config, config.size("moe_intermediate_size", 1408), experts=60, chosen=4,
                                       sparse=True))  # fmt: skip


def _qwen3_moe(config: Config) -> MoEDecoder:
    """Read Qwen3-MoE dimensions: an RMSNorm of each head of q and k, dense layers, one window for all layers."""
    window = sliding_window(config) if config.flag("use_sliding_window", False) else None
    bias = config.flag("attention_bias", False)
    return read_decoder(config, lambda _, layers: (window,) * layers, kv_heads=4, vocab=151936, longest=32768,
                        make=MoEDecoder, q_bias=bias, o_bias=bias, qk_norm=True, normalize=_normalize(config),
                        **read_experts(config, config.size("moe_intermediate_size", 768), experts=128, chosen=8,
                                       sparse=True))  # fmt: skip


def _olmoe(config: Config) -> MoEDecoder:
    """Read OLMoE dimensions: RMSNorms of all heads of q and of k together; `clip_qkv` limits q, k and v."""
    bias = config.flag("attention_bias", False)
    clip = config.number("clip_qkv") if config.get("clip_qkv") is not None else None
    dims = read_decoder(config, vocab=50304, longest=4096, eps=1e-5, make=MoEDecoder, q_bias=bias, o_bias=bias,
                        projection_norm=True, clip=clip, normalize=_normalize(config),
                        **read_experts(config, config.size("intermediate_size"), experts=64, chosen=8))  # fmt: skip
    if dims.heads * dims.head_dim != dims.hidden:
        raise ConfigError("the class normalises hidden_size entries of the queries", where=str(config.path),
                          expected=f"num_attention_heads·head_dim = {dims.hidden}",
                          got=f"{dims.heads}·{dims.head_dim}")  # fmt: skip
    return dims


def _normalize(config: Config) -> bool:
    return config.flag("norm_topk_prob", False)


def _alternate_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    window = sliding_window(config) if config.flag("use_sliding_window", False) else None
    first = config.size("max_window_layers", _FIRST_FULL, least=0)
    return layer_types(config, layers, window, lambda i: i % 2 == 0 and i < first)


_SPARSE = {**FIELDS, "experts": "num_experts", "chosen": "num_experts_per_tok", "expert_width": "moe_intermediate_size"}
_ROUTED = {**{k: v for k, v in _SPARSE.items() if k != "mlp"}, "expert_width": "intermediate_size"}


def _family(
    name: str, base: str, read: Callable[[Config], MoEDecoder], fields: dict[str, str], block: str = "mlp",
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Architecture:  # fmt: skip
    return Architecture(
        name, (f"{base}ForCausalLM",), (name,), read, moe_keys(block, expert), build_moe, fields=fields,
        stacks=moe_stacks(block, expert), notes=jitter_note,
        attributes={"topk.k": "chosen", "dispatch.experts": "experts"},
        spellings={"num_experts": "num_local_experts", "num_local_experts": "num_experts"},
    )  # fmt: skip


MIXTRAL = _family("mixtral", "Mixtral", _mixtral, {**_ROUTED, "experts": "num_local_experts"}, "block_sparse_moe",
                  ("w1", "w3", "w2"))  # fmt: skip
QWEN2_MOE = _family("qwen2_moe", "Qwen2Moe", _qwen2_moe,
                    {**_SPARSE, "shared_width": "shared_expert_intermediate_size"})  # fmt: skip
QWEN3_MOE = _family("qwen3_moe", "Qwen3Moe", _qwen3_moe, _SPARSE)
OLMOE = _family("olmoe", "Olmoe", _olmoe, _ROUTED)
MOE_FAMILIES = MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE
