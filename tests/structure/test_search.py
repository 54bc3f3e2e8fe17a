"""Search: what candidates are, what each method may spend, and planted skips that are found again."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import structure as st
from graphwright.errors import UsageError
from graphwright.structure import searching as ss
from graphwright.structure.searching import methods
from graphwright.structure.searching.candidates import Skips
from graphwright.structure.searching.methods import Trials, drawn, toggled
from graphwright.testing.planted import BLOCK_NAMES, CHAIN, SkipTeacher, chain
from seeds import deep

WIDTH, NAMES = CHAIN, BLOCK_NAMES


def planted(seed: int, count: int = 3) -> tuple[gw.Program, set[str], Any, Any]:
    """A teacher with skips, their names, batches of its answers, and the task of a student."""
    made = SkipTeacher(seed, ss.skips(NAMES), count)
    return made.program, made.planted, made.batch, made.task


def test_planted_skips_are_recovered():
    found = 0
    for seed in range(deep(2, 1)):
        _, wanted, batch, task = planted(seed)
        start = chain(2000 + seed)
        before = start.hash()
        t = Trials(start, ss.skips(NAMES), batch, batch(np.random.default_rng(7), 256), task, 2000, seed, 0.01)
        result = ss.METHODS["gates"](t)
        assert t.spent == 2000
        assert start.hash() == before
        if set(result.chosen) == wanted:
            found += 1
            given = Trials(start, t.candidates, batch, t.valid, task, 1000, seed, 0.01)
            known = given.score(given.fit(given.structure(wanted), 1000))
            assert result.loss <= 1.1 * known + 1e-9
    assert found == deep(2, 1)


def test_skips_of_six_blocks_and_an_input():
    p, candidates = chain(0), ss.skips(NAMES, min_gap=2)
    names = candidates.names(p)
    assert len(names) == 15
    assert all(NAMES.index(b) - NAMES.index(a) >= 2 for a, b in (n.split(" -> ") for n in names))
    gates_of = candidates.gate(p)
    assert list(gates_of) == names
    assert len(p.gates()) == 15
    assert p.validate().ok
    assert not [n for n in p.params() if ".from_" in p.path(n)]
    assert p.journal[-1].author == "gate"
    p.undo()
    assert p.hash() == chain(0).hash()


def test_projections_connect_different_widths_only():
    p, candidates = chain(0, True, widths=(12, 12, 8, 12, 8, 12, 12)), ss.skips(NAMES)
    candidates.build(p, candidates.names(p))
    made = {p.path(n) for n in p.nodes() if ".from_" in p.path(n) and p.op(n) == "linear"}
    differ = [n for n in candidates.names(p) if not candidates.free(p, n)]
    assert len(made) == len(differ) > 0
    assert len(differ) < len(candidates.names(p))
    x = np.random.default_rng(0).normal(size=(3, 12)).astype("f4")
    np.testing.assert_allclose(p.compile(x=x.shape)(x=x)["y6"].to_numpy(), p.run(x=x)["y6"].to_numpy(), atol=1e-5)
    with pytest.raises(UsageError, match="is invalid for skips"):
        ss.skips(["x", "h1"])
    with pytest.raises(UsageError, match="is invalid for skips"):
        ss.skips(["x", "h1", "x"])


def test_skips_of_images_compare_channels_and_sizes():
    """[C, H, W]: equal shapes have none, other channels a kernel-1 convolution, smaller sizes one with a stride."""
    rng, b = np.random.default_rng(0), gw.Builder("images")
    h = b.input("x", ("B", 3, 6, 6))
    for j, (inner, outer, stride) in enumerate([(3, 4, 1), (4, 4, 1), (4, 5, 2), (5, 4, 1)], 1):
        w = b.param(f"c{j}", rng.normal(size=(outer, inner, 3, 3)).astype("f4") / 5)
        h = b.tanh(b.conv(h, w, padding=1, stride=stride), name=f"h{j}")
    b.output(h, "y")
    p, candidates = b.build(), ss.skips(["x", "h1", "h2", "h3", "h4"])
    assert [n for n in candidates.names(p) if candidates.free(p, n)] == []
    candidates.build(p, ["x -> h2", "h1 -> h3"])
    assert p.spec("h2.sum.from_x.weight").shape == (4, 3, 1, 1)
    assert p.spec("h3.sum.from_h1").shape == ("B", 5, 3, 3)
    x = rng.normal(size=(2, 3, 6, 6)).astype("f4")
    run = p.run(x=x)
    w = p.variables()["h3.sum.from_h1.weight"].numpy()[:, :, 0, 0]
    thinned = np.einsum("oc,bchw->bohw", w, run.value("h1").to_numpy()[:, :, ::2, ::2])
    np.testing.assert_allclose(run.value("h3.sum").to_numpy(), run.value("h3").to_numpy() + thinned, atol=1e-5)
    with p.edit("rows of features beside images") as e:
        e.add("flatten", p.node("h4"), start=1, end=3, name="flat")
    with pytest.raises(UsageError, match="no projection"):
        ss.skips(["x", "h1", "h2", "flat"]).names(p)


def test_initial_logits_of_skips_depend_on_their_number():
    """Of k identities each is open by 1/(k+1); a projection scales by itself, and its gate begins open."""
    p, candidates = chain(0, widths=(12, 12, 8, 12, 8, 12, 12)), ss.skips(NAMES)
    gates_of = candidates.gate(p)
    by_element = {(e.gate.handle, e.index): e.p for e in st.DifferentiableGraph(p).elements()}
    begin = {name: by_element[element] for name, element in gates_of.items()}
    assert begin["x -> h3"] == pytest.approx(1 / 3)
    assert begin["x -> h5"] == pytest.approx(1 / 5)
    assert begin["x -> h2"] == begin["h4 -> h6"] == pytest.approx(1 / (1 + np.exp(-1)))


@pytest.mark.parametrize(
    ("probabilities", "least", "most"),
    [
        ((0.98, 0.38, 0.06), 0.07, 0.37),
        ((0.6, 0.45, 0.2), 0.21, 0.44),
        ((0.03, 0.02), 0.1, 0.5),
        ((0.98, 0.9), 0.1, 0.5),
        ((1.0, 0.0), 0.1, 0.5),
        ((), 0.1, 0.5),
    ],
)
def test_the_threshold_is_in_the_widest_gap(probabilities, least, most):
    assert least <= methods._threshold(list(probabilities)) <= most


def test_a_skip_starts_at_the_sum_that_an_earlier_skip_entered():
    """h3 + h1, then h5 + (h3 + h1): the second skip leaves where the first one entered."""
    p, candidates = chain(0), ss.skips(NAMES)
    candidates.build(p, ["h3 -> h5", "h1 -> h3"])
    x = np.random.default_rng(0).normal(size=(4, 12)).astype("f4")
    w = {k: v.numpy() for k, v in p.variables().items()}

    def block(j, h):
        return np.tanh(h @ w[f"b{j}.w"].T + w[f"b{j}.bias"])

    h1 = block(1, x)
    h3 = block(3, block(2, h1)) + h1
    h5 = block(5, block(4, h3)) + h3
    np.testing.assert_allclose(p.run(x=x)["y6"].to_numpy(), block(6, h5), atol=1e-5)


@pytest.mark.parametrize("method", list(ss.METHODS))
def test_every_method_uses_the_same_budget_and_its_journal_replays(method):
    _, _, batch, task = planted(0)
    start, valid = chain(5), batch(np.random.default_rng(7))
    result = ss.search(start, ss.skips(NAMES), batch, valid, method, 80, 3, task=task, beside=())
    trial = 80 // 4
    rows = {r.method: r for r in result.table}
    assert list(rows) == list(dict.fromkeys((method, "random")))
    assert all(80 - trial < r.steps <= 80 + trial for r in result.table)
    fresh = start.fork()
    ss.skips(NAMES).build(fresh, result.chosen)
    assert fresh.structure_hash() == result.program.structure_hash()
    assert result.loss == pytest.approx(rows[method].loss)
    assert str(result).splitlines()[1].startswith(method)
    assert result.to_json()["table"][0]["chosen"] == list(result.chosen)


def test_a_softmax_chooses_among_the_skips_into_a_block_and_no_skip():
    p, candidates = chain(0), ss.skips(NAMES)
    before = p.run(x=np.ones((2, WIDTH), "f4"))["y6"].to_numpy()
    gates_of = candidates.compete(p)
    assert list(gates_of) == [n for t in NAMES[2:] for n in candidates.names(p) if n.endswith(f" -> {t}")]
    gates = [p.gates()[h] for h in dict.fromkeys(h for h, _ in gates_of.values())]
    assert [(g.kind, g.length) for g in gates] == [("choice", j + 1) for j in range(1, 6)]
    with p.edit("none of them") as e:
        for gate in gates:
            e.set_gate(gate.handle, "closed", list(range(gate.length - 1)))
    np.testing.assert_allclose(p.run(x=np.ones((2, WIDTH), "f4"))["y6"].to_numpy(), before, atol=1e-6)
    with pytest.raises(UsageError, match="softmax does not support"):
        ss.METHODS["softmax"](Trials(chain(0), ss.widths("x"), lambda rng: {}, {}, "y", 40, 0, 0.01))


@pytest.mark.deep
def test_growing_adds_only_edges_that_reduce_the_loss():
    _, _, batch, task = planted(1, count=1)
    valid = batch(np.random.default_rng(7))
    t = Trials(chain(2001), ss.skips(NAMES), batch, valid, task, 1300, 0, 0.01)
    found = ss.METHODS["grow"](t)
    assert found.loss == t.curve[-1][1]
    assert found.loss <= min(loss for _, loss in t.curve[:4])
    # a student of a chain without skips: nothing is planted, so that none wins or helps
    nothing: Any = planted(2, count=0)
    t = Trials(chain(1002, True), ss.skips(NAMES), nothing[2], nothing[2](np.random.default_rng(7)), nothing[3], 400,
               0, 1e-4)  # fmt: skip
    assert ss.METHODS["grow"](t).chosen == ()
    with pytest.raises(UsageError, match="grow does not support"):
        ss.METHODS["grow"](Trials(chain(0), ss.widths("x"), batch, valid, task, 400, 0, 0.01))


@pytest.mark.deep
def test_search_over_ops_selects_one_op():
    b = gw.Builder("curve")
    x, rng = b.input("x", ("B", 1)), np.random.default_rng(0)
    h = b.linear(x, b.param("w1", rng.normal(size=(8, 1)).astype("f4")), b.param("c1", np.zeros(8, "f4")), name="in")
    h = b.relu(h, name="act")
    b.output(b.linear(h, b.param("w2", rng.normal(size=(1, 8)).astype("f4")), name="out"), "y")
    start, candidates = b.build(), ss.ops("act", ["relu", "sin", "copy"])
    assert candidates.names(start) == ["act: relu", "act: sin", "act: copy"]

    def batch(rng):
        x = rng.uniform(-4, 4, (64, 1)).astype("f4")
        return {"x": x, "t": np.sin(2 * x)}

    def task(outputs, feeds):
        return ((outputs["y"] - feeds["t"]) ** 2).mean()

    result = ss.search(start, candidates, batch, batch(np.random.default_rng(9)), "random", 1600, 0, task=task)
    assert {r.method for r in result.table} == {"random", "evolve"}
    losses = {}
    for op in ("relu", "sin", "copy"):
        p = start.fork()
        candidates.build(p, [f"act: {op}"])
        t = Trials(start, candidates, batch, batch(np.random.default_rng(9)), task, 300, 0, 0.01)
        losses[op] = t.score(t.fit(p, 300))
    assert min(losses, key=losses.__getitem__) == "sin"
    p = start.fork()
    gates_of = candidates.gate(p)
    assert [i for _, i in gates_of.values()] == [0, 1, 2]
    with pytest.raises(UsageError, match="not exactly one op"):
        candidates.build(start.fork(), ["act: relu", "act: sin"])
    with pytest.raises(UsageError, match="two or more edges"):
        ss.ops("act", ["relu"])


def test_at_least_the_given_number_of_units_stays():
    b = gw.Builder("mlp")
    x, rng = b.input("x", ("B", 3)), np.random.default_rng(0)
    h = b.tanh(b.linear(x, b.param("up.weight", rng.normal(size=(12, 3)).astype("f4")), name="up"))
    b.output(b.linear(h, b.param("down.weight", rng.normal(size=(2, 12)).astype("f4")), name="down"), "y")
    p = b.build()
    (axis,) = [name for name, g in p.axes().items() if g.size == 12]
    c = ss.widths(axis, least=2)
    assert c.names(p)[:2] == [f"{axis}[0]", f"{axis}[1]"]
    q = p.fork()
    c.build(q, [f"{axis}[3]", f"{axis}[7]", f"{axis}[8]"])
    kept = p.variables()["up.weight"].numpy()[[3, 7, 8]]
    np.testing.assert_array_equal(q.variables()["up.weight"].numpy(), kept)
    q = p.fork()
    c.build(q, [])
    assert q.axes()[axis].size == 2
    assert len(c.gate(p.fork())) == 12


def test_samples_contain_one_alternative_and_toggling_changes_one_candidate():
    rng = np.random.default_rng(0)
    names = ["a: relu", "a: sin", "b: relu", "b: sin", "x -> h2"]
    t = Trials(chain(0), ss.skips(NAMES), lambda rng: {}, {}, "y", 40, 0, 0.01)
    for _ in range(50):
        chosen = drawn(t, names, rng)
        assert [sum(n.startswith(f"{path}: ") for n in chosen) for path in "ab"] == [1, 1]
        after = toggled(names, chosen, rng)
        assert len(set(chosen) ^ set(after)) in (0, 1, 2)
        assert [sum(n.startswith(f"{path}: ") for n in after) for path in "ab"] == [1, 1]


@pytest.mark.parametrize(("share", "warned"), [(0.9, True), (0.5, False)])
def test_a_search_that_opens_most_candidates_warns(share, warned, monkeypatch):
    monkeypatch.setattr(methods, "_threshold", lambda probabilities: 0.0)

    class Some(Skips):
        def free(self, p, name):
            return self.names(p).index(name) < share * 15

    _, _, batch, task = planted(0)
    t = Trials(chain(0), Some(NAMES), batch, batch(np.random.default_rng(0)), task, 40, 0, 1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(ss.METHODS["gates"](t).chosen) == 15
    assert any(w.category is ss.Collapsed for w in caught) == warned


def test_invalid_searches_are_refused():
    _, _, batch, task = planted(0)
    valid = batch(np.random.default_rng(0))
    with pytest.raises(UsageError, match="unknown search method"):
        ss.search(chain(0), ss.skips(NAMES), batch, valid, "magic", task=task)
    with pytest.raises(UsageError, match="budget"):
        ss.search(chain(0), ss.skips(NAMES), batch, valid, budget=10, task=task)
    with pytest.raises(st.NotScalar):
        ss.search(chain(0), ss.skips(NAMES), batch, valid)
    p = chain(0)
    with p.edit("integers") as e:
        e.rename(p.node("h1"), "other")
    with pytest.raises(gw.GraphwrightError):
        ss.search(p, ss.skips(NAMES), batch, valid, task=task)
