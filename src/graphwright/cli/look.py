"""`graphwright inspect`, `run` and `diagnose`: the parts of a model, its results, and its defects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from graphwright.cli.common import FAILED, Command, Dir, Output, Overwrite, bar, flag, option, read_text
from graphwright.errors import UsageError


@Command("graphwright inspect bundled --depth 2")
def inspect(
    directory: Dir,
    depth: Annotated[int, option("N", "Levels of the tree.", min=1)] = 3,
    tensors: Annotated[bool, flag("--tensors", "List every tensor.")] = False,
) -> Output:
    """Describe a model from its headers: modules, bytes, FLOPs.

    Reads no weights. FLOPs and KV bytes are per token.
    """
    from graphwright.models import UnsupportedArchitecture, inspect_path, open

    try:
        model = open(directory)
        found, notes = model.inspect(), list(model.notes)
    except UnsupportedArchitecture as error:
        found, notes = inspect_path(directory), [f"{error.what}: {error.got}"]
    lines = [found.text(depth), *(f"note: {note}" for note in notes)]
    if tensors:
        rows = found.tensors
        lines += ["", *(f"{t.key:<56} {t.dtype:<9} {t.shape!s:<16} {t.bytes:>12,} B" for t in rows)]
    return Output({**found.to_json(), "notes": notes}, "\n".join(lines))


@Command('graphwright run bundled --text "The following" --watch layers.1.out')
def run(
    directory: Dir,
    text: Annotated[str, option("TEXT", "Input text.")],
    watch: Annotated[list[str] | None, option("NODE", "Summarise the values of this node; may be repeated.")] = None,
) -> Output:
    """Print the most likely next tokens, and watch nodes."""
    import numpy as np

    from graphwright.models import open
    from graphwright.models.generation.text import prompt_ids
    from graphwright.models.metrics import log_softmax

    model = open(directory)
    ids = prompt_ids(model, text)
    logp = log_softmax(model.logits(ids)[-1])
    best = np.argsort(-logp, kind="stable")[:5].tolist()
    decode = (lambda ids: "") if model.tokenizer is None else model.tokenizer.decode
    top = [{"id": i, "text": decode([i]), "p": float(np.exp(logp[i]))} for i in best]
    rows = []
    if watch:
        feeds = {"ids": ids[None], "positions": np.arange(len(ids))[None]}
        found = model.program.run(feeds, keep=watch)
        arrays = {path: found.value(path).to_numpy("float32") for path in watch}
        rows = [
            {"path": path, "shape": list(a.shape), "mean": float(a.mean()), "rms": float(np.sqrt((a**2).mean())),
             "min": float(a.min()), "max": float(a.max())} for path, a in arrays.items()
        ]  # fmt: skip
    lines = [f"{100 * row['p']:6.2f} %  {row['id']:>6}  {row['text']!r}" for row in top]
    shown = "{path:<32} {shape!s:<16} mean {mean:+.4f}  rms {rms:.4f}  min {min:+.4f}  max {max:+.4f}"
    lines += [shown.format(**row) for row in rows]
    return Output({"tokens": len(ids), "top": top, "watch": rows}, "\n".join(lines))


@Command("graphwright diagnose bundled --svg findings.svg")
def diagnose(
    directory: Dir,
    text: Annotated[Path | None, option("FILE", "Run this text, to measure gradients and gain.")] = None,
    kind: Annotated[list[str] | None, option("NAME", "Look for this kind of defect only; may be repeated.")] = None,
    fix: Annotated[bool, flag("--fix", "Repair what can be repaired without changing the function.")] = False,
    out: Annotated[Path | None, option("DIR", "Directory for the repaired model.")] = None,
    overwrite: Overwrite = False,
    svg: Annotated[Path | None, option("FILE", "Draw the model and its findings, as SVG or .html page.")] = None,
) -> Output:
    """Report defects of a model, with evidence and repairs.

    Models that cannot run are accepted too. The exit code is 0 if there are no findings (with --fix, if none remain),
    1 if there are findings, and 2 for an error.
    """
    from graphwright.files import check_free
    from graphwright.surgery import diagnose as find_defects

    if fix and out is None:
        raise UsageError("--fix was given without a directory for the repaired model", where=directory, fix="--out DIR")
    if out is not None:
        check_free(out, overwrite)
    target = _open(directory)
    words = None if text is None else read_text(text)

    def look() -> Any:
        with bar() as progress:
            return find_defects(target, text=words, kinds=kind or None, progress=progress)

    found = before = look()
    if svg is not None:
        p, drawn = found.program, found.overlay()
        (p.to_html if svg.suffix == ".html" else p.to_svg)(svg, overlay=drawn, expanded=_around(p, drawn))
    lines, facts = [str(before)], {}
    if fix:
        fixed = found.fix_all()
        found = look()
        lines += [f"repaired {len(fixed)}, saved to {out}", str(found)]
        facts = {"fixed": [f.to_json() for f in fixed], "found": before.to_json()}
    if out is not None:
        target.save(out, overwrite=overwrite)
    facts = {**found.to_json(), **facts, "out": str(out) if out else None}
    return Output(facts, "\n".join(lines), FAILED if found else 0)


def _open(directory: str) -> Any:
    """Open a model that may be broken, or a saved program that is not a model."""
    from graphwright.models import open, resolve
    from graphwright.models.open import FACTS
    from graphwright.program import load

    path = resolve(directory)
    if (path / "program.json").is_file() and not (path / FACTS).is_file():
        return load(path, check=False)
    return open(directory, check=False)


def _around(p: Any, drawn: Any) -> set[str]:
    """Return the paths of all modules that contain a node of `drawn`; the picture expands these modules."""
    parts = [p.path(node).split(".") for node in drawn]
    return {".".join(part[:i]) for part in parts for i in range(1, len(part))}
