"""`graphwright evolve TASK`: evolve a network for a task, resumable, with a live table and pictures of the champion."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from graphwright.cli.common import Command, Output, Overwrite, Seed, argument, bar, flag, option
from graphwright.errors import UsageError
from graphwright.progress import Progress


@Command("graphwright evolve xor --seed 7 --out run")
def evolve(
    task: Annotated[
        str | None, argument("TASK", "xor, parity, two-moons, iris, digits, cartpole, double-pole, or a file.csv.")
    ] = None,
    own: Annotated[Path | None, option("FILE.py", "Python file that defines `task`.", "--task")] = None,
    target: Annotated[str | None, option("COLUMN", "Column of a CSV to predict.")] = None,
    generations: Annotated[int, option("N", "Maximum number of generations.", min=1)] = 300,
    evaluations: Annotated[int | None, option("N", "Maximum number of candidates.", min=1)] = None,
    population: Annotated[int | None, option("N", "Genomes per generation.", min=2)] = None,
    hybrid: Annotated[bool, flag("--hybrid", "Train each genome by gradients, with few genomes.")] = False,
    layers: Annotated[bool, flag("--layers", "Evolve layers from one linear one, trained by gradients.")] = False,
    delays: Annotated[bool, flag("--delays", "Half of the new links carry the value of the previous step.")] = False,
    out: Annotated[Path | None, option("DIR", "Directory for the run, its champion and pictures.")] = None,
    resume: Annotated[Path | None, option("DIR", "Resume the run in this directory.")] = None,
    overwrite: Overwrite = False,
    save_every: Annotated[int, option("N", "Generations between two saved states.", min=1)] = 10,
    seeds: Annotated[int | None, option("N", "Run from N seeds and report distributions.", min=1)] = None,
    workers: Annotated[
        str | None, option("N", "Train and score by N processes, or on Ray: ray or ray://host:port.")
    ] = None,
    islands: Annotated[int, option("K", "Populations that evolve apart and exchange genomes.", min=1)] = 1,
    migrate_every: Annotated[int, option("N", "Generations between two migrations.", min=1)] = 10,
    migrants: Annotated[int, option("N", "Genomes that an island sends in a migration.", min=0)] = 1,
    lineage: Annotated[bool, flag("--lineage", "Print the ancestors of the champion.")] = False,
    seed: Seed = 0,
    *,
    threads: int,
) -> Output:
    """Evolve a network for a task by NEAT.

    --hybrid also trains genomes by gradients. With --out the run is saved and may be killed at any time; --resume
    continues it with identical results. --seeds reports how often the search succeeds, and how much it costs. Results
    do not depend on --workers.
    """
    from graphwright import evolve as ev
    from graphwright.files import writing
    from graphwright.workers import pool_of

    if task is not None and own is not None:
        raise UsageError("TASK and --task are both given", got=f"{task} and --task {own}", fix="give one of them")
    given = _task_of_file(own) if own is not None else None if task is None else _task(task, target)
    if seeds is not None and (resume is not None or out is not None):
        raise UsageError("cannot save or resume runs from several seeds", got="--seeds with --out or --resume",
                         fix="--seed N --out DIR for one of them")  # fmt: skip
    if islands > 1 and (layers or seeds is not None):
        raise UsageError(
            "islands are for one run on neurons", got=f"--islands with {'--layers' if layers else '--seeds'}"
        )
    if workers is not None:
        pool_of(workers)  # refuses other values before anything is written
    if out is not None and (resume is None or not resume.resolve().is_relative_to(out.resolve())):
        _clear(out, overwrite)
    if resume is not None:
        asked = {"--population": population is not None, "--hybrid": hybrid, "--layers": layers, "--delays": delays,
                 "--seed": seed != 0, "--islands": islands > 1}  # fmt: skip
        if any(asked.values()):
            raise UsageError("cannot change the settings or the seed of a saved run", where=resume,
                             got=", ".join(name for name, given in asked.items() if given))  # fmt: skip
        run: Any = ev.resume(resume, given, threads=threads or 1, workers=workers)
        out = out or resume
    elif given is None:
        known = f"{', '.join(ev.tasks.TASKS)}, a file.csv, or --task FILE.py"
        raise UsageError("the argument TASK is missing", expected=known, fix="graphwright evolve xor")
    else:
        changes = {} if population is None else {"population": population}
        start, settings = _search(given, changes, layers, hybrid, delays)
        if seeds is not None:
            found = ev.over_seeds(given, start, settings, seeds=range(seed, seed + seeds), threads=threads or 1,
                                  workers=workers, test=not isinstance(given.split, str),
                                  max_generations=generations, max_evaluations=evaluations)  # fmt: skip
            return Output(found.to_json(), str(found))
        apart = ev.Islands(islands, migrate_every, migrants) if islands > 1 else None
        run = ev.Evolution(given, start, settings, seed=seed, threads=threads or 1, workers=workers, islands=apart)
    state = None if out is None else out / "state"
    if out is not None:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        state = out if (out / "run.json").is_file() else state  # a run that was saved from Python
    try:
        with bar() as progress:
            show = None if progress is None else lambda run: progress(_progress(run, generations))
            result = run.run(generations, evaluations, callback=show, save=state, save_every=save_every)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_saved(state)) from None
    tested = None if isinstance(run.task.split, str) else result.test()
    if tested is not None and state is not None:
        run.save(state)  # with the count of test reads
    facts, lines = result.to_json(), [str(result)]
    if tested is not None:
        facts["metric"]["test"] = tested
    if "test" in facts["metric"]:
        lines.append(f"  test {facts['metric']['name']} {facts['metric']['test']:.4g}")
    if lineage:
        lines += [f"  {birth}" for birth in _ancestors(result)]
    if out is not None:
        facts["out"] = _write(result, out)
        lines.append(f"wrote {out}: {', '.join(facts['out'])}")
    return Output(facts, "\n".join(lines))


def _clear(out: Path, overwrite: bool) -> None:
    """Remove a saved run from its directory. Raises: DestinationExists if it is in use and `overwrite` is False."""
    from graphwright.files import DestinationExists, check_free, writing

    if not overwrite and ((out / "state").is_dir() or (out / "run.json").is_file()):
        fix = f"--resume {out} continues it, --overwrite replaces it"
        raise DestinationExists("the directory already contains a run", where=out, fix=fix)
    check_free(out, overwrite)
    with writing(out):
        for state in out.glob("state*"):
            shutil.rmtree(state)


def _saved(state: Path | None) -> str:
    """Return a message that states what an interrupted run saved in the directory `state`, if anything."""
    if state is None:
        return "nothing was saved; use --out DIR to save the run"
    if not (state / "run.json").is_file():
        return "nothing was saved yet; --save-every N sets how often"
    count = len(json.loads((state / "run.json").read_text(encoding="utf-8"))["log"])
    return f"{count} generations are saved in {state}"


def _task(task: str, target: str | None) -> Any:
    from graphwright.evolve import tasks

    if not task.endswith(".csv"):
        return tasks.named(task)
    if target is None:
        raise UsageError("no target column was given for the CSV file", where=task, fix="--target COLUMN")
    return tasks.csv(task, target)


def _task_of_file(path: Path) -> Any:
    """Load the task that a Python file defines. Raises: UsageError if the file is missing, fails or defines no task."""
    from traceback import extract_tb

    if not path.is_file():
        raise UsageError("the task file does not exist", where=path)
    try:
        made = vars(_module(path)).get("task")
        made = made() if callable(made) else made
    except Exception as error:
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
        where, got = f"{path}:{lines[-1]}" if lines else path, f"{type(error).__name__}: {error}"
        raise UsageError("the task file raised an error", where=where, got=got) from error
    if not hasattr(made, "score"):
        raise UsageError("the task file defines no task", where=path, got=type(made).__name__,
                         expected="task = evolve.Task(...), or def task(): return evolve.Task(...)")  # fmt: skip
    return made


def _module(path: Path) -> ModuleType:
    """Run a Python file as a module, which worker processes can import by its name unless another one has it."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    if sys.modules.setdefault(path.stem, module) is module:
        sys.path.insert(0, str(path.resolve().parent))
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except BaseException:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise
    return module


