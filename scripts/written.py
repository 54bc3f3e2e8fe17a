"""Files that a script writes, or with --check compares."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(texts: Mapping[Path, str]) -> int:
    """Write each text to its file, or with --check in the command line print those that differ.

    Returns: the exit status, 1 if --check finds a file that differs from what would be written.
    """
    if "--check" not in sys.argv:
        for path, text in texts.items():
            path.write_text(text, "utf-8")
        return 0
    wrong = [path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in wrong:
        print(f"{path.name}: run scripts/{Path(sys.argv[0]).name}")
    return bool(wrong)
