"""Penalties against their formulas written out, their gradients against differences, and what they do alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from fixtures.gated import junction_edges, random_dag
from graphwright import structure as st
from graphwright.autograd import Tensor, grad
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.program import Program
from graphwright.structure.costs import above, element_costs
from graphwright.testing.planted import Edges
from values import grad_of

KINDS = ("sigmoid", "ste", "hard_concrete", "concrete", "scale")


def gated(seed: int, *kinds: str) -> st.DifferentiableGraph:
    p, rng = random_dag(seed), np.random.default_rng(seed)
    with p.edit("gates") as e:
        for k, edge in enumerate(junction_edges(p)):
            e.gate(edge, kinds[k % len(kinds)], init=rng.normal(), cost=int(rng.integers(1, 9)))
    view = st.DifferentiableGraph(p)
    p.weights["gates.temperature"].assign(gw.tensor(np.array([0.7, 2 / 3])[: len(view.temperatures)]))
    return view


def p_of(view: st.DifferentiableGraph) -> np.ndarray:
    return np.array([e.p_now for e in view.elements()])


def ends(view: st.DifferentiableGraph) -> list[tuple[str, str]]:
    found = [e.gate.owner.split(" -> ") for e in view.elements()]
    return [(source, target) for source, target in found]


def written_out(view: st.DifferentiableGraph) -> dict[str, float]:
    """Each penalty as loops over numbers."""
    p, c, pairs = p_of(view), np.array([e.cost for e in view.elements()]), ends(view)
    rows = [[p[k] for k, pair in enumerate(pairs) if pair[1] == t] for t in dict.fromkeys(b for _, b in pairs)]
    entropy = [-sum(x / sum(r) * np.log(x / sum(r)) for x in r) for r in rows]
    smooth = 0.0
    for i, j in itertools.combinations(range(len(p)), 2):
        smooth += ((pairs[i][0] == pairs[j][0]) + (pairs[i][1] == pairs[j][1])) * (p[i] - p[j]) ** 2
    return {
        "sparsity": 0.3 * (c * p).sum() / c.sum(),
        "expected_l0": 0.3 * p.mean(),
        "density": 10 * (p.mean() - 0.25) ** 2,
        "gate_entropy": float(np.mean([-x * np.log(x) - (1 - x) * np.log(1 - x) for x in p])),
        "edge_entropy": float(np.mean(entropy)),
        "smoothness": 0.2 * smooth,
        "budget": 10 * (p.mean() - 0.5) ** 2,
    }


PENALTIES = {
    "sparsity": st.sparsity(0.3),
    "expected_l0": st.expected_l0(0.3),
    "density": st.density(0.25),
    "gate_entropy": st.gate_entropy(),
    "edge_entropy": st.edge_entropy(),
    "smoothness": st.smoothness(0.2),
    "budget": st.budget(0.5),
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("seed", range(5))
def test_penalties_match_formulas_and_gradients_match_finite_differences(seed: int, name: str) -> None:
    view = gated(seed, "sigmoid", "hard_concrete", "ste", "concrete")
    held = view.program.weights["gates.logits"]
    value = view.penalty(PENALTIES[name])
    assert value.item() == pytest.approx(written_out(view)[name], rel=1e-12)
    (ours,) = grad(value, [held])
    z, theirs = held.data.to_numpy(), np.zeros(len(ours.numpy()))
    for i in range(len(z)):
        before, sides = z[i], []
        for at in (before + 1e-6, before - 1e-6):
            z[i] = at
            sides.append(view.penalty(PENALTIES[name]).item())
        z[i] = before
        theirs[i] = (sides[0] - sides[1]) / 2e-6
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6, atol=1e-9)


def test_a_scale_is_penalised_by_its_size() -> None:
    view = gated(1, "scale")
    z = view.program.gates().logits()
    assert view.penalty(st.expected_l0(1.0)).item() == pytest.approx(np.abs(z).mean())


@pytest.mark.filterwarnings("ignore::graphwright.structure.NoTaskTerm")
def test_sparsity_without_a_task_closes_every_gate() -> None:
    problem = Edges(0)
    problem.gate("sigmoid")
    opt = st.JointOptimizer(st.DifferentiableGraph(problem.program), None, [st.sparsity(1.0)], gates=0.1, mode="gates")
    for _ in range(160):
        opt.step(problem.batch(4))
    assert max(opt.view.probabilities().values()) < 0.01
    view = opt.view
    done = view.discretize(st.ThresholdPolicy(0.5), copy=True)
    assert len(done.cut) + len(done.kept_back) == 56


def ended(penalty: object, kind: str) -> tuple[float, set[str], Edges]:
    """Mean probability after 300 steps, and the 11 most probable of 12 edges that carry signal and 44 that do not."""
    problem = Edges(1)
    problem.gate(kind)
    view = st.DifferentiableGraph(problem.program)
    opt = st.JointOptimizer(view, "loss", [penalty], params=0.01, gates=0.05)
    for _ in range(300):
        opt.step(problem.batch())
    p = view.probabilities()
    return float(np.mean([e.p_now for e in view.elements()])), set(sorted(p, key=p.__getitem__)[-11:]), problem


def test_training_reaches_the_target_density() -> None:
    assert ended(st.density(0.3, weight=1000.0), "sigmoid")[0] == pytest.approx(0.3, abs=0.01)


def test_a_binding_budget_is_met_and_spent_on_edges_with_signal() -> None:
    """One edge less than the task needs: a multiplier that winds up while the target falls closes many more."""
    share, best, problem = ended(st.budget(11 / 56, steps=300), "hard_concrete")
    assert share == pytest.approx(11 / 56, rel=0.05)
    assert best <= problem.planted


def test_a_gate_without_a_task_gradient_follows_its_penalty() -> None:
    b = gw.Builder()
    x = b.input("x", (3,), "float64")
    unused = b.junction(x, name="unused")
    b.output(unused, name="other")
    used = b.junction(x, name="used")
    b.output(b.mean(b.mul(used, used, name="sq"), axes=(0,), name="mse"), name="loss")
    p = b.build()
    with p.edit("gate") as e:
        e.gate(["x -> unused", "x -> used"], "sigmoid")
    view = st.DifferentiableGraph(p)
    before = view.probabilities()["x -> unused"]
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], gates=0.1)
    for _ in range(3):
        opt.step({"x": np.ones(3)})
    assert view.probabilities()["x -> unused"] < before


# -- attention and teachers --------------------------------------------------------------------------------------------
def attention(scores: np.ndarray, mask: np.ndarray | None = None) -> Program:
    b = gw.Builder()
    s = b.input("s", scores.shape, "float64")
    total = b.junction(s, name="sum")
    seen = total if mask is None else b.add(total, b.const("mask", mask), name="seen")
    b.output(b.softmax(seen, axis=-1, name="weights"), name="y")
    p = b.build()
    with p.edit("a gate") as e:
        e.gate("s -> sum", "scale", init=1.0)
    return p


def test_attention_entropy_matches_its_formula() -> None:
    penalty, n = st.attention_entropy(("weights",)), 5
    for scores, wanted in (
        (np.zeros((2, 3, n)), np.log(n)),
        (np.where(np.eye(n) > 0, 0.0, -np.inf), 0.0),
        (np.where(np.arange(n) < 2, 0.0, -np.inf) + np.zeros((4, n)), np.log(2)),
    ):
        view = st.DifferentiableGraph(attention(scores))
        _, (value,), _ = view.evaluate({"s": Tensor(gw.array.from_numpy(scores))}, None, [penalty])
        assert value.item() == pytest.approx(wanted, abs=1e-9)


def test_the_gradient_of_attention_entropy_matches_finite_differences() -> None:
    scores = np.random.default_rng(0).normal(size=(4, 5))
    view = st.DifferentiableGraph(attention(scores, np.where(np.tri(4, 5, 1) > 0, 0.0, -np.inf)))
    penalty, held = st.attention_entropy(("weights",)), view.program.weights["gates.logits"]

    def value() -> Tensor:
        return view.evaluate({"s": Tensor(gw.array.from_numpy(scores))}, None, [penalty])[1][0]

    (ours,) = grad(value(), [held])
    sides = []
    for z in (1 + 1e-6, 1 - 1e-6):
        held.assign(gw.tensor(np.array([z])))
        sides.append(value().item())
    assert ours.item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-6)


def test_distillation_matches_torch() -> None:
    rng = np.random.default_rng(0)

    def program(seed: int) -> Program:
        b, r = gw.Builder(), np.random.default_rng(seed)
        x = b.input("x", (6, 4), "float64")
        h = b.tanh(b.linear(x, b.param("a", r.normal(size=(5, 4))), name="fc"), name="h")
        b.output(b.linear(b.junction(h, name="sum"), b.param("b", r.normal(size=(7, 5)))), name="logits")
        return b.build()

    student, teacher, given = program(0), program(1), {"x": rng.normal(size=(6, 4))}
    with student.edit("gate") as e:
        e.gate("h -> sum", "sigmoid", init=0.4)
    view = st.DifferentiableGraph(student)
    tensors = {"x": gw.tensor(given["x"])}
    penalty = st.distill(teacher, tau=2.0, hidden=0.5, match=("h",))
    _, (value,), _ = view.evaluate(tensors, None, [penalty])
    z = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    x = torch.tensor(given["x"])
    ours, theirs = ([torch.tensor(p.weights[k].numpy()) for k in "ab"] for p in (student, teacher))
    h, t = torch.tanh(x @ ours[0].T), torch.tanh(x @ theirs[0].T)
    kl = torch.nn.functional.kl_div(
        torch.log_softmax(torch.sigmoid(z) * h @ ours[1].T / 2, -1), torch.softmax(t @ theirs[1].T / 2, -1),
        reduction="batchmean")  # fmt: skip
    wanted = 4 * kl + 0.5 * ((h - t) ** 2).mean()
    assert value.item() == pytest.approx(wanted.item(), rel=1e-9)
    wanted.backward()
    assert z.grad is not None
    np.testing.assert_allclose(view.gradients(_nothing, given, [penalty]), z.grad.numpy(), rtol=1e-6)
    same = st.DifferentiableGraph(student)
    with same.using("eval"):
        _, (zero,), _ = same.evaluate(tensors, None, [st.distill(student)])
    assert zero.item() == pytest.approx(0, abs=1e-12)


def _nothing(outputs: dict, batch: dict) -> Tensor:
    return (outputs["logits"] * 0.0).sum()


# -- costs -------------------------------------------------------------------------------------------------------------
def nested() -> Program:
    """Two branches of a residual stream; the first has gated neurons and an edge of its own."""
    b, rng = gw.Builder(), np.random.default_rng(0)
    x = b.input("x", ("B", 3), "float64")  # what has no number counts no parameters
    shapes = {"up": (4, 3), "down": (3, 4), "inner": (3, 3), "other": (3, 3)}
    w = {n: b.param(n, rng.normal(size=s)) for n, s in shapes.items()}
    into = b.junction(x, b.linear(x, w["inner"], name="fci"), name="into")
    first = b.linear(b.tanh(b.linear(into, w["up"], name="fcu"), name="act"), w["down"], name="fcd")
    b.output(b.junction(x, first, b.linear(x, w["other"], name="fco"), name="sum"), name="y")
    p = b.build()
    with p.edit("gates") as e:
        e.gate(["fcd -> sum", "fco -> sum", "fci -> into"], "sigmoid", init=[0.3, -0.2, 0.9])
        e.gate(next(g for g in p.axes().values() if g.size == 4).units(), "sigmoid", init=[0.1, -1, 0.5, 2])
    return p


def test_the_expected_cost_is_the_mean_over_all_structures() -> None:
    p = nested()
    view = st.DifferentiableGraph(p)
    among, probabilities = view.elements(), p_of(view)
    expected = 0.0
    for opened in itertools.product([False, True], repeat=len(among)):
        chance = np.prod(np.where(opened, probabilities, 1 - probabilities))
        closed = [e for e, there in zip(among, opened, strict=True) if not there]
        whole = [e for e in among if e.over == "units" and e in closed]
        params = 9 * opened[1]
        if opened[0]:
            params += 9 * opened[2] + 6 * (4 - len(whole))
        expected += chance * params
    ours = view.penalty(st.cost(of="params", relative=False)).item()
    assert ours == pytest.approx(expected, rel=1e-9)
    assert element_costs(p, among).sum() == 42
    assert view.penalty(st.cost(of="bytes", relative=False)).item() == pytest.approx(8 * expected, rel=1e-9)
    names = [e.name for e in among]
    assert [names[i] for i in above(p, among)[2]] == ["fcd -> sum"]
    with pytest.raises(UsageError, match="flops"):
        element_costs(p, among, "ns")


def test_costs_in_flops_and_time_match_what_hardening_removes() -> None:
    p = nested()
    view = st.DifferentiableGraph(p)
    among = view.elements()
    flops = dict(zip([e.name for e in among], element_costs(p, among, "flops"), strict=True))
    plain = view.discretize(0.0, to="one", copy=True).after.flops
    units = [n for n in flops if "[" in n]
    assert len(units) == 4
    for gone in (["fco -> sum"], units[:1], units[1:3], ["fcd -> sum", "fci -> into", *units]):
        after = view.discretize(Only(gone), to="one", copy=True).after.flops
        # what a sum takes for one term less comes on top
        assert plain - after == pytest.approx(sum(flops[n] for n in gone), abs=6 * len(gone))
    taken = {"fcu": 40.0, "fcd": 60.0, "act": 20.0, "fci": 7.0, "fco": 5.0, "sum": 1000.0}
    ns = dict(zip([e.name for e in among], element_costs(p, among, taken), strict=True))
    assert [ns[n] for n in ("fcd -> sum", "fco -> sum", "fci -> into", *units)] == [0.0, 5.0, 7.0, *[30.0] * 4]
    q = p_of(view)
    expected = 5 * q[1] + q[0] * (7 * q[2] + 30 * q[3:].sum())
    assert view.penalty(st.cost(of=taken, relative=False)).item() == pytest.approx(expected, rel=1e-9)
    measured = st.latency(p, {"x": np.ones((2, 3))}, runs=1)
    assert measured["fcu"] > 0
    assert element_costs(p, among, measured).sum() > 0


class Only:
    """A policy that cuts what it was result to."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def propose(self, view: st.DifferentiableGraph) -> list[st.Proposal]:
        return [st.Proposal("cut", e.name, e.p, "result so", e) for e in view.elements() if e.name in self.names]


