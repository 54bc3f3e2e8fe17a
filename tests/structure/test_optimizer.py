"""The joint optimizer: Adam as torch has it, what state follows, what a step leaves alone."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from joint_runs import joint

import graphwright as gw
from axis_samples import traced
from graphwright import nn
from graphwright import structure as st
from graphwright.autograd import Parameter
from graphwright.errors import Diverged, UsageError
from graphwright.testing.planted import Edges

pytestmark = pytest.mark.filterwarnings("ignore::graphwright.structure.NoTaskTerm")


def state(p: gw.Program) -> dict[str, bytes]:
    return {key: v.data.to_numpy().tobytes() for key, v in p.variables().items()}


def test_the_first_steps_match_torch() -> None:
    problem, opt = joint(size="float64", penalties=[st.sparsity(0.1, weighted=False)])
    w = torch.tensor(problem.program.weights["w"].numpy().copy(), requires_grad=True)
    z = torch.full((56,), 1.0, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([{"params": [w], "lr": 0.01}, {"params": [z], "lr": 0.1}])
    pairs = [(i, j) for i in range(8) for j in range(8) if i != j]
    for step in range(5):
        batch = problem.batch(16, seed=step)
        x, y = (torch.tensor(batch[n]) for n in "xy")
        p = torch.sigmoid(z)
        sums = [torch.stack([p[k] * x[:, j] for k, (i, j) in enumerate(pairs) if i == t]).sum(0) for t in range(8)]
        loss = ((torch.stack(sums, 1) @ w.T - y) ** 2).mean() + 0.1 * p.mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        report = opt.step(batch)
        assert report.loss == pytest.approx(loss.item(), rel=1e-9)
        assert report.loss == pytest.approx(report.task + sum(report.penalties.values()), rel=1e-12)
        np.testing.assert_allclose(problem.program.weights["w"].numpy(), w.detach().numpy(), rtol=1e-6)
        np.testing.assert_allclose(problem.program.gates().logits(), z.detach().numpy(), rtol=1e-6)


def test_deterministic_steps_have_the_same_bits_with_and_without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for native in ("1", "0"):
        monkeypatch.setenv("GRAPHWRIGHT_NATIVE", native)
        problem, opt = joint(deterministic=True, penalties=[st.sparsity(0.1, weighted=False)])
        losses = [opt.step(problem.batch(seed=k)).loss for k in range(4)]
        found.append((losses, state(problem.program), problem.program.gates().logits().tobytes()))
    assert found[0] == found[1]


def test_a_report_is_serialisable_as_json() -> None:
    import json

    problem, opt = joint()
    made = json.loads(json.dumps(opt.step(problem.batch()).to_json()))
    assert made["step"] == 0
    assert made["temperature"] == {"default": 1.0}
    assert set(made["penalties"]) == {"sparsity"}


def test_probabilities_of_useful_edges_rise_and_of_useless_ones_fall() -> None:
    problem, opt = joint()
    with problem.program.edit("no longer than needed") as e:
        e.set_weight("w", problem.m.astype(np.float32))
    for _ in range(20):
        opt.step(problem.batch())
    p = opt.view.probabilities()
    start = 1 / (1 + np.exp(-1.0))
    assert all((value > start) == (name in problem.planted) for name, value in p.items())


def test_straight_through_gates_do_not_drift_at_zero_loss() -> None:
    problem, opt = joint("ste", penalties=[], mode="gates")
    before, given = problem.program.gates().logits(), problem.batch(8)
    with problem.program.edit("zero, so that every output is right") as e:
        e.set_weight("w", np.zeros((16, 16), np.float32))
    given["y"] = np.zeros_like(given["y"])
    for _ in range(5):
        assert opt.step(given).loss == 0.0
    np.testing.assert_array_equal(problem.program.gates().logits(), before)


def test_logits_stay_within_their_limit() -> None:
    problem, opt = joint(gates=30.0)
    for _ in range(6):
        opt.step(problem.batch())
    assert np.abs(problem.program.gates().logits()).max() == 10.0


def test_a_learning_rate_of_zero_changes_no_bit() -> None:
    problem, opt = joint(gates={"edges": 0.0, "nodes": 0.1})
    with problem.program.edit("a node too") as e:
        node = e.gate("student", "sigmoid", init=0.5)
    held = problem.program.gates().logits()
    for _ in range(3):
        opt.step(problem.batch())
    after = problem.program.gates().logits()
    offset = problem.program.gates()[node].offset
    assert after[offset] != held[offset]
    np.testing.assert_array_equal(np.delete(after, offset), np.delete(held, offset))


def test_mode_gates_leaves_weights_unchanged() -> None:
    problem, opt = joint(mode="gates")
    w = problem.program.weights["w"].numpy().copy()
    opt.step(problem.batch())
    np.testing.assert_array_equal(problem.program.weights["w"].numpy(), w)


def test_bilevel_uses_one_batch_per_kind_of_variable() -> None:
    """A sample planted in one batch moves only what is trained on it."""
    runs = {}
    for which in ("neither", "batch", "valid"):
        problem, opt = joint(mode="bilevel", penalties=[])
        batch, valid = problem.batch(seed=1), problem.batch(seed=2)
        if which != "neither":
            given = {"batch": batch, "valid": valid}[which]
            given["x"] = given["x"].copy()
            given["x"][0] *= 5
        w = problem.program.weights["w"].numpy().copy()
        opt.step(batch, valid)
        runs[which] = (problem.program.weights["w"].numpy() - w, opt.logits._held["m"].numpy().copy())
    np.testing.assert_array_equal(runs["valid"][0], runs["neither"][0])
    assert not np.array_equal(runs["batch"][0], runs["neither"][0])
    assert not np.array_equal(runs["valid"][1], runs["neither"][1])
    with pytest.raises(UsageError, match="second batch"):
        joint(mode="bilevel")[1].step(Edges(0).batch())


def test_mode_alternate_alternates_weights_and_gates() -> None:
    problem, opt = joint(mode="alternate", turns=(2, 1))
    moved = []
    for _ in range(6):
        w, z = problem.program.weights["w"].numpy().copy(), problem.program.gates().logits()
        opt.step(problem.batch())
        moved.append((not np.array_equal(problem.program.weights["w"].numpy(), w),
                      not np.array_equal(problem.program.gates().logits(), z)))  # fmt: skip
    assert moved == [(True, False), (True, False), (False, True)] * 2


def test_moments_follow_elements_and_start_at_zero_for_new_ones() -> None:
    problem, opt = joint()
    for _ in range(5):
        opt.step(problem.batch())
    p, edges = problem.program, problem.edges()
    keys = {e.name: e.key for e in opt.view.elements()}
    held = {name: opt.logits.of(key) for name, key in keys.items()}
    gone = [p.path(p.operands(p.graph.source(e))[0]) + " -> " + p.path(p.graph.target(e)) for e in edges[:2]]
    with p.edit("cut two") as e:
        for edge in edges[:2]:
            e.cut(edge)
    opt.logits.sync()
    for e in opt.view.elements():
        assert e.name not in gone
        assert opt.logits.of(e.key) == held[e.name]
    with p.edit("one new") as e:
        new = e.gate(e.connect(gone[0].split(" -> ")[0], gone[0].split(" -> ")[1]), "sigmoid", init=0.25)
    assert p.gates()[new].port == 0  # the slot of the first one
    opt.step(problem.batch())
    assert abs(p.gates().logits()[p.gates()[new].offset] - 0.25) == pytest.approx(0.1, rel=1e-4)
    assert opt.logits.of(next(e.key for e in opt.view.elements() if e.gate.handle == new))[2] == 1.0


def test_moments_of_cut_units_are_removed() -> None:
    rng, b = np.random.default_rng(0), gw.Builder()
    x = b.input("x", (4, 3))
    weights = [b.param(n, rng.normal(size=s).astype("f4")) for n, s in (("up", (8, 3)), ("down", (2, 8)))]
    y = b.linear(b.tanh(b.linear(x, weights[0], name="fc1")), weights[1], name="fc2")
    b.output(b.mean(b.mul(y, y), axes=(0, 1), name="loss"), name="loss")
    p = b.build()
    axis = next(n for n, g in p.axes().items() if g.size == 8)
    (handle,) = p.axes()[axis].units().gate("sigmoid", init=np.linspace(-1, 1, 8))
    opt = st.JointOptimizer(st.DifferentiableGraph(p), "loss", params=0.01, gates=0.1)
    given = {"x": rng.normal(size=(4, 3)).astype("f4")}
    for _ in range(4):
        opt.step(given)
    z, m = p.gates().logits(), opt.logits._held["m"].numpy().copy()
    up = p.weights["up"]
    assert isinstance(up, Parameter)
    assert opt.weights is not None
    adam = opt.weights.state_of(up).moments["v"].numpy().copy()
    with p.edit("cut") as e:
        e.cut_units(p.axes()[axis].units([1, 5]))
    kept = [0, 2, 3, 4, 6, 7]
    np.testing.assert_array_equal(p.gates().logits(), z[kept])
    opt.logits.sync()
    np.testing.assert_array_equal(opt.logits._held["m"].numpy(), m[kept])
    np.testing.assert_array_equal(opt.weights.state_of(up).moments["v"].numpy(), adam[kept])
    opt.step(given)
    assert p.gates()[handle].length == 6


def test_training_continues_after_undone_hardening() -> None:
    problem, opt = joint(kind="hard_concrete")
    for _ in range(30):
        opt.step(problem.batch())
    p = problem.program
    before, digest = state(p), p.hash()
    moments = {n: v.numpy().copy() for n, v in opt.variables().items()}
    opt.view.discretize(0.9)
    assert not p.gates()
    opt.logits.sync()
    p.undo()
    assert p.hash() == digest
    assert state(p) == before
    for name, v in opt.variables().items():
        np.testing.assert_array_equal(v.numpy(), moments[name], err_msg=name)
    report = opt.step(problem.batch())
    assert report.open
    assert not report.skipped


def test_a_non_finite_step_changes_no_byte_and_five_raise() -> None:
    problem, opt = joint(kind="hard_concrete", penalties=[st.budget(8)])
    opt.step(problem.batch())
    before = state(problem.program), {n: v.numpy().tobytes() for n, v in opt.variables().items()}
    bad = problem.batch()
    bad["x"][0, 0, 0] = np.nan
    for _ in range(4):
        assert opt.step(bad).skipped
    assert (state(problem.program), {n: v.numpy().tobytes() for n, v in opt.variables().items()}) == before
    assert opt.skipped == 4
    opt.step(problem.batch())
    for _ in range(4):
        opt.step(bad)
    with pytest.raises(Diverged, match=r"node x\b"):
        opt.step(bad)


@pytest.mark.parametrize("which", ["batch", "valid"])
def test_a_non_finite_batch_of_two_changes_no_byte(which: str) -> None:
    problem, opt = joint(mode="bilevel", penalties=[st.budget(8)])
    opt.step(problem.batch(), problem.batch())
    before = state(problem.program), {n: v.numpy().tobytes() for n, v in opt.variables().items()}
    given = {"batch": problem.batch(), "valid": problem.batch()}
    given[which]["x"][0, 0, 0] = np.nan
    assert opt.step(**given).skipped
    assert (state(problem.program), {n: v.numpy().tobytes() for n, v in opt.variables().items()}) == before
    for _ in range(3):
        opt.step(**given)
    with pytest.raises(Diverged, match=r"node x\b"):
        opt.step(**given)
    assert opt.logits.count.item() == 1


def test_a_resumed_run_matches_an_uninterrupted_one(tmp_path) -> None:
    def run(opt: st.JointOptimizer, problem: Edges, steps: range) -> None:
        for step in steps:
            opt.step(problem.batch(seed=100 + step))

    kind = {
        "kind": "concrete",
        "schedule": st.TemperatureSchedule(1.0, 0.2, 20),
        "penalties": [st.budget(20, steps=20)],
    }
    problem, opt = joint(**kind)
    run(opt, problem, range(10))
    opt.save(tmp_path / "half")
    run(opt, problem, range(10, 20))
    other, again = joint(**kind)
    again.load(tmp_path / "half")
    assert again.steps == 10
    run(again, other, range(10, 20))
    assert other.program.hash() == problem.program.hash()
    for name, v in again.variables().items():
        np.testing.assert_array_equal(v.numpy(), opt.variables()[name].numpy(), err_msg=name)


def test_a_run_uses_one_plan_until_an_edit() -> None:
    """Noise, temperatures, logits and multipliers are data: none of them is re-traced or re-planned."""
    schedule = st.TemperatureSchedule(1.0, 0.2, 10)
    problem, opt = joint(kind="concrete", schedule=schedule, penalties=[st.budget(20, steps=20)])
    given = problem.batch()
    for step in range(12):
        report = opt.step(given)
        assert report.temperature == {"default": pytest.approx(schedule.at(step), rel=1e-6)}
    (compiled,) = opt._steps.values()
    plan = compiled.plan(*given.values())
    assert compiled.traces == 1
    assert {"gate", "gate_grad"} <= {instr.op for instr in plan.instrs}
    with problem.program.edit("cut") as e:
        e.cut(problem.edges()[0])
    opt.step(given)
    assert (len(opt._steps), compiled.traces) == (1, 2)


def test_annealing_changes_open_probabilities_but_no_logit() -> None:
    problem, opt = joint(schedule={"default": st.TemperatureSchedule(5.0, 0.1, 10)})
    view, z = opt.view, problem.program.gates().logits()
    decided = view.probabilities()
    for step in (0, 5, 10, 99):
        (warm,) = view.anneal(step).values()
        (now,) = set(view.probabilities(at="T").values())
        assert now == pytest.approx(1 / (1 + np.exp(-1 / warm)), rel=1e-6)
    assert warm == pytest.approx(0.1)
    assert view.anneal(0) == {"default": 5.0}
    assert view.probabilities() == decided
    np.testing.assert_array_equal(problem.program.gates().logits(), z)


@pytest.mark.usefixtures("gpu")
def test_a_device_samples_the_same_noise_and_makes_equal_steps() -> None:
    """Twenty steps with an edit among them; only sums round otherwise."""
    runs = []
    for device in ("cpu", "sim", "sim:1"):
        problem, opt = joint(kind="hard_concrete", penalties=[st.budget(20, steps=20)], device=device)
        losses = []
        for step in range(20):
            if step == 12:
                with problem.program.edit("cut") as e:
                    e.cut(problem.edges()[3])
            losses.append(opt.step(problem.batch(16, seed=step)).loss)
        runs.append((losses, problem.program.gates().logits(), problem.program.weights["w"].numpy()))
    for run in runs[1:]:
        for ours, theirs in zip(runs[0], run, strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)


def test_two_runs_are_equal_and_noise_differs_by_step_and_seed() -> None:
    series = []
    for seed in (3, 3, 4):
        problem, opt = joint(kind="concrete", penalties=[])
        opt.view.seed = seed
        series.append([opt.step(problem.batch(seed=1)).loss for _ in range(4)])
    assert series[0] == series[1]
    assert series[0] != series[2]


def test_runs_that_cannot_close_gates_warn() -> None:
    problem = Edges(0)
    problem.gate("sigmoid", init=st.init_for(0.9, "sigmoid"))
    view = st.DifferentiableGraph(problem.program)
    with pytest.warns(st.GatesCannotClose, match=r"4\.39"):
        opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], gates=0.01, steps=100)
    for _ in range(100):
        opt.step(problem.batch(8))
    assert not view.discretize(0.5).cut
    with pytest.warns(st.NoTaskTerm):
        st.JointOptimizer(view, None, [st.sparsity(1.0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.JointOptimizer(view, "loss", gates=0.1, steps=100)


def test_non_scalar_losses_are_refused() -> None:
    problem = Edges(0)
    problem.gate("sigmoid")
    view = st.DifferentiableGraph(problem.program)
    opt = st.JointOptimizer(view, lambda outs, batch: batch["x"] * outs["loss"], params=0.01)
    with pytest.raises(st.NotScalar):
        opt.step(problem.batch())
    with pytest.raises(UsageError, match="no such output"):
        st.JointOptimizer(view, "accuracy")


class Net(nn.Module):
    """Attention and experts on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.moe, self.out = nn.MultiHeadAttention(8, 4), nn.MoE(8, 10, 4, 2), nn.Linear(8, 3)

    def forward(self, x: gw.Tensor) -> gw.Tensor:
        x = x + self.attn(x)
        return self.out(x + self.moe(x))


