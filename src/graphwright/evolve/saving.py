"""A run of neurons on disk: `run.json` and `arrays.safetensors`; and the way back from any saved run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array.population.names import Births
from graphwright.errors import GraphwrightError, MissingExtra
from graphwright.evolve import tasks
from graphwright.evolve.errors import RegistryConflict, ResumeMismatch
from graphwright.evolve.lineage import Edited, Key, Lineage, _Past
from graphwright.evolve.neurons import Generation, NeuronEvolution
from graphwright.evolve.settings import NEAT
from graphwright.evolve.species import Species
from graphwright.evolve.stored import LIMIT, SCHEMA, before, number, read_arrays, read_run, write_arrays, write_run
from graphwright.files import atomic_directory, read_json

if TYPE_CHECKING:
    from graphwright.files import StrPath


def save(run: NeuronEvolution, directory: StrPath) -> None:
    """Write a run; what stood at the place is replaced in one step. Raises: FileError, and the old one still stands."""
    with atomic_directory(directory, overwrite=True) as place:
        content = {
            "best": _pair(run.best),
            "solution": _pair(run.solution),
            "pinned": [_pair(key) for key in sorted(run.lineage.pinned)],
            "threshold": run.species.threshold,
            "next_species": run.species.next_id,
            "past": len(run.lineage.past),
            "edits": [[g, e.index, e.why, e.fitness, e.metric] for g, e in _edits(run.lineage)],
            "tensors": write_arrays(place, "arrays", dict(_arrays(run))),
        }
        write_run(place, run, content)


def resume(directory: StrPath, task: Any = None, *, threads: int = 1) -> Any:
    """Go on with a saved run.

    Args:
        directory: written by `Evolution.save`, or by the command line, which has it in `state`.
        task: that of the run; may be left out if it is one that the command line knows by name.
    Raises: ResumeMismatch for another task or schema, or damaged files: it names the state before, if that is kept;
        RegistryConflict for innovation numbers that contradict each other; UnreadableFile if there is nothing.
    """
    folder = Path(directory)
    folder = folder / "state" if (folder / "state" / "run.json").is_file() else folder
    try:
        content = read_json(folder / "run.json", LIMIT)
    except ValueError as error:
        raise ResumeMismatch("run.json is damaged", where=folder, got=str(error), fix=before(folder)) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        got = content.get("schema") if isinstance(content, dict) else None
        raise ResumeMismatch("this is no saved run of this version", where=folder, expected=f"schema {SCHEMA}", got=got)
    try:
        return _resumed(folder, content, task, threads)
    except (ResumeMismatch, RegistryConflict, MissingExtra):
        raise
    except GraphwrightError as error:  # of an array or a member
        where = folder if error.where is None else error.where
        raise ResumeMismatch(f"a file of the run is damaged: {error.what}", where=where, expected=error.expected,
                             got=error.got, fix=before(folder)) from error  # fmt: skip
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a value is gone or of another kind
        got = f"{type(error).__name__}: {error}"
        raise ResumeMismatch("run.json is damaged", where=folder, got=got, fix=before(folder)) from error


def _resumed(folder: Path, content: Mapping[str, Any], task: Any, threads: int) -> Any:
    if task is None:
        if content["task"] not in tasks.TASKS:
            raise ResumeMismatch("the task has no name to find it by", where=folder, got=content["task"],
                                 fix="resume(directory, task); on the command line FILE.csv --target COLUMN, or --task "
                                     "FILE.py, beside --resume DIR")  # fmt: skip
        task = tasks.named(content["task"])
    if task.hash() != content["task_hash"]:
        same = task.name == content["task"]
        raise ResumeMismatch("a run of another task", where=folder, expected=content["task"],
                             got=f"{task.name} of other data, split or target" if same else task.name,
                             fix="give the task that it was saved with: same data, split and target")  # fmt: skip
    if content["settings"].get("kind") == "Layers":
        from graphwright.evolve.layers.saving import restore

        run: Any = restore(folder, content, task, threads)
    else:
        settings = NEAT.from_json(content["settings"])
        run = NeuronEvolution(task, None, settings, seed=content["seed"], threads=threads)
        _restore(run, content, read_arrays(folder, "arrays", content["tensors"]))
    read_run(folder, run, content)
    return run


def load_best(directory: StrPath, task: Any = None) -> Any:
    """The champion of a saved run: an `Individual`, which predicts and re-scores, or of layers a `Member`."""
    run: Any = resume(directory, task)
    if not isinstance(run, NeuronEvolution):
        return run._best()
    key = run.solution or run.best
    if key is None:
        raise ResumeMismatch("nothing was scored yet in this run", where=directory)
    return run.individual(key)


def _arrays(run: NeuronEvolution) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that is an array, in a fixed order."""
    for name, column in zip(run.genes._fields, run.genes, strict=True):
        yield f"genes.{name}", column
    used = int(run.registry.count[0])
    yield "registry.keys", run.registry.keys[:used]
    for name in ("of", "ids", "best", "gained"):
        yield f"species.{name}", getattr(run.species, name)
    for name in _BIRTHS:
        yield f"births.{name}", getattr(run.births, name)
    if run.fitness is not None:
        yield "fitness", run.fitness
        yield "metric", run.metric
    for g, past in enumerate(run.lineage.past):
        for name in _BIRTHS:
            yield f"past.{g}.{name}", getattr(past.births, name)
        for name in ("species", "fitness", "metric", "kept"):
            yield f"past.{g}.{name}", getattr(past, name)
        for name, column in zip(past.genes._fields, past.genes, strict=True):
            yield f"past.{g}.genes.{name}", column
    for k, (_, change) in enumerate(_edits(run.lineage)):
        for name, column in zip(change.genes._fields, change.genes, strict=True):
            yield f"edits.{k}.genes.{name}", column


