"""The planner's loops compiled by numba: built once per installation, in the background, and cached on disk.

The loops run as Python until they are built, and for small plans in a process that has not loaded numba.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array.formulas import specialise
from graphwright.builds import Part
from graphwright.plan.planning import passes

SMALL = 300
"""Instructions up to which running the loops as Python costs less than loading numba."""


def loops(size: int) -> Any:
    """Return the functions of module `passes`, compiled if that saves time for a plan of `size` instructions."""
    if "numba" in sys.modules or size > SMALL:
        if part.ready:
            return build()
        part.start()
    return passes


@cache
def build() -> Any:
    """Load all compiled loops, including those needed only after an edit, so that the first edit does not wait."""
    from graphwright.native import inner, njit

    entry, within = (wrap(error_model="numpy") for wrap in (partial(njit, cache=True), inner))
    run = specialise(passes, {}, lambda f: within(f) if f.__name__.startswith("_") else entry(f))
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


def _marker() -> Path:
    from graphwright.native import marker

    return marker("passes", passes.assign_offsets, Path(passes.__file__))


part = Part("the planner's loops", f"{__name__}:part", build, _marker)


def wait_for_native_code() -> None:
    """Wait until the native code of plans is built: plans that are made before run on ATen, whose last bits differ."""
    from graphwright.array.vm.machine import part as vm

    vm.wait()
    part.wait()
