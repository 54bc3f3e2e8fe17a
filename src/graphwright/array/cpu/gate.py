"""Gates by one native loop over the logits; parts are copied in and out of one vector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.spec import Spec


def _ends(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum(np.asarray(sizes, np.int64))


def _arrays(ins: Tensors) -> list[np.ndarray]:
    return [t.numpy() for t in ins]


def _parts(whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(whole, list(sizes)))


@kernel("gate", lambda o, i, a: [i[0]] * 3, widen=True)
def gate(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Values, then a copy per part."""
    from graphwright.array.cpu.gating import fill  # loads numba: at the first gate

    whole, slope, lean = work
    sizes = attrs["sizes"]
    calls: list[Call] = [partial(fill, *_arrays((whole, slope, lean)), *_arrays(ins), _ends(sizes))]
    return calls + [partial(out.copy_, part) for out, part in zip(outs, _parts(whole, sizes), strict=True)]


def _slopes(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [ins[0]] * 4


@kernel("gate_grad", _slopes, widen=True)
def gate_grad(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Gradients of the parts side by side, zero where none is given; then the slopes at the same noise."""
    from graphwright.array.cpu.gating import fill, pull_back

    values, slope, lean, grads = work
    sizes, ends, given = attrs["sizes"], _ends(attrs["sizes"]), iter(ins[4:])
    calls: list[Call] = [partial(fill, *_arrays((values, slope, lean)), *_arrays(ins[:4]), ends)]
    for part, there in zip(_parts(grads, sizes), attrs["given"], strict=True):
        calls.append(partial(part.copy_, next(given)) if there else part.zero_)
    return [*calls, partial(pull_back, *_arrays((*outs, slope, lean, grads, *ins[1:4])), ends)]
