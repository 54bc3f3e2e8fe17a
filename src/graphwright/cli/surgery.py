"""What the verbs of surgery share: where, how much, on which data, and where the result goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphwright.cli.common import emit_json, read_text, say

if TYPE_CHECKING:
    from graphwright.models import Model

Out = Annotated[
    Path | None,
    typer.Argument(metavar="OUT", help="Save the model here; needed but for --dry-run.", show_default=False),
]
Where = Annotated[str, typer.Option(metavar="PATTERN", help="Linear maps, by path.")]
Tokens = Annotated[
    int, typer.Option(metavar="N", min=0, help="Calibration tokens, on which errors are measured; 0 for none.")
]
Context = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per calibration window.")]
Text = Annotated[Path | None, typer.Option(metavar="FILE", help="Calibration text; else the help topics of Python.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Report the same and save nothing.")]


def opened(directory: str, out: Path | None, dry_run: bool, overwrite: bool) -> Model:
    """Open the model. Raises: UsageError without an output directory; the errors of `check_free` for a bad one."""
    from graphwright.errors import UsageError
    from graphwright.files import check_free
    from graphwright.models import open

    if out is None and not dry_run:
        raise UsageError("where to? OUT is missing", fix="name a directory, or --dry-run")
    if out is not None and not dry_run:
        check_free(out, overwrite)  # now, not after the work
    return open(directory)


def calibration(model: Model, tokens: int, context: int, text: Path | None, seed: int) -> Any:
    """Data of a text, or None for 0 tokens."""
    from graphwright.surgery import Calibration

    if not tokens:
        return None
    words = None if text is None else read_text(text)
    return Calibration.of(model, words, max_tokens=tokens, context=context, seed=seed)


def budget_of(text: str) -> Any:
    """A budget from `kind=number`. Raises: UsageError."""
    from graphwright.errors import UsageError
    from graphwright.surgery import Bytes, Energy, Error, Params, Ratio

    kinds = {"error": (Error, float), "energy": (Energy, float), "ratio": (Ratio, float),
             "params": (Params, int), "bytes": (Bytes, int)}  # fmt: skip
    name, _, number = text.partition("=")
    try:
        made, kind = kinds[name.strip()]
        value = kind(number)
    except (KeyError, ValueError):
        raise UsageError("this is no budget", where="--budget", expected=", ".join(f"{k}=N" for k in kinds),
                         got=text) from None  # fmt: skip
    return made(value)


def finish(model: Model, found: Any, out: Path | None, dry_run: bool, overwrite: bool, as_json: bool) -> None:
    """Save the edited model, and say what was found."""
    saved = None if dry_run else out
    if saved is not None:
        model.save(saved, overwrite=overwrite)
    if as_json:
        emit_json({**found.to_json(), "out": None if saved is None else str(saved)})
    else:
        say(str(found))
