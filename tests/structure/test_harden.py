"""Hardening: what is cut is what was closed, what stays gives what it gave, and one undo brings all of it back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import graphwright as gw
from fixtures import tiny_llama
from fixtures.gated import junction_edges, random_dag
from graphwright import structure as st
from graphwright.program import Program
from graphwright.testing.planted import Edges
from seeds import deep

GIVEN = {"x": np.random.default_rng(0).normal(size=(4, 3))}


def gated(seed: int, kind: str = "sigmoid") -> Program:
    p, rng = random_dag(seed), np.random.default_rng(seed)
    with p.edit("gates") as e:
        for edge in junction_edges(p):
            e.gate(edge, kind, init=2 * rng.normal())
    return p


def forced(p: Program, cut: list[str], rest: str | None = "open") -> Program:
    """The same program with these gates held at 0, and the others at 1."""
    other = p.fork()
    names = other.gates().named()
    with other.edit("force") as e:
        for name, (gate, i) in names.items():
            if name in cut:
                e.set_gate(gate.handle, "closed", [i])
            elif rest is not None:
                e.set_gate(gate.handle, rest, [i])
    return other


def output(p: Program) -> np.ndarray:
    return p.run(GIVEN, keep="outputs")["y"].to_numpy()


@pytest.mark.parametrize("seed", range(deep(100, 10)))
def test_a_hardened_program_equals_one_with_gates_forced_to_0_and_1(seed: int) -> None:
    p = gated(seed)
    parallel = {name for name in p.gates().named() if "#" in name}
    done = st.DifferentiableGraph(p).discretize(0.5, to="one", copy=True)
    np.testing.assert_allclose(output(done.program), output(forced(p, done.cut)), rtol=1e-12, atol=1e-12)
    assert not done.program.gates()
    assert done.num_pruned_edges == len(done.cut)
    reaching = {n for n in done.program.nodes()} - done.program.reachable(done.program.outputs())
    assert all(done.program.op(n) == "input" for n in reaching)
    for name in parallel - set(done.cut):
        source, target = name.split(" #")[0].split(" -> ")
        if target in [done.program.path(n) for n in done.program.nodes()]:
            assert source in [done.program.path(v.node) for v in done.program.operands(done.program.node(target))]
    assert done.program.journal[-1].author == "gate"


@pytest.mark.parametrize("seed", range(10))
def test_folding_does_not_change_the_soft_function(seed: int) -> None:
    p, rng = random_dag(seed), np.random.default_rng(seed)
    with p.edit("gates") as e:
        for edge in junction_edges(p):
            e.gate(edge, "scale" if rng.random() < 0.5 else "sigmoid", init=rng.normal())
    before = output(p)
    done = st.DifferentiableGraph(p).discretize(0.0, to="fold")
    assert not done.cut
    np.testing.assert_allclose(output(p), before, rtol=1e-10, atol=1e-10)
    assert {s for g in p.gates().values() for s in g.states} <= {"frozen"}  # tanh has no weight to fold into


def test_gates_of_linears_and_units_fold_into_weights() -> None:
    rng, b = np.random.default_rng(0), gw.Builder()
    x = b.input("x", (4, 3), "float64")
    up, down, bias, side = (b.param(n, rng.normal(size=s)) for n, s in
                            (("up", (8, 3)), ("down", (3, 8)), ("bias", (3,)), ("side", (3, 3))))  # fmt: skip
    y = b.linear(b.tanh(b.linear(x, up, name="fc1")), down, bias, name="fc2")
    b.output(b.junction(x, y, b.linear(x, side, name="fc3"), name="sum"), name="y")
    p = b.build()
    with p.edit("gates") as e:
        e.gate("fc2 -> sum", "sigmoid", init=0.7)
        e.gate("fc3 -> sum", "scale", init=-1.3)
        e.gate(next(g for g in p.axes().values() if g.size == 8).units(), "sigmoid", init=rng.normal(size=8))
    soft = output(p)
    st.DifferentiableGraph(p).discretize(0.0)
    assert not p.gates()
    np.testing.assert_allclose(output(p), soft, rtol=1e-10, atol=1e-10)


def test_gates_of_heads_and_neurons_fold_into_a_llama() -> None:
    model = gw.open(tiny_llama.directory("f32"))
    p, ids, rng = model.program, tiny_llama.batch(3, rows=2)[0][:, :10], np.random.default_rng(0)
    p.select("layers.0.attn").heads.gate("sigmoid", init=rng.normal(size=4))
    p.select("layers.1.mlp").neurons.gate("scale", init=rng.normal(size=128))
    soft = model.logits(ids)
    st.DifferentiableGraph(p).discretize(0.0)
    assert not p.gates()
    np.testing.assert_allclose(model.logits(ids), soft, atol=2e-5)


def test_enclosing_elements_are_cut_before_nested_ones() -> None:
    model = gw.open(tiny_llama.directory("f32"), dtype="float64")
    p, ids = model.program, tiny_llama.batch(3, rows=2)[0][:, :10]
    positions = np.broadcast_to(np.arange(10), ids.shape)
    names = set(p.constants())
    with p.edit("gates") as e:
        e.gate(p.select("layers").layers, "sigmoid", init=[-1.0, 1.0])
        e.gate(p.select("layers.*.attn").heads, "sigmoid", init=[1, -1, -1, 1, 1, 1, -1, 1])
        e.gate(p.select("layers.1.mlp").neurons, "sigmoid", init=np.resize([1.0, -1.0], 128))
    before = p.hash()
    done = st.DifferentiableGraph(p).discretize(0.5, to="one")
    cut = set(done.cut)
    assert "layers.0" in cut
    assert not any(name.startswith("layers.0.attn") for name in cut)  # they went with their layer
    assert "layers.1.attn.heads[2]" in cut
    assert p.weights["model.layers.1.mlp.down_proj.weight"].shape == (64, 64)
    assert set(p.constants()) - names <= {k for k in p.constants() if "key_head" in k}
    assert done.counts()["layers"] == (2, 1)
    after = p.run(ids=ids, positions=positions, keep="outputs")["logits"].to_numpy()
    p.undo()
    assert p.hash() == before
    other = forced(p, [*done.cut])
    theirs = other.run(ids=ids, positions=positions, keep="outputs")["logits"].to_numpy()
    np.testing.assert_allclose(after, theirs, rtol=1e-12, atol=1e-12)


def test_the_report_lists_the_cuts() -> None:
    problem = Edges(0)
    problem.gate("sigmoid", init=np.resize([2.0, -2.0, 1.0], 56))
    p = problem.program
    view = st.DifferentiableGraph(p)
    probe = problem.batch(32)
    soft = p.run(probe, keep="outputs")["loss"].item()
    digest = p.structure_hash()
    proposed = view.propose(st.ThresholdPolicy(0.5), task="loss", batch=probe)
    assert p.structure_hash() == digest
    assert all(q.gradient is not None and "below" in q.reason for q in proposed)
    done = view.discretize(0.5, to="one", probe=probe)
    assert done.loss_before == pytest.approx(soft, rel=1e-6)
    assert done.loss_after == pytest.approx(p.run(probe, keep="outputs")["loss"].item(), rel=1e-6)
    assert done.loss_after is not None
    assert done.loss_before is not None
    assert done.gap == done.loss_after - done.loss_before
    assert done.num_pruned_edges == 56 - sum(len(p.in_edges(f"y{i}")) for i in range(8)) == len(proposed)
    assert done.before.params == done.after.params == 256
    assert done.after.flops < done.before.flops
    assert "hardening gap" in str(done)
    assert json.loads(json.dumps(done.to_json()))["num_pruned_edges"] == done.num_pruned_edges
    p.undo()
    assert p.gates().count == 56
    unchanged = view.discretize(0.0, to="one", probe=probe, copy=True)
    assert "hardening gap" in str(unchanged)
    assert p.gates().count == 56


def test_blame_of_a_missing_edge_names_its_cut(tmp_path) -> None:
    problem = Edges(0)
    problem.gate("sigmoid", init=np.resize([2.0, -2.0, 1.0], 56))
    p = problem.program
    digest, probe, edge = p.hash(), problem.batch(32), problem.edges()[1]
    view = st.DifferentiableGraph(p)
    view.step = 120
    name = next(e.name for e in view.elements() if e.z == -2.0)
    slope = view.gradients("loss", probe, gates="eval")[1]
    done = view.discretize(0.5, probe=probe)
    assert edge not in p.graph
    for ref in (name, edge):
        entry = p.blame(ref)[-1]
        assert (entry.author, entry.seq) == ("gate", done.entry.seq)
    (note,) = done.entry.annotations(name)
    assert (note["step"], note["z"], note["temperature"]) == (120, -2.0, 1.0)
    assert note["p"] == pytest.approx(1 / (1 + np.exp(2.0)))
    assert note["gradient"] == pytest.approx(float(slope), rel=1e-5)
    assert {r["name"] for r in done.entry.annotations()} == set(done.cut)
    p.save(tmp_path / "saved")
    assert gw.load(tmp_path / "saved").blame(name)[-1].annotations(name) == [note]
    p.undo()
    assert p.hash() == digest
    assert edge in p.graph


def test_a_choice_becomes_its_best_option() -> None:
    b = gw.Builder()
    x = b.input("x", (4, 3), "float64")
    options = [x, b.tanh(x, name="t"), b.sigmoid(x, name="s")]
    b.output(b.junction(*options, name="sum"), name="y")
    p = b.build()
    with p.edit("choice") as e:
        e.gate(p.in_edges("sum"), "choice", init=[0.1, 0.9, -0.3])
    done = st.DifferentiableGraph(p).discretize()
    assert sorted(done.cut) == ["sum[0]", "sum[2]"]
    np.testing.assert_allclose(output(p), np.tanh(GIVEN["x"]))


def test_the_readers_of_a_closed_node_read_zeros() -> None:
    b = gw.Builder()
    x = b.input("x", (4, 3), "float64")
    t = b.tanh(x, name="t")
    b.output(b.sigmoid(b.add(b.sigmoid(t, name="s"), x, name="plus"), name="last"), name="y")
    p = b.build()
    with p.edit("gate") as e:
        e.gate("t", "sigmoid", init=-3.0)
    done = st.DifferentiableGraph(p).discretize()
    assert done.cut == ["t"]
    np.testing.assert_allclose(output(p), 1 / (1 + np.exp(-(0.5 + GIVEN["x"]))))


def test_online_cuts_equal_gates_at_0_and_reused_slots_are_reset() -> None:
    problem = Edges(2, "float64")
    problem.gate("hard_concrete")
    p = problem.program
    view = st.DifferentiableGraph(p, seed=2)
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1,
                            policy=st.Policy(patience=1), prune_every=50)  # fmt: skip
    probe, cuts, before = problem.batch(16), 0, p.fork()
    for step in range(200):
        if (step + 1) % 50 == 0:
            before = p.fork()
        report = opt.step(problem.batch())
        if report.edits:
            cuts += len(report.edits)
            for name in ("w", "gates.logits"):
                value = p.weights[name].numpy()
                if value.shape == before.weights[name].shape:
                    before.weights[name].assign(gw.tensor(value))
            with before.edit("force") as e:
                named = before.gates().named()
                for name in report.edits:
                    e.set_gate(named[name][0].handle, "closed")
            ours, theirs = (q.run(probe, keep="outputs")["loss"].item() for q in (p, before))
            assert abs(ours - theirs) <= 1e-12
            assert not set(report.edits) & set(view.probabilities())
    assert cuts >= 15
    with p.edit("candidates again") as e:
        made = [e.gate(e.connect(source, target), "sigmoid") for source, target in (("x0", "y1"), ("x1", "y0"))]
    opt.logits.sync()
    mine = [e for e in view.elements() if e.gate.handle in made]
    assert all(e.gate.generation == 1 for e in mine)
    assert [opt.logits.of(e.key) for e in mine] == [(0.0, 0.0, 0.0)] * 2
    opt.step(problem.batch())
    assert [opt.logits.of(e.key)[2] for e in mine] == [1.0, 1.0]


def test_export_refuses_soft_gates_and_folded_ones_keep_the_logits(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = gw.open(tiny_llama.directory("f32"))
    ids = tiny_llama.batch(3, rows=2)[0][:, :10]
    model.program.select("layers.0.attn").heads.gate("sigmoid", init=np.linspace(-1, 1, 4))
    soft = model.logits(ids)
    with pytest.raises(st.SoftGates, match=r"layers\.0\.attn\.heads"):
        model.export(tmp_path / "soft", check="none", timed=False)
    assert not (tmp_path / "soft").exists()
    st.DifferentiableGraph(model.program).discretize(0, to="fold")
    model.export(tmp_path / "folded", check="none", timed=False)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")(torch.tensor(ids)).logits.numpy()
    assert np.abs(theirs - soft).max() <= 1e-5 * np.abs(soft).max()
