"""Units as values, and edits of axes through journal, undo, replay and files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axis_samples import perceptron, run
from graphwright.errors import UsageError
from graphwright.program import (
    CountMismatch,
    EmptyAxis,
    EmptySelection,
    ForeignNode,
    Program,
    ReplayConflict,
    StaleSelection,
    UnitRange,
    load,
    replay,
)
from graphwright.program.axes.units import parsed, runs

X = {"x": np.random.default_rng(5).normal(size=(4, 3)).astype("f4")}


def neurons(p: Program):
    return p.axes()["first.neurons"].units()


# -- units as values ---------------------------------------------------------------------------------------------------
def test_units_can_be_indexed_counted_and_combined(capsys):
    p = perceptron()
    units = p.select("first").neurons
    assert units.count == len(units) == 5
    assert units[1].names() == ["first.neurons[1]"]
    assert units[-1].names() == ["first.neurons[4]"]
    assert [i for _, i in units[[3, 0]]] == [0, 3]
    assert [i for _, i in units[1:4]] == [1, 2, 3]
    assert [i for _, i in units[np.array([True, False, False, True, False])]] == [0, 3]
    assert (units[:2] | units[3]).assert_count(3).names() == [f"first.neurons[{i}]" for i in (0, 1, 3)]
    assert (units[:3] & units[2:]).names() == ["first.neurons[2]"]
    assert (units - units[1:]).names() == (~units[1:]).names() == ["first.neurons[0]"]
    assert units[[1, 2]][1].names() == ["first.neurons[2]"]
    units[[0, 2, 3]].show()
    assert capsys.readouterr().out == "first.neurons       3 of 5      0 2-3\n"
    assert repr(units) == "Units(5 of 'perceptron': first.neurons)"
    with pytest.raises(CountMismatch):
        units.assert_count(4)


def test_a_selection_has_the_units_that_it_produces():
    p = perceptron()
    same = p.select("first", units="neurons")[[1, 3]]
    assert same == p.axes()["first.neurons"].units([1, 3]) == p.select("first").neurons[[1, 3]]
    assert p.select("second").neurons.names() == neurons(p).names()  # makes none, so those that it reads
    assert p.select("second", units="heads").count == 0
    with pytest.raises(UsageError, match="unknown kind"):
        p.select("first", units="wings")


@pytest.mark.parametrize("index", [5, -6, [0, 7], np.ones(4, bool)])
def test_unit_indices_out_of_range_are_refused(index):
    with pytest.raises(UnitRange) as caught:
        neurons(perceptron())[index]
    assert "first.neurons" in str(caught.value)


@pytest.mark.parametrize("index", ["1", 1.5, [0.5], None, True])
def test_invalid_unit_indices_are_refused(index):
    with pytest.raises(UsageError):
        neurons(perceptron())[index]


def test_units_of_different_programs_do_not_combine():
    p, q = perceptron(), perceptron()
    with pytest.raises(ForeignNode):
        _ = neurons(p) | neurons(q)
    with pytest.raises(UsageError), p.edit("foreign") as e:
        e.cut_units(neurons(q)[0])


@given(st.lists(st.integers(-1, 40), max_size=30))
def test_unit_indices_round_trip_as_ranges(indices):
    assert parsed(runs(indices)) == tuple(indices)


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "+0", "0-99999999999"])
def test_invalid_index_ranges_are_refused(text):
    with pytest.raises(ValueError, match="invalid list of indices"):
        parsed(text)


# -- cutting -----------------------------------------------------------------------------------------------------------
def test_cutting_all_units_raises():
    p = perceptron()
    before = p.hash()
    with pytest.raises(EmptyAxis), p.edit("all") as e:
        e.cut_units(neurons(p))
    assert p.hash() == before


def test_cutting_no_unit_is_refused_unless_allowed():
    p = perceptron()
    with pytest.raises(EmptySelection), p.edit("none") as e:
        e.cut_units(neurons(p)[[]])
    with pytest.raises(EmptySelection):
        neurons(p)[[]].prune()
    assert neurons(p)[[]].prune(allow_empty=True).count == 0
    assert not p.journal
    with pytest.raises(UsageError):
        neurons(p).prune(keep=[0], drop=[1])


def test_units_selected_before_another_cut_are_stale():
    p = perceptron()
    units = neurons(p)[4]
    neurons(p)[0].prune()
    with pytest.raises(StaleSelection), p.edit("stale") as e:
        e.cut_units(units)
    with p.edit("rename") as e:
        e.rename("first.weight", "other.weight")
    with pytest.raises(StaleSelection, match="no axis or list of layers"), p.edit("gone") as e:
        e.cut_units(units)


def test_a_cut_is_one_primitive_and_keeps_remaining_bits():
    p = perceptron()
    held = {k: v.numpy().copy() for k, v in p.weights.items()}
    neurons(p).prune(drop=[1, 3], why="two of five")
    keep = [0, 2, 4]
    assert p.weights["first.weight"].numpy().tobytes() == held["first.weight"][keep].tobytes()
    assert p.weights["first.bias"].numpy().tobytes() == held["first.bias"][keep].tobytes()
    assert (
        p.weights["second.weight"].numpy().tobytes() == np.ascontiguousarray(held["second.weight"][:, keep]).tobytes()
    )
    assert p.weights["second.bias"].numpy().tobytes() == held["second.bias"].tobytes()
    (entry,) = p.journal
    assert entry.why == "two of five"
    (record,) = entry.edits
    assert record["axes"] == [{"axis": "first.neurons", "of": 5, "indices": "0 2 4"}]
    assert record["keys"] == ["first.weight", "first.bias", "second.weight"]
    assert p.blame("first.weight") == p.blame("first.bias") == [entry]
    assert p.blame("second.bias") == []
    assert p.blame(p.node("second.weight")) == [entry]


def cut_and_fail(p: Program, unit: int) -> None:
    with p.edit("fails") as e:
        e.cut_units(neurons(p)[unit])
        raise ZeroDivisionError


def test_cuts_combine_with_other_edits_in_one_transaction():
    """An axis that an earlier verb of the same edit made is there to be cut; an error takes all of it back."""
    p = perceptron()
    before, bits = p.hash(), {k: v.data.tobytes() for k, v in p.weights.items()}
    with p.edit("a second layer") as e:
        (edge,) = [x for x in p.in_edges("second") if p.path(p.edge_value(x)) == "act"]
        middle = e.add("linear", "act", e.param("middle.weight", np.ones((7, 5), "f4")), name="middle")
        wide = e.add("linear", middle, e.param("back.weight", np.ones((5, 7), "f4")), name="back")
        e.rewire(edge, wide)
        e.cut_units(p.axes()["middle.neurons"].units([0, 6]))
        e.cut_units(p.axes()["first.neurons"].units([2]))
    assert p.weights["middle.weight"].shape == (5, 4)
    assert p.weights["back.weight"].shape == (5, 5)
    p.undo()
    assert p.hash() == before
    with pytest.raises(ZeroDivisionError):
        cut_and_fail(p, 1)
    assert p.hash() == before
    assert {k: v.data.tobytes() for k, v in p.weights.items()} == bits
    assert p.weights["first.weight"].lineage is None


def test_a_failed_nested_edit_undoes_its_cut():
    p = perceptron()
    with p.edit("outer") as e:
        e.cut_units(neurons(p)[1])
        with pytest.raises(ZeroDivisionError):
            cut_and_fail(p, 0)
    assert p.weights["first.weight"].shape == (4, 3)


def test_a_cut_keeps_values_set_earlier_in_the_same_edit():
    p = perceptron()
    with p.edit("both") as e:
        e.set_weight("first.weight", lambda w: w * 2)
        e.cut_units(neurons(p)[0])
    twice = perceptron().weights["first.weight"].numpy()[1:] * 2
    assert p.weights["first.weight"].numpy().tobytes() == twice.tobytes()
    before = perceptron().hash()
    p.undo()
    assert p.hash() == before


def test_plans_follow_a_cut_and_forks_do_not():
    p = perceptron()
    plan = p.compile(x=(4, 3))
    twin = p.fork()
    neurons(p).prune(drop=[0, 1])
    assert twin.weights["first.weight"].shape == (5, 3)
    assert not plan.fresh
    np.testing.assert_allclose(p.compile(x=(4, 3))(X)["y"].to_numpy(), run(p, X)["y"], rtol=1e-6)


# -- journal, replay, files --------------------------------------------------------------------------------------------
def reshaped(p: Program) -> Program:
    """Cut, permuted, grown both ways, some of it undone."""
    neurons(p).prune(drop=[1], why="cut")
    with p.edit("turn") as e:
        e.permute("first.neurons", [3, 1, 0, 2])
    with p.edit("grow") as e:
        e.grow("first.neurons", 2, seed=4)
    with p.edit("copy") as e:
        e.grow("first.neurons", 1, "duplicate", seed=4)
    with p.edit("undone") as e:
        e.cut_units(neurons(p)[0])
    p.undo()
    return p


def test_the_journal_replays_on_another_program():
    p, q = reshaped(perceptron()), perceptron()
    replay(p, q)
    assert q.hash() == p.hash()


def test_a_cut_replays_on_a_program_with_other_weights():
    """A recipe: no value travels, each program keeps its own rows."""
    p, q = perceptron(), perceptron()
    with q.edit("other values") as e:
        e.set_weight("first.weight", lambda w: w + 1)
    own = q.weights["first.weight"].numpy().copy()
    neurons(p).prune(drop=[1, 3])
    replay(p.journal, q)
    assert q.weights["first.weight"].numpy().tobytes() == own[[0, 2, 4]].tobytes()


def test_a_replay_on_another_size_is_refused_before_any_change():
    p, q = perceptron(), perceptron(hidden=6)
    neurons(p).prune(drop=[1])
    before = q.hash()
    with pytest.raises(ReplayConflict, match="size recorded in the journal") as caught:
        replay(p, q)
    assert "first.neurons" in str(caught.value)
    assert q.hash() == before


def test_a_saved_program_can_undo_and_redo_cuts(tmp_path):
    p = perceptron()
    start = p.hash()
    reshaped(p)
    end = p.hash()
    p.undo(2)
    p.save(tmp_path / "saved")
    q = load(tmp_path / "saved")
    q.redo(2)
    assert q.hash() == end
    q.undo(4)
    assert q.hash() == start
    assert q.weights["first.weight"].numpy().tobytes() == perceptron().weights["first.weight"].numpy().tobytes()
    r = perceptron()
    replay(tmp_path / "saved", r)
    assert r.hash() == p.hash()


def test_undo_of_a_cut_is_spilled(tmp_path):
    p = perceptron(hidden=200)
    p.history_bytes = 1000
    before = p.hash()
    for _ in range(5):
        neurons(p)[::7].prune()
    after = p.hash()
    assert p.history.spill.moved
    p.undo(5)
    assert p.hash() == before
    p.redo(5)
    assert p.hash() == after


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1, 2, 3], [4, 3, 2, 1, 5]])
def test_invalid_permutations_are_refused(order):
    p = perceptron()
    with pytest.raises(UsageError, match="not a permutation"), p.edit("wrong") as e:
        e.permute("first.neurons", order)


@pytest.mark.parametrize(("n", "init"), [(0, "zero_out"), (-1, "zero_out"), (1, "ones"), (1.0, "zero_out")])
def test_invalid_growth_is_refused(n, init):
    p = perceptron()
    with pytest.raises(UsageError), p.edit("wrong") as e:
        e.grow("first.neurons", n, init)


@pytest.mark.parametrize("init", ["zero_out", "duplicate"])
def test_new_units_are_trained(init):
    p = perceptron()
    expected = run(p, X)["y"]
    with p.edit("grow") as e:
        e.grow("first.neurons", 3, init)
    np.testing.assert_allclose(run(p, X)["y"], expected, atol=1e-6)
    p(**X)["y"].sum().backward()
    grads = [w.grad.numpy() for w in p.parameters() if w.grad is not None and w.ndim == 2]
    assert np.abs(grads[0][5:]).max() > 0 or init == "zero_out"
    assert np.abs(grads[1][:, 5:]).min() > 0
    columns = {row.tobytes() for row in p.weights["second.weight"].numpy().T}
    assert len(columns) == (8 if init == "duplicate" else 6)  # equal halves would never part
