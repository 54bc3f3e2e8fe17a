"""What planning does to every instruction: loops over arrays of numbers, compiled once per install.

Buffers and instructions are numbers. Lists per instruction lie one behind the other in an array (`reads`), those of
instruction q between `reads_at[q]` and `reads_at[q + 1]`. `order` holds the instructions of a plan as they run; a place
in it is a time. `home[b]` is the buffer in whose memory b lies: itself, or another that it was put over.
Without its compiled form each function runs as Python, to the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
ALIGN = 64


def root(home: Array, b: int) -> int:
    """The buffer in whose memory a buffer lies in the end."""
    while home[b] != b:
        b = home[b]
    return b


def needed(order: Array, reads_at: Array, reads: Array, outs_at: Array, outs: Array, need: Array) -> Array:
    """Instructions that make what is needed, in order; `need` marks the buffers that are, and takes in what is read."""
    keep = np.zeros(len(order), np.bool_)
    for i in range(len(order) - 1, -1, -1):
        q = order[i]
        for k in range(outs_at[q], outs_at[q + 1]):
            if need[outs[k]]:
                keep[i] = True
        if keep[i]:
            for k in range(reads_at[q], reads_at[q + 1]):
                need[reads[k]] = True
    return order[keep]


def sinking(
    order: Array, reads_at: Array, reads: Array, outs_at: Array, outs: Array, made: Array, kept: Array
) -> Array:
    """Marks instructions that only make new values of states, which nothing in front of them reads."""
    sinks = np.zeros(len(order), np.bool_)
    read = kept.copy()
    for i in range(len(order) - 1, -1, -1):
        q = order[i]
        makes, free = False, True
        for k in range(outs_at[q], outs_at[q + 1]):
            makes = makes or made[outs[k]]
            free = free and not read[outs[k]]
        sinks[i] = makes and free
        if not sinks[i]:
            for k in range(reads_at[q], reads_at[q + 1]):
                read[reads[k]] = True
    return sinks


def touches(order: Array, reads_at: Array, reads: Array, outs_at: Array, outs: Array, made: Array, read: Array) -> None:
    """Fill the time at which each buffer is made and is read last."""
    for i in range(len(order)):
        q = order[i]
        for k in range(reads_at[q], reads_at[q + 1]):
            read[reads[k]] = i
        for k in range(outs_at[q], outs_at[q + 1]):
            made[outs[k]] = i


def lifetimes(
    order: Array,
    reads_at: Array,
    reads: Array,
    outs_at: Array,
    outs: Array,
    works_at: Array,
    works: Array,
    home: Array,
    first: Array,
    last: Array,
) -> None:
    """Fill the times between which each buffer's bytes are needed, both included."""
    for i in range(len(order)):
        q = order[i]
        for k in range(outs_at[q], outs_at[q + 1]):
            b = root(home, outs[k])
            first[b] = last[b] = i
        for k in range(works_at[q], works_at[q + 1]):
            b = root(home, works[k])
            first[b] = last[b] = i
        for k in range(reads_at[q], reads_at[q + 1]):
            last[root(home, reads[k])] = i


def in_place(
    order: Array,
    reads_at: Array,
    reads: Array,
    pairs_at: Array,
    pairs: Array,
    fixed: Array,
    home: Array,
    first: Array,
    last: Array,
) -> None:
    """Let results take the memory of operands that die with the instruction and that nothing else of it looks at.

    `pairs` holds (result, operand) buffers that are alike; `fixed` marks buffers that keep their own memory.
    """
    for i in range(len(order)):
        q = order[i]
        for k in range(pairs_at[q], pairs_at[q + 1], 2):
            old, new = pairs[k], root(home, pairs[k + 1])
            if fixed[old] or fixed[new] or home[old] != old or old == new or last[new] != i or first[old] != i:
                continue
            looks = 0
            for r in range(reads_at[q], reads_at[q + 1]):
                looks += root(home, reads[r]) == new
            if looks == 1:
                home[old] = new
                last[new] = last[old]
                break


