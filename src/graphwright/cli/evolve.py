"""`graphwright evolve TASK`: let a network find its structure; live table, resumable, champion with its family tree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from graphwright.cli.common import Debug, Json, Overwrite, Quiet, Seed, Threads, colours, emit_json, say, verb
from graphwright.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright evolve xor --seed 7 --out run")(evolve)


@verb
def evolve(
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK",
            help="xor, parity, two-moons, iris, digits, cartpole, double-pole, or a file.csv.",
            show_default=False,
        ),
    ] = None,
    own: Annotated[
        Path | None,
        typer.Option("--task", metavar="FILE.py", help="A task of your own: `task`, or a function that makes it."),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of a CSV: the column to predict.")] = None,
    generations: Annotated[int, typer.Option(metavar="N", min=1, help="Generations at most.")] = 300,
    evaluations: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Candidates at most.", show_default=False)
    ] = None,
    population: Annotated[int | None, typer.Option(metavar="N", min=2, help="Genomes of a generation.")] = None,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Train each candidate by gradients; few candidates.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Evolve whole layers, from one linear layer on, trained by gradients.")
    ] = False,
    delays: Annotated[bool, typer.Option("--delays", help="Half of the new links carry the step before.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run: written as it goes, with champion and pictures.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with a run that lies there.")] = None,
    overwrite: Overwrite = False,
    save_every: Annotated[int, typer.Option(metavar="N", min=1, help="Generations between two states.")] = 10,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs from N seeds, as distributions.", show_default=False)
    ] = None,
    lineage: Annotated[bool, typer.Option("--lineage", help="Show the champion's history of edits.")] = False,
    seed: Seed = 0,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let a network find its structure for a task, by NEAT.

    --hybrid trains candidates by gradients. With --out the run is kept and can be killed at any moment; --resume goes
    on from there, to the bit. --seeds tells how often the search succeeds, and at what cost.
    """
    from graphwright import evolve as ev

    if task is not None and own is not None:
        raise UsageError("two tasks", got=f"{task} and --task {own}")
    given = _own(own) if own is not None else _task(task, target)
    if seeds is not None and (resume is not None or out is not None):
        raise UsageError("runs from several seeds are not kept", got="--seeds with --out or --resume",
                         fix="--seed N --out DIR for one of them")  # fmt: skip
    if out is not None and (resume is None or not resume.resolve().is_relative_to(out.resolve())):
        _clear(out, overwrite)
    if resume is not None:
        asked = {"--population": population is not None, "--hybrid": hybrid, "--layers": layers, "--delays": delays,
                 "--seed": seed != 0}  # fmt: skip
        if any(asked.values()):
            raise UsageError("a run that goes on keeps its settings and seed", where=resume,
                             got=", ".join(name for name, given in asked.items() if given))  # fmt: skip
        run: Any = ev.resume(resume, given, threads=threads or 1)
        out = out or resume
    elif given is None:
        raise UsageError("a task is missing", expected=f"{', '.join(ev.tasks.TASKS)}, a file.csv, or --task FILE.py",
                         fix="graphwright evolve xor")  # fmt: skip
    else:
        start, settings = _search(
            given, {} if population is None else {"population": population}, layers, hybrid, delays
        )
        if seeds is not None:
            found = ev.over_seeds(given, start, settings, seeds=range(seed, seed + seeds), threads=threads or 1,
                                  test=not isinstance(given.split, str), max_generations=generations,
                                  max_evaluations=evaluations)  # fmt: skip
            emit_json(found.to_json()) if as_json else say(str(found))
            return
        run = ev.Evolution(given, start, settings, seed=seed, threads=threads or 1)
    state = None if out is None else out / "state"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        state = out if (out / "run.json").is_file() else state  # a run that Python saved
    try:
        with _table(quiet or as_json, run.task.metric, generations) as show:
            result = run.run(generations, evaluations, callback=show, save=state, save_every=save_every)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(state)) from None
    tested = None if isinstance(run.task.split, str) else result.test()
    if tested is not None and state is not None:
        run.save(state)  # that the test cases were read is kept too
    facts = result.to_json()
    if tested is not None:
        facts["metric"]["test"] = tested
    if out is not None:
        facts["out"] = _write(result, out)
    if as_json:
        emit_json(facts)
        return
    say(str(result))
    if "test" in facts["metric"]:
        say(f"  test {facts['metric']['name']} {facts['metric']['test']:.4g}")
    if lineage:
        for birth in _line(result):
            say(f"  {birth}")
    if out is not None:
        say(f"wrote {out}: {', '.join(facts['out'])}")


