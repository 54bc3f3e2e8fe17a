"""Each file in examples/ is a complete program under 150 lines that runs with --quick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


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
