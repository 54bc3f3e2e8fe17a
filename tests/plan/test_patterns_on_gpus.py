"""A plan over a pattern with the Triton kernels, in the interpreter, by a GPU's backend over simulated memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CODE = """
import numpy as np
from graphwright.array import Device
from graphwright.array.backend import use
from graphwright.array.cuda.cuda_backend import CudaBackend
from graphwright.patterns import sliding_window
from graphwright.plan import CaptureExecutable
from graphwright.testing.simulated_device import SimDriver
from program.pattern_programs import dense, inputs, program_of

there = Device("sim:1")
use(there, CudaBackend(there, SimDriver(there)))
pattern = sliding_window(tokens=64, window=20, block=16, planes=2)
program, x = program_of(pattern), inputs(64)
space = CaptureExecutable(program.compile({"x": (2, 64, 8)}, device=there), warmups=1, require_capture=True)
last = None
for step in range(5):
    y = space.run({"x": x})["y"].to_numpy()
    assert np.abs(y - dense(program, x, pattern.to_dense())).max() < 2e-5
    assert last is None or not np.array_equal(y, last)
    last = y
    pattern.connect(3, 0, step) if step < 2 else pattern.cut(pattern.edge_between(step - 1, step - 1, 0))
print(space.state, space.captures)
"""


@pytest.mark.triton
def test_a_captured_plan_reads_edits_of_its_pattern() -> None:
    apart = Path(sys.prefix) / "apart"
    paths = [str(TESTS), str(apart), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("captured 1", 0), done.stderr[-2000:]
