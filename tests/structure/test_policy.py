"""What goes and what must stay: bands and patience, targets, paths that are put back, and edges that would help."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import graphwright as gw
from fixtures.gated import junction_edges, random_dag
from graphwright import structure as st
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import Program
from graphwright.structure.elements import edge_of
from graphwright.structure.policy import protect
from graphwright.testing.planted import Edges
from seeds import deep


def view_of(p0: list[float]) -> st.DifferentiableGraph:
    """One junction with an edge per probability."""
    b = gw.Builder()
    x = b.input("x", (2,), "float64")
    parts = [b.tanh(x, name=f"t{i}") for i in range(len(p0))]
    b.output(b.junction(x, *parts, name="sum"), name="y")
    p = b.build()
    with p.edit("gates") as e:
        e.gate(p.in_edges("sum")[1:], "sigmoid", init=[np.log(q / (1 - q)) for q in p0])
    return st.DifferentiableGraph(p)


def move(view: st.DifferentiableGraph, p0: list[float]) -> None:
    held = view.program.weights["gates.logits"]
    held.assign(gw.tensor(np.array([np.log(q / (1 - q)) for q in p0])))


TRACES = {
    "falls and stays": ([0.05] * 4, [False, False, True, True]),
    "oscillates": ([0.05, 0.05, 0.6, 0.05, 0.05, 0.6], [False] * 6),
    "waits between the bands": ([0.05, 0.3, 0.05, 0.3, 0.05], [False, False, False, False, True]),
    "never low": ([0.2] * 5, [False] * 5),
}


@pytest.mark.parametrize("name", TRACES)
def test_an_element_is_cut_after_enough_checks(name: str) -> None:
    values, expected = TRACES[name]
    view, policy = view_of([values[0], 0.9]), st.Policy(patience=3)
    seen = []
    for value in values:
        move(view, [value, 0.9])
        seen.append([q.name for q in policy.propose(view)])
    assert [names == ["t0 -> sum"] for names in seen] == expected


def test_a_check_cuts_at_most_a_fraction() -> None:
    view = view_of([0.01, 0.02, 0.03, 0.04, 0.05, 0.9, 0.9, 0.9, 0.9, 0.9])
    policy = st.Policy(patience=1)
    assert [q.name for q in policy.propose(view)] == ["t0 -> sum", "t1 -> sum"]
    view.apply(policy.propose(view))
    assert view.program.journal[-1].author == "gate"
    assert len(view.elements()) == 8
    view.program.undo()
    assert len(view.elements()) == 10


def test_protected_elements_are_not_cut() -> None:
    view = view_of([0.01, 0.02])
    assert [q.name for q in st.Policy(patience=1, protect=["t0 -> sum"], max_fraction=1).propose(view)] == ["t1 -> sum"]
    done = view.discretize(st.ThresholdPolicy(0.5, protect=["t0 -> sum"]))
    assert done.cut == ["t1 -> sum"]
    assert [(k.name, k.reason) for k in done.kept_back] == [("t0 -> sum", "protected by name")]


def test_a_target_number_of_elements_is_met_exactly() -> None:
    view = view_of([0.9, 0.2, 0.8, 0.1, 0.7])
    for target in (5, 4, 3, 2):
        done = view.discretize(st.TopPolicy(target), copy=True)
        assert len(done.elements) - len(done.cut) == target
        assert set(done.cut) == set(["t3 -> sum", "t1 -> sum", "t4 -> sum"][: 5 - target])
    assert len(view.discretize(st.TopPolicy(0.4), copy=True).cut) == 3


def test_a_target_in_parameters_counts_removed_parameters() -> None:
    b, rng = gw.Builder(), np.random.default_rng(0)
    x = b.input("x", (2, 4), "float64")
    parts = [b.linear(x, b.param(f"w{i}", rng.normal(size=(4, 4))), name=f"fc{i}") for i in range(4)]
    b.output(b.junction(x, *parts, name="sum"), name="y")
    p = b.build()
    with p.edit("gates") as e:
        e.gate(p.in_edges("sum")[1:], "sigmoid", init=[0.5, -0.5, 1.0, -1.0])
    done = st.DifferentiableGraph(p).discretize(st.TopPolicy(32, of="params"), to="one")
    assert done.after.params == 32
    assert set(done.cut) == {"fc1 -> sum", "fc3 -> sum"}


@pytest.mark.parametrize(("target", "left"), [(1.0, (10, 3)), (0.95, (8, 3)), (0.6, (4, 3)), (0.5, (4, 2))])
def test_units_are_cut_in_blocks_and_a_multiple_stays(target: float, left: tuple[int, int]) -> None:
    """Two of ten neurons go first, then four at a time; the other axis has fewer units than a block."""
    b, rng = gw.Builder(), np.random.default_rng(0)
    h = b.input("x", ("B", 2), gw.float64)
    for k, (n, m) in enumerate(((10, 2), (3, 10), (1, 3))):
        h = b.tanh(b.linear(h, b.param(f"w{k}", rng.normal(size=(n, m))), name=f"fc{k}"), name=f"h{k}")
    b.output(h, "y")
    p = b.build()
    for axis in [a for a in p.axes().values() if not a.frozen]:
        axis.units().gate("sigmoid")
    z = {10: rng.permutation(10) - 20.0, 3: np.array([1.0, -13.5, 2.0])}
    logits = np.concatenate([z[g.length] for g in p.gates().values()])
    p.weights["gates.logits"].data = gw.array.from_numpy(logits.astype("f4"))
    view = st.DifferentiableGraph(p)
    gone = [q.element for q in st.TopPolicy(target, round_to=4).propose(view)]
    counts = [sum(e.gate.length == n for e in gone if e is not None) for n in (10, 3)]
    assert (10 - counts[0], 3 - counts[1]) == left
    for n in (10, 3):  # the lowest of each axis
        mine = sorted(e.z for e in view.elements() if e.gate.length == n)
        assert sorted(e.z for e in gone if e is not None and e.gate.length == n) == mine[: counts[0 if n == 10 else 1]]
    with pytest.raises(UsageError, match="round_to"):
        st.TopPolicy(0.5, round_to=0)


def test_a_target_below_the_protected_size_raises_and_changes_nothing() -> None:
    p = random_dag(0)
    with p.edit("gates") as e:
        e.gate(junction_edges(p), "sigmoid")
    digest = p.hash()
    with pytest.raises(st.BudgetUnreachable):
        st.DifferentiableGraph(p).discretize(st.TopPolicy(0.0))
    assert p.hash() == digest
    with pytest.raises(st.WouldDisconnect, match="sum"):
        st.DifferentiableGraph(p).discretize(1.0, protection="strict")
    assert p.hash() == digest


# -- against brute force over all paths --------------------------------------------------------------------------------
def paths(p: Program, node: NodeId) -> list[list]:
    """All paths from an input, as lists of edges."""
    found = [[]] if p.op(node) == "input" else []
    for edge in p.in_edges(node):
        found += [[*path, edge] for path in paths(p, p.graph.source(edge))]
    return found


@pytest.mark.parametrize("seed", range(deep(60, 20)))
def test_the_widest_path_is_protected(seed: int) -> None:
    p, rng = random_dag(seed, nodes=3), np.random.default_rng(seed)
    with p.edit("gates") as e:
        e.gate(
            junction_edges(p),
            "sigmoid",
            init=[np.log(q / (1 - q)) for q in rng.uniform(0.01, 0.3, len(junction_edges(p)))],
        )
    view = st.DifferentiableGraph(p)
    among = view.elements()
    cuts, kept = protect(p, among, among)
    by_edge = {edge_of(p, e): e for e in among}
    target = p.node("out.sum")
    gated = [[by_edge[edge] for edge in path if edge in by_edge] for path in paths(p, target)]
    widest = max(min(e.p for e in path) for path in gated)
    best = [{e.name for e in path} for path in gated if min(e.p for e in path) == widest]
    put_back = {k.name for k in kept}
    assert put_back in best
    assert {e.name for e in cuts} == {e.name for e in among} - put_back
    assert put_back == {k.name for k in protect(p, among, among)[1]}


@pytest.mark.parametrize("seed", range(deep(200, 15)))
def test_every_output_stays_reachable(seed: int) -> None:
    p = random_dag(seed, nodes=5)
    with p.edit("gates") as e:
        e.gate(junction_edges(p), "sigmoid", init=-9.0)
    st.DifferentiableGraph(p).discretize()
    assert all("x" in {p.path(n) for n in p.reachable([v])} for v in p.outputs())
    x = np.random.default_rng(seed).normal(size=(4, 3))
    assert np.abs(p.run(x=x)["y"].to_numpy()).max() > 0


def test_the_last_unit_of_an_axis_is_not_cut() -> None:
    b, rng = gw.Builder(), np.random.default_rng(0)
    x = b.input("x", (2, 4), "float64")
    w = [b.param(n, rng.normal(size=s)) for n, s in (("up", (6, 4)), ("down", (4, 6)))]
    b.output(b.linear(b.tanh(b.linear(x, w[0])), w[1]), name="y")
    p = b.build()
    axis = next(g for g in p.axes().values() if g.size == 6)
    axis.units().gate("sigmoid", init=np.linspace(-6, -1, 6))
    done = st.DifferentiableGraph(p).discretize(st.ThresholdPolicy(0.5, min_in=2), copy=True)
    assert done.program.weights["up"].shape == (2, 4)
    assert [k.name[-3:] for k in done.kept_back] == ["[5]", "[4]"]


# -- additions ---------------------------------------------------------------------------------------------------------
def test_the_missing_planted_edge_ranks_first() -> None:
    first = 0
    for seed in range(10):
        problem = Edges(seed)
        p, (i, j) = problem.program, problem.pairs[seed]
        with p.edit("one is absent, the weight is right") as e:
            e.set_weight("w", problem.m.astype(np.float32))
            for name in (f"x{b} -> y{a}" for a in range(8) for b in range(8) if a != b):
                if name not in problem.planted or name == f"x{j} -> y{i}":
                    e.cut(name)
        view = st.DifferentiableGraph(p)
        digest = p.hash()
        ranked = [row for row in st.gains(view, "loss", problem.batch(256)) if row[0].startswith("x")]
        assert p.hash() == digest
        first += ranked[0][0] == f"x{j} -> y{i}"
        assert all(a >= b for (_, a), (_, b) in pairwise(ranked))
        if seed == 0:
            made = view.propose(st.Policy(), task="loss", batch=problem.batch(256), add_gain=0.05)
            mine = [q for q in made if q.name == f"x{j} -> y{i}"]
            view.apply(mine)
            assert f"x{j} -> y{i}" in view.probabilities()
    assert first >= 9


def test_an_edge_that_would_harm_is_not_proposed() -> None:
    b = gw.Builder()
    x, y = b.input("x", (64,), "float64"), b.input("y", (64,), "float64")
    total = b.junction(b.tanh(x, name="t"), name="sum")
    gap = b.sub(total, y, name="gap")
    b.output(b.mean(b.mul(gap, gap, name="sq"), axes=(0,), name="mse"), name="loss")
    p, rng = b.build(), np.random.default_rng(0)
    given = {"x": rng.normal(size=64)}
    for sign, wanted in ((1.0, True), (-1.0, False)):
        given["y"] = np.tanh(given["x"]) + sign * given["x"]
        for newton in (False, True):
            names = [q.name for q in st.additions(st.DifferentiableGraph(p), "loss", given, newton=newton)]
            assert ("x -> sum" in names) is wanted
    given["y"] = np.tanh(given["x"]) + 0.5 * given["x"]
    (gain,) = [g for n, g in st.gains(st.DifferentiableGraph(p), "loss", given, newton=True) if n == "x -> sum"]
    assert gain == pytest.approx(0.25 * (given["x"] ** 2).mean(), rel=1e-4)  # the loss falls to 0