def _search(task: Any, changes: dict[str, Any], layers: bool, hybrid: bool, delays: bool) -> tuple[Any, Any]:
    """Return the initial genome and the settings of a run. Raises: UsageError if the options conflict."""
    from graphwright import evolve as ev

    if layers:
        if hybrid or delays:
            raise UsageError("--layers cannot be combined with --hybrid or --delays", fix="give one of them")
        if not isinstance(task, ev.Task):
            raise UsageError("--layers was given for a task without data", got=task.name, fix="run without --layers")
        return ev.blocks(_linear(task)), ev.Layers(**changes)
    if delays or task.sequence:
        changes["delays"] = 0.5
    if isinstance(task, ev.Task) and task.loss == "mse":  # targets of any size
        changes["output"] = "identity"
    return ev.scalar(), ev.Hybrid(**changes) if hybrid else ev.NEAT(**changes)


def _linear(task: Any) -> Any:
    """Build one linear layer of zeros from the inputs of a task to its outputs, applied to each step of a sequence."""
    import numpy as np

    from graphwright.program import Builder

    b = Builder(task.name)
    weight = b.param("out.weight", np.zeros((task.outputs, task.inputs), np.float32))
    bias = b.param("out.bias", np.zeros(task.outputs, np.float32))
    cases = (min(64, len(task.train.x)), task.steps) if task.sequence else ("B",)
    b.output(b.linear(b.input("x", (*cases, task.inputs)), weight, bias, name="out"), "y")
    return b.build()


