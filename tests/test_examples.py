"""Each file in examples/ is a complete program under 150 lines that runs with --quick, with warnings as errors."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from graphwright.autograd import fork_rng

pytestmark = pytest.mark.usefixtures("warm")
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
LONG = (
    "pipeline", "defect_detection", "attention_pruning", "sac_pendulum", "life", "architecture_search", "irregular_time"
)  # fmt: skip
"""Examples of which every part is tested elsewhere in each run."""


def test_examples_use_only_public_names():
    private = re.compile(r"\b(?!self\b)[a-z]\w*\._[a-z]|import _[a-z]|from [\w.]*\._[a-z]")
    assert not {p.stem: found for p in EXAMPLES if (found := private.findall(p.read_text(encoding="utf-8")))}


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=pytest.mark.deep if p.stem in LONG else ()) for p in EXAMPLES]
)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    text = path.read_text(encoding="utf-8")
    extra = ["--out", str(tmp_path / "out")] if "--out" in text else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--quick", *extra])
    with fork_rng(0):  # as a process begins
        runpy.run_path(str(path), run_name="__main__")
    assert any(capsys.readouterr())
    assert len(text.splitlines()) <= 150


def test_an_example_runs_as_a_script(tmp_path):
    path = next(p for p in EXAMPLES if p.stem == "xor")
    done = subprocess.run(
        [sys.executable, path, "--seeds", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
