"""Metrics beside scikit-learn and torch, in one batch and in many, with ties, ignored samples and absent classes."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright import metrics as m
from graphwright.errors import DTypeError, IndexOutOfRange, ShapeError, UsageError

AVERAGES = ["macro", "micro", "weighted", "none"]
BY_CLASS = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score, "iou": sk.jaccard_score}


def classes_of(seed: int, samples: int = 60, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and targets in which some class is often absent."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(classes, 0.5), 2)
    found, wanted = (rng.choice(classes, samples, p=p) for p in share)
    return np.where(rng.random(samples) < 0.4, wanted, found), wanted


def parts(metric: m.Metric, x: np.ndarray, y: np.ndarray, cuts: list[int]) -> Any:
    """The figure of pieces, of which each second one goes to another metric that is merged at the end."""
    other = type(metric)(**{k: v for k, v in vars(metric).items() if k != "_state"})
    bounds = [0, *sorted(cuts), len(x)]
    for i, (a, b) in enumerate(pairwise(bounds)):
        (other if i % 2 else metric).update(x[a:b], y[a:b])
    return metric.merge(other).compute()


CUTS = st.lists(st.integers(0, 60), max_size=5)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", BY_CLASS)
@given(seed=st.integers(0, 10**6), cuts=CUTS)
def test_ratios_by_class_match_scikit_learn(name: str, average: str, seed: int, cuts: list[int]) -> None:
    found, wanted = classes_of(seed)
    ours = getattr(m, name)(found, wanted, average=average)
    labels = np.union1d(found, wanted)
    options = {"average": None if average == "none" else average, "zero_division": 0, "labels": labels}
    truth = BY_CLASS[name](wanted, found, **options)
    if average == "none":
        assert np.isnan(np.delete(ours, labels)).all()
        ours = ours[labels]
    np.testing.assert_allclose(ours, truth, rtol=1e-12)
    kind = {"iou": m.IoU, "f1": m.F1, "precision": m.Precision, "recall": m.Recall}[name]
    streamed = parts(kind(average=average), found, wanted, cuts)
    np.testing.assert_allclose(streamed[labels] if average == "none" else streamed, truth, rtol=1e-12)


@given(seed=st.integers(0, 10**6), cuts=CUTS)
def test_the_confusion_matrix_matches_scikit_learn(seed: int, cuts: list[int]) -> None:
    found, wanted = classes_of(seed)
    truth = sk.confusion_matrix(wanted, found, labels=range(5))
    size = max(found.max(), wanted.max()) + 1
    assert np.array_equal(m.confusion_matrix(found, wanted, classes=5), truth)
    assert np.array_equal(m.confusion_matrix(found, wanted), truth[:size, :size])
    assert np.array_equal(parts(m.ConfusionMatrix(), found, wanted, cuts), truth[:size, :size])
    kept = wanted != 1
    expected = sk.confusion_matrix(wanted[kept], found[kept], labels=range(5)) if kept.any() else 0 * truth
    assert np.array_equal(m.confusion_matrix(found, wanted, classes=5, ignore_index=1), expected)


@given(seed=st.integers(0, 10**6), k=st.integers(1, 6), cuts=CUTS)
def test_top_k_accuracy_matches_scikit_learn_and_streams(seed: int, k: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    scores, wanted = rng.normal(size=(60, 6)), rng.integers(0, 6, 60)
    truth = sk.top_k_accuracy_score(wanted, scores, k=k, labels=range(6)) if k < 6 else 1.0
    assert m.accuracy(scores, wanted, top_k=k) == pytest.approx(truth)
    assert parts(m.Accuracy(top_k=k), scores, wanted, cuts) == pytest.approx(truth)


def test_equal_scores_are_ranked_by_class_as_argmax_does() -> None:
    rng = np.random.default_rng(0)
    scores, wanted = rng.integers(0, 3, (500, 4)).astype("f4"), rng.integers(0, 4, 500)
    assert m.accuracy(scores, wanted) == np.mean(scores.argmax(-1) == wanted)
    stable = np.argsort(-scores, axis=-1, kind="stable")[:, :2]
    assert m.accuracy(scores, wanted, top_k=2) == np.mean((stable == wanted[:, None]).any(-1))
    assert m.accuracy([[np.nan, 0.0]], [0]) == 0


def test_shapes_of_language_models_and_pictures() -> None:
    rng = np.random.default_rng(0)
    scores, wanted = rng.normal(size=(2, 7, 5)).astype("f4"), rng.integers(0, 5, (2, 7))
    wanted[0, :3] = -100
    kept = wanted != -100
    truth = (scores.argmax(-1) == wanted)[kept].mean()
    assert m.accuracy(gw.tensor(scores), gw.tensor(wanted), ignore_index=-100) == pytest.approx(truth)
    assert m.accuracy(scores.argmax(-1), wanted, ignore_index=-100) == pytest.approx(truth)
    masks = rng.integers(0, 2, (2, 2, 8, 8))
    assert m.iou(masks[0], masks[1], average="binary") == pytest.approx(
        sk.jaccard_score(masks[1].ravel(), masks[0].ravel())
    )
    assert m.f1(masks[0] > 0, masks[1] > 0, average="binary") == pytest.approx(
        sk.f1_score(masks[1].ravel(), masks[0].ravel())
    )


@given(seed=st.integers(0, 10**6), outputs=st.sampled_from([None, 1, 3]), far=st.sampled_from([0.0, 1e6]), cuts=CUTS)
def test_r2_matches_scikit_learn_far_from_zero_too(seed: int, outputs: int | None, far: float, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    y = far + rng.normal(size=(60,) if outputs is None else (60, outputs))
    x = y + 0.5 * rng.normal(size=y.shape)
    truth = sk.r2_score(y, x)
    assert m.r2(x, y) == pytest.approx(truth, rel=1e-9)
    assert parts(m.R2(), x, y, cuts) == pytest.approx(truth, rel=1e-8)


def test_r2_of_constant_targets_and_of_one_sample() -> None:
    y = np.ones((4, 2))
    x = np.stack([np.ones(4), np.zeros(4)], -1)
    assert m.r2(x, y) == sk.r2_score(y, x) == 0.5
    assert np.isnan(m.r2([1.0], [2.0]))


@given(seed=st.integers(0, 10**6), cuts=CUTS)
def test_errors_and_areas_match_scikit_learn(seed: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    y, x = rng.normal(size=(60, 2)), rng.normal(size=(60, 2))
    assert parts(m.MeanSquaredError(), x, y, cuts) == pytest.approx(sk.mean_squared_error(y, x))
    assert parts(m.MeanAbsoluteError(), x, y, cuts) == pytest.approx(sk.mean_absolute_error(y, x))
    assert m.mean_squared_error(x, y) == pytest.approx(sk.mean_squared_error(y, x))
    assert m.mean_absolute_error(x, y) == pytest.approx(sk.mean_absolute_error(y, x))
    scores, wanted = rng.integers(0, 8, 60) / 8, rng.random(60) < 0.3  # with ties
    wanted[:2] = True, False
    truth = sk.roc_auc_score(wanted, scores)
    assert m.roc_auc(scores, wanted) == pytest.approx(truth)
    assert parts(m.RocAuc(), scores, wanted, cuts) == pytest.approx(truth)
    assert np.isnan(m.roc_auc(scores, np.ones(60, bool)))


def test_perplexity_matches_torch_and_streams() -> None:
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(size=(3, 9, 11)).astype("f4"), rng.integers(0, 11, (3, 9))
    ids[0, :4] = -100
    loss = torch.nn.functional.cross_entropy(
        torch.tensor(logits).double().reshape(-1, 11), torch.tensor(ids).reshape(-1)
    )
    assert m.perplexity(logits, ids) == pytest.approx(float(loss.exp()))
    assert parts(m.Perplexity(), logits, ids, [1]) == pytest.approx(float(loss.exp()))
    wide = gw.tensor(logits).to("bfloat16")
    assert m.perplexity(wide, ids) == pytest.approx(m.perplexity(np.asarray(wide), ids))


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ShapeError, lambda: m.accuracy(np.zeros((3, 2)), np.zeros(4, int))),
        (ShapeError, lambda: m.accuracy(np.zeros((2, 5, 4, 4)), np.zeros((2, 4, 4), int))),
        (DTypeError, lambda: m.accuracy([0.3, 0.7], [0, 1])),
        (DTypeError, lambda: m.accuracy([0, 1], [0.0, 1.0])),
        (UsageError, lambda: m.accuracy([0, 1], [0, 1], top_k=2)),
        (UsageError, lambda: m.accuracy([[0.0, 1.0]], [0], top_k=0)),
        (IndexOutOfRange, lambda: m.accuracy([[0.0, 1.0]], [2])),
        (IndexOutOfRange, lambda: m.confusion_matrix([0, 3], [0, 1], classes=3)),
        (IndexOutOfRange, lambda: m.f1([0, 1], [0, -1])),
        (UsageError, lambda: m.f1([0, 2], [0, 1], average="binary")),
        (UsageError, lambda: m.f1([0, 2], [0, 1], average="mean")),  # pyright: ignore[reportArgumentType]
        (ShapeError, lambda: m.r2(np.zeros(3), np.zeros((3, 1)))),
        (ShapeError, lambda: m.mean_squared_error(np.zeros(3), np.zeros((3, 1)))),
        (ShapeError, lambda: m.perplexity(np.zeros((3, 4)), np.zeros(4, int))),
        (IndexOutOfRange, lambda: m.perplexity(np.zeros((3, 4)), np.full(3, 4))),
        (DTypeError, lambda: m.roc_auc([0.1], [2])),
        (UsageError, lambda: m.Accuracy().compute()),
        (UsageError, lambda: m.Accuracy().merge(m.Accuracy(top_k=2))),
    ],
)
def test_invalid_batches_are_refused(error: type[Exception], call: Any) -> None:
    with pytest.raises(error):
        call()


def test_a_failed_batch_is_not_added_and_a_reset_forgets() -> None:
    metric = m.Accuracy().update([1, 2], [1, 1])
    with pytest.raises(ShapeError):
        metric.update([1], [1, 2])
    assert metric.compute() == 0.5
    metric.reset()
    assert metric.update([1], [1]).compute() == 1
    assert "top_k" in inspect.signature(m.accuracy).parameters
    assert repr(m.Accuracy(top_k=3)) == "Accuracy(top_k=3, ignore_index=None)"


@pytest.mark.parametrize(
    ("targets", "error"),
    [([0.5, 1.0], DTypeError), ([-100, 1], IndexOutOfRange), ([3, 1], IndexOutOfRange), (1, ShapeError)],
)
def test_perplexity_takes_only_ids_of_the_vocabulary_as_targets(targets: Any, error: type[Exception]) -> None:
    logits = np.zeros((2, 3) if isinstance(targets, list) else ())
    with pytest.raises(error):
        m.perplexity(logits, np.asarray(targets), ignore_index=0)
