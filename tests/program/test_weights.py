"""Weights are named by checkpoint key or by node path; where keys must be exact, paths do not count."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.program import Builder, Program, UnknownNode

W, V = np.arange(6, dtype="f4").reshape(2, 3), np.full((2, 2), 2, "f4")
X = np.ones((4, 3), "f4")


def keyed() -> Program:
    """Two linear layers whose weights have keys that differ from their paths."""
    b = Builder("keyed")
    h = b.linear(b.input("x", (4, 3)), b.param("a", W, key="model.a"), name="first")
    b.output(b.linear(h, b.param("b", V, key="a.b"), name="second"), "y")
    return b.build()


def test_a_key_and_a_path_name_the_same_weight():
    p = keyed()
    assert p.weights["a"] is p.weights["model.a"]
    assert p.weights.get("b") is p.weights["a.b"]
    assert "a" in p.weights
    assert "model.a" in p.weights
    assert "first" not in p.weights
    assert 3 not in p.weights
    assert list(p.weights) == ["model.a", "a.b"]
    assert p.node("model.a") == p.node("a")
    assert p.edge("model.a -> first") == p.edge("a -> first")
    for name in ("model.a", "a"):
        with p.edit("halve") as e:
            e.set_weight(name, lambda w: w / 2)
    assert np.array_equal(p.weights["a"], W / 4)
    p.undo(2)
    run = p.run(x=X)
    assert np.array_equal(run.value("model.a"), W)
    for name in ("model.a", "a"):
        assert np.array_equal(run.grad("y", [name])[0], np.full((2, 3), 16))
        patched = p.run(x=X, patch={name: np.zeros_like(W)})
        assert not np.asarray(patched["y"]).any()


def test_a_pattern_that_no_path_matches_selects_weights_by_key():
    p = gw.open("bundled").program
    by_key = p.select("model.layers.*.mlp.up_proj.weight")
    assert by_key.names() == p.select("layers.*.mlp.up.weight", kind="source").names()
    assert len(by_key) == 4
    assert not p.select("model.layers.*.mlp.up_proj.weight", kind="op")
    renamed = keyed()
    with renamed.edit("rename") as e:
        e.rename("a", "c", key="second")
    assert renamed.select("second").names() == ["second"]


def test_a_key_comes_before_a_path():
    p = keyed()
    with p.edit("swap") as e:
        e.rename("a", "old", key="b")
    assert np.array_equal(p.weights["b"], W)
    assert np.array_equal(p.weights["a.b"], V)
    assert p.node("b") != p.node("old")
    fork = p.fork()
    with fork.edit("rename") as e:
        e.rename("old", "other")
    assert "other" in fork.weights
    assert "other" not in p.weights


def test_a_path_is_no_key_where_keys_are_compared():
    p, b = keyed(), Builder("paths")
    b.output(b.linear(b.input("x", (4, 3)), b.param("a", W), name="first"), "y")
    assert p.diff(b.build()).missing == ("a",)
    with p.edit("a weight whose key is a path of another") as e:
        e.param("c", W, key="a")
    assert list(p.weights) == ["model.a", "a.b", "a"]


def test_unknown_weights_are_listed_with_near_keys_and_paths():
    p = gw.open("bundled").program
    with pytest.raises(UnknownNode, match=r"layers\.1\.mlp\.up\.weight"):
        p.weights["layers.1.mlp.upp.weight"]
    with pytest.raises(UnknownNode, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        p.weights["model.layers.1.mlp.up_prj.weight"]
    assert p.weights["layers.1.mlp.up.weight"] is p.weights["model.layers.1.mlp.up_proj.weight"]
