"""Mutations of programs: functions that take an open edit. You can call them in your own edits.

Growth starts with zero outgoing weights, so it does not change the function of the network; the new block can still
learn, because these weights get gradients. The nodes that one mutation adds are a block: their names start with
`b<number>.`, and pictures draw them as one group.
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
