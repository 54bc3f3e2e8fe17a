"""Base of all reports, results and differences: dataclass fields as JSON, and tables of aligned text."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from math import isfinite
from shutil import get_terminal_size
from typing import Any, ClassVar, TextIO, TypeVar, cast

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


class Report:
    """Base of reports, results and differences, most of which are dataclasses.

    Attributes:
        FIGURES: names of properties (or attributes) that the JSON contains besides the fields of a dataclass.
        HIDDEN: names of fields that the JSON leaves out.
        OPTIONAL: names of fields that the JSON leaves out if they are None or empty.
    """

    __slots__ = ()
    FIGURES: ClassVar[tuple[str, ...]] = ()
    HIDDEN: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the fields except `HIDDEN`, and of the properties `FIGURES`."""
        names = [f.name for f in fields(self)] if is_dataclass(self) else []
        hidden = {*self.HIDDEN, *(name for name in self.OPTIONAL if getattr(self, name) in (None, ""))}
        return {n: plain(getattr(self, n)) for n in (*names, *self.FIGURES) if n not in hidden}

    def _text(self) -> str:
        """Return the report as text, whose lines may be long; `str` wraps them. Subclasses replace it."""
        return "\n".join(f"{name:<14}{brief(value)}" for name, value in self.to_json().items())

    def __str__(self) -> str:
        return wrapped(self._text())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class ShortTuple(tuple[_Item, ...]):
    """A tuple whose repr is the number of its entries and the first of them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"({len(self)} entries{', the first ' + repr(self[0]) if self else ''})"


class ShortDict(dict[_Key, _Item]):
    """A dict whose repr is the number of its entries and the first of them."""

    __slots__ = ()

    def __repr__(self) -> str:
        first = next(iter(self.items()), None)
        return f"{{{len(self)} entries{f', the first {first[0]!r}: {first[1]!r}' if first else ''}}}"


MOST = 39
"""Lines of a list in a report before the line that says how many more there are."""
_FEW = 6  # entries of a list within a line


def listed(lines: Sequence[str], more: str = "more", most: int = MOST) -> list[str]:
    """Return the first `most` lines of a list, and how many `more` there are; one more line is not cut."""
    rest = len(lines) - most
    return [*lines[:most], f"... {rest} {more}"] if rest > 1 else list(lines)


def brief(value: Any) -> str:
    """Write a JSON value in one line, with the first entries of long lists and dicts and how many more there are."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(listed([f'{k}: {brief(v)}' for k, v in value.items()], most=_FEW))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(listed([brief(v) for v in value], most=_FEW))}]"
    return str(value)


def wrapped(text: str, width: int | None = None) -> str:
    """Wrap the lines of a text between words; what follows stands under the second column, or is indented by four.

    Args:
        text: lines, of which columns are separated by two spaces or more. Words are never split.
        width: in characters; by default that of the terminal to which `sys.stdout` writes; for files and pipes nothing
            is wrapped.
    """
    width = terminal_width(sys.stdout) if width is None else width
    if width < _NARROW:
        return text
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def terminal_width(stream: TextIO | None) -> int:
    """Return the width of the terminal to which a stream writes, in characters; 0 for a file or a pipe."""
    return get_terminal_size().columns if stream is not None and stream.isatty() else 0


_NARROW = 20  # characters; in less, wrapped text is harder to read than long lines
_BREAK = re.compile(r" +(?! |%)")  # a number stays with its percent sign
_COLUMN = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")


def _parts(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    words, column = line.lstrip(" "), _COLUMN.match(line)
    start = min(len(line) - len(words), width // 3)
    hang = column.end() if column and column.end() <= width // 2 else start + 4
    parts, at = list[str](), " " * start
    while len(words) > width - len(at):
        breaks = [m.start() for m in _BREAK.finditer(words)]
        fitting = [b for b in breaks if len(at) + b <= width]
        if not breaks:
            break
        end = fitting[-1] if fitting else breaks[0]  # a word longer than the line stays whole
        parts.append(at + words[:end].rstrip(" "))
        words, at = words[end:].lstrip(" "), " " * hang
    return [*parts, at + words]


def plain(value: Any) -> Any:
    """Convert a value to strict JSON: dataclasses and named tuples to dicts; functions, enums, inf and NaN to text."""
    if isinstance(value, Report):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = cast(Any, value)._asdict()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if callable(value):
        return getattr(value, "__name__", repr(value))
    return str(value) if isinstance(value, Enum) or (isinstance(value, float) and not isfinite(value)) else value


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a text table of the `columns` of `rows`: floats with four digits, `-` for None or a missing entry."""
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells), 0) for i, name in enumerate(columns)]
    right = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]
    lines = []
    for line in [list(columns), *cells]:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(listed(lines, "more rows"))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def bytes_text(n: float) -> str:
    """Return a number of bytes in B, KiB, MiB or GiB."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB"))


def flops_text(n: float) -> str:
    """Return a number of floating-point operations in FLOP, kFLOP, MFLOP, GFLOP or TFLOP."""
    return _scaled(n, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    unit, *larger = units
    while n >= base and larger:
        n, unit, *larger = n / base, *larger
    return f"{n:.0f} {unit}" if unit == units[0] else f"{n:.2f} {unit}"
