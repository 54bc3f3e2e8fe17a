"""DistilBERT: BERT without token types and pooler, under other names."""

from __future__ import annotations

from functools import partial

from graphwright.models.architectures.architecture import Architecture, Config, WeightKey
from graphwright.models.architectures.bert import ANSWERS, CLASSIFIER, OLDER, POSITIONS
from graphwright.models.architectures.encoder import (
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

_SIZES = {"vocab": 30522, "hidden": 768, "layers": 6, "heads": 12, "mlp": 3072, "positions": 512}
_FIELDS = {"hidden": "dim", "layers": "n_layers", "heads": "n_heads", "mlp": "hidden_dim", "vocab": "vocab_size",
           "positions": "max_position_embeddings"}  # fmt: skip
_SPELLINGS = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}


def _read(config: Config) -> Encoder:
    """Read DistilBERT dimensions; the eps of its norms is no field."""
    names = {dimension: _SPELLINGS.get(name, name) if _SPELLINGS.get(name, name) in config else name
             for dimension, name in _FIELDS.items()}  # fmt: skip
    return read_encoder(config, names, _SIZES, eps=1e-12, activation=("activation", "gelu"))


_LAYER = "distilbert.transformer.layer.{i}"
_KEYS = (
    WeightKey("embed.weight", "distilbert.embeddings.word_embeddings.weight", ("vocab", "hidden")),
    WeightKey("embed.positions.weight", "distilbert.embeddings.position_embeddings.weight", ("positions", "hidden")),
    *affine("embed.norm", "distilbert.embeddings.LayerNorm", "hidden"),
    *affine("layers.{i}.attn.q", f"{_LAYER}.attention.q_lin", "heads*head_dim", "hidden"),
    *affine("layers.{i}.attn.k", f"{_LAYER}.attention.k_lin", "kv_heads*head_dim", "hidden"),
    *affine("layers.{i}.attn.v", f"{_LAYER}.attention.v_lin", "kv_heads*head_dim", "hidden"),
    *affine("layers.{i}.attn.o", f"{_LAYER}.attention.out_lin", "hidden", "heads*head_dim"),
    *affine("layers.{i}.attn.sum_norm", f"{_LAYER}.sa_layer_norm", "hidden"),
    *affine("layers.{i}.mlp.up", f"{_LAYER}.ffn.lin1", "mlp", "hidden"),
    *affine("layers.{i}.mlp.down", f"{_LAYER}.ffn.lin2", "hidden", "mlp"),
    *affine("layers.{i}.mlp.sum_norm", f"{_LAYER}.output_layer_norm", "hidden"),
)
_DISTILBERT = Architecture(
    "distilbert", (), ("distilbert",), _read, _KEYS, build_text_encoder, prefix="distilbert.", fields=_FIELDS,
    ignored=(POSITIONS,), multiples=(("hidden", "heads"),), spellings=_SPELLINGS, older=OLDER,
    copies={"vocab_projector.weight": "embed.weight"},
)  # fmt: skip
DISTILBERT = classes_of(_DISTILBERT, "DistilBert", (
    HeadClass("Model", features),
    HeadClass("ForMaskedLM", masked_lm, (
        *affine("lm_head.dense", "vocab_transform", "hidden", "hidden"),
        *affine("lm_head.norm", "vocab_layer_norm", "hidden"),
        *lm_head_keys("vocab_projector", "vocab_projector.bias"),
    )),
    HeadClass("ForSequenceClassification", partial(label_sequence, act="relu"), (
        *affine("classifier.dense", "pre_classifier", "hidden", "hidden"), *CLASSIFIER,
    )),
    HeadClass("ForTokenClassification", label_tokens, CLASSIFIER),
    HeadClass("ForQuestionAnswering", answer, ANSWERS),
))  # fmt: skip
