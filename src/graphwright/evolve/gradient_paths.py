"""Weights that gradients cannot reach, because every path to an output contains an activation with slope 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from graphwright.array.population.names import ACTIVATIONS
from graphwright.evolve.errors import NoGradientPath
from graphwright.graph import NodeId
from graphwright.ops import OPS
from graphwright.program import Program

FLAT = tuple(name for name in ACTIVATIONS if name in OPS and OPS[name].traits.flat)
"""Activations of neurons with slope 0."""


def blocked_links(genes: Any, inputs: int, outputs: int) -> np.ndarray:
    """Return the indices, int64, of the open links of a population that affect an output but get no gradient."""
    flat = np.isin(genes.node_act, [*map(ACTIVATIONS.index, FLAT)])
    if not flat.any():
        return np.zeros(0, np.int64)
    genomes = np.arange(len(genes.node_off) - 1)
    span = int(genes.node_id.max()) + 1
    nodes = np.repeat(genomes * span, np.diff(genes.node_off)) + genes.node_id
    first = np.repeat(genomes * span, np.diff(genes.link_off))
    still = genes.link_open != 0
    into = np.searchsorted(nodes, first + genes.link_dst)
    neural = still & (genes.link_src > inputs)
    back, ahead = np.searchsorted(nodes, (first + genes.link_src)[neural]), into[neural]

    def reached(passes: np.ndarray) -> np.ndarray:
        """Return a mask of the nodes with a path to an output on which all nodes, ends included, have `passes` True."""
        found, before = passes & (genes.node_id <= inputs + outputs), -1
        while before != (before := int(found.sum())):
            found[back[found[ahead]]] = True
            found &= passes
        return found

    return np.flatnonzero(still & reached(np.ones_like(flat))[into] & ~reached(~flat)[into])


def blocked_params(program: Program) -> list[str]:
    """Return the keys of trainable weights that affect an output but get no gradient."""
    after = {program.operands(w)[0].node: program.operands(w)[1].node for w in program.assigns()}

    def above(passes: Callable[[NodeId], bool]) -> set[NodeId]:
        found: set[NodeId] = set()
        stack = [value.node for value in program.outputs()]
        while stack:
            node = stack.pop()
            if node in found or not passes(node):
                continue
            found.add(node)
            stack += [*program.producers(node), *([after[node]] if node in after else [])]
        return found

    def slopes(node: NodeId) -> bool:
        row = OPS.get(program.op(node))
        return row is None or row.passes_gradient(program.attrs(node))

    lost = above(lambda node: True) - above(slopes)
    return [program.key(n) for n in program.params() if n in lost and program.attrs(n)["trainable"]]


def warn_of_blocked(where: str, names: Iterable[str], stacklevel: int) -> None:
    """Warn that training cannot change the weights with these names."""
    found = list(names)
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    text = f"{where}: gradients of weights below a step or sign activation are 0: {shown}"
    warnings.warn(NoGradientPath(text), stacklevel=stacklevel + 1)
