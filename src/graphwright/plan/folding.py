"""What depends on frozen weights alone, computed once per version of them."""

from __future__ import annotations

from collections.abc import Mapping

from graphwright.array import NDArray, Storage
from graphwright.ops import compute, get
from graphwright.plan.plan import Plan
from graphwright.plan.transfer import made_of
from graphwright.program import Value
from graphwright.program.kinds import STORED


def fold(plan: Plan, given: Mapping[str, NDArray]) -> tuple[dict[int, Storage], list[tuple[NDArray, int]]]:
    """Memory per folded buffer, and the arrays with the versions that it was computed from.

    Args:
        given: arrays by key that stand for those of the program.
    """
    p, device = plan.program, plan.options.device
    memory: dict[int, Storage] = {}
    used: list[tuple[NDArray, int]] = []
    made: dict[Value, NDArray] = {}
    stored: dict[Value, NDArray] = {}
    for node in sorted(p.reachable(list(plan.folds)), key=p.order_labels.key) if plan.folds else ():
        if p.op(node) in STORED:
            key = p.key(node)
            array = stored[Value(node)] = given[key] if key in given else p.weights.array(key)
            made[Value(node)] = made_of(array, array.dtype, device)
            used.append((array, array.storage.version))
            continue
        row, operands = get(p.op(node)), p.operands(node)
        if row.traits.convert and operands[0] in stored:
            made[Value(node)] = made_of(stored[operands[0]], p.specs(node)[0].dtype, device)
            continue
        for port, result in enumerate(compute(row, [made[v] for v in operands], p.attrs(node))):
            made[Value(node, port)] = result
    for slots in plan.folds.values():
        for slot in slots:
            row = plan.slots[slot]
            assert row.value is not None
            result = made[row.value]
            whole = result.contiguous and result.offset == 0
            memory[row.buffer] = (result if whole else result.copy()).storage
    return memory, used
