"""Use and scores of experts: figures counted again in numpy, effects against programs from which experts were cut."""

from __future__ import annotations

import json

import numpy as np
import pytest
from moe import EXPERTS, K, ids, logits, program

import graphwright as gw
from graphwright import experts as ex
from graphwright.errors import UsageError
from graphwright.program.program import Program
from graphwright.surgery.calibration import Calibration, MissingCalibration

LAYER = "layers.1.mlp"
DATA = {"ids": ids(12, 10, seed=2)}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def recounted(p: Program) -> dict[str, np.ndarray]:
    """The figures of a layer, token by token."""
    run = p.run(DATA)
    found = ex.routed_layer(p, LAYER)
    x = run.value(found.tokens).to_numpy()
    w = {n: p.weights[n].numpy() for n in p.weights if n.startswith(LAYER)}
    logits = x @ w[f"{LAYER}.router.weight"].T
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    keys = ("count", "weight", "output", "reap", "contribution")
    sums = {key: np.zeros(EXPERTS) for key in keys} | {"together": np.zeros((EXPERTS, EXPERTS))}
    for token, score in zip(x, scores, strict=True):
        chosen = np.argsort(-score, kind="stable")[:K]
        share = score[chosen] / score[chosen].sum()
        gate, up, down = ([w[f"{LAYER}.experts.{e}.{n}.weight"] for e in chosen] for n in ("gate", "up", "down"))
        made = [d @ (silu(g @ token) * (u @ token)) for g, u, d in zip(gate, up, down, strict=True)]
        y = sum(s * m for s, m in zip(share, made, strict=True))
        for s, m, e in zip(share, made, chosen, strict=True):
            size = np.linalg.norm(m)
            row = (1, s, size, s * size, s * size / np.linalg.norm(y))
            for key, value in zip(keys, row, strict=True):
                sums[key][e] += value
        sums["together"][np.ix_(chosen, chosen)] += 1
    return sums


def test_figures_equal_a_count_token_by_token():
    p = program()
    digest, use, again = p.hash(), ex.usage(p, DATA)[LAYER], recounted(program())
    np.testing.assert_array_equal(use.count, again["count"])
    np.testing.assert_array_equal(use.together, again["together"])
    for key in ("weight", "output", "reap", "contribution"):
        np.testing.assert_allclose(getattr(use, key), again[key] / again["count"], rtol=1e-9)
    np.testing.assert_allclose(use.mass, again["weight"] / again["weight"].sum(), rtol=1e-9)
    assert use.tokens == DATA["ids"].size
    assert use.per_token.tolist() == [0, 0, use.tokens, 0, 0, 0]
    share = again["count"] / again["count"].sum()
    assert use.entropy == pytest.approx(-(share * np.log(share)).sum() / np.log(EXPERTS))
    assert p.hash() == digest


def test_tokens_without_hits_are_unrouted_and_padding_is_absent():
    """Counts are those before the fallback, which would hide experts that no token chooses."""
    rng = np.random.default_rng(0)
    m = gw.nn.MoE(6, 4, 5, kind="mlp", router=gw.nn.ThresholdRouter(6, 5, 2), name="m.", seed=0)
    for i, expert in enumerate(m.experts):
        expert.threshold.assign(gw.tensor(np.float32(3.0 if i == 1 else 0.5)))
    x, valid = rng.normal(size=(60, 6)).astype("f4"), rng.random(60) > 0.3
    p = gw.trace(m, x, valid)
    (use,) = ex.usage(p, {"x": x, "valid": valid}).layers.values()
    found = p.run({"x": x, "valid": valid})
    z = found.value("router.margin").to_numpy()
    hits = (z > 0) & valid[:, None]
    assert (use.tokens, use.dead) == (valid.sum(), [1])
    np.testing.assert_array_equal(use.count, hits.sum(0))
    np.testing.assert_array_equal(use.per_token, np.bincount(hits[valid].sum(1), minlength=6))
    assert 0 < use.unrouted == pytest.approx(1 - hits.any(1).sum() / valid.sum())
    weights = found.value("router.weights").to_numpy()
    np.testing.assert_allclose(use.weight[[0, 2]], [weights[hits[:, e], e].mean() for e in (0, 2)], rtol=1e-6)
    report = ex.usage(p, {"x": x, "valid": valid})
    assert "unrouted, dead 1" in str(report)
    assert next(iter(report.to_json()["layers"].values()))["unrouted"] == use.unrouted


def test_lifts_are_shares_of_an_id_relative_to_those_of_all_tokens():
    p = program()
    use = ex.usage(p, DATA)[LAYER]
    choice = p.run(DATA).value(ex.routed_layer(p, LAYER).choice).to_numpy()
    flat = DATA["ids"].reshape(-1)
    for expert in range(EXPERTS):
        chosen = (choice == expert).any(1)
        wanted = {}
        for i in set(flat.tolist()):
            of = chosen[flat == i]
            if len(of) >= 2 and of.any():
                wanted[i] = (of.mean() / chosen.mean(), len(of))
        found = use.lifts(expert, 99)
        assert {i: pytest.approx((lift, n)) for i, lift, n in found} == wanted
        assert [row[1] for row in found] == sorted((row[1] for row in found), reverse=True)
    assert ex.usage(p, {"ids": DATA["ids"][:6]})[LAYER].ids.tolist() == sorted(
        set(DATA["ids"][:6].reshape(-1).tolist())
    )


