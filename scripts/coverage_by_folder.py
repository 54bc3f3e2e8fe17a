"""Branch coverage per folder from `coverage json`; exit 1 where a folder is below its floor.

Usage: python scripts/coverage_by_folder.py coverage.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FLOORS = {"autograd": 95, "graph": 95, "models": 92, "ops": 95, "plan": 95, "program": 95}
"""Per cent of lines and branches; raised when coverage rises."""


def folders(report: dict) -> dict[str, tuple[int, int]]:
    """Folder of the package -> (covered, all) lines and branches; files beside the folders count under "."."""
    found: dict[str, tuple[int, int]] = {}
    for path, file in report["files"].items():
        parts = Path(path).parts
        inside = parts[len(parts) - 1 - parts[::-1].index("graphwright") + 1 :]
        folder, facts = inside[0] if len(inside) > 1 else ".", file["summary"]
        covered, total = found.get(folder, (0, 0))
        covered += facts["covered_lines"] + facts["covered_branches"]
        found[folder] = covered, total + facts["num_statements"] + facts["num_branches"]
    return found


def main(path: str) -> int:
    """Print the table; 1 if a floor is not held."""
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    found = folders(report)
    failed = []
    print(f"{'folder':<12} {'covered':>8} {'missed':>7} {'floor':>6}")
    for folder, (covered, total) in sorted(found.items()):
        share, floor = 100 * covered / max(total, 1), FLOORS.get(folder)
        print(f"{folder:<12} {share:7.1f}% {total - covered:>7} {'' if floor is None else f'{floor} %':>6}")
        if floor is not None and share < floor:
            failed.append(folder)
    failed += sorted(FLOORS.keys() - found.keys())
    if failed:
        print(f"below the floor, or not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
