"""Edits of experts: results against models that were made without, or with, the experts; undo and replay."""

from __future__ import annotations

import json

import numpy as np
import pytest
from moe import EXPERTS, K, Model, ids, logits, program

import graphwright as gw
from graphwright import experts as ex
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.optim import AdamW
from graphwright.program.editing.replay import replay
from graphwright.program.errors import EmptyAxis
from graphwright.program.program import Program
from values import parameter_of

LAYER = "layers.0.mlp"


def rebuilt(p: Program, kept: dict[str, list[int]], **options) -> np.ndarray:
    """Logits of a new model with the listed experts of each layer, with the program's weights."""
    model = Model(**options).to("float64")
    for number, layer in enumerate(model.layers):
        chosen = kept.get(f"layers.{number}.mlp", list(range(len(layer.mlp.experts))))
        layer.mlp = gw.nn.MoE(12, 8, len(chosen), options.get("k", K)).to("float64")
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = ".".join(parts[:3])
        if "experts" in parts and layer in kept:
            value = p.weights[".".join([*parts[:4], str(kept[layer][int(parts[4])]), *parts[5:]])].numpy()
        elif "router" in parts and layer in kept:
            value = p.weights[name].numpy()[kept[layer]]
        else:
            value = p.weights[name].numpy()
        parameter.assign(Tensor(gw.array.from_numpy(value.copy())))
    return model(gw.tensor(ids()))["logits"].numpy()


def test_routed_layers_are_found_with_their_parts():
    p = program()
    layers = ex.routed_layers(p)
    assert list(layers) == ["layers.0.mlp", "layers.1.mlp"]
    found = layers[LAYER]
    assert (found.size, found.k) == (EXPERTS, K)
    assert [p.path(n) for n in found.params(3)] == [f"{LAYER}.experts.3.{n}.weight" for n in ("gate", "up", "down")]
    assert found.router is not None
    assert p.path(found.router) == f"{LAYER}.router.weight"
    assert p.op(found.logits.node) == "linear"
    with pytest.raises(ex.NotAMixture, match=r"layers\.0\.mlp"):
        ex.routed_layer(p, "layers.7.mlp")
    with pytest.raises(ex.NotAMixture):
        ex.routed_layers(gw.trace(gw.nn.Linear(3, 4), np.zeros((2, 3), np.float32)))


@pytest.mark.parametrize("gone", [[0], [4], [1, 3]])
def test_a_cut_expert_equals_a_model_made_without_it(gone):
    p = program()
    digest, before = p.hash(), logits(p)
    with p.edit("cut") as e:
        e.cut_units(p.axes()[f"{LAYER}.experts"].units(gone))
    left = [i for i in range(EXPERTS) if i not in gone]
    np.testing.assert_allclose(logits(p), rebuilt(p.at(-1), {LAYER: left}), rtol=1e-9, atol=1e-12)
    plan = p.compile(ids=ids())
    np.testing.assert_allclose(np.asarray(plan({"ids": ids()})["logits"]), logits(p), rtol=1e-9, atol=1e-12)
    p.undo()
    assert p.hash() == digest
    np.testing.assert_array_equal(logits(p), before)


def test_an_expert_of_a_program_with_padding_is_cut():
    rng = np.random.default_rng(0)
    x, valid = rng.normal(size=(20, 6)), np.arange(20) % 3 > 0
    m = gw.nn.MoE(6, 4, 5, 2, seed=0).to("float64")
    p, given = gw.trace(m, x, valid), {"x": x, "valid": valid}
    (name,) = ex.routed_layers(p)
    assert (ex.routed_layer(p, name).size, ex.routed_layer(p, name).k) == (5, 2)

    def cut(q: Program) -> np.ndarray:
        with q.edit("cut") as e:
            e.cut_units(ex.routed_layer(q, name).axis.units([1, 4]))
        made = q.run({k: given[k] for k in q.input_names()})["out"].to_numpy()
        q.undo()
        return made

    made = cut(p)
    np.testing.assert_allclose(made[valid], cut(gw.trace(m, x))[valid], rtol=0, atol=1e-12)
    assert not made[~valid].any()