@pytest.mark.parametrize("n", [300, pytest.param(100_000, marks=pytest.mark.deep)])
def test_smoothness_matches_its_formula_and_is_fast_at_a_hub(n: int) -> None:
    """n parallel edges share both ends: 2 n² times the variance of their probabilities, in float32."""
    b = gw.Builder()
    x = b.input("x", (1,))
    b.output(b.junction(*[x] * n, name="hub"), name="y")
    p = b.build()
    with p.edit("gates") as e:
        e.gate(list(p.in_edges("hub")), "sigmoid")
    view, held = st.DifferentiableGraph(p), p.weights["gates.logits"]
    assert abs(view.penalty(st.smoothness(1.0)).item()) < 1e-6 * n, "all are equal"
    z = np.random.default_rng(0).normal(0.5, 0.01, n).astype("f4")
    held.assign(gw.tensor(z))
    value = view.penalty(st.smoothness(0.5))
    q = 1 / (1 + np.exp(-z.astype(np.float64)))
    assert value.item() == pytest.approx(n * n * q.var(), rel=1e-3)
    (slope,) = grad(value, [held])
    np.testing.assert_allclose(slope.numpy(), 2 * n * (q - q.mean()) * q * (1 - q), rtol=1e-2, atol=1e-6 * n)


def test_reachability_of_a_diamond_matches_its_formula() -> None:
    b = gw.Builder()
    x = b.input("x", (2,), "float64")
    left, right = (b.tanh(b.junction(x, name=f"in{n}"), name=f"t{n}") for n in "ab")
    b.output(b.junction(left, right, name="sum"), name="y")
    p = b.build()
    z = np.array([0.4, -0.3, 1.0, 0.2])
    with p.edit("gates") as e:
        e.gate(["x -> ina", "x -> inb", "ta -> sum", "tb -> sum"], "sigmoid", init=z)
    view = st.DifferentiableGraph(p)
    q = torch.tensor(z, requires_grad=True)
    s = torch.sigmoid(q)
    wanted = -torch.log(1 - (1 - s[0] * s[2]) * (1 - s[1] * s[3]))
    value = view.penalty(st.reachability())
    assert value.item() == pytest.approx(wanted.item(), rel=1e-12)
    wanted.backward()
    (ours,) = grad(value, [p.weights["gates.logits"]])
    assert q.grad is not None
    np.testing.assert_allclose(ours.numpy(), q.grad.numpy(), rtol=1e-9)


