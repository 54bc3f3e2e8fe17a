"""Rows of a report as aligned text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Columns by name, numbers with four digits; `-` for what is None or absent."""
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells), 0) for i, name in enumerate(columns)]
    numeric = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]
    lines = [list(columns), *cells]
    return "\n".join(
        "  ".join(
            c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple | list):
        return "x".join(map(str, value))
    return str(value)
