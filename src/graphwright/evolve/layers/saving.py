"""The content of a saved run on layers: `run.json`, and program and moments of each candidate that can still breed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.errors import ResumeMismatch
from graphwright.evolve.layers.candidate import Candidate, CandidateBirth, TrainingGenes
from graphwright.evolve.saved_run import read_arrays, write_arrays, write_run
from graphwright.files import atomic_directory
from graphwright.graph import Chain
from graphwright.program import load
from graphwright.program.editing.journal import Journal

if TYPE_CHECKING:
    from graphwright.evolve.layers.candidate import Moments
    from graphwright.evolve.layers.engine import LayerEvolution
    from graphwright.files import StrPath
    from graphwright.program import Program


def save(run: LayerEvolution, directory: StrPath) -> None:
    """Write a run, replacing previous files atomically. Raises: FileError; the previous files are then still there."""
    candidates = {m.number: m for m in [*run.members, *run.archive]}
    with atomic_directory(directory, overwrite=True) as folder:
        run.start.save(folder / "start", history="none")
        (folder / "candidates").mkdir()
        digests: dict[str, Any] = {}
        for m in candidates.values():
            home = folder / "candidates" / str(m.number)
            home.mkdir()
            _without_times(m.program, run.start).save(home / "program", history="none")
            digests[str(m.number)] = {"moments": write_arrays(home, "moments", m.moments)}
            if m.untrained is not None:
                _without_times(m.untrained, run.start).save(home / "untrained", history="none")
                digests[str(m.number)]["untrained_moments"] = write_arrays(
                    home, "untrained_moments", m.untrained_moments
                )
        content = {
            "steady": run.steady,
            "members": [m.number for m in run.members],
            "archive": [m.number for m in run.archive],
            "births": [asdict(b) for b in run.births],
            "numbers": [[*key, name] for key, name in run.numbers.items()],
            "tensors": digests,
        }
        write_run(folder, run, content)


def _without_times(program: Program, start: Program) -> Program:
    """Fork a program with the journal of the start: entries have times, and births hold the history of a candidate."""
    twin = program.fork(program.name)
    twin.journal = Journal(Chain(base=start.journal.hash))
    return twin


def restore(run: LayerEvolution, folder: Path, content: Mapping[str, Any]) -> None:
    """Restore a saved run into a new one. Raises: ResumeMismatch, CheckpointError."""
    run.births = [_birth(b) for b in content["births"]]
    found = {
        int(n): _candidate(folder / "candidates" / n, run.births[int(n)], d) for n, d in content["tensors"].items()
    }
    try:
        run.members, run.archive = ([found[n] for n in content[name]] for name in ("members", "archive"))
    except KeyError as error:
        raise ResumeMismatch("a candidate of the saved run is missing", where=folder, got=str(error)) from None
    run.numbers = {(kind, site, k): name for kind, site, k, name in content["numbers"]}
    run.steady = content["steady"]
    run.restore_log(content["log"])


def _candidate(home: Path, birth: CandidateBirth, digests: Mapping[str, Any]) -> Candidate:
    def moments(name: str) -> Moments:
        return {k: np.array(v) for k, v in read_arrays(home, name, digests[name]).items()}

    program = load(home / "program")
    if "untrained_moments" not in digests:
        return Candidate(birth, program, moments("moments"))
    return Candidate(birth, program, moments("moments"), load(home / "untrained"), moments("untrained_moments"))


def _birth(data: Mapping[str, Any]) -> CandidateBirth:
    training = TrainingGenes(**data["training"])
    return CandidateBirth(**{**data, "training": training, "loss": float(data["loss"]), "edits": tuple(data["edits"])})
