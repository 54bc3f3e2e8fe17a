"""The encoder template: blocks as those of decoders, without a causal mask; embeddings of texts; heads by task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphwright.array import DType, bool_, int64
from graphwright.models.architectures.architecture import Architecture, Config, WeightKey
from graphwright.models.architectures.decoder import ACTIVATIONS, Decoder, DecoderBuilder, rope_tables
from graphwright.models.architectures.tasks import task_of
from graphwright.models.errors import ConfigError

if TYPE_CHECKING:
    from graphwright.program.builder import Builder
    from graphwright.program.op_graph import Value


@dataclass(frozen=True, slots=True)
class Encoder(Decoder):
    """Dimensions and flags of an encoder: those of a `Decoder`'s blocks, and of embeddings and heads.

    In addition to the norms of a decoder, a block may have a norm of the sum after a branch (`sum_norm`). In a layer
    with the window w, a token sees w others on each side.

    Attributes:
        width: of the embeddings of tokens; a matrix maps them to `hidden` if it has another size.
        types: number of token types; 0 if the model has none.
        pad: the token that is not counted, if positions count tokens from `pad` + 1 on; else None.
        labels: number of labels of a classifier.
        answers: logits per token of a question answering head: start and end.
        mean: whether a classifier of sequences reads the mean over tokens instead of the first token.
        head_activation, pooler_activation: of the head's dense layer, unless the class has another one, and of the
            pooler.
    """

    width: int = 0
    types: int = 0
    pad: int | None = None
    labels: int = 2
    answers: int = 2
    mean: bool = False
    head_activation: str = "gelu"
    pooler_activation: str = "tanh"

    @property
    def typed(self) -> bool:
        """True if the model has embeddings of token types."""
        return self.types > 0


QUICK_GELU = "quick_gelu"
"""Name of the activation x·σ(1.702x)."""

Dims = TypeVar("Dims", bound=Encoder)

NAMES = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "mlp": "intermediate_size",
    "vocab": "vocab_size", "eps": "layer_norm_eps", "positions": "max_position_embeddings", "types": "type_vocab_size",
}  # fmt: skip
"""Dimension -> config field."""


def read_encoder(
    config: Config, names: Mapping[str, str], defaults: Mapping[str, int], *, eps: float | None,
    activation: tuple[str, str], make: type[Dims] = Encoder, **more: Any,
) -> Dims:  # fmt: skip
    """Read dimensions from a config.

    Args:
        config: the config.
        names: dict from dimension to config field.
        defaults: the family's sizes for absent fields, by dimension.
        eps: of norms, if the field is absent; `activation` is (config field, default).
        more: further fields of the result, a `make`.
    Raises: ConfigError.
    """
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in (None, neutral):
            raise config.invalid(name, f"{neutral!r}, the only value that is supported", config[name])
    sizes = {name: config.size(names[name], default, most=_MOST.get(name, 1 << 31))
             for name, default in defaults.items()}  # fmt: skip
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden % heads:
        raise ConfigError(f"{names['hidden']} is not a multiple of {names['heads']}", where=str(config.path),
                          expected=f"a multiple of {heads}", got=hidden)  # fmt: skip
    chosen = config.choice(*activation, (*ACTIVATIONS, QUICK_GELU))
    fields: dict[str, Any] = {
        "kv_heads": heads, "head_dim": hidden // heads, "activation": chosen, "head_activation": chosen,
        "rope": None, "windows": (None,) * sizes["layers"], "width": hidden, "norm": "layer",
        "labels": read_labels(config), "tied": config.flag("tie_word_embeddings", True),
        "eps": config.number(names["eps"], eps, 1e38) if "eps" in names else eps,
    }  # fmt: skip
    return make(**{**fields, **sizes, **more})


_MOST = {"heads": 1 << 20, "layers": 100_000}
_NEUTRAL = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""Config field -> the one value of it that the template computes."""


def read_labels(config: Config) -> int:
    """Return the number of labels of a classifier: that of `id2label`, or of `num_labels`. Raises: ConfigError."""
    named = config.get("id2label")
    if named is None:
        return config.size("num_labels", 2)
    if not isinstance(named, dict) or not named:
        raise config.invalid("id2label", "an object with a name for each label", named)
    return len(named)


