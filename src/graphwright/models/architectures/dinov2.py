"""DINOv2: ViT with scales of the branches, one per channel, and a gated MLP in the largest model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphwright.models.architectures.architecture import Architecture, Config, Stack, WeightKey
from graphwright.models.architectures.encoder import EncoderBuilder, HeadClass, affine, classes_of
from graphwright.models.architectures.vision import (
    VISION_FIELDS,
    VisionEncoder,
    build_vision_encoder,
    first_feature,
    read_vision,
)
from graphwright.models.architectures.vit import attention_keys, embedding_keys

if TYPE_CHECKING:
    from graphwright.program.op_graph import Value


def _read(config: Config) -> VisionEncoder:
    """Read DINOv2 dimensions. Raises: ConfigError for images that are not square, whose positions are interpolated."""
    wide = int(config.size("hidden_size", 768) * config.number("mlp_ratio", 4.0, 1e6))
    gated = config.flag("use_swiglu_ffn", False)
    found = read_vision(config, eps=1e-6, patch=14, activation="gelu", q_bias=config.flag("qkv_bias", True),
                        fields=("hidden", "layers", "heads"), gated=gated,
                        mlp=(int(wide * 2 / 3) + 7) // 8 * 8 if gated else wide)  # fmt: skip
    if found.image_height != found.image_width:
        raise config.invalid("image_size", "one size: images are square", config["image_size"])
    return replace(found, activation="silu") if gated else found


def _label_image(block: EncoderBuilder, x: Value) -> None:
    """Output the logits of labels, from the class token and the mean over patches."""
    b, d = block.b, block.dims
    patches = b.slice(x, axis=1, start=1, size=d.positions - 1, name="patches")
    both = b.concat(block.first(x, "first"), b.mean(patches, axes=(1,), name="mean"), axis=1, name="pooled")
    b.output(block.classifier(both), "logits")


_LAYER = "dinov2.encoder.layer.{i}"
_KEYS = (
    *embedding_keys("dinov2."),
    *affine("layers.{i}.attn.norm", f"{_LAYER}.norm1", "hidden"),
    *attention_keys(_LAYER),
    WeightKey("layers.{i}.attn.scale", f"{_LAYER}.layer_scale1.lambda1", ("hidden",)),
    *affine("layers.{i}.mlp.norm", f"{_LAYER}.norm2", "hidden"),
    *affine("layers.{i}.mlp.up", f"{_LAYER}.mlp.fc1", "mlp", "hidden", when="plain"),
    *affine("layers.{i}.mlp.down", f"{_LAYER}.mlp.fc2", "hidden", "mlp", when="plain"),
    *affine("layers.{i}.mlp.gate", f"{_LAYER}.mlp.gate_proj", "mlp", "hidden", when="gated"),
    *affine("layers.{i}.mlp.up", f"{_LAYER}.mlp.up_proj", "mlp", "hidden", when="gated"),
    *affine("layers.{i}.mlp.down", f"{_LAYER}.mlp.weights_out", "hidden", "mlp", when="gated"),
    WeightKey("layers.{i}.mlp.scale", f"{_LAYER}.layer_scale2.lambda1", ("hidden",)),
    *affine("norm", "dinov2.layernorm", "hidden"),
)
_STACKS = tuple(
    Stack(f"{_LAYER}.mlp.weights_in.{kind}", tuple(f"{_LAYER}.mlp.{part}_proj.{kind}" for part in ("gate", "up")),
          own=True) for kind in ("weight", "bias")
)  # fmt: skip
_FIELDS = {dimension: name for dimension, name in VISION_FIELDS.items() if dimension != "mlp"}
_DINOV2 = Architecture("dinov2", (), ("dinov2",), _read, _KEYS, build_vision_encoder, prefix="dinov2.", fields=_FIELDS,
                       ignored=(r"embeddings\.mask_token$",), multiples=(("hidden", "heads"),),
                       stacks=_STACKS)  # fmt: skip
DINOV2 = classes_of(_DINOV2, "Dinov2", (
    HeadClass("Model", first_feature),
    HeadClass("ForImageClassification", _label_image, affine("classifier", "classifier", "labels", "two*hidden")),
))  # fmt: skip
