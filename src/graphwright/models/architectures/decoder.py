"""The decoder template that Llama-like families share: dimensions, weights, and graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from graphwright.array import DType, float64
from graphwright.models.architectures.architecture import Config, WeightKey
from graphwright.models.architectures.rope import RopeFrequencies, read_rope
from graphwright.models.errors import ConfigError

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
    """Dimensions and flags of a pre-norm decoder with grouped attention and a gated MLP.

    heads·head_dim may differ from hidden. `activation` is applied to the MLP's gate; every RMSNorm uses `eps`.
    `windows` has for each layer the number of keys that a query attends to, its own included, or None for no limit.
    `positions` is the longest input that the config allows. `qk_norm` normalises each head of q and k,
    `projection_norm` all of them together; `clip` limits the entries of q, k and v.
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
    rope: RopeFrequencies
    windows: tuple[int | None, ...]
    tied: bool
    positions: int
    q_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    projection_norm: bool = False
    clip: float | None = None

    @property
    def untied(self) -> bool:
        """True if the LM head has a weight of its own, i.e. is not tied to the embedding."""
        return not self.tied


Dims = TypeVar("Dims", bound=Decoder)


def read_decoder(
    config: Config, layer_windows: Callable[[Config, int], tuple[int | None, ...]] = lambda _, layers: (None,) * layers,
    *, head_dim: int | None = None, kv_heads: int | None = None, vocab: int = 32000, longest: int = 2048,
    eps: float = 1e-6, theta: float = 10000.0, make: type[Dims] = Decoder, **more: Any,
) -> Dims:  # fmt: skip
    """Read dimensions from a config.

    `head_dim`, `kv_heads`, `vocab`, `longest`, `eps` and `theta` (RoPE's base) are the family's defaults for absent
    fields. Without such a default, or for a field that is null, kv_heads equals heads and head_dim is hidden / heads.
    `layer_windows` maps (config, number of layers) to each layer's window or None; `more` are further fields of the
    result, a `make`. Raises: ConfigError.
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
        activation=config.choice("hidden_act", "silu", tuple(ACTIVATIONS)),
        rope=read_rope(config, dim, longest=longest, theta=theta), windows=layer_windows(config, layers),
        tied=config.flag("tie_word_embeddings", False), positions=config.size("max_position_embeddings", longest),
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


class DecoderBuilder:
    """Adds the ops of one decoder to a builder; params of a different dtype are cast to the compute dtype."""

    def __init__(self, b: Builder, dims: Decoder, params: Mapping[str, Value], compute: DType) -> None:
        self.b, self.dims, self.params, self.compute = b, dims, params, compute
        self._cast: dict[str, Value] = {}

    def weight(self, path: str) -> Value:
        """Return a weight in the compute dtype."""
        value = self.params[path]
        if self.b.spec(value).dtype is self.compute:
            return value
        if path not in self._cast:
            self._cast[path] = self.b.cast(value, dtype=self.compute, name=f"{path}.cast")
        return self._cast[path]

    def linear(self, x: Value, path: str) -> Value:
        """Apply the matrix of `path`, and its bias if there is one."""
        operands = [x, self.weight(f"{path}.weight")]
        if f"{path}.bias" in self.params:
            operands.append(self.weight(f"{path}.bias"))
        return self.b.linear(*operands, name=path)

    def norm(self, x: Value, path: str) -> Value:
        """Apply the RMSNorm of `path`."""
        return self.b.rms_norm(x, self.weight(f"{path}.weight"), eps=self.dims.eps, name=path)

    def heads(self, x: Value, count: int, path: str, norm: bool) -> Value:
        """Reshape [B, T, count·D] to [B, count, T, D], by nodes named `<path>_...`; with `norm`, normalise heads."""
        split = self.b.unflatten(x, axis=2, sizes=(count, self.dims.head_dim), name=f"{path}_split")
        if norm:
            split = self.norm(split, f"{path}_norm")
        return self.b.permute(split, axes=(0, 2, 1, 3), name=f"{path}_heads")

    def attention(self, x: Value, path: str, tables: tuple[Value, Value], window: int | None) -> Value:
        """Return the attention branch for the residual stream `x`; `tables` are cos and sin of RoPE."""
        b, d = self.b, self.dims
        h = self.norm(x, f"{path}.norm")
        q, k, v = (self.projection(h, f"{path}.{name}", name != "v") for name in "qkv")
        q = self.heads(q, d.heads, f"{path}.q", d.qk_norm)
        k = self.heads(k, d.kv_heads, f"{path}.k", d.qk_norm)
        v = self.heads(v, d.kv_heads, f"{path}.v", False)
        q, k = b.rope(q, *tables, name=f"{path}.rope_q"), b.rope(k, *tables, name=f"{path}.rope_k")
        o = b.sdpa(q, k, v, scale=d.head_dim**-0.5, window=window, name=f"{path}.sdpa")
        rows = b.permute(o, axes=(0, 2, 1, 3), name=f"{path}.sdpa_rows")
        return self.linear(b.flatten(rows, start=2, end=3, name=f"{path}.sdpa_merged"), f"{path}.o")

    def projection(self, h: Value, path: str, norm: bool) -> Value:
        """Return q, k or v before the split into heads; `norm` is False for v."""
        x, clip = self.linear(h, path), self.dims.clip
        if norm and self.dims.projection_norm:
            x = self.norm(x, f"{path}_norm")
        return x if clip is None else self.b.clamp(x, low=-clip, high=clip, name=f"{path}_clip")

    def block(self, x: Value, layer: int) -> Value:
        """Return the branch after the attention, an MLP, for the residual stream `x`."""
        path = f"layers.{layer}.mlp"
        return self.mlp(self.norm(x, f"{path}.norm"), path)

    def mlp(self, h: Value, path: str) -> Value:
        """Return down(act(gate h) ⊙ up h) with the matrices of `path`."""
        b = self.b
        op, attrs = ACTIVATIONS[self.dims.activation]
        act = b.op(op, self.linear(h, f"{path}.gate"), name=f"{path}.act", **attrs)
        return self.linear(b.mul(act, self.linear(h, f"{path}.up"), name=f"{path}.mul"), f"{path}.down")


def build_decoder(
    b: Builder, dims: Decoder, params: Mapping[str, Value], compute: DType, make: type[DecoderBuilder] = DecoderBuilder
) -> None:
    """Build the graph from inputs `ids` and `positions` (int64 [B, T]) to the output `logits` [B, T, vocab]."""
    block = make(b, dims, params, compute)
    ids, positions = b.input("ids", ("B", "T"), "int64"), b.input("positions", ("B", "T"), "int64")
    x = b.embedding(params["embed.weight"], ids, name="embed")
    if b.spec(x).dtype is not compute:
        x = b.cast(x, dtype=compute, name="embed.cast")
    tables = rope_tables(b, positions, dims.rope, compute)
    for i, window in enumerate(dims.windows):
        x = b.junction(x, block.attention(x, f"layers.{i}.attn", tables, window), name=f"layers.{i}.mid")
        x = b.junction(x, block.block(x, i), name=f"layers.{i}.out")
    x = block.norm(x, "norm")
    head = "embed.weight" if dims.tied else "lm_head.weight"
    b.output(b.linear(x, block.weight(head), name="lm_head"), "logits")


def rope_tables(b: Builder, positions: Value, rope: RopeFrequencies, compute: DType) -> tuple[Value, Value]:
    """Return the cos and sin tables of all layers; in dynamic RoPE and longrope they depend on the largest position."""
    if compute is float64 and rope.wide is not None:
        rope = rope.wide
    frequencies = b.const("rope.frequencies", rope.frequencies)
    if rope.kind == "dynamic":
        frequencies = b.rope_dynamic(positions, frequencies, theta=rope.theta, factor=rope.factor,
                                     original=rope.original, name="rope.scaled")  # fmt: skip
    elif rope.kind == "longrope":
        long = b.const("rope.long_frequencies", rope.long)
        frequencies = b.rope_longer(positions, frequencies, long, original=rope.original, name="rope.scaled")
    cos, sin = b.rope_table(positions, frequencies, scale=rope.scale, name="rope.table")
    if b.spec(cos).dtype is not compute:
        cos, sin = b.cast(cos, dtype=compute, name="rope.cos"), b.cast(sin, dtype=compute, name="rope.sin")
    return cos, sin
