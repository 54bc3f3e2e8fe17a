"""Each file in examples/ is a complete program under 150 lines that runs with --quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def test_examples_use_public_names_alone():
    private = re.compile(r"\b(?!self\b)[a-z]\w*\._[a-z]|import _[a-z]|from [\w.]*\._[a-z]")
    assert not {p.stem: found for p in EXAMPLES if (found := private.findall(p.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path, tmp_path):
    extra = ["--out", str(tmp_path / "out")] if "--out" in path.read_text(encoding="utf-8") else []
    done = subprocess.run(
        [sys.executable, str(path), "--quick", *extra],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
