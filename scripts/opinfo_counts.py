"""Count outcomes of all samples of torch's OpInfo, for docs/torch.md: `python scripts/opinfo_counts.py [--check]`.

With --check nothing is written; the exit status is 1 if the stored counts differ. Runs for minutes.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ops"))
from opinfo import COUNTS, compare, counterpart, entries  # pyright: ignore[reportMissingImports]


def counted() -> str:
    """Return the lines `outcome: number`, sorted; the first ones count entries."""
    total, present = Counter(), 0
    for op in entries():
        if (function := counterpart(op)) is not None:
            present += 1
            total += compare(op, function).counts
    rows = {"entries": len(entries()), "entries with a counterpart": present} | dict(sorted(total.items()))
    return "".join(f"{name}: {number}\n" for name, number in rows.items())


def main() -> int:
    """Write the counts, or compare them."""
    warnings.simplefilter("ignore")
    text = counted()
    if "--check" in sys.argv:
        if COUNTS.read_text("utf-8") == text:
            return 0
        print(f"{COUNTS.name}: run scripts/opinfo_counts.py")
        return 1
    COUNTS.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
