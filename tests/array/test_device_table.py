"""The table of docs/devices.md is what scripts/device_table.py writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "device_table.py"


def test_the_table_of_kernels_is_current() -> None:
    spec = importlib.util.spec_from_file_location("device_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.written(text) == text, "run python scripts/device_table.py"
