"""Pruning and merging experts: one edit, the experts with the least scores, measured on held-out windows."""

from __future__ import annotations

import numpy as np
import pytest
from moe import EXPERTS, ids, logits, program

import graphwright as gw
from graphwright import experts as ex
from graphwright.errors import UsageError
from graphwright.surgery.calibration import Calibration

DATA = Calibration(ids(24, 10, seed=4))
LAYERS = ("layers.0.mlp", "layers.1.mlp")


@pytest.mark.parametrize("by", ["effect", "reap", "weights"])
def test_the_experts_with_the_least_scores_are_cut_in_one_edit(by):
    p = program()
    digest, entries, scores = p.hash(), len(p.journal), ex.scores(p, by, DATA)
    report = ex.prune(p, 0.4, by=by, data=DATA)
    for name in LAYERS:
        assert list(report.gone[name]) == sorted(np.argsort(scores.layers[name])[:2].tolist())
        assert report.experts[name] == ex.routed_layer(p, name).size == EXPERTS - 2
    assert len(p.journal) == entries + 1
    assert report.after["parameters"] < report.before["parameters"]
    assert report.before["nats"] != report.after["nats"]
    assert "gone by" in str(report)
    p.undo()
    assert p.hash() == digest


def test_experts_cut_by_effect_cost_no_more_than_the_median_of_random_draws():
    """Held-out loss; the model learned a sequence in which each id follows from the one before it."""
    rng = np.random.default_rng(0)
    rule = rng.permutation(31)
    tokens = [rng.integers(0, 31, 40)]
    for _ in range(9):
        tokens.append(rule[tokens[-1]])
    data = np.stack(tokens, 1)
    p = program("float32", seed=1)

    def loss(logits, ids):
        return gw.nn.functional.cross_entropy(logits[:, :-1], ids[:, 1:], dim=-1)

    train = gw.compile_step(p, loss, gw.optim.AdamW(p, lr=1e-2), {"ids": data[:32]})
    for _ in range(150):
        train(ids=data[:32])
    held = Calibration(data)

    def after(by: str, seed: int = 0) -> float:
        return ex.prune(p.fork(), 0.4, by=by, data=held, seed=seed).after["nats"]

    assert after("effect") <= np.median([after("random", seed) for seed in range(10)])


def test_measuring_again_after_each_cut_equals_one_cut_after_the_other():
    p, q = program(layers=1), program(layers=1)
    report = ex.prune(p, 0.4, by="effect", rounds=2, data=DATA)
    left = list(range(EXPERTS))
    for _ in range(2):
        worst = int(np.argmin(ex.scores(q, "effect", DATA).layers[LAYERS[0]]))
        left.pop(worst)
        with q.edit("one") as e:
            e.cut_units(q.axes()[f"{LAYERS[0]}.experts"].units([worst]))
    assert list(report.gone[LAYERS[0]]) == [i for i in range(EXPERTS) if i not in left]
    np.testing.assert_array_equal(logits(p), logits(q))


def test_layers_compete_for_experts():
    p = program()
    scores = ex.scores(p, "effect", DATA).layers
    ranked = sorted((scores[name][e], name, e) for name in LAYERS for e in range(EXPERTS))[:3]
    report = ex.prune(p, 0.4, by="effect", per_layer=False, data=DATA)
    assert report.count == 4
    assert all(e in report.gone[name] for _, name, e in ranked)


def test_equal_experts_are_merged_first_and_nothing_changes():
    p = program(k=1)
    with p.edit("a copy") as e:
        for name in LAYERS:
            ex.clone(e, name, 1)
    before = logits(p)
    report = ex.merge_similar(p, 1 / 6, data=DATA)
    assert all(list(report.gone[name]) == [5] for name in LAYERS)
    np.testing.assert_allclose(logits(p), before, rtol=1e-9, atol=1e-12)


def test_invalid_options_are_refused():
    p = program()
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(UsageError, match="share"):
            ex.prune(p, share, by="weights")
    with pytest.raises(UsageError, match="rounds"):
        ex.prune(p, 0.25, rounds=0, data=DATA)
    with pytest.raises(ex.TooFewExperts):
        ex.prune(p, 0.9, by="weights")
    assert len(p.journal) == 0
