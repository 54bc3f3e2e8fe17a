"""The files of a saved run: `run.json`, arrays with checksums, and wall-clock times in `clock.json`.

The directory of a run is written atomically. Only `clock.json` contains times, so the bytes of all other files do not
depend on how often the run was interrupted. Runs on neurons add `arrays.safetensors`; runs on layers add the program
and the optimizer state of each candidate of the population and the archive.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import BY_TAG, dtype
from graphwright.array.population.names import Births
from graphwright.evolve.errors import RegistryConflict, ResumeMismatch
from graphwright.evolve.layers.candidate import Candidate, CandidateBirth, Moments, TrainingGenes
from graphwright.evolve.neurons.genomes import empty_registry, number
from graphwright.evolve.neurons.lineage import IndividualKey, Lineage, ManualEdit, PastGeneration
from graphwright.evolve.neurons.species import Species
from graphwright.files import StrPath, atomic_directory, blake2b_128, read_json
from graphwright.graph import Chain
from graphwright.program import Journal, Program, load
from graphwright.report import plain
from graphwright.safetensors import Checkpoint, TensorData, write_tensors

if TYPE_CHECKING:
    from graphwright.evolve.layers.engine import LayerEvolution
    from graphwright.evolve.neurons.engine import NeuronEvolution
    from graphwright.evolve.neurons.island_run import IslandEvolution

SCHEMA = 2
LIMIT = 1 << 30  # maximum bytes of run.json
CLOCK = ("seconds", "environment")
_SPECIES = ("of", "ids", "best", "gained")
_PAST = ("species", "fitness", "metric", "stored")


def write_arrays(folder: Path, stem: str, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write arrays to `<stem>.safetensors`; return the checksum of each array by name."""
    whole = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    items = [TensorData(n, dtype(a.dtype).safetensors, a.shape, a) for n, a in whole.items()]
    write_tensors(folder / f"{stem}.safetensors", items)
    return {name: blake2b_128(a) for name, a in whole.items()}