def _ancestors(result: Any) -> list[Any]:
    """Return the ancestors of the champion, without unchanged copies."""
    from graphwright.evolve import LayerResult

    if isinstance(result, LayerResult):
        return result.evolution.line(result.best.number)
    line = result.lineage.path(result.best.key)
    return [b for b in line if b.mutation != "copy" or b.other_parent is not None or b.fitter_parent is None]


def _write(result: Any, out: Path) -> list[str]:
    """Write the champion, pictures, the scale of inputs and the meaning of outputs; return the names of the files."""
    from graphwright.evolve import IslandResult, LayerResult, pictures
    from graphwright.files import atomic_write

    best, task, run = result.best, result.evolution.task, result.evolution
    log = run.runs[result.island].log if isinstance(result, IslandResult) else run.log
    program = best.program
    program.save(out / "champion", overwrite=True)
    if isinstance(result, LayerResult):
        texts = {"champion.svg": program.to_svg(), "front.svg": pictures.front(result)}
    else:
        texts = {
            "champion.svg": pictures.network(best.genome, result.lineage.names),
            "fitness.svg": pictures.fitness(log),
            "species.svg": pictures.species(log),
            "lineage.html": result.lineage.to_html(key=best.key),
        }
    scale = getattr(task, "scale", None)
    if scale is not None and (scale != [[0.0], [1.0]]).any():
        columns = {n: {"mean": m, "std": s} for n, m, s in zip(task.names, *scale.tolist(), strict=True)}
        texts["inputs.json"] = json.dumps(columns, indent=1) + "\n"
    if getattr(task, "meaning", None) is not None:
        texts["outputs.json"] = json.dumps(task.meaning, indent=1) + "\n"
    for name, text in texts.items():
        atomic_write(out / name, text.encode())
    return ["champion/", *texts]


def _progress(run: Any, generations: int) -> Progress:
    """Return the progress of a run, with its last generations as a table."""
    from graphwright.evolve import IslandEvolution, LayerEvolution

    layers, metric, table = isinstance(run, LayerEvolution), run.task.metric, {}
    for line in run.log[-8:]:
        row = table[f"generation {line.generation}"] = {metric if layers else "best": line.best, "median": line.median}
        if layers:
            row |= {"parameters": line.params, "front": line.archive}
        elif isinstance(run, IslandEvolution):
            row |= {metric: line.metric} | {f"island {i}": best for i, best in enumerate(line.islands)}
        else:
            row |= {metric: line.metric, "species": len(line.species), "hidden": line.hidden, "links": line.links}
    rate = run.counters.evaluations / max(run.counters.seconds, 1e-9)
    return Progress("evolving", len(run.log), generations, {"evaluations/s": rate}, table)