def _clear(out: Path, overwrite: bool) -> None:
    """Make room for a run. Raises: DestinationExists for a place that holds something."""
    import shutil

    from graphwright.files.directory import check_free
    from graphwright.files.errors import DestinationExists

    if not overwrite and ((out / "state").is_dir() or (out / "run.json").is_file()):
        raise DestinationExists(
            "a run lies there", where=out, fix=f"--resume {out} goes on with it, --overwrite begins anew"
        )
    check_free(out, overwrite)
    for state in out.glob("state*"):
        shutil.rmtree(state)


def _kept(state: Path | None) -> str:
    """What is left of a run that was interrupted."""
    if state is None:
        return "nothing is kept; --out DIR would keep the run"
    if not (state / "run.json").is_file():
        return "nothing is kept yet; --save-every N says how often it is"
    count = len(json.loads((state / "run.json").read_text(encoding="utf-8"))["log"])
    return f"{count} generations are kept in {state}"


def _task(task: str | None, target: str | None) -> Any:
    from graphwright.evolve import tasks

    if task is None:
        return None
    if task.endswith(".csv"):
        if target is None:
            raise UsageError("a CSV needs the column to predict", where=task, fix="--target COLUMN")
        return tasks.csv(task, target)
    return tasks.named(task)


def _own(path: Path) -> Any:
    """The task of a Python file. Raises: UsageError for a file that fails or makes none."""
    from runpy import run_path
    from traceback import extract_tb

    if not path.is_file():
        raise UsageError("no such file", where=path)
    try:
        made = run_path(str(path)).get("task")
        made = made() if callable(made) else made
    except Exception as error:
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else path
        raise UsageError("this file fails", where=where, got=f"{type(error).__name__}: {error}") from error
    if not hasattr(made, "score"):
        raise UsageError("this file makes no task", where=path, got=type(made).__name__,
                         expected="task = evolve.Task(...), or def task(): return evolve.Task(...)")  # fmt: skip
    return made


def _search(task: Any, changes: dict[str, Any], layers: bool, hybrid: bool, delays: bool) -> tuple[Any, Any]:
    """What evolves, and how."""
    from graphwright import evolve as ev

    if not layers:
        return ev.scalar(), _neurons(task, changes, hybrid, delays)
    if hybrid or delays:
        raise UsageError("--layers is by gradients, and without memory", got="--hybrid or --delays as well")
    if not isinstance(task, ev.Task):
        raise UsageError("layers evolve on data", got=task.name, fix="without --layers")
    return ev.blocks(_linear(task)), ev.Layers(**changes)


def _neurons(task: Any, changes: dict[str, Any], hybrid: bool, delays: bool) -> Any:
    """Settings for neurons on a task."""
    from graphwright import evolve as ev

    if delays or task.sequence:
        changes["delays"] = 0.5
    if isinstance(task, ev.Task) and task.loss == "mse":  # numbers of any size, not shares
        changes["output"] = "identity"
    return ev.Hybrid(**changes) if hybrid else ev.NEAT(**changes)