_BIRTHS = ("fitter_parent", "other_parent", "mutation", "site", "refused")


def _restore(run: NeuronEvolution, content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    from graphwright.array.population.genes import Genes, Registry
    from graphwright.evolve.genomes import number as enter

    keys = arrays["registry.keys"]
    capacity = 1024
    while capacity < len(keys):
        capacity *= 2
    run.registry = Registry(
        np.zeros((capacity, 4), np.int64), np.full(2 * capacity, -1, np.int64), np.zeros(1, np.int64)
    )
    for place, key in enumerate(keys.tolist()):
        if enter(run.registry, *key) != place:
            raise RegistryConflict("a structure has two innovation numbers", got=f"key {tuple(key)} as number {place}")

    def births(prefix: str) -> Births:
        return Births(**{name: arrays[f"{prefix}.{name}"] for name in _BIRTHS})

    run.genes = Genes(**{name: arrays[f"genes.{name}"] for name in Genes._fields})
    run.births = births("births")
    run.species = Species(
        **{name: arrays[f"species.{name}"] for name in ("of", "ids", "best", "gained")},
        threshold=content["threshold"],
        next_id=content["next_species"],
    )
    run.fitness, run.metric = arrays.get("fitness"), arrays.get("metric", np.zeros(0))
    lineage = Lineage(run.task.inputs, run.task.outputs, run.task.names)
    lineage.pinned = {Key(*k) for k in content["pinned"]}
    lineage.past = [
        _Past(
            births=births(f"past.{g}"),
            genes=Genes(**{name: arrays[f"past.{g}.genes.{name}"] for name in Genes._fields}),
            **{name: arrays[f"past.{g}.{name}"] for name in ("species", "fitness", "metric", "kept")},
        )
        for g in range(content["past"])
    ]
    for k, (g, index, why, fitness, metric) in enumerate(content["edits"]):
        genes = Genes(**{name: arrays[f"edits.{k}.genes.{name}"] for name in Genes._fields})
        lineage.past[g].edits.append(Edited(index, why, genes, number(fitness), number(metric)))
    run.lineage = lineage
    if run.settings.inherit == "baldwin" and run.fitness is not None:
        run._trained = lineage.living()
    run.best = None if content["best"] is None else Key(*content["best"])
    run.solution = None if content["solution"] is None else Key(*content["solution"])
    for key in {run.best, run.solution, *lineage.pinned} - {None}:
        lineage.genome(key)
    run.log = [_line(line) for line in content["log"]]


def _edits(lineage: Lineage) -> list[tuple[int, Edited]]:
    """Edits by hand with their generations, in order."""
    return [(g, e) for g, past in enumerate(lineage.past) for e in past.edits]


def _pair(key: Key | None) -> list[int] | None:
    return None if key is None else [key.generation, key.index, key.edit]


def _line(data: Mapping[str, Any]) -> Generation:
    numbers = {name: number(data[name]) for name in ("best", "median", "metric")}
    return Generation(**{**data, **numbers, "species": {int(k): v for k, v in data["species"].items()}})
