"""Names of activations, losses and mutations, indexed by their codes in compiled loops; the record of births.

Plain numpy: importing this module loads no numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ACTIVATIONS = (  # by name: the codes of compiled loops
    "identity", "sigmoid49", "sigmoid", "tanh", "relu", "leaky_relu", "gelu", "silu", "softplus", "sech", "gauss",
    "sin", "abs", "step", "sign",
)  # fmt: skip
"""See `array.formulas.activations`."""

LOSSES = ("mse", "bce", "cross_entropy")  # by name: the codes of compiled loops
"""Mean squared error; binary cross entropy of logits; softmax cross entropy of logits."""

MUTATIONS = (
    "copy", "weights", "grow", "split_link", "add_link", "add_delay_link", "toggle_link", "remove_link",
    "set_activation", "remove_delay_link",
)  # fmt: skip

NODE_COLUMNS = ("node_id", "node_act")
LINK_COLUMNS = ("link_id", "link_src", "link_dst", "link_delay", "link_open", "weight", "first", "second", "steps")
"""Columns of `genes.Genes`."""


class Births(NamedTuple):
    """The parents and the mutation of each genome of a generation. Arrays except `refused` have an entry per genome.

    Attributes:
        fitter_parent, other_parent: int32 [G]; indices into the previous generation, or -1. A child has the
            structure of its fitter parent.
        mutation: int8 [G]; index into `MUTATIONS`.
        site: int32 [G]; innovation number of the mutated gene, or -1.
        refused: int64 [mutations]; number of times that each mutation was impossible.
    """

    fitter_parent: np.ndarray
    other_parent: np.ndarray
    mutation: np.ndarray
    site: np.ndarray
    refused: np.ndarray


def founders(count: int) -> Births:
    """Return the `Births` of `count` genomes without parents."""
    fitter_parent, other_parent, site = np.full((3, count), -1, np.int32)
    return Births(fitter_parent, other_parent, np.zeros(count, np.int8), site, np.zeros(len(MUTATIONS), np.int64))
