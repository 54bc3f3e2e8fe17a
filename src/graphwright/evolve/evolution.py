"""The entry points of evolution: start a run on a task, resume a saved run, or load the champion of a saved run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

from graphwright.errors import GraphwrightError, MissingExtra, UsageError, shown
from graphwright.evolve import saving, tasks
from graphwright.evolve.errors import RegistryConflict, ResumeMismatch, TaskError
from graphwright.evolve.layers.engine import LayerEvolution
from graphwright.evolve.neurons.engine import NeuronEvolution
from graphwright.evolve.neurons.island_run import IslandEvolution
from graphwright.evolve.settings import NEAT, Islands, Layers, SavedSettings
from graphwright.files import StrPath
from graphwright.program import Program, load
from graphwright.workers import Workers


class scalar(NamedTuple):
    """The start of a run on neurons: the first genomes only have links from inputs and bias to outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class blocks:
    """The start of a run on layers: a program with one input [batch, ...] and one output [batch, outputs].

    For classification the output must be logits.
    """

    program: Program

    def __post_init__(self) -> None:
        if not isinstance(self.program, Program):
            raise UsageError("the argument of evolve.blocks is not a Program", got=repr(self.program)[:80],
                             fix="pass gw.Builder(...).build(), or a traced program")  # fmt: skip


class Evolution:
    """A run of evolution on one task: a `NeuronEvolution`, an `IslandEvolution` of several, or a `LayerEvolution`.

    Args:
        task: a task such as `evolve.tasks.xor()`, or a `Task` of your own.
        start: `evolve.scalar()` (the default) or `evolve.blocks(program)`.
        settings: `NEAT(...)` or `Hybrid(...)` for neurons, `Layers(...)` for layers.
        seed: seed of all random numbers.
        threads: number of threads of native calls, and of each op when layers are trained: sums of more than 32,768
            numbers depend on it in their last bits, nothing else does.
        workers: workers that train and score candidates: a number of processes, "ray" or "ray://host:port", or a pool
            of `graphwright.workers`, which stays open. Results do not depend on it. None for no workers.
        islands: populations that evolve apart and exchange genomes; None for one population.
    Raises: LimitTooSmall if the start exceeds the limits of the settings; TaskError if the task does not fit the start;
        UsageError for wrong settings.
    """

    @overload
    def __new__(
        cls, task: Any, start: scalar | None = None, settings: NEAT | None = None, *, seed: int = 0, threads: int = 1,
        workers: Workers = None, islands: None = None,
    ) -> NeuronEvolution: ...  # fmt: skip
    @overload
    def __new__(
        cls, task: Any, start: scalar | None = None, settings: NEAT | None = None, *, seed: int = 0, threads: int = 1,
        workers: Workers = None, islands: Islands,
    ) -> IslandEvolution: ...  # fmt: skip
    @overload
    def __new__(
        cls, task: Any, start: blocks, settings: Layers | None = None, *, seed: int = 0, threads: int = 1,
        workers: Workers = None,
    ) -> LayerEvolution: ...  # fmt: skip
    def __new__(
        cls, task: Any, start: Any = None, settings: Any = None, *, seed: int = 0, threads: int = 1,
        workers: Workers = None, islands: Islands | None = None,
    ) -> Any:  # fmt: skip
        """Create a `LayerEvolution` if `start` is `blocks(...)`, else a `NeuronEvolution`."""
        if not hasattr(task, "score"):
            raise TaskError("the first argument is not a task", got=repr(task)[:80],
                            expected="evolve.tasks.xor(), or an evolve.Task")  # fmt: skip
        if islands is not None and (isinstance(start, blocks) or not isinstance(islands, Islands)):
            what = "the argument `islands` has the wrong type, or the run is on layers"
            raise UsageError(what, got=shown(islands), expected="evolve.Islands(...) for a run on neurons")
        if isinstance(start, blocks):
            return LayerEvolution(task, start.program, settings, seed=seed, threads=threads, workers=workers)
        if start is not None and not isinstance(start, scalar):
            raise UsageError("the argument `start` has the wrong type", got=repr(start)[:80],
                             expected="evolve.scalar() or evolve.blocks(program)")  # fmt: skip
        options: dict[str, Any] = {"seed": seed, "threads": threads, "workers": workers}
        if islands is not None:
            return IslandEvolution(task, settings, islands, **options)
        return NeuronEvolution(task, settings, **options)


