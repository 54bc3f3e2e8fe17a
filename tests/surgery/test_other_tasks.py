"""Calibration, pruning, comparing and diagnosing models of other tasks than predicting the next token of a text."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import surgery as sg
from graphwright.errors import UsageError
from graphwright.surgery.calibration import Calibration, Stream, chunked, named
from graphwright.surgery.measure import squared_drift
from graphwright.surgery.pruning.restore import regularised

RNG = np.random.default_rng
IMAGES = RNG(0).normal(size=(24, 3, 8, 8)).astype("f4")


def classifier(batch: str | int = "B") -> gw.Program:
    """Two convolutions and a head; the output `logits`."""
    rng, b = RNG(1), gw.Builder("classifier")
    x = b.input("pixels", (batch, 3, 8, 8))
    for name, wide, inner in (("first", 16, 3), ("second", 8, 16)):
        w = b.param(f"{name}.weight", (rng.normal(size=(wide, inner, 3, 3)) / 5).astype("f4"))
        x = b.relu(b.conv(x, w, stride=(1, 1), padding=(1, 1), name=name), name=f"{name}.act")
    w = b.param("head.weight", rng.normal(size=(5, 8)).astype("f4"))
    b.output(b.linear(b.mean(x, axes=(2, 3), keepdims=False), w, name="head"), "logits")
    return b.build()


def encoder(positions: int = 6) -> gw.Program:
    """An MLP on embeddings of `input_ids`, to which `attention_mask` is added; the output `logits`."""
    rng, b = RNG(2), gw.Builder("encoder")
    ids, mask = (b.input(name, ("B", positions), "int64") for name in ("input_ids", "attention_mask"))
    x = b.embedding(b.param("table", rng.normal(size=(11, 8)).astype("f4")), ids)
    x = b.add(x, b.unflatten(b.cast(mask, dtype="float32"), axis=1, sizes=(positions, 1)))
    for name, wide, inner in (("up", 16, 8), ("down", 4, 16)):
        x = b.linear(x, b.param(f"{name}.weight", rng.normal(size=(wide, inner)).astype("f4")), name=name)
        x = b.gelu(x, name="act") if name == "up" else x
    b.output(x, "logits")
    return b.build()


def test_a_list_of_batches_is_the_joined_dict():
    whole = Calibration({"pixels": IMAGES}, seed=3)
    parts = Calibration([{"pixels": IMAGES[:7]}, {"pixels": IMAGES[7:]}], seed=3)
    assert parts.to_json() == whole.to_json()
    np.testing.assert_array_equal(parts.windows["pixels"], whole.windows["pixels"])


@pytest.mark.parametrize("source", [IMAGES, list(IMAGES), [IMAGES[:10], IMAGES[10:]], gw.tensor(IMAGES)])
def test_values_without_a_name_are_those_of_the_only_input(source):
    made = Calibration(named(classifier(), source), seed=3)
    assert made.to_json() == Calibration({"pixels": IMAGES}, seed=3).to_json()


def test_data_that_fit_no_input_are_refused():
    with pytest.raises(UsageError, match="batch 1"):
        Calibration([{"pixels": IMAGES}, {"pixel": IMAGES}])
    with pytest.raises(UsageError, match="different shapes"):
        Calibration([{"pixels": IMAGES}, {"pixels": IMAGES[..., 1:]}])
    with pytest.raises(UsageError, match="does not read texts"):
        sg.prune(classifier(), 0.2, "a text", timed=False)
    two = gw.Builder("two")
    two.output(two.add(two.input("x", ("B", 2)), two.input("y", ("B", 2))), "out")
    with pytest.raises(UsageError, match="several inputs"):
        named(two.build(), IMAGES)


def test_a_mask_of_ones_is_added_and_ids_get_the_name_of_the_program():
    ids = RNG(0).integers(0, 11, (12, 6))
    for source in (ids, {"input_ids": ids}):
        (feeds,) = Calibration(source).feeds(encoder())
        assert list(feeds) == ["input_ids", "attention_mask"]
        assert feeds["attention_mask"].all()
    with pytest.raises(UsageError, match="position 2"):
        Calibration({"input_ids": np.full((8, 6), 3) + 9 * (np.arange(6) == 2)}).feeds(encoder())


def test_a_fixed_batch_is_filled_and_the_rest_left_out():
    p = classifier(batch=4)
    feeds = Calibration({"pixels": IMAGES}).feeds(p)
    assert [f["pixels"].shape[0] for f in feeds] == [4, 4, 4, 4]  # of 18 learning samples
    report = sg.prune(p, sg.Ratio(0.2), IMAGES, timed=False)
    assert report.after["parameters"] < report.before["parameters"]
    with pytest.raises(UsageError, match="fixed batch size"):
        Calibration({"pixels": IMAGES}).feeds(classifier(batch=7), held=True)


def test_large_samples_run_in_small_chunks():
    feeds = Calibration({"x": np.zeros((9, 3, 400, 400), "f4")}, held_out={"x": np.ones((1, 3, 400, 400), "f4")})
    p = gw.Builder("p")
    p.output(p.relu(p.input("x", ("B", 3, "H", "W"))), "y")
    assert [len(f["x"]) for f in feeds.feeds(p.build())] == [2, 2, 2, 2, 1]


def test_the_drift_of_a_report_is_that_of_the_outputs():
    p = classifier()
    before, data = p.fork(), Calibration({"pixels": IMAGES})
    report = sg.prune(p, 0.3, data, timed=False)
    x, y = (np.asarray(q(pixels=data.held["pixels"])["logits"], "f8") for q in (before, p))
    shares = [np.exp(z - z.max(-1, keepdims=True)) for z in (x, y)]
    one, other = (s / s.sum(-1, keepdims=True) for s in shares)
    found = report.after
    assert found["relative"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-4)
    assert found["max_abs"] == pytest.approx(np.abs(y - x).max(), rel=1e-4)
    assert found["kl"] == pytest.approx((one * np.log(one / other)).sum(-1).mean(), rel=1e-3)
    assert found["same_top"] == (x.argmax(-1) == y.argmax(-1)).mean()
    assert 0 < found["relative"] < 1
    assert report.before["relative"] == report.before["kl"] == 0
    assert f"KL {found['kl']:.3g} nats" in str(report)
    assert sg.optimise_report(p, data)["after"] == found
    compared = sg.compare(before, p, data).outputs
    assert compared["kl_mean"] == pytest.approx(found["kl"])
    assert compared["top1"] == found["same_top"]
    assert "greedy" not in compared


def test_padding_does_not_count_as_drift():
    p, q = encoder(), encoder()
    with q.edit("another activation") as e:
        e.insert(q.in_edges("act")[0], "relu")
    ids, mask = RNG(0).integers(0, 11, (8, 6)), np.ones((8, 6), np.int64)
    mask[:, 4:] = 0
    feeds = chunked(p, {"input_ids": ids, "attention_mask": mask}, 8)
    x, y = (np.asarray(r.run(feeds[0])["logits"], "f8")[:, :4] for r in (p, q))
    found = squared_drift(Stream(q, feeds), list(Stream(p, feeds).outputs()))
    assert found == pytest.approx(((y - x) ** 2).sum() / (x**2).sum(), rel=1e-5)
    assert sg.compare(p, q, feeds[0]).outputs["max_abs"] == pytest.approx(np.abs(y - x).max(), rel=1e-5)


def test_features_have_no_kl():
    p = classifier()
    with p.edit("another name") as e:
        e.set_outputs(features=p.node("head"))
    found = sg.prune(p, 0.2, IMAGES, timed=False).after
    assert {"relative", "max_abs"} <= found.keys()
    assert not {"kl", "same_top", "nats"} & found.keys()


def test_pruning_without_restoring_masks_the_removed_units():
    p = classifier()
    before = p.fork()
    steps = sg.prune(p, 0.3, IMAGES, restore=False, method="wanda", timed=False).steps
    with before.edit("mask") as e:
        for step in steps:
            key = step.name.replace(".channels", ".weight")
            e.set_weight(key, lambda w, step=step: w * ~np.isin(np.arange(len(w)), step.units)[:, None, None, None])
    masked, cut = (np.asarray(q(pixels=IMAGES)["logits"]) for q in (before, p))
    np.testing.assert_allclose(cut, masked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", [{"method": "taylor"}, {"scope": "loss"}])
def test_criteria_of_the_next_token_loss_are_refused_elsewhere(option):
    p = classifier()
    before = p.hash()
    with pytest.raises(sg.MissingCalibration, match="next tokens") as caught:
        sg.prune(p, 0.2, IMAGES, timed=False, **option)
    assert next(iter(option.values())) in str(caught.value)
    assert "pixels => logits" in str(caught.value.got)
    assert p.hash() == before


def test_inputs_that_hardly_vary_can_be_fitted():
    """A covariance of rounding errors has negative eigenvalues of the size of the positive ones."""
    rows = RNG(0).normal(size=(6, 6))
    h = (rows + rows.T) * 1e-7
    wide, share = regularised(h)
    values = np.linalg.eigvalsh(h)
    expected = np.maximum(values, 0) + share * np.maximum(values, 0).mean()
    np.testing.assert_allclose(np.linalg.eigvalsh(wide), expected, rtol=1e-6)
