"""Recurrent layers: states, dropout, names, refusals (values are in `test_torch_modules`); CfC by its formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.program.draw import layout
from values import grad_of

rng = np.random.default_rng(0)
X = rng.normal(size=(3, 5, 4)).astype(np.float32)
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@pytest.mark.parametrize("name", LAYERS)
def test_states_continue_a_sequence_eagerly_and_traced(name):
    layer = LAYERS[name](4, 6, 2, batch_first=True)
    whole, _ = layer(Tensor(from_numpy(X)))
    first, states = layer(Tensor(from_numpy(X[:, :2])))
    second, _ = layer(Tensor(from_numpy(X[:, 2:])), states)
    np.testing.assert_allclose(np.concatenate([first.numpy(), second.numpy()], 1), whole.numpy(), rtol=1e-5, atol=1e-6)
    p = gw.trace(lambda x: layer(x)[0], X)
    np.testing.assert_array_equal(p(x=X)["out"].numpy(), whole.numpy())
    assert p.select(op="linear").count == 2 * (1 + 5)  # of the whole sequence, and of the state step by step


def test_dropout_is_between_layers_in_training_only():
    layer, x = nn.GRU(4, 6, 3, dropout=0.5), gw.tensor(X)
    assert not np.array_equal(layer(x)[0].numpy(), layer(x)[0].numpy())
    single = nn.GRU(4, 6, dropout=0.5)
    for same in (single, layer.eval()):
        np.testing.assert_array_equal(same(x)[0].numpy(), same(x)[0].numpy())


X0, H = gw.tensor(X), gw.tensor(np.zeros((1, 5, 6), "f4"))
REFUSED: dict[str, tuple[Any, str]] = {
    "axes": (lambda: nn.RNN(4, 6)(gw.tensor(X[0, 0])), "wrong shape"),
    "no step": (lambda: nn.GRU(4, 6)(gw.tensor(X[:0])), "T >= 1"),
    "size": (lambda: nn.GRU(3, 6)(X0), "wrong shape"),
    "state": (lambda: nn.RNN(4, 6)(X0, H[:, :3]), "initial state"),
    "half a state": (lambda: nn.LSTM(4, 6)(X0, H), "initial state"),
    "cell": (lambda: nn.LSTMCell(3, 6)(X0[0]), "wrong shape"),
    "nonlinearity": (lambda: nn.RNN(4, 6, nonlinearity="silu"), "tanh or relu"),
    "nonlinearity of a cell": (lambda: nn.RNNCell(4, 6, nonlinearity="silu"), "tanh or relu"),
    "layers": (lambda: nn.GRU(4, 6, 0), "layers >= 1"),
    "dropout": (lambda: nn.GRU(4, 6, dropout=1.5), "probability"),
    "projection": (lambda: nn.LSTM(4, 6, proj_size=6), "proj_size"),
    "cfc": (lambda: nn.CfC(4, 6)(X0[0], None, X0[0]), "B, T, I"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_operands_and_options_are_refused(name):
    run, match = REFUSED[name]
    with pytest.raises(UsageError, match=match):
        run()


# -- CfC ---------------------------------------------------------------------------------------------------------------
def sigma(x):
    return 1 / (1 + np.exp(-x))


def written_out(cell: nn.CfCCell, x: np.ndarray, h: np.ndarray, dt: np.ndarray) -> np.ndarray:
    """One step in numpy, float64, by the formulas of the paper."""
    w = {n: p.numpy().astype(np.float64) for n, p in cell.named_parameters()}

    def linear(name: str, b: np.ndarray) -> np.ndarray:
        return b @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    b = np.concatenate([x, h], -1)
    for k in range(0, 2 * sum(n.startswith("backbone") and n.endswith("bias") for n in w), 2):
        b = np.tanh(linear(f"backbone.{k}", b))
    f = linear("ff1", b)
    if cell.variant == "minimal":
        return w["A"] - w["A"] * np.exp(-dt * (np.abs(w["w_tau"]) + np.abs(f))) * f
    f1, f2 = np.tanh(f), np.tanh(linear("ff2", b))
    t = sigma(linear("time_a", b) * dt + linear("time_b", b))
    return f1 + t * f2 if cell.variant == "no_gate" else f1 * (1 - t) + f2 * t


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("variant", ["default", "no_gate", "minimal"])
def test_cfc_cell_matches_its_formulas(variant, layers):
    gw.manual_seed(1)
    cell = nn.CfCCell(4, 6, 8, layers, variant).to("float64")
    for p in cell.parameters():
        p.assign(Tensor(from_numpy(np.random.default_rng(p.numel()).normal(size=p.shape))))
    x, h, dt = rng.normal(size=(3, 4)), rng.normal(size=(3, 6)), rng.uniform(0, 2, (3, 1))
    leaves = [Tensor(from_numpy(v), requires_grad=True) for v in (x, h, dt)]
    out, state = cell(*leaves)
    assert state is out
    np.testing.assert_allclose(out.numpy(), written_out(cell, x, h, dt), rtol=1e-12)
    (out * out).sum().backward()
    for k, leaf in enumerate(leaves):
        for _ in range(3):
            step = rng.normal(size=leaf.shape)
            at = [[v + s * 1e-6 * step if i == k else v for i, v in enumerate((x, h, dt))] for s in (1, -1)]
            up, down = ((written_out(cell, *v) ** 2).sum() for v in at)
            assert (grad_of(leaf).numpy() * step).sum() == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-6)


def test_cfc_gate_limits_for_small_and_large_times():
    gw.manual_seed(2)
    cell = nn.CfCCell(4, 6)
    x, h = Tensor(from_numpy(X[:, 0])), Tensor(from_numpy(rng.normal(size=(3, 6)).astype("f4")))
    b = cell.backbone(gw.ops.call("concat", x, h, axis=-1))
    f1, f2 = cell.ff1(b).tanh().numpy(), cell.ff2(b).tanh().numpy()

    def after(dt: float) -> np.ndarray:
        return cell(x, h, Tensor(from_numpy(np.full((3, 1), dt, np.float32))))[0].numpy()

    t0 = sigma(cell.time_b(b).numpy())
    np.testing.assert_allclose(after(0.0), f1 * (1 - t0) + f2 * t0, rtol=1e-5, atol=1e-6)
    limit = np.where(cell.time_a(b).numpy() > 0, f2, f1)
    np.testing.assert_allclose(after(1e6), limit, rtol=1e-5, atol=1e-6)
    assert np.isfinite(after(1e30)).all()


def test_a_mixed_cell_steps_an_lstm_first():
    gw.manual_seed(3)
    cell = nn.CfCCell(4, 6, mixed=True)
    assert cell.memory is not None
    x, dt = Tensor(from_numpy(X[:, 0])), Tensor(from_numpy(np.ones((3, 1), np.float32)))
    state = tuple(Tensor(from_numpy(rng.normal(size=(3, 6)).astype("f4"))) for _ in range(2))
    out, (h, c) = cell(x, state, dt)
    between, memory = cell.memory(x, state)
    np.testing.assert_allclose(out.numpy(), written_out(cell, X[:, 0], between.numpy(), dt.numpy()), rtol=1e-4)
    assert h is out
    np.testing.assert_array_equal(c.numpy(), memory.numpy())


def test_cfc_layers_take_elapsed_times():
    gw.manual_seed(4)
    layer = nn.CfC(4, 6, 2, mixed=True, backbone_units=7)
    dt = rng.uniform(0, 1, (3, 5)).astype("f4")
    out, states = layer(Tensor(from_numpy(X)), None, Tensor(from_numpy(dt)))
    assert out.shape == (3, 5, 6)
    held = [cell.start(Tensor(from_numpy(X[:, 0]))) for cell in layer.cells]
    for t in range(5):
        step = Tensor(from_numpy(X[:, t]))
        for k, cell in enumerate(layer.cells):
            step, held[k] = cell(step, held[k], Tensor(from_numpy(dt[:, t : t + 1].copy())))
        np.testing.assert_allclose(out.numpy()[:, t], step.numpy(), rtol=1e-5, atol=1e-6)
    assert len(states) == 2
    with pytest.raises(UsageError, match="variant"):
        nn.CfCCell(2, 2, variant="none")


def test_a_traced_cfc_has_visible_parts_and_time_as_input():
    gw.manual_seed(5)
    layer = nn.CfC(4, 6, backbone_units=7).to("float64")
    x, dt = rng.normal(size=(3, 2, 4)), rng.uniform(0, 2, (3, 2))
    p = gw.trace(lambda x, dt: layer(x, None, dt)[0], x, dt)
    assert p.input_names() == ("x", "dt")
    (cell,) = layer.cells
    keys = {id(v): key for key, v in p.weights.items()}
    linears = p.of_kind("linear")
    of = {name: [n for n in linears if p.key(p.producers(n)[1]) == keys[id(part.weight)]]
          for name, part in (("backbone", cell.backbone[0]), ("f1", cell.ff1), ("f2", cell.ff2),
                             ("time a", cell.time_a), ("time b", cell.time_b))}  # fmt: skip
    assert {name: len(nodes) for name, nodes in of.items()} == dict.fromkeys(of, 2)  # one a step
    for step in range(2):
        (h,) = p.consumers(of["backbone"][step])
        assert p.op(h) == "tanh"
        f1, f2 = ({p.op(n) for n in p.consumers(of[name][step])} for name in ("f1", "f2"))
        assert f1 == f2 == {"tanh"}
        (scaled,) = p.consumers(of["time a"][step])
        assert p.op(scaled) == "mul"  # by elapsed time, which comes from the input
        assert p.node("dt") in p.reachable([scaled])
        assert p.node("dt") not in p.reachable([of["backbone"][0]])
    assert len(p.of_kind("sigmoid")) == 2
    run, out = p.run(x=x, dt=dt), p.output_names()[0]
    wanted = ["x", "dt", *p.weights]
    found = {name: g.to_numpy() for name, g in zip(wanted, run.grad(out, wanted), strict=True)}
    for name, ours in found.items():
        for _ in range(2):
            step, sums = rng.normal(size=ours.shape), []
            for sign in (1e-6, -1e-6):
                moved = p.fork()
                fed = {"x": x, "dt": dt}
                if name in fed:
                    fed[name] = fed[name] + sign * step
                else:
                    with moved.edit("move") as e:
                        e.set_weight(name, p.weights.array(name).to_numpy() + sign * step)
                sums.append(moved.run(fed)[out].to_numpy().sum())
            assert (ours * step).sum() == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-6, abs=1e-8), name
    for at, limit in ((0.0, "time b alone"), (1e6, "the sign of time a")):
        run = p.run(x=x, dt=np.full_like(dt, at))
        h = np.zeros((3, 6))
        for k in range(2):
            b = np.tanh(run.value(of["backbone"][k]).to_numpy())
            a, c = run.value(of["time a"][k]).to_numpy(), run.value(of["time b"][k]).to_numpy()
            f1, f2 = (np.tanh(run.value(of[name][k]).to_numpy()) for name in ("f1", "f2"))
            gate = sigma(c) if at == 0 else (a > 0).astype(float)
            h = f1 * (1 - gate) + f2 * gate
            assert b.shape == (3, 7)
            np.testing.assert_allclose(run[out].to_numpy()[:, k], h, rtol=1e-9, err_msg=limit)


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_layers_and_steps_of_an_unrolled_layer_have_names(layer):
    class Net(nn.Module):
        def __init__(self) -> None:
            self.rec = layer(4, 6, 2, bidirectional=True, batch_first=True)

        def forward(self, x):
            return self.rec(x)[0].sum()

    net, ends = Net(), [f"rec.l{k}{end}" for k in range(2) for end in ("", "_reverse")]
    for p in (gw.trace(net, X), gw.tape(net(gw.tensor(X)))):
        steps = {f"{end}.step.{t}" for end in ends for t in range(5)}
        assert {p.path(n).rpartition(".")[0] for n in p.of_kind("linear")} == {*ends, *steps}
        assert {p.path(n).rpartition(".")[0] for n in p.of_kind("tanh")} == steps
        assert p.path(p.of_kind("sum")[0]) == "sum"
        assert layout(p, level=1).boxes.keys() >= {"rec"}
    for batch_first in (True, False):
        single = gw.trace(layer(4, 6, batch_first=batch_first), np.zeros((5, 5, 4), "f4"))
        drawn = layout(single, fold=True)
        assert (drawn.boxes | drawn.groups)["l0.step.[1-4]"].repeat == 4
