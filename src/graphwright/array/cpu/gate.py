"""Kernels of gates: one native loop over all logits; the parts are copied out of one vector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel


def _ends(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum(np.asarray(sizes, np.int64))


def _arrays(ins: Tensors) -> list[np.ndarray]:
    return [t.numpy() for t in ins]


def _parts(whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(whole, list(sizes)))


@kernel("gate", lambda o, i, a: [i[0]] * 3, widen=True)
def gate(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Compute all values, then copy each part."""
    from graphwright.array.cpu.loops import fill_gates  # loads numba

    values, slope, factor = work
    sizes = attrs["sizes"]
    calls: list[Call] = [partial(fill_gates, *_arrays((values, slope, factor)), *_arrays(ins), _ends(sizes))]
    return calls + [partial(out.copy_, part) for out, part in zip(outs, _parts(values, sizes), strict=True)]


@kernel("gate_grad", lambda o, i, a: [i[0]] * 4, widen=True)
def gate_grad(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Concatenate the gradients of the parts, zero where not given, and pull them back at the same noise."""
    from graphwright.array.cpu.loops import fill_gates, pull_back

    values, slope, factor, grads = work
    sizes, ends, given = attrs["sizes"], _ends(attrs["sizes"]), iter(ins[4:])
    calls: list[Call] = [partial(fill_gates, *_arrays((values, slope, factor)), *_arrays(ins[:4]), ends)]
    for part, there in zip(_parts(grads, sizes), attrs["given"], strict=True):
        calls.append(partial(part.copy_, next(given)) if there else part.zero_)
    return [*calls, partial(pull_back, *_arrays((*outs, slope, factor, grads, *ins[1:4])), ends)]
