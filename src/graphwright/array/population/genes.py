"""The columns of a population, its registry of innovations, and how both are found their way in.

A genome is a run of nodes and a run of links, each in ascending order of innovation numbers. Inputs (0 to n-1) and the
bias (n) are the same in all genomes and have no row; outputs come next, hidden nodes get their numbers as they arise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from graphwright.array.vm import vector as v
from graphwright.array.vm.llvm import I1, I8, intrinsic_call, pointer
from graphwright.array.vm.machine import source
from graphwright.native import njit

# _nrt=False: nothing here owns an array, and counting references to a dozen of them costs more than the work (measured)
native: Any = njit(error_model="numpy", nogil=True, _nrt=False)


def compiled(loop: Any) -> Any:
    """A loop that numba keeps on disk until any file of this folder, or of the VM's, changes."""
    made: Any = njit(cache=True, error_model="numpy", nogil=True, _nrt=False)(loop)
    made._cache._cache_file._source_stamp = source(Path(__file__).parent)  # numba looks at the loop's file alone
    return made


IN, BIAS, OUT, LINK, SPLIT, UNIT = range(6)
"""Kinds of registry keys: (IN, i), (BIAS), (OUT, i), (LINK, src, dst, delay), (SPLIT, link, k), (UNIT, k)."""


class Genes(NamedTuple):
    """Columns of a population of G genomes; those of genome g are `node_off[g]:node_off[g + 1]`, links likewise.

    Attributes:
        node_off, link_off: int64 [G + 1].
        node_id, node_act: int32, outputs first; the number of a node and of its activation.
        link_id, link_src, link_dst, link_delay, link_open: int32; an id, the ids of two nodes, steps, 0 or 1.
        weight, first, second, steps: float32; weight, moments of Adam and how many steps they have seen.
    """

    node_off: Any
    node_id: Any
    node_act: Any
    link_off: Any
    link_id: Any
    link_src: Any
    link_dst: Any
    link_delay: Any
    link_open: Any
    weight: Any
    first: Any
    second: Any
    steps: Any


class Registry(NamedTuple):
    """Structural keys by innovation number, and a hash table to find them.

    Attributes:
        keys: int64 [capacity, 4]; row = innovation number.
        slots: int64 [power of two, at least twice the capacity]; a row, or -1.
        count: int64 [1]; rows in use.
    """

    keys: Any
    slots: Any
    count: Any


@native
def number_of(registry: Any, kind: Any, a: Any, b: Any, c: Any) -> Any:
    """The innovation number of a key: the one it has, or the next."""
    mask = np.uint64(len(registry.slots) - 1)
    h = np.uint64(kind)
    for part in (a, b, c):
        h = (h ^ np.uint64(part)) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(29)
    at = h & mask
    while registry.slots[at] >= 0:
        row = registry.slots[at]
        key = registry.keys[row]
        if key[0] == kind and key[1] == a and key[2] == b and key[3] == c:
            return row
        at = (at + np.uint64(1)) & mask
    row = registry.count[0]
    registry.count[0] = row + 1
    registry.keys[row, 0], registry.keys[row, 1], registry.keys[row, 2], registry.keys[row, 3] = kind, a, b, c
    registry.slots[at] = row
    return row


_copy_bytes = v.define(
    "copy_bytes",
    v.void,
    (v.i64, v.i64, v.i64),
    v.effect(
        lambda b, to, of, size: intrinsic_call(
            b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), pointer(b, to, I8), pointer(b, of, I8), size, I1(0)
        )
    ),
)


@native
def copy_run(of: Any, low: Any, count: Any, to: Any, at: Any) -> None:
    """Entries of a column of genes, 4 bytes each, into another column."""
    _copy_bytes(to.ctypes.data + 4 * at, of.ctypes.data + 4 * low, 4 * count)


@native
def place(column: Any, low: Any, high: Any, number: Any) -> Any:
    """Where a number is in a sorted run, or -1."""
    end = high
    while low < high:
        middle = (low + high) // 2
        if column[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low if low < end and column[low] == number else -1
