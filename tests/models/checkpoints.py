"""Small real checkpoints: written by transformers from configs with odd sizes, every feature of §3.1 alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
CLASSES = {
    **{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"},
    **{"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"},
}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **fields}}


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 10}),
    "llama-one-head-per-group": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama-one-group": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 22}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.05}),
    "llama-theta": ("llama", _rope("default")),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-new": ("llama", {"hidden_act": "gelu_new"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("llama", {"hidden_act": "relu"}),
    "rope-linear": ("llama", _rope("linear", factor=3.0)),
    "rope-dynamic": ("llama", {"max_position_embeddings": 20, **_rope("dynamic", factor=3.0)}),
    "rope-llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "rope-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "rope-yarn-full": (
        "llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8,
            beta_slow=2,
            mscale=0.9,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "rope-longrope-short": (
        "llama",
        {
            "head_dim": 8,
            **_rope(
                "longrope",
                factor=2.0,
                original_max_position_embeddings=64,
                short_factor=[1.0, 1.1, 1.3, 1.5],
                long_factor=[1.0, 2.0, 4.0, 8.0],
            ),
        },
    ),
    "rope-longrope-long": (
        "llama",
        {
            "head_dim": 8,
            **_rope(
                "longrope",
                factor=4.0,
                original_max_position_embeddings=16,
                short_factor=[1.0, 1.1, 1.3, 1.5],
                long_factor=[1.0, 2.0, 4.0, 8.0],
            ),
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-bias": ("qwen3", {"head_dim": 14, "attention_bias": True}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
"""Name -> (family, fields that differ from SIZES)."""

_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 10}),
    "mixtral-window": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 5}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **{**_EXPERTS, "shared_expert_intermediate_size": 44, "mlp_only_layers": [1]},
            **{"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        },
    ),
    "qwen2_moe-step": (
        "qwen2_moe",
        {
            **{**_EXPERTS, "shared_expert_intermediate_size": 44, "decoder_sparse_step": 2},
            **{"norm_topk_prob": True, "qkv_bias": False, "num_hidden_layers": 4},
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 14, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 4},
    ),
    "qwen3_moe-bias": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "attention_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "clip_qkv": 0.6}),
    "olmoe-bias": (
        "olmoe",
        {
            **{"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True},
            **{"num_key_value_heads": 6, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        },
    ),
}
"""The same for families with routed layers."""

LATER_CLASSES = {
    **{"gemma": ("Gemma", "GemmaForCausalLM"), "gemma2": ("Gemma2", "Gemma2ForCausalLM")},
    **{"gemma3": ("Gemma3Text", "Gemma3ForCausalLM"), "phi3": ("Phi3", "Phi3ForCausalLM")},
    **{"olmo2": ("Olmo2", "Olmo2ForCausalLM"), "olmo3": ("Olmo3", "Olmo3ForCausalLM")},
    "gpt2": ("GPT2", "GPT2LMHeadModel"),
}
"""Family -> beginning of the name of its config, and its class of transformers."""
LATER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 10}),
    "gemma2": (
        "gemma2",
        {
            **{"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 7, "attention_bias": True},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        },
    ),
    "gemma3": (
        "gemma3",
        {
            **{"head_dim": 14, "sliding_window": 5, "query_pre_attn_scalar": 7},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": (
        "phi3",
        {
            **{"sliding_window": 9, "original_max_position_embeddings": 48, "pad_token_id": None},
            "rope_parameters": {
                **{"rope_type": "longrope", "partial_rotary_factor": 0.75},
                **{"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0]},
            },
        },
    ),
    "olmo2": ("olmo2", {"attention_bias": True, "pad_token_id": None}),
    "olmo3": (
        "olmo3",
        {
            **{"sliding_window": 5, "pad_token_id": None},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "gpt2": ("gpt2", {"n_inner": 76}),
}
"""The same for families whose blocks differ from Llama's; one checkpoint has all that is unusual of a family."""


@dataclass(frozen=True)
class Made:
    """A checkpoint on disk and the model of transformers that wrote it, in float32."""

    path: Path
    model: Any

    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Logits of transformers, eager attention, float32; positions count the true entries of the mask."""
        extra = {}
        if mask is not None:
            positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
            extra = {"attention_mask": torch.tensor(mask.astype(np.int64)), "position_ids": torch.tensor(positions)}
        with torch.no_grad():
            self.model(torch.tensor(ids[:1, :1]))  # dynamic RoPE keeps the frequencies of the longest input until this
            return self.model(torch.tensor(ids), **extra).logits.float().numpy()

    def greedy(self, ids: np.ndarray, steps: int) -> list[int]:
        """Greedy continuation of one prompt [T] by transformers' own generate."""
        out = self.model.generate(
            torch.tensor(ids[None]), max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()


def make(path: Path, family: str, *, dtype: str = "float32", shard: str = "5GB", seed: int = 0, **fields: Any) -> Made:
    """Write a checkpoint with random weights."""
    settings, name = LATER_CLASSES.get(family) or (CLASSES[family], f"{CLASSES[family]}ForCausalLM")
    config = getattr(transformers, f"{settings}Config")(**{**SIZES, **fields})
    config._attn_implementation = "eager"
    kind = getattr(transformers, name)
    model, later = kind(config).eval(), family in LATER_CLASSES
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = key.endswith("norm.weight")
            if later:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if p.dim() == 1 else 2 * p.shape[-1] ** -0.5))
                continue
            p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if norm or p.dim() == 1 else p.shape[-1] ** -0.5))
            if norm:
                p.add_(1.0)
            if "embed" in key:
                p.mul_(p.shape[-1] ** 0.5)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard)
    if dtype != "float32":  # read again: .to() rounded the rotary frequencies too
        model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return Made(path, model)


def edit_config(path: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Change fields of a config.json; `remove` takes some out."""
    file = path / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in remove}
    file.write_text(json.dumps({**config, **fields}))


def some_ids(shape: tuple[int, ...], seed: int = 1, vocab: int = SIZES["vocab_size"]) -> np.ndarray:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, vocab, shape)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """max |a - b| / max |b|."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


UNUSUAL: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 10, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
    "qwen3": {"head_dim": 14},
}
"""Family -> config fields that most checkpoints of the family do not have."""
