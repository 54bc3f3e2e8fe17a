"""Base of all reports, results and differences: dataclass fields as JSON, and tables of aligned text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from math import isfinite
from typing import Any, ClassVar, TypeVar, cast

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

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{value}" for name, value in self.to_json().items())

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
    return "\n".join(lines)


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
