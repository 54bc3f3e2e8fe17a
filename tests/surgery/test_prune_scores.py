"""Scores and restoring against slow loops, least squares by lstsq, and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from prune_models import convolutional, correlated, images, outputs

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.errors import NonFinite, UsageError
from graphwright.surgery.calibration import Stream
from graphwright.surgery.measure import nats
from graphwright.surgery.pruning import scores as formulas
from graphwright.surgery.pruning.prunable import prunable
from graphwright.surgery.pruning.restore import Gram, GramSum, error_of, regularised, restored

IDS = tiny_llama.batch(5, 24)[0]
RNG = np.random.default_rng


def toy(seed: int = 0, units: int = 12, width: int = 1, out: int = 5, rows: int = 400):
    """Inputs [rows, units·width] with dependence, a matrix, and the columns of each unit in mixed order."""
    rng = RNG(seed)
    a = rng.normal(size=(rows, units * width)) @ rng.normal(size=(units * width,) * 2) + rng.normal(size=units * width)
    columns = rng.permutation(units * width).reshape(units, width)
    return a, rng.normal(size=(out, units * width)), columns


def score(method: str, matrix: np.ndarray, columns: np.ndarray, gram: Gram | None = None, **options) -> np.ndarray:
    """Score the units of one product by a criterion."""
    return formulas.CRITERIA[method].score(formulas.UnitColumns(matrix, columns, gram, **options))


def refitted(a: np.ndarray, matrix: np.ndarray, gone: np.ndarray, bias: bool = False) -> float:
    """Mean squared error of the best weights without some columns, by lstsq on the rows themselves."""
    x = np.delete(a, gone, axis=1)
    if bias:
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    y = a @ matrix.T
    w, *_ = np.linalg.lstsq(x, y, rcond=None)
    return float(((x @ w - y) ** 2).sum(1).mean())


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_obs_is_the_error_growth_of_the_best_refit(width, bias):
    a, matrix, columns = toy(width=width)
    got = score("obs", matrix, columns, GramSum.of(a).moments(), bias=bias, ridge=0.0)
    expected = [refitted(a, matrix, columns[j], bias) for j in range(len(columns))]
    np.testing.assert_allclose(got, expected, rtol=1e-8)


def test_wanda_and_magnitude_match_loops():
    a, matrix, columns = toy(width=2)
    gram = (GramSum.of(a[:100]) + GramSum.of(a[100:])).moments()
    added = [((a[:, j] @ matrix[:, j].T) ** 2).sum(1).mean() for j in columns]
    np.testing.assert_allclose(score("wanda", matrix, columns, gram), added, rtol=1e-10)
    squares = [sum(w**2 for row in matrix[:, j] for w in row) for j in columns]
    np.testing.assert_allclose(score("magnitude", matrix, columns), squares, rtol=1e-12)
    one = score("random", matrix, columns, seed=(1,))
    assert not np.array_equal(one, score("random", matrix, columns, seed=(2,)))


@pytest.mark.parametrize("width", [1, 2])
def test_greedy_removes_the_same_units_as_a_search_over_all_refits(width):
    a, matrix, columns = toy(3, units=7, width=width)
    order, growth, first = formulas.greedy(matrix, columns, GramSum.of(a).moments().second, ridge=0.0)
    np.testing.assert_allclose(first, score("obs", matrix, columns, GramSum.of(a).moments(), ridge=0.0), rtol=1e-9)
    gone: list[int] = []
    for unit, grown in zip(order, growth, strict=True):
        left = [j for j in range(7) if j not in gone]
        errors = {j: refitted(a, matrix, columns[[*gone, j]].reshape(-1)) for j in left}
        assert unit == min(errors, key=errors.__getitem__)
        before = refitted(a, matrix, columns[gone].reshape(-1)) if gone else 0.0
        assert grown == pytest.approx(errors[unit] - before, rel=1e-6)
        gone.append(int(unit))


def test_greedy_is_better_than_one_shot_and_magnitude_on_average():
    found = {"greedy": 0.0, "obs": 0.0, "magnitude": 0.0}
    for seed in range(20):
        rng = RNG(seed)
        a = np.maximum(rng.normal(size=(600, 20)) @ rng.normal(size=(20, 48)), 0)
        matrix, columns, gram = rng.normal(size=(8, 48)), np.arange(48)[:, None], GramSum.of(a).moments()
        for method in found:
            if method == "greedy":
                gone = formulas.greedy(matrix, columns, gram.second, most=24)[0]
            else:
                gone = np.argsort(score(method, matrix, columns, gram))[:24]
            keep = np.delete(np.arange(48), gone)
            found[method] += restored(matrix, gram, keep).error
    assert found["greedy"] <= found["obs"] <= found["magnitude"]


def test_greedy_in_rounds_removes_each_unit_once():
    a, matrix, columns = toy(0, units=1100, out=3, rows=1400)
    order, growth, _ = formulas.greedy(matrix, columns, GramSum.of(a).moments().second, most=900)
    assert len(set(order.tolist())) == 900
    assert (growth >= 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_the_predicted_error_matches_the_measured_one(bias):
    a, matrix, _ = toy(4)
    gram, keep = GramSum.of(a).moments(), np.array([0, 2, 3, 7, 8, 11])
    found = restored(matrix, gram, keep, bias=bias, ridge=0.0)
    y = a @ matrix.T
    measured = ((a[:, keep] @ found.matrix.T + found.shift - y) ** 2).sum(1).mean() / (y**2).sum(1).mean()
    assert found.error == pytest.approx(measured, rel=1e-6)
    gone = np.delete(np.arange(12), keep)
    assert found.error == pytest.approx(refitted(a, matrix, gone, bias) / (y**2).sum(1).mean(), rel=1e-6)
    plain = ((a[:, keep] @ matrix[:, keep].T - y) ** 2).sum(1).mean() / (y**2).sum(1).mean()
    assert found.plain == pytest.approx(plain, rel=1e-9)
    assert found.improves
    assert error_of(matrix, matrix, gram, np.arange(12)) == 0


def test_a_ridge_grows_until_a_cholesky_factor_exists():
    x = RNG(0).normal(size=(50, 6))
    _, plain = regularised(x.T @ x / 50)
    assert plain == 1e-4
    h = np.ones((4, 4))
    h[0, 0] = 0.995  # an eigenvalue of about -0.004
    _, share = regularised(h)
    assert share == pytest.approx(1e-2)
    with pytest.raises(np.linalg.LinAlgError):
        regularised(h, 1e-4)


def test_non_finite_activations_are_refused():
    with pytest.raises(NonFinite):
        GramSum.of(np.array([[1.0, np.inf]])).moments()


def test_taylor_scores_are_derivatives_with_respect_to_unit_scales():
    p = gw.open(tiny_llama.directory("f32"), dtype="float64", compute="float64").program
    cal = sg.Calibration(IDS, 512)
    got = sg.scores(p.axes()["layers.1.mlp.neurons"], cal, "taylor")
    tokens = sum(f["ids"][:, 1:].size for f in cal.feeds(p))
    for unit in (0, 5, 77):
        values = []
        for step in (1e-3, -1e-3):
            twin = p.fork()
            with twin.edit("scale") as e:
                e.set_weight("layers.1.mlp.down.weight", lambda w: w * (1 + step * (np.arange(128) == unit)))  # noqa: B023
            values.append(nats(Stream(twin, cal.feeds(p))) * tokens)
        slope = (values[0] - values[1]) / 2e-3
        assert got[unit] == pytest.approx(slope**2, rel=2e-3, abs=1e-8)


def test_taylor_scores_sum_over_all_products_that_read_a_value():
    rng = RNG(3)
    parts = [rng.normal(size=(7, 6)).astype("f4") for _ in range(2)]

    def scores(heads: list[np.ndarray]) -> np.ndarray:
        b = gw.Builder("scores tokens")
        table = b.param("table", RNG(4).normal(size=(7, 5)).astype("f4"))
        x = b.embedding(table, b.input("ids", ("B", "T"), "int64"))
        hidden = b.relu(b.linear(x, b.param("up.weight", RNG(5).normal(size=(6, 5)).astype("f4")), name="up"))
        ends = [b.linear(hidden, b.param(f"head{i}.weight", w), name=f"head{i}") for i, w in enumerate(heads)]
        b.output(b.add(*ends) if len(ends) > 1 else ends[0], "logits")
        p = b.build()
        return sg.scores(p.axes()["up.neurons"], sg.Calibration(IDS % 7, 64), "taylor")

    np.testing.assert_allclose(scores(parts), scores([parts[0] + parts[1]]), rtol=1e-3)


def test_scores_match_stored_activations():
    p = convolutional("f8")
    cal = sg.Calibration(images(64, dtype="f8"), 32)
    (end,) = next(a for a in prunable(p) if a.name == "first.channels").consumers
    run = p.run(cal.feeds(p)[0])
    x, w = run.value(end.x).to_numpy("float64"), p.weights["second.weight"].numpy()
    added = []
    for channel in range(8):  # what the second convolution makes of one channel alone
        total = np.zeros((32, 6, 4, 4))
        for i in range(4):
            for j in range(4):
                total[:, :, i, j] = np.einsum("nkl,okl->no", x[:, channel, i : i + 2, j : j + 2], w[:, channel])
        added.append((total**2).sum() / (32 * 16))
    np.testing.assert_allclose(sg.scores(p.axes()["first.channels"], cal, "wanda"), added, rtol=1e-6)


def test_restoration_halves_the_error_of_magnitude_on_correlated_units():
    p = correlated()
    cal = sg.Calibration({"x": RNG(1).normal(size=(1200, 20))}, 800)
    check = {"x": RNG(2).normal(size=(500, 20))}
    dense, errors = outputs(p, check), {}
    for name, options in (("ours", {}), ("magnitude", {"method": "magnitude", "restore": False})):
        q = p.fork()
        report = sg.prune(q, sg.Ratio(0.5), cal, timed=False, **options)
        assert len(report.steps[0].units) == 24
        errors[name] = ((outputs(q, check) - dense) ** 2).mean()
    assert errors["magnitude"] >= 2 * errors["ours"]


def test_scores_require_their_inputs(tmp_path):
    p = correlated()
    axis = p.axes()["up.neurons"]
    assert sg.scores(axis, method="magnitude").shape == (48,)
    with pytest.raises(sg.MissingCalibration):
        sg.scores(axis)
    with pytest.raises(UsageError, match="unknown value of method"):
        sg.scores(axis, method="best")
    with pytest.raises(sg.MissingCalibration, match="next tokens"):
        sg.scores(axis, sg.Calibration({"x": np.ones((8, 20))}), "taylor")
