"""Shared parts of all commands: options, output as text or one JSON document, errors, exit codes, progress bars."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields
from inspect import Parameter, Signature, cleandoc, signature
from io import BytesIO, TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from graphwright.errors import GraphwrightError, UsageError
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import terminal_width, wrapped

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


Dir = Annotated[str, argument("DIR", "Hugging Face directory, saved model or program, or the word bundled.")]
Seed = Annotated[int, option("N", "Seed of all random numbers.")]
OnDevice = Annotated[str, option("NAME", "Device to run on, such as cuda or cuda:1.", "--device")]
Overwrite = Annotated[bool, flag("--overwrite", "Replace existing files.")]
Check = Annotated[str, option("HOW", "Check by transformers in a separate process: auto, required or none.")]
Prefer = Annotated[str, option("WHAT", "class (the original one of transformers) or size (no zeros).")]
COMMON: Mapping[str, tuple[Any, Any]] = {
    "threads": (0, option("N", "CPU threads; 0 leaves the default.", min=0)),
    "quiet": (False, flag("--quiet", "Write no progress and no notes.")),
    "as_json": (False, flag("--json", "Write one JSON document to stdout, everything else to stderr.")),
    "debug": (False, flag("--debug", "Show the traceback of an error.")),
}
"""Default and metadata of the options of every command; a function receives only those that its signature names."""
_silent: ContextVar[bool] = ContextVar("silent", default=False)


class _Notes(logging.Handler):
    """A handler that writes the log of the library to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if _rank() == 0:
            print(f"note  {record.getMessage()}", file=sys.stderr)


class Command:
    """A decorator that makes a function a command: its output is written as text or JSON.

    Errors of the package become a short text and an exit code, Ctrl-C becomes 130. The text of a KeyboardInterrupt says
    what was saved.

    Args:
        example: a command line, shown at the end of the help.
        options: "module:name" of a dataclass whose fields are options too, besides those of `COMMON`; the function gets
            an instance as `options`. Fields with the name of a parameter of the function are left out.
        hide: names of further fields that are left out, separated by spaces.
        flags: names of options by field, where they differ.
    """

    def __init__(self, example: str, options: str = "", *, hide: str = "", **flags: str) -> None:
        self.example, self.options, self.hide, self.flags = example, options, hide.split(), flags

    def __call__(self, fn: Callable[..., Output | None]) -> Self:
        """Return the command that runs `fn`."""
        self.fn, self.name, self.summary = fn, fn.__name__, str(fn.__doc__).partition("\n")[0]
        return self

    def build(self) -> Any:
        """Return the command for typer; the module of its options is imported only now."""
        kind = resolve_name(self.options) if self.options else None
        known = signature(self.fn, eval_str=True, locals={kind.__name__: kind} if kind else {}).parameters
        own = [p for p in known.values() if p.name not in COMMON and p.name != "options"]
        added = options_of(kind, {*known, *self.hide}, self.flags) if kind else []
        common = [_parameter(name, type(default), default, info) for name, (default, info) in COMMON.items()]

        def run(**given):
            def call() -> Output | None:
                if given["threads"] and "threads" not in known:
                    from graphwright.array.threads import set_num_threads

                    set_num_threads(given["threads"])
                kept = {name: given[name] for name in known if name in given}
                if kind:
                    kept["options"] = kind(**{p.name: given[p.name] for p in added})
                return self.fn(**kept)

            _run(call, given["quiet"], given["as_json"], given["debug"])

        run.__name__, run.__doc__ = self.name, self.fn.__doc__
        vars(run)["__signature__"] = Signature([*own, *added, *common])
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(epilog=f"Example: {self.example}")(run)
        return typer.main.get_command(app)