def test_gates_of_heads_experts_and_a_skip_are_one_vector_in_one_step() -> None:
    given = {"x": np.random.default_rng(0).normal(size=(2, 5, 8)).astype("f4")}
    p = traced(Net(), given["x"])
    p.axes()["attn.heads"].units().gate("sigmoid")
    p.axes()["moe.experts"].units().gate("hard_concrete")
    with p.edit("a skip") as e:
        total = e.insert(p.in_edges("out.linear")[0], "junction", name="sum")
        e.gate(e.connect("x", total), "sigmoid")
    opt = st.JointOptimizer(st.DifferentiableGraph(p), lambda outs, _: (outs["out"] ** 2).mean(), gates=0.1)
    before, logits = state(p), p.gates().logits()
    report = opt.step(given)
    assert report.open == len(logits) == 4 + 4 + 1
    assert np.count_nonzero(p.gates().logits() - logits) >= 6  # an expert that no token took has no gradient
    assert (p.gates().logits() != logits)[[0, 8]].all()
    assert {e.gate.over for e in opt.view.elements()} == {"units", "edges"}
    moved = {key for key, value in state(p).items() if value != before[key]}
    assert {"out.weight", "moe.router.weight", "attn.q.weight", "gates.logits"} <= moved
    assert opt.step(given).loss < report.loss


