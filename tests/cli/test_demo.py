"""The demo's figures are those of the files it leaves, and its report fits narrow screens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from graphwright.cli.demo import Chapter, _Demo
from graphwright.cli.demo_report import write_report
from narrow import WINDOW, width


def test_the_printed_size_of_the_picture_is_that_of_the_file(tmp_path: Path) -> None:
    demo = _Demo(tmp_path, quick=True, seed=0)
    demo.open()
    facts, lines, _ = demo.draw()
    size = (tmp_path / "model.svg").stat().st_size
    assert facts["bytes"] == size
    assert f"{size:,} bytes" in lines[0]


@pytest.mark.browser
def test_the_report_is_no_wider_than_a_narrow_window(tmp_path: Path) -> None:
    facts = {
        "open": {"ms": 80.0, "parameters": 1_623_744},
        "cut a branch while it runs": {"bits_per_byte": 1.78, "ms_to_next_byte": 40.0},
        "prune": {"bits_per_byte": 1.68},
        "train the edited model": {"bits_per_byte": 1.63},
    }
    chapters = [Chapter(title, "code", 0.1, found, ["x" * 200], {}) for title, found in facts.items()]
    receipt = SimpleNamespace(confirmed=True, summary=lambda: [("ms per token", "0.06 => 0.06  (no difference)")])
    demo = SimpleNamespace(before=1.63, receipt=receipt, losses=[1.0, 0.9], picture='<svg width="1200"></svg>')
    file = tmp_path / "report.html"
    write_report(file, chapters, demo, 70)
    assert width(file) <= WINDOW