def options_of(kind: type, hide: Collection[str], flags: Mapping[str, str]) -> list[Parameter]:
    """Return the fields of a dataclass as options; see `Command` for `hide` and `flags`.

    Type and default are those of the field, the help is its text in the section `Attributes` of the docstring. Names in
    a tuple are separated by commas.
    """
    texts: dict[str, str] = {}
    for section in (cleandoc(base.__doc__ or "").partition("Attributes:")[2] for base in reversed(kind.__mro__)):
        for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.M):
            texts |= dict.fromkeys(names.split(", "), " ".join(text.replace("`", "").split()))
    hints, made = get_type_hints(kind), []
    for f in (f for f in fields(kind) if f.name not in hide):
        name, text, default, more = flags.get(f.name, f.name).replace("_", "-"), texts[f.name], f.default, {}
        if isinstance(default, tuple):
            default, text, more = ",".join(default), f"{text.rstrip('.')}; comma-separated.", {"parser": names_of}
        text, types = text[0].upper() + text[1:], get_args(hints[f.name]) or (hints[f.name],)
        value = next((t for t in (bool, int, float) if t in types and str not in types), str)
        if value is bool:
            info = flag(f"--{name}/--no-{name}" if default else f"--{name}", text)
        else:
            metavar = {int: "N", float: "X"}.get(value, name.rpartition("-")[2].upper())
            info = option(metavar, text, f"--{name}", **more)
        made.append(_parameter(f.name, value | None if default is None else value, default, info))
    return made


def _parameter(name: str, kind: Any, default: Any, info: Any) -> Parameter:
    annotated: Any = Annotated  # a type made at run time
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotated[kind, info])


def _run(call: Callable[[], Output | None], quiet: bool, as_json: bool, debug: bool) -> None:
    least = logging.CRITICAL + 1 if quiet else logging.WARNING
    log, notes, before = logging.getLogger("graphwright"), _Notes(least), _silent.set(quiet or as_json)
    log.addHandler(notes)
    try:
        done = call() or Output({})
        if as_json and _rank() == 0:
            emit_json(done.facts)
        elif done.text and _rank() == 0:
            say(done.text)
    except KeyboardInterrupt as stop:
        saved = str(stop) or "no incomplete files remain"
        if as_json:
            emit_json({"ok": False, "error": "Interrupted", "what": saved})
        print(f"\ninterrupted  {saved}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        os._exit(DONE)
    except (GraphwrightError, OSError, MemoryError) as error:
        if debug:
            raise
        if as_json:
            facts = {"error": type(error).__name__, "what": str(error)}
            if isinstance(error, GraphwrightError):
                facts = error.to_json()
            with suppress(OSError):  # stdout may have failed
                emit_json({"ok": False, **facts})
        fail(str(error) or "not enough memory")
        raise typer.Exit(FAILED if type(error).__name__ == "VerificationFailed" else USAGE) from None
    finally:
        log.removeHandler(notes)
        _silent.reset(before)
    if done.code:
        raise typer.Exit(done.code)


def _rank() -> int:
    from graphwright.array.world import world  # loads numpy

    return world().rank


def fail(text: str) -> None:
    """Write an error message to stderr."""
    text = wrapped(text, terminal_width(sys.stderr))
    red, off = ("\033[31m", "\033[0m") if colours(sys.stderr) else ("", "")
    who = f" on rank {_rank()}" if _rank() else ""
    print(f"{red}error{who}{off}  {text}", file=sys.stderr)


def say(text: str = "") -> None:
    """Write a line to stdout."""
    print(text, flush=True)


def emit_json(value: Mapping[str, Any]) -> None:
    """Write the JSON document to stdout."""
    print(json.dumps({"schema": 1, **value}, indent=1), flush=True)


def silent() -> bool:
    """Return whether a command with --quiet or --json is running, or another rank than 0 of several."""
    return _silent.get() or _rank() != 0


def colours(stream: Any) -> bool:
    """Return whether to use colours: on a terminal, unless NO_COLOR is set or TERM is dumb."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def read_text(path: Path | str) -> str:
    """Read a UTF-8 file. Raises: UnreadableFile if it is missing, not a regular file or not UTF-8."""
    from graphwright.files import UnreadableFile, read_file

    try:
        return TextIOWrapper(BytesIO(read_file(path)), encoding="utf-8").read()  # with line ends as \n
    except UnicodeDecodeError as error:
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

    ALL: ClassVar[dict[str, Command]] = {}
    """The commands by name, in the order of the help."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands: Any = self.ALL

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with its options; None if it is unknown."""
        return self.ALL[cmd_name].build() if cmd_name in self.ALL else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, which needs none of their options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self.ALL.items()])

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