def test_a_custom_penalty_reads_captured_values() -> None:
    problem = Edges(0)
    problem.gate("sigmoid")

    class Loud:
        name, captures = "loud", ("student",)

        def __call__(self, terms: st.Terms) -> Tensor:
            value = terms.value("student")
            return call("abs", value).mean() * terms.open[0]

    view = st.DifferentiableGraph(problem.program)
    opt = st.JointOptimizer(view, "loss", [Loud(), lambda terms: terms.open.sum() * 1e-3], params=0.01)
    report = opt.step(problem.batch())
    assert report.penalties["loud"] > 0
    assert report.penalties["<lambda>"] == pytest.approx(56e-3 / (1 + np.exp(-1)), rel=1e-5)


@pytest.mark.parametrize("wrong", [lambda: st.sparsity(-1), lambda: st.density(1.5), lambda: st.budget(-2),
                                   lambda: st.TopPolicy(-1), lambda: st.ThresholdPolicy(float("nan"))])  # fmt: skip
def test_wrong_numbers_are_refused(wrong) -> None:
    with pytest.raises(UsageError, match="expected"):
        wrong()


@pytest.mark.parametrize("mode", ["eval", "soft", "train"])
def test_a_run_can_be_differentiated(mode):
    """The gradient of a loss of `run()` by the logits of gates is the difference quotient in float64."""
    view = gated(3, "sigmoid", "hard_concrete", "scale")
    p, rng = view.program, np.random.default_rng(0)
    feeds = {p.path(n): rng.normal(size=tuple(3 if isinstance(d, str) else d for d in p.spec(n).shape))
             for n in p.inputs()}  # fmt: skip
    feeds = {k: v.astype(p.spec(k).dtype.numpy) for k, v in feeds.items()}

    def loss() -> Any:
        return sum((v.to("float64") ** 2).sum() for v in view.run(feeds, gates=mode).values())

    held = p.weights["gates.run"].data.to_numpy().copy()
    first, second = loss(), loss()
    first.backward()
    assert first.item() == second.item()
    assert np.array_equal(p.weights["gates.run"].data.to_numpy(), held)
    logits = p.weights["gates.logits"]
    found, step = grad_of(logits).numpy(), rng.normal(size=logits.shape)
    assert logits.dtype is gw.float64
    values, start = [], logits.data.to_numpy().copy()
    for sign in (1e-6, -1e-6):
        logits.assign(gw.tensor(start + sign * step))
        values.append(loss().item())
    assert found.any()
    assert (found * step).sum() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)
