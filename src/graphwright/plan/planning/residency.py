"""Where values lie in a plan on another device: what only the host asks for stays there, the rest is placed once.

A kernel may need a number on the host to be launched (a learning rate), and a generator's key belongs to the host, as
eager code reads it too. Reading such a value back from the device would stop the queue in every step, so it stays on
the host and is sent where the device needs it. Dtypes and storage formats stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from graphwright.array import NDArray, backend
from graphwright.autograd import HostVariable
from graphwright.ops import compute, expansion, get
from graphwright.plan.running.transfer import made_of
from graphwright.plan.table import CONST, INPUT, PARAM, STATE

if TYPE_CHECKING:
    from graphwright.array import Spec, Storage
    from graphwright.plan.plan import Plan
    from graphwright.plan.planning.plan_builder import PlanBuilder, PlanTables
    from graphwright.plan.table import Instr

_SOURCES = frozenset({INPUT, PARAM, CONST, STATE})


class OtherSide(Exception):  # no error: the plan is made anew
    """A buffer of the plan before would have to lie on the other side now."""


def keep_on_host(ledger: PlanBuilder, order: np.ndarray, known: int) -> np.ndarray:
    """Mark the buffers that lie on the host, and put in copies of what the device reads of them.

    Args:
        order: instructions that are needed.
        known: how many buffers the plan before had; where they lie is settled.
    Returns: the order with the copies, and with instructions that read them.
    Raises: OtherSide, with nothing marked.
    """
    instrs = [(q, ledger.instrs[q]) for q in order.tolist()]
    kept = _kept(ledger)
    work = _compute_there(ledger, [instr for _, instr in instrs], kept)
    written = {_base(ledger, target) for target, _ in ledger.writes().values()}
    for _, instr in instrs:
        for i in _host_reads(ledger, instr):
            base = _base(ledger, instr.ins[i])
            if _kind(ledger, base) in _SOURCES and base not in written:
                kept.add(base)
    here = {ledger.slots[s].buffer for s in kept | work}
    used = {ledger.slots[s].buffer for _, i in instrs for s in (*i.ins, *i.outs, *i.work)}
    if any((b in here) != (b in ledger.on_host) for b in used | here if b < known):
        raise OtherSide
    for buffer in here:
        ledger.keep(buffer)
    return _send(ledger, instrs, kept)


def _base(ledger: PlanBuilder, slot: int) -> int:
    return ledger.slots[slot].base


def _kind(ledger: PlanBuilder, slot: int) -> str:
    return ledger.buffers[ledger.slots[slot].buffer][0]


def _host_reads(ledger: PlanBuilder, instr: Instr) -> tuple[int, ...]:
    """Places of the operands whose values the host must know to launch an instruction."""
    outs, ins = ([ledger.slots[s].spec for s in slots] for slots in (instr.outs, instr.ins))
    return expansion.needs(get(instr.op), backend(ledger.device), outs, ins, instr.attrs).reads


def _kept(ledger: PlanBuilder) -> set[int]:
    """Slots of states that the host shares with others."""
    weights, known = ledger.program.weights, ledger.sources()
    states = [(s, key) for s, key in zip(known.slots, known.keys, strict=True) if _kind(ledger, s) == STATE]
    return {s for s, key in states if key is not None and isinstance(weights[key], HostVariable)}


def _compute_there(ledger: PlanBuilder, instrs: list[Instr], kept: set[int]) -> set[int]:
    """What is made of values on the host alone, and carried by it, is computed there: the next key of a generator.

    Returns: slots that this works in.
    """
    work: set[int] = set()
    writes = ledger.writes().values()
    carried = {_base(ledger, new) for target, new in writes if _base(ledger, target) in kept}
    for instr in instrs:
        bases, outs = {_base(ledger, s) for s in instr.ins}, {*instr.outs}
        constants = {b for b in bases if _kind(ledger, b) in (CONST, INPUT)}
        if bases & kept and bases <= kept | constants and outs <= carried:
            kept |= constants | outs
            work.update(instr.work)
    return work


def _send(ledger: PlanBuilder, instrs: list[tuple[int, Instr]], kept: set[int]) -> np.ndarray:
    """In front of the first instruction on the device that reads a value of the host, a copy of it; one per value."""
    twins: dict[int, int] = {}
    order: list[int] = []

    def sent(slot: int) -> int:
        base = _base(ledger, slot)
        if base not in kept:
            return slot
        if base not in twins:
            twins[base], copy = ledger.saved(base, ledger.node_of(base), "the device reads it too")
            order.append(copy)
        return twins[base] if slot == base else ledger.shown_as(slot, twins[base])

    for q, instr in instrs:
        if not {*instr.outs} & kept:
            places = _host_reads(ledger, instr)
            ins = tuple(s if k in places else sent(s) for k, s in enumerate(instr.ins))
            if ins != instr.ins:
                q = ledger.reading(q, ins)
        order.append(q)
    for node, (to, new) in ledger.writes().items():
        if _base(ledger, to) not in kept:
            ledger.sent[node] = sent(new)
    return np.array(order, np.int32)


_numbers: WeakKeyDictionary[NDArray, int] = WeakKeyDictionary()
_next = count()
_folded: WeakValueDictionary[bytes, Storage] = WeakValueDictionary()
"""What it was computed by -> memory, as long as a workspace holds it."""


def fold(plan: Plan, given: Mapping[str, NDArray]) -> tuple[dict[int, Storage], list[tuple[NDArray, int]]]:
    """Memory per folded buffer, and the arrays with the versions that it was computed from.

    Args:
        given: arrays by key.
    """
    store, instrs = plan.arranged.ledger, plan.folding()
    stored = {b: given[store.buffers[b][2]] for b in (store.holders[s] for s in folded_from(plan))}
    origins = _origins(store, instrs, stored, str(plan.options.device))
    known = {b: found for b, origin in origins.items() if (found := _folded.get(origin)) is not None}
    made = _computed(plan, instrs, stored, known)
    for buffer in plan.folds.keys() - known.keys():
        known[buffer] = _folded[origins[buffer]] = made[buffer].storage
    return {b: known[b] for b in plan.folds}, [(array, array.storage.version) for array in stored.values()]


def folded_from(plan: Plan) -> list[int]:
    """Slots of the params and consts that folded values are made of."""
    store = plan.arranged.ledger
    read = (s for instr in plan.folding() for s in instr.ins if store.holders[s] not in store.folds)
    return list(dict.fromkeys(store.slots[s].base for s in read))


def _origins(store: PlanTables, instrs: list[Instr], stored: Mapping[int, NDArray], device: str) -> dict[int, bytes]:
    """Of each buffer a digest of the ops, attributes and layouts it is computed by, the arrays, and their versions."""
    found: dict[int, bytes] = {}
    for buffer, array in stored.items():
        found[buffer] = _digest(f"{_numbers.setdefault(array, next(_next))} {array.storage.version} {device}")
    for instr in instrs:
        reads = [(found[at.buffer], at.dtype, at.layout) for at in map(store.slots.__getitem__, instr.ins)]
        for port, slot in enumerate(instr.outs):
            made = f"{port} {instr.op} {instr.attrs!r} {store.slots[slot].dtype}"
            found[store.holders[slot]] = _digest(f"{made} {reads}")
    return found


def _digest(facts: str) -> bytes:
    return blake2b(facts.encode(), digest_size=16).digest()


def _computed(
    plan: Plan, instrs: list[Instr], stored: Mapping[int, NDArray], known: Mapping[int, Storage]
) -> dict[int, NDArray]:
    """By buffer the values that are folded and not known, and those that they are computed from, row by row."""
    store, device = plan.arranged.ledger, plan.options.device
    wanted, needed = plan.folds.keys() - known.keys(), []
    for instr in reversed(instrs):
        if not wanted.isdisjoint(map(store.holders.__getitem__, instr.outs)):
            needed.append(instr)
            wanted |= {store.holders[s] for s in instr.ins} - known.keys()
    made: dict[int, NDArray] = {}

    def shown(slot: int) -> NDArray:
        at = store.slots[slot]
        if at.buffer not in made:
            made[at.buffer] = source(at.buffer, store.slots[at.base].spec)
        base, layout = made[at.buffer], at.layout
        return NDArray(base.storage, at.dtype, layout.shape, layout.strides, base.offset + layout.offset)

    def source(buffer: int, spec: Spec) -> NDArray:
        if buffer in known:
            return NDArray(known[buffer], spec.dtype, spec.sizes)
        array = made_of(stored[buffer], spec.dtype, device)
        return array if array.contiguous else array.copy()

    for instr in reversed(needed):
        op, first, dtype = get(instr.op), store.slots[instr.ins[0]], store.slots[instr.outs[0]].dtype
        if op.traits.convert and first.base == first.index and first.buffer in stored:
            results = (made_of(stored[first.buffer], dtype, device),)
        elif op.traits.convert and first.dtype is not dtype:  # a copy may read further back, before a conversion
            results = compute(get("cast"), [shown(instr.ins[0])], {"dtype": dtype})
        else:
            results = compute(op, [shown(s) for s in instr.ins], instr.attrs)
        for slot, result in zip(instr.outs, results, strict=True):
            whole = result.contiguous and result.offset == 0
            made[store.holders[slot]] = result if whole else result.copy()
    return made
