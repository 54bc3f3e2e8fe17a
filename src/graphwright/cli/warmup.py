"""`graphwright warmup`: compile the native code once per installation."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

from graphwright.cli.common import Command, Output, say, silent

_VM = "from graphwright.array.vm.machine import build; build()"


@Command("graphwright warmup")
def warmup() -> Output:
    """Compile the native code, once per installation.

    Compiles the native code of bulk edits, the planner, the VM, token sampling, gates and populations, and caches it on
    disk, so that a second call is quick.
    """
    started = perf_counter()
    from graphwright.array.cpu.loops import warmup as gates
    from graphwright.array.cpu.random import build as sampling
    from graphwright.array.population.warmup import warmup as populations
    from graphwright.array.vm.machine import build, built
    from graphwright.graph.graph import warmup as bulk_edits
    from graphwright.plan.planning.native import build as planning

    process = None  # the VM takes as long as all others together
    if not built():
        if not silent():
            say("building the VM, once per installation: about a minute")
        process = subprocess.Popen([sys.executable, "-c", _VM], stderr=subprocess.DEVNULL)
    for compiled in (planning, bulk_edits, populations, sampling, gates):
        compiled()
    if process is not None:
        process.wait()
        built.cache_clear()
    build()  # loads from disk, or compiles here and raises the error of the other process
    seconds = perf_counter() - started
    return Output({"seconds": seconds}, "" if silent() else f"native code is ready ({seconds:.1f} s)")
