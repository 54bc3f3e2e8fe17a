"""Patterns of attention in generated code: modules that hold lists of blocks, and masks of the tokens of a block."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.models.codegen.names import Names
from graphwright.ops import traits
from graphwright.patterns import masks
from graphwright.patterns.table import FULL
from graphwright.program.kinds import PATTERN
from graphwright.program.op_graph import Value
from graphwright.program.patterns import pattern_at

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.patterns import Pattern
    from graphwright.program.program import Program

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BlockLists:
    """A pattern as arrays.

    Attributes:
        edges: (plane, query block, key block, number of the mask) of each edge, int32 [edges, 4], sorted.
        masks: distinct masks of the tokens of a block, uint8 [masks, block, ceil(block / 8)]: bit j % 8 of byte j // 8
            of row i is set if query i sees key j. Mask 0 has all pairs.
        tokens, planes: number of queries, which is that of keys; number of planes.
    """

    edges: Array
    masks: Array
    tokens: int
    planes: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Arguments of the module: tokens, tokens per block, planes, number of edges and of masks."""
        return self.tokens, self.masks.shape[1], self.planes, len(self.edges), len(self.masks)

    def arrays(self, path: str) -> dict[str, Array]:
        """Return the tensors of the module at a path, by key."""
        return {f"{path}.edges": self.edges, f"{path}.masks": self.masks}


def block_lists(pattern: Pattern) -> BlockLists:
    """Return the edges and masks of a pattern."""
    where, held = pattern.pairs(), pattern.held(pattern.edges().index)
    partial = np.flatnonzero(held.kind != FULL)
    width = -(-pattern.block // 8)
    packed = np.full((1 + len(partial), pattern.block, width), 255, np.uint8)
    for part in masks.chunks(len(partial), pattern.block):
        seen = masks.tokens(held.take(partial[part]), pattern.base, pattern.frame)
        packed[1:][part] = np.packbits(seen, axis=-1, bitorder="little")
    _, first, number = np.unique(packed.reshape(len(packed), -1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # by first use, so that all pairs come first
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    edges = np.zeros((len(where), 4), np.int32)
    edges[:, :3] = where
    edges[partial, 3] = rank[number.reshape(-1)[1:]]
    sorted_ = edges[np.lexsort(edges.T[2::-1])]
    return BlockLists(sorted_, packed[first[order]], pattern.tokens[0], pattern.planes)


# -- which attentions can be written -----------------------------------------------------------------------------------
def sparse_attentions(p: Program) -> list[NodeId]:
    """Return the attentions over patterns on which the outputs depend."""
    needed = p.reachable([*p.outputs(), *p.assigns()])
    return [n for n in p.of_traits(attention=True) if n in needed and traits(p.op(n)).table is not None]


def pattern_of(p: Program, node: NodeId) -> Pattern | None:
    """Return the pattern that an attention reads; None if its table is not from a `pattern` node."""
    table = traits(p.op(node)).table
    return None if table is None else pattern_at(p, p.operands(node)[table].node)


def why_not_masked(p: Program, node: NodeId) -> str:
    """Return the reason why the attention `node` over a pattern differs from dense attention with a mask; "" if not."""
    attrs = p.attrs(node)
    if pattern_of(p, node) is None:
        return "its table does not belong to a pattern of the program"
    if "gates" in attrs["optional"]:
        return 'edges have gates that are not constants 0 or 1; dg.discretize(..., to="one") hardens trained ones'
    if any(p.edge_value(edge).port for edge in p.out_edges(node)) or Value(node, 1) in p.outputs():
        return "its log-sum-exp is read"
    return ""


def why_not_static(p: Program, node: NodeId) -> str:
    """Return the reason why generated code cannot express the attention `node` over a pattern; "" if it can."""
    pattern, optional = pattern_of(p, node), p.attrs(node)["optional"]
    why = why_not_masked(p, node)
    if not why and optional:
        return f"it reads {', '.join(optional)}"
    if not why and pattern is not None and (not pattern.causal or pattern.tokens[0] != pattern.tokens[1]):
        return f"only a causal pattern with as many queries as keys can be written, this is {pattern}"
    return why


# -- modules -----------------------------------------------------------------------------------------------------------
def pattern_paths(
    p: Program, needed: Container[NodeId], layer_of: Mapping[NodeId, int | None], homes: Mapping[int, str],
    taken: Iterable[str],
) -> dict[str, str]:  # fmt: skip
    """Return the key of each pattern -> path of its module: in the layer that alone reads it, or in `patterns`.

    Args:
        needed: nodes that are written.
        layer_of: node -> number of its layer, None outside of layers.
        homes: number of a layer -> path of its module.
        taken: paths of other modules and keys of weights.
    """
    used = {part for path in taken for part in _prefixes(path)}
    names, found = Names(), dict[str, str]()
    root = next(name for name in ("patterns", *(f"patterns_{i}" for i in range(2, 99))) if name not in used)
    for node in (n for n in p.of_kind(PATTERN) if n in needed):
        key = p.key(node)
        readers = {layer_of.get(n) for m in p.readers(key) for n in p.consumers(m) if n in needed}
        home = homes.get(readers.pop() or 0, "") if len(readers) == 1 and readers != {None} else ""
        free = (f"{home}.pattern", *(f"{home}.pattern_{i}" for i in range(2, 999)))
        path = next(f for f in free if f not in used) if home else f"{root}.{names.take(key)}"
        used.add(path)
        found.setdefault(key, path)
    return found


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))
