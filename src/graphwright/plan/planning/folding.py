"""What depends on frozen weights alone, computed once per version of them for all workspaces that need it at a time."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

from graphwright.array import Device, NDArray, Storage
from graphwright.graph import NodeId
from graphwright.ops import compute, get
from graphwright.plan.plan import Plan
from graphwright.plan.planning.row import Row
from graphwright.plan.running.transfer import made_of
from graphwright.program import Value
from graphwright.program.kinds import STORED

_numbers: WeakKeyDictionary[NDArray, int] = WeakKeyDictionary()
_next = count()
_folded: WeakValueDictionary[tuple[bytes, int], Storage] = WeakValueDictionary()
"""(what it was computed by, port) -> memory, as long as a workspace holds it."""


def fold(plan: Plan, given: Mapping[str, NDArray]) -> tuple[dict[int, Storage], list[tuple[NDArray, int]]]:
    """Memory per folded buffer, and the arrays with the versions that it was computed from.

    Args:
        given: arrays by key.
    """
    rows, slots = plan.folding(), plan.arranged.ledger.slots
    origins = _origins(rows, given, plan.options.device)
    kept = [slots[slot] for made in plan.folds.values() for slot in made]
    memory: dict[int, Storage] = {}
    missing = []
    for slot in kept:
        assert slot.value is not None
        known = _folded.get((origins[slot.value.node], slot.value.port))
        if known is None:
            missing.append(slot)
        else:
            memory[slot.buffer] = known
    made = _computed(plan, rows, {slot.value.node for slot in missing if slot.value is not None}, given)
    for slot in missing:
        assert slot.value is not None
        result = made[slot.value]
        whole = result.contiguous and result.offset == 0
        storage = memory[slot.buffer] = (result if whole else result.copy()).storage
        _folded[origins[slot.value.node], slot.value.port] = storage
    read = [given[row.attrs["key"]] for row in rows if row.op in STORED]
    return memory, [(array, array.storage.version) for array in read]


def _origins(rows: list[Row], given: Mapping[str, NDArray], device: Device) -> dict[NodeId, bytes]:
    """Of each row a digest of the ops and attributes that it is computed by, the arrays, and their versions."""
    found: dict[NodeId, bytes] = {}
    for row in rows:
        if row.op in STORED:
            array = given[row.attrs["key"]]
            facts = f"{_numbers.setdefault(array, next(_next))} {array.storage.version} {device}".encode()
        else:
            operands = b"".join(found[v.node] + v.port.to_bytes(4, "little") for v in row.sources)
            facts = f"{row.op} {row.attrs!r} ".encode() + operands
        found[row.node] = blake2b(facts, digest_size=16).digest()
    return found


def _computed(plan: Plan, rows: list[Row], wanted: set[NodeId], given: Mapping[str, NDArray]) -> dict[Value, NDArray]:
    """Values of rows, and of those that they are computed from."""
    device, known = plan.options.device, plan.arranged.rows
    for row in reversed(rows):
        if row.node in wanted:
            wanted.update(v.node for v in row.sources)
    made: dict[Value, NDArray] = {}
    for row in rows:
        if row.node not in wanted:
            continue
        if row.op in STORED:
            array = given[row.attrs["key"]]
            made[Value(row.node)] = made_of(array, array.dtype, device)
            continue
        op, operands = get(row.op), row.sources
        if op.traits.convert and known[operands[0].node].op in STORED:
            stored = given[known[operands[0].node].attrs["key"]]
            made[Value(row.node)] = made_of(stored, row.specs[0].dtype, device)
            continue
        for port, result in enumerate(compute(op, [made[v] for v in operands], row.attrs)):
            made[Value(row.node, port)] = result
    return made
