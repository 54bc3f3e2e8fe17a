"""Wrong use of the command line itself (an unknown verb or option, a missing argument), told as other errors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from graphwright.cli.common import emit_json, fail
from graphwright.errors import UsageError

_WrongUse: Any = typer.BadParameter.__base__  # typer has it under this name in none of its versions


class Verbs(TyperGroup):
    """The verbs; with `--json` what their parser refuses is one JSON document too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options that stand before the verb."""
        ctx.obj = _asks_for_json(args)
        with _told(ctx.obj):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of the verb, and do it."""
        with _told(ctx.obj):
            return super().invoke(ctx)


def _asks_for_json(args: list[str]) -> bool:
    return "--json" in args[: args.index("--")] if "--" in args else "--json" in args


@contextmanager
def _told(as_json: bool) -> Iterator[None]:
    try:
        yield
    except _WrongUse as error:
        if not as_json:
            raise
        of = error.ctx.command_path if error.ctx is not None else "graphwright"
        told = UsageError(error.format_message().rstrip("."), where=of, fix=f"{of} --help")
        emit_json({"ok": False, **told.to_json()})
        fail(str(told))
        raise typer.Exit(error.exit_code) from None
