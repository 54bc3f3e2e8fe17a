"""Fed values instead of computed ones, in runs and in plans, against the program with those nodes cut out manually."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright.graph import StaleHandle
from graphwright.plan import Executable
from graphwright.program import Builder, FeedError, Program, UnknownEdge, Value
from graphwright.testing.oracle import assert_bits

X = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
H = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)


def net() -> Program:
    """tanh(x) goes two ways into a sum; the count of runs is carried."""
    b = Builder("net")
    x = b.input("x", ("B", 3))
    total = b.state("total", np.zeros(1, np.float32))
    h = b.tanh(x, name="h")
    left, right = b.exp(h, name="left"), b.neg(h, name="right")
    b.output(b.junction(left, right, h, name="sum"), name="y")
    grown = b.add(total, b.const("one", np.ones(1, np.float32)), name="grown")
    b.output(grown, name="count")
    b.assign(total, grown)
    return b.build()


def both(p: Program, patch: dict) -> np.ndarray:
    """The output y with values put in place: a run's and a plan's, which must be the same bits."""
    truth = p.fork().run(x=X, patch=patch)["y"]
    plan = p.compile(x=(2, 3), patch=list(patch), deterministic=True)
    feeds = dict(zip((n for n in plan.inputs if n.startswith("patch.")), patch.values(), strict=True))
    assert_bits(Executable(plan, poison=True).run({"x": X, **feeds})["y"], truth)
    return truth.to_numpy()


def test_patching_a_node_changes_all_its_readers() -> None:
    np.testing.assert_allclose(both(net(), {"h": H}), np.exp(H) + -H + H, rtol=1e-6)


def test_patching_an_edge_changes_its_reader_only() -> None:
    p = net()
    h = np.tanh(X)
    wanted = np.exp(H) + -h + h
    np.testing.assert_allclose(both(p, {"h -> left": H}), wanted, rtol=1e-6)
    np.testing.assert_allclose(both(p, {p.edge("h -> left"): H}), wanted, rtol=1e-6)
    np.testing.assert_allclose(both(p, {"h -> left": H, "right": X}), np.exp(H) + X + h, rtol=1e-6)


def test_a_value_patched_with_itself_changes_no_bit() -> None:
    p = net()
    truth = p.fork().run(x=X)
    for path in ("h", "left", "right", "sum", "h -> sum"):
        kept = truth.value(p.edge_value(p.edge(path)) if "->" in path else path)
        assert_bits(both(net(), {path: kept}), truth["y"])


def test_a_patched_output_returns_the_given_value() -> None:
    assert_bits(both(net(), {"sum": H}), H)


def test_nodes_needed_only_by_a_patched_value_do_not_run() -> None:
    p = net()
    plan = p.compile(x=(2, 3), patch=["h"], deterministic=True)
    assert "h" in plan.pruned
    assert [i.op for i in plan.instrs].count("tanh") == 0


def test_patched_state_value_is_still_written() -> None:
    p = net()
    plan = p.compile(x=(2, 3), patch=["total"], deterministic=True)
    result = plan({"x": X, "patch.total": np.full(1, 5, np.float32)})
    assert result["count"].item() == 6
    assert p.weights.array("total").item() == 6  # the variables are the program's own


def test_results_of_one_node_are_patched_separately() -> None:
    b = Builder("two")
    loss, lse = b.cross_entropy(b.input("z", (2, 3)), b.const("t", np.array([0, 2])), name="ce")
    b.output(b.add(loss, lse, name="s"), name="y")
    p = b.build()
    ones = np.ones(2, np.float32)
    plain = p.run(z=X)
    patched = p.compile(z=(2, 3), patch=[Value(p.node("ce"), 1)], deterministic=True)(
        {"z": X, "patch.ce.log_sum_exp": ones}
    )["y"]
    np.testing.assert_allclose(patched.to_numpy(), plain.value("ce").to_numpy() + 1, rtol=1e-6)


def test_after_an_edit_a_patched_plan_runs_as_planned_and_the_next_one_contains_the_edit() -> None:
    p = net()
    old = p.compile(x=(2, 3), patch=["h"], deterministic=True)
    assert p.compile(x=(2, 3), patch=["h"], deterministic=True) is old
    before = old({"x": X, "patch.h": H})["y"]
    with p.edit("cut") as e:
        e.cut("left -> sum")
    assert_bits(old({"x": X, "patch.h": H})["y"], before)
    assert_bits(both(p, {"h": H}), -H + H)


@pytest.mark.parametrize("bad", [np.zeros((2, 4), np.float32), np.zeros(3, np.float32), np.zeros((2, 3), np.int32)])
def test_mismatched_patch_values_are_refused(bad: np.ndarray) -> None:
    p = net()
    with pytest.raises(FeedError, match=r"patch\.h"):
        p.run(x=X, patch={"h": bad})
    with pytest.raises(FeedError, match=r"patch\.h"):
        p.compile(x=(2, 3), patch=["h"], deterministic=True)({"x": X, "patch.h": bad})
    assert p.weights.array("total").item() == 0


def test_unknown_patch_points_are_named() -> None:
    p = net()
    edge = p.edge("left -> sum")
    with pytest.raises(UnknownEdge, match="left -> right"):
        p.compile(x=(2, 3), patch=["left -> right"], deterministic=True)
    with p.edit("cut") as e:
        e.cut(edge)
    with pytest.raises(StaleHandle):
        p.run(x=X, patch={edge: H})
