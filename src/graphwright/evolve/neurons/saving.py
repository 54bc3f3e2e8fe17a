"""The content of a saved run on neurons: numbers for `run.json` and arrays for `arrays.safetensors`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array.population.names import Births
from graphwright.evolve.errors import RegistryConflict
from graphwright.evolve.neurons.genomes import empty_registry
from graphwright.evolve.neurons.genomes import number as innovation
from graphwright.evolve.neurons.lineage import IndividualKey, Lineage, ManualEdit, PastGeneration
from graphwright.evolve.neurons.species import Species
from graphwright.evolve.saved_run import read_arrays, write_arrays, write_run
from graphwright.files import atomic_directory

if TYPE_CHECKING:
    from graphwright.evolve.neurons.engine import NeuronEvolution
    from graphwright.files import StrPath

_SPECIES = ("of", "ids", "best", "gained")
_PAST = ("species", "fitness", "metric", "kept")


def save(run: NeuronEvolution, directory: StrPath) -> None:
    """Write a run, replacing previous files atomically. Raises: FileError; the previous files are then still there."""
    edits = [(g, e) for g, past in enumerate(run.lineage.past) for e in past.edits]
    with atomic_directory(directory, overwrite=True) as folder:
        content = {
            "best": _json_key(run.best),
            "solution": _json_key(run.solution),
            "pinned": [_json_key(key) for key in sorted(run.lineage.pinned)],
            "threshold": run.species.threshold,
            "next_species": run.species.next_id,
            "past": len(run.lineage.past),
            "edits": [[g, e.index, e.why, e.fitness, e.metric] for g, e in edits],
            "tensors": write_arrays(folder, "arrays", dict(_arrays(run, [e for _, e in edits]))),
        }
        write_run(folder, run, content)


def _arrays(run: NeuronEvolution, edits: list[ManualEdit]) -> Iterator[tuple[str, np.ndarray]]:
    """All arrays of a run in a fixed order."""

    def tuples(prefix: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
        return ((f"{prefix}.{name}", column) for name, column in zip(value._fields, value, strict=True))

    yield from tuples("genes", run.genes)
    yield "registry.keys", run.registry.keys[: int(run.registry.count[0])]
    for name in _SPECIES:
        yield f"species.{name}", getattr(run.species, name)
    yield from tuples("births", run.births)
    if run.fitness is not None:
        yield "fitness", run.fitness
        yield "metric", run.metric
    for g, past in enumerate(run.lineage.past):
        yield from tuples(f"past.{g}.births", past.births)
        for name in _PAST:
            yield f"past.{g}.{name}", getattr(past, name)
        yield from tuples(f"past.{g}.genes", past.genes)
    for k, change in enumerate(edits):
        yield from tuples(f"edits.{k}.genes", change.genes)


def restore(run: NeuronEvolution, folder: Path, content: Mapping[str, Any]) -> None:
    """Restore a saved run into a new one. Raises: RegistryConflict, ResumeMismatch, CheckpointError."""
    from graphwright.array.population.genes import Genes  # loads numba

    arrays = read_arrays(folder, "arrays", content["tensors"])

    def tuples(kind: Any, prefix: str) -> Any:
        return kind(**{name: arrays[f"{prefix}.{name}"] for name in kind._fields})

    keys = arrays["registry.keys"]
    run.registry = empty_registry(len(keys))
    for index, key in enumerate(keys.tolist()):
        if innovation(run.registry, *key) != index:
            raise RegistryConflict("a structure has two innovation numbers", got=f"key {tuple(key)} as number {index}")
    run.genes, run.births = tuples(Genes, "genes"), tuples(Births, "births")
    columns = {name: arrays[f"species.{name}"] for name in _SPECIES}
    run.species = Species(**columns, threshold=content["threshold"], next_id=content["next_species"])
    run.fitness, run.metric = arrays.get("fitness"), arrays.get("metric", np.zeros(0))
    lineage = run.lineage = Lineage(run.task.inputs, run.task.outputs, run.task.names)
    lineage.pinned = {IndividualKey(*k) for k in content["pinned"]}
    for g in range(content["past"]):
        parts = {name: arrays[f"past.{g}.{name}"] for name in _PAST}
        genes, births = tuples(Genes, f"past.{g}.genes"), tuples(Births, f"past.{g}.births")
        lineage.past.append(PastGeneration(births=births, genes=genes, **parts))
    for k, (g, index, why, fitness, metric) in enumerate(content["edits"]):
        genes = tuples(Genes, f"edits.{k}.genes")
        lineage.past[g].edits.append(ManualEdit(index, why, genes, float(fitness), float(metric)))
    run.best = None if content["best"] is None else IndividualKey(*content["best"])
    run.solution = None if content["solution"] is None else IndividualKey(*content["solution"])
    for key in {run.best, run.solution, *lineage.pinned} - {None}:
        lineage.genome(key)
    run.restore_log(content["log"])


def _json_key(key: IndividualKey | None) -> list[int] | None:
    return None if key is None else [key.generation, key.index, key.edit]
