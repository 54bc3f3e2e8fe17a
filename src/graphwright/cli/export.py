"""`graphwright export`, `verify` and `diff`: write a checkpoint for transformers, check it, and compare models."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphwright.cli.common import FAILED, Command, Dir, Output, argument, bar, flag, option, read_text
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.models.export.export import ExportOptions
    from graphwright.program import Program


@Command("graphwright export bundled copy", "graphwright.models.export.export:ExportOptions", hide="prompts predicted")
def export(
    directory: Dir,
    out: Annotated[Path | None, argument("OUT", "Directory to write.")] = None,
    text: Annotated[Path | None, option("FILE", "Measure bits per byte on this text for the receipt.")] = None,
    plan: Annotated[bool, flag("--plan", "Show the possible exports; write nothing.")] = False,
    *,
    options: ExportOptions,
) -> Output:
    """Write a checkpoint for transformers, or a program as ONNX.

    The directory appears only after transformers has loaded it in a separate process and computed equal logits.
    receipt.json lists the edits and the checks. A saved program that is not a language model, such as the champion of
    an evolution, is written as ONNX: OUT is then a file, such as net.onnx.
    """
    from graphwright.models import Model
    from graphwright.models.open import open_any

    model = open_any(directory)
    if not isinstance(model, Model):
        return _onnx(model, out, options, plan)
    if plan:
        found = model.export_plan(options.prefer)
        return Output(found.to_json(), str(found))
    if out is None:
        raise UsageError("the argument OUT is missing", fix=f"graphwright export {directory} OUT")
    given = {**asdict(options), "text": None if text is None else read_text(text)}
    with bar() as progress:
        receipt = model.export(out, progress=progress, **given)
    return Output({"out": str(out), "receipt": receipt.to_json()}, f"{receipt}\n{'wrote':<22} {out}")


def _onnx(p: Program, out: Path | None, options: ExportOptions, plan: bool) -> Output:
    """Write a program that is not a language model as ONNX. Raises: ExportError if another form is requested."""
    from graphwright.models import ExportError
    from graphwright.models.onnx import check_onnx

    if plan or out is None or out.suffix != ".onnx":
        raise ExportError("this program is not a language model, so it has no checkpoint for transformers",
                          where=p.name, expected="a file OUT.onnx", got="--plan" if plan else out,
                          fix="graphwright export DIR net.onnx; Program.save keeps every structure")  # fmt: skip
    p.to_onnx(out, opset=options.opset, cache=options.onnx_cache, overwrite=options.overwrite)
    facts: dict[str, Any] = {"out": str(out), "opset": options.opset, "check": None}
    if options.check != "none" and not options.onnx_cache:
        facts["check"] = check_onnx(p, out)
    error = "" if facts["check"] is None else f", onnxruntime within {facts['check']['max_rel']:.1e} on random inputs"
    return Output(facts, f"wrote {out}, opset {options.opset}{error}")


_LAYER = re.compile(r"\blayers\.(\d+)\.")


@Command("graphwright export bundled copy && graphwright verify copy")
def verify(
    directory: Annotated[str, argument("DIR", "Directory that graphwright export wrote.")],
    other: Annotated[str | None, argument("B", "Another model to compare with.")] = None,
    against: Annotated[Path | None, option("DIR", "Directory of the original model.")] = None,
    trust_code: Annotated[bool, flag("--trust-code", "Run generated modeling code of the export.")] = False,
) -> Output:
    """Check an export against its receipt, or compare two models.

    Verifies checksums, headers, loading in a separate process and the stored logits. The exit code is 0 if all checks
    pass, 1 if a check fails, and 3 if a check could not run. With a second model, compares logits and greedy tokens on
    the bundled text, and weights by name; the exit code is 1 if anything differs.
    """
    from graphwright.models import open, resolve
    from graphwright.models.export.verify import verify as check
    from graphwright.surgery import Calibration, compare

    if other is not None:
        a, b = open(directory), open(other)
        compared = compare(a, b, Calibration.of(a, max_tokens=4096, context=256))
        return Output(compared.to_json(), str(compared), 0 if compared.equal else FAILED)
    found = check(resolve(directory), against, trust_code=trust_code)
    return Output(found.to_json(), str(found), found.exit_code)


@Command("graphwright diff bundled bundled")
def diff(
    left: Annotated[str, argument("A", "Hugging Face directory, saved model or program, or the word bundled.")],
    right: Annotated[str, argument("B", "Another model.")],
    logits: Annotated[str | None, option("TEXT", "A text on which to compare logits.")] = None,
) -> Output:
    """Compare the config, structure and weights of two models, or of two saved programs.

    The exit code is 0 if they are equal and 1 if they differ.
    """
    from graphwright.models.open import compare_models

    found = compare_models(left, right, text=logits)
    text = "\n".join(folded(str(found).splitlines()))
    return Output(found.to_json(), text, 0 if found.identical else FAILED)


def folded(lines: list[str]) -> list[str]:
    """Merge lines that differ only in the index of a layer: `layers.{0-3}.attn.q: ...`."""
    from graphwright.program.axes.units import runs

    found: dict[str, list[int]] = {}
    for line in lines:
        numbers = {int(n) for n in _LAYER.findall(line)}
        same = _LAYER.sub("layers.{}.", line) if len(numbers) == 1 else line
        found.setdefault(same, []).extend(numbers if len(numbers) == 1 else ())
    return [
        line.replace("layers.{}.", f"layers.{{{runs(n)}}}." if len(n) > 1 else f"layers.{n[0]}.") if n else line
        for line, n in found.items()
    ]
