"""`graphwright diagnose DIR`: what is wrong with a model, with witnesses and repairs; broken ones are opened too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from graphwright.cli.common import (
    DONE,
    FAILED,
    Debug,
    Dir,
    Json,
    Overwrite,
    Quiet,
    bar,
    command,
    emit_json,
    read_text,
    say,
)


@command("graphwright diagnose bundled --svg findings.svg")
def diagnose(
    directory: Dir,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run this text as a probe, for gradients and gain.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Ask for this kind only; may be given again.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended without changing the function.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Save the mended model here.")] = None,
    overwrite: Overwrite = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it, findings in colour; a page if FILE ends in .html.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Defects of a model, each with a witness and a repair.

    Exit 0: nothing (with --fix, nothing is left), 1: there are findings, 2: it could not be asked.
    """
    from graphwright.errors import UsageError
    from graphwright.files import check_free
    from graphwright.models import Model
    from graphwright.surgery import diagnose as ask
    from graphwright.surgery import diagnose_model

    if fix and out is None:
        raise UsageError("--fix needs a directory for the repaired model", where=directory, fix="--out DIR")
    if out is not None:
        check_free(out, overwrite)
    target = _open(directory)
    words = None if text is None else read_text(text)

    def look() -> Any:
        with bar(quiet or as_json) as report:
            if isinstance(target, Model):
                return diagnose_model(target, words, kinds=kind or None, report=report)
            return ask(target, kinds=kind or None, report=report)

    found = look()
    if svg is not None:
        p, drawn = found.program, found.overlay()
        (p.to_html if svg.suffix == ".html" else p.to_svg)(svg, overlay=drawn, expanded=_around(p, drawn))
    before, fixed = found, ()
    if fix:
        fixed = found.fix_all()
        found = look()
    if out is not None:
        target.save(out, overwrite=overwrite)
    if as_json:
        mended = {"fixed": [f.to_json() for f in fixed], "found": before.to_json()} if fix else {}
        emit_json({**found.to_json(), **mended, "out": str(out) if out else None})
    else:
        say(str(before))
        if fix:
            say(f"mended {len(fixed)}, saved to {out}")
            say(str(found))
    return FAILED if found else DONE


def _open(directory: str) -> Any:
    """A model; a saved program that is no model, or one that is open for repair, as it is."""
    from graphwright.models import open, resolve
    from graphwright.models.open import FACTS
    from graphwright.program import load

    place = resolve(directory)
    if (place / "program.json").is_file() and not (place / FACTS).is_file():
        return load(place, check=False)
    return open(directory, check=False)


def _around(p: Any, drawn: Any) -> set[str]:
    """The modules above what is coloured, so that it is seen."""
    above: set[str] = set()
    for node in drawn:
        path = p.path(node)
        while path := path.rpartition(".")[0]:
            above.add(path)
    return above
