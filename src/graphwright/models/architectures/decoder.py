"""The decoder template that Llama-like families share: dimensions, weights, and graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphwright.array import DType, float32, float64
from graphwright.models.architectures.architecture import Config, WeightKey
from graphwright.models.architectures.rope import RopeFrequencies, read_rope
from graphwright.models.errors import ConfigError
from graphwright.program.weights import as_array

if TYPE_CHECKING:
    from graphwright.program.builder import Builder
    from graphwright.program.op_graph import Value

ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {  # by name: the values of `hidden_act` that are supported
    **{name: (name, {}) for name in ("silu", "relu", "tanh", "sigmoid")},
    **{"swish": ("silu", {}), "gelu": ("gelu", {"approximate": "none"})},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), ("gelu", {"approximate": "tanh"})),
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Dimensions and flags of a decoder with grouped attention and a gated MLP.

    Which norms and biases a block has follows from the weights of the family: a branch may have a norm before it
    (`norm`), after it (`post_norm`), or both.

    Attributes:
        heads, head_dim: their product may differ from hidden.
        eps, norm: of every norm; `norm` is one of `NORMS`, or `layer` for LayerNorms.
        activation: applied to the MLP's gate, or to the result of `up` if there is no gate.
        rope, local_rope: of layers without and with a window; without a `local_rope`, all layers have `rope`. None if
            no layer rotates q and k.
        wide_rope: whether q and k in 16 bits are rotated in float32.
        windows: for each layer the number of keys that a query attends to, its own included, or None for no limit.
        positions: the longest input that the config allows.
        qk_norm, projection_norm: normalise each head of q and k, or all of them together.
        clip: limit of the entries of q, k and v.
        embed_scale: factor of embeddings, or None.
        score_scale: factor of scores, or of those of each layer; None for head_dim^-½.
        score_cap, logit_cap: c in c·tanh(x / c) of scores and logits; None for no such bound.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    eps: float
    activation: str
    rope: RopeFrequencies | None
    windows: tuple[int | None, ...]
    tied: bool
    positions: int
    q_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    projection_norm: bool = False
    clip: float | None = None
    norm: str = "rms"
    local_rope: RopeFrequencies | None = None
    wide_rope: bool = False
    embed_scale: float | None = None
    score_scale: float | tuple[float, ...] | None = None
    score_cap: float | None = None
    logit_cap: float | None = None

    @property
    def local(self) -> tuple[bool, ...]:
        """Whether each layer has the rotary embedding `local_rope`."""
        return tuple(self.local_rope is not None and window is not None for window in self.windows)

    @property
    def untied(self) -> bool:
        """True if the LM head has a weight of its own, i.e. is not tied to the embedding."""
        return not self.tied


Dims = TypeVar("Dims", bound=Decoder)


def read_decoder(
    config: Config, layer_windows: Callable[[Config, int], tuple[int | None, ...]] = lambda _, layers: (None,) * layers,
    *, head_dim: int | None = None, kv_heads: int | None = None, vocab: int = 32000, longest: int = 2048,
    eps: float = 1e-6, theta: float = 10000.0, tied: bool = False, activation: tuple[str, str] = ("hidden_act", "silu"),
    rope: RopeFrequencies | None = None, make: type[Dims] = Decoder, **more: Any,
) -> Dims:  # fmt: skip
    """Read dimensions from a config.

    `head_dim`, `kv_heads`, `vocab`, `longest`, `eps`, `theta` (RoPE's base) and `tied` are the family's defaults for
    absent fields. Without such a default, or for a field that is null, kv_heads equals heads and head_dim is
    hidden / heads. `activation` is (config field, default). `layer_windows` maps (config, number of layers) to each
    layer's window or None; `rope` is what the family read itself; `more` are further fields of the result, a `make`.
    Raises: ConfigError.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads", most=1 << 20)
    layers = config.size("num_hidden_layers", least=1, most=100_000)
    silent = heads if kv_heads is None or "num_key_value_heads" in config else kv_heads
    groups = config.size("num_key_value_heads", silent)
    if heads % groups:
        raise ConfigError("num_attention_heads is not a multiple of num_key_value_heads", where=str(config.path),
                          expected=f"a multiple of {groups}", got=heads)  # fmt: skip
    absent = hidden // heads if head_dim is None or "head_dim" in config else head_dim
    dim = config.size("head_dim", absent, most=1 << 16)  # the frequencies of RoPE are computed from this field alone
    config.size(
        "sliding_window", 1, least=int(config.get("use_sliding_window") is not False)
    )  # an invalid value is refused in families without windows too
    return make(
        vocab=config.size("vocab_size", vocab), hidden=hidden, layers=layers, heads=heads, kv_heads=groups,
        head_dim=dim, mlp=config.size("intermediate_size"), eps=config.number("rms_norm_eps", eps, 1e38),
        activation=config.choice(*activation, tuple(ACTIVATIONS)), windows=layer_windows(config, layers),
        rope=read_rope(config, dim, longest=longest, theta=theta) if rope is None else rope,
        tied=config.flag("tie_word_embeddings", tied), positions=config.size("max_position_embeddings", longest),
        **more,
    )  # fmt: skip


def layer_types(config: Config, layers: int, window: int | None, rule: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the attention window of each layer, None for full attention.

    The config's field `layer_types` tells which layers have the window `window`. Without this field, layer i has it if
    `rule(i)` is true. Raises: ConfigError.
    """
    types = config.get("layer_types")
    if types is None:
        return tuple(window if rule(i) else None for i in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise config.invalid("layer_types", f"a list of {layers} strings: {' or '.join(known)}", types)
    if window is None and "sliding_attention" in types:
        raise ConfigError("config field 'layer_types' has sliding layers, but the config sets no window",
                          where=str(config.path), expected="use_sliding_window true and sliding_window a number",
                          got={k: config.get(k) for k in ("use_sliding_window", "sliding_window")})  # fmt: skip
    return tuple(known[t] for t in types)


KEYS = (
    WeightKey("embed.weight", "model.embed_tokens.weight", ("vocab", "hidden")),
    WeightKey("layers.{i}.attn.norm.weight", "model.layers.{i}.input_layernorm.weight", ("hidden",)),
    WeightKey("layers.{i}.attn.q.weight", "model.layers.{i}.self_attn.q_proj.weight", ("heads*head_dim", "hidden")),
    WeightKey("layers.{i}.attn.q.bias", "model.layers.{i}.self_attn.q_proj.bias", ("heads*head_dim",), "q_bias"),
    WeightKey("layers.{i}.attn.k.weight", "model.layers.{i}.self_attn.k_proj.weight", ("kv_heads*head_dim", "hidden")),
    WeightKey("layers.{i}.attn.k.bias", "model.layers.{i}.self_attn.k_proj.bias", ("kv_heads*head_dim",), "q_bias"),
    WeightKey("layers.{i}.attn.v.weight", "model.layers.{i}.self_attn.v_proj.weight", ("kv_heads*head_dim", "hidden")),
    WeightKey("layers.{i}.attn.v.bias", "model.layers.{i}.self_attn.v_proj.bias", ("kv_heads*head_dim",), "q_bias"),
    WeightKey("layers.{i}.attn.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight", ("head_dim",), "qk_norm"),
    WeightKey("layers.{i}.attn.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight", ("head_dim",), "qk_norm"),
    WeightKey("layers.{i}.attn.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight", ("heads*head_dim",),
              "projection_norm"),
    WeightKey("layers.{i}.attn.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight", ("kv_heads*head_dim",),
              "projection_norm"),
    WeightKey("layers.{i}.attn.o.weight", "model.layers.{i}.self_attn.o_proj.weight", ("hidden", "heads*head_dim")),
    WeightKey("layers.{i}.attn.o.bias", "model.layers.{i}.self_attn.o_proj.bias", ("hidden",), "o_bias"),
    WeightKey("layers.{i}.mlp.norm.weight", "model.layers.{i}.post_attention_layernorm.weight", ("hidden",)),
    WeightKey("layers.{i}.mlp.gate.weight", "model.layers.{i}.mlp.gate_proj.weight", ("mlp", "hidden")),
    WeightKey("layers.{i}.mlp.gate.bias", "model.layers.{i}.mlp.gate_proj.bias", ("mlp",), "mlp_bias"),
    WeightKey("layers.{i}.mlp.up.weight", "model.layers.{i}.mlp.up_proj.weight", ("mlp", "hidden")),
    WeightKey("layers.{i}.mlp.up.bias", "model.layers.{i}.mlp.up_proj.bias", ("mlp",), "mlp_bias"),
    WeightKey("layers.{i}.mlp.down.weight", "model.layers.{i}.mlp.down_proj.weight", ("hidden", "mlp")),
    WeightKey("layers.{i}.mlp.down.bias", "model.layers.{i}.mlp.down_proj.bias", ("hidden",), "mlp_bias"),
    WeightKey("norm.weight", "model.norm.weight", ("hidden",)),
    WeightKey("lm_head.weight", "lm_head.weight", ("vocab", "hidden"), "untied"),
)  # fmt: skip


def with_norms(norms: Mapping[str, str]) -> tuple[WeightKey, ...]:
    """Return `KEYS` with other norms in a layer: dict from the norm's path in it to its name in checkpoints.

    A branch, `attn` or `mlp`, has the norm `norm` before it and `post_norm` after it.
    """
    made = [WeightKey(f"layers.{{i}}.{path}.weight", f"model.layers.{{i}}.{name}.weight", ("hidden",))
            for path, name in norms.items()]  # fmt: skip
    branches = [f"layers.{{i}}.{branch}.norm.weight" for branch in ("attn", "mlp")]
    return (*(row for row in KEYS if row.path not in branches), *made)


NORMS: dict[str, dict[str, bool]] = {
    "rms": {},
    "rms_wide": {"cast_before_scale": False},
    "rms_offset": {"unit_offset": True, "cast_before_scale": False},
}
"""Kind of RMSNorm -> attributes of its op: `rms_wide` scales before it rounds, `rms_offset` also by 1 + weight."""


class DecoderBuilder:
    """Adds the ops of one decoder to a builder; params of a different dtype are cast to the compute dtype."""

    def __init__(self, b: Builder, dims: Decoder, params: Mapping[str, Value], compute: DType) -> None:
        self.b, self.dims, self.params, self.compute = b, dims, params, compute
        self._cast: dict[Value, Value] = {}

    def weight(self, path: str) -> Value:
        """Return a weight in the compute dtype."""
        value = self.params[path]
        if self.b.spec(value).dtype is self.compute:
            return value
        if value not in self._cast:
            self._cast[value] = self.b.cast(value, dtype=self.compute, name=f"{path}.cast")
        return self._cast[value]

    def linear(self, x: Value, path: str) -> Value:
        """Apply the matrix of `path`, and its bias if there is one."""
        operands = [x, self.weight(f"{path}.weight")]
        if f"{path}.bias" in self.params:
            operands.append(self.weight(f"{path}.bias"))
        return self.b.linear(*operands, name=path)

    def norm(self, x: Value, path: str) -> Value:
        """Apply the norm of `path`, if there is one."""
        if f"{path}.weight" not in self.params:
            return x
        d, operands = self.dims, [x, self.weight(f"{path}.weight")]
        if d.norm in NORMS:
            return self.b.rms_norm(*operands, eps=d.eps, name=path, **NORMS[d.norm])
        if f"{path}.bias" in self.params:
            operands.append(self.weight(f"{path}.bias"))
        return self.b.layer_norm(*operands, eps=d.eps, name=path)

    def scalar(self, name: str, value: float) -> Value:
        """Add a number as a constant in the compute dtype, rounded to float32 before if that is narrower."""
        exact = np.float64(value) if self.compute is float64 else np.float32(value)
        return self.b.const(name, as_array(np.asarray(exact), self.compute) if self.compute.is_low else exact)

    def capped(self, x: Value, cap: float, path: str) -> Value:
        """Return cap·tanh(x / cap), by nodes named `<path>.…`."""
        b, bound = self.b, self.scalar(f"{path}.cap", cap)
        bent = b.tanh(b.div(x, bound, name=f"{path}.share"), name=f"{path}.bent")
        return b.mul(bent, bound, name=f"{path}.capped")

    def heads(self, x: Value, count: int, path: str, norm: bool) -> Value:
        """Reshape [B, T, count·D] to [B, count, T, D], by nodes named `<path>_...`; with `norm`, normalise heads."""
        split = self.b.unflatten(x, axis=2, sizes=(count, self.dims.head_dim), name=f"{path}_split")
        if norm:
            split = self.norm(split, f"{path}_norm")
        return self.b.permute(split, axes=(0, 2, 1, 3), name=f"{path}_heads")

    def rotated(self, x: Value, tables: tuple[Value, Value], path: str) -> Value:
        """Apply a rotary embedding to the heads of q or k."""
        b = self.b
        if b.spec(tables[0]).dtype is self.compute:
            return b.rope(x, *tables, name=path)
        wide = b.rope(b.cast(x, dtype=float32, name=f"{path}.wide"), *tables, name=f"{path}.rotated")
        return b.cast(wide, dtype=self.compute, name=path)

    def attention(self, x: Value, layer: int, tables: tuple[Value, Value] | None) -> Value:
        """Return the attention branch for the residual stream `x`; `tables` are cos and sin of RoPE, if there are."""
        b, d, path = self.b, self.dims, f"layers.{layer}.attn"
        h = self.norm(x, f"{path}.norm")
        q, k, v = (self.projection(h, f"{path}.{name}", name != "v") for name in "qkv")
        q = self.heads(q, d.heads, f"{path}.q", d.qk_norm)
        k = self.heads(k, d.kv_heads, f"{path}.k", d.qk_norm)
        v = self.heads(v, d.kv_heads, f"{path}.v", False)
        if tables is not None:
            q, k = self.rotated(q, tables, f"{path}.rope_q"), self.rotated(k, tables, f"{path}.rope_k")
        o = self.attend(q, k, v, layer)
        rows = b.permute(o, axes=(0, 2, 1, 3), name=f"{path}.sdpa_rows")
        o = self.linear(b.flatten(rows, start=2, end=3, name=f"{path}.sdpa_merged"), f"{path}.o")
        return self.norm(o, f"{path}.post_norm")

    def attend(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Return the results of the heads [B, H, T, D]."""
        d = self.dims
        return self.b.sdpa(q, k, v, scale=self.score_scale(layer), window=d.windows[layer], softcap=d.score_cap,
                           name=f"layers.{layer}.attn.sdpa")  # fmt: skip

    def score_scale(self, layer: int) -> float:
        """Return the factor of scores in a layer."""
        d = self.dims
        scale = d.head_dim**-0.5 if d.score_scale is None else d.score_scale
        return scale[layer] if isinstance(scale, tuple) else scale

    def projection(self, h: Value, path: str, norm: bool) -> Value:
        """Return q, k or v before the split into heads; `norm` is False for v."""
        x, clip = self.linear(h, path), self.dims.clip
        if norm and self.dims.projection_norm:
            x = self.norm(x, f"{path}_norm")
        return x if clip is None else self.b.clamp(x, low=-clip, high=clip, name=f"{path}_clip")

    def block(self, x: Value, layer: int) -> Value:
        """Return the branch after the attention, an MLP, for the residual stream `x`."""
        path = f"layers.{layer}.mlp"
        return self.norm(self.mlp(self.norm(x, f"{path}.norm"), path), f"{path}.post_norm")

    def mlp(self, h: Value, path: str) -> Value:
        """Return down(act(gate h) ⊙ up h) with the matrices of `path`, or down(act(up h)) without a gate."""
        if f"{path}.gate.weight" not in self.params:
            return self.linear(self.activated(self.linear(h, f"{path}.up"), f"{path}.act"), f"{path}.down")
        act = self.activated(self.linear(h, f"{path}.gate"), f"{path}.act")
        return self.linear(self.b.mul(act, self.linear(h, f"{path}.up"), name=f"{path}.mul"), f"{path}.down")

    def activated(self, x: Value, path: str, kind: str = "") -> Value:
        """Apply an activation of `ACTIVATIONS`, by default that of the MLP."""
        op, attrs = ACTIVATIONS[kind or self.dims.activation]
        return self.b.op(op, x, name=path, **attrs)


def build_decoder(
    b: Builder, dims: Decoder, params: Mapping[str, Value], compute: DType, make: type[DecoderBuilder] = DecoderBuilder
) -> None:
    """Build the graph from inputs `ids` and `positions` (int64 [B, T]) to the output `logits` [B, T, vocab]."""
    block = make(b, dims, params, compute)
    ids, positions = b.input("ids", ("B", "T"), "int64"), b.input("positions", ("B", "T"), "int64")
    x = b.embedding(params["embed.weight"], ids, name="embed")
    if b.spec(x).dtype is not compute:
        x = b.cast(x, dtype=compute, name="embed.cast")
    if "embed.positions.weight" in params:
        own = b.embedding(params["embed.positions.weight"], positions, name="embed.positions")
        if b.spec(own).dtype is not compute:
            own = b.cast(own, dtype=compute, name="embed.positions.cast")
        x = b.add(x, own, name="embed.sum")
    if dims.embed_scale is not None:
        x = b.mul(x, block.scalar("embed.scale", dims.embed_scale), name="embed.scaled")
    kind = float32 if dims.wide_rope and compute.is_low else compute
    tables = None if dims.rope is None else rope_tables(b, positions, dims.rope, kind)
    local = (
        rope_tables(b, positions, dims.local_rope, kind, "rope_local")
        if dims.local_rope and any(dims.local)
        else tables
    )
    for i in range(dims.layers):
        x = b.junction(x, block.attention(x, i, local if dims.local[i] else tables), name=f"layers.{i}.mid")
        x = b.junction(x, block.block(x, i), name=f"layers.{i}.out")
    x = block.norm(x, "norm")
    head = "embed.weight" if dims.tied else "lm_head.weight"
    logits = b.linear(x, block.weight(head), name="lm_head")
    b.output(logits if dims.logit_cap is None else block.capped(logits, dims.logit_cap, "logits"), "logits")


def rope_tables(
    b: Builder, positions: Value, rope: RopeFrequencies, compute: DType, path: str = "rope"
) -> tuple[Value, Value]:
    """Return cos and sin tables, by nodes `<path>.…`; in dynamic RoPE and longrope they depend on the largest position.

    All layers of one kind share them.
    """
    if compute is float64 and rope.wide is not None:
        rope = rope.wide
    frequencies = b.const(f"{path}.frequencies", rope.frequencies)
    if rope.kind == "dynamic":
        frequencies = b.rope_dynamic(positions, frequencies, theta=rope.theta, factor=rope.factor,
                                     original=rope.original, name=f"{path}.scaled")  # fmt: skip
    elif rope.kind == "longrope":
        long = b.const(f"{path}.long_frequencies", rope.long)
        frequencies = b.rope_longer(positions, frequencies, long, original=rope.original, name=f"{path}.scaled")
    cos, sin = b.rope_table(positions, frequencies, scale=rope.scale, name=f"{path}.table")
    if b.spec(cos).dtype is not compute:
        cos, sin = b.cast(cos, dtype=compute, name=f"{path}.cos"), b.cast(sin, dtype=compute, name=f"{path}.sin")
    return cos, sin
