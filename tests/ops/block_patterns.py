"""Patterns of block-sparse attention for tests: a graph, its table, and the dense mask of every plane."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.graph import Graph
from graphwright.patterns import table as words


def _address(a: np.ndarray) -> int:
    return a.ctypes.data


class Blocks:
    """A pattern of `planes` planes over tokens (Tq, Tk) in blocks, with edges added one by one."""

    def __init__(self, queries: int, keys: int, block: int, planes: int = 1, *, causal: bool = True,
                 window: int = 0, symmetric: bool = False, segments: Any = None) -> None:  # fmt: skip
        self.tokens, self.block, self.planes = (queries, keys), block, planes
        self.causal, self.window, self.symmetric = causal, window, symmetric
        self.start = keys - queries
        self.segments = [np.asarray(s, np.int32) for s in segments] if segments is not None else None
        self.nq, self.nk = -(-queries // block), -(-keys // block)
        kinds = {"kind": np.uint8, "gate": (np.int32, -1), "bits": (np.int32, -1)}
        self.graph = Graph({"index": np.int32}, kinds, block=16)
        self.rows = [[self.graph.add_node(index=i) for i in range(self.nq)] for _ in range(planes)]
        self.cols = [[self.graph.add_node(index=j) for j in range(self.nk)] for _ in range(planes)]
        slot = self.graph._node_table.slot
        self.slots = [np.array([[slot(n) for n in side] for side in sides], np.int32).reshape(planes, -1)
                      for sides in (self.rows, self.cols)]  # fmt: skip
        self.pool = np.zeros((0, block, -(-block // 64)), np.uint64)
        self.edges: list[tuple[int, int, int, np.ndarray, int, Any]] = []
        self.table = np.zeros(words.WORDS, np.int64)
        self.gates = 0

    def rule(self) -> np.ndarray:
        i, j = np.arange(self.tokens[0])[:, None] + self.start, np.arange(self.tokens[1])[None]
        mask = np.ones(self.tokens, bool)
        if self.causal:
            mask &= j <= i
        if self.window:
            mask &= i - j < self.window
            if self.symmetric:
                mask &= j - i < self.window
        if self.segments is not None:
            mask &= self.segments[0][:, None] == self.segments[1][None]
        return mask

    def add(self, plane: int, i: int, j: int, mask: np.ndarray | None = None, gate: int = -1) -> Any:
        """Connect key block j to query block i; `mask`: the edge's own pairs [rows, keys]."""
        b = self.block
        rule = self.rule()[i * b : (i + 1) * b, j * b : (j + 1) * b]
        kind, bits = (words.FULL if rule.all() else words.RULE), -1
        if mask is not None:
            kind, bits = words.MASKED, len(self.pool)
            packed = np.zeros((1, b, -(-b // 64)), np.uint64)
            for r, c in zip(*np.nonzero(mask), strict=True):
                packed[0, r, c // 64] |= np.uint64(1) << np.uint64(c % 64)
            self.pool = np.concatenate([self.pool, packed])
        pairs = rule if mask is None else mask
        edge = self.graph.add_edge(self.cols[plane][j], self.rows[plane][i], kind=kind, gate=gate, bits=bits)
        self.edges.append((plane, i, j, pairs, gate, edge))
        self.gates = max(self.gates, gate + 1)
        return edge

    def cut(self, number: int) -> None:
        self.graph.remove_edge(self.edges.pop(number)[5])

    def slot(self, edge: Any) -> int:
        return self.graph._edge_table.slot(edge)

    def dense(self) -> np.ndarray:
        mask, b = np.zeros((self.planes, *self.tokens), bool), self.block
        for plane, i, j, pairs, _, _ in self.edges:
            mask[plane, i * b : (i + 1) * b, j * b : (j + 1) * b] = pairs
        return mask

    def gate_values(self, gates: np.ndarray) -> np.ndarray:
        """The gate of every pair [planes, Tq, Tk]; 1 where no edge has one."""
        values, b = np.ones((self.planes, *self.tokens), gates.dtype), self.block
        for plane, i, j, _, gate, _ in self.edges:
            if gate >= 0:
                values[plane, i * b : (i + 1) * b, j * b : (j + 1) * b] = gates[gate]
        return values

    def words(self) -> np.ndarray:
        """The table, written now."""
        g, w = self.graph, self.table
        nodes, edges = g._node_table, g._edge_table
        self.keep = [side._blocks for side in (g._in, g._out)]
        for side, first in ((g._in, words.IN_HEAD), (g._out, words.OUT_HEAD)):
            w[first : first + 4] = [_address(a) for a in (
                side._head.data, side._degree.data, side._blocks[1], side._blocks[0])]  # fmt: skip
        w[words.MAGIC] = words.SIGNATURE
        w[words.ROWS], w[words.COLS] = map(_address, self.slots)
        w[words.SRC], w[words.DST] = _address(g._source.data), _address(g._target.data)
        w[words.INDEX] = _address(nodes.column("index").data)
        w[words.KIND], w[words.GATE], w[words.BITS] = (
            _address(edges.column(name).data) for name in ("kind", "gate", "bits")
        )
        w[words.POOL] = _address(self.pool)
        w[words.BLOCK], w[words.NQ], w[words.NK], w[words.PLANES] = self.block, self.nq, self.nk, self.planes
        w[words.TQ], w[words.TK] = self.tokens
        w[words.QSTART], w[words.CAUSAL] = self.start, self.causal
        w[words.WINDOW], w[words.SYMMETRIC] = self.window, self.symmetric
        if self.segments is not None:
            w[words.SEG_Q], w[words.SEG_K] = map(_address, self.segments)
        w[words.EDGES], w[words.EDGE_SLOTS] = len(self.edges), len(edges.column("kind").data)
        w[words.BUCKET], w[words.ROW_STRIDE], w[words.COL_STRIDE] = 16, self.nq, self.nk
        w[words.GATES] = self.gates
        return w


def random_blocks(rng: np.random.Generator, queries: int, keys: int, block: int, planes: int = 1, *,
                  density: float = 0.5, masks: float = 0.2, gates: int = 0, **rule: Any) -> Blocks:  # fmt: skip
    """Random edges in random order; some have masks of their own, within the rule; with `gates`, most have a gate."""
    pattern = Blocks(queries, keys, block, planes, **rule)
    allowed = pattern.rule()
    pairs = [(p, i, j) for p in range(planes) for i in range(pattern.nq) for j in range(pattern.nk)
             if allowed[i * block : (i + 1) * block, j * block : (j + 1) * block].any()]  # fmt: skip
    for p, i, j in rng.permutation(np.array(pairs, int).reshape(-1, 3)):
        if rng.random() < density:
            own = allowed[i * block : (i + 1) * block, j * block : (j + 1) * block]
            mask = own & (rng.random(own.shape) < 0.6) if rng.random() < masks else None
            pattern.add(p, i, j, mask, int(rng.integers(gates)) if gates and rng.random() < 0.8 else -1)
    for _ in range(len(pattern.edges) // 4):  # holes in the lists
        pattern.cut(int(rng.integers(len(pattern.edges))))
    return pattern
