"""Recurrent cells as mutations: against torch's, with the function kept, and in a run on sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import UsageError
from graphwright.evolve import mutations as m
from graphwright.evolve.layers import train
from graphwright.evolve.mutations.cells import cells, kind_of
from graphwright.evolve.mutations.layers import activations

rng = np.random.default_rng(0)
TORCH = {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}


def start(batch=3, steps=5, inputs=2, outputs=2):
    b = gw.Builder("sequence")
    w = b.param("out.weight", rng.normal(size=(outputs, inputs)).astype("f4"))
    b.output(b.linear(b.input("x", (batch, steps, inputs)), w, name="out"), "y")
    return b.build()


@pytest.mark.parametrize("kind", TORCH)
def test_inserted_cell_matches_torch_and_keeps_the_function(kind):
    p, x = start(), rng.normal(size=(3, 5, 2)).astype("f4")
    before, y = p.hash(), p.run(x=x)["y"].to_numpy()
    with p.edit("in") as e:
        m.insert_cell(e, "out", np.random.default_rng(1), kind, 4)
    assert kind_of(p, "b1.to") == kind
    np.testing.assert_array_equal(p.run(x=x)["y"].to_numpy(), y)
    out = rng.normal(size=(2, 4)).astype("f4")
    with p.edit("open it") as e:
        e.set_weight("b1.to.weight", out)
    net = TORCH[kind](2, 4, batch_first=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(net, f"{name}_l0").data = torch.from_numpy(p.weights.array(f"b1.{kind}.{name}").to_numpy().copy())
    theirs = net(torch.from_numpy(x))[0].detach().numpy() @ out.T
    np.testing.assert_allclose(p.run(x=x)["y"].to_numpy() - y, theirs, rtol=1e-5, atol=1e-6)
    p.undo(2)
    assert p.hash() == before
    assert not cells(p)


def timed(batch=3, steps=5, outputs=2):
    """Inputs of two readings and the time before each; a node `elapsed` says which is the time."""
    b = gw.Builder("timed")
    x = b.input("x", (batch, steps, 3))
    b.slice(x, axis=2, start=2, size=1, name="elapsed")
    w = b.param("out.weight", rng.normal(size=(outputs, 3)).astype("f4") * np.array([1, 1, 0], np.float32))
    b.output(b.linear(x, w, name="out"), "y")
    return b.build()


def by_formula(p, x, times):
    """Hasani et al. 2022, equation 10: h' = f₁(1 - t) + f₂ t, t = σ(time_a·Δt + time_b), on a backbone of [x, h]."""
    w = {k.removeprefix("b1.cfc."): v.data.to_numpy("float64") for k, v in p.weights.items()}

    def linear(name: str, v: np.ndarray) -> np.ndarray:
        return v @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    h, found = np.zeros((len(x), 4)), []
    for t in range(x.shape[1]):
        b = np.tanh(linear("backbone.0", np.concatenate([x[:, t], h], 1)))
        gate = 0.5 + 0.5 * np.tanh(0.5 * (linear("time_a", b) * times[:, t] + linear("time_b", b)))  # σ
        h = np.tanh(linear("ff1", b)) * (1 - gate) + np.tanh(linear("ff2", b)) * gate
        found.append(h[:, :2])
    return np.stack(found, 1)


def test_cfc_cell_matches_its_formula_at_unit_time_steps():
    p, x = start(), rng.normal(size=(3, 5, 2)).astype("f4")
    y = p.run(x=x)["y"].to_numpy()
    with p.edit("in") as e:
        m.insert_cell(e, "out", np.random.default_rng(1), "cfc", 4)
        e.set_weight("b1.to.weight", np.eye(2, 4, dtype="f4"))
    np.testing.assert_allclose(p.run(x=x)["y"].to_numpy() - y, by_formula(p, x, np.ones((3, 5, 1))), atol=1e-6)
    with p.edit("another kind") as e:
        m.cell_type(e, "b1.to", rng, "gru")
    assert kind_of(p, "b1.to") == "gru"
    p.undo()
    assert kind_of(p, "b1.to") == "cfc"


@pytest.mark.parametrize("first", ["cfc", "gru"])
def test_cfc_cell_reads_elapsed_times(first):
    p = timed()
    before = p.hash()
    x = rng.normal(size=(3, 5, 3)).astype("f4")
    x[..., 2] = [[0, 0.1, 1, 7, 1e6]] * 3
    y = p.run(x=x)["y"].to_numpy()
    with p.edit("in") as e:
        m.insert_cell(e, "out", np.random.default_rng(1), first, 4)
    np.testing.assert_array_equal(p.run(x=x)["y"].to_numpy(), y)
    if first == "gru":
        with p.edit("another kind") as e:
            m.cell_type(e, "b1.to", np.random.default_rng(2), "cfc")
    with p.edit("open it") as e:
        e.set_weight("b1.to.weight", np.eye(2, 4, dtype="f4"))
        e.set_weight("b1.cfc.backbone.0.weight", lambda w: w * [[1, 1, 0, 1, 1, 1, 1]])  # time by the gate alone
    found = p.run(x=x)["y"].to_numpy() - y
    np.testing.assert_allclose(found, by_formula(p, x, x[..., 2:]), atol=2e-6)
    assert np.abs(found - by_formula(p, x, np.ones((3, 5, 1)))).max() > 1e-2
    with p.edit("another kind") as e:
        m.cell_type(e, "b1.to", rng, "lstm")
    assert not p.consumers(p.node("elapsed"))
    p.undo(4 if first == "gru" else 3)
    assert p.hash() == before


