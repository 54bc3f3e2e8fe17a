"""The Triton kernel that applies the words of a `PatternMirror`'s queue."""

from __future__ import annotations

import triton
import triton.language as tl

from graphwright.patterns import table as words

KIND = tl.constexpr(words.KIND)


@triton.jit
def apply_words(table, queue, WIDTH: tl.constexpr):
    """Write the values of `queue`, int32 [1 + 3·n]: number of words, then array, index, value; set the number to 0.

    A word's array is the one whose address is in this word of `table`; 0 is the table itself, and the array of kinds
    has bytes. One program, as the words are few.
    """
    count = tl.load(queue)
    for first in range(0, count, WIDTH):
        at = first + tl.arange(0, WIDTH)
        there = at < count
        array = tl.load(queue + 1 + 3 * at, mask=there, other=0)
        index = tl.load(queue + 2 + 3 * at, mask=there, other=0)
        value = tl.load(queue + 3 + 3 * at, mask=there, other=0)
        base = tl.load(table + array, mask=there, other=0)
        tl.store(table + index, value.to(tl.int64), mask=there & (array == 0))
        kinds = base.to(tl.pointer_type(tl.uint8)) + index
        tl.store(kinds, value.to(tl.uint8), mask=there & (array == KIND))
        cells = base.to(tl.pointer_type(tl.int32)) + index
        tl.store(cells, value, mask=there & (array != 0) & (array != KIND))
    tl.debug_barrier()  # every thread has read the number
    tl.store(queue, 0)