def read_arrays(folder: Path, stem: str, digests: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return arrays by name after checking their checksums. Raises: ResumeMismatch for a wrong one; CheckpointError."""
    arrays: dict[str, np.ndarray] = {}
    with Checkpoint(folder, stem=stem) as checkpoint:
        for name, digest in digests.items():
            info = checkpoint.info(name)
            array = np.frombuffer(bytearray(checkpoint.bytes(name)), BY_TAG[info.tag].numpy).reshape(info.shape)
            if blake2b_128(array) != digest:
                raise ResumeMismatch("an array of the saved run is damaged", where=f"{folder}: {name}",
                                     expected=f"checksum {digest}", fix=previous_state(folder))  # fmt: skip
            arrays[name] = array
    return arrays


def write_run(folder: Path, run: Any, content: Mapping[str, Any]) -> None:
    """Write `clock.json`, and `run.json` with the entries that all runs have and those in `content`."""
    counters = asdict(run.counters)
    clock = {name: counters.pop(name) for name in CLOCK}
    common = {"schema": SCHEMA, "task": run.task.name, "task_hash": run.task.hash(), "settings": run.settings.to_json(),
              "seed": run.seed, "generation": run.generation, "gained": run.gained, "counters": counters,
              "test_reads": run.task.test_reads, "failures": run.failures,
              "log": [asdict(line) for line in run.log]}  # fmt: skip
    text = json.dumps(plain(common | dict(content)), indent=1) + "\n"
    (folder / "run.json").write_text(text, encoding="utf-8")
    (folder / "clock.json").write_text(json.dumps(clock) + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Read `run.json`. Raises: ResumeMismatch if it is damaged or its schema differs; UnreadableFile if missing."""
    try:
        content = read_json(folder / "run.json", LIMIT)
    except ValueError as error:
        raise ResumeMismatch("run.json is damaged", where=folder, got=str(error), fix=previous_state(folder)) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ResumeMismatch("run.json has a different schema", where=folder, expected=f"schema {SCHEMA}", got=schema)
    return content


def read_run(folder: Path, run: Any, content: Mapping[str, Any]) -> None:
    """Restore the values that runs on neurons and runs on layers share, except the log."""
    run.generation, run.gained, run.failures = content["generation"], content["gained"], content["failures"]
    run.counters = type(run.counters)(**content["counters"])
    run.task.test_reads = max(run.task.test_reads, content.get("test_reads", 0))
    if (clock := folder / "clock.json").is_file():
        for name, value in read_json(clock).items():
            setattr(run.counters, name, float(value))


def _state(directory: StrPath, age: int) -> Path:
    """Return the directory of a saved state: age 0 is the last saved state, age 1 the state before it, and so on."""
    folder = Path(directory)
    return folder.with_name(f"{folder.name}.{age}") if age else folder


def previous_state(directory: StrPath) -> str | None:
    """Return the `fix` text of an error: resume from the previous saved state; None if no such state exists."""
    older = _state(directory, 1)
    return f"resume from the previous state in {older}" if (older / "run.json").is_file() else None


def rotate_states(directory: StrPath, keep: int) -> None:
    """Copy each saved state to the name of the next older one (`run` to `run.1`, ...); files become hard links."""
    for age in range(keep - 1, 0, -1):
        younger = _state(directory, age - 1)
        if (younger / "run.json").is_file():
            with atomic_directory(_state(directory, age), overwrite=True) as folder:
                shutil.copytree(younger, folder, copy_function=os.link, dirs_exist_ok=True)


# -- runs on neurons ---------------------------------------------------------------------------------------------------
def neuron_content(run: NeuronEvolution, folder: Path) -> dict[str, Any]:
    """Write the arrays of a run on neurons, and return its entries of `run.json`."""
    edits = [(g, e) for g, past in enumerate(run.lineage.past) for e in past.edits]
    return {"best": _json_key(run.best), "solution": _json_key(run.solution),
            "pinned": [_json_key(key) for key in sorted(run.lineage.pinned)], "threshold": run.species.threshold,
            "next_species": run.species.next_id, "past": len(run.lineage.past),
            "edits": [[g, e.index, e.why, e.fitness, e.metric, e.author] for g, e in edits],
            "tensors": write_arrays(folder, "arrays", dict(_arrays(run, [e for _, e in edits])))}  # fmt: skip


def _arrays(run: NeuronEvolution, edits: list[ManualEdit]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) for all arrays of a run in a fixed order."""

    def columns(prefix: str, value: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, np.ndarray]]:
        return ((f"{prefix}.{name}", getattr(value, name)) for name in names or value._fields)

    yield from columns("genes", run.genes)
    yield "registry.keys", run.registry.keys[: int(run.registry.count[0])]
    yield from columns("species", run.species, _SPECIES)
    yield from columns("births", run.births)
    if run.fitness is not None:
        yield "fitness", run.fitness
        yield "metric", run.metric
    for g, past in enumerate(run.lineage.past):
        yield from columns(f"past.{g}.births", past.births)
        yield from columns(f"past.{g}", past, _PAST)
        yield from columns(f"past.{g}.genes", past.genes)
    for k, change in enumerate(edits):
        yield from columns(f"edits.{k}.genes", change.genes)


def restore_neurons(run: NeuronEvolution, folder: Path, content: Mapping[str, Any]) -> None:
    """Load a saved state into the new run `run`. Raises: RegistryConflict, ResumeMismatch, CheckpointError."""
    from graphwright.array.population.genes import Genes  # loads numba

    arrays = read_arrays(folder, "arrays", content["tensors"])

    def columns(prefix: str, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: arrays[f"{prefix}.{name}"] for name in names}

    def genes(prefix: str) -> Any:
        return Genes(**columns(f"{prefix}genes", Genes._fields))

    keys = arrays["registry.keys"]
    run.registry = empty_registry(len(keys))
    for index, key in enumerate(keys.tolist()):
        if number(run.registry, *key) != index:
            raise RegistryConflict("the saved registry has two innovation numbers for one gene", where=folder,
                                   got=f"{tuple(key)} again, number {index}", fix=previous_state(folder))  # fmt: skip
    run.genes, run.births = genes(""), Births(**columns("births", Births._fields))
    species = columns("species", _SPECIES)
    run.species = Species(**species, threshold=content["threshold"], next_id=content["next_species"])
    run.fitness, run.metric = arrays.get("fitness"), arrays.get("metric", np.zeros(0))
    lineage = run.lineage = Lineage(run.task.inputs, run.task.outputs, run.task.names)
    lineage.pinned = {IndividualKey(*k) for k in content["pinned"]}
    for g in range(content["past"]):
        births, parts = Births(**columns(f"past.{g}.births", Births._fields)), columns(f"past.{g}", _PAST)
        lineage.past.append(PastGeneration(births=births, genes=genes(f"past.{g}."), **parts))
    for k, (g, index, why, fitness, metric, *author) in enumerate(content["edits"]):
        scores = (float(fitness), float(metric))
        lineage.past[g].edits.append(ManualEdit(index, why, genes(f"edits.{k}."), *scores, *author))
    run.best, run.solution = (content[n] and IndividualKey(*content[n]) for n in ("best", "solution"))
    for key in {run.best, run.solution, *lineage.pinned} - {None}:
        lineage.genome(key)
    run.restore_log(content["log"])


def _json_key(key: IndividualKey | None) -> list[int] | None:
    return None if key is None else [key.generation, key.index, key.edit]


# -- islands -----------------------------------------------------------------------------------------------------------
def island_content(run: IslandEvolution, folder: Path) -> dict[str, Any]:
    """Write the run of each island to a directory of its own, and return the entries of `run.json` of the whole."""
    for island, one in enumerate(run.runs):
        home = folder / "islands" / str(island)
        home.mkdir(parents=True)
        write_run(home, one, neuron_content(one, home))
    return {"islands": asdict(run.islands)}


def restore_islands(run: IslandEvolution, folder: Path, content: Mapping[str, Any]) -> None:
    """Load the saved islands into the new run `run`. Raises: RegistryConflict, ResumeMismatch, CheckpointError."""
    for island, one in enumerate(run.runs):
        home = folder / "islands" / str(island)
        own = read_state(home)
        restore_neurons(one, home, own)
        read_run(home, one, own)
        one.lineage.sweeping = False
    run.restore_log(content["log"])


# -- runs on layers ----------------------------------------------------------------------------------------------------
def layer_content(run: LayerEvolution, folder: Path) -> dict[str, Any]:
    """Write the candidates of a run on layers, and return its entries of `run.json`."""
    run.start.save(folder / "start", history="none")
    (folder / "candidates").mkdir()
    digests: dict[str, Any] = {}
    for m in {m.number: m for m in [*run.members, *run.archive]}.values():
        home = folder / "candidates" / str(m.number)
        home.mkdir()
        _without_times(m.program, run.start).save(home / "program", history="none")
        digests[str(m.number)] = mine = {"moments": write_arrays(home, "moments", m.moments)}
        if m.untrained is not None:
            _without_times(m.untrained, run.start).save(home / "untrained", history="none")
            mine["untrained_moments"] = write_arrays(home, "untrained_moments", m.untrained_moments)
    return {"steady": run.steady, "members": [m.number for m in run.members],
            "archive": [m.number for m in run.archive], "births": [asdict(b) for b in run.births],
            "numbers": [[*key, name] for key, name in run.numbers.items()], "tensors": digests}  # fmt: skip


def _without_times(program: Program, start: Program) -> Program:
    """Fork a program with an empty journal, since entries contain times; its hash chain continues that of `start`."""
    twin = program.fork(program.name)
    twin.journal = Journal(Chain(base=start.journal.hash))
    return twin


def restore_layers(run: LayerEvolution, folder: Path, content: Mapping[str, Any]) -> None:
    """Load the saved state of a run on layers into the new run `run`. Raises: ResumeMismatch, CheckpointError."""
    run.births = [_birth(b) for b in content["births"]]
    found = {
        int(n): _candidate(folder / "candidates" / n, run.births[int(n)], d) for n, d in content["tensors"].items()
    }
    try:
        run.members, run.archive = ([found[n] for n in content[name]] for name in ("members", "archive"))
    except KeyError as error:
        raise ResumeMismatch("a candidate of the saved run is missing", where=f"{folder}, candidate {error}") from None
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
