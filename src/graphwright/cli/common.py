"""Shared parts of all commands: options, output as text or one JSON document, errors, exit codes, progress bars."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from graphwright.errors import GraphwrightError, UsageError
from graphwright.progress import Progress, ProgressCallback

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class Output(NamedTuple):
    """The result of a command: a JSON document, the same content as text, and the exit code."""

    facts: Mapping[str, Any]
    text: str = ""
    code: int = DONE


def argument(metavar: str, help: str) -> Any:
    """Declare a positional argument, as metadata of a parameter's type."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(metavar: str, help: str, *names: str, **limits: Any) -> Any:
    """Declare an option with a value, as metadata of a parameter's type; by default it is named after the parameter."""
    return typer.Option(*names, metavar=metavar, help=help, **limits)


def flag(name: str, help: str) -> Any:
    """Declare an option without a value, as metadata of a parameter's type."""
    return typer.Option(name, help=help)


Dir = Annotated[str, argument("DIR", "Hugging Face directory, saved model, or the word bundled.")]
Seed = Annotated[int, option("N", "Seed of all random numbers.")]
Overwrite = Annotated[bool, flag("--overwrite", "Replace existing files.")]
Check = Annotated[str, option("HOW", "Check by transformers in a separate process: auto, required or none.")]
Prefer = Annotated[str, option("WHAT", "original (classes of transformers) or size (no zeros).")]
OptionTable = Mapping[str, tuple[Any, Any]]
"""Option of a command -> (default, metadata). Its type is that of the default; None means an optional text."""

COMMON: OptionTable = {
    "threads": (0, option("N", "CPU threads; 0 leaves the default.", min=0)),
    "quiet": (False, flag("--quiet", "Write no progress and no notes.")),
    "as_json": (False, flag("--json", "Write one JSON document to stdout, everything else to stderr.")),
    "debug": (False, flag("--debug", "Show the traceback of an error.")),
}
"""Options of every command; a command function receives only those that its signature names."""
EXAMPLES: dict[str, str] = {}
"""The example of each command, shown at the end of its help."""
_silent: ContextVar[bool] = ContextVar("silent", default=False)


class _Notes(logging.Handler):
    """A handler that writes the log of the library to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note  {record.getMessage()}", file=sys.stderr)


def command(example: str, **more: tuple[Any, Any]) -> Callable[[Callable[..., Output | None]], Callable[..., None]]:
    """Make a function a command, with the options of `COMMON`; its output is written as text or JSON.

    Errors of the package become a short text and an exit code, Ctrl-C becomes 130. The text of a KeyboardInterrupt says
    what was saved.

    Args:
        example: a command line, shown at the end of the help.
        more: further options as name=(default, metadata); the function gets them by name, mostly as `**options`.
    """

    def make(fn: Callable[..., Output | None]) -> Callable[..., None]:
        EXAMPLES[fn.__name__] = example
        known = signature(fn, eval_str=True).parameters
        added = {name: _parameter(name, *row) for name, row in {**more, **COMMON}.items()}
        own = [p for p in known.values() if p.name not in added and p.kind is not p.VAR_KEYWORD]

        @wraps(fn)
        def run(**given: Any) -> None:
            kept = {name: value for name, value in given.items() if name not in COMMON or name in known}

            def call() -> Output | None:
                if given["threads"] and "threads" not in known:
                    from graphwright.array.cpu import set_num_threads

                    set_num_threads(given["threads"])
                return fn(**kept)

            _run(call, given["quiet"], given["as_json"], given["debug"])

        vars(run)["__signature__"] = Signature([*own, *added.values()])
        return run

    return make


def _parameter(name: str, default: Any, info: Any) -> Parameter:
    annotated: Any = Annotated  # a type made at run time
    kind = annotated[str | None if default is None else type(default), info]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _run(call: Callable[[], Output | None], quiet: bool, as_json: bool, debug: bool) -> None:
    log, notes, before = logging.getLogger("graphwright"), _Notes(logging.WARNING), _silent.set(quiet or as_json)
    if not quiet:
        log.addHandler(notes)
    try:
        done = call() or Output({})
        if as_json:
            emit_json(done.facts)
        elif done.text:
            say(done.text)
    except KeyboardInterrupt as stop:
        saved = str(stop) or "no incomplete files remain"
        if as_json:
            emit_json({"ok": False, "error": "Interrupted", "what": saved})
        print(f"\ninterrupted  {saved}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        os._exit(DONE)
    except (GraphwrightError, OSError) as error:
        if debug:
            raise
        if as_json:
            facts = {"error": type(error).__name__, "what": str(error)}
            if isinstance(error, GraphwrightError):
                facts = error.to_json()
            with suppress(OSError):  # stdout may have failed
                emit_json({"ok": False, **facts})
        fail(str(error))
        raise typer.Exit(FAILED if type(error).__name__ == "VerificationFailed" else USAGE) from None
    finally:
        log.removeHandler(notes)
        _silent.reset(before)
    if done.code:
        raise typer.Exit(done.code)


def fail(text: str) -> None:
    """Write an error message to stderr."""
    red, off = ("\033[31m", "\033[0m") if colours(sys.stderr) else ("", "")
    print(f"{red}error{off}  {text}", file=sys.stderr)


def say(text: str = "") -> None:
    """Write a line to stdout."""
    print(text, flush=True)


def emit_json(value: Mapping[str, Any]) -> None:
    """Write the JSON document to stdout."""
    print(json.dumps({"schema": 1, **value}, indent=1), flush=True)


def silent() -> bool:
    """Return whether a command with --quiet or --json is running."""
    return _silent.get()


def colours(stream: Any) -> bool:
    """Return whether to use colours: on a terminal, unless NO_COLOR is set or TERM is dumb."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def read_text(path: Path | str) -> str:
    """Read a UTF-8 file. Raises: UnreadableFile if it is missing or not UTF-8."""
    from graphwright.files import UnreadableFile

    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile("cannot read the text file", where=str(path), got=str(error)) from None


def names_of(text: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


@contextmanager
def bar() -> Iterator[ProgressCallback | None]:
    """Show a progress bar, and the table of the last event, on stderr; yield None if silent or not on a terminal."""
    if silent() or not colours(sys.stderr):
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
                    table.add_row(row, *(_number(numbers[name]) for name in names))
                yield table

    timed = (MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(20),
        *(kind(table_column=Column(no_wrap=True)) for kind in timed),
        TextColumn("{task.fields[facts]}", table_column=Column()),  # this column wraps on a narrow terminal
    )
    with Shown(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, Any] = {}

        def show(p: Progress) -> None:
            facts = "  ".join(f"{name} {_number(value)}" for name, value in p.facts.items())
            if p.what not in tasks:
                tasks[p.what] = shown.add_task(p.what, total=p.total, facts=facts)
            shown.update(tasks[p.what], completed=p.done, facts=facts)
            shown.rows = p.table

        yield show


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


_WrongUse: Any = typer.BadParameter.__base__  # no version of typer exports the base class of usage errors


class Commands(TyperGroup):
    """The group of all commands; with `--json`, a usage error is written as a JSON document too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        ctx.obj = "--json" in (args[: args.index("--")] if "--" in args else args)
        with _usage_errors(ctx.obj):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command and run it."""
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
