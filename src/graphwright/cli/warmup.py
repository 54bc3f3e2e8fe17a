"""`graphwright warmup`: compile the native code once per installation."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

from graphwright.cli.common import Debug, Json, Quiet, command, emit_json, say

_VM = "from graphwright.array.vm.machine import build; build()"


@command("graphwright warmup")
def warmup(quiet: Quiet = False, as_json: Json = False, debug: Debug = False) -> None:
    """Compile the native code, once per installation.

    That is bulk edits, the loops of the planner, the VM, sampling of tokens, gates and populations. The result is
    cached on disk, so a second call is quick.
    """
    started = perf_counter()
    from graphwright.array.cpu.loops import warmup as gates
    from graphwright.array.cpu.sampling import build as sampling
    from graphwright.array.population.warmup import warmup as populations
    from graphwright.array.vm.machine import build, built
    from graphwright.graph.graph import warmup as bulk_edits
    from graphwright.plan.planning import native as planning

    process = None  # the VM takes as long as all others together
    if not built():
        if not (quiet or as_json):
            say("building the VM, once per installation: about a minute")
        process = subprocess.Popen([sys.executable, "-c", _VM], stderr=subprocess.DEVNULL)
    planning.build()
    bulk_edits()
    populations()
    sampling()
    gates()
    if process is not None:
        process.wait()
        built.cache_clear()
    build()  # loads from disk, or compiles here and raises the error of the other process
    seconds = perf_counter() - started
    if as_json:
        emit_json({"seconds": seconds})
    elif not quiet:
        say(f"native code is ready ({seconds:.1f} s)")
