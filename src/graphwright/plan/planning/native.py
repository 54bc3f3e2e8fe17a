"""The planner's loops compiled by numba: built once per install by `graphwright warmup` and cached on disk.

The loops run as Python until they are built, and for small plans in a process that has not loaded numba.
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array.formulas import specialise
from graphwright.plan.planning import passes

SMALL = 300
"""Instructions up to which running the loops as Python costs less than loading numba."""


def loops(size: int) -> Any:
    """Return the functions of module `passes`, compiled if that saves time for a plan of `size` instructions."""
    if ("numba" in sys.modules or size > SMALL) and built():
        return _compiled()
    return passes


@cache
def built() -> bool:
    """Return True if the compiled loops are on disk."""
    return _stamp().exists()


def build() -> None:
    """Compile the loops and mark them as built; takes a few seconds if they are not in numba's cache."""
    _compiled()
    stamp = _stamp()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    built.cache_clear()


@cache
def _compiled() -> Any:
    """Load all compiled loops, including those needed only after an edit, so that the first edit does not wait."""
    from graphwright.native import njit

    run = specialise(passes, {}, njit(cache=True, error_model="numpy"))
    _run_on_empty(run)
    return run


def _run_on_empty(run: Any) -> None:
    """Call each loop once on empty arrays of the dtypes that planning uses, so that numba compiles or loads it."""
    u4, i4, i8, flags, codes = (np.zeros(1, kind) for kind in (np.uint32, np.int32, np.int64, np.bool_, np.int8))
    none, lists = np.zeros(0, np.int32), (u4, np.zeros(0, np.uint32))
    run.needed(none, *lists, *lists, flags)
    run.sinking(none, *lists, *lists, flags, flags)
    run.touches(none, *lists, *lists, i8, i8)
    run.lifetimes(none, *lists, *lists, *lists, *lists, codes, u4, u4)
    run.fullest(i8, i4, i4, 0)
    run.assign_offsets(i8, i4, i4, 0)
    run.keep_offsets(i8, i4, i4, i8, 0, i8)
    run.moved(none, *lists, *lists, *lists, flags)
    no_region, spans, rows = np.zeros(1, np.int64), np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int32)
    run.region_keys(none, spans, *lists, *lists, codes, u4, i4, i4, flags, no_region, none)
    run.update_lifetimes(no_region[1:], none, no_region, rows, no_region, rows, i4, flags)


@cache
def _stamp() -> Path:
    """Return the path of the file in numba's cache that marks the loops as built for this source and numba version."""
    from importlib.metadata import version

    from numba.core.caching import FunctionCache

    key = blake2b(Path(passes.__file__).read_bytes() + version("numba").encode(), digest_size=8).hexdigest()
    return Path(FunctionCache(passes.assign_offsets).cache_path) / f"passes-{key}.built"
