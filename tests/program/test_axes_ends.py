"""Axes that inputs and outputs have, resized when it is said so; and names for axes, given by an edit."""

from __future__ import annotations

import numpy as np
import pytest
from program_samples import fingerprint

import graphwright as gw


def net(features: int = 5) -> gw.Program:
    """x[features] -> 6 tanh -> y[3], twice the same input."""
    rng, b = np.random.default_rng(0), gw.Builder("net")
    x = b.input("x", ("B", features))
    up = b.param("up.weight", rng.normal(size=(6, features)).astype("f4"))
    down = b.param("down.weight", rng.normal(size=(3, 6)).astype("f4"))
    side = b.param("side.weight", rng.normal(size=(3, features)).astype("f4"))
    y = b.junction(b.linear(b.tanh(b.linear(x, up, name="up"), name="act"), down, name="down"),
                   b.linear(x, side, name="side"), name="sum")  # fmt: skip
    b.output(y, "y")
    return b.build()


X = np.random.default_rng(1).normal(size=(4, 5)).astype("f4")


def axis(p: gw.Program, weight: str, dim: int) -> gw.program.AxisGroup:
    return p.axes().of(weight, dim)[0]


def test_inputs_and_outputs_are_frozen_without_allow_io():
    p = net()
    before, want = fingerprint(p), p.run(x=X)["y"].to_numpy()
    features, results = axis(p, "up.weight", 1), axis(p, "down.weight", 0)
    for group in (features, results):
        assert group.frozen == group.ends
        with pytest.raises(gw.program.FrozenAxis, match="allow_io"), p.edit("cut") as e:
            e.cut_units(group.units([1]))
        with pytest.raises(gw.program.FrozenAxis), p.edit("grow") as e:
            e.grow(group.name, 1)
        assert fingerprint(p) == before
    with p.edit("two features less, one result less") as e:
        e.cut_units(features.units([1, 3]) | results.units([0]), allow_io=True)
    assert p.spec("x").shape == ("B", 3)
    assert p.spec("sum").shape == ("B", 2)
    assert p.validate().ok
    masked = X.copy()
    masked[:, [1, 3]] = 0
    twin = net().run(x=masked)["y"].to_numpy()
    np.testing.assert_allclose(p.run(x=X[:, [0, 2, 4]])["y"].to_numpy(), twin[:, 1:], rtol=1e-5, atol=1e-6)
    p.undo()
    assert fingerprint(p) == before
    assert np.array_equal(p.run(x=X)["y"].to_numpy(), want)
    p.redo()
    assert p.spec("x").shape == ("B", 3)


def test_inputs_can_be_grown_and_permuted_if_allowed():
    p = net()
    want = p.run(x=X)["y"].to_numpy()
    name = axis(p, "up.weight", 1).name
    with p.edit("a feature more") as e:
        e.grow(name, 1, allow_io=True)
    wide = np.concatenate([X, np.full((4, 1), 7, "f4")], 1)
    np.testing.assert_allclose(p.run(x=wide)["y"].to_numpy(), want, rtol=1e-5, atol=1e-6)
    with p.edit("the other way round") as e:
        e.permute(name, [5, 4, 3, 2, 1, 0], allow_io=True)
    np.testing.assert_allclose(p.run(x=wide[:, ::-1].copy())["y"].to_numpy(), want, rtol=1e-5, atol=1e-6)


def test_axes_indexed_by_integers_stay_frozen():
    p = gw.open("bundled").program
    vocabulary = p.axes()["embed.vocabulary"]
    with pytest.raises(gw.program.FrozenAxis, match="reads it by index"), p.edit("cut") as e:
        e.cut_units(vocabulary.units([3]), allow_io=True)


def test_plans_gradients_saves_and_replays_follow_resized_inputs(tmp_path):
    p, twin = net(), net()
    small = X[:, [0, 2, 3, 4]]
    p.grad("y", ["up.weight"], {"B": 4}).run(x=X)
    with p.edit("a feature less") as e:
        e.cut_units(axis(p, "up.weight", 1).units([1]), allow_io=True)
    planned = p.compile(x=small.shape)(x=small)["y"].to_numpy()
    np.testing.assert_allclose(planned, p.run(x=small)["y"].to_numpy(), rtol=1e-5, atol=1e-6)
    slope = p.grad("y", ["up.weight"], {"B": 4}).run(x=small)["grad.up.weight"].to_numpy()
    assert slope.shape == (6, 4)
    gw.replay(p, onto=twin)
    assert twin.hash() == p.hash()
    q = gw.load(p.save(tmp_path / "saved"))
    assert q.hash() == p.hash()
    q.undo()
    assert q.hash() == net().hash()


def test_naming_an_axis_is_an_edit(tmp_path):
    p = net()
    before, structure = p.hash(), [g.name for g in p.axes().values()]
    old = axis(p, "up.weight", 0).name
    group = p.axes().name(old, "block.features")
    assert (group.name, group.size) == ("block.features", 6)
    assert p.journal[-1].why == f"name the axis {old} block.features"
    with p.edit("cut") as e:
        e.cut_units(p.axes()["block.features"].units([0]))
    with p.edit("something else") as e:
        e.insert("side -> sum", "tanh", name="t")
    assert p.axes()["block.features"].size == 5
    q = gw.load(p.save(tmp_path / "saved"))
    assert [g.name for g in q.axes().values()] == [g.name for g in p.axes().values()]
    twin = net()
    gw.replay(p, onto=twin)
    assert twin.axes()["block.features"].size == 5
    p.undo(3)
    assert p.hash() == before
    assert [g.name for g in p.axes().values()] == structure


def test_composed_axes_have_names_and_invalid_names_are_refused():
    p = gw.open("bundled").program
    axes = p.axes()
    axes.name("layers.1.attn.heads", "first.heads")
    p.axes().name("layers.1.attn.kv_groups", "first.groups")
    assert p.axes()["first.heads"].size == 6
    assert p.axes()["first.groups"].size == 2
    assert p.axes()["layers.0.attn.heads"].size == 6
    for wrong in ("first.groups", "layers.0.attn.heads"):
        with pytest.raises(gw.program.NameTaken):
            p.axes().name("first.heads", wrong)
    with pytest.raises(gw.program.BadName):
        p.axes().name("first.heads", "a..b")
    with pytest.raises(gw.program.UnknownAxis):
        p.axes().name("no such axis", "a")
    assert p.axes().name("first.heads", "again.heads").size == 6
    assert "first.heads" not in p.axes()
