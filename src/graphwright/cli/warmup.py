"""`graphwright warmup`: compile, once per install, what is compiled: edits, planner, VM, tokens, gates, populations."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

import typer

from graphwright.cli.common import Debug, Json, Quiet, emit_json, say, verb

_VM = "from graphwright.array.vm.machine import build; build()"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright warmup")(warmup)


@verb
def warmup(quiet: Quiet = False, as_json: Json = False, debug: Debug = False) -> None:
    """Compile, once per install, what is native code.

    Bulk edits, the planner's loops, the VM, the choice of tokens, gates and populations. It is cached on disk: a second
    call is quick.
    """
    started = perf_counter()
    from graphwright.array.cpu.loops import warmup as gates
    from graphwright.array.cpu.sample_token import build as choice_of_tokens
    from graphwright.array.population.warmup import warmup as populations
    from graphwright.array.vm.machine import build, built
    from graphwright.graph.warmup import warmup as bulk_edits
    from graphwright.plan.planning import native as planning

    beside = None  # the VM takes as long as all others together: a process of its own
    if not built():
        if not (quiet or as_json):
            say("building the VM, once per install: about a minute")
        beside = subprocess.Popen([sys.executable, "-c", _VM], stderr=subprocess.DEVNULL)
    planning.build()
    bulk_edits()
    populations()
    choice_of_tokens()
    gates()
    if beside is not None:
        beside.wait()
        built.cache_clear()
    build()  # read from disk; compiled here, with its error, where the other process failed
    seconds = perf_counter() - started
    if as_json:
        emit_json({"seconds": seconds})
    elif not quiet:
        say(f"native code is ready ({seconds:.1f} s)")