def test_the_matrix_lists_parallel_edges_and_the_overlay_matches_the_table() -> None:
    b = gw.Builder()
    x = b.input("x", (2,), "float64")
    b.output(b.junction(x, x, b.tanh(x, name="t"), name="sum"), name="y")
    p = b.build()
    with p.edit("gates") as e:
        e.gate(p.in_edges("sum"), "sigmoid", init=[2.0, -3.0, 0.5])
    view = st.DifferentiableGraph(p)
    table = {row["name"]: row["p"] for row in view.table()}
    assert view.matrix() == {("x", "sum"): [table["x -> sum"], table["x -> sum #2"]], ("t", "sum"): [table["t -> sum"]]}
    assert view.adjacency(0.5) == {("x", "sum"): 1, ("t", "sum"): 1}
    assert sorted(view.overlay().values()) == sorted(table.values())
    assert set(view.overlay()) <= {p.path(n) for n in p.nodes()}


def test_a_loss_independent_of_all_gates_is_refused_and_changes_no_byte() -> None:
    b = gw.Builder()
    x, w = b.input("x", (2, 3)), b.param("w", np.ones((3, 3), "f4"))
    b.output(b.junction(b.tanh(x, name="t"), name="aside"), name="other")
    gap = b.linear(x, w, name="fc")
    b.output(b.mean(b.mul(gap, gap, name="sq"), axes=(0, 1), name="mse"), name="loss")
    p = b.build()
    with p.edit("gate") as e:
        e.gate("t -> aside", "sigmoid")
    opt = st.JointOptimizer(st.DifferentiableGraph(p), "loss", [st.sparsity(0.1)])
    before = state(p)
    with pytest.raises(st.GatesUnused, match="t -> aside"):
        opt.step({"x": np.ones((2, 3), "f4")})
    assert state(p) == before


