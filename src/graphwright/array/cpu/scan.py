"""The kernel of the linear recurrence, by a compiled loop."""

from __future__ import annotations

from functools import partial
from math import prod

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel


@kernel("linear_scan", widen=True, host=True)
def linear_scan(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Run the recurrence along an axis; the entries of the axes after it are computed together."""
    from graphwright.array.cpu.loops import scan_rows  # loads numba

    shape = ins[0].shape
    axis = attrs["axis"] % len(shape)
    form = (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))
    return partial(scan_rows, *(t.view(form).numpy() for t in (outs[0], *ins)), attrs["reverse"])
