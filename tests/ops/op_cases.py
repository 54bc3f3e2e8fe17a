"""Operands for the op tests: several draws of each row's own sampler, and shapes it does not draw."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from graphwright.ops import OPS

DRAWS = 6


def draws(name: str, count: int = DRAWS) -> list[tuple[list[np.ndarray], dict[str, Any]]]:
    """Operands and complete attributes; the seed depends on the op's name, not on the order of the table."""
    row = OPS[name]
    result = []
    for k in range(count):
        inputs, attrs = row.sample(np.random.default_rng(zlib.crc32(name.encode()) + k))
        result.append(([np.asarray(x) for x in inputs], row.complete(attrs)))
    return result


def differentiable() -> list[str]:
    """Ops with a vjp whose gradient is not zero everywhere."""
    return [name for name, row in OPS.items() if row.vjp is not None and not row.traits.flat]
