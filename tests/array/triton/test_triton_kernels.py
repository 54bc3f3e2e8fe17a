"""Triton's kernels beside the CPU backend in Triton's interpreter, and compiled ahead of time for GPUs.

Operands, results and scratch are in buffers with canaries. Kernels run twice and give equal bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triton_process import facts, run

pytestmark = pytest.mark.triton
FOLDER = Path(__file__).parent
SCRIPT = FOLDER.parents[2] / "scripts" / "triton_kernels.py"
QUICK = ("softmax", "rms_norm", "batch_norm_train")
"""Ops of whose kernels every run compiles one form; the deep profile compiles all."""


def check_interpreted(cache: Path, depth: str) -> None:
    found = facts(FOLDER / "interpreted_kernels.py", cache, depth, TRITON_INTERPRET="1")
    wrong = {name: fact for name, fact in found.items() if fact and not name.endswith(" seconds")}
    assert not wrong, "\n".join(f"{name}: {fact}" for name, fact in list(wrong.items())[:20])
    assert len(found) > 40


def test_kernels_match_the_cpu_backend_in_the_interpreter(tmp_path: Path) -> None:
    check_interpreted(tmp_path, "quick")


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_kernels_match_the_cpu_backend_for_all_combinations(tmp_path: Path) -> None:
    check_interpreted(tmp_path, "deep")


def test_20_shapes_share_their_compiled_code(tmp_path: Path) -> None:
    found = facts(FOLDER / "compiled_kernels.py", tmp_path)
    assert found
    assert {name: count for name, count in found.items() if count > 2} == {}  # n = 112 is divisible by 16


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_kernels_of_all_cases_compile_without_spills_and_atomics(tmp_path: Path) -> None:
    found = facts(FOLDER / "compiled_kernels.py", tmp_path, "deep")
    made = {name: fact for name, fact in found.items() if isinstance(fact, dict)}
    assert len(made) > 100
    assert {name: f for name, f in made.items() if f["spills"] or f["atomics"] or f["shared"] > 227 * 1024} == {}


def compiled(cache: Path, targets: str, *options: str) -> list[dict[str, Any]]:
    done = run(SCRIPT, cache, "--json", "--targets", targets, *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)["kernels"]


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    found = compiled(tmp_path, "90", "--first", *QUICK)
    assert {row["op"] for row in found} == {*QUICK}


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_all_kernels_compile_for_three_generations_of_gpus(tmp_path: Path) -> None:
    found = compiled(tmp_path, "80,90,100")
    assert {row["target"] for row in found} == {"sm_80", "sm_90", "sm_100"}
