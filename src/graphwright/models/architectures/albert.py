"""ALBERT: one layer of weights for all layers, and embeddings that a matrix widens."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, Config, WeightKey
from graphwright.models.architectures.bert import ANSWERS, CLASSIFIER, OLDER, POSITIONS
from graphwright.models.architectures.encoder import (
    NAMES,
    TYPES,
    Encoder,
    HeadClass,
    affine,
    answer,
    build_text_encoder,
    classes_of,
    features,
    label_sequence,
    label_tokens,
    lm_head_keys,
    masked_lm,
    read_encoder,
)

_SIZES = {"vocab": 30000, "hidden": 4096, "layers": 12, "heads": 64, "mlp": 16384, "positions": 512, "types": 2,
          "width": 128}  # fmt: skip
_FIELDS = {**NAMES, "width": "embedding_size"}


def _read(config: Config) -> Encoder:
    """Read ALBERT dimensions. Raises: ConfigError for several groups of layers."""
    for name in ("num_hidden_groups", "inner_group_num"):
        if config.size(name, 1) != 1:
            raise config.invalid(name, "1: all layers share their weights", config[name])
    return read_encoder(config, _FIELDS, _SIZES, eps=1e-12, activation=("hidden_act", "gelu_new"))


_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
_KEYS = (
    WeightKey("embed.weight", "albert.embeddings.word_embeddings.weight", ("vocab", "width")),
    WeightKey("embed.positions.weight", "albert.embeddings.position_embeddings.weight", ("positions", "width")),
    WeightKey("embed.types.weight", "albert.embeddings.token_type_embeddings.weight", ("types", "width"), "typed"),
    *affine("embed.norm", "albert.embeddings.LayerNorm", "width"),
    *affine("embed.map", "albert.encoder.embedding_hidden_mapping_in", "hidden", "width"),
    *affine("shared.attn.q", f"{_LAYER}.attention.query", "heads*head_dim", "hidden"),
    *affine("shared.attn.k", f"{_LAYER}.attention.key", "kv_heads*head_dim", "hidden"),
    *affine("shared.attn.v", f"{_LAYER}.attention.value", "kv_heads*head_dim", "hidden"),
    *affine("shared.attn.o", f"{_LAYER}.attention.dense", "hidden", "heads*head_dim"),
    *affine("shared.attn.sum_norm", f"{_LAYER}.attention.LayerNorm", "hidden"),
    *affine("shared.mlp.up", f"{_LAYER}.ffn", "mlp", "hidden"),
    *affine("shared.mlp.down", f"{_LAYER}.ffn_output", "hidden", "mlp"),
    *affine("shared.mlp.sum_norm", f"{_LAYER}.full_layer_layer_norm", "hidden"),
)
_POOLER = affine("pooler", "albert.pooler", "hidden", "hidden")
_ALBERT = Architecture(
    "albert", (), ("albert",), _read, _KEYS, build_text_encoder, prefix="albert.", fields=_FIELDS, defaults=TYPES,
    ignored=(POSITIONS, r"^sop_classifier\."), multiples=(("hidden", "heads"),), older=OLDER,
    copies={"predictions.decoder.weight": "embed.weight", "predictions.decoder.bias": "lm_head.bias"},
)  # fmt: skip
ALBERT = classes_of(_ALBERT, "Albert", (
    HeadClass("Model", features, _POOLER),
    HeadClass("ForMaskedLM", masked_lm, (
        *affine("lm_head.dense", "predictions.dense", "width", "hidden"),
        *affine("lm_head.norm", "predictions.LayerNorm", "width"),
        *lm_head_keys("predictions.decoder", "predictions.bias", "width"),
    )),
    HeadClass("ForSequenceClassification", label_sequence, (*_POOLER, *CLASSIFIER)),
    HeadClass("ForTokenClassification", label_tokens, CLASSIFIER),
    HeadClass("ForQuestionAnswering", answer, ANSWERS),
))  # fmt: skip
