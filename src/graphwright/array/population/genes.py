"""The genes of a population as columns, the registry of innovation numbers, and the random numbers of each child.

A genome is a range of nodes and a range of links, each in ascending order of innovation numbers. Inputs (0 to n-1) and
the bias (n) are the same in all genomes and are not stored; outputs come next, hidden nodes are numbered as they are
created. Importing this module loads numba.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from graphwright.array import formulas, vm
from graphwright.array.formulas import philox, specialise
from graphwright.array.formulas.philox import LOW
from graphwright.array.vm import vector as vec
from graphwright.array.vm.vector import I1, I8, intrinsic_call, pointer
from graphwright.native import cached, inner

# _nrt=False: nothing here owns an array, and counting references to a dozen of them costs more than the work (measured)
native: Any = inner(error_model="numpy", nogil=True, _nrt=False)
inlined: Any = inner(error_model="numpy", nogil=True, _nrt=False, forceinline=True)  # LLVM leaves deep chains as calls
SOURCES = tuple([Path(str(file)).parent for file in (__file__, vm.__file__, formulas.__file__)])
compiled: Any = cached(*SOURCES, error_model="numpy", nogil=True, _nrt=False)
"""Compile a loop, cached on disk until a file of this folder, of the VM or of the formulas changes."""

IN, BIAS, OUT, LINK, SPLIT, UNIT = range(6)
"""Kinds of registry keys: (IN, i), (BIAS), (OUT, i), (LINK, src, dst, delay), (SPLIT, link, k), (UNIT, k)."""


class Genes(NamedTuple):
    """Columns of a population of G genomes.

    Genome g has the entries `node_off[g]:node_off[g + 1]` of the node columns and
    `link_off[g]:link_off[g + 1]` of the link columns.

    Attributes:
        node_off, link_off: int64 [G + 1].
        node_id, node_act: int32; innovation number and activation code of each node, outputs first.
        link_id, link_src, link_dst, link_delay, link_open: int32; innovation number of each link, those of its source
            and target, its delay in steps, 1 if it is open, else 0.
        weight, first, second, steps: float32; weight of each link, its moments of Adam and its number of Adam steps.
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
    """A hash table from keys to innovation numbers; a key is a kind and 3 numbers: (LINK, source, target, delay), say.

    Attributes:
        keys: int64 [capacity, 4]; keys[n] is the key with innovation number n.
        slots: int64 [power of two, at least twice the capacity]; the hash table of innovation numbers, -1 where empty.
        count: int64 [1]; the number of keys.
    """

    keys: Any
    slots: Any
    count: Any


@compiled
def number_of(registry: Any, kind: Any, a: Any, b: Any, c: Any) -> Any:
    """Return the innovation number of the key (kind, a, b, c); register the key if it is new."""
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


def _memcpy(b: Any, to: Any, of: Any, size: Any) -> None:
    pointers = (pointer(b, to, I8), pointer(b, of, I8), size, I1(0))
    intrinsic_call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *pointers)


_copy_bytes = vec.define("copy_bytes", vec.void, (vec.i64, vec.i64, vec.i64), vec.effect(_memcpy))


@native
def copy_run(of: Any, low: Any, count: Any, to: Any, at: Any) -> None:
    """Copy `count` entries of 4 bytes from index `low` of column `of` to index `at` of column `to`."""
    _copy_bytes(to.ctypes.data + 4 * at, of.ctypes.data + 4 * low, 4 * count)


@native
def find(column: Any, low: Any, high: Any, number: Any) -> Any:
    """Return the index of a number in the entries `low` to `high` of a sorted column, or -1."""
    end = high
    while low < high:
        middle = (low + high) // 2
        if column[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low if low < end and column[low] == number else -1


SIZE = 11
"""Words of a random state: two of the key, four of the counter, how many words of the block are used, the block."""
_philox: Any = specialise(philox, {}, native).philox


@native
def begin(state: Any, seed: int, child: int, generation: int, purpose: int) -> None:
    """Start in `state`, uint64 [11], the random stream of (seed, child, generation, purpose): one purpose per use."""
    state[0], state[1] = np.uint64(seed) & LOW, np.uint64(seed) >> np.uint64(32)
    state[2], state[3], state[4], state[5] = 0, child, generation, purpose
    state[6] = 4


@native
def uniform(state: Any) -> float:
    """Draw a number in [0, 1), a multiple of 2⁻³²."""
    if state[6] == 4:
        state[7], state[8], state[9], state[10] = _philox(state[2], state[3], state[4], state[5], state[0], state[1])
        state[2] += np.uint64(1)
        state[6] = 0
    word = state[np.int64(7 + state[6])]
    state[6] += np.uint64(1)
    return np.float64(word) * 2.3283064365386963e-10


@native
def below(state: Any, count: Any) -> Any:
    """Draw an integer from 0 to count - 1."""
    return np.int64(uniform(state) * count)


@native
def normal(state: Any) -> float:
    """Draw a sample of N(0, 1), by the Box-Muller transform of two uniform numbers."""
    u, w = uniform(state), uniform(state)
    return np.sqrt(-2.0 * np.log(1.0 - u)) * np.cos(6.283185307179586 * w)
