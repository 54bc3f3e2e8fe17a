"""The base of all reports: its JSON, and that every report, result, difference and receipt derives from it."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

import graphwright as gw
from graphwright.report import Report, brief, listed, plain, table, wrapped

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


def test_lines_are_wrapped_between_words_below_the_second_column():
    text = "  error    tensor   layers.1.mlp.up.weight  671 values are not finite, the first at [0, 13]\nshort\n\n  end"
    assert wrapped(text, 60) == (
        "  error    tensor   layers.1.mlp.up.weight  671 values are\n"
        "           not finite, the first at [0, 13]\n"
        "short\n\n  end"
    )
    assert wrapped("one line of plain words without columns", 24) == "one line of plain words\n    without columns"
    path = "a" * 50
    assert wrapped(f"see {path} for more", 30) == f"see\n    {path}\n    for more"
    assert wrapped(f"  {path}", 30) == f"  {path}"
    for width in (60, 80, 120):
        assert wrapped(wrapped(text, width), width) == wrapped(text, width)
    assert wrapped(text, 0) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_reports_have_the_width_of_the_terminal_and_files_are_not_wrapped(monkeypatch):
    row = Row("words " * 30)
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(row).split("\n"))) > 150
    monkeypatch.setattr("sys.stdout", Terminal())
    lines = str(row).split("\n")
    assert max(map(len, lines)) <= 60
    assert {line[:19] for line in lines[1:]} == {" " * 14 + "words"}


def test_long_lists_are_cut():
    assert listed(list("abcdef"), most=3) == ["a", "b", "c", "... 3 more"]
    assert listed(list("abcd"), "more nodes", most=3) == list("abcd")
    assert brief(list(range(50))) == "[0, 1, 2, 3, 4, 5, ... 44 more]"
    assert brief({"a": [1, [2, 3]], "b": None}) == "{a: [1, [2, 3]], b: None}"
    assert table([{"n": k} for k in range(99)], ["n"]).endswith("37\n... 61 more rows")


def test_reports_of_a_model_are_readable_at_each_width(monkeypatch, tmp_path):
    model, before = gw.open("bundled"), gw.open("bundled").program
    p = model.program
    model.select("layers.1.mlp").neurons[:256].prune()
    receipt = model.export(tmp_path / "out", check="none")
    with p.edit("five defects", check=False) as e:
        e.cut("layers.0.mid -> layers.0.out")
        e.insert("layers.1.mlp.mul -> layers.1.mlp.down", "stop_gradient", name="layers.1.mlp.stopped")
    plan, frozen = (before.compile(ids=(1, 4), positions=(1, 4), freeze=freeze) for freeze in (False, True))
    reports = [model.inspect(), model.export_plan(), receipt, gw.surgery.diagnose(p),
               p.validate(), p.diff(before), p.axes(), p.select("**"), p.journal,
               plan.diff(frozen)]  # fmt: skip
    whole = [str(report) for report in reports]
    assert all(text.count("\n") < 4 * 42 for text in whole)
    monkeypatch.setattr("sys.stdout", Terminal())
    for width in ("60", "80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        for report, text in zip(reports, whole, strict=True):
            lines = str(report).split("\n")
            assert " ".join(str(report).split()) == " ".join(text.split()), type(report)  # no word is split
            assert all(len(line) <= int(width) or len(line.split()) == 1 for line in lines), (type(report), width)
