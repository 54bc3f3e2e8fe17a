"""One table of cases for all executors of attention over a pattern: each equals dense masked attention in float64.

Results, gradients and masses of edges, of planes, windows, documents, own masks, gates, softcaps and later queries.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_conformance import CASES, Problem, Results, errors, problem

from graphwright.array import bfloat16, float16, from_numpy
from graphwright.array.vm.machine import part
from graphwright.ops import call
from triton_process import facts

BITS = {torch.bfloat16: bfloat16, torch.float16: float16}
ON_CPU = {
    "reference": (torch.float64, "reference"),
    "dense": (torch.float64, "dense"),
    "dense, float32": (torch.float32, "dense"),
    "torch kernels": (torch.float64, "block"),
    "torch kernels, 16 bits": (None, "block"),
    "virtual machine": (torch.float32, "block"),
}
"""Executor -> dtype of the operands, None for that of the case, and algorithm."""
MOST = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


@cache
def case_of(name: str) -> Problem:
    return problem(CASES[name], list(CASES).index(name))


def on_cpu(op: str, operands: Results, attrs: dict[str, Any]) -> Results:
    """Run an op on the CPU; results of 16 bits are widened."""
    arrays = [from_numpy(t.view(torch.int16).numpy(), bits=BITS[t.dtype]) if t.dtype in BITS else from_numpy(t.numpy())
              for t in operands]  # fmt: skip
    found = call(op, *arrays, **attrs)
    each = found if isinstance(found, tuple) else (found,)
    return [torch.from_numpy(np.array(t.to_numpy("float64"))) for t in each]


def check(found: dict[str, float], kind: torch.dtype) -> None:
    assert len(found) > 5
    for name, error in found.items():
        assert error <= max(MOST[kind], 1e-6 if name.startswith("mass") else 0), found  # masses are float32


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("executor", ON_CPU)
def test_executors_equal_dense_masked_attention(executor: str, name: str) -> None:
    dtype, algorithm = ON_CPU[executor]
    kind = CASES[name].get("dtype", torch.bfloat16) if dtype is None else dtype
    if executor == "virtual machine":
        assert part.ready, "run `python -m graphwright warmup`"
    found = errors(case_of(name), on_cpu, kind, algorithm)
    check(found, kind)


@pytest.mark.triton
def test_triton_in_its_interpreter_equals_dense_masked_attention(tmp_path: Path) -> None:
    found = facts(
        Path(__file__).parent / "interpreted_blocks.py", tmp_path, TRITON_INTERPRET="1"
    )  # one process for all: it is slow
    assert found.pop("edits") == {"cells": 0.0, "words left": 0.0}
    layouts = found.pop("layouts")  # what is refused is copied at each call, not when a call is bound
    assert [name for name, taken in layouts.items() if taken] == [""]
    assert list(found) == list(CASES)
    for name, each in found.items():
        check(each, CASES[name].get("dtype", torch.float32))