def fullest(sizes: Array, first: Array, last: Array, steps: int) -> int:
    """Bytes live at the fullest time."""
    change = np.zeros(steps + 2, np.int64)
    for b in range(len(sizes)):
        if last[b] >= 0:
            change[first[b]] += sizes[b]
            change[min(last[b], steps) + 1] -= sizes[b]
    live = most = 0
    for i in range(steps + 1):
        live += change[i]
        most = max(most, live)
    return most


def place(sizes: Array, first: Array, last: Array, offsets: Array, steps: int) -> int:
    """Give every living buffer the smallest hole that holds it when its time comes, else the end; returns the bytes.

    Walks the times once; after its last use a buffer is a hole again, joined with its neighbours.
    """
    count = len(sizes)
    born, begins = _by_time(first, last, steps, True, sizes)
    dying, ends = _by_time(last, last, steps, False, sizes)
    starts, widths = np.zeros(count + 2, np.int64), np.zeros(count + 2, np.int64)  # holes, by offset
    holes, top = 0, 0
    for i in range(steps + 1):
        for k in range(begins[i], begins[i + 1]):
            b = born[k]
            size = sizes[b]
            grain = ALIGN if size >= ALIGN else 8
            best, waste = -1, np.int64(1) << 62
            for h in range(holes):
                shift = -starts[h] % grain
                left = widths[h] - shift - size
                if 0 <= left < waste:
                    best, waste = h, left
                    if left == 0 and shift == 0:
                        break
            if best < 0:
                if holes and starts[holes - 1] + widths[holes - 1] == top:  # a hole at the end grows
                    holes -= 1
                    top = starts[holes]
                shift = -top % grain
                if shift:
                    starts[holes], widths[holes] = top, shift
                    holes += 1
                offsets[b] = top + shift
                top += shift + size
                continue
            start, width = starts[best], widths[best]
            shift = -start % grain
            offsets[b] = start + shift
            pieces = (shift > 0) + (width > shift + size)
            if pieces == 0:
                for h in range(best, holes - 1):
                    starts[h], widths[h] = starts[h + 1], widths[h + 1]
                holes -= 1
            elif pieces == 2:
                for h in range(holes, best + 1, -1):
                    starts[h], widths[h] = starts[h - 1], widths[h - 1]
                holes += 1
                widths[best] = shift
                starts[best + 1], widths[best + 1] = start + shift + size, width - shift - size
            elif shift > 0:
                widths[best] = shift
            else:
                starts[best], widths[best] = start + size, width - size
        for k in range(ends[i], ends[i + 1]):
            start, width = offsets[dying[k]], sizes[dying[k]]
            h = np.searchsorted(starts[:holes], start)
            before = h > 0 and starts[h - 1] + widths[h - 1] == start
            after = h < holes and start + width == starts[h]
            if before and after:
                widths[h - 1] += width + widths[h]
                for j in range(h, holes - 1):
                    starts[j], widths[j] = starts[j + 1], widths[j + 1]
                holes -= 1
            elif before:
                widths[h - 1] += width
            elif after:
                starts[h] = start
                widths[h] += width
            else:
                for j in range(holes, h, -1):
                    starts[j], widths[j] = starts[j - 1], widths[j - 1]
                starts[h], widths[h] = start, width
                holes += 1
    return top


def _by_time(times: Array, last: Array, steps: int, large_first: bool, sizes: Array) -> tuple[Array, Array]:
    """Living buffers by time, those of time i between at[i] and at[i + 1]; by size or by number."""
    at = np.zeros(steps + 3, np.int64)
    for b in range(len(times)):
        if last[b] >= 0:
            at[min(times[b], steps) + 1] += 1
    for i in range(steps + 1):
        at[i + 1] += at[i]
    found = np.zeros(at[steps + 1], np.int64)
    fill = at.copy()
    for b in range(len(times)):
        if last[b] >= 0:
            t = min(times[b], steps)
            k = fill[t]
            while large_first and k > at[t] and sizes[found[k - 1]] < sizes[b]:
                found[k] = found[k - 1]
                k -= 1
            found[k] = b
            fill[t] += 1
    return found, at


