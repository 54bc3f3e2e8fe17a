"""`graphwright prune`, `search`, `orthogonalize` and `compress`: make a model smaller, or split its matrices."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphwright.cli.common import (
    Check,
    Command,
    Dir,
    Output,
    Overwrite,
    Prefer,
    Seed,
    argument,
    bar,
    flag,
    names_of,
    option,
    read_text,
)
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.models import Model
    from graphwright.models.export.receipt import Receipt
    from graphwright.structure import LearnOptions
    from graphwright.surgery import Calibration, CompressOptions, OrthogonalizeOptions, PruneOptions
    from graphwright.surgery.matrices import MatrixReport

Out = Annotated[Path | None, argument("OUT", "Directory to write; not needed with --dry-run.")]
Matrices = Annotated[str, option("PATTERN", "Matrices, by path.", "--where")]
Text = Annotated[str | None, option("FILE", "Calibration text; by default the help topics of Python.")]
Tokens = Annotated[int, option("N", "Calibration tokens; 0 measures no errors.", min=0)]
Context = Annotated[int, option("N", "Tokens per calibration window.", min=1)]
Workers = Annotated[str | None, option("N", "Run on the text by N processes, or on Ray: ray or ray://host:port.")]
DryRun = Annotated[bool, flag("--dry-run", "Print the report and write nothing.")]


@Command(
    "graphwright prune bundled smaller --tokens 512 --recipe units --no-time --check none --quiet",
    "graphwright.surgery:PruneOptions",
    timed="time",
)
def prune(
    directory: Dir,
    out: Out = None,
    target: Annotated[float, option("SHARE", "Share to remove, 0 to 1.")] = 0.3,
    of: Annotated[str, option("WHAT", "What the share counts: params, flops or bytes.")] = "params",
    check: Check = "auto",
    prefer: Prefer = "class",
    save: Annotated[bool, flag("--save", "Save a model with its journal for further edits; do not export.")] = False,
    text: Text = None,
    tokens: Annotated[int, option("N", "Calibration tokens.", min=1)] = 8192,
    context: Annotated[int, option("N", "Tokens per calibration window.", min=2)] = 512,
    workers: Workers = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    *,
    options: PruneOptions,
) -> Output:
    """Remove the least important units of a model, and export it.

    Units are scored on calibration text; the layers that read them are refitted by least squares. The report compares
    both models on held-out text.
    """
    from graphwright.surgery import Ratio
    from graphwright.surgery import prune as run

    goal = Ratio(target, of)  # pyright: ignore[reportArgumentType]  # it checks
    model, data, to = _open(directory, out, text, tokens, context, workers, seed, dry_run, overwrite)
    receipt = None
    with bar() as progress:
        plan = run(model, goal, data, dry_run=True, progress=progress, **asdict(replace(options, seed=seed)))
        if to is not None:
            plan.apply()
            plan.report.journal = model.program.journal.hash
            if save:
                model.save(to, overwrite=overwrite)
            else:
                how: dict[str, Any] = {"check": check, "prefer": prefer, "overwrite": overwrite, "timed": options.timed}
                receipt = model.export(to, progress=progress, **how)
    if to is None:
        return Output({"plan": plan.to_json()}, str(plan.report))
    facts, holds = {"out": str(to), "receipt": None}, ""
    if receipt is not None:
        facts["receipt"], holds = receipt.to_json(), _holds(receipt)
    return Output({"report": plan.to_json(), **facts}, f"{plan.report}\nwrote {to}{holds}")


@Command(
    'graphwright orthogonalize bundled split --where "layers.0.attn.{q,k}" --fold insert --tokens 0',
    "graphwright.surgery:OrthogonalizeOptions",
    hide="inplace",
)
def orthogonalize(
    directory: Dir,
    out: Out = None,
    where: Matrices = "layers.*.attn.{q,k,v,o}",
    method: Annotated[str, option("NAME", "polar, qr or newton_schulz.")] = "polar",
    text: Text = None,
    tokens: Tokens = 2048,
    context: Context = 256,
    workers: Workers = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    *,
    options: OrthogonalizeOptions,
) -> Output:
    """Make the columns or rows of matrices orthonormal.

    With --fold insert or absorb, the model keeps the second factor of each matrix and so computes the same function.
    """
    from graphwright.surgery import orthogonalize as run

    model, data, to = _open(directory, out, text, tokens, context, workers, seed, dry_run, overwrite)
    with bar() as progress:
        found = run(model, where, method, calibration=data, dry_run=dry_run, progress=progress, **asdict(options))
    return _replaced(found, model, to, overwrite)


@Command(
    "graphwright compress bundled smaller --where layers.0.mlp --method svd --budget ratio=0.3 --tokens 0",
    "graphwright.surgery:CompressOptions",
    hide="importance",
)
def compress(
    directory: Dir,
    out: Out = None,
    where: Matrices = "layers.*.mlp",
    method: Annotated[str, option("NAME", "best, svd, asvd, tt or tr.")] = "best",
    budget: Annotated[
        str, option("KIND=N", "error=N, energy=N, ratio=N (removed), params=N or bytes=N.")
    ] = "energy=0.99",
    text: Text = None,
    tokens: Tokens = 2048,
    context: Context = 256,
    workers: Workers = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    *,
    options: CompressOptions,
) -> Output:
    """Replace matrices by factors with fewer parameters.

    The report compares each matrix with truncated SVDs of equal size. A matrix that would not become smaller is kept.
    """
    from graphwright.surgery import compress as run

    wanted, given = budget_of(budget), asdict(options)
    model, data, to = _open(directory, out, text, tokens, context, workers, seed, dry_run, overwrite)
    with bar() as progress:
        found = run(model, where, method, wanted, calibration=data, dry_run=dry_run, progress=progress, **given)
    return _replaced(found, model, to, overwrite)


def _open(
    directory: str, out: Path | None, text: str | None, tokens: int, context: int, workers: str | None, seed: int,
    dry_run: bool, overwrite: bool,
) -> tuple[Model, Calibration | None, Path | None]:  # fmt: skip
    """Return the model, its calibration data (None for 0 tokens), and the directory to write (None for a dry run).

    Raises: UsageError if the directory to write is missing, and for invalid workers; the errors of `check_free` if it
        is in use.
    """
    from graphwright.files import check_free
    from graphwright.models import open
    from graphwright.surgery import Calibration

    to = None if dry_run else out
    if to is not None:
        check_free(to, overwrite)  # check before the work
    elif not dry_run:
        raise UsageError("the argument OUT is missing", fix="give a directory, or --dry-run")
    model, words = open(directory), None if text is None else read_text(text)
    return model, Calibration.of(model, words, tokens, context, seed, workers=workers) if tokens else None, to


def _holds(receipt: Receipt) -> str:
    """Describe what the exported files hold: their level and weights, and how to leave out zeros."""
    from graphwright.models.export.ladder import LEVELS

    cost = receipt.cost["bytes"]
    text = f", export level {receipt.level}, {cost['after']:,} bytes of weights"
    if LEVELS[receipt.level].true_size:
        return text
    need = f"{cost['program']:,}" if "program" in cost else "fewer"
    return f"{text} with zeros for removed weights; the program has {need} (--prefer size leaves the zeros out)"


def _replaced(found: MatrixReport, model: Model, to: Path | None, overwrite: bool) -> Output:
    """Save the edited model unless it is a dry run; return the report."""
    if to is None:
        return Output({**found.to_json(), "out": None}, str(found))
    model.save(to, overwrite=overwrite)
    wrote = f"wrote {to}, a saved model with its journal; for transformers: graphwright export {to} OUT"
    return Output({**found.to_json(), "out": str(to)}, f"{found}\n{wrote}")


def budget_of(text: str) -> Any:
    """Parse a budget `kind=number`. Raises: UsageError if it is invalid."""
    from graphwright import surgery

    kinds = {"error": float, "energy": float, "ratio": float, "params": int, "bytes": int}
    name, _, number = text.partition("=")
    try:
        value = kinds[name.strip()](number)
    except (KeyError, ValueError):
        known = ", ".join(f"{kind}=N" for kind in kinds)
        raise UsageError("cannot parse the budget", where="--budget", expected=known, got=text) from None
    return getattr(surgery, name.strip().title())(value)


@Command(
    "graphwright search bundled learned --units heads --steps 20 --lr 0.5 --check none --quiet",
    "graphwright.structure:LearnOptions",
    hide="held_out",
    gates="lr",
    params="weights",
)
def search(
    directory: Dir,
    out: Annotated[Path, argument("OUT", "Directory to write.")],
    units: Annotated[
        str, option("KINDS", "Units to choose from: heads, kv_groups, neurons, experts or layers; comma-separated.")
    ] = "heads,neurons",
    target: Annotated[float, option("SHARE", "Share of their parameters to keep.")] = 0.7,
    text: Annotated[Path | None, option("FILE", "Training text; by default the bundled one.")] = None,
    heal: Annotated[int, option("N", "Steps of distillation into the remaining weights.", min=0)] = 0,
    check: Check = "auto",
    prefer: Prefer = "class",
    overwrite: Overwrite = False,
    *,
    options: LearnOptions,
) -> Output:
    """Learn by gradients which units to keep, and export.

    Each unit gets a gate, and units whose gate closes are removed. The gates are trained by distillation from the model
    itself, under a budget that falls to --target. With --heal the remaining weights are then trained in the same way.
    Writes the checkpoint with its receipt to OUT, and a chart of the gates' probabilities by step to OUT.gates.svg.
    """
    from graphwright.files import atomic_write, check_free
    from graphwright.models import open
    from graphwright.models.export.export import ExportOptions, check_export
    from graphwright.structure import GatesCannotClose, learn
    from graphwright.structure.report import probabilities
    from graphwright.surgery import Calibration
    from graphwright.surgery import heal as distil

    check_free(out, overwrite)  # this and the next lines before the training
    named = out if out.name else out.absolute()
    drawn = named.with_name(f"{named.name}.gates.svg")  # not inside OUT: the receipt does not list it
    check_free(drawn, overwrite, file=True)
    words = None if text is None else read_text(text)
    model = open(directory)
    how: dict[str, Any] = {"check": check, "prefer": prefer, "overwrite": overwrite}
    check_export(model, out, ExportOptions(**how))
    with warnings.catch_warnings(record=True) as heard, bar() as progress:
        warnings.simplefilter("always", GatesCannotClose)
        found = learn(model, names_of(units), target, words, progress=progress, **asdict(options))
        healing, batch, seed = None, options.batch, options.seed
        if heal:
            windows = Calibration.of(model, words, heal * batch * options.window, options.window, seed)
            healing = distil(model.program, model.original, windows, heal, batch=batch, seed=seed, progress=progress)
        receipt = model.export(out, progress=progress, **how)
    for warning in heard:
        print(f"warning  {warning.message}", file=sys.stderr)
    gone = set(found.hardened.cut)
    picture = probabilities(found.probabilities, found.names, [name not in gone for name in found.names], options.steps)
    atomic_write(drawn, picture.encode())
    lines = [str(found), *([] if healing is None else [str(healing)])]
    lines.append(f"wrote {out}{_holds(receipt)}, and {drawn}")
    facts = {**found.to_json(), "healing": healing and healing.to_json(), "out": str(out), "receipt": receipt.to_json()}
    return Output(facts, "\n".join(lines))
