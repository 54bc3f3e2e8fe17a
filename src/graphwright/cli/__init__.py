"""The command line: a thin layer over the public API. A command imports heavy modules only when it is used."""

from __future__ import annotations

from typing import Annotated

import typer

from graphwright import __version__
from graphwright.cli import bench, demo, edit, evolve, experts, export, generate, life, look, surgery, train, warmup
from graphwright.cli.common import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
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

    DIR is a Hugging Face directory, a saved model or program, or the word `bundled`.
    """


_COMMANDS = (
    *(demo.demo, look.inspect, look.draw, look.run, look.diagnose, generate.generate, train.train, life.life),
    *(evolve.evolve, edit.edit, surgery.prune, surgery.search, surgery.orthogonalize, surgery.compress),
    *(experts.experts, experts.upcycle),
    *(export.export, export.verify, export.diff, bench.bench, warmup.warmup),
)
Commands.ALL |= {command.name: command for command in _COMMANDS}


def main() -> None:
    """Run the command line."""
    app()