def test_online_cuts_record_step_probability_and_gradient() -> None:
    problem, opt = joint(policy=st.Policy(patience=1, remove_below=0.72), prune_every=2)
    made = opt.step(problem.batch())
    while not made.edits:
        made = opt.step(problem.batch())
    name = made.edits[0]
    (note,) = problem.program.blame(name)[-1].annotations(name)
    assert (note["decision"], note["step"]) == ("cut", opt.steps)
    assert note["p"] < 0.72
    assert note["gradient"] > 0  # to open it would cost
    assert "below 0.72" in note["reason"]
    problem.program.undo()
    assert name in opt.view.probabilities()


def test_training_continues_without_gates() -> None:
    def loud(terms):
        return 0.0 * terms.open.mean()

    setattr(loud, "captures", ("y0",))  # noqa: B010  # a function has attributes that its type does not declare
    penalties = [st.sparsity(0.1), st.budget(0.5, "params"), st.gate_entropy(), loud]
    problem, opt = joint(penalties=penalties)
    opt.step(problem.batch())
    with problem.program.edit("all decided") as e:
        for handle in list(problem.program.gates()):
            e.ungate(handle)
    before = problem.program.weights["w"].numpy().copy()
    made = opt.step(problem.batch())
    assert (made.skipped, made.open, made.loss) == (False, 0, made.task)
    assert (problem.program.weights["w"].numpy() != before).any()
    assert penalties[1].multiplier.item() >= 0


def test_a_failing_policy_leaves_the_program_unchanged() -> None:
    class Broken:
        def propose(self, view):
            raise RuntimeError("a bug of the policy")

    problem, opt = joint(policy=Broken(), prune_every=1)
    digest = problem.program.structure_hash()
    with pytest.raises(RuntimeError, match="a bug"):
        opt.step(problem.batch())
    assert problem.program.structure_hash() == digest
    assert opt.view.program.gates().mode == "eval"


def test_the_package_has_no_bare_except() -> None:
    from pathlib import Path

    found = {f.name: f.read_text() for f in Path(st.__file__).parent.glob("*.py")}
    assert not [name for name, text in found.items() if "except:" in text or "except Exception" in text]
