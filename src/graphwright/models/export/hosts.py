"""Hosts: the classes with routed layers that can hold models of dense families whose MLPs were replaced by experts."""

from __future__ import annotations

import json
from copy import copy
from typing import TYPE_CHECKING, Any

from graphwright.array.formulas.experts import FIRST, experts_of
from graphwright.models.architectures.architecture import FIELDS, Architecture, Config
from graphwright.models.architectures.moe_families import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from graphwright.models.errors import ConfigError
from graphwright.models.export.template_match import routed_layers, size_of_groups

if TYPE_CHECKING:
    from graphwright.models.model import Model

HOSTS: dict[str, Architecture] = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen2": QWEN2_MOE, "qwen3": QWEN3_MOE}
"""Name of a dense family -> the family with routed layers whose attention, norms and experts are the same."""


def as_host(model: Model) -> Model | None:
    """Return the model as one of the host of its family, with a config of the program's experts.

    None if the family has no host, the program no routed layer, or the host's class refuses the config. Every field is
    written, because the classes have other defaults. The program is the same; it may not match the host's template.
    """
    host, p = HOSTS.get(model.arch.name), model.program
    routed = routed_layers(p)
    if host is None or not routed:
        return None
    node = next(iter(routed.values()))
    operands = p.operands(node)
    first, chosen = experts_of(operands[FIRST:], p.attrs(node))[0], p.spec(operands[FIRST - 1]).shape[-1]
    layers, dims = range(model.config_dims.layers), model.config_dims
    fields = {
        FIELDS[n]: getattr(dims, n) for n in ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab", "eps")
    }
    fields |= {"architectures": list(host.classes), "model_type": host.model_types[0]}
    fields |= {"hidden_act": model.config.get("hidden_act") or "silu", "tie_word_embeddings": dims.tied}
    fields |= {"max_position_embeddings": dims.positions, "norm_topk_prob": True}
    fields |= {"attention_bias": dims.o_bias, "qkv_bias": dims.q_bias, "intermediate_size": dims.mlp}
    fields |= _rotary(model) | _windows(dims)
    fields |= {host.fields["experts"]: size_of_groups(p, node), host.fields["chosen"]: chosen}
    fields |= {host.fields["expert_width"]: p.spec(first.up).sizes[0]}
    fields |= {"shared_expert_intermediate_size": 1} if "shared_width" in host.fields else {}
    fields |= {"mlp_only_layers": [i for i in layers if i not in routed], "decoder_sparse_step": 1}
    lacking = _DENSE | _UNKNOWN[host.name]
    made = {k: v for k, v in {**model.config.fields, **fields}.items() if k not in lacking}
    config = Config(made, (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode(), model.config.path)
    twin = copy(model)
    try:
        twin.arch, twin.config, twin.config_dims = host, config, host.read(config)
    except ConfigError:
        return None
    return twin


_DENSE = frozenset({"mlp_bias", "pretraining_tp", "auto_map", "_name_or_path", "max_window_layers"})
"""Fields of dense classes that hosts do not have or that `layer_types` replaces."""
_SPARSE = frozenset({"mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"})
_UNKNOWN = {
    "mixtral": _SPARSE | {"qkv_bias", "attention_bias", "use_sliding_window", "layer_types"},
    "qwen2_moe": {"attention_bias"},
    "qwen3_moe": {"qkv_bias", "layer_types"},
}
"""Name of a host -> fields that its config does not have."""


def _rotary(model: Model) -> dict[str, Any]:
    """Return the base of RoPE if the config is silent about it."""
    given = [model.config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    stated = model.config.get("rope_theta") is not None or any("rope_theta" in g for g in given)
    return {} if stated else {"rope_theta": model.config_dims.rope.theta}


def _windows(dims: Any) -> dict[str, Any]:
    known = {w for w in dims.windows if w is not None}
    types = ["full_attention" if w is None else "sliding_attention" for w in dims.windows]
    window = max(known) if known else None
    return {"sliding_window": window, "use_sliding_window": bool(known), "layer_types": types}
