"""Values computed once per weight version and shared by executables: converted weights and folded values."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from graphwright.array import Device, DType, NDArray, Spec, Storage, backend, empty
from graphwright.array.memory_pool import owner
from graphwright.ops import compute, get
from graphwright.plan.table import Instr

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.plan.planning.plan_tables import PlanTables

_converted: WeakKeyDictionary[NDArray, dict[tuple[DType, int], tuple[int, ref[Storage]]]] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Array, or backend of a device -> its number: another backend of the same device cannot read what one has copied."""
_next = count()
_folded: WeakValueDictionary[bytes, Storage] = WeakValueDictionary()
"""Digest of what a folded value is computed from -> its memory, while an executable uses it."""


def converted(source: NDArray, dtype: DType, device: Device) -> NDArray:
    """Return a weight in the given dtype and on the given device, converted once per version of the weight.

    For a new version, an existing copy on a different device is updated in place: captured graphs hold its address.
    """
    if dtype is source.dtype and device == source.device:
        return source
    known, key = _converted.setdefault(source, {}), (dtype, _number(backend(device)))
    version, found = known.get(key, (-1, None))
    storage = found() if found is not None else None
    if storage is not None and version == source.storage.version:
        return NDArray(storage, dtype, source.shape)
    if storage is not None and device != source.device:
        known[key] = (source.storage.version, ref(storage))
        return NDArray(storage, dtype, source.shape).copy_from(source.to(device))
    result = source.to(device) if device != source.device else source
    if dtype is not source.dtype:
        result = empty(source.shape, dtype, device).copy_from(result)
    known[key] = (source.storage.version, ref(result.storage))
    return result


def fold(plan: Plan, given: Mapping[str, NDArray]) -> tuple[dict[int, Storage], list[tuple[NDArray, int]]]:
    """Return the memory of each folded buffer, and the (array, version) pairs that the buffers were computed from.

    `given` maps the keys of params and consts to their arrays.
    """
    tables = plan.buffer_layout.tables
    stored = {b: given[tables.buffers[b][2]] for b in (tables.holders[s] for s in folded_from(plan))}
    origins = _origins(tables, plan.folding, stored, _number(backend(plan.options.device)))
    known = {b: found for b, origin in origins.items() if (found := _folded.get(origin)) is not None}
    made = _compute(plan, stored, known)
    for buffer in plan.folds.keys() - known.keys():
        known[buffer] = _folded[origins[buffer]] = made[buffer].storage
    return {b: known[b] for b in plan.folds}, [(array, array.storage.version) for array in stored.values()]


def folded_from(plan: Plan) -> list[int]:
    """Return the slots of the params and consts that folded values are computed from."""
    tables = plan.buffer_layout.tables
    read = (s for instr in plan.folding for s in instr.ins if tables.holders[s] not in tables.folds)
    return list(dict.fromkeys(tables.slots[s].base for s in read))


def _origins(tables: PlanTables, instrs: list[Instr], stored: Mapping[int, NDArray], device: int) -> dict[int, bytes]:
    """Map each folded buffer, and each buffer of a weight (`stored`: buffer -> its array), to a digest of all that
    determines its value: ops, attributes, layouts, arrays and versions.
    """
    found: dict[int, bytes] = {}
    for buffer, array in stored.items():
        found[buffer] = _digest(f"{_number(array)} {array.storage.version} {device}")
    for instr in instrs:
        reads = [(found[at.buffer], at.dtype, at.layout) for at in map(tables.slots.__getitem__, instr.ins)]
        for port, slot in enumerate(instr.outs):
            made = f"{port} {instr.op} {instr.attrs!r} {tables.slots[slot].dtype}"
            found[tables.holders[slot]] = _digest(f"{made} {reads}")
    return found


def _number(thing: Any) -> int:
    """Return a number that no other array or backend of this process has or had."""
    found = _numbers.get(thing)
    if found is None:
        found = _numbers[thing] = next(_next)
    return found


def _digest(facts: str) -> bytes:
    return blake2b(facts.encode(), digest_size=16).digest()


def _compute(plan: Plan, stored: Mapping[int, NDArray], known: Mapping[int, Storage]) -> dict[int, NDArray]:
    """Return row-major arrays for the folded buffers that are not in `known`, and for their operands.

    `stored` maps the buffer of each weight to its array, `known` the other folded buffers to their memory.
    """
    tables, device = plan.buffer_layout.tables, plan.options.device
    wanted, needed = plan.folds.keys() - known.keys(), []
    for instr in reversed(plan.folding):
        if not wanted.isdisjoint(map(tables.holders.__getitem__, instr.outs)):
            needed.append(instr)
            wanted |= {tables.holders[s] for s in instr.ins} - known.keys()
    made: dict[int, NDArray] = {}

    def view(slot: int) -> NDArray:
        at = tables.slots[slot]
        if at.buffer not in made:
            made[at.buffer] = source(at.buffer, tables.slots[at.base].spec)
        base, layout = made[at.buffer], at.layout
        return NDArray(base.storage, at.dtype, layout.shape, layout.strides, base.offset + layout.offset)

    def source(buffer: int, spec: Spec) -> NDArray:
        if buffer in known:
            return NDArray(known[buffer], spec.dtype, spec.sizes)
        with owner(tables.buffers[buffer][2]):
            array = converted(stored[buffer], spec.dtype, device)
            return array if array.contiguous else array.copy()

    for instr in reversed(needed):
        op, first, dtype = get(instr.op), tables.slots[instr.ins[0]], tables.slots[instr.outs[0]].dtype
        with owner(tables.buffers[tables.holders[instr.outs[0]]][2]):
            if op.traits.convert and first.base == first.index and first.buffer in stored:
                results = (converted(stored[first.buffer], dtype, device),)
            elif op.traits.convert and first.dtype is not dtype:  # a row-major copy whose operand skips a conversion
                results = compute(get("cast"), [view(instr.ins[0])], {"dtype": dtype})
            else:
                results = compute(op, [view(s) for s in instr.ins], instr.attrs)
            for slot, result in zip(instr.outs, results, strict=True):
                whole = result.contiguous and result.offset == 0
                made[tables.holders[slot]] = result if whole else result.copy()
    return made
