"""The two algorithms of heads that tokens choose: equal values and gradients, the planner's choice and its reason."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright.errors import UsageError
from graphwright.program import Program


def program(k0: float, dtype: str = "float32") -> tuple[Program, dict[str, np.ndarray]]:
    gw.manual_seed(0)
    layer = ex.DynSMHA(12, 8, 4, k0, shared=0).to(dtype)
    x = np.random.default_rng(0).normal(size=(2, 9, 12)).astype(dtype)
    p = gw.trace(layer, x)
    name = p.path(p.inputs()[0])
    ex.calibrate(p, {name: x}, k0=k0)
    return p, {name: x}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_both_give_the_same_values_and_gradients(dtype: str, tolerance: float) -> None:
    p, feeds = program(3, dtype)
    learned = [key for key, w in p.weights.items() if w.data.dtype.is_float and not key.startswith("const")]
    full = p.grad(p.output_names()[0], [*learned, *feeds])
    for of in (p, full):
        packed, dense = (of.compile(feeds, experts=name)(feeds) for name in ("sorted", "dense"))
        for name in packed:
            a, b = np.asarray(packed[name]), np.asarray(dense[name])
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * (1 + np.abs(b).max()), err_msg=name)
            assert name != p.output_names()[0] or np.abs(a).max() > 1e-3


def test_the_choice_depends_on_the_expected_number_of_heads() -> None:
    """An algorithm that heads don't have is left out: experts beside them run by it."""
    for k0, expected in ((3, "sorted: a token uses 38%"), (8, "dense: a token uses 100%")):
        p, feeds = program(k0)
        (node,) = p.select(op="routed_attention")
        assert f"algorithm {expected}" in p.compile(feeds).explain(node)
        assert f"algorithm {expected}" in p.compile(feeds, experts="gather").explain(node)
        assert "algorithm dense: as asked for" in p.compile(feeds, experts="dense").explain(node)


def test_a_negative_expectation_is_refused() -> None:
    p, _ = program(3)
    (node,) = p.select(op="routed_attention")
    with pytest.raises(UsageError, match="expected"), p.edit("fewer than none") as e:
        e.set_attr(node, expected=-1.0)
