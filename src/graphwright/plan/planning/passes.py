"""Planning passes over all instructions: loops over integer arrays, compiled once per install.

Buffers and instructions are integer ids. The buffers that instruction q reads are `reads[reads_at[q]:reads_at[q + 1]]`;
`outs`, `works` and `pairs` are stored the same way. `order` lists the instructions of a plan in execution order; an
index into it is called a time. `home[b]` is the buffer whose memory b uses: b, or a buffer that is its own home.
`codes[b]` is the location of b: the arena (`FED` for inputs, `TEMPORARY` for others) or `ELSEWHERE`.
Buffer ids are unsigned, so native code need not check their sign before a lookup.
Each function gives the same result when it runs as plain Python and when it is compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
ALIGN = 64
FED, TEMPORARY, ELSEWHERE = 0, 1, 2


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of 64, or to 8 if it is at most 8, which keeps graphs of scalars small."""
    return 8 if nbytes <= 8 else -(-nbytes // ALIGN) * ALIGN


def needed(order: Array, reads_at: Array, reads: Array, outs_at: Array, outs: Array, need: Array) -> Array:
    """Return the instructions that buffers marked in `need` depend on; mark their operands. Arrays: see the module."""
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
    """Return the mask of the instructions in `order` that can move to the end of the step. Arrays: see the module.

    Such an instruction computes a new state value; the plan returns none of its results, and only instructions in the
    mask read them. `made` marks the buffers of new state values, `kept` the buffers that the plan returns.
    """
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
    """Write to `made` the index in `order` of each buffer's writer, to `read` that of its last reader."""
    for i in range(len(order)):
        q = order[i]
        for k in range(reads_at[q], reads_at[q + 1]):
            read[reads[k]] = i
        for k in range(outs_at[q], outs_at[q + 1]):
            made[outs[k]] = i


def lifetimes(
    order: Array, reads_at: Array, reads: Array, outs_at: Array, outs: Array, works_at: Array, works: Array,
    pairs_at: Array, pairs: Array, codes: Array, home: Array, held: Array
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute the first and last instruction (index in `order`) that needs each buffer's bytes; -1 for never.

    A result takes the memory of an operand that no later instruction needs, if no other operand uses that memory; the
    result's `home` is then the operand. `pairs` lists the (result, operand) buffers that may share memory. Buffers
    outside the arena, and those whose home is a different buffer already, keep their memory. `held` lists the buffers
    that are needed to the end. The other arrays are those of the module's docstring.
    Returns: first, last, and a mask of the buffers with their own bytes of the arena.
    """
    count = len(home)
    first, last = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
    for i in range(len(order)):
        q = order[i]
        for k in range(outs_at[q], outs_at[q + 1]):
            b = home[outs[k]]
            first[b] = last[b] = i
        for k in range(works_at[q], works_at[q + 1]):
            b = home[works[k]]
            first[b] = last[b] = i
        for k in range(reads_at[q], reads_at[q + 1]):
            last[home[reads[k]]] = i
    for k in range(len(held)):
        last[home[held[k]]] = len(order)
    for i in range(len(order)):
        q = order[i]
        for k in range(pairs_at[q], pairs_at[q + 1], 2):
            old, new = pairs[k], home[pairs[k + 1]]
            if codes[old] != TEMPORARY or codes[new] != TEMPORARY or home[old] != old or old == new:
                continue
            if last[new] != i or first[old] != i:
                continue
            looks = 0
            for r in range(reads_at[q], reads_at[q + 1]):
                looks += home[reads[r]] == new
            if looks == 1:
                home[old] = new
                last[new] = last[old]
                break
    own = np.zeros(count, np.bool_)
    for b in range(count):
        own[b] = codes[b] != ELSEWHERE and home[b] == b
        if codes[b] == FED and last[b] >= 0:
            first[b] = 0
    return first, last, own


def fullest(sizes: Array, first: Array, last: Array, steps: int) -> int:
    """Return the most bytes live at one of `steps` instructions; buffer b is live from first[b] to last[b], if >= 0."""
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


def assign_offsets(sizes: Array, first: Array, last: Array, steps: int) -> tuple[Array, int]:
    """Assign each buffer, at its first use, the smallest free hole that is large enough, else the end of the arena.

    One walk over the `steps` instructions: after its last use a buffer becomes a hole, merged with adjacent holes.
    Returns: offsets (-1 for unused buffers) and the bytes of the arena.
    """
    count = len(sizes)
    offsets = np.full(count, -1, np.int64)
    born, begins = _by_birth(sizes, first, last, steps)
    dying, then = _by_death(last, steps)
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
        b = dying[i]
        while b >= 0:
            start, width = offsets[b], sizes[b]
            b = then[b]
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
    return offsets, top


def _by_birth(sizes: Array, first: Array, last: Array, steps: int) -> tuple[Array, Array]:
    """Return (found, at): found[at[i]:at[i + 1]] are the buffers first used by instruction i, the largest first."""
    at = np.zeros(steps + 3, np.int64)
    for b in range(len(first)):
        if last[b] >= 0:
            at[min(first[b], steps) + 1] += 1
    for i in range(steps + 1):
        at[i + 1] += at[i]
    found = np.zeros(at[steps + 1], np.uint32)
    fill = at.copy()
    for b in range(len(first)):
        if last[b] >= 0:
            t = min(first[b], steps)
            k = fill[t]
            while k > at[t] and sizes[found[k - 1]] < sizes[b]:
                found[k] = found[k - 1]
                k -= 1
            found[k] = b
            fill[t] += 1
    return found, at


def _by_death(last: Array, steps: int) -> tuple[Array, Array]:
    """Return (first, next): a linked list per instruction, of the buffers that it uses last; -1 ends a list."""
    dying, then = np.full(steps + 1, -1, np.int32), np.full(len(last), -1, np.int32)
    for b in range(len(last)):
        if last[b] >= 0:
            t = min(last[b], steps)
            then[b], dying[t] = dying[t], b
    return dying, then


def keep_offsets(
    sizes: Array, first: Array, last: Array, known: Array, steps: int, chunks: Array
) -> tuple[Array, int, int]:
    """Keep live buffers at their old offsets; where two overlap, move the shorter-lived one.

    Args:
        sizes, first, last: per buffer its bytes and the first and last of the `steps` instructions that needs it.
        known: old offsets, or -1 for new buffers.
        chunks: ends of the arena's chunks. Each buffer is placed inside one chunk, or after the last one.
    Returns: offsets, the number of buffers that were new or moved, and the bytes of the arena.
    """
    count = len(sizes)
    offsets = np.full(count, -1, np.int64)
    for b in range(len(known)):
        if last[b] >= 0:
            offsets[b] = known[b]
    born, begins = _by_birth(sizes, first, last, steps)
    dying, then = _by_death(last, steps)
    live = np.zeros(count + 1, np.int64)  # placed buffers, by offset
    lives, unplaced = 0, 0
    for i in range(steps + 1):
        for k in range(begins[i], begins[i + 1]):
            b = born[k]
            if offsets[b] < 0:
                unplaced += 1
                continue
            low, high = 0, lives
            while low < high:
                middle = (low + high) // 2
                if offsets[live[middle]] < offsets[b]:
                    low = middle + 1
                else:
                    high = middle
            if low > 0 and offsets[live[low - 1]] + sizes[live[low - 1]] > offsets[b]:
                low -= 1
            high, longest = low, 0  # lifetime of an overlapping buffer
            while high < lives and offsets[live[high]] < offsets[b] + sizes[b]:
                longest = max(longest, last[live[high]] - first[live[high]])
                high += 1
            if high > low and last[b] - first[b] >= longest:
                offsets[b] = -1
                unplaced += 1
                continue
            for j in range(low, high):  # the longer-lived buffer is not moved
                offsets[live[j]] = -1
            unplaced += high - low
            for j in range(high, lives):
                live[low + j - high] = live[j]
            lives -= high - low
            for j in range(lives, low, -1):
                live[j] = live[j - 1]
            live[low] = b
            lives += 1
        b = dying[i]
        while b >= 0:
            if offsets[b] >= 0:
                for j in range(lives):
                    if live[j] == b:
                        for m in range(j, lives - 1):
                            live[m] = live[m + 1]
                        lives -= 1
                        break
            b = then[b]
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
    return offsets, unplaced, top


def _in_one(start: int, size: int, chunks: Array) -> int:
    """Return the first offset >= `start` at which `size` bytes cross none of the chunk ends `chunks`."""
    for end in chunks:
        if start < end < start + size:
            start = end
    return start


def moved(
    order: Array, reads_at: Array, reads: Array, outs_at: Array, outs: Array, works_at: Array, works: Array,
    other: Array
) -> Array:  # fmt: skip
    """Return the ids in `order` of the instructions with an operand, result or scratch buffer marked in `other`."""
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


def region_keys(
    order: Array, spans: Array, reads_at: Array, reads: Array, outs_at: Array, outs: Array, codes: Array, home: Array,
    first: Array, last: Array, own: Array, before_at: Array, before: Array
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute a key of each region, which determines its fusion groups, and find regions of the previous plan by it.

    A key is a list of integers: the region's length; per instruction its id; then per buffer that it writes or reads:
    the home, its location (-1 if it has no own bytes), and its first and last use relative to the region's start. A
    region that an edit did not touch has the same key as before, so its groups can be reused.

    Args (the other arrays: see the module and `lifetimes`):
        spans: (start, stop) per region.
        before_at, before: the first two results for the previous plan.
    Returns: the start index of each key; all keys in one array; per region the index of the previous region with the
        same key, or -1.
    """
    count = len(spans)
    at, known = np.zeros(count + 1, np.int64), np.full(count, -1, np.int32)
    for s in range(count):
        size = 1
        for i in range(spans[s, 0], spans[s, 1]):
            q = order[i]
            size += 1 + 4 * (outs_at[q + 1] - outs_at[q] + reads_at[q + 1] - reads_at[q])
        at[s + 1] = at[s] + size
    found = np.zeros(at[count], np.int32)
    begun = np.full(len(reads_at), -1, np.int32)  # first instruction of a region -> the previous region
    for s in range(len(before_at) - 1):
        begun[before[before_at[s] + 1]] = s
    for s in range(count):
        start, stop, k = spans[s, 0], spans[s, 1], at[s]
        found[k] = stop - start
        k += 1
        for i in range(start, stop):
            q = order[i]
            found[k] = q
            k += 1
            written = outs_at[q + 1] - outs_at[q]
            for j in range(written + reads_at[q + 1] - reads_at[q]):
                b = home[outs[outs_at[q] + j]] if j < written else home[reads[reads_at[q] + j - written]]
                found[k] = b
                found[k + 1] = codes[b] if own[b] else -1
                found[k + 2] = max(first[b] - start, -1)
                found[k + 3] = min(last[b], stop) - start
                k += 4
        was = begun[found[at[s] + 1]]
        if was >= 0 and before_at[was + 1] - before_at[was] == at[s + 1] - at[s]:
            same = True
            for j in range(at[s + 1] - at[s]):
                if before[before_at[was] + j] != found[at[s] + j]:
                    same = False
                    break
            if same:
                known[s] = was
    return at, found, known


def update_lifetimes(
    starts: Array, known: Array, before_at: Array, before: Array, fresh_at: Array, fresh: Array, last: Array, own: Array
) -> tuple[Array, Array, Array]:
    """Update `last` (until when each buffer is needed) and `own` (whether it has own bytes) for the fusion groups.

    Rows are (buffer, tile, end): a buffer used inside a group only has a tile >= 0 and no bytes; any other buffer
    (tile -1) is needed until instruction `end` of the region. A region whose `known` is i >= 0 takes the rows of
    region i of the previous plan from `before`; the other regions take theirs from `fresh`, in order. `starts`,
    `before_at` and `fresh_at` hold the index of each region's first instruction, and of its first row in `before` and
    `fresh`.
    Returns: the start index of each region's rows; the rows; per buffer its tile, or -1.
    """
    count = len(starts)
    at, tiles = np.zeros(count + 1, np.int64), np.full(len(last), -1, np.int32)
    new = 0
    for s in range(count):
        if known[s] >= 0:
            at[s + 1] = at[s] + before_at[known[s] + 1] - before_at[known[s]]
        else:
            at[s + 1] = at[s] + fresh_at[new + 1] - fresh_at[new]
            new += 1
    rows = np.zeros((at[count], 3), np.int32)
    new = 0
    for s in range(count):
        for j in range(at[s + 1] - at[s]):
            row = before[before_at[known[s]] + j] if known[s] >= 0 else fresh[fresh_at[new] + j]
            rows[at[s] + j] = row
            b = row[0]
            if row[1] >= 0:
                own[b], tiles[b] = False, row[1]
            else:
                last[b] = starts[s] + row[2]
        new += known[s] < 0
    return at, rows, tiles
