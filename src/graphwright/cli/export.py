"""`graphwright export DIR OUT`: a checkpoint for transformers, with its receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import Debug, Dir, Json, Quiet, Threads, bar, emit_json, say, set_threads, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright export bundled copy")(export)


@verb
def export(
    directory: Dir,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Directory to write.", show_default=False)] = None,
    level: Annotated[str, typer.Option(metavar="L", help="auto, or name or number of a level: see --plan.")] = "auto",
    prefer: Annotated[
        str, typer.Option(metavar="WHAT", help="original (class of transformers) or size (no zeros).")
    ] = "original",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="keep, or a dtype to round to.")] = "keep",
    check: Annotated[
        str, typer.Option(metavar="HOW", help="auto, required or none: proof by transformers in a clean process.")
    ] = "auto",
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help='Largest file of weights, "5GB"; else as DIR has them.', show_default=False),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx too, checked with onnxruntime.")] = False,
    onnx_cache: Annotated[
        bool, typer.Option("--onnx-cache", help="The same, with past_key_values in and out, to decode with.")
    ] = False,
    opset: Annotated[int, typer.Option(metavar="N", help="Of model.onnx: 20 or 23.")] = 20,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure bits per byte of this text, for the receipt.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done; write nothing.")] = False,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint for transformers, with a receipt.

    transformers loads it in a clean process and must compute the same before the directory appears. receipt.json says
    what was edited and what was checked.
    """
    from graphwright.errors import UsageError
    from graphwright.models import open

    set_threads(threads)
    model = open(directory)
    if plan:
        found = model.export_plan(prefer)
        if as_json:
            emit_json(found.to_json())
        else:
            say(str(found))
        return
    if out is None:
        raise UsageError("where to? OUT is missing", fix=f"graphwright export {directory} OUT")
    with bar(quiet or as_json) as report:
        receipt = model.export(
            out,
            level=level,
            prefer=prefer,
            dtype=dtype,
            check=check,
            max_shard_size=max_shard_size,
            onnx=onnx,
            onnx_cache=onnx_cache,
            opset=opset,
            text=None if text is None else text.read_text(encoding="utf-8"),
            overwrite=overwrite,
            report=report,
        )
    if as_json:
        emit_json({"out": str(out), "receipt": receipt.to_json()})
        return
    for label, value in receipt.summary():
        say(f"{label:<22} {value}")
    for warning in receipt.warnings:
        say(f"warning                {warning}")
    say(f"wrote                  {out}")
