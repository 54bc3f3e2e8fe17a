"""Mutations: plain functions on an open edit, to be used in one's own edits as well.

Growth starts from zero outgoing weights, so what the network computes stays; the new part learns, since gradients reach
those zeros at once. What one mutation adds is named `b<number>....`, so it is drawn as one cluster and removed as one.
"""

from __future__ import annotations

from graphwright.evolve.mutations.cells import cell_type, insert_cell
from graphwright.evolve.mutations.delays import add_delay_link, remove_delay_link
from graphwright.evolve.mutations.images import kernel, stride
from graphwright.evolve.mutations.layers import (
    add_skip,
    insert_layer,
    insert_node,
    layer_attr,
    remove_layer,
    remove_skip,
    replace_activation,
)
from graphwright.evolve.mutations.links import add_link, remove_link, split_link, toggle_link
from graphwright.evolve.mutations.registry import MUTATIONS, Kind, linears, mutation
from graphwright.evolve.mutations.units import narrow, widen, widths

__all__ = [
    "MUTATIONS",
    "Kind",
    "add_delay_link",
    "add_link",
    "add_skip",
    "cell_type",
    "insert_cell",
    "insert_layer",
    "insert_node",
    "kernel",
    "layer_attr",
    "linears",
    "mutation",
    "narrow",
    "remove_delay_link",
    "remove_layer",
    "remove_link",
    "remove_skip",
    "replace_activation",
    "split_link",
    "stride",
    "toggle_link",
    "widen",
    "widths",
]