def test_a_cut_and_its_undo_keep_the_moments_of_the_others():
    p = program("float32")
    optimizer = AdamW(p, lr=1e-2)

    def loss(logits, targets):
        return gw.nn.functional.cross_entropy(logits, targets, dim=-1)

    train = gw.compile_step(p, loss, optimizer, {"ids": ids(), "targets": ids(seed=1)})
    for seed in range(3):
        train(ids=ids(seed=seed), targets=ids(seed=seed + 1))
    names = [f"{LAYER}.experts.{i}.up.weight" for i in range(EXPERTS)]
    moments = {n: optimizer.state_of(parameter_of(p, n)).moments["m"].numpy().copy() for n in names}
    values = {n: p.weights[n].numpy().copy() for n in names}
    with p.edit("cut") as e:
        e.cut_units(p.axes()[f"{LAYER}.experts"].units([2]))
    assert names[2] not in p.weights
    for n in (n for n in names if n in p.weights):
        np.testing.assert_array_equal(optimizer.state_of(parameter_of(p, n)).moments["m"].numpy(), moments[n])
    train(ids=ids(seed=5), targets=ids(seed=6))
    p.undo()
    assert p.weights[names[2]].numpy().tobytes() == values[names[2]].tobytes()
    np.testing.assert_array_equal(optimizer.state_of(parameter_of(p, names[2])).moments["m"].numpy(), moments[names[2]])
    train(ids=ids(seed=5), targets=ids(seed=6))
    assert p.weights[names[2]].numpy().tobytes() != values[names[2]].tobytes()


def test_experts_are_reordered_without_effect():
    p = program()
    before, digest = logits(p), p.hash()
    with p.edit("reorder") as e:
        e.permute(f"{LAYER}.experts", [3, 0, 4, 1, 2])
    np.testing.assert_allclose(logits(p), before, rtol=1e-12, atol=1e-14)
    found = ex.routed_layer(p, LAYER)
    assert p.path(found.params(0)[0]) == f"{LAYER}.experts.3.gate.weight"
    p.undo()
    assert p.hash() == digest


@pytest.mark.parametrize("like", [None, 2])
def test_a_gated_expert_changes_nothing_and_an_open_one_equals_a_larger_model(like):
    p = program()
    before, digest = logits(p), p.hash()
    with p.edit("gated") as e:
        number = ex.add(e, LAYER, like, birth="gate")
    assert number == EXPERTS
    np.testing.assert_allclose(logits(p), before, rtol=0, atol=1e-6)
    p.undo()
    assert p.hash() == digest
    with p.edit("open") as e:
        ex.add(e, LAYER, like, birth="open")
    assert ex.routed_layer(p, LAYER).size == EXPERTS + 1
    model = Model().to("float64")
    model.layers[0].mlp = gw.nn.MoE(12, 8, EXPERTS + 1, K).to("float64")
    for name, parameter in model.named_parameters():
        parameter.assign(Tensor(gw.array.from_numpy(p.weights[name].numpy().copy())))
    np.testing.assert_allclose(logits(p), model(gw.tensor(ids()))["logits"].numpy(), rtol=1e-9, atol=1e-12)
    if like is not None:
        for n in ("gate", "up", "down"):
            np.testing.assert_array_equal(p.weights[f"{LAYER}.experts.5.{n}.weight"].numpy(),
                                          p.weights[f"{LAYER}.experts.2.{n}.weight"].numpy())  # fmt: skip
    p.undo()
    assert p.hash() == digest


@pytest.mark.parametrize("like", [None, 2])
def test_a_closed_expert_of_a_threshold_router_is_dead_until_it_is_switched_on(like):
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("f4")
    m = gw.nn.Sequential(gw.nn.Residual(ex.DynMoE(6, 4, 5, 2, name="m.", seed=0)))
    ex.calibrate(m, gw.tensor(x), 2)
    p = gw.trace(m, gw.tensor(x))
    (name,) = ex.routed_layers(p)
    (router,) = ex.threshold_routers(p)
    before, digest = np.asarray(p.run({"x": x})["out"]), p.hash()
    with p.edit("one more") as e:
        assert ex.add(e, name, like, birth="closed") == 5
    assert p.weights.array(router.alive).to_numpy().tolist() == [True] * 5 + [False]
    np.testing.assert_array_equal(np.asarray(p.run({"x": x})["out"]), before)
    with p.edit("on") as e:
        ex.set_alive(e, name, [5])
    found = p.run({"x": x})
    mask = found.value(router.value("mask")).to_numpy()
    assert mask[:, 5].any()
    if like is not None:
        np.testing.assert_array_equal(mask[:, 5] & ~mask[:, like], False)
    p.undo(2)
    assert p.hash() == digest