def resume(directory: StrPath, task: Any = None, *, threads: int = 1, workers: Workers = None) -> Any:
    """Load a saved run so that it can continue.

    Args:
        directory: directory written by `Evolution.save`, or by the command line (whose subdirectory `state` is read).
        task: the task of the run; may be omitted for tasks that the command line knows by name.
        threads, workers: as for `Evolution`; they need not be those of the saved run.
    Raises: ResumeMismatch if the task or schema differs or a file is damaged (the error names an older saved state, if
        any); RegistryConflict if a gene was saved with two innovation numbers; UnreadableFile if there is no saved run.
    """
    folder = Path(directory)
    folder = folder / "state" if (folder / "state" / "run.json").is_file() else folder
    content = saving.read_state(folder)
    try:
        return _resumed(folder, content, task, {"threads": threads, "workers": workers})
    except (ResumeMismatch, RegistryConflict, MissingExtra):
        raise
    except GraphwrightError as error:  # from an array or a saved program
        where = folder if error.where is None else error.where
        raise ResumeMismatch(f"a file of the saved run is damaged: {error.what}", where=where, expected=error.expected,
                             got=error.got, fix=saving.previous_state(folder)) from error  # fmt: skip
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a value is missing or mistyped
        got = f"{type(error).__name__}: {error}"
        raise ResumeMismatch("run.json is damaged", where=folder, got=got, fix=saving.previous_state(folder)) from error


def _resumed(
    folder: Path, content: Mapping[str, Any], task: Any, options: dict[str, Any]
) -> NeuronEvolution | LayerEvolution | IslandEvolution:
    if task is None:
        if content["task"] not in tasks.TASKS:
            raise ResumeMismatch("no task was given, and the task of the saved run is not built in", where=folder,
                                 got=content["task"],
                                 fix="resume(directory, task); on the command line add FILE.csv --target COLUMN, or "
                                     "--task FILE.py, to --resume DIR")  # fmt: skip
        task = tasks.named(content["task"])
    if task.hash() != content["task_hash"]:
        same = task.name == content["task"]
        raise ResumeMismatch("the saved run belongs to a different task", where=folder, expected=content["task"],
                             got=f"{task.name} with different data, split or target" if same else task.name,
                             fix="pass the task that the run was saved with: same data, split and target")  # fmt: skip
    settings, options = SavedSettings.from_json(content["settings"]), {"seed": content["seed"], **options}
    run: NeuronEvolution | LayerEvolution | IslandEvolution
    if "islands" in content:
        run = IslandEvolution(task, settings, Islands(**content["islands"]), **options)
        saving.restore_islands(run, folder, content)
    elif isinstance(settings, Layers):
        run = LayerEvolution(task, load(folder / "start"), settings, **options)
        saving.restore_layers(run, folder, content)
    else:
        run = NeuronEvolution(task, settings, **options)
        saving.restore_neurons(run, folder, content)
    saving.read_run(folder, run, content)
    return run


def load_best(directory: StrPath, task: Any = None) -> Any:
    """Load the champion of a saved run: an `Individual` of a run on neurons, or a `Candidate` of a run on layers."""
    run = resume(directory, task)
    if not isinstance(run, NeuronEvolution):
        return run.champion()
    key = run.solution or run.best
    if key is None:
        raise ResumeMismatch("the saved run has no champion yet", where=directory, fix="run it for a generation first")
    return run.individual(key)
