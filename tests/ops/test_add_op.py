"""An op is added in under 40 lines, those of the guide: its gradient, its dtype under autocast, its place in a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from graphwright import Builder
from graphwright.array import bfloat16, float32, from_numpy
from graphwright.array.cpu.kernel import KERNELS
from graphwright.autograd import autocast_to, tensor
from graphwright.ops import OPS, call
from graphwright.testing.gradcheck import GradientMismatch, gradcheck, gradgradcheck, mutants
from graphwright.testing.oracle import assert_bits, assert_close

GUIDE = Path(__file__).parents[2] / "docs" / "ops.md"


@pytest.fixture
def softsign() -> Iterator[str]:
    """The guide's row, kernel and text, entered for one test."""
    (text,) = [b for b in re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S) if '@op("softsign")' in b]
    exec(text, {})
    yield text
    for table in (OPS, KERNELS):
        del table["softsign"]


def test_the_guide_adds_an_op_in_under_40_lines(softsign: str) -> None:
    assert len([line for line in softsign.splitlines() if line.strip()]) < 40
    x = np.random.default_rng(0).normal(size=(3, 4))
    assert_close(call("softsign", from_numpy(x)), torch.nn.functional.softsign(torch.from_numpy(x)), rtol=1e-15)
    gradcheck(lambda t: call("softsign", t), [x])
    gradgradcheck(lambda t: call("softsign", t), [x])
    for _, broken in mutants(OPS["softsign"]):
        with pytest.raises(GradientMismatch):
            gradcheck(lambda t, row=broken: t.__gw_op__(row, (t,), {}), [x])


def test_an_added_op_keeps_its_dtype_under_autocast_and_runs_in_a_plan(softsign: str) -> None:
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    with autocast_to(bfloat16):
        assert call("softsign", tensor(x)).dtype is float32
        assert call("softsign", tensor(x).to(bfloat16)).dtype is bfloat16
    b = Builder()
    b.output(b.softsign(b.input("x", ("N", 4)), name="act"), "y")
    p = b.build()
    assert_bits(p.compile(x=(3, 4))({"x": x})["y"], call("softsign", from_numpy(x)))
    assert p.spec(p.node("act")).shape == ("N", 4)
