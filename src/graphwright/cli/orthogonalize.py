"""`graphwright orthogonalize DIR OUT`: matrices with orthonormal columns or rows, exactly or for what they cost."""

from __future__ import annotations

from typing import Annotated

import typer

from graphwright.cli.common import Debug, Dir, Json, Overwrite, Quiet, Seed, Threads, bar, command, set_threads
from graphwright.cli.surgery import Context, DryRun, Out, Text, Tokens, Where, calibration, finish, opened


@command('graphwright orthogonalize bundled split --where "layers.0.attn.{q,k}" --fold insert --tokens 0')
def orthogonalize(
    directory: Dir,
    out: Out = None,
    where: Where = "layers.*.attn.{q,k,v,o}",
    method: Annotated[str, typer.Option(metavar="NAME", help="polar, qr or newton_schulz.")] = "polar",
    per: Annotated[str, typer.Option(metavar="WHAT", help="matrix or head.")] = "matrix",
    fold: Annotated[
        str, typer.Option(metavar="HOW", help="none, insert (exact), absorb (exact, per head) or scale.")
    ] = "none",
    special: Annotated[bool, typer.Option("--special", help="Nearest rotation, of square matrices.")] = False,
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
    """Replace matrices by their orthonormal factors."""
    from graphwright.surgery import orthogonalize as run

    set_threads(threads)
    model = opened(directory, out, dry_run, overwrite)
    data = calibration(model, tokens, context, text, seed)
    with bar(quiet or as_json) as report:
        found = run(
            model,
            where,
            method,
            per=per,
            fold=fold,
            special=special,
            calibration=data,
            dry_run=dry_run,
            report=report,
        )
    finish(model, found, out, dry_run, overwrite, as_json)
