"""Write the tables of each machine beside its results, `docs/performance.md` from its template, and tables of pages.

`results/<machine>/tables.md` holds every stored figure. The template `performance.md` holds the conclusions; a field
`{{ benchmark | part of the title | row }}` becomes the stored median, of the first machine of `MACHINES` that has it,
and `{{ ... @ machine }}` that of a machine by its short name. In any other page the lines between the comments
`<!-- table: benchmark | part of the title -->` and `<!-- end -->` become the rows and notes of that figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TEMPLATE = Path(__file__).with_name("performance.md")
MACHINES = {
    "epyc2": "amd-epyc-family-25-model-17",
    "epyc": "amd-epyc",
    "xeon": "intel-r-xeon-r-processor-2-50ghz",
    "epyc5": "amd-epyc-family-26-model-2",
    "xeon2": "intel-r-xeon-r-processor-family-6-model-167",
}
"""Short name -> folder of results, in the order in which fields look for their figure."""
_FIELD = re.compile(r"\{\{([^{}]*)\}\}")
_TABLE = re.compile(r"(<!-- table: ([^|>]+)\|([^>]+) -->\n).*?(<!-- end -->)", re.S)
_STEPS = {"s": ("s", 1.0), "ms": ("s", 1e-3), "us": ("s", 1e-6), "ns": ("s", 1e-9)}


def render() -> None:
    """Write all tables and the page."""
    for folder in sorted(RESULTS.iterdir()):
        (folder / "tables.md").write_text(tables(folder), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    for path in PAGE.parent.glob("*.md"):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


def page() -> str:
    """The page with all fields filled in. Raises: KeyError for a field that names no stored figure."""
    text = _FIELD.sub(lambda m: value(m[1]), TEMPLATE.read_text(encoding="utf-8"))
    return text


def with_tables(text: str) -> str:
    """A page with its tables filled in again. Raises: KeyError for a table that names no stored figure."""
    return _TABLE.sub(lambda m: f"{m[1]}{table(m[2].strip(), m[3].strip())}{m[4]}", text)


def table(name: str, title: str) -> str:
    """Rows of the first stored figure whose title has this part: who, value, and the parts of the note."""
    figure = next(figures(name, title, MACHINES.values()), None)
    if figure is None:
        raise KeyError(f"no stored figure for {name} | {title}")
    rows = [[r["who"], f"{r['value']:,.4g} {r['unit']}".strip(), *r["note"].split("; ")] for r in figure["rows"]]
    width = max(map(len, rows))
    lines = [[""] * width, ["---", "---:", *["---"] * (width - 2)]]
    lines += [[*row, *[""] * (width - len(row))] for row in rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"\n{text}\n\n" + "".join(f"- {note}\n" for note in figure["notes"]) + "\n"


def figures(name: str, title: str, folders: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The stored figures of a benchmark whose title and conditions have this part, machine by machine."""
    for folder in folders:
        path = RESULTS / folder / f"{name}.json"
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))["figures"]
            yield from (f for f in stored if title in f["title"] + ", " + f["conditions"])


def value(field: str) -> str:
    """The stored median of one field, with its unit."""
    wanted, _, machine = (part.strip() for part in field.partition("@"))
    name, title, row = (part.strip() for part in wanted.split("|"))
    for figure in figures(name, title, [MACHINES[machine]] if machine else MACHINES.values()):
        for r in figure["rows"]:
            if r["who"] == row:
                return quantity(r["value"], r["unit"])
    raise KeyError(f"no stored figure for {{{{{field}}}}}")


def quantity(number: float, unit: str) -> str:
    """A number with its unit in three digits; seconds with the prefix that suits."""
    if unit in _STEPS:
        seconds = number * _STEPS[unit][1]
        unit, size = next(((u, s) for u, (_, s) in _STEPS.items() if seconds >= s), ("ns", 1e-9))
        number = seconds / size
    if unit == "bits per byte":
        return f"{number:.2f}"
    digits = f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
    return f"{digits} {unit}".strip()


def tables(folder: Path) -> str:
    """All figures stored of one machine."""
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    lines = [
        f"# {stored[0]['machine']['cpu']}",
        "",
        "Written by `python -m benchmarks`. Medians with bootstrap 95 % intervals; `A/A` is the first row measured a",
        "second time, the noise of the machine. Compare within a table, not between tables.",
        "",
    ]
    for data in stored:
        lines += _tables(data)
    return "\n".join(lines)


def _tables(data: dict[str, Any]) -> list[str]:
    """One benchmark's figures, and how they were made."""
    lines: list[str] = []
    m = data["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in m["versions"].items())
    for figure in data["figures"]:
        lines += [
            f"## {figure['title']}",
            "",
            figure["conditions"] + ".",
            "",
            "| | value | 95 % | |",
            "| --- | ---: | --- | --- |",
        ]
        for r in figure["rows"]:
            span = f"{r['low']:,.4g} to {r['high']:,.4g}" if r["low"] is not None else ""
            lines.append(f"| {r['who']} | {r['value']:,.4g} {r['unit']} | {span} | {r['note']} |")
        lines += ["", *(f"{s}\n" for s in figure["notes"])]
        if "part" in figure:
            lines += [f"`{data['command']}:{figure['part']}`, commit {figure['commit']}.", ""]
    made = f"{m['cores']} cores of {m['cpu']}, Python {m['python']}, {versions}, commit {m['commit']}"
    return [*lines, f"`{data['command']}`, {made}.", ""]


if __name__ == "__main__":
    render()
