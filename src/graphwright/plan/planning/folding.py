"""What depends on frozen weights alone, computed once per version of them."""

from __future__ import annotations

from collections.abc import Mapping

from graphwright.array import NDArray, Storage
from graphwright.ops import compute, get
from graphwright.plan.plan import Plan
from graphwright.plan.running.transfer import made_of
from graphwright.program import Value
from graphwright.program.kinds import STORED


def fold(plan: Plan, given: Mapping[str, NDArray]) -> tuple[dict[int, Storage], list[tuple[NDArray, int]]]:
    """Memory per folded buffer, and the arrays with the versions that it was computed from.

    Args:
        given: arrays by key.
    """
    device, rows = plan.options.device, plan.arranged.rows
    memory: dict[int, Storage] = {}
    used: list[tuple[NDArray, int]] = []
    made: dict[Value, NDArray] = {}
    stored: dict[Value, NDArray] = {}
    for row in plan.folding():
        if row.op in STORED:
            array = stored[Value(row.node)] = given[row.attrs["key"]]
            made[Value(row.node)] = made_of(array, array.dtype, device)
            used.append((array, array.storage.version))
            continue
        op, operands = get(row.op), row.sources
        if op.traits.convert and rows[operands[0].node].op in STORED:
            made[Value(row.node)] = made_of(stored[operands[0]], row.specs[0].dtype, device)
            continue
        for port, result in enumerate(compute(op, [made[v] for v in operands], row.attrs)):
            made[Value(row.node, port)] = result
    for slots in plan.folds.values():
        for slot in slots:
            kept = plan.arranged.ledger.slots[slot]
            assert kept.value is not None
            result = made[kept.value]
            whole = result.contiguous and result.offset == 0
            memory[kept.buffer] = (result if whole else result.copy()).storage
    return memory, used
