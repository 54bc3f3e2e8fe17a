"""A run keeps what it was asked for, lets the rest go, gives gradients of its values, and tells when they are old."""

from __future__ import annotations

import re
from importlib import import_module
from weakref import ref

import numpy as np
import pytest
import torch
from program_samples import FEEDS, random_program, tiny

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.autograd import grad
from graphwright.errors import UsageError
from graphwright.program import Builder, Program, StaleRun, ValueReleased
from graphwright.testing.oracle import assert_bits
from values import array_of, grad_of

X = np.ones((2, 3), "f4")


def test_the_repr_of_a_run_states_size_time_and_outputs():
    p = tiny()
    kinds = {}
    for keep, capture in (("all", ()), ("outputs", ()), ("outputs", ["h"]), (["h"], ())):
        run = p.run(x=X, keep=keep, capture=capture)
        expected_text = r"Run\('tiny' version 0, keep='\w+': \d values, [\d,]+ bytes, [\d.e+-]+ ms, outputs y\)"
        assert re.fullmatch(expected_text, repr(run))
        kinds[run.keep, len(run.values)] = run.nbytes
    # h, j, r: 16 bytes each in memory of their own; x is the caller's
    assert kinds == {("all", 5): 3 * 16, ("outputs", 1): 16, ("some", 2): 32}
    assert 0 < run.seconds < 10


def test_the_repr_of_a_run_reads_no_weight():
    p = gw.open("bundled").program
    run = p.run(ids=np.array([[84]]), positions=np.array([[0]]), keep="outputs")
    fresh = gw.open("bundled").program
    repr([fresh, fresh.weights, run, *fresh.weights.values(), *(v.data for v in fresh.weights.values())])
    assert not any(v.data.storage.touched for v in fresh.weights.values() if v.data.storage.readonly)


# -- values that die ---------------------------------------------------------------------------------------------------
def aliases() -> Program:
    """A view read twice and early, outputs that are an input, a view of one, a const and a param."""
    b = Builder("aliases")
    x = b.input("x", (2, 3))
    w, c = b.param("w", np.arange(6, dtype="f4").reshape(2, 3)), b.const("c", np.ones((2, 3), "f4"))
    transposed = b.permute(b.tanh(x, name="t"), axes=(1, 0), name="transposed")
    twice = b.mul(transposed, transposed, name="twice")
    b.output(x, "same")
    b.output(b.permute(x, axes=(1, 0), name="x.transposed"), "view")
    b.output(b.add(b.add(x, w), c), "sum")
    b.output(b.permute(b.relu(twice), axes=(1, 0)), "end")
    b.output(w, "w_itself")
    b.output(c, "c_itself")
    return b.build()


@pytest.mark.parametrize("make", [aliases, *(lambda seed=s: random_program(seed) for s in range(20))])
def test_retaining_fewer_values_changes_no_bit(make):
    p, q = make(), make()
    feeds = {name: X if make is aliases else FEEDS[name] for name in p.input_names()}
    whole, some = p.run(feeds), q.run(feeds, keep="outputs")
    assert {v.node for v in some.values} == {v.node for v in q.outputs()}
    for name in p.output_names():
        assert whole[name].tobytes() == some[name].tobytes()


def test_values_are_freed_after_their_last_reader(monkeypatch):
    b = Builder("chain")
    h = b.input("x", (4,))
    for i in range(50):
        h = b.relu(b.unflatten(b.neg(h, name=f"n{i}"), axis=0, sizes=(4,), name=f"v{i}"), name=f"r{i}")
    b.output(h, "y")
    p, made, alive = b.build(), [], []

    def counted(*args):
        results = plain(*args)
        made.append(ref(results[0].storage))
        alive.append(len({id(s) for m in made if (s := m()) is not None}))
        return results

    plain = import_module("graphwright.program.run").step
    monkeypatch.setattr(import_module("graphwright.program.run"), "step", counted)
    run = p.run(x=np.ones(4, "f4"), keep=["n3"])
    assert max(alive) == 3  # n3, what is read and what is made
    assert run.value("n3").to_numpy().tolist() == [0] * 4
    with pytest.raises(ValueReleased, match="n4") as found:
        run.value("n4")
    assert "keep='all'" in str(found.value)
    alive.clear()
    p.run(x=np.ones(4, "f4"))
    assert max(alive) > 90


def test_closing_a_run_frees_its_values_except_those_held():
    p = tiny()
    weight = p.weights.array("w").tobytes()
    with p.run(x=X) as run:
        taken = run["y"]
        held, memory = taken.tobytes(), ref(run.value("h").storage)
    run.close()
    assert memory() is None
    assert run.nbytes == 0
    assert taken.tobytes() == held
    assert p.weights.array("w").tobytes() == weight
    assert "closed" in repr(run)
    for use in (lambda: run.value("h"), lambda: run["y"], lambda: run.grad("y", ["w"])):
        with pytest.raises(ValueReleased, match="closed"):
            use()


# -- gradients of a run ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(12))
def test_gradients_equal_the_tape(seed):
    p = random_program(seed)
    wanted = ["m0.w", "m1.w", "x"]
    reached = {p.path(n) for n in p.reachable([p.output(p.output_names()[0])])}
    wanted = [w for w in wanted if w in reached]
    feeds = {name: gw.tensor(FEEDS[name]) for name in p.input_names()}
    for t in feeds.values():
        t.requires_grad = True
    found = p.run(FEEDS).grad(p.output_names()[0], wanted)
    out = p(**feeds)
    first = (out if not isinstance(out, dict) else out[p.output_names()[0]]).sum()
    taped = grad(first, [feeds[w] if w in feeds else p.weights[w] for w in wanted])
    for mine, theirs in zip(found, taped, strict=True):
        assert theirs is not None
        assert mine.tobytes() == array_of(theirs).tobytes()