@pytest.mark.parametrize("like", [None, 1])
def test_an_open_expert_moves_results_towards_its_own_by_its_weight(like):
    """y' - y = w'(f_e - y), for weights that are divided by their sum, where no other expert is left out."""
    p = program(layers=1, k=EXPERTS)
    found = ex.routed_layer(p, LAYER)
    before = p.run({"ids": ids()}).value(found.node).to_numpy()
    with p.edit("open") as e:
        number = ex.add(e, LAYER, like, birth="open")
        ex.set_k(e, LAYER, EXPERTS + 1)
    run, found = p.run({"ids": ids()}), ex.routed_layer(p, LAYER)
    choice, weights = run.value(found.choice).to_numpy(), run.value(found.weights).to_numpy()
    share = weights[choice == number][:, None]
    x = run.value(found.tokens).to_numpy()
    gate, up, down = (p.weights[f"{LAYER}.experts.{number}.{n}.weight"].numpy() for n in ("gate", "up", "down"))
    a = x @ gate.T
    own = (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(run.value(found.node).to_numpy() - before, share * (own - before), rtol=0, atol=1e-12)


def test_a_clone_is_exact_where_a_token_uses_one_expert_and_weights_are_normalised():
    p = program(k=1)
    before = logits(p)
    with p.edit("clone") as e:
        ex.clone(e, LAYER, 2)
    np.testing.assert_allclose(logits(p), before, rtol=0, atol=1e-12)
    two = program(k=2)
    before = logits(two)
    with two.edit("clone") as e:
        ex.clone(e, LAYER, 2)
    assert np.abs(logits(two) - before).max() > 1e-3  # equal rows are two of the k


def test_weights_that_are_not_normalised_grow_by_the_share_that_was_cut():
    """p_i / Σ over the rest = p_i / (1 - p_e), for tokens that did not choose e."""
    p = program(layers=1, normalize=False)
    found = ex.routed_layer(p, LAYER)
    run = p.run({"ids": ids()})
    choice, before = run.value(found.choice).to_numpy(), run.value(found.node).to_numpy()
    logit = run.value(found.logits).to_numpy()
    share = np.exp(logit) / np.exp(logit).sum(-1, keepdims=True)
    with p.edit("cut") as e:
        e.cut_units(found.axis.units([3]))
    after = p.run({"ids": ids()}).value(ex.routed_layer(p, LAYER).node).to_numpy()
    without = ~(choice == 3).any(1)
    assert without.any()
    np.testing.assert_allclose(after[without], before[without] / (1 - share[without, 3:4]), rtol=1e-10)


def test_a_cut_is_recorded_in_less_than_a_kilobyte():
    p = program()
    with p.edit("cut") as e:
        e.cut_units(p.axes()[f"{LAYER}.experts"].units([3]))
    assert len(json.dumps(list(p.journal[-1].edits), separators=(",", ":"))) < 1024


def test_a_copy_shares_memory_until_one_of_both_is_trained():
    p = program("float32")
    with p.edit("clone") as e:
        ex.clone(e, LAYER, 1)
    old, new = (p.weights[f"{LAYER}.experts.{i}.up.weight"] for i in (1, 5))
    assert old.data.storage is new.data.storage
    before = old.numpy().copy()
    new.assign(Tensor(gw.array.from_numpy(before + 1)))
    np.testing.assert_array_equal(old.numpy(), before)


def test_a_split_parts_the_tokens_of_an_expert():
    """With one expert per token, results move for tokens near a tie only, and both copies get tokens."""
    p = program(k=1)
    before, tokens = logits(p), ids(64, 12, seed=3)
    whole = ex.usage(p, {"ids": tokens})
    busy = int(np.argmax(whole[LAYER].count))
    with p.edit("split") as e:
        second = ex.split(e, LAYER, busy, tokens=ex.expert_tokens(p, LAYER, busy, {"ids": tokens}))
    use = ex.usage(p, {"ids": tokens})[LAYER]
    parts = use.count[[busy, second]]
    assert abs(int(parts.sum()) - int(whole[LAYER].count[busy])) <= 0.05 * whole[LAYER].count[busy]
    assert parts.min() > 0.2 * parts.sum()
    equal = np.isclose(logits(p), before, atol=1e-6).all(axis=-1)
    assert equal.mean() > 0.9


def test_merging_an_expert_with_its_permuted_copy_gives_it_back():
    p = program()
    order = np.random.default_rng(0).permutation(8)
    with p.edit("a permuted copy") as e:
        number = ex.clone(e, LAYER, 1)
        for n in ("gate", "up"):
            e.set_weight(f"{LAYER}.experts.{number}.{n}.weight", lambda w: w[order])
        e.set_weight(f"{LAYER}.experts.{number}.down.weight", lambda w: w[:, order])
    before = logits(p)
    old = {n: p.weights[f"{LAYER}.experts.1.{n}.weight"].numpy().copy() for n in ("gate", "up", "down")}
    with p.edit("merge") as e:
        assert ex.merge(e, LAYER, [1, number]) == 1
    for n, value in old.items():
        np.testing.assert_allclose(p.weights[f"{LAYER}.experts.1.{n}.weight"].numpy(), value, rtol=1e-12)
    assert ex.routed_layer(p, LAYER).size == EXPERTS
    p.undo()
    np.testing.assert_array_equal(logits(p), before)
    with p.edit("merge without matching neurons") as e:
        ex.merge(e, LAYER, [1, number], align=False)
    assert not np.allclose(p.weights[f"{LAYER}.experts.1.up.weight"].numpy(), old["up"])


def test_matched_neurons_merge_related_experts_with_less_error():
    """20 pairs of experts that are near each other but for the order of their neurons."""
    rng, errors = np.random.default_rng(0), []
    for seed in range(20):
        p = program("float32", layers=1, seed=seed, k=1)
        order = rng.permutation(8)
        with p.edit("a permuted relative") as e:
            for n in ("gate", "up", "down"):
                w = p.weights[f"{LAYER}.experts.0.{n}.weight"].numpy()
                near = w + 0.1 * w.std() * rng.normal(size=w.shape)
                e.set_weight(f"{LAYER}.experts.1.{n}.weight", near[:, order] if n == "down" else near[order])
        x = rng.normal(size=(50, 12)).astype("f4")

        def out(q: Program, i: int, x: np.ndarray) -> np.ndarray:
            gate, up, down = (q.weights[f"{LAYER}.experts.{i}.{n}.weight"].numpy() for n in ("gate", "up", "down"))
            a = x @ gate.T
            return (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T

        wanted = (out(p, 0, x) + out(p, 1, x)) / 2
        row = []
        for align in (True, False):
            q = p.fork()
            with q.edit("merge") as e:
                ex.merge(e, LAYER, [0, 1], align=align)
            row.append(np.linalg.norm(out(q, 0, x) - wanted) / np.linalg.norm(wanted))
        errors.append(row)
    aligned, unaligned = np.array(errors).T
    assert (aligned < unaligned).all()
    assert aligned.max() < 0.1


def test_merged_weights_and_router_rows_are_averaged_by_use():
    p = program()
    use = ex.usage(p, {"ids": ids(32, 12)})
    count = use[LAYER].count[[0, 3]].astype(float)
    w = {n: p.weights[n].numpy().copy() for n in p.weights}
    with p.edit("merge") as e:
        ex.merge(e, LAYER, [0, 3], by=use, align=False)
    share = count / count.sum()
    for n in ("gate", "up", "down"):
        first, second = (w[f"{LAYER}.experts.{i}.{n}.weight"] for i in (0, 3))
        wanted = share[0] * first + share[1] * second
        np.testing.assert_allclose(p.weights[f"{LAYER}.experts.0.{n}.weight"].numpy(), wanted, rtol=1e-7)
    rows = w[f"{LAYER}.router.weight"]
    np.testing.assert_allclose(p.weights[f"{LAYER}.router.weight"].numpy(),
                               np.stack([share @ rows[[0, 3]], rows[1], rows[2], rows[4]]), rtol=1e-7)  # fmt: skip


def test_k_is_set_and_experts_are_frozen():
    p = program()
    with p.edit("k") as e:
        ex.set_k(e, "all", 3)
    np.testing.assert_allclose(logits(p), rebuilt(p, {}, k=3), rtol=1e-9, atol=1e-12)
    with p.edit("freeze") as e:
        ex.freeze(e, LAYER, [1])
    assert f"{LAYER}.experts.1.up.weight" not in [v.name for v in p.parameters()]
    with p.edit("thaw") as e:
        ex.freeze(e, LAYER, [1], frozen=False)
    assert f"{LAYER}.experts.1.up.weight" in [v.name for v in p.parameters()]


def test_levels_are_equal_numbers_of_experts():
    p = program()
    with p.edit("one less") as e:
        e.cut_units(p.axes()[f"{LAYER}.experts"].units([0]))
    use = ex.usage(p, {"ids": ids(16, 12)})
    with p.edit("level") as e:
        ex.level(e, 3, use)
    assert [layer.size for layer in ex.routed_layers(p).values()] == [3, 3]


def test_edits_are_replayed_on_a_fork():
    p = program()
    other = p.fork()
    with p.edit("several") as e:
        ex.clone(e, LAYER, 1)
        e.cut_units(p.axes()["layers.1.mlp.experts"].units([0, 2]))
    replay(p, onto=other)
    assert other.hash() == p.hash()
    np.testing.assert_array_equal(logits(other), logits(p))


def test_refused_edits_change_nothing():
    p = program()
    digest, entries = p.hash(), len(p.journal)
    with pytest.raises(ex.TooFewExperts), p.edit("k") as e:
        ex.set_k(e, "all", EXPERTS + 1)
    with pytest.raises(UsageError, match="2"), p.edit("cut") as e:
        e.cut_units(p.axes()[f"{LAYER}.experts"].units([0, 1, 2, 3]))
    with pytest.raises(EmptyAxis), p.edit("cut") as e:
        e.cut_units(p.axes()[f"{LAYER}.experts"].units())
    with pytest.raises(UsageError, match="0 to 4"), p.edit("clone") as e:
        ex.clone(e, LAYER, 9)
    with pytest.raises(UsageError, match="gate or open"), p.edit("add") as e:
        ex.add(e, LAYER, birth="closed")
    with pytest.raises(ex.TooFewExperts), p.edit("merge") as e:
        ex.merge(e, LAYER, [0, 1, 2, 3, 4])
    (edge,) = [x for x in p.in_edges(ex.routed_layer(p, LAYER).node) if p.edge_port(x) == 6]
    with pytest.raises(UsageError, match="group of operands"), p.edit("half an expert") as e:
        e.cut(edge)
    assert p.hash() == digest
    assert len(p.journal) == entries


def test_neurons_of_one_expert_are_cut_and_added():
    """Experts of a layer may have different widths; a neuron whose matrices are zero is cut without effect."""
    p = program()
    before, digest, axis = logits(p), p.hash(), f"{LAYER}.experts.1.neurons"
    with p.edit("two neurons without effect") as e:
        e.set_weight(f"{LAYER}.experts.1.down.weight", lambda w: np.where(np.isin(np.arange(8), [2, 5]), 0, w))
    masked = logits(p)
    with p.edit("cut") as e:
        e.cut_units(p.axes()[axis].units([2, 5]))
    assert p.weights[f"{LAYER}.experts.1.gate.weight"].shape == (6, 12)
    assert p.weights[f"{LAYER}.experts.0.gate.weight"].shape == (8, 12)
    np.testing.assert_allclose(logits(p), masked, rtol=0, atol=1e-10)
    plan = p.compile(ids=ids())
    np.testing.assert_allclose(np.asarray(plan({"ids": ids()})["logits"]), logits(p), rtol=1e-9, atol=1e-12)
    p.undo(2)
    assert p.hash() == digest
    for init in ("zero_out", "duplicate"):
        with p.edit("grow") as e:
            e.grow(axis, 3, init)
        assert p.weights[f"{LAYER}.experts.1.down.weight"].shape == (12, 11)
        np.testing.assert_allclose(logits(p), before, rtol=0, atol=1e-10)
        p.undo()
