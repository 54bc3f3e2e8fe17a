"""Triton's kernels of block-sparse attention compile ahead of time for a GPU, without atomics and without spills.

`test_block_executors.py` compares their results.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_process import facts

pytestmark = pytest.mark.triton


@pytest.mark.deep
def test_kernels_compile_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    found = facts(Path(__file__).parent / "compiled_blocks.py", tmp_path)
    sizes = found.pop("block sizes")
    assert sizes == {"1": 16, "48": 64, "100": 128, "128": None, "256": 128}
    plain = {name.split()[0] for name in found if "plain" in name}
    assert plain == {"forward", "backward_rows", "backward_columns", "edge_mass", "gate_gradients", "apply_words"}
    assert {made["target"] for made in found.values()} == {"sm_80", "sm_90", "sm_100"}
    for name, made in found.items():
        assert made["elf"], name
        assert made["atomics"] == [], name
        assert made["shared"] <= 227 * 1024, name
        assert made["spills"] == 0, name
