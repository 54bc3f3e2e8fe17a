"""The order of what runs beside other instructions: begun as early, and waited for as late as possible.

An instruction that starts something moves up to right after the last writer of its operands, together with the
elementwise instructions that compute them. What depends on a wait moves after all that does not, and the wait to right
before the first reader of its results.
Invariant: instructions that talk to other ranks, apart from those that wait, keep the order of the program, which all
ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from graphwright.ops import OPS, Traits

if TYPE_CHECKING:
    from graphwright.plan.planning.plan_tables import PlanTables


def with_early_starts(order: np.ndarray, tables: PlanTables) -> np.ndarray:
    """Return the instructions of `order` with early starts; the new order obeys all dependencies on data."""
    ids, holders, instrs = order.tolist(), tables.holders, tables.instrs
    traits = [OPS[instrs[q].op].traits for q in ids]
    writer = {holders[s]: i for i, q in enumerate(ids) for s in instrs[q].outs}
    reads = [[writer[b] for s in instrs[q].ins if (b := holders[s]) in writer] for q in ids]
    after: dict[int, int] = {}  # moved instruction -> the one that stays, and that it follows
    last = -1  # what the last instruction so far that talks to other ranks follows, or is
    for i, q in enumerate(ids):
        known = OPS[instrs[q].op]
        if known.traits.starts:
            feeding, at = _feeding(i, reads, traits), last
            for w in chain(reads[i], *(reads[f] for f in feeding)):
                at = max(at, after.get(w, -1 if w in feeding else w))
            after |= {f: at for f in feeding if f > at and f not in after}
            last = after[i] = at
        elif known.traits.collective and not known.traits.waits:
            last = i
    keys = [(after[i], 1, i) if i in after else (i, 0, i) for i in range(len(ids))]
    return order[[i for _, _, i in sorted(keys)]]


def _feeding(start: int, reads: Sequence[Sequence[int]], traits: Sequence[Traits]) -> set[int]:
    """Return the elementwise instructions on which an instruction depends through such instructions only."""
    found: set[int] = set()
    left = [start]
    while left:
        more = {w for w in reads[left.pop()] if traits[w].elementwise} - found
        found |= more
        left += more
    return found


def with_late_waits(order: np.ndarray, stop: int, tables: PlanTables) -> np.ndarray:
    """Return the instructions of `order` with late waits; those from index `stop` on stay where they are.

    What does not depend on a wait runs first.
    """
    ids, holders, instrs = order.tolist(), tables.holders, tables.instrs
    late: list[bool] = []
    held: set[int] = set()  # buffers that depend on a wait
    together = False  # whether an instruction that talks to other ranks does
    for q in ids[:stop]:
        instr, known = instrs[q], OPS[instrs[q].op].traits
        begins = known.collective and not known.waits
        waits = known.waits or (begins and together) or any(holders[s] in held for s in instr.ins)
        if waits:
            held.update(holders[s] for s in instr.outs)
            together = together or begins
        late.append(waits)
    independent = [q for q, waits in zip(ids, late, strict=False) if not waits]
    dependent = [q for q, waits in zip(ids, late, strict=False) if waits]
    first: dict[int, int] = {}  # buffer -> its first reader
    for i, q in enumerate(dependent):
        for s in instrs[q].ins:
            first.setdefault(holders[s], i)
    keys: list[tuple[int, int, int]] = []
    for i, q in enumerate(dependent):
        if OPS[instrs[q].op].traits.waits:
            keys.append((min(first.get(holders[s], stop) for s in instrs[q].outs), 0, i))
        else:
            keys.append((i, 1, i))
    found = [*independent, *(dependent[i] for _, _, i in sorted(keys)), *ids[stop:]]
    return np.array(found, np.int32)
