"""GPT-2: LayerNorms, learnt positions, a plain MLP, matrices stored transposed with q, k and v in one."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, Config, Stack, WeightKey
from graphwright.models.architectures.decoder import ACTIVATIONS, Decoder, build_decoder
from graphwright.models.errors import ConfigError

_FIELDS = {"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "mlp": "n_inner", "vocab": "vocab_size",
           "eps": "layer_norm_epsilon", "positions": "n_positions"}  # fmt: skip
_SPELLINGS = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
              "n_positions": "max_position_embeddings"}  # fmt: skip


def _read(config: Config) -> Decoder:
    """Read GPT-2 dimensions. Raises: ConfigError."""
    names = {name: other if other in config else name for name, other in _SPELLINGS.items()}
    if config.get("add_cross_attention"):
        raise config.invalid("add_cross_attention", "false: there is no encoder", True)
    hidden, heads = config.size(names["n_embd"], 768), config.size(names["n_head"], 12, most=1 << 20)
    if hidden % heads:
        raise ConfigError(f"{names['n_embd']} is not a multiple of {names['n_head']}", where=str(config.path),
                          expected=f"a multiple of {heads}", got=hidden)  # fmt: skip
    layers, longest = config.size(names["n_layer"], 12, most=100_000), config.size(names["n_positions"], 1024)
    scale = (hidden // heads) ** -0.5 if config.flag("scale_attn_weights", True) else 1.0
    falling = config.flag("scale_attn_by_inverse_layer_idx", False)
    return Decoder(
        vocab=config.size("vocab_size", 50257), hidden=hidden, layers=layers, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, mlp=config.size("n_inner", 4 * hidden), rope=None, windows=(None,) * layers,
        eps=config.number("layer_norm_epsilon", 1e-5, 1e38), norm="layer", positions=longest,
        activation=config.choice("activation_function", "gelu_new", tuple(ACTIVATIONS)),
        tied=config.flag("tie_word_embeddings", True),
        score_scale=tuple(scale / (i + 1) for i in range(layers)) if falling else scale,
    )  # fmt: skip


def _matrix(path: str, key: str, dims: tuple[str, str]) -> tuple[WeightKey, WeightKey]:
    weight, bias = (WeightKey(f"layers.{{i}}.{path}.{kind}", f"transformer.h.{{i}}.{key}.{kind}", axes)
                    for kind, axes in (("weight", dims), ("bias", dims[:1])))  # fmt: skip
    return weight, bias


def _norm(path: str, key: str) -> tuple[WeightKey, WeightKey]:
    weight, bias = (
        WeightKey(f"{path}.{kind}", f"transformer.{key}.{kind}", ("hidden",)) for kind in ("weight", "bias")
    )
    return weight, bias


_KEYS = (
    WeightKey("embed.weight", "transformer.wte.weight", ("vocab", "hidden")),
    WeightKey("embed.positions.weight", "transformer.wpe.weight", ("positions", "hidden")),
    *_norm("layers.{i}.attn.norm", "h.{i}.ln_1"),
    *_matrix("attn.q", "attn.q_proj", ("heads*head_dim", "hidden")),
    *_matrix("attn.k", "attn.k_proj", ("kv_heads*head_dim", "hidden")),
    *_matrix("attn.v", "attn.v_proj", ("kv_heads*head_dim", "hidden")),
    *_matrix("attn.o", "attn.c_proj", ("hidden", "heads*head_dim")),
    *_norm("layers.{i}.mlp.norm", "h.{i}.ln_2"),
    *_matrix("mlp.up", "mlp.c_fc", ("mlp", "hidden")),
    *_matrix("mlp.down", "mlp.c_proj", ("hidden", "mlp")),
    *_norm("norm", "ln_f"),
    WeightKey("lm_head.weight", "lm_head.weight", ("vocab", "hidden"), "untied"),
)


def _stored(name: str, *parts: str) -> tuple[Stack, Stack]:
    """Return the tensors of a matrix and a bias of the class, which has matrices [in, out]."""
    weight, bias = (Stack(f"transformer.h.{{i}}.{name}.{kind}", tuple(f"transformer.h.{{i}}.{p}.{kind}" for p in parts),
                          transposed=kind == "weight", own=True) for kind in ("weight", "bias"))  # fmt: skip
    return weight, bias


_STACKS = (
    *_stored("attn.c_attn", *(f"attn.{n}_proj" for n in "qkv")),
    *(_stored(name, name)[0] for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
)
GPT2 = Architecture("gpt2", ("GPT2LMHeadModel",), ("gpt2",), _read, _KEYS, build_decoder, prefix="transformer.",
                    ignored=(r"\.attn\.bias$", r"masked_bias$"), fields=_FIELDS, spellings=_SPELLINGS,
                    stacks=_STACKS)  # fmt: skip
