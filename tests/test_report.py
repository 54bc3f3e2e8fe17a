"""The base of all reports: its JSON, and that every report, result, difference and receipt derives from it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from graphwright.report import Report, plain

SRC = Path(__file__).parents[1] / "src" / "graphwright"
ENDINGS = ("Report", "Result", "Diff", "Receipt")


class Level(IntEnum):
    HIGH = 2

    def __str__(self) -> str:
        return "high"


class Pair(NamedTuple):
    left: int
    right: float


@dataclass(frozen=True, slots=True)
class Row(Report):
    name: str
    note: str = ""
    count: int | None = None
    OPTIONAL: ClassVar = ("note", "count")


@dataclass(frozen=True, slots=True, repr=False)
class Sample(Report):
    secret: object
    level: Level
    rows: tuple[Row, ...]
    pairs: dict[Any, Pair] = field(default_factory=dict)
    HIDDEN: ClassVar = ("secret",)
    FIGURES: ClassVar = ("total",)

    @property
    def total(self) -> int:
        return len(self.rows)


def test_json_contains_all_fields_and_figures_except_hidden_and_unset_ones():
    rows = (Row("a"), Row("b", "seen", 0))
    made = Sample(object(), Level.HIGH, rows, {3: Pair(1, inf), "x": Pair(2, nan)}).to_json()
    assert made == {
        "level": "high",
        "rows": [{"name": "a"}, {"name": "b", "note": "seen", "count": 0}],
        "pairs": {"3": {"left": 1, "right": "inf"}, "x": {"left": 2, "right": "nan"}},
        "total": 2,
    }
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_json_values_are_unchanged():
    for value in (None, True, 0, -1.5, "text", [], {}):
        assert plain(value) == value
        assert type(plain(value)) is type(value)


def test_a_notebook_shows_the_text_escaped():
    class Text(Report):
        def __str__(self) -> str:
            return "a < b"

    assert repr(Text()) == "a < b"
    assert Text()._repr_html_() == "<pre>a &lt; b</pre>"


def classes(folder: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Yield file, name and names of the base classes of every class."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(b).partition("[")[0].rpartition(".")[2] for b in node.bases}
                yield str(path.relative_to(folder)), node.name, bases


def strays(folder: Path) -> list[str]:
    """Return the classes with a name of a report, result, difference or receipt that do not derive from `Report`."""
    found = list(classes(folder))
    derived, before = {"Report"}, 0
    while len(derived) > before:
        before = len(derived)
        derived |= {name for _, name, bases in found if bases & derived}
    return [f"{file}: {name}" for file, name, _ in found if name.endswith(ENDINGS) and name not in derived]


def test_every_report_result_difference_and_receipt_derives_from_report():
    assert strays(SRC) == []


@pytest.mark.parametrize("bases", ["", "(Sequence[int])", "(Other)"])
def test_classes_named_report_outside_the_hierarchy_are_found(tmp_path, bases):
    (tmp_path / "x.py").write_text(f"class Other: ...\nclass LossReport{bases}: ...\nclass Fine(report.Report): ...\n")
    assert strays(tmp_path) == ["x.py: LossReport"]
