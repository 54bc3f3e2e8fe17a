"""`graphwright prune`, `search`, `orthogonalize` and `compress`: make a model smaller, or split its matrices."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphwright.cli.common import (
    Check,
    Dir,
    OptionTable,
    Output,
    Overwrite,
    Prefer,
    Seed,
    argument,
    bar,
    command,
    flag,
    names_of,
    option,
    read_text,
)
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.models import Model

Out = Annotated[Path | None, argument("OUT", "Directory to write; not needed with --dry-run.")]
Matrices = Annotated[str, option("PATTERN", "Matrices, by path.", "--where")]


def _shared(tokens: int, context: int, least: int = 0) -> OptionTable:
    """Return the options that `prune`, `orthogonalize` and `compress` share.

    Args:
        tokens, context: default sizes of the calibration data.
        least: the smallest number of tokens that is allowed.
    """
    return {
        "text": (None, option("FILE", "Calibration text; by default the help topics of Python.")),
        "tokens": (tokens, option("N", f"Calibration tokens{'' if least else '; 0 measures no errors'}.", min=least)),
        "context": (context, option("N", "Tokens per calibration window.", min=1 + least)),
        "seed": (0, option("N", "Seed of all random numbers.")),
        "dry_run": (False, flag("--dry-run", "Print the report and write nothing.")),
        "overwrite": (False, flag("--overwrite", "Replace existing files.")),
    }


@command(
    "graphwright prune bundled smaller --tokens 512 --recipe units --no-time --check none --quiet",
    recipe=("default", option("NAME", "What to remove: units, modules, or default (both, where that is better).")),
    method=("greedy", option("SCORE", "Score of a unit: greedy, obs, wanda, magnitude, taylor or random.")),
    where=(None, option("PATTERN", "Modules that may be pruned, by path; by default the layers.")),
    round_to=(1, option("N", "Round sizes to multiples of N.", min=1)),
    **_shared(8192, 512, 1),
)
def prune(
    directory: Dir,
    out: Out = None,
    target: Annotated[float, option("SHARE", "Share to remove, 0 to 1.")] = 0.3,
    of: Annotated[str, option("WHAT", "What the share counts: params, flops or bytes.")] = "params",
    kinds: Annotated[
        str,
        option("KINDS", "Units to remove: neurons, channels, head_dim, kv_groups, queries or heads; comma-separated."),
    ] = "neurons,channels,units",
    time: Annotated[bool, flag("--time/--no-time", "Measure the time per token.")] = True,
    check: Check = "auto",
    save: Annotated[bool, flag("--save", "Save a model with its journal for further edits; do not export.")] = False,
    **options: Any,
) -> Output:
    """Remove the least important units of a model, and export it.

    Units are scored on calibration text; the layers that read them are refitted by least squares. The report compares
    both models on held-out text.
    """
    from graphwright.surgery import Ratio
    from graphwright.surgery import prune as run

    goal = Ratio(target, of)  # pyright: ignore[reportArgumentType]  # it checks
    seed, overwrite = options["seed"], options["overwrite"]
    model, data, to = _open(directory, out, options)
    receipt = None
    with bar() as progress:
        plan = run(
            model, goal, data, dry_run=True, kinds=names_of(kinds), timed=time, seed=seed, progress=progress, **options
        )
        if to is not None:
            plan.apply()
            plan.report.journal = model.program.journal.hash
            if save:
                model.save(to, overwrite=overwrite)
            else:
                receipt = model.export(to, check=check, overwrite=overwrite, progress=progress)
    if to is None:
        return Output({"plan": plan.to_json()}, str(plan.report))
    level, facts = ("", None) if receipt is None else (f", export level {receipt.level}", receipt.to_json())
    written = {"out": str(to), "receipt": facts}
    return Output({"report": plan.to_json(), **written}, f"{plan.report}\nwrote {to}{level}")


@command(
    'graphwright orthogonalize bundled split --where "layers.0.attn.{q,k}" --fold insert --tokens 0',
    per=("matrix", option("WHAT", "Make each whole matrix orthogonal, or the part of each head: matrix or head.")),
    fold=("none", option("HOW", "Use of the other factor: none, insert (exact), absorb (exact, per head) or scale.")),
    special=(False, flag("--special", "Use the nearest rotation of square matrices.")),
    **_shared(2048, 256),
)
def orthogonalize(
    directory: Dir,
    out: Out = None,
    where: Matrices = "layers.*.attn.{q,k,v,o}",
    method: Annotated[str, option("NAME", "polar, qr or newton_schulz.")] = "polar",
    **options: Any,
) -> Output:
    """Make the columns or rows of matrices orthonormal.

    With --fold insert or absorb, the model keeps the second factor of each matrix and so computes the same function.
    """
    from graphwright.surgery import orthogonalize as run

    return _edited(run, directory, out, where, method, **options)


@command(
    "graphwright compress bundled smaller --where layers.0.mlp --method svd --budget ratio=0.3 --tokens 0",
    order=(3, option("N", "Modes of tensor trains and rings.", min=2)),
    sweeps=(0, option("N", "Sweeps of alternating least squares.", min=0)),
    min_dim=(64, option("N", "Leave matrices with a smaller side unchanged.", min=1)),
    **_shared(2048, 256),
)
def compress(
    directory: Dir,
    out: Out = None,
    where: Matrices = "layers.*.mlp",
    method: Annotated[str, option("NAME", "best, svd, asvd, tt or tr.")] = "best",
    budget: Annotated[
        str, option("KIND=N", "error=N, energy=N, ratio=N (removed), params=N or bytes=N.")
    ] = "energy=0.99",
    **options: Any,
) -> Output:
    """Replace matrices by factors with fewer parameters.

    The report compares each matrix with truncated SVDs of equal size. A matrix that would not become smaller is kept.
    """
    from graphwright.surgery import compress as run

    return _edited(run, directory, out, where, method, budget_of(budget), **options)


def _edited(run: Callable[..., Any], directory: str, out: Path | None, *args: Any, **options: Any) -> Output:
    """Call `run`, which replaces matrices of the model, and save the edited model unless it is a dry run."""
    dry_run, overwrite = options["dry_run"], options["overwrite"]
    model, data, to = _open(directory, out, options)
    with bar() as progress:
        found = run(model, *args, calibration=data, dry_run=dry_run, progress=progress, **options)
    if to is not None:
        model.save(to, overwrite=overwrite)
    return Output({**found.to_json(), "out": None if to is None else str(to)}, str(found))


def _open(directory: str, out: Path | None, options: dict[str, Any]) -> tuple[Model, Any, Path | None]:
    """Return the model, its calibration data (None for 0 tokens), and the directory to write (None for a dry run).

    Args:
        options: the options of `_shared` are removed from it.
    Raises: UsageError if the directory to write is missing, the errors of `check_free` if it is in use.
    """
    from graphwright.files import check_free
    from graphwright.models import open
    from graphwright.surgery import Calibration

    text, tokens, context, seed, dry_run, overwrite = (options.pop(name) for name in _shared(0, 0))
    to = None if dry_run else out
    if to is not None:
        check_free(to, overwrite)  # check before the work
    elif not dry_run:
        raise UsageError("the argument OUT is missing", fix="give a directory, or --dry-run")
    model, words = open(directory), None if text is None else read_text(text)
    data = Calibration.of(model, words, max_tokens=tokens, context=context, seed=seed) if tokens else None
    return model, data, to


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


@command(
    "graphwright search bundled learned --units heads --steps 20 --lr 0.5 --check none --quiet",
    round_to=(16, option("N", "Round sizes of long axes to multiples of N.", min=1)),
)
def search(
    directory: Dir,
    out: Annotated[Path, argument("OUT", "Directory to write.")],
    units: Annotated[
        str, option("KINDS", "Units to choose from: heads, kv_groups, neurons, experts or layers; comma-separated.")
    ] = "heads,neurons",
    target: Annotated[float, option("SHARE", "Share of their parameters to keep.")] = 0.7,
    text: Annotated[Path | None, option("FILE", "Training text; by default the bundled one.")] = None,
    steps: Annotated[int, option("N", "Training steps.", min=1)] = 300,
    batch: Annotated[int, option("N", "Windows per step.", min=1)] = 8,
    window: Annotated[int, option("N", "Tokens per window.", min=2)] = 128,
    lr: Annotated[float, option("RATE", "Learning rate of the gates.")] = 0.05,
    weights: Annotated[float, option("RATE", "Learning rate of the weights; 0 freezes them.")] = 0.0,
    heal: Annotated[int, option("N", "Steps of distillation into the remaining weights.", min=0)] = 0,
    check: Check = "auto",
    prefer: Prefer = "original",
    overwrite: Overwrite = False,
    seed: Seed = 0,
    **options: Any,
) -> Output:
    """Learn by gradients which units to keep, and export.

    Each unit gets a gate, and units whose gate closes are removed. The gates are trained by distillation from the model
    itself, under a budget that falls to --target. With --heal the remaining weights are then trained in the same way.
    Writes the checkpoint with its receipt to OUT, and a chart of the gates' probabilities by step to OUT.gates.svg.
    """
    from graphwright.files import check_free
    from graphwright.models import open
    from graphwright.models.export.export import ExportOptions, check_export
    from graphwright.models.export.levels import LEVELS
    from graphwright.structure import GatesCannotClose, learn
    from graphwright.structure.report import probabilities
    from graphwright.surgery import Calibration
    from graphwright.surgery import heal as distil

    check_free(out, overwrite)  # this and the next lines before the training
    words = None if text is None else read_text(text)
    model = open(directory)
    check_export(model, out, ExportOptions(check=check, prefer=prefer, overwrite=overwrite))
    with warnings.catch_warnings(record=True) as heard, bar() as progress:
        warnings.simplefilter("always", GatesCannotClose)
        found = learn(model, names_of(units), target, words, steps=steps, batch=batch, window=window, gates=lr,
                      params=weights, seed=seed, progress=progress, **options)  # fmt: skip
        healing = None
        if heal:
            windows = Calibration.of(model, words, max_tokens=heal * batch * window, context=window, seed=seed)
            healing = distil(model.program, model.original, windows, heal, batch=batch, seed=seed, progress=progress)
        receipt = model.export(out, check=check, prefer=prefer, overwrite=overwrite, progress=progress)
    for warning in heard:
        print(f"warning  {warning.message}", file=sys.stderr)
    gone = set(found.hardened.cut)
    picture = probabilities(found.probabilities, found.names, [name not in gone for name in found.names], steps)
    drawn = out.with_name(f"{out.name}.gates.svg")  # not inside OUT: the receipt does not list it
    drawn.write_text(picture, encoding="utf-8")
    lines = [str(found), *([] if healing is None else [str(healing)])]
    full = LEVELS[receipt.level].true_size
    zeros = "" if full else ", with zeros for removed weights (--prefer size leaves them out)"
    lines.append(f"wrote {out}, export level {receipt.level}{zeros}, and {drawn}")
    facts = {**found.to_json(), "healing": healing and healing.to_json(), "out": str(out), "receipt": receipt.to_json()}
    return Output(facts, "\n".join(lines))
