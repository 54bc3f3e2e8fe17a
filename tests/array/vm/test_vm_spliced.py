"""A segment that reuses the code of another one behaves as one made only from its ops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vm_forms import encode, view

from graphwright.array import from_numpy
from graphwright.array.vm.encode.share import Cut, cut
from graphwright.array.vm.running.segment import BadIndex, VmSegment, new_scratch
from graphwright.ops import OPS

SIZES = (1, 1, 1, 40)
"""Mostly single numbers, which are packed into rows that an exchange may split or join."""
cells = [[from_numpy(np.zeros(size, "f4")) for _ in range(3)] for size in SIZES]
targets, scores = from_numpy(np.zeros(1, "i8")), from_numpy(np.zeros((1, 2), "f4"))
loss, lse = from_numpy(np.zeros((), "f4")), from_numpy(np.zeros(1, "f4"))


def op(row: int, kind: int) -> Cut:
    """cells[row]: a += b, b *= a, or c = a - b; or nothing at all."""
    a, b, c = cells[row]
    name, out, ins = (("add", a, (a, b)), ("mul", b, (b, a)), ("sub", c, (a, b)))[kind]
    rows = encode(name, [view(out)], [view(i) for i in ins], {})
    assert rows is not None
    return cut(rows)


MADE = [op(row, kind) for row in range(len(SIZES)) for kind in range(3)] + [cut(())]
ops = st.lists(st.integers(0, len(MADE) - 1), max_size=12)


def after(run: VmSegment) -> list[np.ndarray]:
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            cell.to_numpy()[:] = 0.5 + 0.25 * i + 0.125 * j
    run()
    return [cell.to_numpy().copy() for row in cells for cell in row]


@given(ops, ops, ops, ops)
def test_code_reused_from_another_segment_equals_fresh_code(
    head: list[int], old: list[int], new: list[int], tail: list[int]
) -> None:
    scratch = new_scratch()
    before = VmSegment([MADE[n] for n in head + old + tail], scratch)
    wanted = [MADE[n] for n in head + new + tail]
    spliced, fresh = VmSegment(wanted, scratch, before), VmSegment(wanted, scratch)
    for a, b in zip(after(spliced), after(fresh), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("more", [0, 1, 5])
def test_failure_reports_the_op_index_in_the_new_segment(more: int) -> None:
    attrs = OPS["cross_entropy"].complete({})
    rows = encode("cross_entropy", [view(loss), view(lse)], [view(scores), view(targets)], attrs)
    assert rows is not None
    failing, scratch = cut(rows), new_scratch()
    before = VmSegment([MADE[9], failing], scratch)
    spliced = VmSegment([MADE[9], *[MADE[10]] * more, failing], scratch, before)
    targets.to_numpy()[:] = 7
    with pytest.raises(BadIndex) as caught:
        spliced()
    assert caught.value.op == more + 1
