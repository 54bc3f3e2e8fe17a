"""`graphwright inspect`, `draw`, `run` and `diagnose`: parts of a model or program, pictures, results, and defects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from graphwright.cli.common import (
    FAILED,
    Command,
    Dir,
    OnDevice,
    Output,
    Overwrite,
    argument,
    bar,
    flag,
    option,
    read_text,
)
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
    from graphwright.models import Model, UnsupportedArchitecture, inspect_path
    from graphwright.models.inspect import inspect_program
    from graphwright.models.open import open_any

    try:
        target = open_any(directory)
        is_model = isinstance(target, Model)
        found, notes = (target.inspect(), list(target.notes)) if is_model else (inspect_program(target), [])
    except UnsupportedArchitecture as error:
        found, notes = inspect_path(directory), [f"{error.what}: {error.got}"]
    lines = [found.text(depth), *(f"note: {note}" for note in notes)]
    if tensors:
        rows = found.tensors
        lines += ["", *(f"{t.key:<56} {t.dtype:<9} {t.shape!s:<16} {t.bytes:>12,} B" for t in rows)]
    return Output({**found.to_json(), "notes": notes}, "\n".join(lines))


@Command("graphwright draw bundled model.html --level 1")
def draw(
    directory: Dir,
    out: Annotated[Path, argument("FILE", "Picture to write: .svg, .html or .dot.")],
    level: Annotated[int | None, option("N", "Open every group above this depth; by default the picture fits.")] = None,
    expanded: Annotated[list[str] | None, option("PATH", "Open this group; may be repeated.")] = None,
    diff: Annotated[str | None, option("DIR", "An earlier model or program to compare with.")] = None,
    fold: Annotated[bool, flag("--fold", "Draw runs of equal layers once.")] = False,
    params: Annotated[bool, flag("--params", "Draw weights as boxes of their own.")] = False,
    overwrite: Overwrite = False,
) -> Output:
    """Draw a model or a saved program, as SVG, HTML page or DOT text.

    In an HTML page groups open and close with a click.
    """
    from graphwright.files import DestinationExists
    from graphwright.models import Model
    from graphwright.models.open import open_any

    def program(path: str) -> Any:
        target = open_any(path)
        return target.program if isinstance(target, Model) else target

    if out.suffix not in (".svg", ".html", ".dot"):
        raise UsageError("unknown kind of picture", where=out, expected=".svg, .html or .dot", got=out.suffix)
    if out.exists() and not (overwrite and out.is_file()):
        raise DestinationExists("the file already exists", where=out, fix="--overwrite replaces it")
    p, before = program(directory), None if diff is None else program(diff)
    write = {".svg": p.to_svg, ".html": p.to_html, ".dot": p.to_dot}[out.suffix]
    text = write(out, level=level, expanded=set(expanded) if expanded else None, diff=before, fold=fold, params=params)
    facts = {"out": str(out), "bytes": len(text.encode())}
    return Output(facts, f"wrote {out}, {facts['bytes']:,} bytes")


@Command('graphwright run bundled --text "The following" --watch layers.1.out')
def run(
    directory: Dir,
    text: Annotated[str, option("TEXT", "Input text.")],
    watch: Annotated[list[str] | None, option("NODE", "Summarise the values of this node; may be repeated.")] = None,
    device: OnDevice = "cpu",
) -> Output:
    """Print the most likely next tokens, and watch nodes."""
    import numpy as np

    from graphwright.models import open
    from graphwright.models.generation.text import prompt_ids
    from graphwright.models.metrics import log_softmax

    model = open(directory, device=device)
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
    from graphwright.models.open import open_any
    from graphwright.surgery import diagnose as find_defects

    if fix and out is None:
        raise UsageError("--fix was given without a directory for the repaired model", where=directory, fix="--out DIR")
    if out is not None:
        check_free(out, overwrite)
    target = open_any(directory, check=False)
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


def _around(p: Any, drawn: Any) -> set[str]:
    """Return the paths of all modules that contain a node of `drawn`; the picture expands these modules."""
    parts = [p.path(node).split(".") for node in drawn]
    return {".".join(part[:i]) for part in parts for i in range(1, len(part))}
