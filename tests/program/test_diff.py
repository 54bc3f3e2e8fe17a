"""Diffs: what is different and nothing else, and numbers that agree with numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import random_program, tiny

from graphwright.program import Builder
from graphwright.program.diff import NodeChange


def test_equal_programs_are_identical():
    p = tiny()
    assert p.diff(p.fork()).identical
    assert p.diff(tiny()).identical
    assert str(p.diff(tiny())) == "identical (1 weights)"


def test_the_diff_lists_structural_changes_by_path():
    p, q = tiny(), tiny()
    with p.edit("change") as e:
        e.insert(p.in_edges("r")[0], "tanh", name="t")
        e.link("x", "j", np.ones((2, 3), "f4"), name="skip")
        e.set_attr("w", trainable=False)
        e.set_outputs(y="j", z="t")
    d = p.diff(q)
    assert sorted(d.added) == ["skip", "skip.weight", "t"]
    assert d.removed == ()
    assert {c.path: c.facts for c in d.changed} == {
        "w": {"attrs.trainable": (True, False)},
        "j": {"operands": (["h"], ["h", "skip"])},
        "r": {"operands": (["j"], ["t"])},
    }
    assert set(d.edges_added) == {
        "x.0 -> skip.0",
        "skip.weight.0 -> skip.1",
        "skip.0 -> j.*",
        "j.0 -> t.0",
        "t.0 -> r.0",
    }
    assert d.edges_removed == ("j.0 -> r.0",)
    assert d.outputs == {"y": ("r.0", "j.0"), "z": (None, "t.0")}
    assert d.extra == ("skip.weight",)
    back = q.diff(p)
    assert (back.added, set(back.removed)) == ((), set(d.added))
    assert set(back.edges_removed) == set(d.edges_added)


def test_a_renaming_is_the_only_change_listed():
    p = tiny()
    then = p.fork()
    with p.edit("rename") as e:
        e.rename("h", "block.project")
        e.rename("w", "block.project.weight", key="u")
        e.rename("r", "last")
    d = p.diff(then)
    assert d.renamed == {"h": "block.project", "w": "block.project.weight", "r": "last"}
    assert (d.added, d.removed, d.edges_added, d.edges_removed, d.outputs) == ((), (), (), (), {})
    assert d.changed == (NodeChange("block.project.weight", {"attrs.key": ("w", "u")}),)
    assert not d.identical
    assert "~ h was renamed to block.project" in str(d).splitlines()
    assert d.to_json()["renamed"]["r"] == "last"
    assert then.diff(p).renamed == {new: old for old, new in d.renamed.items()}


def test_a_renamed_and_changed_node_is_reported_by_its_new_name():
    p = tiny()
    then = p.fork()
    with p.edit("both") as e:
        e.rename("r", "last")
        e.insert(p.in_edges("last")[0], "tanh", name="t")
    d = p.diff(then)
    assert (d.renamed, d.added, d.removed) == ({"r": "last"}, ("t",), ())
    assert d.changed == (NodeChange("last", {"operands": (["j"], ["t"])}),)
    assert (set(d.edges_added), d.edges_removed) == ({"j.0 -> t.0", "t.0 -> last.0"}, ("j.0 -> last.0",))


def test_nodes_of_unrelated_programs_are_not_matched_by_handle():
    """Same handles by chance: the same ops were built in the same order under other names."""
    b = Builder()
    x = b.input("x", (2,))
    b.output(b.relu(b.tanh(x, name="one"), name="two"), "y")
    c = Builder()
    x = c.input("in", (2,))
    c.output(c.relu(c.tanh(x, name="three"), name="four"), "y")
    d = c.build().diff(b.build())
    assert (d.renamed, set(d.added), set(d.removed)) == ({}, {"in", "three", "four"}, {"x", "one", "two"})


def test_a_new_node_may_take_the_name_of_a_renamed_one():
    p = tiny()
    then = p.fork()
    with p.edit("another node") as e:
        e.rename("r", "last")
        e.add("neg", "j", name="r")
    d = p.diff(then)
    assert (d.renamed, d.added, d.removed, d.changed, d.outputs) == ({"r": "last"}, ("r",), (), (), {})
    assert d.edges_added == ("j.0 -> r.0",)


def test_reordering_a_sum_is_a_change():
    def build(*names):
        b = Builder()
        x = {n: b.input(n, (2,)) for n in "ab"}
        b.output(b.junction(*(x[n] for n in names), name="j"), "y")
        return b.build()

    d = build("a", "b").diff(build("b", "a"))
    assert not d.identical
    assert d.edges_added == d.edges_removed == ()
    assert [c.path for c in d.changed] == ["j"]


@given(st.integers(0, 10**6), st.sampled_from(["f4", "f8", "f2"]))
def test_weight_differences_match_numpy(seed, kind):
    rng = np.random.default_rng(seed)
    old, new = (rng.normal(size=(3, 5)).astype(kind) for _ in range(2))

    def build(value):
        b = Builder()
        b.output(b.param("w", value), "y")
        return b.build()

    (w,) = build(new).diff(build(old)).weights
    a, c = old.astype("f8").ravel(), new.astype("f8").ravel()
    assert w.max_abs == np.abs(c - a).max()
    assert w.relative == pytest.approx(np.linalg.norm(c - a) / np.linalg.norm(a), rel=1e-12)
    assert w.cosine == pytest.approx(a @ c / np.linalg.norm(a) / np.linalg.norm(c), rel=1e-12)


def test_diffs_with_nan_zero_and_other_shapes_are_valid_json():
    def build(value):
        b = Builder()
        b.output(b.param("w", value), "y")
        return b.build()

    one = build(np.array([1.0, np.nan], "f4"))
    zero, wide = build(np.zeros(2, "f4")), build(np.zeros(3, "f4"))
    (w,) = one.diff(zero).weights
    assert w.max_abs is not None
    assert np.isnan(w.max_abs)
    for d in (one.diff(zero), zero.diff(one), wide.diff(zero)):
        assert not d.identical
        assert json.loads(json.dumps(d.to_json(), allow_nan=False))["weights"][0]["key"] == "w"
        assert "~ weight w" in str(d)
    assert wide.diff(zero).weights[0].max_abs is None


def test_programs_without_a_common_weight_differ():
    p, q = tiny(), tiny()
    with q.edit("other key") as e:
        e.set_attr("w", key="v")
    d = q.diff(p)
    assert (d.missing, d.extra, d.equal, d.identical) == (("w",), ("v",), 0, False)


@given(st.integers(0, 200), st.integers(0, 200))
def test_programs_are_identical_if_and_only_if_their_hashes_are_equal(a, b):
    p, q = random_program(a), random_program(b)
    assert p.diff(q).identical == (p.hash() == q.hash())
