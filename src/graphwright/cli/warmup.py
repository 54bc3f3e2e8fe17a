"""`graphwright warmup`: compile the native code once per installation."""

from __future__ import annotations

from threading import Thread
from time import perf_counter

from graphwright.cli.common import Command, Output, say, silent


@Command("graphwright warmup")
def warmup() -> Output:
    """Compile the native code now instead of in the background of its first use: for images of containers, say.

    Compiles the native code of bulk edits, patterns, the planner, the VM, gates and populations, and caches it on disk,
    so that a second call is quick.
    """
    started = perf_counter()
    from graphwright.array.cpu.loops import warmup as gates
    from graphwright.array.population.warmup import part as populations
    from graphwright.array.vm.machine import part as vm
    from graphwright.graph.graph import warmup as bulk_edits
    from graphwright.patterns.pair_index import warmup as patterns
    from graphwright.plan.planning.native import part as planner

    if not (vm.ready or silent()):
        say("building native code, once per installation: 15 to 40 seconds")
    builder = Thread(target=lambda: (vm.wait(), populations.wait()))  # child processes, besides the rest here
    builder.start()
    for compiled in (planner.build, bulk_edits, patterns, gates):
        compiled()
    builder.join()
    for part in (vm, populations):
        part.build()  # does nothing, or compiles here and raises the error of the child process
    seconds = perf_counter() - started
    return Output({"seconds": seconds}, "" if silent() else f"native code is ready ({seconds:.1f} s)")
