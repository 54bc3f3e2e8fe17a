"""`docs/performance.md` from the stored results and the reasons in `limits.md`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
LIMITS = Path(__file__).with_name("limits.md")


def render() -> None:
    """Write the page."""
    lines = [
        "# Performance",
        "",
        "Each table is printed by the command under it; the page is written by `python -m benchmarks`.",
        "Medians with bootstrap 95 % intervals; `A/A` is the first row measured again, as the noise of the machine.",
        "What was measured on other kinds of machines stands under the first, with their names in the titles.",
        "Clocks and neighbours differ from run to run: compare within a table, not between them.",
        "",
        LIMITS.read_text(encoding="utf-8"),
    ]
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*/*.json")]
    often = Counter(data["machine"]["cpu"] for data in stored)
    first = max(sorted(often), key=often.__getitem__)
    for data in sorted(stored, key=lambda d: (d["name"], d["machine"]["cpu"] != first, d["machine"]["cpu"])):
        lines += _tables(data, "" if data["machine"]["cpu"] == first else f" ({data['machine']['cpu']})")
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def _tables(data: dict[str, Any], where: str) -> list[str]:
    """One benchmark's figures, and how they were made; `where` goes into their titles."""
    lines: list[str] = []
    m = data["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in m["versions"].items())
    for figure in data["figures"]:
        lines += [
            f"## {figure['title']}{where}",
            "",
            figure["conditions"] + ".",
            "",
            "| | value | 95 % | |",
            "| --- | ---: | --- | --- |",
        ]
        for r in figure["rows"]:
            span = f"{r['low']:,.4g} to {r['high']:,.4g}" if r["low"] is not None else ""
            lines.append(f"| {r['who']} | {r['value']:,.4g} {r['unit']} | {span} | {r['note']} |")
        lines += ["", *(f"{s}\n" for s in figure["says"])]
        if "part" in figure:
            lines += [f"`{data['command']}:{figure['part']}`, commit {figure['commit']}.", ""]
    made = f"{m['cores']} cores of {m['cpu']}, Python {m['python']}, {versions}, commit {m['commit']}"
    return [*lines, f"`{data['command']}`, {made}.", ""]


if __name__ == "__main__":
    render()
