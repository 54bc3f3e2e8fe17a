"""Triton's kernels of block-sparse attention compile ahead of time for a GPU, without atomics.

In 16 bits and without gates and softcap no register is spilled. `test_block_executors.py` compares their results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.triton


def facts(script: str, folder: Path, **more: str) -> dict[str, Any]:
    """Return the facts that a script of this folder prints, a line each; what Triton prints at exit stays there."""
    seen = os.pathsep.join([str(Path(sys.prefix) / "apart"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": seen, "TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1", **more}
    path = Path(__file__).parent / script
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_kernels_compile_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    found = facts("compiled_blocks.py", tmp_path)
    sizes = found.pop("block sizes")
    assert sizes == {"1": 16, "48": 64, "100": 128, "256": 128, "128 fp32": 64, "64 x 128 fp32": 32}
    plain = {name.split()[0] for name in found if "plain" in name}
    assert plain == {"forward", "backward_rows", "backward_columns", "edge_mass", "gate_gradients", "apply_words"}
    assert {made["target"] for made in found.values()} == {"sm_80", "sm_90", "sm_100"}
    for name, made in found.items():
        assert made["elf"], name
        assert made["atomics"] == [], name
        assert made["shared"] <= 227 * 1024, name
        assert made["spills"] == 0 or "plain" not in name, name
