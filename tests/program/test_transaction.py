"""The verbs of an edit, what each refuses, and that a refused edit leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from program_samples import COLS, ROWS, counters, fingerprint, outputs, random_program, tiny
from test_edit_machine import SCRIPT, Boom, set_weight, train

import graphwright.program.editing.transaction as transaction_module
from graphwright.array import bfloat16, empty
from graphwright.errors import CycleError, GraphwrightError, ShapeError, UsageError
from graphwright.graph import StaleHandle
from graphwright.ops import UnknownOp
from graphwright.program import (
    BadName,
    BoundaryMismatch,
    Builder,
    FeedError,
    ForeignNode,
    NameTaken,
    NotAJunction,
    NotConvex,
    NotUndoable,
    PortEmpty,
    PortTaken,
    SpecMismatch,
    UnknownEdge,
    UnknownNode,
    Value,
)


def refused(p, error, change, *, where: str | None = None, fix: str | None = None):
    """`change(e)` raises `error`, saying where and what to do, and the program is as before."""
    before, counts = fingerprint(p), counters(p)
    with pytest.raises(error) as caught, p.edit("refused") as e:
        change(e)
    assert (fingerprint(p), counters(p)) == (before, counts)
    if where is not None:
        assert where in str(caught.value.where)
    if fix is not None:
        assert fix in caught.value.fix
    return caught.value


# -- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "change", "where", "fix"),
    [
        (PortTaken, lambda e: e.connect("x", "r", 0), "r, port 0", "rewire"),
        (PortTaken, lambda e: e.connect("x", "r"), "r", "rewire"),
        (PortEmpty, lambda e: e.cut(e.program.in_edges("r")[0]), "r (relu), port 0", "rewire"),
        (PortEmpty, lambda e: e.remove("h") or e.remove("j"), "r (relu)", "rewire"),
        (NotAJunction, lambda e: e.link("x", "r", np.ones((2, 3), "f4")), "r", "insert"),
        (NotAJunction, lambda e: e.connect("x", "w"), "w", None),
        (NotAJunction, lambda e: e.connect("x", "w", 0), "w", None),
        (NameTaken, lambda e: e.add("relu", "x", name="h"), "h", "name="),
        (NameTaken, lambda e: e.rename("h", "w"), "w", None),
        (NameTaken, lambda e: e.param("v", np.ones(2, "f4"), key="w"), "v", "set_weight"),
        (NameTaken, lambda e: [e.param("v", np.ones(2, "f4")), e.rename("v", "u", key="w")], "u", None),
        (BadName, lambda e: e.rename("h", "a..b"), None, None),
        (BadName, lambda e: e.rename("h", "a\x07"), None, None),
        (BadName, lambda e: e.rename("h", "a\ud800"), None, None),
        (BadName, lambda e: e.rename("h", "x" * 4097), None, None),
        *(
            (BadName, lambda e, name=name: e.rename("h", name), None, None)
            for name in ("a -> b", "a.*", "a[0]", "a[0-3]", "{a,b}", "a}", " a", "a ")
        ),
        (UnknownNode, lambda e: e.rename("hh", "b"), "hh", "did you mean h"),
        (UnknownNode, lambda e: e.set_weight("h", 0), "h", None),
        (UnknownOp, lambda e: e.add("rellu", "x"), "rellu", None),
        (ForeignNode, lambda e: e.add("relu", 3), None, None),
        (ShapeError, lambda e: e.connect(Value(e.program.node("h"), 2), "j"), "h", None),
        (ShapeError, lambda e: e.set_outputs(y=Value(e.program.node("h"), 1)), "h", None),
        (ShapeError, lambda e: e.rewire(e.program.in_edges("r")[0], Value(e.program.node("h"), 1)), "h", None),
        (ShapeError, lambda e: e.connect("h", "j", delay=1), "h -> j", None),
        (SpecMismatch, lambda e: e.connect("x", "j"), "j", None),
        (
            SpecMismatch,
            lambda e: e.set_weight("w", np.ones((4, 3), "f4")) or e.link("x", "j", np.ones((2, 3), "f4")),
            "j",
            None,
        ),
        (CycleError, lambda e: e.connect("r", "j"), "r -> j", "delay"),
        (CycleError, lambda e: e.connect("j", "j"), "j -> j", None),
        (CycleError, lambda e: e.rewire(e.program.in_edges("h")[0], "r"), "r -> h", None),
        (UsageError, lambda e: e.set_attr("r", alpha=1), "r", None),
        (UsageError, lambda e: e.set_attr("w"), "w", "name=value"),
        (UsageError, lambda e: e.set_attr("r"), "r", "name=value"),
        (UsageError, lambda e: e.set_attr("w", colour=1), "w", None),
        (UsageError, lambda e: e.set_attr("w", trainable=object()), None, None),
        (UsageError, lambda e: e.remove("r"), "r", "set_outputs"),
        (UsageError, lambda e: e.connect("h", "j", -1), "j", None),
        (UsageError, lambda e: e.connect("h", "j", 2**31), "j", None),
        (BoundaryMismatch, lambda e: e.replace([e.program.node("r")], tiny()), None, None),
        (NotConvex, lambda e: e.replace([e.program.node(n) for n in ("h", "r")], tiny()), "j", "between"),
    ],
)
def test_errors_state_location_and_fix(error, change, where, fix):
    refused(tiny(), error, change, where=where, fix=fix)


def test_only_the_four_authors_are_accepted():
    p = tiny()
    for author in ("human", "gate", "evolution", "pass"):
        with p.edit("again", author=author, tool="me") as e:
            e.connect("h", "j")
    assert [entry.author for entry in p.journal] == ["human", "gate", "evolution", "pass"]
    with pytest.raises(UsageError, match="unknown author"):
        p.edit("again", author="me")


def test_usage_errors_outside_edits_are_typed():
    p = tiny()
    with pytest.raises(NotUndoable, match="nothing to undo"):
        p.undo()
    with pytest.raises(NotUndoable, match="nothing to redo"):
        p.redo()
    with pytest.raises(FeedError, match="missing"):
        p.run()
    with p.edit("one") as e:
        gone = e.add("relu", "x")
    p.undo()
    with pytest.raises(StaleHandle, match="was relu, removed by entry 1: undo: one"):
        p.node(gone)
    with pytest.raises(NotUndoable):
        p.undo()
    with p.edit("open"), pytest.raises(UsageError, match="open"):
        p.undo()
    with p.edit("barrier", keep_undo=False) as e:
        e.rename("h", "g")
    with p.edit("after") as e:
        e.rename("g", "f")
    before = fingerprint(p)
    with pytest.raises(NotUndoable, match="entry 2: barrier"):
        p.undo(2)
    assert fingerprint(p) == before
    with pytest.raises(UsageError, match="already used in a with-block"), p.edit("twice") as e, e:
        pass
    once = p.edit("once")
    with once:
        pass
    with pytest.raises(UsageError, match="once"), once:
        pass


def test_mismatches_are_reported_together():
    b = Builder()
    x = b.input("x", (2, 3))
    w = b.param("w", np.ones((3, 3), "f4"))
    for i in range(3):
        b.output(b.linear(x, w, name=f"n{i}"), f"y{i}")
    error = refused(b.build(), SpecMismatch, lambda e: e.set_weight("w", np.ones((3, 5), "f4")))
    assert [str(m.where).split()[0] for m in error.mismatches] == ["n0", "n1", "n2"]
    assert "n0" in str(error)
    assert "n2" in str(error)


# -- atomicity ------------------------------------------------------------------------------------------------------
@example(seed=0, script=[(set_weight, 56834, 0), (train, 0, 0), (train, 74, 0)])  # set in place, then trained
@given(seed=st.integers(0, 100), script=SCRIPT)
def test_an_error_at_any_position_changes_nothing(seed, script):
    """Raised before the n-th primitive edit, for every n: finer than between verbs."""
    p = random_program(seed)
    before, counts = fingerprint(p), counters(p)
    do = transaction_module.Transaction.do
    for at in range(400):
        seen = 0

        def failing(self, edit, at=at):
            nonlocal seen
            if seen == at:
                raise Boom
            seen += 1
            do(self, edit)

        transaction_module.Transaction.do = failing
        try:
            with p.edit("fails") as e:
                for verb, a, b in script:
                    verb(e, a, b)
        except Boom:
            pass
        except GraphwrightError:
            break
        else:
            break
        finally:
            transaction_module.Transaction.do = do
        assert fingerprint(p) == before
        assert counters(p) == counts
    else:
        raise AssertionError("scripts are shorter")
    if counters(p) != counts:
        p.undo()
    assert fingerprint(p) == before


def inner(p, e):
    """A nested edit that changes a value, a spec and, by training, a value again, and fails."""
    with p.edit("inner"):
        e.set_weight("w", np.ones((5, 3), "f4"))
        assert e.spec("h").shape == ("B", 5)
        p.weights["w"].own().to_numpy()[...] = 9
        raise Boom


def test_a_nested_failure_rolls_back_specs_values_and_training():
    p = tiny()
    before = fingerprint(p)
    with p.edit("outer") as e:
        e.rename("r", "last")
        with pytest.raises(Boom):
            inner(p, e)
        assert e.spec("h").shape == ("B", 2)
    assert p.validate().ok
    assert len(p.journal[-1].edits) == 1
    p.undo()
    assert fingerprint(p) == before


def test_inference_does_not_visit_what_a_failed_nested_edit_changed():
    p = tiny()
    with p.edit("outer") as e:
        e.annotate("h", reason="none")
        with pytest.raises(Boom):
            inner(p, e)
        assert not e.touched
    assert not p.journal[-1].cone


def test_a_failed_nested_edit_undoes_its_own_training_only():
    p = tiny()
    before = fingerprint(p)

    def train(value: float) -> None:
        p.weights["w"].own().to_numpy()[...] = value

    def fail() -> None:
        with p.edit("inner"):
            train(2)
            raise Boom

    with p.edit("outer"):
        train(1)
        with pytest.raises(Boom):
            fail()
    assert set(p.weights.array("w").to_numpy().ravel()) == {1.0}
    p.undo()
    assert fingerprint(p) == before


def test_training_is_one_entry_and_undone_byte_for_byte():
    p = tiny()
    before = fingerprint(p)
    with p.edit("fine-tune"):
        for step in range(100):
            p.weights["w"].own().to_numpy()[...] += np.float32(0.1 * step)
    assert [r["edit"] for r in p.journal[-1].edits] == ["SetWeight"]
    after = fingerprint(p)
    p.undo()
    assert fingerprint(p) == before
    p.redo()
    assert fingerprint(p) == after


def test_training_then_setting_or_removing_in_one_edit():
    for change in (lambda e: e.set_weight("w", lambda w: w * 0), lambda e: [e.remove("h"), e.remove("w")]):
        p = tiny()
        before = fingerprint(p)
        with p.edit("both") as e:
            p.weights["w"].own().to_numpy()[...] = 5
            change(e)
        p.undo()
        assert fingerprint(p) == before


def test_rewiring_back_is_a_new_edit_not_an_undo():
    p = tiny()
    states = [fingerprint(p)]
    edge = p.in_edges("r")[0]
    for change in (lambda e: e.rewire(edge, "h"), lambda e: e.add("neg", "j"), lambda e: e.rewire(edge, "j")):
        with p.edit("step") as e:
            change(e)
        states.append(fingerprint(p))
    for _ in range(2):
        p.undo(3)
        assert fingerprint(p) == states[0]
        for state in states[1:]:
            p.redo()
            assert fingerprint(p) == state


def test_unchanged_attributes_make_no_entry():
    p = tiny()
    before, counts = fingerprint(p), counters(p)
    with p.edit("nothing") as e:
        e.set_attr("w", trainable=True)
    assert (fingerprint(p), counters(p)) == (before, counts)
    with p.edit("something") as e:
        e.set_attr("w", trainable=False)
        e.rename("w", "w", key="u")
    assert [r["edit"] for r in p.journal[-1].edits] == ["SetAttr", "SetAttr"]
    assert list(p.weights) == ["u"]
    p.undo()
    assert fingerprint(p) == before


# -- verbs ----------------------------------------------------------------------------------------------------------
def test_a_port_can_be_cut_and_connected_in_one_edit():
    p = tiny()
    with p.edit("swap the operand") as e:
        e.cut(p.in_edges("r")[0])
        e.connect("h", "r")
    assert [p.path(v) for v in p.operands(p.node("r"))] == ["h"]


def test_undo_restores_the_position_of_a_summand():
    """Swap-with-last in the container must not show in the order of the sum."""
    b = Builder()
    x = b.input("x", (ROWS, COLS))
    b.output(b.junction(*[b.mul(x, b.const(f"c{i}", np.full(COLS, 10.0**-i, "f4"))) for i in range(4)], name="j"), "y")
    p = b.build()
    first, before = outputs(p), fingerprint(p)
    with p.edit("cut") as e:
        e.cut(p.in_edges("j")[1])
    assert [p.edge_port(e) for e in p.in_edges("j")] == [0, 2, 3]
    p.undo()
    assert (outputs(p), fingerprint(p)) == (first, before)
    with p.edit("cut, then add") as e:
        e.cut(p.in_edges("j")[1])
        e.connect("x", "j")
    assert [p.edge_port(e) for e in p.in_edges("j")] == [0, 2, 3, 4]


def test_an_emptied_junction_is_zero_with_a_warning():
    p = tiny()
    with p.edit("empty") as e:
        e.cut(p.in_edges("j")[0])
    assert p.journal[-1].warnings == ("j has no edges left, so its value is zero",)
    assert p.run(x=np.ones((2, 3), "f4"))["y"].to_numpy().tolist() == [[0, 0], [0, 0]]


def test_insert_keeps_handle_port_and_sum_order():
    p = tiny()
    edge = p.in_edges("j")[0]
    before = outputs_tiny(p)
    with p.edit("insert") as e:
        node = e.insert(edge, "junction")
    assert p.in_edges("j") == (edge,)
    assert p.edge_value(edge).node == node
    assert outputs_tiny(p) == before


def outputs_tiny(p):
    return p.run(x=np.linspace(-2, 2, 6, dtype="f4").reshape(2, 3))["y"].tobytes()


def test_a_delay_is_a_state_and_cuts_the_cycle():
    b = Builder()
    x = b.input("x", (3,))
    b.output(b.tanh(b.junction(x, name="j"), name="t"), "y")
    p = b.build()
    with p.edit("feed back") as e:
        e.connect("t", "j", delay=2)
    held = [np.zeros(3, "f4"), np.zeros(3, "f4")]
    for step in range(20):
        feed = np.full(3, 0.1 * step, "f4")
        wanted = np.tanh(feed + held.pop(0))
        held.append(wanted)
        np.testing.assert_allclose(p.run(x=feed)["y"].to_numpy(), wanted, rtol=1e-6)


def test_an_output_that_is_an_assigned_state_returns_the_value_at_the_start():
    b = Builder()
    state = b.state("s", np.zeros(2, "f4"))
    b.assign(state, b.add(state, b.input("x", (2,))))
    b.output(state, "y")
    x = np.ones(2, "f4")
    p = b.build()
    assert [p.run(x=x)["y"].to_numpy().tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
    kept = p.run(x=x)
    p.run(x=x)
    assert kept["y"].to_numpy().tolist() == [3, 3]
    plan = p.compile(x=(2,))
    assert [plan(x=x)["y"].to_numpy().tolist() for _ in range(2)] == [[5, 5], [6, 6]]


def test_a_plan_without_weights_runs():
    b = Builder()
    b.output(b.neg(b.input("x", (2,))), "y")
    assert b.build().compile(x=(2,))(x=np.ones(2, "f4"))["y"].to_numpy().tolist() == [-1, -1]


def test_a_delay_keeps_the_dtype():
    b = Builder()
    x = b.input("x", (3,), bfloat16)
    b.output(b.junction(x, name="j"), "y")
    p = b.build()
    with p.edit("feed back") as e:
        e.connect("j", "j", delay=1)
    assert p.spec(p.states()[0]) == empty((3,), bfloat16).spec


def test_a_link_is_a_matrix_product():
    p = tiny()
    matrix = np.arange(6, dtype="f4").reshape(2, 3)
    with p.edit("link") as e:
        e.link("x", "j", matrix)
    x = np.linspace(-1, 1, 6, dtype="f4").reshape(2, 3)
    w = tiny().weights.array("w").to_numpy()
    np.testing.assert_allclose(p.run(x=x)["y"].to_numpy(), np.maximum(x @ w.T + x @ matrix.T, 0), rtol=1e-6)


def test_a_renamed_link_leaves_its_weight_and_the_next_link_gets_another():
    p = tiny()
    for name in ("first", "second"):
        with p.edit("link") as e:
            e.rename(p.graph.source(e.link("x", "j", np.zeros((2, 3), "f4"))), name)
    assert p.weight_keys() == ("j.link.weight", "j.link.weight_2", "w")


def test_weights_of_a_replacement_get_free_keys():
    p = tiny()
    with p.edit("leave two keys") as e:
        e.param("v", np.zeros(2, "f4"))
        e.rename("v", "old")
        e.rename("w", "v_2", key="other")
    b = Builder("shift")
    b.output(b.add(b.input("in", ("B", 2)), b.param("v", np.ones(2, "f4"))), "out")
    with p.edit("replace") as e:
        e.replace(["r"], b.build())
    assert p.weight_keys() == ("other", "v", "v_2")
    assert np.array_equal(p.weights.at_key("v_2"), np.ones(2))


def test_replacing_a_part_by_its_extract_keeps_the_function():
    p = random_program(5)
    first = outputs(p)
    count = (len(p), p.graph.edge_count)
    chosen = [
        n for n in p.order() if p.path(n).startswith("m") and p.op(n) in ("tanh", "relu", "neg", "exp", "add", "mul")
    ][:1]
    part = p.extract(chosen)
    assert part.validate().ok
    with p.edit("by itself") as e:
        e.replace(chosen, part)
    assert (len(p), p.graph.edge_count) == count
    assert all(n not in p.graph for n in chosen)
    assert outputs(p) == first


def test_edges_are_found_by_handle_or_by_their_ends():
    p = tiny()
    (edge,) = p.in_edges("j")
    assert p.edge("h -> j") == p.edge("h->j") == p.edge(edge) == edge
    with p.edit("by name") as e:
        made = e.insert("h -> j", "tanh", name="t")
        assert p.edge("t -> j") == edge
        e.rewire("t -> j", "h")
        e.cut("h -> j")
    assert p.in_edges("j") == p.out_edges(made) == ()
    p.undo()
    assert p.in_edges("j") == (edge,)


@pytest.mark.parametrize(
    ("ref", "error", "words"),
    [
        ("x -> j", UnknownEdge, "no edge connects these nodes\n  expected a source among h"),
        ("h -> x", UnknownEdge, "a target that has edges"),
        ("h", UnknownEdge, '"source -> target"'),
        (7, UnknownEdge, "7"),
        ("hh -> j", UnknownNode, "did you mean h"),
    ],
)
def test_unknown_edges_are_refused_with_possible_sources(ref, error, words):
    p = tiny()
    with pytest.raises(error) as caught:
        p.edge(ref)
    assert words in str(caught.value)


def test_naming_parallel_edges_by_their_ends_is_ambiguous():
    p = tiny()
    with p.edit("twice") as e:
        e.connect("h", "j")
    with pytest.raises(UnknownEdge, match=r"2 edges.*\n.*in_edges\('j'\)"):
        p.edge("h -> j")


def test_an_unknown_weight_lists_similar_keys():
    p = tiny()
    assert repr(p.weights) == "Weights(1: w)"
    with pytest.raises(UnknownNode, match="did you mean w"):
        p.weights["w0"]


def test_nodes_of_a_trait_are_in_creation_order_after_undo_too():
    b = Builder()
    x = b.input("x", ("B", 4))
    acts = [getattr(b, op)(x, name=op) for op in ("tanh", "sigmoid", "relu")]
    b.output(b.junction(*acts, b.tanh(x, name="last"), name="total"), "y")
    p = b.build()
    wanted = tuple(map(p.node, ("tanh", "sigmoid", "relu", "last")))
    assert p.of_traits(activation=True) == wanted
    assert p.of_traits(activation=True, keeps_zero=True) == (wanted[0], *wanted[2:])
    assert p.of_traits(nary=True) == p.junctions() == (p.node("total"),)
    with p.edit("cut two") as e:
        for name in ("tanh", "relu"):
            e.cut(p.out_edges(p.node(name))[0])
            e.remove(name)
    assert p.of_traits(activation=True) == (wanted[1], wanted[3])
    p.undo()
    assert p.of_traits(activation=True) == wanted
    with pytest.raises(AttributeError):
        p.of_traits(activatoin=True)
