"""The command line: one file a verb, thin over the public API. Heavy imports happen inside the verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from graphwright import __version__
from graphwright.cli import (
    compress,
    demo,
    diagnose,
    diff,
    edit,
    evolve,
    export,
    generate,
    inspect,
    orthogonalize,
    prune,
    run,
    search,
    train,
    verify,
    warmup,
)
from graphwright.cli.common import Verbs

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"graphwright {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Open a neural network as a graph, edit it while it runs, export it with proof.

    DIR is a Hugging Face directory, a saved model, or the word `bundled`.
    """


for _module in (
    demo,
    inspect,
    run,
    generate,
    train,
    evolve,
    edit,
    diagnose,
    prune,
    search,
    orthogonalize,
    compress,
    export,
    verify,
    diff,
    warmup,
):
    _module.register(app)


def main() -> None:
    """Entry point."""
    app()
