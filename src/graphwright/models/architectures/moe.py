"""The decoder template with routed layers: each token's MLP is a weighted sum of some of a layer's experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphwright.array import DType, float32
from graphwright.models.architectures.architecture import Config, Stack, WeightKey
from graphwright.models.architectures.decoder import ACTIVATIONS, KEYS, Decoder, DecoderBuilder, build_decoder
from graphwright.models.errors import ConfigError
from graphwright.ops.experts import ACTIVATIONS as EXPERT_ACTIVATIONS

if TYPE_CHECKING:
    from graphwright.program.builder import Builder
    from graphwright.program.op_graph import Value


@dataclass(frozen=True, slots=True)
class MoEDecoder(Decoder):
    """Dimensions and flags of a decoder with routed layers.

    Attributes:
        experts, chosen: number of experts of a routed layer, and of experts that process each token.
        expert_width, shared_width: widths of an expert, and of the expert that processes all tokens; 0 without one.
        normalize: whether the weights of a token are divided by their sum.
        wide_weights: whether weights stay in float32 if activations are in 16 bits.
        routed: whether each layer is routed; the others have an MLP of width `mlp`.
        one: number of outputs of the gate of the shared expert.
    """

    experts: int = 1
    chosen: int = 1
    expert_width: int = 1
    shared_width: int = 0
    normalize: bool = True
    wide_weights: bool = False
    routed: tuple[bool, ...] = ()
    one: int = 1

    @property
    def dense(self) -> tuple[bool, ...]:
        """Whether each layer has a plain MLP."""
        return tuple(not routed for routed in self.routed)

    @property
    def shared(self) -> tuple[bool, ...]:
        """Whether each layer has a shared expert."""
        return tuple(routed and self.shared_width > 0 for routed in self.routed)


def moe_keys(block: str, expert: tuple[str, str, str]) -> tuple[WeightKey, ...]:
    """Return the weights of a family with routed layers.

    `block` is the name of a routed layer's module in checkpoints, and `expert` has the names there of
    gate, up and down of an expert.
    """
    layer, at = "layers.{i}.mlp", f"model.layers.{{i}}.{block}"
    common = [row for row in KEYS if row.when != "mlp_bias"]
    own = [row for row in common if row.path.startswith(layer) and row.dims != ("hidden",)]
    dense = [replace(row, when="dense") if row in own else row for row in common]
    routed = [WeightKey(f"{layer}.router.weight", f"{at}.gate.weight", ("experts", "hidden"), "routed")]
    shared = [WeightKey(f"{layer}.shared_gate.weight", f"{at}.shared_expert_gate.weight", ("one", "hidden"), "shared")]
    for name, theirs in zip(("gate", "up", "down"), expert, strict=True):
        for rows, path, key, width in (
            (routed, f"{layer}.experts.{{e}}", f"{at}.experts.{{e}}.{theirs}", "expert_width.{e}"),
            (shared, f"{layer}.shared", f"{at}.shared_expert.{name}_proj", "shared_width"),
        ):
            dims = ("hidden", width) if name == "down" else (width, "hidden")
            rows.append(WeightKey(f"{path}.{name}.weight", f"{key}.weight", dims, rows[0].when))
    return (*dense, *routed, *shared)


def moe_stacks(block: str, expert: tuple[str, str, str]) -> tuple[Stack, ...]:
    """Return the tensors that hold all experts of a layer in checkpoints that have the names of transformers' modules.

    The arguments are those of `moe_keys`. transformers writes such checkpoints with `save_original_format=False`.
    """
    at, theirs = "model.layers.{i}.mlp", f"model.layers.{{i}}.{block}"
    gate, up, down = (f"{theirs}.experts.{{e}}.{name}.weight" for name in expert)
    router = (Stack(f"{at}.gate.weight", (f"{theirs}.gate.weight",)),) if theirs != at else ()
    return (*router, Stack(f"{at}.experts.gate_up_proj", (gate, up)), Stack(f"{at}.experts.down_proj", (down,)))


class MoEBuilder(DecoderBuilder):
    """Adds the ops of a decoder with routed layers."""

    dims: MoEDecoder

    def block(self, x: Value, layer: int) -> Value:
        """Return the branch after the attention, a routed layer or an MLP, for the residual stream `x`."""
        if not self.dims.routed[layer]:
            return super().block(x, layer)
        b, path = self.b, f"layers.{layer}.mlp"
        h = self.norm(x, f"{path}.norm")
        tokens = b.flatten(h, start=0, end=1, name=f"{path}.tokens")
        weights, runs = self._route(tokens, path)
        names = [
            f"{path}.experts.{e}.{name}.weight" for e in range(self.dims.experts) for name in ("gate", "up", "down")
        ]
        act = next(name for name, row in EXPERT_ACTIVATIONS.items() if row == ACTIVATIONS[self.dims.activation])
        made = b.op("expert_mlp", tokens, *runs, weights, *map(self.weight, names), act=act, name=f"{path}.experts")
        mixed = b.unflatten(made, axis=0, sizes=b.spec(h).shape[:2], name=f"{path}.mixed")
        return self._with_shared(h, mixed, path) if self.dims.shared_width else mixed

    def _route(self, tokens: Value, path: str) -> tuple[Value, tuple[Value, ...]]:
        """Return (weights [N, k], results of the `dispatch`) of tokens [N, C]."""
        b, d = self.b, self.dims
        scores = self.linear(tokens, f"{path}.router")
        if self.compute.is_low:
            scores = b.cast(scores, dtype=float32, name=f"{path}.logits")
        scores = b.softmax(scores, axis=-1, name=f"{path}.scores")
        weights, ids = b.topk(scores, k=d.chosen, name=f"{path}.chosen")
        if d.normalize:
            total = b.sum(weights, axes=(1,), keepdims=True, name=f"{path}.total")
            weights = b.div(weights, total, name=f"{path}.weights")
        if self.compute.is_low and not d.wide_weights:
            weights = b.cast(weights, dtype=self.compute, name=f"{path}.rounded")
        return weights, b.dispatch(ids, experts=d.experts, name=f"{path}.dispatch")

    def _with_shared(self, h: Value, mixed: Value, path: str) -> Value:
        """Add the expert that processes all tokens, times the sigmoid of its gate."""
        b = self.b
        shared = self.mlp(h, f"{path}.shared")
        open_ = b.sigmoid(self.linear(h, f"{path}.shared_gate"), name=f"{path}.shared_open")
        return b.junction(mixed, b.mul(shared, open_, name=f"{path}.shared_scaled"), name=f"{path}.sum")


def build_moe(b: Builder, dims: MoEDecoder, params: Mapping[str, Value], compute: DType) -> None:
    """Build the graph of a decoder with routed layers; inputs and output are those of `build_decoder`."""
    build_decoder(b, dims, params, compute, MoEBuilder)


# -- configs -----------------------------------------------------------------------------------------------------------
_KNOWN = frozenset({
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("shared_expert_intermediate_size", "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef"),
    "router_jitter_noise",
})  # fmt: skip  # losses and noise of training do not change what an opened model computes
_NEUTRAL = dict(routed_scaling_factor=1.0, scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1)
_ROUTING = re.compile("expert|rout(er|ing|ed)|moe_|scoring|topk_|n_group")


def read_experts(config: Config, width: int, *, experts: int, chosen: int, sparse: bool = False) -> dict[str, Any]:
    """Read the fields of a `MoEDecoder` that concern routed layers.

    Args:
        width: the width of an expert.
        experts, chosen: the family's defaults for the numbers of experts and of experts per token.
        sparse: whether `decoder_sparse_step` and `mlp_only_layers` say which layers are routed; else all are.
    Raises: ConfigError for an invalid field, two numbers of experts, or a field of a router that no family here has.
    """
    for name, value in config.items():
        if _ROUTING.search(name) and name not in _KNOWN and value not in (None, False, _NEUTRAL.get(name)):
            raise ConfigError(f"config field {name!r} describes a router or expert that this family does not have",
                              where=str(config.path), expected=f"no such field, or {_NEUTRAL.get(name)}", got=value,
                              fix="open it as what it is: graphwright.models.register(Architecture(...))")  # fmt: skip
    given = {name: config.size(name, most=1 << 16) for name in ("num_experts", "num_local_experts")
             if config.get(name) is not None}  # fmt: skip
    if len(set(given.values())) > 1:
        raise config.invalid("num_experts", f"the same number as num_local_experts, {given['num_local_experts']}",
                             given["num_experts"])  # fmt: skip
    count = next(iter(given.values()), experts)
    layers = config.size("num_hidden_layers", least=1, most=100_000)
    made = {"experts": count, "chosen": config.size("num_experts_per_tok", min(chosen, count), most=count)}
    return {**made, "expert_width": width, "routed": _routed(config, layers, sparse)}


def _routed(config: Config, layers: int, sparse: bool) -> tuple[bool, ...]:
    dense = config.get("mlp_only_layers") if sparse else None
    if dense is not None and not (isinstance(dense, list) and all(type(i) is int for i in dense)):
        raise config.invalid("mlp_only_layers", "a list of layer numbers", dense)
    step = config.size("decoder_sparse_step", 1) if sparse else 1
    return tuple(i not in (dense or ()) and (i + 1) % step == 0 for i in range(layers))


def jitter_note(config: Config) -> tuple[str, ...]:
    """Return a note if training adds noise to the router's input, which an opened model does not."""
    noise = config.get("router_jitter_noise")
    return (f"router_jitter_noise {noise}: noise of training, which runs here do not add",) if noise else ()
