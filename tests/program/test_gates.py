"""Gates as nodes: what they compute, where they may stand, and that edits, plans and files treat them as any node."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from axis_samples import perceptron, traced
from fixtures import tiny_llama
from fixtures.gated import central, junction_edges, random_dag
from graphwright import nn
from graphwright.array.formulas.gates import KINDS, MODES
from graphwright.errors import UsageError
from graphwright.graph import StaleHandle
from graphwright.program import DeadGate, GateNotAllowed, NotZeroPreserving, Program
from graphwright.program.gates import ELEMENT
from seeds import deep

SMOOTH = ("scale", "sigmoid", "concrete", "hard_concrete")


def set_run(p: Program, mode: str, seed: int = 0, step: int = 0) -> None:
    p.weights["gates.run"].data = gw.array.from_numpy(np.array([seed, step, MODES.index(mode)]))


def set_logits(p: Program, values: np.ndarray) -> None:
    before = p.weights["gates.logits"].data
    p.weights["gates.logits"].data = gw.array.from_numpy(np.asarray(values, before.dtype.numpy))


def feeds(seed: int = 0, kind: str = "float64") -> dict:
    return {"x": np.random.default_rng(seed).normal(size=(4, 3)).astype(kind)}


def outputs(p: Program, given: dict) -> np.ndarray:
    return p.run(given, keep="outputs")["y"].to_numpy()


@pytest.mark.parametrize("seed", range(deep(50, 4)))
def test_gradients_of_weights_and_logits_match_finite_differences(seed: int) -> None:
    p, rng = random_dag(seed), np.random.default_rng(seed)
    several = next((j for j in p.junctions() if len(p.in_edges(j)) > 1), None)
    options = p.in_edges(several) if several is not None else ()
    with p.edit("gates") as e:
        if options:
            e.gate(options, "choice", init=rng.normal(size=len(options)))
        for edge in junction_edges(p):
            if edge not in options:
                e.gate(edge, SMOOTH[int(rng.integers(len(SMOOTH)))], init=rng.normal())
        e.gate("n0.act", "sigmoid", init=0.3)
    set_run(p, "train", seed=seed, step=3)
    given = feeds(seed)
    wrt = ["gates.logits", *(f"n{k}.w" for k in range(6))]
    program = p.grad("loss", wrt)
    found = program.run(given, keep="outputs")
    for key in wrt:
        ours, theirs = found[f"grad.{key}"].to_numpy(), central(p, key, given)
        assert np.abs(ours - theirs).max() <= 1e-6 * max(np.abs(theirs).max(), 1e-2)


def test_a_straight_through_gate_has_the_soft_slope_at_the_hard_forward() -> None:
    """Written out for y = Σ g x, loss = y²: dL/dz = 2 y x p(1 - p)/T with the hard y."""
    b = gw.Builder()
    x = b.input("x", (3,), "float64")
    total = b.junction(x, x, name="sum")
    b.output(b.sum(b.mul(total, total), axes=(0,), name="loss"), name="loss")
    p = b.build()
    with p.edit("gates") as e:
        for edge, z in zip(p.in_edges("sum"), (0.4, -0.7), strict=True):
            e.gate(edge, "ste", init=z)
    values, z = np.array([1.0, -2.0, 0.5]), np.array([0.4, -0.7])
    prob = 1 / (1 + np.exp(-z))
    y = values * 1.0 + values * 0.0
    theirs = (2 * y * values).sum() * prob * (1 - prob)
    ours = p.grad("loss", ["gates.logits"]).run(x=values)["grad.gates.logits"].to_numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "choice"])
def test_plans_and_the_vm_match_runs_of_gated_programs(kind: str) -> None:
    p = random_dag(3, kind="float32")
    with p.edit("gates") as e:
        for edge in junction_edges(p):
            e.gate(edge, kind, init=0.7)
    set_run(p, "train", seed=5, step=2)
    given = feeds(1, "float32")
    wrt = ["gates.logits", "n0.w"]
    plain = p.grad("loss", wrt).run(given, keep="outputs")
    for executor, tolerance in (("aten", 0), ("vm", 1e-5)):
        plan = p.grad("loss", wrt).compile(x=(4, 3), executor=executor)
        for name, value in plan(given).items():
            np.testing.assert_allclose(value.to_numpy(), plain[name].to_numpy(), rtol=tolerance, atol=tolerance)
    tape = p(**given)["loss"]
    tape.backward()
    by_tape = p.weights["gates.logits"].grad
    assert by_tape is not None
    np.testing.assert_array_equal(by_tape.numpy(), plain["grad.gates.logits"].to_numpy())
    p.weights["gates.logits"].grad = None


def test_undo_save_and_load_keep_the_gate_table() -> None:
    p = random_dag(1)
    before, edges = p.hash(), junction_edges(p)
    with p.edit("gates") as e:
        handles = [e.gate(edge, "sigmoid", init=0.1 * i) for i, edge in enumerate(edges)]
    gated = p.hash()
    logits = p.gates().logits()
    with p.edit("cut") as e:
        e.cut(edges[2])
    assert handles[2] not in p.gates()
    with pytest.raises(StaleHandle):
        p.gates()[handles[2]]
    p.undo()
    assert p.hash() == gated
    np.testing.assert_array_equal(p.gates().logits(), logits)
    p.undo()
    assert p.hash() == before
    p.redo()
    assert p.hash() == gated
    assert list(p.gates()) == handles


def test_a_loaded_program_has_its_gates(tmp_path) -> None:
    p = random_dag(1)
    with p.edit("gates") as e:
        handles = [e.gate(edge, "hard_concrete", init=0.3) for edge in junction_edges(p)]
    p.save(tmp_path / "saved")
    q = gw.load(tmp_path / "saved")
    assert q.hash() == p.hash()
    assert list(q.gates()) == handles
    assert q.gates().named().keys() == p.gates().named().keys()


def test_reused_gate_slots_are_reset_and_others_keep_their_noise() -> None:
    p = random_dag(2)
    edges = junction_edges(p)
    with p.edit("gates") as e:
        handles = [e.gate(edge, "concrete", init=0.2 * i) for i, edge in enumerate(edges)]
    set_run(p, "train", seed=9, step=4)
    gates, first = p.gates(), p.gates()[handles[0]]
    drawn = {h: p.run(feeds()).value(gw.program.Value(p.node("gates"), gates[h].port)).to_numpy() for h in handles}
    with p.edit("cut") as e:
        e.cut(edges[0])
    with p.edit("another") as e:
        new = e.gate(e.connect("x", "out.sum"), "concrete", init=-1.25)
    made = p.gates()[new]
    assert made.port == first.port
    assert made.generation == first.generation + 1
    assert p.gates().logits()[made.span] == [-1.25]
    run = p.run(feeds())
    for h in handles[1:]:
        again = run.value(gw.program.Value(p.node("gates"), p.gates()[h].port)).to_numpy()
        np.testing.assert_array_equal(again, drawn[h])
    set_logits(p, 0.2 * np.arange(len(edges)))
    other = p.run(feeds()).value(gw.program.Value(p.node("gates"), made.port)).to_numpy()
    assert other != drawn[handles[0]]  # the same slot and logit, another generation


def test_parallel_edges_have_separate_gates() -> None:
    b = gw.Builder()
    x = b.input("x", (2,), "float64")
    b.output(b.junction(x, x, x, name="sum"), name="y")
    p = b.build()
    with p.edit("gates") as e:
        for edge, z in zip(p.in_edges("sum"), (2.0, -3.0, 0.5), strict=True):
            e.gate(edge, "scale", init=z)
    np.testing.assert_allclose(outputs(p, {"x": np.ones(2)}), -0.5)
    assert list(p.gates().named()) == ["x -> sum", "x -> sum #2", "x -> sum #3"]


def test_a_choice_is_a_softmax_over_its_open_options() -> None:
    b = gw.Builder()
    x = b.input("x", (2,), "float64")
    twice, five = (b.mul(x, b.const(f"c{int(n)}", np.array(n)), name=f"times{int(n)}") for n in (2.0, 5.0))
    b.output(b.junction(x, twice, five, name="sum"), name="y")
    p = b.build()
    z = np.array([0.3, -0.2, 1.1])
    with p.edit("choice") as e:
        handle = e.gate(p.in_edges("sum"), "choice", init=z)
    parts = np.array([1.0, 2.0, 5.0])
    soft = np.exp(z) / np.exp(z).sum()
    np.testing.assert_allclose(outputs(p, {"x": np.ones(2)}), parts @ soft)
    with p.edit("close one") as e:
        e.set_gate(handle, "closed", [2])
    soft = np.exp(z[:2]) / np.exp(z[:2]).sum()
    np.testing.assert_allclose(outputs(p, {"x": np.ones(2)}), parts[:2] @ soft)
    assert soft[0] == pytest.approx(1 / (1 + np.exp(-(z[0] - z[1]))))
    set_run(p, "hard")
    np.testing.assert_allclose(outputs(p, {"x": np.ones(2)}), 1.0)
    with p.edit("close another") as e, pytest.raises(GateNotAllowed):
        e.set_gate(handle, "closed")


def test_gates_are_refused_where_zero_does_not_equal_removal() -> None:
    p = random_dag(0)
    fc = p.in_edges("n0.fc")[0]
    with p.edit("no") as e, pytest.raises(GateNotAllowed, match="its target is not a junction"):
        e.gate(fc)
    with p.edit("no") as e, pytest.raises(DeadGate):
        e.gate(junction_edges(p)[0], "sigmoid", init=np.inf)
    with p.edit("closed from the start") as e:
        e.gate(junction_edges(p)[0], "ste", init=-1.0)
    assert any("closed at first" in warning for warning in p.journal[-1].warnings)
    with p.edit("no") as e, pytest.raises(UsageError, match="nothing to gate"):
        e.gate([])
    with p.edit("no") as e, pytest.raises(UsageError, match="two or more"):
        e.gate([junction_edges(p)[1]], "choice")
    b = gw.Builder()
    w = [b.param(n, np.ones((3, 3), np.float32)) for n in ("a", "b")]
    scale = b.param("scale", np.ones(3, np.float32))
    b.output(b.linear(b.rms_norm(b.linear(b.input("x", (2, 3)), w[0]), scale), w[1]), name="y")
    q = b.build()
    before = q.hash()
    name = next(n for n, g in q.axes().items() if g.mixed)
    with pytest.raises(NotZeroPreserving):
        q.axes()[name].units().gate()
    assert q.hash() == before


# -- units -------------------------------------------------------------------------------------------------------------
def closed_equals_cut(
    p: Program, axis: str, units: list[int], run, ragged: bool = False, tolerance: float = 1e-12
) -> None:
    """A gate at 0 gives what the program without the units gives."""
    plain = run(p)
    other = p.fork()
    (handle,) = p.axes()[axis].units().gate("sigmoid", init=30.0 if tolerance < 1e-9 else 20.0)
    with p.edit("open") as e:
        e.set_gate(handle, "open")
    np.testing.assert_array_equal(run(p), plain)
    with p.edit("close") as e:
        e.set_gate(handle, "closed", units)
    closed = run(p)
    assert np.abs(closed - plain).max() > 1e-6
    with other.edit("cut") as e:
        e.cut_units(other.axes()[axis].units(units), ragged=ragged)
    np.testing.assert_allclose(closed, run(other), rtol=tolerance, atol=tolerance)
    with p.edit("cut the gated ones") as e:
        e.cut_units(p.axes()[axis].units(units), ragged=ragged)
    np.testing.assert_allclose(run(p), closed, rtol=tolerance, atol=tolerance)
    assert p.gates()[handle].length == other.axes()[axis].size if axis in other.axes() else True


@pytest.mark.parametrize(("axis", "units", "ragged"), [
    ("layers.1.attn.heads", [1], True),
    ("layers.0.attn.heads", [2, 3], False),
    ("layers.1.attn.kv_groups", [0], False),
    ("layers.0.mlp.neurons", [3, 17, 100], False),
    ("layers.0.attn.head_dim", [5], False),
])  # fmt: skip
def test_closed_units_of_a_llama_equal_cut_units(axis: str, units: list[int], ragged: bool) -> None:
    model = gw.open(tiny_llama.directory("f32"), dtype="float64")
    ids = tiny_llama.batch(3, rows=2)[0][:, :12]
    positions = np.broadcast_to(np.arange(12), ids.shape)
    p = model.program

    def run(q: Program) -> np.ndarray:
        return q.run(ids=ids, positions=positions)["logits"].to_numpy()

    closed_equals_cut(p, axis, units, run, ragged)


def test_closed_channels_of_a_convolution_equal_cut_channels() -> None:
    b, rng = gw.Builder(), np.random.default_rng(0)
    x = b.input("x", (2, 3, 8), "float64")
    w = [b.param(n, rng.normal(size=s)) for n, s in (("up.weight", (6, 3, 3)), ("down.weight", (4, 6, 3)))]
    b.output(b.conv(b.tanh(b.conv(x, w[0], name="up")), w[1], name="down"), name="y")
    p, given = b.build(), rng.normal(size=(2, 3, 8))
    axis = next(n for n, g in p.axes().items() if g.size == 6)
    closed_equals_cut(p, axis, [0, 4], lambda q: q.run(x=given)["y"].to_numpy())


def test_closed_units_and_experts_under_a_softmax_equal_cut_ones() -> None:
    rng, b = np.random.default_rng(0), gw.Builder()
    w = [b.param(n, rng.normal(size=s)) for n, s in (("up.weight", (6, 3)), ("down.weight", (2, 6)))]
    x = b.input("x", (4, 3), "float64")
    b.output(b.linear(b.softmax(b.linear(x, w[0], name="up"), axis=-1, name="shares"), w[1], name="down"), name="y")
    soft, given = b.build(), rng.normal(size=(4, 3))
    axis = next(n for n, g in soft.axes().items() if g.size == 6)
    closed_equals_cut(soft, axis, [0, 4], lambda q: q.run(x=given)["y"].to_numpy())
    gw.manual_seed(0)
    router, x = traced(nn.MoE(8, 10, 4, 2), given := rng.normal(size=(5, 8))), "x"
    digest = router.hash()
    closed_equals_cut(router, "router.experts", [1], lambda q: q.run({x: given}, keep="outputs")["out"].to_numpy())
    router.undo(4)
    assert router.hash() == digest
    (handle,) = router.axes()["router.experts"].units().gate("sigmoid", init=[0.5, -1.0, 0.2, 0.9])
    with router.edit("a loss") as e:
        e.set_outputs(loss=e.add("mean", e.add("mul", router.outputs()[0], router.outputs()[0]), axes=(0, 1)))
    ours = router.grad("loss", ["gates.logits"]).run({x: given}, keep="outputs")["grad.gates.logits"].to_numpy()
    theirs = central(router, "gates.logits", {x: given})
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)
    with router.edit("out again") as e:
        e.ungate(handle)
    assert router.validate().ok
    assert not router.of_kind("gate")


def test_a_closed_layer_equals_a_removed_layer() -> None:
    model = gw.open(tiny_llama.directory("f32"), dtype="float64")
    p, ids = model.program, tiny_llama.batch(3, rows=2)[0][:, :12]
    positions = np.broadcast_to(np.arange(12), ids.shape)
    other = p.fork()
    handles = p.select("layers").layers[1].gate()
    with p.edit("close") as e:
        e.set_gate(handles[0], "closed")
    other.select("layers").layers[1].prune()
    ours, theirs = (q.run(ids=ids, positions=positions)["logits"].to_numpy() for q in (p, other))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_open_gates_on_every_head_neuron_and_layer_change_no_bit() -> None:
    model = gw.open(tiny_llama.directory("f32"))
    p, ids = model.program, tiny_llama.batch(1)[0]
    before, axes, digest = model.logits(ids), set(p.axes()), p.hash()
    p.select("layers.*.attn").heads.gate()
    p.select("layers.*.mlp").neurons.gate()
    p.select("layers").layers.gate()
    np.testing.assert_array_equal(model.logits(ids), before)
    assert set(p.axes()) == axes
    assert p.gates().count == 8 + 256 + 2
    prices = {g.owner: int(g.cost.sum()) for g in p.gates().values()}
    assert prices["layers.0.attn.heads"] == sum(
        p.weights[f"model.layers.0.self_attn.{n}_proj.weight"].spec.size for n in "qkvo"
    )
    assert prices["layers.1.mlp.neurons"] == 3 * 64 * 128
    for handle in list(p.gates()):
        with p.edit("take out") as e:
            e.ungate(handle)
    assert p.hash() == digest


def test_changing_logits_temperature_noise_or_state_does_not_replan() -> None:
    p = random_dag(4, kind="float32")
    edges = junction_edges(p)
    with p.edit("gates") as e:
        handles = [e.gate(edge, "concrete", init=0.5) for edge in edges]
    plan = p.compile(x=(4, 3), deterministic=True)
    given, seen = feeds(0, "float32"), []
    for step in range(3):
        set_run(p, "train", step=step)
        set_logits(p, p.gates().logits() + 0.1)
        assert p.compile(x=(4, 3), deterministic=True) is plan
        seen.append(plan(given)["loss"].item())
        assert seen[-1] == p.run(given)["loss"].item()
    assert len(set(seen)) == 3
    with p.edit("cut") as e:
        e.cut(edges[0])
    patched = p.compile(x=(4, 3), deterministic=True)
    fresh = p.fork().compile(x=(4, 3), deterministic=True)
    assert patched.patched is not None
    for name, value in patched(given).items():
        np.testing.assert_array_equal(value.to_numpy(), fresh(given)[name].to_numpy())
    assert handles[0] not in p.gates()


@pytest.mark.parametrize("init", ["zero_out", "duplicate"])
def test_a_grown_axis_has_gates_of_its_kind_for_the_new_units(init: str) -> None:
    p, given = perceptron("f8"), feeds()
    axis = next(a for a in p.axes().values() if a.size == 5)
    with p.edit("gates") as e:
        other = e.gate("second", "hard_concrete", init=1.0)
        (gate,) = e.gate(axis.units(range(5)), "sigmoid", init=np.arange(5.0), cost="one")
        e.set_gate(gate, "open", [1, 2])
    before = outputs(p, given)
    with p.edit("grow") as e:
        e.grow(axis.name, 3, init)
    np.testing.assert_allclose(outputs(p, given), before, rtol=1e-12)
    found = p.gates()[gate]
    assert (found.kind, found.length, p.gates()[other].kind) == ("sigmoid", 8, "hard_concrete")
    assert sorted(found.rows[:, ELEMENT].tolist()) == list(range(8))
    assert found.cost.tolist() == [1] * 8
    assert found.states[:5] == ("soft", "open", "open", "soft", "soft")
    assert init == "duplicate" or found.states[5:] == ("soft",) * 3
    p.undo()
    assert np.array_equal(outputs(p, given), before)


def test_nodes_of_gates_can_be_renamed_and_their_weights_keep_their_keys() -> None:
    b = gw.Builder("renamed")
    x, w = b.input("x", ("B", 3)), b.param("w", np.ones((2, 3), "f4"))
    b.output(b.junction(*(b.linear(x, w, name=f"h{k}") for k in range(3)), name="j"), "y")
    p = b.build()
    digest = p.hash()
    with p.edit("gates") as e:
        first = e.gate("h0 -> j", "scale")
    for name in ("gates", "gates.logits", "gates.table", "gates.temperature", "gates.run"):
        with p.edit("rename") as e:
            e.rename(name, f"mine.{name}")
    assert list(p.gates()) == [first]
    with p.edit("another") as e:
        second = e.gate("h1 -> j", "scale", init=2.0)
    assert list(p.gates()) == [first, second]
    assert outputs(p, {"x": np.ones((1, 3), "f4")}).tolist() == [[9.0, 9.0]]
    with pytest.raises(UsageError, match="this key cannot change"), p.edit("rekey") as e:
        e.rename("mine.gates.table", "table", key="table")
    with p.edit("none") as e:
        e.ungate(first)
        e.ungate(second)
    assert p.hash() == digest
