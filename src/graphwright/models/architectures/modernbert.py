"""ModernBERT: norms before the branches, RoPE, windows in most layers, q, k and v in one matrix, a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphwright.models.architectures.architecture import Architecture, Config, Stack, WeightKey
from graphwright.models.architectures.decoder import ACTIVATIONS, layer_types
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
    masked_lm,
    read_encoder,
)
from graphwright.models.architectures.rope import read_layer_ropes


@dataclass(frozen=True, slots=True)
class ModernBert(Encoder):
    """Dimensions of a ModernBERT.

    Attributes:
        norm_bias, head_bias, decoder_bias: whether norms, the dense layer of the head and the last matrix have a bias.
    """

    norm_bias: bool = False
    head_bias: bool = False
    decoder_bias: bool = True

    @property
    def attn_norms(self) -> tuple[bool, ...]:
        """Whether each layer has a norm before its attention: all but the first, which reads normalised embeddings."""
        return tuple(i > 0 for i in range(self.layers))

    @property
    def attn_norm_biases(self) -> tuple[bool, ...]:
        """Whether the norm before the attention of each layer has a bias."""
        return tuple(self.norm_bias and has for has in self.attn_norms)


_SIZES = {"vocab": 50368, "hidden": 768, "layers": 22, "heads": 12, "mlp": 1152, "positions": 8192}
_FIELDS = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
           "mlp": "intermediate_size", "vocab": "vocab_size", "positions": "max_position_embeddings",
           "eps": "norm_eps"}  # fmt: skip


def _read(config: Config) -> ModernBert:
    """Read ModernBERT dimensions; `local_attention` is the width of a window, of which half is on each side."""
    layers, every = config.size("num_hidden_layers", 22, most=100_000), config.size("global_attn_every_n_layers", 3)
    window = config.size("local_attention", 128) // 2
    if config.get("rope_scaling") is not None:
        raise config.invalid("rope_scaling", "null; rope_parameters has the thetas", config["rope_scaling"])
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12, most=1 << 20)
    given = Config({**config.fields, "rope_theta": config.get("global_rope_theta")}, b"", config.path)
    rope, local = read_layer_ropes(given, max(hidden // heads, 2), 8192, 160_000.0, 10_000.0, "local_rope_theta")
    more: dict[str, Any] = {
        "windows": layer_types(config, layers, window, lambda i: i % every != 0), "rope": rope, "local_rope": local,
        "q_bias": config.flag("attention_bias", False), "o_bias": config.flag("attention_bias", False),
        "mlp_bias": config.flag("mlp_bias", False), "norm_bias": config.flag("norm_bias", False),
        "head_bias": config.flag("classifier_bias", False), "decoder_bias": config.flag("decoder_bias", True),
        "head_activation": config.choice("classifier_activation", "gelu", tuple(ACTIVATIONS)),
        "mean": config.choice("classifier_pooling", "cls", ("cls", "mean")) == "mean", "make": ModernBert,
    }  # fmt: skip
    return read_encoder(config, _FIELDS, _SIZES, eps=1e-5, activation=("hidden_activation", "gelu"), **more)


_LAYER = "model.layers.{i}"
_KEYS = (
    WeightKey("embed.weight", "model.embeddings.tok_embeddings.weight", ("vocab", "hidden")),
    *affine("embed.norm", "model.embeddings.norm", "hidden", bias="norm_bias"),
    *affine("layers.{i}.attn.norm", f"{_LAYER}.attn_norm", "hidden", bias="attn_norm_biases", when="attn_norms"),
    *affine("layers.{i}.attn.q", f"{_LAYER}.attn.q_proj", "heads*head_dim", "hidden", bias="q_bias"),
    *affine("layers.{i}.attn.k", f"{_LAYER}.attn.k_proj", "kv_heads*head_dim", "hidden", bias="q_bias"),
    *affine("layers.{i}.attn.v", f"{_LAYER}.attn.v_proj", "kv_heads*head_dim", "hidden", bias="q_bias"),
    *affine("layers.{i}.attn.o", f"{_LAYER}.attn.Wo", "hidden", "heads*head_dim", bias="o_bias"),
    *affine("layers.{i}.mlp.norm", f"{_LAYER}.mlp_norm", "hidden", bias="norm_bias"),
    *affine("layers.{i}.mlp.gate", f"{_LAYER}.mlp.gate_proj", "mlp", "hidden", bias="mlp_bias"),
    *affine("layers.{i}.mlp.up", f"{_LAYER}.mlp.up_proj", "mlp", "hidden", bias="mlp_bias"),
    *affine("layers.{i}.mlp.down", f"{_LAYER}.mlp.Wo", "hidden", "mlp", bias="mlp_bias"),
    *affine("norm", "model.final_norm", "hidden", bias="norm_bias"),
)
_STACKS = tuple(
    Stack(f"{_LAYER}.{whole}.{kind}", tuple(f"{_LAYER}.{part}_proj.{kind}" for part in parts), own=True)
    for whole, parts in (("attn.Wqkv", ("attn.q", "attn.k", "attn.v")), ("mlp.Wi", ("mlp.gate", "mlp.up")))
    for kind in ("weight", "bias")
)


def _head(path: str) -> tuple[WeightKey, ...]:
    return (*affine(f"{path}.dense", "head.dense", "hidden", "hidden", bias="head_bias"),
            *affine(f"{path}.norm", "head.norm", "hidden", bias="norm_bias"))  # fmt: skip


_CLASSIFIER = (*_head("classifier"), *affine("classifier", "classifier", "labels", "hidden"))
_MODERNBERT = Architecture(
    "modernbert", (), ("modernbert",), _read, _KEYS, build_text_encoder, fields=_FIELDS,
    multiples=(("hidden", "heads"),), stacks=_STACKS, copies={"decoder.weight": "embed.weight"},
)  # fmt: skip
MODERNBERT = classes_of(_MODERNBERT, "ModernBert", (
    HeadClass("Model", features),
    HeadClass("ForMaskedLM", masked_lm, (
        *_head("lm_head"),
        WeightKey("lm_head.weight", "decoder.weight", ("vocab", "hidden"), "untied"),
        WeightKey("lm_head.bias", "decoder.bias", ("vocab",), "decoder_bias"),
    )),
    HeadClass("ForSequenceClassification", label_sequence, _CLASSIFIER),
    HeadClass("ForTokenClassification", label_tokens, _CLASSIFIER),
    HeadClass("ForQuestionAnswering", answer, (
        *_head("classifier"), *affine("classifier", "classifier", "answers", "hidden"),
    )),
))  # fmt: skip
