"""Run benchmarks by name, or all of them, one after another; `evolve:xor,cart` runs figures of a module by name.

A module that lists its `PARTS` has them stored as they come; a part run alone leaves the others where they are.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter

from benchmarks.harness import show, write, write_part
from graphwright.cli.warmup import warmup

NOT_FIGURES = {"__init__", "__main__", "harness", "size", "render", "llama_cpp", "revisions"}


def main() -> None:
    known = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in NOT_FIGURES)
    wanted = sys.argv[1:] or known
    for name in wanted:
        if name.partition(":")[0] not in known:
            sys.exit(f"no benchmark {name!r}; there are: {', '.join(known)}")
    warmup.fn()
    for name in wanted:
        started = perf_counter()
        stem, _, parts = name.partition(":")
        module = import_module(f"benchmarks.{stem}")
        listed = getattr(module, "PARTS", ())
        asked = parts.split(",") if parts else listed
        if unknown := [part for part in asked if not hasattr(module, part)]:
            sys.exit(f"no part {', '.join(unknown)} of {stem!r}; there are: {', '.join(listed)}")
        for part in asked:
            figure = getattr(module, part)()
            if listed:  # else looked at, not kept: the page holds whole runs
                write_part(stem, part, figure, listed)
            print(show(figure), end="\n\n", flush=True)
        if not asked:
            figures = module.run()
            write(stem, figures)
            for figure in figures:
                print(show(figure), end="\n\n", flush=True)
        print(f"{name}: {perf_counter() - started:.0f} s\n", flush=True)
    from benchmarks.render import render

    render()


main()
