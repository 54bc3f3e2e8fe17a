"""Three runs that are in the middle of twenty generations, each inside the other, when the process is killed."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import graphwright as gw
from graphwright import evolve as ev

KINDS = ("neat", "hybrid", "layers")
GENERATIONS = 20


def moons():
    return ev.tasks.two_moons(60)


def write_start(folder: Path) -> None:
    """A network with running statistics, dropout and a gate; made once, as its journal says when."""
    gw.manual_seed(0)
    n = gw.nn
    net = n.Sequential(n.Linear(2, 4), n.BatchNorm1d(4), n.Tanh(), n.Dropout(0.1), n.Linear(4, 1))
    p = gw.trace(net, gw.zeros(12, 2))
    with p.edit("a gate") as e:
        e.gate(p.node("2.tanh"), "scale")
    p.save(folder / "start")


def new(kind: str, folder: Path, threads: int = 1) -> Any:
    if kind == "layers":
        settings: Any = ev.Layers(population=1, steps=1, pareto=ev.Pareto(), inherit="baldwin", crossover=0.5)
        return ev.Evolution(moons(), ev.blocks(gw.load(folder / "start")), settings, seed=4, threads=threads)
    settings = {
        "neat": ev.NEAT(population=20, split_link=0.2, add_link=0.3, delays=0.5, target_species=3, start="random",
                        burst=1),
        "hybrid": ev.Hybrid(population=4, train=ev.Train(steps=3)),
    }[kind]  # fmt: skip
    return ev.Evolution(ev.tasks.xor(), ev.scalar(), settings, seed=4, threads=threads)


def finish(run: Any, directory: Path | None = None, callback: Any = None) -> None:
    run.run(GENERATIONS, target=2.0, save=directory, save_every=3, callback=callback)


def main(folder: Path, threads: int) -> None:
    def begin(kinds: tuple[str, ...]) -> None:
        def halfway(run: Any) -> None:
            if len(run.log) != GENERATIONS // 2:
                return
            if kinds[1:]:
                begin(kinds[1:])
            print("halfway", flush=True)
            threading.Event().wait()

        finish(new(kinds[0], folder, threads), folder / kinds[0], halfway)

    begin(KINDS)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(Path(sys.argv[1]), int(sys.argv[2]))