def test_elapsed_times_of_another_shape_are_refused():
    b = gw.Builder("odd")
    x = b.input("x", (3, 5, 3))
    b.slice(x, axis=2, start=1, size=2, name="elapsed")
    b.output(b.linear(x, b.param("out.weight", np.zeros((1, 3), np.float32)), name="out"), "y")
    p = b.build()
    before = p.hash()
    with pytest.raises(UsageError, match="elapsed times have the wrong shape"), p.edit("in") as e:
        m.insert_cell(e, "out", rng, "cfc", 4)
    assert p.hash() == before


def test_a_run_inserts_cells_that_read_elapsed_times():
    task = ev.tasks.irregular_sine(20, 5)
    b = gw.Builder("readings")
    x = b.input("x", (6, 5, 2))
    b.slice(x, axis=2, start=1, size=1, name="elapsed")
    b.output(b.linear(x, b.param("out.weight", np.zeros((1, 2), np.float32)), name="out"), "y")
    settings = ev.Layers(population=2, steps=5, crossover=0.0, rates={"insert_cell": 9.0, "cell_type": 9.0})
    run: Any = ev.Evolution(task, ev.blocks(b.build()), settings, seed=2)
    run.run(max_evaluations=4, target=2.0)
    timed = [m for m in run.members if any(".cfc." in k for k in m.program.weights)]
    assert timed
    for member in timed:
        p = member.program
        assert any(".cfc." in p.path(n) for n in p.consumers(p.node("elapsed")))
        assert run.replay(member.number).structure_hash() == p.structure_hash()


def test_program_with_a_cell_can_be_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    p, x = start(), rng.normal(size=(3, 5, 2)).astype("f4")
    with p.edit("a memory") as e:
        m.insert_cell(e, "out", np.random.default_rng(1), "gru", 4)
        e.set_weight("b1.to.weight", rng.normal(size=(2, 4)).astype("f4"))
    y = p.run(x=x)["y"].to_numpy()
    p.save(tmp_path / "gru")
    np.testing.assert_array_equal(gw.load(tmp_path / "gru").run(x=x)["y"].to_numpy(), y)
    session = onnxruntime.InferenceSession(str(p.to_onnx(tmp_path / "gru.onnx")), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], y, rtol=0, atol=1e-5)


def test_cell_type_keeps_the_output_matrix_and_returns_removed_weights():
    p = start()
    with p.edit("in") as e:
        m.insert_cell(e, "out", rng, "gru", 4)
    with p.edit("open") as e:
        e.set_weight("b1.to.weight", np.ones((2, 4), np.float32))
    before = p.hash()
    with p.edit("another") as e:
        dropped = m.cell_type(e, "b1.to", rng, "lstm")
    assert sorted(dropped) == [f"b1.gru.{n}" for n in ("bias_hh", "bias_ih", "weight_hh", "weight_ih")]
    assert kind_of(p, "b1.to") == "lstm"
    assert (p.weights.array("b1.to.weight").to_numpy() == 1).all()
    assert not [k for k in p.weights if ".gru." in k]  # no orphan
    assert p.validate().ok
    p.undo()
    assert p.hash() == before
    inside = [n for n in p.nodes() if p.path(n).startswith("b1.gru.")]
    assert not {*activations(p), *m.linears(p)} & set(inside)  # a step of a cell stays like the others
    with p.edit("out") as e:
        m.remove_layer(e, "b1.to", rng)
    assert set(p.weights) == {"out.weight"}


def test_cells_need_sequences():
    b = gw.Builder("plain")
    w = b.param("out.weight", np.zeros((1, 2), np.float32))
    b.output(b.linear(b.input("x", ("B", 2)), w, name="out"), "y")
    p = b.build()
    with pytest.raises(UsageError, match="cannot be inserted at this node"), p.edit("no") as e:
        m.insert_cell(e, "out", rng)
    with pytest.raises(UsageError, match="not the output layer of a recurrent cell"), p.edit("no") as e:
        m.cell_type(e, "out", rng)


@pytest.mark.parametrize("loss", ["bce", "mse", "cross_entropy"])
def test_training_over_time_lowers_the_loss(loss):
    x = rng.normal(size=(40, 4, 2)).astype("f4")
    y: Any = rng.random((40, 4, 2)) if loss != "cross_entropy" else rng.integers(0, 2, 40)
    task = ev.Task(x, y, loss, lengths=rng.integers(2, 5, 40), split="same")
    p = start(40, 4)
    answers = p.run(x=x)["y"].to_numpy()
    part = task.train
    ours = train._over_time(gw.tensor(answers), gw.tensor(part.y), gw.tensor(part.counts), loss).item()
    assert ours == pytest.approx(train.measure(task, p, part)[1], rel=1e-5)


def test_run_on_sequences_inserts_cells_and_resumes(tmp_path):
    task = ev.tasks.parity(3)
    settings = ev.Layers(population=2, steps=5, crossover=0.0, rates={"insert_cell": 9.0, "cell_type": 9.0})
    run: Any = ev.Evolution(task, ev.blocks(start(4, 3, 1, 1)), settings, seed=0)
    run.run(max_evaluations=4, target=2.0, save=tmp_path / "run")
    assert {b.mutation for b in run.births} & {"insert_cell", "cell_type"}
    again = ev.resume(tmp_path / "run", task)
    again.run(max_evaluations=5, target=2.0)
    run.run(max_evaluations=5, target=2.0)
    assert again.births == run.births
    assert run.counters.forward == 5 * len(task.valid.x) * 3
    for member in run.members:
        assert run.replay(member.number).structure_hash() == member.program.structure_hash()
