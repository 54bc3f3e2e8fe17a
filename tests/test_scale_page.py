"""docs/scale.md is what scripts/scale_on_paper.py writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_page_of_a_step_at_scale_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("scale_on_paper", ROOT / "scripts" / "scale_on_paper.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look it up
    spec.loader.exec_module(module)
    machine = module.measured(module.Machine(), ROOT / "docs" / "gpu.json")
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert module.page(machine) == page, "run python scripts/scale_on_paper.py --write docs/scale.md"
