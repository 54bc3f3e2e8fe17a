"""`graphwright warmup`: compile, once per install, what is compiled at all: edits, planner, VM, populations."""

from __future__ import annotations

from time import perf_counter

import typer

from graphwright.cli.common import Debug, Json, Quiet, emit_json, say, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright warmup")(warmup)


@verb
def warmup(quiet: Quiet = False, as_json: Json = False, debug: Debug = False) -> None:
    """Compile, once per install, what is native code.

    Bulk edits, the planner's loops, the VM and populations. It is cached on disk: a second call is quick.
    """
    started = perf_counter()
    from graphwright.array.population.warmup import warmup as populations
    from graphwright.array.vm.machine import build, built
    from graphwright.graph.warmup import warmup as bulk_edits
    from graphwright.plan import native as planning

    if not (quiet or as_json or built()):
        say("building the VM, once per install: some 20 s")
    build()
    planning.build()
    bulk_edits()
    populations()
    seconds = perf_counter() - started
    if as_json:
        emit_json({"seconds": seconds})
    elif not quiet:
        say(f"native code is ready ({seconds:.1f} s)")