def keep_places(sizes: Array, first: Array, last: Array, offsets: Array, steps: int, chunks: Array) -> tuple[int, int]:
    """Leave buffers that have an offset (>= 0) where they are unless they meet another; find places for the rest.

    `chunks` are the ends of the arena's chunks; each buffer lies in one; what finds no place in them lies behind.
    Returns: how many had to be placed, and the bytes.
    """
    count = len(sizes)
    born, begins = _by_time(first, last, steps, True, sizes)
    dying, ends = _by_time(last, last, steps, False, sizes)
    live = np.zeros(count + 1, np.int64)  # buffers that have a place, by offset
    lives, loose = 0, 0
    for i in range(steps + 1):
        for k in range(begins[i], begins[i + 1]):
            b = born[k]
            if offsets[b] < 0:
                loose += 1
                continue
            low, high = 0, lives
            while low < high:
                middle = (low + high) // 2
                if offsets[live[middle]] < offsets[b]:
                    low = middle + 1
                else:
                    high = middle
            clear = (low == lives or offsets[b] + sizes[b] <= offsets[live[low]]) and (
                low == 0 or offsets[live[low - 1]] + sizes[live[low - 1]] <= offsets[b]
            )
            if not clear:
                offsets[b] = -1
                loose += 1
                continue
            for j in range(lives, low, -1):
                live[j] = live[j - 1]
            live[low] = b
            lives += 1
        for k in range(ends[i], ends[i + 1]):
            b = dying[k]
            if offsets[b] >= 0:
                for j in range(lives):
                    if live[j] == b:
                        for m in range(j, lives - 1):
                            live[m] = live[m + 1]
                        lives -= 1
                        break
    met, order = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for k in range(len(born)):
        b = born[k]
        if offsets[b] >= 0:
            continue
        n = 0
        for j in range(len(born)):
            c = born[j]
            if offsets[c] >= 0 and first[c] <= last[b] and first[b] <= last[c]:
                met[n] = c
                order[n] = offsets[c]
                n += 1
        grain = ALIGN if sizes[b] >= ALIGN else 8
        best, waste, top = -1, 1 << 62, 0
        for j in np.argsort(order[:n]):
            c = met[j]
            start = _in_one(top + -top % grain, sizes[b], chunks)
            left = offsets[c] - start - sizes[b]
            if 0 <= left < waste:
                best, waste = start, left
            top = max(top, offsets[c] + sizes[c])
        offsets[b] = best if best >= 0 else _in_one(top + -top % grain, sizes[b], chunks)
    top = 0
    for b in range(count):
        if last[b] >= 0:
            top = max(top, offsets[b] + sizes[b])
    return loose, top


def _in_one(start: int, size: int, chunks: Array) -> int:
    """The first place from `start` on where so many bytes lie in one chunk."""
    for end in chunks:
        if start < end < start + size:
            start = end
    return start


def moved(
    order: Array,
    reads_at: Array,
    reads: Array,
    outs_at: Array,
    outs: Array,
    works_at: Array,
    works: Array,
    other: Array,
) -> Array:
    """Instructions that use a buffer marked in `other`, in order."""
    found = np.zeros(len(order), np.bool_)
    for i in range(len(order)):
        q = order[i]
        for k in range(reads_at[q], reads_at[q + 1]):
            found[i] = found[i] or other[reads[k]]
        for k in range(outs_at[q], outs_at[q + 1]):
            found[i] = found[i] or other[outs[k]]
        for k in range(works_at[q], works_at[q + 1]):
            found[i] = found[i] or other[works[k]]
    return order[found]


PASSES: tuple[Callable[..., Any], ...] = (
    needed,
    sinking,
    touches,
    lifetimes,
    in_place,
    fullest,
    place,
    keep_places,
    moved,
)
