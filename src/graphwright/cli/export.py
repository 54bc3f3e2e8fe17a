"""`graphwright export DIR OUT`: write a checkpoint for transformers, with a receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from graphwright.cli.common import Check, Dir, Output, Overwrite, Prefer, argument, bar, command, flag, option
from graphwright.errors import UsageError


@command(
    "graphwright export bundled copy",
    level=("auto", option("L", "auto, or name or number of a level: see --plan.")),
    dtype=("keep", option("DTYPE", "keep, or a dtype to round to.")),
    max_shard_size=(None, option("SIZE", 'Largest file of weights, such as "5GB"; by default as in DIR.')),
    onnx=(False, flag("--onnx", "Also write model.onnx, checked with onnxruntime.")),
    onnx_cache=(False, flag("--onnx-cache", "The same with past_key_values as inputs and outputs, for decoding.")),
    opset=(20, option("N", "Opset of model.onnx: 20 or 23.")),
)
def export(
    directory: Dir,
    out: Annotated[Path | None, argument("OUT", "Directory to write.")] = None,
    prefer: Prefer = "original",
    check: Check = "auto",
    text: Annotated[Path | None, option("FILE", "Measure bits per byte on this text for the receipt.")] = None,
    overwrite: Overwrite = False,
    plan: Annotated[bool, flag("--plan", "Show the possible exports; write nothing.")] = False,
    **options: Any,
) -> Output:
    """Write a checkpoint for transformers, with a receipt.

    The directory appears only after transformers has loaded it in a separate process and computed equal logits.
    receipt.json lists the edits and the checks.
    """
    from graphwright.models import open

    model = open(directory)
    if plan:
        found = model.export_plan(prefer)
        return Output(found.to_json(), str(found))
    if out is None:
        raise UsageError("the argument OUT is missing", fix=f"graphwright export {directory} OUT")
    words = None if text is None else text.read_text(encoding="utf-8")
    with bar() as report:
        receipt = model.export(
            out, prefer=prefer, check=check, text=words, overwrite=overwrite, report=report, **options
        )
    warnings = [("warning", warning) for warning in receipt.warnings]
    lines = [f"{label:<22} {value}" for label, value in [*receipt.summary(), *warnings, ("wrote", out)]]
    return Output({"out": str(out), "receipt": receipt.to_json()}, "\n".join(lines))
