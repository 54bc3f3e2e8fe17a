"""Functions generated from the fields of ops: signatures, documentation, values, and up-to-date stubs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright.ops import OPS, call, surface

REPOSITORY = Path(__file__).parents[2]


def test_stubs_match_the_op_definitions() -> None:
    done = subprocess.run([sys.executable, REPOSITORY / "scripts" / "write_stubs.py", "--check"], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize("name", surface.functions())
def test_generated_functions_have_the_operands_and_attributes_of_their_op(name: str) -> None:
    function = surface.functions()[name]
    (row,) = [r for r in OPS.values() if r.functional == name]
    signature = inspect.signature(function)
    assert tuple(signature.parameters) == (*row.operands, *row.attrs)
    assert {k: p.default for k, p in signature.parameters.items() if k in row.attrs} == dict(row.attrs)
    assert function.__doc__ is not None
    assert row.doc.startswith(function.__doc__)
    inputs = [gw.tensor(np.linspace(-2, 2, 7) + i) for i, _ in enumerate(row.operands)]
    np.testing.assert_array_equal(function(*inputs).numpy(), call(row.name, *inputs).numpy())


def test_generated_methods_take_the_operands_after_the_first() -> None:
    assert list(inspect.signature(surface.methods()["maximum"]).parameters) == ["input", "other"]
    x = gw.tensor([-1.0, 2.0])
    np.testing.assert_array_equal(surface.methods()["relu"](x).numpy(), [0.0, 2.0])
