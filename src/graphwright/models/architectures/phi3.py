"""Phi-3 and Phi-4: q, k and v in one matrix, gate and up in one, a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping

from graphwright.models.architectures.architecture import Architecture, Config, Stack
from graphwright.models.architectures.decoder import KEYS, Decoder, build_decoder, read_decoder
from graphwright.models.architectures.families import sliding_window
from graphwright.models.architectures.rope import RopeFrequencies, read_rope

_LEGACY = ("su", "yarn")
"""Old names of longrope in configs of this family."""


def _read(config: Config) -> Decoder:
    """Read Phi-3 dimensions: one window for all layers if the config sets one."""
    window = sliding_window(config) if config.get("sliding_window") is not None else None
    return read_decoder(config, lambda _, layers: (window,) * layers, vocab=32064, longest=4096, eps=1e-5,
                        rope=_rope(config))  # fmt: skip


def _rope(config: Config) -> RopeFrequencies:
    """Read the rotary embedding, default or longrope. Raises: ConfigError."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    fields = dict(given) if isinstance(given, Mapping) else {}
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ("default", "longrope", *_LEGACY):
        raise config.invalid("rope_scaling", "an object of the type longrope, or default", given)
    fields["rope_type"] = "longrope" if kind in _LEGACY else kind
    heads = config.size("num_attention_heads", most=1 << 20)
    usual = config.size("hidden_size") // heads
    dim = config.size("head_dim", usual, most=1 << 16)
    if dim != usual and fields["rope_type"] != "default":
        raise config.invalid("head_dim", f"{usual}, for which the class checks the factors of longrope", dim)
    original = config.size("original_max_position_embeddings", 4096)
    more = {"rope_scaling": fields, "original_max_position_embeddings": original}
    return read_rope(Config({**config.fields, **more}, b"", config.path), dim, 4096, partial=True)


_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
_FUSED = (
    Stack(f"{_ATTENTION}.qkv_proj.weight", tuple(f"{_ATTENTION}.{n}_proj.weight" for n in "qkv"), own=True),
    Stack(f"{_MLP}.gate_up_proj.weight", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), own=True),
)
PHI3 = Architecture("phi3", ("Phi3ForCausalLM",), ("phi3",), _read, KEYS, build_decoder, stacks=_FUSED)