def _linear(task: Any) -> Any:
    """One linear layer of zeros from the inputs of a task to its outputs, at each step of a sequence."""
    import numpy as np

    from graphwright.program import Builder

    b = Builder(task.name)
    weight = b.param("out.weight", np.zeros((task.outputs, task.inputs), np.float32))
    bias = b.param("out.bias", np.zeros(task.outputs, np.float32))
    cases = (min(64, len(task.train.x)), task.steps) if task.sequence else ("B",)
    b.output(b.linear(b.input("x", (*cases, task.inputs)), weight, bias, name="out"), "y")
    return b.build()


def _line(result: Any) -> list[Any]:
    """The champion's mothers, without those that changed nothing."""
    from graphwright.evolve import LayerResult

    if isinstance(result, LayerResult):
        return result.evolution.line(result.best.number)
    line = result.lineage.path(result.best.key)
    return [b for b in line if b.mutation != "copy" or b.other_parent is not None or b.fitter_parent is None]


def _write(result: Any, out: Path) -> list[str]:
    """The champion as a saved program, the pictures, what inputs are scaled by, and what outputs mean."""
    from graphwright.evolve import LayerResult, pictures

    best, task = result.best, result.evolution.task
    program = best.program
    program.save(out / "champion", overwrite=True)
    if isinstance(result, LayerResult):
        texts = {"champion.svg": program.to_svg(), "front.svg": pictures.front(result)}
    else:
        texts = {
            "champion.svg": pictures.network(best.genome, result.lineage.names),
            "fitness.svg": pictures.fitness(result.evolution.log),
            "species.svg": pictures.species(result.evolution.log),
            "lineage.html": result.lineage.to_html(key=best.key),
        }
    scale = getattr(task, "scale", None)
    if scale is not None and (scale != [[0.0], [1.0]]).any():
        columns = {n: {"mean": m, "std": s} for n, m, s in zip(task.names, *scale.tolist(), strict=True)}
        texts["inputs.json"] = json.dumps(columns, indent=1) + "\n"
    if getattr(task, "meaning", None) is not None:
        texts["outputs.json"] = json.dumps(task.meaning, indent=1) + "\n"
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return ["champion/", *texts]


@contextmanager
def _table(quiet: bool, metric: str, generations: int) -> Iterator[Callable[[Any], None] | None]:
    """A table on stderr that follows the run; None when nobody would see it."""
    import sys

    if quiet or not colours(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    def draw(run: Any) -> Table:
        table = Table(box=None, pad_edge=False)
        columns = _columns(run, metric)
        for name in (*columns, "evaluations/s", "left"):
            table.add_column(name, justify="right")
        for line in run.log[-8:]:
            last = line is run.log[-1]
            rate = run.counters.evaluations / max(run.counters.seconds, 1e-9)
            left = run.counters.seconds / len(run.log) * (generations - len(run.log))
            cells = (show(line) for show in columns.values())
            table.add_row(*cells, f"{rate:,.0f}" if last else "", f"{left:,.0f} s" if last else "")
        return table

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:
        yield lambda run: live.update(draw(run))


def _columns(run: Any, metric: str) -> dict[str, Callable[[Any], str]]:
    """What a line of the log shows, by title."""
    from graphwright.evolve.layers.engine import LayerEvolution

    common: dict[str, Callable[[Any], str]] = {
        "generation": lambda line: str(line.generation),
        metric if isinstance(run, LayerEvolution) else "best": lambda line: f"{line.best:.4g}",
        "median": lambda line: f"{line.median:.4g}",
    }
    if isinstance(run, LayerEvolution):
        more: dict[str, Callable[[Any], str]] = {
            "parameters": lambda line: f"{line.params:,}",
            "front": lambda line: str(line.archive),
        }
    else:
        more = {
            metric: lambda line: f"{line.metric:.4g}",
            "species": lambda line: str(len(line.species)),
            "hidden": lambda line: str(line.hidden),
            "links": lambda line: str(line.links),
        }
    return {**common, **more}
