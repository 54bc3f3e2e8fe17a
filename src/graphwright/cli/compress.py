"""`graphwright compress DIR OUT`: matrices as factors with fewer parameters."""

from __future__ import annotations

from typing import Annotated

import typer

from graphwright.cli.common import Debug, Dir, Json, Overwrite, Quiet, Seed, Threads, bar, command, set_threads
from graphwright.cli.surgery import (
    Context,
    DryRun,
    Out,
    Text,
    Tokens,
    Where,
    budget_of,
    calibration,
    finish,
    opened,
)


@command("graphwright compress bundled smaller --where layers.0.mlp --method svd --budget ratio=0.3 --tokens 0")
def compress(
    directory: Dir,
    out: Out = None,
    where: Where = "layers.*.mlp",
    method: Annotated[str, typer.Option(metavar="NAME", help="best, svd, asvd, tt or tr.")] = "best",
    budget: Annotated[
        str,
        typer.Option(metavar="KIND=N", help="error=0.05, energy=0.99, ratio=0.3 (taken away), params=N, bytes=N."),
    ] = "energy=0.99",
    order: Annotated[int, typer.Option(metavar="N", min=2, help="Modes of tensor trains and rings.")] = 3,
    sweeps: Annotated[int, typer.Option(metavar="N", min=0, help="Sweeps of alternating least squares.")] = 0,
    min_dim: Annotated[int, typer.Option(metavar="N", min=1, help="Leave smaller matrices alone.")] = 64,
    tokens: Tokens = 2048,
    context: Context = 256,
    text: Text = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Replace matrices by factors where that is smaller.

    Every row stands beside truncated SVDs of as many parameters; what would not get smaller stays as it is.
    """
    from graphwright.surgery import compress as run

    set_threads(threads)
    allowed = budget_of(budget)
    model = opened(directory, out, dry_run, overwrite)
    data = calibration(model, tokens, context, text, seed)
    with bar(quiet or as_json) as report:
        found = run(
            model,
            where,
            method,
            allowed,
            order=order,
            sweeps=sweeps,
            min_dim=min_dim,
            calibration=data,
            dry_run=dry_run,
            report=report,
        )
    finish(model, found, out, dry_run, overwrite, as_json)
