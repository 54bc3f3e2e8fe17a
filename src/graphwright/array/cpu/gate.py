"""Kernels of gates: one native loop over all logits; the parts are copied out of one vector."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel


def _arrays(ins: Tensors) -> list[np.ndarray]:
    return [t.numpy() for t in ins]


@kernel("gate", lambda o, i, a: [i[0]] * 3, widen=True)
def gate(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute all values, then copy each part."""
    from graphwright.array.cpu.loops import fill_gates  # loads numba

    sizes = list(attrs["sizes"])
    calls: list[Call] = [partial(fill_gates, *_arrays((*work, *ins)), np.cumsum(sizes, dtype=np.int64))]
    return calls + [partial(o.copy_, part) for o, part in zip(outs, torch.split(work[0], sizes), strict=True)]


@kernel("gate_grad", lambda o, i, a: [i[0]] * 4, widen=True)
def gate_grad(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Concatenate the gradients of the parts, zero where not given, and pull them back at the same noise."""
    from graphwright.array.cpu.loops import fill_gates, pull_back

    sizes, given = list(attrs["sizes"]), iter(ins[4:])
    ends = np.cumsum(sizes, dtype=np.int64)
    calls: list[Call] = [partial(fill_gates, *_arrays((*work[:3], *ins[:4])), ends)]
    for part, there in zip(torch.split(work[3], sizes), attrs["given"], strict=True):
        calls.append(partial(part.copy_, next(given)) if there else part.zero_)
    return [*calls, partial(pull_back, *_arrays((*outs, *work[1:], *ins[1:4])), ends)]
