"""Count outcomes of all samples of torch's OpInfo, for docs/torch.md: `python scripts/opinfo_counts.py [--check]`.

With --check nothing is written; the exit status is 1 if the stored counts differ. Runs for minutes.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

from written import write_or_check

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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(write_or_check({COUNTS: counted()}))
