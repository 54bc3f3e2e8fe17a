"""BERT, RoBERTa and XLM-R: norms after the sums, learnt positions and token types, a plain MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from graphwright.models.architectures.architecture import Architecture, Config, WeightKey
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

_SIZES = {"vocab": 30522, "hidden": 768, "layers": 12, "heads": 12, "mlp": 3072, "positions": 512, "types": 2}


def _bert(config: Config) -> Encoder:
    """Read BERT dimensions."""
    return read_encoder(config, NAMES, _SIZES, eps=1e-12, activation=("hidden_act", "gelu"))


def _keys(prefix: str) -> tuple[WeightKey, ...]:
    """Return the weights of the base model, without the pooler."""
    base, layer = f"{prefix}embeddings", f"{prefix}encoder.layer.{{i}}"
    return (
        WeightKey("embed.weight", f"{base}.word_embeddings.weight", ("vocab", "hidden")),
        WeightKey("embed.positions.weight", f"{base}.position_embeddings.weight", ("positions", "hidden")),
        WeightKey("embed.types.weight", f"{base}.token_type_embeddings.weight", ("types", "hidden"), "typed"),
        *affine("embed.norm", f"{base}.LayerNorm", "hidden"),
        *affine("layers.{i}.attn.q", f"{layer}.attention.self.query", "heads*head_dim", "hidden"),
        *affine("layers.{i}.attn.k", f"{layer}.attention.self.key", "kv_heads*head_dim", "hidden"),
        *affine("layers.{i}.attn.v", f"{layer}.attention.self.value", "kv_heads*head_dim", "hidden"),
        *affine("layers.{i}.attn.o", f"{layer}.attention.output.dense", "hidden", "heads*head_dim"),
        *affine("layers.{i}.attn.sum_norm", f"{layer}.attention.output.LayerNorm", "hidden"),
        *affine("layers.{i}.mlp.up", f"{layer}.intermediate.dense", "mlp", "hidden"),
        *affine("layers.{i}.mlp.down", f"{layer}.output.dense", "hidden", "mlp"),
        *affine("layers.{i}.mlp.sum_norm", f"{layer}.output.LayerNorm", "hidden"),
    )


def _pooler(prefix: str) -> tuple[WeightKey, ...]:
    return affine("pooler", f"{prefix}pooler.dense", "hidden", "hidden")


CLASSIFIER = affine("classifier", "classifier", "labels", "hidden")
ANSWERS = affine("classifier", "qa_outputs", "answers", "hidden")
OLDER = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
POSITIONS = r"embeddings\.position_ids$"
"""Key of a table of positions that old files have."""

_LM_HEAD = (
    *affine("lm_head.dense", "cls.predictions.transform.dense", "hidden", "hidden"),
    *affine("lm_head.norm", "cls.predictions.transform.LayerNorm", "hidden"),
    *lm_head_keys("cls.predictions.decoder", "cls.predictions.bias"),
)
_BERT = Architecture(
    "bert", (), ("bert",), _bert, _keys("bert."), build_text_encoder, prefix="bert.", fields=NAMES, defaults=TYPES,
    ignored=(POSITIONS, r"^cls\.seq_relationship\."), multiples=(("hidden", "heads"),), older=OLDER,
    copies={"cls.predictions.decoder.weight": "embed.weight", "cls.predictions.decoder.bias": "lm_head.bias"},
)  # fmt: skip
BERT = classes_of(_BERT, "Bert", (
    HeadClass("Model", features, _pooler("bert.")),
    HeadClass("ForMaskedLM", masked_lm, _LM_HEAD),
    HeadClass("ForSequenceClassification", label_sequence, (*_pooler("bert."), *CLASSIFIER)),
    HeadClass("ForTokenClassification", label_tokens, CLASSIFIER),
    HeadClass("ForQuestionAnswering", answer, ANSWERS),
))  # fmt: skip


# -- RoBERTa -----------------------------------------------------------------------------------------------------------
def _roberta(config: Config) -> Encoder:
    """Read RoBERTa dimensions: positions are counted after the token of padding."""
    return read_encoder(config, NAMES, {**_SIZES, "vocab": 50265}, eps=1e-12, activation=("hidden_act", "gelu"),
                        pad=config.size("pad_token_id", 1, least=0))  # fmt: skip


def _xlm_roberta(config: Config) -> Encoder:
    """Read XLM-R dimensions."""
    return replace(_roberta(config), vocab=config.size("vocab_size", _SIZES["vocab"]))


_ROBERTA = Architecture(
    "roberta", (), ("roberta",), _roberta, _keys("roberta."), build_text_encoder, prefix="roberta.", fields=NAMES,
    defaults=TYPES, ignored=(POSITIONS,), multiples=(("hidden", "heads"),), older=OLDER,
    copies={"lm_head.decoder.weight": "embed.weight", "lm_head.decoder.bias": "lm_head.bias"},
)  # fmt: skip
_HEADS = (
    HeadClass("Model", features, _pooler("roberta.")),
    HeadClass("ForMaskedLM", partial(masked_lm, act="gelu"), (
        *affine("lm_head.dense", "lm_head.dense", "hidden", "hidden"),
        *affine("lm_head.norm", "lm_head.layer_norm", "hidden"),
        *lm_head_keys("lm_head.decoder", "lm_head.bias"),
    )),
    HeadClass("ForSequenceClassification", partial(label_sequence, act="tanh"), (
        *affine("classifier.dense", "classifier.dense", "hidden", "hidden"),
        *affine("classifier", "classifier.out_proj", "labels", "hidden"),
    )),
    HeadClass("ForTokenClassification", label_tokens, CLASSIFIER),
    HeadClass("ForQuestionAnswering", answer, ANSWERS),
)  # fmt: skip
ROBERTA = classes_of(_ROBERTA, "Roberta", _HEADS)
_XLM_ROBERTA = replace(_ROBERTA, name="xlm-roberta", model_types=("xlm-roberta",), read=_xlm_roberta)
XLM_ROBERTA = classes_of(_XLM_ROBERTA, "XLMRoberta", _HEADS)
