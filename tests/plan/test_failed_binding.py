"""A plan whose calls could not be bound raises the same error again, and a size that no input has is an error."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import Builder
from graphwright.array.spec import UnboundDim
from graphwright.plan.running.kernels import BoundKernels


def test_a_size_of_no_input_is_refused_when_the_program_is_planned() -> None:
    b = Builder()
    b.output(b.expand(b.input("x", (1, 3)), shape=("Q", 3), name="wide"), "y")
    with pytest.raises(UnboundDim) as info:
        b.build().compile(x=(1, 3))
    assert info.value.where == "wide"


def test_calls_are_bound_again_after_binding_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder()
    b.output(b.tanh(b.input("x", (3,))), "y")
    plan, x = b.build().compile(x=(3,)), np.ones(3, "f4")

    def fails(self: BoundKernels) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(BoundKernels, "_bind_calls", fails)
        for _ in range(2):
            with pytest.raises(MemoryError):
                plan({"x": x})
    np.testing.assert_allclose(plan({"x": x})["y"].to_numpy(), np.tanh(x), rtol=1e-6)


@pytest.mark.parametrize("start", ["Q", "T-1"])
def test_a_named_start_needs_an_input_with_this_size(start: str) -> None:
    b = gw.Builder("t")
    x = b.input("x", ("B", 8))
    b.output(b.slice(x, axis=1, start=start, size=2), "y")
    p, x = b.build(), np.arange(16, dtype="f4").reshape(2, 8)
    assert p.axes() is not None  # no raw error: entries are read by number
    for run in (p.run, gw.compile(p)):
        with pytest.raises(UnboundDim, match="no input of the program has this named size"):
            run(x=x)


def test_a_start_may_be_the_size_of_another_input() -> None:
    b = gw.Builder("t")
    x = b.input("x", ("B", 8))
    b.output(b.sum(b.input("i", ("T",)), axes=(0,)), "n")
    b.output(b.slice(x, axis=1, start="T-1", size=2), "y")
    p, x = b.build(), np.arange(16, dtype="f4").reshape(2, 8)
    for run in (p.run, gw.compile(p)):
        np.testing.assert_array_equal(run(x=x, i=np.ones(3, "f4"))["y"], x[:, 2:4])
