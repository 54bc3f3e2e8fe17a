"""`graphwright search DIR OUT`: let gradients find what a model can do without."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import (
    Check,
    Debug,
    Dir,
    Json,
    Overwrite,
    Quiet,
    Seed,
    Threads,
    bar,
    command,
    emit_json,
    read_text,
    say,
    set_threads,
)


@command("graphwright search bundled learned --units heads --steps 20 --lr 0.5 --check none --quiet")
def search(
    directory: Dir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write.")],
    units: Annotated[
        str, typer.Option(metavar="KINDS", help="heads, kv_groups, neurons, experts, layers; with commas.")
    ] = "heads,neurons",
    target: Annotated[float, typer.Option(metavar="SHARE", help="Share of their parameters that stays.")] = 0.7,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to learn on; else the bundled one.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps.")] = 300,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Windows per step.")] = 8,
    window: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens per window.")] = 128,
    lr: Annotated[float, typer.Option(metavar="RATE", help="Learning rate of the gates.")] = 0.05,
    weights: Annotated[float, typer.Option(metavar="RATE", help="Learning rate of the weights; 0 keeps them.")] = 0.0,
    heal: Annotated[
        int, typer.Option(metavar="N", min=0, help="Steps of distillation into the weights after the cut.")
    ] = 0,
    round_to: Annotated[int, typer.Option(metavar="N", min=1, help="Sizes of long axes become multiples of N.")] = 16,
    check: Check = "auto",
    prefer: Annotated[str, typer.Option(metavar="WHAT", help="original or size: see export.")] = "original",
    overwrite: Overwrite = False,
    seed: Seed = 0,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Learn by gradients which units stay, cut the others, export.

    Gates are trained against the model itself (distillation) under a budget that falls to --target. With --heal the
    weights that stay are then trained the same way. OUT gets the checkpoint with its receipt, and
    OUT.gates.svg beside it the probabilities over training.
    """
    from graphwright.files import check_free
    from graphwright.models import open
    from graphwright.models.export.export import ExportOptions, check_export
    from graphwright.structure import GatesCannotClose, learn
    from graphwright.structure.report import probabilities
    from graphwright.surgery import Calibration
    from graphwright.surgery import heal as distil

    set_threads(threads)
    check_free(out, overwrite)  # this and what follows now, not after the training
    words = None if text is None else read_text(text)
    model = open(directory)
    check_export(model, out, ExportOptions(check=check, prefer=prefer, overwrite=overwrite))
    kinds = tuple(k.strip() for k in units.split(",") if k.strip())
    with warnings.catch_warnings(record=True) as heard, bar(quiet or as_json) as report:
        warnings.simplefilter("always", GatesCannotClose)
        found = learn(model, kinds, target, words, steps=steps, batch=batch, window=window, gates=lr, params=weights,
                      round_to=round_to, seed=seed, report=report)  # fmt: skip
        healing = None
        if heal:
            windows = Calibration.of(model, words, max_tokens=heal * batch * window, context=window, seed=seed)
            healing = distil(model.program, model.original, windows, heal, batch=batch, seed=seed, report=report)
        receipt = model.export(out, check=check, prefer=prefer, overwrite=overwrite, report=report)
    for warning in heard:
        typer.echo(f"warning: {warning.message}", err=True)
    gone = set(found.hardened.cut)
    kept = [name not in gone for name in found.names]
    picture = probabilities(found.probabilities, found.names, kept, steps)
    drawn = out.with_name(f"{out.name}.gates.svg")  # not inside: `verify` knows what the receipt lists, and no more
    drawn.write_text(picture, encoding="utf-8")
    if as_json:
        healed = None if healing is None else asdict(healing)
        emit_json({**found.to_json(), "healing": healed, "out": str(out), "receipt": receipt.to_json()})
        return
    say(str(found))
    if healing is not None:
        say(f"healed in {heal} steps: {healing.before:.4f} -> {healing.after:.4f} nats per token from the model it was")
    whole = ", with zeros for what was cut (--prefer size leaves them out)" if receipt.level == 3 else ""
    say(f"wrote {out}, export level {receipt.level}{whole}, and {drawn}")
