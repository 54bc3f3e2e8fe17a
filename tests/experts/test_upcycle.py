"""Dense MLPs as mixtures: equal results at birth, copies that part in training, and back."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.errors import UsageError
from graphwright.models.model import Model
from graphwright.optim import AdamW

TEXT = "The following table lists the operators of the language."


class Net(nn.Module):
    """An MLP without a gate, with biases."""

    def __init__(self) -> None:
        self.first = nn.Linear(5, 8)
        self.act, self.last = nn.GELU(), nn.Linear(8, 5)

    def forward(self, x):
        return x + self.last(self.act(self.first(x)))


@pytest.fixture
def model() -> Model:
    return gw.open("bundled")


def test_mlps_are_found(model):
    assert list(ex.dense_mlps(model.program)) == [f"layers.{i}.mlp" for i in range(4)]
    found = ex.dense_mlps(gw.trace(Net(), np.zeros((2, 5), np.float32)))
    assert [mlp.attrs for mlp in found.values()] == [{"kind": "mlp", "act": "gelu", "bias": True}]


def test_an_upcycled_model_has_equal_logits_and_shares_memory(model):
    p, before, digest = model.program, model.logits(TEXT), model.program.hash()
    assert ex.upcycle(model, 4, 2) is model
    assert np.abs(model.logits(TEXT) - before).max() <= 1e-5 * np.abs(before).max()
    assert [layer.size for layer in ex.routed_layers(p).values()] == [4] * 4
    arrays = [p.weights[p.key(n)].data for n in ex.routed_layer(p, "layers.1.mlp").params(0)]
    others = [p.weights[p.key(n)].data for n in ex.routed_layer(p, "layers.1.mlp").params(3)]
    assert all(a.storage is b.storage for a, b in zip(arrays, others, strict=True))
    assert not p.select("layers.*.mlp.up.weight").nodes
    assert len(p.journal) == 1
    p.undo()
    assert p.hash() == digest


def test_a_threshold_router_leaves_logits_equal_and_is_calibrated_on_a_model(model):
    p, before, digest = model.program, model.logits(TEXT), model.program.hash()
    ex.upcycle(model, 6, 2, router="threshold")
    assert np.abs(model.logits(TEXT) - before).max() <= 1e-5 * np.abs(before).max()
    routers = ex.threshold_routers(p)
    assert [r.path for r in routers] == [f"layers.{i}.mlp.router" for i in range(4)]
    assert routers[1].prototypes[4] == "model.layers.1.mlp.experts.4.prototype"
    assert [layer.size for layer in ex.routed_layers(p).values()] == [6] * 4
    ids = model.tokenizer.encode(TEXT * 8)
    found = ex.calibrate(model, np.array(ids)[None], k0=2)
    assert [row.router for row in found.layers] == [r.path for r in routers]
    use = ex.usage(model, np.array(ids)[None])
    for row, (name, u) in zip(found.layers, use.layers.items(), strict=True):
        assert row.router == f"{name}.router"
        assert u.mean_k == pytest.approx(2, rel=0.05)
        assert (row.unrouted, row.mean * (1 - row.unrouted)) == (pytest.approx(u.unrouted), pytest.approx(u.mean_k))
    assert p.journal[-1].author == "pass"
    assert np.abs(model.logits(TEXT) - before).max() <= 1e-5 * np.abs(before).max()
    with p.edit("five experts of another kind") as e:
        for i in range(1, 6):
            e.set_weight(f"layers.0.mlp.experts.{i}.up.weight", lambda w: 0 * w)
    by_text = ex.calibrate(model, TEXT * 8, k0=2)
    assert by_text.to_json() == ex.calibrate(p, {"ids": np.array(ids)[None], "positions": np.arange(len(ids))[None]},
                                             k0=2).to_json()  # fmt: skip
    assert by_text.to_json() != found.to_json()
    p.undo(5)
    assert p.hash() == digest
    with pytest.raises(UsageError, match="topk"):
        ex.upcycle(model, 4, router="hash")


@pytest.mark.parametrize("compute", ["bfloat16", "float64"])
def test_a_threshold_router_computes_in_float32_or_wider(compute):
    model = gw.open("bundled", compute=compute)
    before = model.logits(TEXT)
    ex.upcycle(model, 4, 2, layers="layers.1.mlp", router="threshold")
    kind = model.program.spec("layers.1.mlp.router.cosine").dtype.name
    assert kind == ("float32" if compute == "bfloat16" else compute)
    assert np.abs(model.logits(TEXT) - before).max() <= (2e-2 if compute == "bfloat16" else 1e-6) * np.abs(before).max()


def test_one_layer_without_a_gate_is_upcycled():
    p = gw.trace(Net().to("float64"), x := np.random.default_rng(0).normal(size=(7, 5)))
    feeds = dict.fromkeys(p.input_names(), x)
    before = p.run(feeds, keep="outputs")["out"].to_numpy()
    (name,) = ex.dense_mlps(p)
    ex.upcycle(p, 3, 2, layers=name)
    np.testing.assert_allclose(p.run(feeds, keep="outputs")["out"].to_numpy(), before, rtol=1e-12, atol=1e-13)
    with p.edit("back") as e:
        ex.to_mlp(e, name)
    np.testing.assert_allclose(p.run(feeds, keep="outputs")["out"].to_numpy(), before, rtol=1e-12, atol=1e-13)
    assert not p.of_traits(mixture=True)


def test_an_upcycled_model_becomes_the_dense_model_again(model):
    p, before = model.program, model.logits(TEXT)
    paths = {p.path(n) for n in p.nodes()}
    ex.upcycle(model, 3, 2)
    with p.edit("back") as e:
        for name in ex.routed_layers(p):
            ex.to_mlp(e, name)
    assert np.abs(model.logits(TEXT) - before).max() <= 1e-5 * np.abs(before).max()
    assert {p.path(n) for n in p.nodes()} == paths
    assert sorted(p.weights) == sorted(model.original.weights)


def test_copies_part_in_training_and_the_router_starts_without_a_gradient():
    gw.manual_seed(0)
    p = gw.trace(Net(), x := np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32))
    (name,) = ex.dense_mlps(p)
    ex.upcycle(p, 4, 2, layers=name, std=0.5)
    layer, target = ex.routed_layer(p, name), np.sin(3 * x)
    assert layer.router is not None
    router = p.weights[p.key(layer.router)]
    (given,) = p.input_names()

    def loss(out, target):
        return ((out - target) ** 2).mean()

    loss(p(**{given: gw.tensor(x)})["out"], gw.tensor(target)).backward()
    grads = [p.weights[p.key(n)].grad for n in layer.params(0)]
    assert router.grad is not None
    assert np.abs(router.grad.numpy()).max() <= 1e-6 * max(np.abs(g.numpy()).max() for g in grads if g is not None)
    train = gw.compile_step(p, loss, AdamW(p, lr=1e-2), {given: x, "target": target})
    for _ in range(50):
        train({given: x, "target": target})
    ups = [p.weights[p.key(layer.params(i)[0])].numpy() for i in range(4)]
    assert min(np.abs(a - b).max() for i, a in enumerate(ups) for b in ups[:i]) > 1e-4


def test_experts_of_equal_models_assemble_to_the_model(model):
    made = ex.assemble([model, gw.open("bundled"), gw.open("bundled")], k=2)
    before = model.logits(TEXT)
    assert np.abs(made.logits(TEXT) - before).max() <= 1e-5 * np.abs(before).max()
    other = gw.open("bundled")
    with other.edit("another model") as e:
        e.set_weight("layers.0.mlp.up.weight", lambda w: 2 * w)
        e.set_weight("layers.0.attn.q.weight", lambda w: 3 * w)
    mixed = ex.assemble([model, other], k=1, average=True)
    w = mixed.program.weights
    key = {mixed.program.path(n): mixed.program.key(n) for n in mixed.program.params()}
    up = [w[key[f"layers.0.mlp.experts.{i}.up.weight"]].numpy() for i in range(2)]
    np.testing.assert_allclose(up[1], 2 * up[0], rtol=1e-2)
    q = model.program.weights[key["layers.0.attn.q.weight"]].numpy()
    np.testing.assert_allclose(w[key["layers.0.attn.q.weight"]].numpy(), 2 * q, rtol=1e-2)


def test_unknown_layers_and_numbers_are_refused(model):
    with pytest.raises(ex.NotAMixture, match=r"layers\.0\.mlp"):
        ex.upcycle(model, 4, layers="layers.9.mlp")
    with pytest.raises(ex.TooFewExperts):
        ex.upcycle(model, 4, 5)
    assert not len(model.program.journal)
