"""Names of activations, losses and mutations, in the order of the codes that compiled loops know them by."""

from __future__ import annotations

ACTIVATIONS = (
    "identity",
    "sigmoid49",
    "sigmoid",
    "tanh",
    "relu",
    "leaky_relu",
    "gelu",
    "silu",
    "softplus",
    "sech",
    "gauss",
    "sin",
    "abs",
    "step",
    "sign",
)
"""`sigmoid49` is σ(4.9 x), the one of NEAT 2002; `gauss` e^(-x²); `step` is 1 above 0."""

LOSSES = ("mse", "bce", "cross_entropy")
"""Mean square; binary cross entropy of logits; softmax cross entropy of logits."""

MUTATIONS = (
    "copy",
    "weights",
    "grow",
    "split_link",
    "add_link",
    "add_delay_link",
    "toggle_link",
    "remove_link",
    "set_activation",
    "remove_delay_link",
)

NODE_COLUMNS = ("node_id", "node_act")
LINK_COLUMNS = ("link_id", "link_src", "link_dst", "link_delay", "link_open", "weight", "first", "second", "steps")
"""Of `genes.Genes`."""
