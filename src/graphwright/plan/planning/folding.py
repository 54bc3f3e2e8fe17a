"""What depends on frozen weights alone, computed once per version of them for all workspaces that need it at a time."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

from graphwright.array import NDArray, Spec, Storage
from graphwright.ops import compute, get
from graphwright.plan.plan import Plan
from graphwright.plan.planning.store import Store
from graphwright.plan.running.transfer import made_of
from graphwright.plan.table import Instr

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


def _origins(store: Store, instrs: list[Instr], stored: Mapping[int, NDArray], device: str) -> dict[int, bytes]:
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
