"""Learning-rate schedules: a function of the step, set on the optimizer before the step it is for."""

from __future__ import annotations

from math import cos, pi

from graphwright.errors import UsageError


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Linear warm-up over `warmup` steps to `peak`, then a half cosine down to floor · peak at step `total`.

    >>> tuple(round(warmup_cosine(s, peak=1.0, warmup=2, total=6), 3) for s in range(7))
    (0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0)
    """
    if total < 1 or warmup < 0 or not 0 <= floor <= 1:
        raise UsageError("a schedule needs total >= 1, warmup >= 0, floor in [0, 1]", got=(total, warmup, floor))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + cos(pi * progress)))
