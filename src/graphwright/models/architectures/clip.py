"""The image encoders of CLIP and SigLIP: the layers are equal; SigLIP has a pooler of attention, not a class token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.models.architectures.architecture import Architecture, Config, Stack, WeightKey
from graphwright.models.architectures.encoder import EncoderBuilder, HeadClass, affine, classes_of
from graphwright.models.architectures.vision import (
    VISION_FIELDS,
    VisionBuilder,
    VisionEncoder,
    build_vision_encoder,
    first_feature,
    patch_keys,
    read_vision,
)

if TYPE_CHECKING:
    from graphwright.program.op_graph import Value


def _clip(config: Config) -> VisionEncoder:
    """Read CLIP dimensions."""
    return read_vision(
        config, eps=1e-5, patch=32, activation="quick_gelu", projected=config.size("projection_dim", 512)
    )


def _siglip(config: Config) -> VisionEncoder:
    """Read SigLIP dimensions."""
    return read_vision(config, eps=1e-6, patch=16, activation="gelu_pytorch_tanh", classes=0,
                       pooler=config.flag("vision_use_head", True))  # fmt: skip


def _project(block: EncoderBuilder, x: Value) -> None:
    """Output the projection of the class token, and the hidden states."""
    pooled = block.norm(block.first(x, "first"), "pooler.norm")
    block.b.output(block.linear(pooled, "projection"), "image_embeds")
    block.b.output(x, "last_hidden_state")


def _attend_once(block: EncoderBuilder, x: Value) -> None:
    """Output the hidden states, and what a learnt query reads from them, after an MLP."""
    b, d = block.b, block.dims
    assert isinstance(block, VisionBuilder)
    assert isinstance(d, VisionEncoder)
    b.output(x, "last_hidden_state")
    if not d.pooler:
        return
    rows = {"q": block.each("pooler.probe"), "k": x, "v": x}
    q, k, v = (block.heads(block.linear(r, f"pooler.attn.{n}"), d.heads, f"pooler.attn.{n}", False)
               for n, r in rows.items())  # fmt: skip
    o = b.sdpa(q, k, v, scale=d.head_dim**-0.5, causal=False, name="pooler.attn.sdpa")
    merged = b.flatten(b.permute(o, axes=(0, 2, 1, 3), name="pooler.attn.sdpa_rows"), start=2, end=3,
                       name="pooler.attn.sdpa_merged")  # fmt: skip
    read = block.linear(merged, "pooler.attn.o")
    out = b.junction(read, block.mlp(block.norm(read, "pooler.mlp.norm"), "pooler.mlp"), name="pooler.out")
    b.output(b.squeeze(out, axes=(1,), name="pooler"), "pooler_output")


_BASE, _LAYER, _HEAD = "vision_model.embeddings", "vision_model.encoder.layers.{i}", "vision_model.head"
_POSITIONS = WeightKey("embed.positions", f"{_BASE}.position_embedding.weight", ("positions", "hidden"))
_LAYERS = (
    *affine("layers.{i}.attn.norm", f"{_LAYER}.layer_norm1", "hidden"),
    *affine("layers.{i}.attn.q", f"{_LAYER}.self_attn.q_proj", "heads*head_dim", "hidden"),
    *affine("layers.{i}.attn.k", f"{_LAYER}.self_attn.k_proj", "kv_heads*head_dim", "hidden"),
    *affine("layers.{i}.attn.v", f"{_LAYER}.self_attn.v_proj", "kv_heads*head_dim", "hidden"),
    *affine("layers.{i}.attn.o", f"{_LAYER}.self_attn.out_proj", "hidden", "heads*head_dim"),
    *affine("layers.{i}.mlp.norm", f"{_LAYER}.layer_norm2", "hidden"),
    *affine("layers.{i}.mlp.up", f"{_LAYER}.mlp.fc1", "mlp", "hidden"),
    *affine("layers.{i}.mlp.down", f"{_LAYER}.mlp.fc2", "hidden", "mlp"),
)
_IGNORED = (r"embeddings\.position_ids$",)

_CLIP = Architecture(
    "clip", (), ("clip_vision_model",), _clip, (
        *patch_keys(f"{_BASE}.patch_embedding", None),
        WeightKey("embed.class", f"{_BASE}.class_embedding", ("hidden",)),
        _POSITIONS,
        *affine("embed.norm", "vision_model.pre_layrnorm", "hidden"),
        *_LAYERS,
        *affine("pooler.norm", "vision_model.post_layernorm", "hidden"),
    ), build_vision_encoder, prefix="vision_model.", fields=VISION_FIELDS, ignored=_IGNORED,
    multiples=(("hidden", "heads"),),
)  # fmt: skip
CLIP_VISION = classes_of(_CLIP, "CLIPVision", (
    HeadClass("Model", first_feature),
    HeadClass("ModelWithProjection", _project,
              affine("projection", "visual_projection", "projected", "hidden", bias=None)),
))  # fmt: skip

_POOLER = (
    WeightKey("pooler.probe", f"{_HEAD}.probe", ("one", "one", "hidden"), "pooler"),
    *affine("pooler.attn.q", f"{_HEAD}.attention.q_proj", "heads*head_dim", "hidden", when="pooler"),
    *affine("pooler.attn.k", f"{_HEAD}.attention.k_proj", "kv_heads*head_dim", "hidden", when="pooler"),
    *affine("pooler.attn.v", f"{_HEAD}.attention.v_proj", "kv_heads*head_dim", "hidden", when="pooler"),
    *affine("pooler.attn.o", f"{_HEAD}.attention.out_proj", "hidden", "heads*head_dim", when="pooler"),
    *affine("pooler.mlp.norm", f"{_HEAD}.layernorm", "hidden", when="pooler"),
    *affine("pooler.mlp.up", f"{_HEAD}.mlp.fc1", "mlp", "hidden", when="pooler"),
    *affine("pooler.mlp.down", f"{_HEAD}.mlp.fc2", "hidden", "mlp", when="pooler"),
)
_SIGLIP = Architecture(
    "siglip", (), ("siglip_vision_model",), _siglip, (
        *patch_keys(f"{_BASE}.patch_embedding"), _POSITIONS, *_LAYERS,
        *affine("norm", "vision_model.post_layernorm", "hidden"),
    ), build_vision_encoder, prefix="vision_model.", fields=VISION_FIELDS, ignored=_IGNORED,
    multiples=(("hidden", "heads"),),
    stacks=tuple(Stack(f"{_HEAD}.attention.in_proj_{kind}",
                       tuple(f"{_HEAD}.attention.{n}_proj.{kind}" for n in "qkv"), own=True)
                 for kind in ("weight", "bias")),
)  # fmt: skip
SIGLIP_VISION = classes_of(_SIGLIP, "SiglipVision", (HeadClass("Model", _attend_once, _POOLER),))
