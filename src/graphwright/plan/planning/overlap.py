"""The order of what runs beside other instructions: begun as early, and waited for as late as possible.

An instruction that starts something moves up to right after the last writer of its operands, together with the
elementwise instructions that compute them. One that waits moves down to right before the first reader of its results.
Invariant: instructions that talk to other ranks, apart from those that wait, keep the order of the program, which all
ranks share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.ops import OPS

if TYPE_CHECKING:
    from graphwright.plan.planning.plan_tables import PlanTables


def with_early_starts(order: np.ndarray, tables: PlanTables) -> np.ndarray:
    """Return the instructions of `order` with early starts; the new order obeys all dependencies on data."""
    ids, holders, instrs = order.tolist(), tables.holders, tables.instrs
    traits = [OPS[instrs[q].op].traits for q in ids]
    writer = {holders[s]: i for i, q in enumerate(ids) for s in instrs[q].outs}
    reads = [[writer[b] for s in instrs[q].ins if (b := holders[s]) in writer] for q in ids]
    moved = {i for i, q in enumerate(ids) if OPS[instrs[q].op].traits.starts}
    found = list(moved)
    while found:  # what feeds them element by element
        feeding = {w for w in reads[found.pop()] if traits[w].elementwise} - moved
        moved |= feeding
        found += feeding
    after: dict[int, int] = {}  # moved instruction -> the one that stays, and that it follows
    last = -1  # the last instruction so far that talks to other ranks
    for i, known in enumerate(traits):
        begins = known.collective and not known.waits
        if i in moved:
            after[i] = max([after.get(w, w) for w in reads[i]], default=-1)
            if begins:
                last = after[i] = max(after[i], last)
        elif begins:
            last = i
    keys = [(after[i], 1, i) if i in after else (i, 0, i) for i in range(len(ids))]
    return order[[i for _, _, i in sorted(keys)]]


def with_late_waits(order: np.ndarray, stop: int, tables: PlanTables) -> np.ndarray:
    """Return the instructions of `order` with late waits, none of them after index `stop`."""
    ids, holders, instrs = order.tolist(), tables.holders, tables.instrs
    first: dict[int, int] = {}  # buffer -> its first reader
    for i, q in enumerate(ids):
        for s in instrs[q].ins:
            first.setdefault(holders[s], i)
    keys: list[Any] = []
    for i, q in enumerate(ids):
        if OPS[instrs[q].op].traits.waits:
            keys.append((min([stop, *(first.get(holders[s], stop) for s in instrs[q].outs)]), 0, i))
        else:
            keys.append((i, 1, i))
    return order[[i for _, _, i in sorted(keys)]]
