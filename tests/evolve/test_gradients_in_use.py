"""What gradients have to keep to where structure lives: one forward, one tape, no gradient that was not asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import evolve as ev
from graphwright import nn
from graphwright.autograd import GraphFreed, Tensor, is_grad_enabled, memory
from graphwright.evolve.layers import train
from graphwright.program import StaleRun

F = nn.functional
rng = np.random.default_rng(0)
X = rng.normal(size=(6, 3)).astype(np.float32)


def gradient(p: Any) -> np.ndarray:
    """Of a parameter, after a backward pass."""
    assert p.grad is not None
    return p.grad.numpy()


# -- one forward -------------------------------------------------------------------------------------------------------
def test_gradients_use_the_mask_and_statistics_of_the_forward_pass():
    gw.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    p = gw.trace(net, gw.tensor(X))
    run = p.run({p.input_names()[0]: X})
    dropped = next(n for n in p.nodes() if p.op(n) == "dropout")
    before, after = run.value(p.producers(dropped)[0]).to_numpy(), run.value(dropped).to_numpy()
    mask = np.where(after != 0, 2.0, 0.0).astype(np.float32)
    np.testing.assert_allclose(after, before * mask, rtol=1e-6)
    assert 0 < (mask == 0).sum() < mask.size
    state = {k: p.weights.array(k).tobytes() for k in p.weights if "running" in k or "num_batches" in k}
    assert len(state) == 3
    assert p.weights.array("1.num_batches_tracked").to_numpy() == 1
    out, keys = p.output_names()[0], ["0.weight", "1.weight", "4.weight"]
    for _ in range(2):  # and again, of the same run
        found = [g.to_numpy() for g in run.grad(out, keys)]
        weights: dict[str, Any] = {k: torch.tensor(p.weights.array(k).to_numpy(), requires_grad=True) for k in
                   ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")}  # fmt: skip
        t = torch.nn.functional
        h = t.linear(torch.tensor(X), weights["0.weight"], weights["0.bias"])
        h = t.batch_norm(h, None, None, weights["1.weight"], weights["1.bias"], training=True).tanh()
        t.linear(h * torch.tensor(mask), weights["4.weight"], weights["4.bias"]).sum().backward()
        for key, ours in zip(keys, found, strict=True):
            np.testing.assert_allclose(ours, weights[key].grad.numpy(), rtol=1e-4, atol=1e-5)
        assert {k: p.weights.array(k).tobytes() for k in state} == state  # backward counted no batch
        assert run.value(dropped).to_numpy().tobytes() == after.tobytes()
    with p.edit("turned") as e:
        e.insert(p.in_edges(dropped)[0], "neg")
    with pytest.raises(StaleRun, match="turned"):
        run.grad(out, keys)


# -- two heads ---------------------------------------------------------------------------------------------------------
class TwoHeads(nn.Module):
    """A trunk with a parameter above a parameter (`scale` multiplies the weight), and two heads."""

    def __init__(self) -> None:
        gw.manual_seed(2)
        self.trunk, self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(5, 2)
        self.scale = nn.Parameter(gw.tensor(np.full((5, 1), 1.5, np.float32)))

    def features(self, x: Tensor) -> Tensor:
        return F.linear(x, self.trunk.weight * self.scale, self.trunk.bias).tanh()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.a(h), self.b(h)


def test_unused_head_has_no_gradient():
    net, alone = TwoHeads(), TwoHeads()
    net(gw.tensor(X))[0].sum().backward()
    alone.a(alone.features(gw.tensor(X))).sum().backward()
    assert net.b.weight.grad is None
    bias: Any = net.b.bias
    assert bias.grad is None
    for name in ("weight", "bias"):
        np.testing.assert_allclose(gradient(getattr(net.trunk, name)), gradient(getattr(alone.trunk, name)), rtol=1e-6)
    np.testing.assert_allclose(gradient(net.scale), gradient(alone.scale), rtol=1e-6)
    w, s = (torch.tensor(p.numpy(), requires_grad=True) for p in (net.trunk.weight, net.scale))
    bias = net.trunk.bias
    h = torch.nn.functional.linear(torch.tensor(X), w * s, torch.tensor(bias.numpy())).tanh()
    torch.nn.functional.linear(h, torch.tensor(net.a.weight.numpy())).sum().backward()
    np.testing.assert_allclose(gradient(net.scale), np.asarray(s.grad), rtol=1e-5)
    np.testing.assert_allclose(gradient(net.trunk.weight), np.asarray(w.grad), rtol=1e-5, atol=1e-7)


def test_retained_tape_accumulates_and_freed_tape_raises():
    net = TwoHeads()
    loss = net(gw.tensor(X))[0].sum()
    loss.backward(retain_graph=True)
    once = {name: gradient(p).copy() for name, p in net.named_parameters() if p.grad is not None}
    loss.backward()
    for name, p in net.named_parameters():
        if name in once:
            np.testing.assert_allclose(gradient(p), 2 * once[name], rtol=1e-6)
    with pytest.raises(GraphFreed):
        loss.backward()


# -- what is cut off ---------------------------------------------------------------------------------------------------
def nets() -> tuple[Any, Any]:
    gw.manual_seed(3)
    return (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)),
            nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))  # fmt: skip


@pytest.mark.parametrize("cut", ["detach", "scale_gradient"])
def test_discriminator_step_gives_the_generator_no_gradient(cut):
    """The seal of a tape (`detach`) and a gradient times 0 give the discriminator the same gradient."""
    generator, discriminator = nets()
    noise = gw.tensor(rng.normal(size=(16, 2)).astype(np.float32))
    made = generator(noise)
    fake = made.detach() if cut == "detach" else gw.ops.call("scale_gradient", made, scale=0.0)
    F.binary_cross_entropy_with_logits(discriminator(fake), gw.zeros(16, 1)).backward()
    for p in generator.parameters():
        assert p.grad is None if cut == "detach" else (gradient(p) == 0).all()
    wanted = [gradient(p).copy() for p in discriminator.parameters()]
    for p in discriminator.parameters():
        p.grad = None
    F.binary_cross_entropy_with_logits(discriminator(gw.tensor(made.numpy())), gw.zeros(16, 1)).backward()
    for p, ours in zip(discriminator.parameters(), wanted, strict=True):
        np.testing.assert_array_equal(gradient(p), ours)


def test_old_policy_probabilities_are_detached():
    policy, _ = nets()
    x, act = gw.tensor(X[:, :2]), np.array([0, 1, 1, 0, 1, 0])

    def log_probability() -> Tensor:
        return (policy(x).log_softmax(-1) * gw.tensor(np.eye(2, dtype=np.float32)[act])).sum(-1)

    with gw.no_grad():
        old = log_probability()
    assert memory(old) == []  # no byte is held for a backward pass
    ratio = (log_probability() - old).exp()
    assert sum(k.nbytes for k in memory(ratio)) > 0
    ratio.sum().backward()
    kept = [gradient(p).copy() for p in policy.parameters()]
    for p in policy.parameters():
        p.grad = None
    log_probability().sum().backward()  # at ratio 1 the slope is that of the logarithm
    for p, ours in zip(policy.parameters(), kept, strict=True):
        np.testing.assert_allclose(gradient(p), ours, rtol=1e-5, atol=1e-6)


def test_the_flag_is_restored_after_an_exception():
    def failing() -> None:
        with gw.no_grad():
            assert not is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert is_grad_enabled()


def test_scoring_records_no_tape(monkeypatch):
    from graphwright.autograd import apply

    made: list[Any] = []
    native = apply.TapeNode
    monkeypatch.setattr(apply, "TapeNode", lambda *a: made.append(1) or native(*a))

    def fitness(program: Any) -> float:
        return float(program.run(x=X[:4, :2], keep="outputs")["y"].to_numpy().sum())

    task = ev.Task(X[:4, :2], [0, 1, 1, 0], fitness=fitness, split="same")
    ev.Evolution(task, None, ev.NEAT(population=3), seed=0).run(1, target=9e9)
    b = gw.Builder()
    b.output(b.linear(b.input("x", ("B", 2)), b.param("w", np.zeros((1, 2), np.float32))), "y")
    p, moons = b.build(), ev.tasks.two_moons(60)
    train.measure(moons, p, moons.valid)
    assert not made
    p(x=gw.tensor(X[:, :2]))
    assert made  # as a Tensor it would have kept one


# -- losses ------------------------------------------------------------------------------------------------------------
def test_a_loss_inside_a_graph_propagates_its_gradient():
    scores, targets = rng.normal(size=(5, 3)).astype(np.float32), gw.tensor(np.array([0, 2, 1, 1, 0]))
    found = []
    for times in (1.0, 7.0):
        x = gw.tensor(scores, requires_grad=True)
        (F.cross_entropy(x, targets) * times).backward()
        found.append(gradient(x))
    np.testing.assert_allclose(found[1], 7 * found[0], rtol=1e-6)


def test_large_logits_train_and_predict():
    x = gw.tensor(np.array([[1000, -1000, 0], [-1000, 1000, 1000]], np.float32), requires_grad=True)
    loss = F.cross_entropy(x, gw.tensor(np.array([1, 1])))
    loss.backward()
    assert loss.item() == pytest.approx((2000 + np.log(2)) / 2)
    # of the saved logarithm of the sum, which at 1000 is rounded to 6e-5
    np.testing.assert_allclose(gradient(x), [[0.5, -0.5, 0], [0, -0.25, 0.25]], atol=2e-5)
    large = np.float32(1000) * np.eye(3, dtype=np.float32)
    task = ev.Task(large, [0, 1, 2], "cross_entropy", split="same", target=9.0)
    result: Any = ev.Evolution(task, None, ev.Hybrid(population=2), seed=0).run(2)
    assert np.isfinite(result.best.fitness)
    p = result.predict(large)
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("loss", ["bce", "cross_entropy", "mse"])
def test_training_is_on_logits_and_predictions_are_probabilities(loss):
    task = ev.Task(X, [0, 1, 2, 1, 0, 2] if loss != "bce" else [0, 1, 0, 1, 0, 1], loss, split="same", target=9.0)
    result: Any = ev.Evolution(task, None, ev.Hybrid(population=3), seed=0).run(2)
    logits = result.best.program.run(x=X)["y"].to_numpy().astype(float)
    wanted = {"mse": logits, "bce": 1 / (1 + np.exp(-logits)),
              "cross_entropy": np.exp(logits) / np.exp(logits).sum(1, keepdims=True)}[loss]  # fmt: skip
    for found in (result.predict(X), result.best.predict(X)):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    b = gw.Builder()
    w = b.param("w", rng.normal(size=(task.outputs, 3)).astype(np.float32))
    b.output(b.linear(b.input("x", ("B", 3)), w, name="out"), "y")
    layers: Any = ev.Evolution(task, ev.blocks(b.build()), ev.Layers(population=2, steps=1), seed=0).run(1)
    logits = layers.best.program.run(x=X)["y"].to_numpy().astype(float)
    wanted = {"mse": logits, "bce": 1 / (1 + np.exp(-logits)),
              "cross_entropy": np.exp(logits) / np.exp(logits).sum(1, keepdims=True)}[loss]  # fmt: skip
    np.testing.assert_allclose(layers.predict(X), wanted, rtol=1e-5, atol=1e-6)


def test_predictions_take_unscaled_inputs():
    x = X * 50 + 200
    task = ev.Task(x, x[:, 0] > 200, split="same", scaled=True, target=9.0)
    result: Any = ev.Evolution(task, None, ev.Hybrid(population=3), seed=0).run(2)
    seen = result.best.program.run(x=(x - task.scale[0]) / task.scale[1])["y"].to_numpy()
    np.testing.assert_allclose(result.predict(x), 1 / (1 + np.exp(-seen)), rtol=1e-4)