# -- keys --------------------------------------------------------------------------------------------------------------
def affine(path: str, key: str, *dims: str, bias: str | None = "", when: str = "") -> tuple[WeightKey, ...]:
    """Return the rows of a matrix or a norm of sizes `dims`, and of its bias if the dimension `bias` says so.

    `bias` is "" for always and None for never; `when` is a condition on the matrix.
    """
    weight = WeightKey(f"{path}.weight", f"{key}.weight", dims, when)
    return (weight,) if bias is None else (weight, WeightKey(f"{path}.bias", f"{key}.bias", dims[:1], bias or when))


def lm_head_keys(decoder: str, bias: str, width: str = "hidden") -> tuple[WeightKey, ...]:
    """Return the rows of the last matrix of a masked language model and its bias.

    The matrix is stored under the key `decoder` unless it is tied; a tied one has its bias under the key `bias`.
    """
    return (
        WeightKey("lm_head.bias", bias, ("vocab",), "tied"),
        WeightKey("lm_head.weight", f"{decoder}.weight", ("vocab", width), "untied"),
        WeightKey("lm_head.bias", f"{decoder}.bias", ("vocab",), "untied"),
    )


# -- the graph ---------------------------------------------------------------------------------------------------------
class EncoderBuilder(DecoderBuilder):
    """Adds the ops of one encoder to a builder."""

    dims: Encoder
    mask: Value | None = None
    """Which tokens are not padding, bool [B, T]; None if all are."""

    def __init__(self, b: Builder, dims: Encoder, params: Mapping[str, Value], compute: DType) -> None:
        super().__init__(b, dims, params, compute)
        self.bands: dict[int, Value] = {}

    def attend(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Return the results of the heads, each query of which sees the keys in its window that are not padding."""
        given = {"key_mask": self.mask} if self.mask is not None else {}
        window = self.dims.windows[layer]
        if window is not None:
            given["bias"] = self.band(window)
        return self.b.sdpa(q, k, v, *given.values(), scale=self.score_scale(layer), causal=False,
                           optional=tuple(given), name=f"layers.{layer}.attn.sdpa")  # fmt: skip

    def attention(self, x: Value, layer: int, tables: tuple[Value, Value] | None) -> Value:
        """Return the attention branch for the residual stream `x`."""
        return self.scaled(super().attention(x, layer, tables), f"layers.{layer}.attn")

    def block(self, x: Value, layer: int) -> Value:
        """Return the branch after the attention for the residual stream `x`."""
        return self.scaled(super().block(x, layer), f"layers.{layer}.mlp")

    def scaled(self, x: Value, path: str) -> Value:
        """Multiply the result of a branch by its scales, one per channel, if there are any."""
        if f"{path}.scale" not in self.params:
            return x
        return self.b.mul(x, self.weight(f"{path}.scale"), name=f"{path}.scaled")

    def activated(self, x: Value, path: str, kind: str = "") -> Value:
        """Apply an activation, by default that of the MLP."""
        if (kind or self.dims.activation) != QUICK_GELU:
            return super().activated(x, path, kind)
        steep = self.b.mul(x, self.scalar(f"{path}.slope", 1.702), name=f"{path}.steep")
        return self.b.mul(x, self.b.sigmoid(steep, name=f"{path}.sigmoid"), name=path)

    def band(self, window: int) -> Value:
        """Return which keys each query sees, |i - j| ≤ `window`, bool [1, 1, T, T]."""
        if window not in self.bands:
            b, path = self.b, f"band_{window}"
            rows = b.iota(self.mask, axis=1, name=path)
            across, down = (b.unsqueeze(rows, axes=(axis,), name=f"{path}.{name}")
                            for axis, name in enumerate(("keys", "queries")))  # fmt: skip
            apart = b.abs(b.sub(down, across, name=f"{path}.offsets"), name=f"{path}.apart")
            near = b.le(apart, b.const(f"{path}.size", np.asarray(window, np.int64)), name=f"{path}.near")
            self.bands[window] = b.unsqueeze(near, axes=(0, 1), name=f"{path}.mask")
        return self.bands[window]

    def layers(self, x: Value) -> Value:
        """Return the residual stream after all layers and the final norm, if there is one."""
        tables, local = self.tables()
        for i in range(self.dims.layers):
            branch = self.attention(x, i, local if self.dims.local[i] else tables)
            mid = self.norm(self.b.junction(x, branch, name=f"layers.{i}.mid"), f"layers.{i}.attn.sum_norm")
            out = self.b.junction(mid, self.block(mid, i), name=f"layers.{i}.out")
            x = self.norm(out, f"layers.{i}.mlp.sum_norm")
        return self.norm(x, "norm")

    def tables(self) -> tuple[tuple[Value, Value] | None, tuple[Value, Value] | None]:
        """Return the tables of RoPE of layers without and with a window, if layers rotate q and k."""
        d = self.dims
        if d.rope is None:
            return None, None
        rows = self.b.iota(self.mask, axis=1, name="positions.row")
        positions = self.b.unsqueeze(rows, axes=(0,), name="positions")
        found = rope_tables(self.b, positions, d.rope, self.compute)
        if d.local_rope is None or not any(d.local):
            return found, found
        return found, rope_tables(self.b, positions, d.local_rope, self.compute, "rope_local")

    # -- embeddings ----------------------------------------------------------------------------------------------------
    def text(self) -> Value:
        """Add the inputs of a text and return its embeddings [B, T, hidden]."""
        b, d = self.b, self.dims
        ids, seen = (b.input(name, ("B", "T"), int64) for name in ("input_ids", "attention_mask"))
        self.mask = b.cast(seen, dtype=bool_, name="attention_mask.seen")
        x = self.rows("embed", ids)
        if d.typed:
            x = b.add(x, self.rows("embed.types", b.input("token_type_ids", ("B", "T"), int64)), name="embed.typed")
        if d.pad is not None:
            x = b.add(x, self.rows("embed.positions", self.counted(ids, d.pad)), name="embed.sum")
        elif "embed.positions.weight" in self.params:
            first = b.slice(self.weight("embed.positions.weight"), axis=0, start=0, size="T", name="embed.positions")
            x = b.add(x, first, name="embed.sum")
        x = self.norm(x, "embed.norm")
        return self.linear(x, "embed.map") if "embed.map.weight" in self.params else x

    def rows(self, path: str, ids: Value) -> Value:
        """Return the rows of the table of `path` in the compute dtype."""
        found = self.b.embedding(self.params[f"{path}.weight"], ids, name=path)
        if self.b.spec(found).dtype is not self.compute:
            found = self.b.cast(found, dtype=self.compute, name=f"{path}.cast")
        return found

    def counted(self, ids: Value, pad: int) -> Value:
        """Return positions: `pad` for the token `pad`, and for the others `pad` + 1, `pad` + 2, ..."""
        b, at = self.b, self.b.const("embed.pad", np.asarray(pad, np.int64))
        real = b.cast(b.ne(ids, at, name="embed.real"), dtype=int64, name="embed.ones")
        numbers = b.mul(b.cumsum(real, axis=1, name="embed.counts"), real, name="embed.numbers")
        return b.add(numbers, at, name="embed.position_ids")

    # -- heads ---------------------------------------------------------------------------------------------------------
    def first(self, x: Value, path: str) -> Value:
        """Return the first token [B, hidden] of a sequence [B, T, hidden], by nodes named `<path>...`."""
        return self.b.squeeze(self.b.slice(x, axis=1, start=0, size=1, name=f"{path}.row"), axes=(1,), name=path)

    def pooled(self, x: Value) -> Value:
        """Return the first token, after the pooler if there is one; or the mean over tokens."""
        b = self.b
        if self.dims.mean:
            real = b.unsqueeze(b.cast(self.mask, dtype=self.compute, name="mean.mask"), axes=(2,), name="mean.real")
            total = b.sum(b.mul(x, real, name="mean.tokens"), axes=(1,), name="mean.total")
            return b.div(total, b.sum(real, axes=(1,), name="mean.count"), name="mean")
        if "pooler.weight" not in self.params:
            return self.first(x, "first")
        dense = self.linear(self.first(x, "pooler.first"), "pooler")
        return self.activated(dense, "pooler.act", self.dims.pooler_activation)

    def dense(self, x: Value, path: str, act: str) -> Value:
        """Apply the dense layer of the head `path`, its activation and its norm, if there is one."""
        if f"{path}.dense.weight" not in self.params:
            return x
        made = self.activated(self.linear(x, f"{path}.dense"), f"{path}.act", act or self.dims.head_activation)
        return self.norm(made, f"{path}.norm")

    def lm_head(self, x: Value, act: str) -> Value:
        """Return the logits of each token."""
        matrix = self.weight("embed.weight" if self.dims.tied else "lm_head.weight")
        bias = (self.weight("lm_head.bias"),) if "lm_head.bias" in self.params else ()
        return self.b.linear(self.dense(x, "lm_head", act), matrix, *bias, name="lm_head")

    def classifier(self, x: Value, act: str = "") -> Value:
        """Return the logits of labels of each row."""
        return self.linear(self.dense(x, "classifier", act), "classifier")


Head = Callable[[EncoderBuilder, "Value"], None]
"""Function of a builder and the hidden states [B, T, hidden] that adds the outputs of a class."""


def features(block: EncoderBuilder, x: Value) -> None:
    """Output the hidden states, and the result of the pooler if there is one."""
    block.b.output(x, "last_hidden_state")
    if "pooler.weight" in block.params:
        block.b.output(block.pooled(x), "pooler_output")


def masked_lm(block: EncoderBuilder, x: Value, act: str = "") -> None:
    """Output the logits of each token; `act` is the activation of the head."""
    block.b.output(block.lm_head(x, act), "logits")


def label_sequence(block: EncoderBuilder, x: Value, act: str = "") -> None:
    """Output the logits of labels of the sequence; `act` is the activation of the head."""
    block.b.output(block.classifier(block.pooled(x), act), "logits")


def label_tokens(block: EncoderBuilder, x: Value) -> None:
    """Output the logits of labels of each token."""
    block.b.output(block.classifier(x), "logits")


def answer(block: EncoderBuilder, x: Value) -> None:
    """Output the logits of each token to begin and to end the answer."""
    both = block.classifier(x)
    for i, name in enumerate(("start_logits", "end_logits")):
        one = block.b.slice(both, axis=2, start=i, size=1, name=f"{name}.column")
        block.b.output(block.b.squeeze(one, axes=(2,), name=name), name)


def build_text_encoder(b: Builder, dims: Encoder, params: Mapping[str, Value], compute: DType, head: Head) -> None:
    """Build the graph from `input_ids`, `attention_mask` and, if there are types, `token_type_ids` (int64 [B, T])."""
    block = EncoderBuilder(b, dims, each_layer(params, dims.layers), compute)
    head(block, block.layers(block.text()))


def each_layer(params: Mapping[str, Value], layers: int) -> dict[str, Value]:
    """Return params by path; those that all layers share, named `shared.…`, under the path of each layer."""
    rest = {path: path.removeprefix("shared.") for path in params if path.startswith("shared.")}
    return {**params, **{f"layers.{i}.{end}": params[path] for path, end in rest.items() for i in range(layers)}}


# -- families ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HeadClass:
    """A class of a family: the end of its name, its outputs, and the weights that only some classes have."""

    ending: str
    head: Head
    keys: tuple[WeightKey, ...] = ()


TYPES = {"attention_mask": 1, "token_type_ids": 0}
"""Input of a text encoder -> the number that fills it."""


def classes_of(family: Architecture, stem: str, heads: tuple[HeadClass, ...]) -> tuple[Architecture, ...]:
    """Return an architecture for each class of a family.

    Args:
        family: what all classes share; `keys` are those of the base model, and `build` also takes the head.
        stem: start of their names, such as `Bert`; the model type stands for the class without a head.
        heads: the classes. A file may have the weights of other classes, which are not read.
    """
    others = tuple(f"{re.escape(row.key.removeprefix(family.prefix))}$" for h in heads for row in h.keys)
    return tuple(
        replace(family, classes=(f"{stem}{h.ending}",), model_types=family.model_types if h.ending == "Model" else (),
                keys=(*family.keys, *h.keys), ignored=(*family.ignored, *dict.fromkeys(others)),
                build=partial(family.build, head=h.head), task=task_of(f"{stem}{h.ending}"))
        for h in heads
    )  # fmt: skip