def test_a_report_prints_and_is_json():
    use = ex.usage(program(), DATA)
    assert "layers.0.mlp" in str(use)
    assert json.loads(json.dumps(use.to_json()))["layers"][LAYER]["tokens"] == DATA["ids"].size


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "normalize": False}], ids=str)
def test_the_effect_equals_the_loss_of_programs_without_the_expert(options):
    p = program(**options)
    digest, calibration = p.hash(), Calibration(DATA["ids"])
    found = ex.scores(p, "effect", calibration)
    feeds = calibration.feeds(p)

    def loss(q: Program) -> float:
        total, count = 0.0, 0
        for given in feeds:
            z = q.run(given, keep="outputs")["logits"].to_numpy("float64")[:, :-1]
            top = z.max(-1, keepdims=True)
            log = z - top - np.log(np.exp(z - top).sum(-1, keepdims=True))
            total -= np.take_along_axis(log, given["ids"][:, 1:, None], -1).sum()
            count += given["ids"][:, 1:].size
        return total / count

    base = loss(p)
    for name, layer in ex.routed_layers(p).items():
        for e in range(layer.size):
            q = p.fork()
            with q.edit("cut") as edit:
                edit.cut_units(q.axes()[layer.axis.name].units([e]))
            assert found.layers[name][e] == pytest.approx(loss(q) - base, abs=1e-9)
    assert p.hash() == digest


def test_useless_experts_come_first():
    """Two of five experts have router rows that no token likes, and matrices of zeros."""
    p = program()
    with p.edit("two useless experts") as e:
        for layer in ("layers.0.mlp", LAYER):
            for i in (1, 3):
                e.set_weight(f"{layer}.experts.{i}.down.weight", lambda w: 0 * w)
                e.set_weight(f"{layer}.router.weight", lambda w, i=i: np.where(np.arange(5)[:, None] == i, 1e-3 * w, w))
    for by in ("output", "reap", "weights", "router"):
        chosen = ex.scores(p, by, DATA).least(2)
        assert set(chosen.names()) == {f"{n}.experts[{i}]" for n in ("layers.0.mlp", LAYER) for i in (1, 3)}, by


def test_an_expert_without_tokens_is_cut_without_effect():
    """Every token has a large first entry, and the router row of the expert is negative there."""
    p = program()
    with p.edit("an expert without tokens") as e:
        e.set_weight("embed.weight", lambda w: np.where(np.arange(w.shape[1]) == 0, 20.0, w))
        e.set_weight(f"{LAYER}.router.weight", lambda w: np.where(np.arange(5)[:, None] == 2, [-9.0] + [0.0] * 11, w))
    use = ex.usage(p, DATA)
    assert use[LAYER].dead == [2]
    assert ex.scores(p, "effect", DATA).layers[LAYER][2] == pytest.approx(0, abs=1e-12)
    before = logits(p)
    with p.edit("cut") as e:
        e.cut_units(ex.least(p, {LAYER: use.scores("share")[LAYER]}, 1))
    np.testing.assert_allclose(logits(p), before, rtol=0, atol=1e-12)


def test_uneven_selection_leaves_as_many_experts_as_a_token_uses():
    p = program()
    scored = {"layers.0.mlp": np.arange(5.0), LAYER: np.arange(5.0) + 100}
    chosen = ex.least(p, scored, 4, per_layer=False, comparable=True)
    assert chosen.chosen == {"layers.0.mlp.experts": (0, 1, 2), f"{LAYER}.experts": (0,)}
    assert ex.least(p, scored, 0.4).chosen == {"layers.0.mlp.experts": (0, 1), f"{LAYER}.experts": (0, 1)}
    with pytest.raises(ex.TooFewExperts, match="at most 6"):
        ex.least(p, scored, 7, per_layer=False)
    with pytest.raises(ex.TooFewExperts, match="at least 2 of 5"):
        ex.least(p, scored, 4)


def test_missing_data_and_unknown_scores_are_refused():
    p = program()
    with pytest.raises(MissingCalibration):
        ex.usage(p)
    with pytest.raises(UsageError, match="effect"):
        ex.scores(p, "luck", DATA)
    assert ex.scores(p, "weights").layers[LAYER].shape == (EXPERTS,)


def test_a_picture_has_a_cell_per_expert_with_its_figure(tmp_path):
    p = program()
    use = ex.usage(p, DATA)
    svg = use.to_svg(tmp_path / "use.svg")
    assert (tmp_path / "use.svg").read_text(encoding="utf-8") == svg
    for name, u in use.layers.items():
        for e, share in enumerate(u.share):
            assert f"<title>{name}, expert {e}: {share * EXPERTS:.3f}</title>" in svg
    lift = use[LAYER].together[0, 1] * use[LAYER].tokens / (use[LAYER].count[0] * use[LAYER].count[1])
    assert f"<title>0, expert 1: {lift:.3f}</title>" in use.together_svg(LAYER)
    assert use.to_svg(beside=use).count('class="title"') == 2
    assert use.overlay()[f"{LAYER}.experts.2"] == pytest.approx(use[LAYER].share[2] * EXPERTS)
    assert "svg" in p.to_svg(overlay=use.overlay())
