"""`graphwright diff A B`: what two models differ in."""

from __future__ import annotations

from typing import Annotated

import typer

from graphwright.cli.common import FAILED, Debug, Json, emit_json, say, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright diff bundled bundled")(diff)


@verb
def diff(
    left: Annotated[str, typer.Argument(metavar="A")],
    right: Annotated[str, typer.Argument(metavar="B")],
    logits: Annotated[str | None, typer.Option(help="A text on which to compare logits.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Config fields, structure and weights. Exit 0 the same, 1 different."""
    from graphwright.models.compare import compare_models

    found = compare_models(left, right, text=logits)
    if as_json:
        emit_json(found.to_json())
    else:
        for name, (a, b) in found.config.items():
            say(f"config {name}: {a} -> {b}")
        say(str(found.program) if not found.program.identical else "structure and weights are the same")
        if found.logits:
            say(", ".join(f"{name} {value:.4g}" for name, value in found.logits.items()))
    return 0 if found.identical else FAILED
