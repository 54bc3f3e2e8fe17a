"""A run on layers on disk: `run.json`, and a saved program with moments for every member that can still breed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.errors import ResumeMismatch
from graphwright.evolve.evolution import Blocks
from graphwright.evolve.layers.engine import Generation, LayerEvolution
from graphwright.evolve.layers.member import Birth, Member, Recipe
from graphwright.evolve.layers.settings import Layers
from graphwright.evolve.stored import number, read_arrays, write_arrays, write_run
from graphwright.files import atomic_directory
from graphwright.graph import Chain
from graphwright.program import load
from graphwright.program.editing.journal import Journal

if TYPE_CHECKING:
    from graphwright.evolve.layers.member import Moments
    from graphwright.files import StrPath
    from graphwright.program import Program


def save(run: LayerEvolution, directory: StrPath) -> None:
    """Write a run; what stood at the place is replaced in one step. Raises: FileError, and the old one still stands."""
    members = {m.number: m for m in [*run.members, *run.archive]}
    with atomic_directory(directory, overwrite=True) as place:
        run.start.save(place / "start", history="none")
        (place / "members").mkdir()
        digests: dict[str, Any] = {}
        for m in members.values():
            home = place / "members" / str(m.number)
            home.mkdir()
            _without_times(m.program, run.start).save(home / "program", history="none")
            digests[str(m.number)] = {"moments": write_arrays(home, "moments", m.moments)}
            if m.seedling is not None:
                _without_times(m.seedling, run.start).save(home / "seedling", history="none")
                digests[str(m.number)]["seeds"] = write_arrays(home, "seeds", m.seeds)
        content = {
            "steady": run.steady,
            "members": [m.number for m in run.members],
            "archive": [m.number for m in run.archive],
            "births": [asdict(b) for b in run.births],
            "numbers": [[*key, name] for key, name in run.numbers.items()],
            "tensors": digests,
        }
        write_run(place, run, content)


def _without_times(program: Program, start: Program) -> Program:
    """A fork whose journal goes on from the start's: entries have times; what became of a member is in its births."""
    twin = program.fork(program.name)
    twin.journal = Journal(Chain(base=start.journal.hash))
    return twin


def restore(folder: Path, content: Mapping[str, Any], task: Any, threads: int) -> LayerEvolution:
    """The run that was saved. Raises: ResumeMismatch, CheckpointError for damaged files."""
    start = load(folder / "start")
    run = LayerEvolution(task, Blocks(start), Layers.from_json(content["settings"]), seed=content["seed"],
                         threads=threads)  # fmt: skip
    run.births = [_birth(b) for b in content["births"]]
    found = {int(n): _member(folder / "members" / n, run.births[int(n)], d) for n, d in content["tensors"].items()}
    try:
        run.members, run.archive = ([found[n] for n in content[name]] for name in ("members", "archive"))
    except KeyError as error:
        raise ResumeMismatch("a member is missing", where=folder, got=str(error)) from None
    run.numbers = {(kind, site, k): name for kind, site, k, name in content["numbers"]}
    run.steady = content["steady"]
    run.log = [Generation(**{**line, "best": number(line["best"])}) for line in content["log"]]
    return run


def _member(home: Path, birth: Birth, digests: Mapping[str, Any]) -> Member:
    def moments(name: str) -> Moments:
        return {k: np.array(v) for k, v in read_arrays(home, name, digests[name]).items()}

    seeded = "seeds" in digests
    return Member(birth, load(home / "program"), moments("moments"), load(home / "seedling") if seeded else None,
                  moments("seeds") if seeded else {})  # fmt: skip


def _birth(data: Mapping[str, Any]) -> Birth:
    return Birth(**{**data, "recipe": Recipe(**data["recipe"]), "loss": number(data["loss"]),
                    "edits": tuple(data["edits"])})  # fmt: skip
