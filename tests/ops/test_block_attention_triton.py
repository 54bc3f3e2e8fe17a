"""Triton's kernels of block-sparse attention: in the interpreter they equal dense masked attention, for a GPU they
compile ahead of time, without atomics; in 16 bits and without gates and softcap no register is spilled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton
LOW = {"half precision", "blocks of 128"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """The function that compiles a kernel; what it compiles is kept in a folder of this run."""
    knobs = import_module("triton").knobs

    with knobs.cache.scope(), pytest.MonkeyPatch.context() as patch:
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        from graphwright.array.triton.ahead import compile_kernel

        yield compile_kernel


def test_the_interpreter_equals_dense_masked_attention(tmp_path: Path) -> None:  # 13 cases of 1 s: it is slow
    script = Path(__file__).parent / "interpreted_blocks.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == 14
    assert found.pop("edits") == {"cells": 0.0, "words left": 0.0}
    for case, errors in found.items():
        most = 2e-2 if case in LOW else 1e-5
        assert errors, case
        assert all(error <= most for error in errors.values()), (case, errors)


KERNELS = ("forward", "backward_rows", "backward_columns", "edge_mass")


@pytest.mark.parametrize("name", [*KERNELS, "gate_gradients", "apply_words"])
def test_kernels_compile_for_a_gpu_that_is_not_there(compiled, name: str) -> None:
    from graphwright.array.triton.launch import Form

    made = compiled(name, Form(64, 64, 64))
    assert ".target sm_90" in made.ptx
    assert made.cubin[:4] == b"\x7fELF"
    assert not re.search(r"^\s*(@\S+\s+)?(atom|red)\.", made.ptx, re.MULTILINE)
    assert made.spills == 0, made
    assert made.shared <= 227 * 1024


@pytest.mark.parametrize(("capability", "dtype", "block"), [(80, "bf16", 64), (100, "fp16", 32), (90, "fp32", 64)])
def test_other_gpus_and_dtypes(compiled, capability: int, dtype: str, block: int) -> None:
    from graphwright.array.triton.launch import Form

    for name in ("forward", "backward_columns") if capability == 90 else ("forward",):
        made = compiled(name, Form(block, 64, 64, gates=True, softcap=True, start=True), dtype, capability)
        assert made.shared <= 227 * 1024


def test_block_sizes_without_kernels_are_refused() -> None:
    import torch

    from graphwright.array.triton.launch import check_block
    from graphwright.patterns import BlockSize

    for block, width, dtype, nearest in (
        (1, 64, torch.bfloat16, 16), (48, 64, torch.bfloat16, 64), (100, 64, torch.float16, 128),
        (256, 32, torch.bfloat16, 128), (128, 64, torch.float32, 64), (64, 128, torch.float32, 32),
    ):  # fmt: skip
        with pytest.raises(BlockSize) as error:
            check_block(block, width, dtype)
        assert error.value.nearest == nearest
        check_block(nearest, width, dtype)
