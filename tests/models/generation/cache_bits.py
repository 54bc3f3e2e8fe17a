"""What a cache holds, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from graphwright.models import StaticCache


def state(cache: StaticCache) -> dict[str, bytes]:
    """All bits of a cache."""
    return {k: v.data.tobytes() for k, v in cache.variables.items()} | {"tokens": cache.tokens.tobytes()}


def rows(cache: StaticCache, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Filled keys and values of one attention."""
    k, v = (cache.variables[f"cache.{path}.{n}"].numpy()[:, :, : cache.length].copy() for n in "kv")
    return k, v


def unknown_rows(space: Any) -> Iterator[int]:
    """Of a step that is one call, each instruction's code in turn is one that the machine does not know."""
    code, owner = space.kernels.fed._code, space.kernels.fed._owner
    for i in [i for i, op in enumerate(owner) if op >= 0 and op != owner[i - 1]]:
        known, code[i, 0] = int(code[i, 0]), -1
        yield owner[i]
        code[i, 0] = known
