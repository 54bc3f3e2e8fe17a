"""Idle threads of kernels give their core away soon, in any order of imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmarks.busy_core import FIRST, measured

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
pytestmark = pytest.mark.skipif(CORES < 2, reason="needs two cores, and Linux to pin a process to one of them")

SPINNING = """
import time
from graphwright.array import CPU, backend
backend(CPU)
import torch
torch.set_num_threads(2)
x = torch.ones(1 << 16)
y = torch.exp(x)
def cpu(rounds, pause):
    start = time.process_time()
    for _ in range(rounds):
        torch.exp(x, out=y)
        time.sleep(pause)
    return time.process_time() - start
cpu(5, 0)
print(min(cpu(10, 0.01) for _ in range(5)) / 10)
"""


def printed(code: str, **settings: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=kept | settings, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "first", [pytest.param("", marks=pytest.mark.deep), "import torch; torch.exp(torch.ones(1 << 20))\n"]
)
def test_threads_of_kernels_do_not_spin_between_kernels(first):
    assert float(printed(first + SPINNING)) < 0.5e-3  # seconds of CPU time per kernel; spinning takes 2 ms or more


@pytest.mark.deep
def test_setting_of_the_user_stays():
    assert float(printed("import torch\n" + SPINNING, OMP_WAIT_POLICY="active")) > 5e-3  # until the pause ends


@pytest.mark.deep
@pytest.mark.parametrize("first", FIRST)
def test_two_threads_beside_a_busy_core_do_not_collapse(first):
    found: list[dict[str, tuple[float, float]]] = []
    for _ in range(3):  # other processes may disturb a try; without the limit each takes four to twenty times as long
        found.append(measured(first))
        if max(beside for beside, _ in found[-1].values()) <= 2.5:
            return
    pytest.fail(f"times relative to one thread: {found}")
