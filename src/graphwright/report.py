"""Base of all reports: dataclass fields as JSON, and tables of aligned text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, ClassVar, cast


class ReportBase:
    """Base of reports that are dataclasses.

    Attributes:
        FIGURES: names of properties that the JSON contains besides the fields.
        HIDDEN: names of fields that the JSON leaves out.
    """

    __slots__ = ()
    FIGURES: ClassVar[tuple[str, ...]] = ()
    HIDDEN: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the fields except `HIDDEN`, and of the properties `FIGURES`."""
        names = [f.name for f in fields(cast(Any, self)) if f.name not in self.HIDDEN]
        return {name: plain(getattr(self, name)) for name in (*names, *self.FIGURES)}

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{value}" for name, value in self.to_json().items())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def plain(value: Any) -> Any:
    """Convert a value to JSON-serialisable values: dataclasses and named tuples to dicts, sequences to lists."""
    if isinstance(value, ReportBase):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = cast(Any, value)._asdict()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


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