def test_output_gradients_weight_outputs_as_in_torch():
    x, w, g = (np.random.default_rng(i).normal(size=s).astype("f4") for i, s in enumerate([(2, 3), (2, 3), (2, 2)]))
    p = tiny()
    with p.edit("weights") as e:
        e.set_weight("w", w)
    dx, dw = p.run(x=x).grad("y", ["x", "w"], [g])
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    torch.nn.functional.linear(tx, tw).relu().backward(torch.tensor(g))
    np.testing.assert_allclose(dx.to_numpy(), grad_of(tx).numpy(), rtol=1e-6)
    np.testing.assert_allclose(dw.to_numpy(), grad_of(tw).numpy(), rtol=1e-6)


def test_retained_values_are_not_computed_again(monkeypatch):
    p = random_program(3)
    run, ran = p.run(FEEDS), []
    plain = import_module("graphwright.program.run").step
    monkeypatch.setattr(
        import_module("graphwright.program.run"),
        "step",
        lambda q, node, *a: ran.append(q.path(node)) or plain(q, node, *a),
    )
    run.grad(p.output_names()[0], ["x"])
    assert ran
    assert not {p.path(n) for n in p.nodes()} & set(ran)


def test_a_source_const_is_not_confused_with_one_of_the_gradient():
    """A mean's gradient makes a const of its own, whose name is free where the source's const is not mirrored."""
    b = Builder("counted")
    count = b.state("count", np.zeros((), np.int64))
    b.assign(count, b.add(count, b.const("const", np.ones((), np.int64))))
    b.output(b.mean(b.mul(b.input("x", (4,)), b.param("w", np.ones(4, "f4"))), axes=None, keepdims=False), "loss")
    (found,) = b.build().run(x=np.arange(4, dtype="f4")).grad("loss", ["w"])
    np.testing.assert_array_equal(found.to_numpy(), np.arange(4) / 4)


def test_a_gradient_program_is_cached_and_follows_edits():
    p = tiny()
    run = p.run(x=X)
    run.grad("y", ["w"])
    (made,) = p.derived["gradients"].values()
    run.grad("y", ["w"])
    assert list(p.derived["gradients"].values()) == [made]
    with p.edit("again") as e:
        e.connect("h", "j")
    (found,) = p.run(x=X).grad("y", ["w"])
    assert list(p.derived["gradients"].values()) == [made]
    assert_bits(found, p.fork().run(x=X).grad("y", ["w"])[0])


def test_a_stale_run_raises_naming_the_edits():
    p = tiny()
    run = p.run(x=X)
    with p.edit("double h") as e:
        e.connect("h", "j")
    with pytest.raises(StaleRun, match="double h"):
        run.grad("y", ["w"])
    run = p.run(x=X)
    p.weights["w"].own().copy_from(from_numpy(np.zeros((2, 3), "f4")))
    with pytest.raises(StaleRun, match="weights changed"):
        run.grad("y", ["w"])


def test_a_patched_run_has_no_gradient():
    p = tiny()
    with pytest.raises(UsageError, match="patched"):
        p.run(x=X, patch={"h": np.ones((2, 2), "f4")}).grad("y", ["w"])


def test_constants_lists_each_array_once():
    p = random_program(5)
    stored = {p.key(n): p.weights.array(p.key(n)) for n in p.order() if p.op(n) in ("param", "const")}
    assert p.constants() == stored
    assert list(p.constants()) == list(stored)


def squares() -> Program:
    """total' = total + x², a state that the gradient of the sum of total · x reads."""
    b = Builder("squares")
    x, total = b.input("x", (2,)), b.state("total", np.asarray([2, 3], "f4"))
    b.output(b.mul(total, x, name="weighed"), "y")
    b.assign(total, b.add(total, b.mul(x, x, name="square"), name="grown"))
    return b.build()


def test_gradients_read_states_as_at_the_start_of_the_run():
    p, x = squares(), np.asarray([4, 5], "f4")
    (dx,) = p.run(x=x).grad("y", ["x"])
    assert dx.to_numpy().tolist() == [2, 3]
    assert p.weights.array("total").to_numpy().tolist() == [18, 28]
    with pytest.raises(StaleRun, match="total"):  # its old value was let go
        p.run(x=x, keep="outputs").grad("y", ["x"])


def test_a_wrong_number_of_output_gradients_raises():
    with pytest.raises(UsageError, match="seed does not have one array per output"):
        tiny().run(x=X).grad("y", ["w"], [])


def test_producers_are_the_sources_of_operands():
    p = random_program(2)
    for node in p.nodes():
        read = p.producers(node)
        assert set(read) == {p.graph.source(e) for e in p.graph.in_edges(node)}
        assert len(set(read)) == len(read)
        assert all(node in p.consumers(r) for r in read)


def test_an_unknown_value_of_keep_is_refused():
    with pytest.raises(UsageError, match="keep") as caught:
        tiny().run(x=X, keep="h")
    assert caught.value.fix == "keep=['h']"
