"""Shared parts of all commands: options, output as text or one JSON document, errors, exit codes, progress bars."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphwright.errors import GraphwrightError, UsageError
from graphwright.progress import Progress, Report

DONE, FAILED, USAGE, UNCHECKED, INTERRUPTED = 0, 1, 2, 3, 130
SCHEMA = 1

Dir = Annotated[
    str,
    typer.Argument(metavar="DIR", help="Hugging Face directory, saved model, or the word bundled.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout, everything else to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Write no progress and no notes.")]
Threads = Annotated[int, typer.Option("--threads", metavar="N", min=0, help="CPU threads; 0 leaves the default.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of all random numbers.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
Check = Annotated[
    str, typer.Option(metavar="HOW", help="Check by transformers in a separate process: auto, required or none.")
]
Prefer = Annotated[str, typer.Option(metavar="WHAT", help="original (classes of transformers) or size (no zeros).")]
Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Windows per step.")]
Window = Annotated[int, typer.Option("--window", metavar="N", min=2, help="Tokens per window.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

EXAMPLES: dict[str, str] = {}
"""The example of each command, shown at the end of its help."""


class _Notes(logging.Handler):
    """Writes the log of the library to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note  {record.getMessage()}", file=sys.stderr)


def command(example: str) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a function a command. Errors of the package become a short text and an exit code, Ctrl-C becomes 130.

    The text of a KeyboardInterrupt says what was saved.

    Args:
        example: a command line, shown at the end of the help.
    """

    def make(fn: Callable[..., int | None]) -> Callable[..., None]:
        EXAMPLES[fn.__name__] = example

        @wraps(fn)
        def run(*args: Any, **kwargs: Any) -> None:
            _run(fn, args, kwargs)

        return run

    return make


def _run(fn: Callable[..., int | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    as_json = kwargs.get("as_json")
    log, notes = logging.getLogger("graphwright"), _Notes(logging.WARNING)
    if not kwargs.get("quiet"):
        log.addHandler(notes)
    try:
        code = fn(*args, **kwargs)
    except KeyboardInterrupt as stop:
        saved = str(stop) or "no incomplete files remain"
        if as_json:
            emit_json({"ok": False, "error": "Interrupted", "what": saved})
        print(f"\ninterrupted  {saved}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        os._exit(DONE)
    except (GraphwrightError, OSError) as error:
        if kwargs.get("debug"):
            raise
        if as_json:
            with suppress(OSError):  # stdout may have failed
                emit_json({"ok": False, **_facts(error)})
        fail(str(error))
        raise typer.Exit(FAILED if type(error).__name__ == "VerificationFailed" else USAGE) from None
    finally:
        log.removeHandler(notes)
    if code:
        raise typer.Exit(code)


def _facts(error: GraphwrightError | OSError) -> dict[str, Any]:
    if isinstance(error, GraphwrightError):
        return dict(error.to_json())
    return {"error": type(error).__name__, "what": str(error)}


def fail(text: str) -> None:
    """Write an error to stderr."""
    first, _, rest = text.partition("\n")
    red, off = ("\033[31m", "\033[0m") if colours(sys.stderr) else ("", "")
    print(f"{red}error{off}  {first}" + (f"\n{rest}" if rest else ""), file=sys.stderr)


def say(text: str = "") -> None:
    """Write a line to stdout."""
    print(text, flush=True)


def emit_json(value: dict[str, Any]) -> None:
    """Write the JSON document to stdout."""
    print(json.dumps({"schema": SCHEMA, **value}, indent=1), flush=True)


def colours(stream: Any) -> bool:
    """Whether to use colours: on a terminal, without NO_COLOR and TERM=dumb."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises: UnreadableFile."""
    from graphwright.files import UnreadableFile

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile("cannot read the text file", where=str(path), got=str(error)) from None


def set_threads(threads: int) -> None:
    """Set the number of CPU threads; 0 leaves the default."""
    if threads:
        from graphwright.array.cpu import set_num_threads

        set_num_threads(threads)


@contextmanager
def bar(quiet: bool = False) -> Iterator[Report | None]:
    """Show a progress bar on stderr, and below it the table of the last event; None if stderr is not a terminal."""
    if quiet or not colours(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column, Table

    class Shown(Bar):
        rows: dict[str, dict[str, float]] = {}  # noqa: RUF012  the class lives as long as its one instance

        def get_renderables(self) -> Any:
            yield from super().get_renderables()
            if self.rows:
                names = list(next(iter(self.rows.values())))
                table = Table("", *(Column(name, justify="right") for name in names), box=None)
                for row, numbers in self.rows.items():
                    table.add_row(row, *(f"{numbers[name]:.4g}" for name in names))
                yield table

    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(20),
        *(
            kind(table_column=Column(no_wrap=True))
            for kind in (MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn)
        ),
        TextColumn("{task.fields[facts]}", table_column=Column()),  # this column wraps on a narrow terminal
    )
    with Shown(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, Any] = {}

        def report(p: Progress) -> None:
            facts = "  ".join(f"{k} {v:,.0f}" if v >= 1000 else f"{k} {v:.4g}" for k, v in p.facts.items())
            if p.what not in tasks:
                tasks[p.what] = shown.add_task(p.what, total=p.total, facts=facts)
            shown.update(tasks[p.what], completed=p.done, facts=facts)
            shown.rows = p.table

        yield report


_WrongUse: Any = typer.BadParameter.__base__  # no version of typer exports the base class of usage errors


class Commands(TyperGroup):
    """The group of all commands; with `--json` usage errors are one JSON document too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        ctx.obj = "--json" in (args[: args.index("--")] if "--" in args else args)
        with _usage_errors(ctx.obj):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command, and run it."""
        with _usage_errors(ctx.obj):
            return super().invoke(ctx)


@contextmanager
def _usage_errors(as_json: bool) -> Iterator[None]:
    try:
        yield
    except _WrongUse as error:
        if not as_json:
            raise
        name = error.ctx.command_path if error.ctx is not None else "graphwright"
        wrong = UsageError(error.format_message().rstrip("."), where=name, fix=f"{name} --help")
        emit_json({"ok": False, **wrong.to_json()})
        fail(str(wrong))
        raise typer.Exit(error.exit_code) from None
