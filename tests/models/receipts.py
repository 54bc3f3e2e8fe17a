"""A receipt that was changed deliberately."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path


def rewrite(directory: Path, change: Callable[[dict], object]) -> None:
    """Change a receipt and give it the checksum that it then needs."""
    data = json.loads((directory / "receipt.json").read_text())
    data.pop("sha256")
    change(data)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (directory / "receipt.json").write_text(json.dumps({**data, "sha256": digest}))
