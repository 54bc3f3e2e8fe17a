"""ViT: a class token, learnt positions, norms before the branches, biases on q, k and v if the config says so."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, Config, WeightKey
from graphwright.models.architectures.bert import CLASSIFIER
from graphwright.models.architectures.decoder import ACTIVATIONS
from graphwright.models.architectures.encoder import HeadClass, affine, classes_of, features, label_sequence
from graphwright.models.architectures.vision import (
    VISION_FIELDS,
    VisionEncoder,
    build_vision_encoder,
    patch_keys,
    read_vision,
)


def _read(config: Config) -> VisionEncoder:
    """Read ViT dimensions."""
    return read_vision(config, eps=1e-12, patch=16, activation="gelu", q_bias=config.flag("qkv_bias", True),
                       pooled=config.size("pooler_output_size", config.size("hidden_size", 768)),
                       pooler_activation=config.choice("pooler_act", "tanh", tuple(ACTIVATIONS)))  # fmt: skip


def attention_keys(layer: str) -> tuple[WeightKey, ...]:
    """Return the matrices of the attention of the layer `layer`."""
    return (
        *affine("layers.{i}.attn.q", f"{layer}.attention.attention.query", "heads*head_dim", "hidden", bias="q_bias"),
        *affine("layers.{i}.attn.k", f"{layer}.attention.attention.key", "kv_heads*head_dim", "hidden", bias="q_bias"),
        *affine("layers.{i}.attn.v", f"{layer}.attention.attention.value", "kv_heads*head_dim", "hidden",
                bias="q_bias"),
        *affine("layers.{i}.attn.o", f"{layer}.attention.output.dense", "hidden", "heads*head_dim"),
    )  # fmt: skip


def embedding_keys(prefix: str) -> tuple[WeightKey, ...]:
    """Return the weights of the embeddings."""
    return (
        *patch_keys(f"{prefix}embeddings.patch_embeddings.projection"),
        WeightKey("embed.class", f"{prefix}embeddings.cls_token", ("one", "one", "hidden")),
        WeightKey("embed.positions", f"{prefix}embeddings.position_embeddings", ("one", "positions", "hidden")),
    )


_LAYER = "vit.encoder.layer.{i}"
_KEYS = (
    *embedding_keys("vit."),
    *affine("layers.{i}.attn.norm", f"{_LAYER}.layernorm_before", "hidden"),
    *attention_keys(_LAYER),
    *affine("layers.{i}.mlp.norm", f"{_LAYER}.layernorm_after", "hidden"),
    *affine("layers.{i}.mlp.up", f"{_LAYER}.intermediate.dense", "mlp", "hidden"),
    *affine("layers.{i}.mlp.down", f"{_LAYER}.output.dense", "hidden", "mlp"),
    *affine("norm", "vit.layernorm", "hidden"),
)
_VIT = Architecture("vit", (), ("vit",), _read, _KEYS, build_vision_encoder, prefix="vit.", fields=VISION_FIELDS,
                    ignored=(r"embeddings\.mask_token$",), multiples=(("hidden", "heads"),))  # fmt: skip
VIT = classes_of(_VIT, "ViT", (
    HeadClass("Model", features, affine("pooler", "vit.pooler.dense", "pooled", "hidden")),
    HeadClass("ForImageClassification", label_sequence, CLASSIFIER),
))  # fmt: skip
