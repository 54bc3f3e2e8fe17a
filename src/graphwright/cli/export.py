"""`graphwright export DIR OUT`: write a checkpoint for transformers, with a receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import (
    Check,
    Debug,
    Dir,
    Json,
    Overwrite,
    Prefer,
    Quiet,
    Threads,
    bar,
    command,
    emit_json,
    say,
    set_threads,
)


@command("graphwright export bundled copy")
def export(
    directory: Dir,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Directory to write.", show_default=False)] = None,
    level: Annotated[str, typer.Option(metavar="L", help="auto, or name or number of a level: see --plan.")] = "auto",
    prefer: Prefer = "original",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="keep, or a dtype to round to.")] = "keep",
    check: Check = "auto",
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help='Largest file of weights, such as "5GB"; by default as in DIR.', show_default=False
        ),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx, checked with onnxruntime.")] = False,
    onnx_cache: Annotated[
        bool, typer.Option("--onnx-cache", help="The same with past_key_values as inputs and outputs, for decoding.")
    ] = False,
    opset: Annotated[int, typer.Option(metavar="N", help="Opset of model.onnx: 20 or 23.")] = 20,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure bits per byte on this text for the receipt.")
    ] = None,
    overwrite: Overwrite = False,
    plan: Annotated[bool, typer.Option("--plan", help="Show the possible exports; write nothing.")] = False,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint for transformers, with a receipt.

    The directory appears only after transformers has loaded it in a separate process and computed equal logits.
    receipt.json lists the edits and the checks.
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
        raise UsageError("the argument OUT is missing", fix=f"graphwright export {directory} OUT")
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
