"""`docs/performance.md` from the stored results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def render() -> None:
    """Write the page."""
    lines = [
        "# Performance",
        "",
        "Each table is printed by the command under it; the page is written by `python -m benchmarks`.",
        "Medians with bootstrap 95 % intervals; `A/A` is the first row measured again, as the noise of the machine.",
        "",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
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
            lines += ["", *(f"{s}\n" for s in figure["says"])]
        lines += [
            f"`{data['command']}`, {m['cores']} cores of {m['cpu']}, Python {m['python']}, {versions}, "
            f"commit {m['commit']}.",
            "",
        ]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    render()
