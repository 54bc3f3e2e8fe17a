"""The kernel that samples tokens: by compiled code of the VM where that is built, and until then by numpy.

The two differ where a share of the probability equals a limit up to the rounding of `exp`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from graphwright.array import random
from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, kernel
from graphwright.array.dtype import int64
from graphwright.array.spec import Spec
from graphwright.array.vm.code import SCRATCH, Code

_FAINT = np.float32(-87.0)  # exponentials of smaller numbers are subnormal, and count as 0


@kernel("sample_token", lambda outs, ins, attrs: [Spec((SCRATCH // 8,), int64)], host=True)
def sample_token(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
    """Sample one token id per row of logits."""
    from graphwright.array.vm.machine import loops_of, part  # loads numba

    if not part.ready:
        return partial(_sample_rows, *(t.numpy() for t in (*outs, *ins)))
    (ids, kept), (logits, _, _, seen) = outs, ins
    addresses = (*(t.data_ptr() for t in ins), seen.shape[1], ids.data_ptr(), kept.data_ptr())
    row = np.array([0, *logits.shape, *addresses], np.int64)
    return partial(_call, loops_of("sampling"), row, work[0].data_ptr())


def _call(sample: Any, row: np.ndarray, scratch: int) -> None:
    sample(Code.SAMPLE_TOKEN, row.ctypes.data, 0, scratch)


def _sample_rows(
    ids: np.ndarray, kept: np.ndarray, logits: np.ndarray, rules: np.ndarray, keys: np.ndarray, seen: np.ndarray
) -> None:
    kept[:] = logits
    with np.errstate(all="ignore"):  # non-finite logits give the id -1
        for b in range(len(ids)):
            ids[b] = _sample(kept[b], rules[b], [int(k) for k in keys[b]], seen[b])


def _sample(z: np.ndarray, rules: np.ndarray, keys: list[int], seen: np.ndarray) -> int:
    """Apply all rules to the logits z [V] in place; return the sampled id."""
    (repetition, presence, frequency, temperature, top_p, min_p), (seed, stream, step, top_k) = rules, keys
    if step < 0:
        return -1
    for index, count in seen:
        if index < 0:
            break
        if index < len(z):
            z[index] = z[index] / repetition if z[index] > 0 else z[index] * repetition
            if count > 0:
                z[index] -= presence + frequency * np.float32(count)
    if temperature:
        z /= temperature
    best = z.max()
    if not np.isfinite(best):  # also if one is NaN
        return -1
    if not temperature:
        return int(z.argmax())
    order = np.argsort(-z, kind="stable") if 0 < top_k < len(z) or top_p < 1 else z
    if 0 < top_k < len(z):
        z[order[top_k:]] = -np.inf
    if top_p < 1:
        summed = np.cumsum(_shares(z[order], best), dtype=np.float64)
        reached = (summed / summed[-1]).astype(np.float32) >= top_p
        z[order[1:][reached[:-1]]] = -np.inf
    if min_p > 0:
        z[_shares(z, best) < min_p] = -np.inf
    return int((z + random.gumbel(len(z), seed=seed, stream=stream, step=step)).argmax())


def _shares(z: np.ndarray, best: np.float32) -> np.ndarray:
    """Return the probabilities of logits z relative to that of the largest one."""
    away = z - best
    return np.where(away < _FAINT, np.float32(0), np.exp(away))
