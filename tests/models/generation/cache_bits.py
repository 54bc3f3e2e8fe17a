"""What a cache holds, to the bit."""

from __future__ import annotations

import numpy as np

from graphwright.models import Cache


def state(cache: Cache) -> dict[str, bytes]:
    """All bits of a cache."""
    return {k: v.data.tobytes() for k, v in cache.variables.items()} | {"tokens": cache.tokens.tobytes()}


def rows(cache: Cache, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Filled keys and values of one attention."""
    k, v = (cache.variables[f"cache.{path}.{n}"].numpy()[:, :, : cache.length].copy() for n in "kv")
    return k, v
