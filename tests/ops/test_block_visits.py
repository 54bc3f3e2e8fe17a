"""Work is proportional to edges: a pass over a pattern visits each edge once per batch element and head.

The loops of the VM run here as Python, with their arithmetic left out, so that visits can be counted; the addresses of
the pattern's arrays are read as they are. A compiled loop that visited an edge twice would change its sums, and one
that read a key without an edge would find NaN.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from block_patterns import Blocks, random_blocks
from test_block_attention import both, dense, run

from graphwright.array.cpu.block_table import BlockTable
from graphwright.array.vm import block_attention as loops

COMPUTED = ("_scored", "_softened", "_mixed", "_scaled", "_cleared", "_prepared", "_pulled_back", "_collected",
            "_tile_products", "_few_products", "_add_row", "gemm")  # fmt: skip


class Memory:
    """Loads and stores of integers; vectors are the number 0."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0.0

    @staticmethod
    def load_i64(at: int) -> int:
        return ctypes.c_int64.from_address(at).value

    @staticmethod
    def load_i32(at: int) -> int:
        return ctypes.c_int32.from_address(at).value

    @staticmethod
    def load_u8(at: int) -> int:
        return ctypes.c_uint8.from_address(at).value

    @staticmethod
    def store_i64(at: int, value: int) -> None:
        ctypes.c_int64.from_address(at).value = value


def as_python(visits: Counter[int]) -> dict[str, Any]:
    """The functions of the VM's loops, which count the edges that their strips begin."""
    names: dict[str, Any] = dict(vars(loops))
    for name, found in vars(loops).items():
        code = getattr(getattr(found, "py_func", found), "__code__", None)
        if code is not None and code.co_filename == loops.__file__:
            names[name] = FunctionType(code, names, name)
    names |= dict.fromkeys(COMPUTED, lambda *_: None) | dict.fromkeys(("operand", "step_of", "log"), lambda *_: 0)
    memory: Any = Memory()
    names |= {"vec": memory, "cell": lambda row, index: memory.load_i64(row + 8 * index)}
    strip = names["_strip"]

    def counted(row: int, scratch: int, *more: Any) -> int:
        columns = strip(row, scratch, *more)
        for p in range(names["_count"](scratch)):
            piece = scratch + loops._PIECES + loops._PIECE * p
            if memory.load_i64(piece + 8 * loops._INSIDE) == 0:
                visits[memory.load_i64(piece + 8 * loops._EDGE)] += 1
        return columns

    names["_strip"] = counted
    return names


def visited(pattern: Blocks, heads: tuple[int, int], batch: int, *, backward: bool, first: int = 0) -> Counter[int]:
    """Edge slot -> visits of one pass over the queries from `first` on."""
    visits: Counter[int] = Counter()
    queries, parts = pattern.tokens[0] - first, 2
    row, start = np.zeros(loops.MORE + 16, np.int64), np.array(first + pattern.start)
    units = batch * heads[1] * parts if backward else batch * heads[0] * -(-queries // 64)
    row[2:7] = units, *heads, queries, pattern.tokens[1]
    row[9], row[10], row[15] = pattern.words().ctypes.data, pattern.planes, start.ctypes.data
    row[loops.MORE + loops.KT], row[loops.MORE + loops.PARTS] = 1, parts
    scratch = np.zeros(loops._WALK // 8 + 8, np.int64)
    name = "block_attend_backward" if backward else "block_attend"
    assert as_python(visits)[name](row.ctypes.data, scratch.ctypes.data) == 3
    return visits


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("block", "tokens", "planes"), [(16, 160, 1), (64, 300, 2), (7, 63, 4), (1, 40, 1)])
def test_the_vm_visits_each_edge_once(block: int, tokens: int, planes: int, backward: bool) -> None:
    """The blocks are such that none is split between two spans of 64 queries."""
    pattern = random_blocks(np.random.default_rng(block), tokens, tokens, block, planes, density=0.6, masks=0.2)
    found = visited(pattern, (4, 2), 2, backward=backward)
    assert len(pattern.edges) > 12
    assert found == {pattern.slot(edge): 2 * 4 // planes for *_, edge in pattern.edges}


def test_a_decoded_token_visits_the_edges_of_its_row() -> None:
    pattern = random_blocks(np.random.default_rng(0), 160, 160, 16, density=0.6)
    found = visited(pattern, (2, 2), 1, backward=False, first=159)
    assert found == {pattern.slot(edge): 2 for _, i, *_, edge in pattern.edges if i == 9}


def test_a_longer_text_with_as_many_edges_has_as_many_visits() -> None:
    counts = []
    for tokens in (64, 512):
        pattern = Blocks(tokens, tokens, 16)
        for i in range(0, tokens // 16, tokens // 64):
            pattern.add(0, i, i)
        counts.append(visited(pattern, (1, 1), 1, backward=False).total())
    assert counts == [4, 4]


@pytest.mark.parametrize("algorithm", ["block", "reference"])
def test_the_kernels_on_aten_visit_each_edge_once(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = random_blocks(np.random.default_rng(1), 90, 90, 16, 2, density=0.6)
    edges, visits = BlockTable.edges, Counter[int]()

    def counted(self: BlockTable, plane: int, i: int) -> Any:
        for edge, j in edges(self, plane, i):
            visits[edge] += 1
            yield edge, j

    monkeypatch.setattr(BlockTable, "edges", counted)
    rng = np.random.default_rng(2)
    ins = [rng.normal(size=(2, h, 90, 8)) for h in (4, 2, 2)]
    attrs = {"scale": 0.3, "planes": 2, "algorithm": algorithm}
    once = dict.fromkeys((pattern.slot(edge) for *_, edge in pattern.edges), 1)
    run("block_sdpa", *ins, pattern.words(), **attrs)
    assert visits == once
    visits.clear()
    both(pattern, ins, attrs, rng.normal(size=(2, 4, 90, 8)))
    assert visits == {edge: 2 for edge in once}  # forward and backward


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_row_reads_no_key_without_an_edge(kind: type) -> None:
    pattern = random_blocks(np.random.default_rng(3), 192, 192, 16, density=0.4, masks=0.0)
    rng = np.random.default_rng(4)
    q, k, v = (rng.normal(size=(1, 2, 192, 16)).astype(kind) for _ in range(3))
    exact = torch.tensor(q).double(), torch.tensor(k).double(), torch.tensor(v).double()
    wanted, _ = dense(*exact, pattern, scale=0.25)
    for j in (0, 3, 7):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, :, 16 * j : 16 * j + 16] = bad_v[:, :, 16 * j : 16 * j + 16] = np.nan
        out, _ = run("block_sdpa", q, bad_k, bad_v, pattern.words(), scale=0.25, algorithm="block")
        with_edge = {i for _, i, key, *_ in pattern.edges if key == j}
        rows = np.repeat([i not in with_edge for i in range(12)], 16)
        np.testing.assert_allclose(out[:, :, rows], wanted.numpy()[:, :, rows], atol=1e-5)
        assert np.isnan(out[:, :, ~rows]).any()
