"""What all verbs share: output for people or as one JSON document, errors in three lines, exit codes, threads, bars."""

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
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else goes to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no hints.")]
Threads = Annotated[int, typer.Option("--threads", metavar="N", min=0, help="CPU threads; 0 leaves the default.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of everything random.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what stands there.")]
Check = Annotated[
    str, typer.Option(metavar="HOW", help="Proof by transformers in a clean process: auto, required or none.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class _Notes(logging.Handler):
    """What the library has to say, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note  {record.getMessage()}", file=sys.stderr)


def verb(fn: Callable[..., int | None]) -> Callable[..., None]:
    """A command: errors of the package become three lines and an exit code, Ctrl-C becomes 130.

    The text of a KeyboardInterrupt says what is kept.
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> None:
        debug = kwargs.get("debug", False)
        log, notes = logging.getLogger("graphwright"), _Notes(logging.WARNING)
        if not kwargs.get("quiet"):
            log.addHandler(notes)
        try:
            code = fn(*args, **kwargs)
        except KeyboardInterrupt as stop:
            kept = str(stop) or "nothing half-written is left"
            if kwargs.get("as_json"):
                emit_json({"ok": False, "error": "Interrupted", "what": kept})
            print(f"\ninterrupted  {kept}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            os._exit(DONE)
        except (GraphwrightError, OSError) as error:
            if debug:
                raise
            if kwargs.get("as_json"):
                with suppress(OSError):  # stdout itself may be what failed
                    emit_json({"ok": False, **_facts(error)})
            fail(str(error))
            raise typer.Exit(FAILED if type(error).__name__ == "VerificationFailed" else USAGE) from None
        finally:
            log.removeHandler(notes)
        if code:
            raise typer.Exit(code)

    return run


def _facts(error: GraphwrightError | OSError) -> dict[str, Any]:
    if isinstance(error, GraphwrightError):
        return dict(error.to_json())
    return {"error": type(error).__name__, "what": str(error)}


def fail(text: str) -> None:
    """An error on stderr."""
    first, _, rest = text.partition("\n")
    red, off = ("\033[31m", "\033[0m") if colours(sys.stderr) else ("", "")
    print(f"{red}error{off}  {first}" + (f"\n{rest}" if rest else ""), file=sys.stderr)


def say(text: str = "") -> None:
    """A line on stdout."""
    print(text, flush=True)


def emit_json(value: dict[str, Any]) -> None:
    """The JSON document on stdout."""
    print(json.dumps({"schema": SCHEMA, **value}, indent=1), flush=True)


def colours(stream: Any) -> bool:
    """Whether to colour: a terminal, and neither NO_COLOR nor TERM=dumb."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises: UnreadableFile."""
    from graphwright.files import UnreadableFile

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile("the text cannot be read", where=str(path), got=str(error)) from None


def set_threads(threads: int) -> None:
    """Limit the CPU threads of everything that runs."""
    if threads:
        from graphwright.array.cpu import set_num_threads

        set_num_threads(threads)


@contextmanager
def bar(quiet: bool = False) -> Iterator[Report | None]:
    """A progress bar on stderr with rate and remaining time, and the table of the last event below it.

    None when nobody would see it.
    """
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
        TextColumn("{task.fields[facts]}", table_column=Column()),  # the one that wraps where it is narrow
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
