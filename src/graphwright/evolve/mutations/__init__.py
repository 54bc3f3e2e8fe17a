"""Mutations: plain functions on an open edit, which your own edits can use too.

Growth starts with zero outgoing weights, so the function of the network stays; the new part learns, since gradients
reach those zeros. A mutation names its nodes `b<number>....`, so they are drawn and removed together.
"""

from __future__ import annotations

from graphwright.evolve.mutations.cells import cell_type, insert_cell
from graphwright.evolve.mutations.layers import (
    add_skip,
    insert_layer,
    insert_node,
    layer_attr,
    remove_layer,
    remove_skip,
    replace_activation,
)
from graphwright.evolve.mutations.links import (
    add_delay_link,
    add_link,
    remove_delay_link,
    remove_link,
    split_link,
    toggle_link,
)
from graphwright.evolve.mutations.registry import MUTATIONS, MutationKind, linears, mutation
from graphwright.evolve.mutations.sizes import kernel, narrow, stride, widen, widths

__all__ = [
    "MUTATIONS", "MutationKind", "add_delay_link", "add_link", "add_skip", "cell_type", "insert_cell",
    "insert_layer", "insert_node", "kernel", "layer_attr", "linears", "mutation", "narrow", "remove_delay_link",
    "remove_layer", "remove_link", "remove_skip", "replace_activation", "split_link", "stride", "toggle_link",
    "widen", "widths",
]  # fmt: skip
