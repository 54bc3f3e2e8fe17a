"""docs/scale.md is what scripts/scale_on_paper.py writes."""

from __future__ import annotations

import pytest

from script_modules import SCRIPTS, load


def test_the_page_of_a_step_at_scale_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(SCRIPTS / "scale_on_paper.py", monkeypatch)
    docs = SCRIPTS.parent / "docs"
    machine = module.measured(module.Machine(), docs / "gpu.json")
    page = (docs / "scale.md").read_text(encoding="utf-8")
    assert module.page(machine) == page, "run python scripts/scale_on_paper.py --write docs/scale.md"
