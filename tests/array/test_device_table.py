"""The table of docs/devices.md is what scripts/device_table.py writes."""

from __future__ import annotations

import pytest

from script_modules import SCRIPTS, load


def test_the_table_of_kernels_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(SCRIPTS / "device_table.py", monkeypatch)
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.written(text) == text, "run python scripts/device_table.py"
