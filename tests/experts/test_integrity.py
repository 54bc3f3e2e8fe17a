"""Predictive integrity: every term recomputed in numpy, its properties, and states that are saved."""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright.amp import GradScaler
from graphwright.errors import UsageError
from graphwright.nn import functional
from graphwright.optim import SGD
from graphwright.testing.shift import Run, objective

SMALL: dict[str, Any] = {"experts": 4, "hidden": 4, "batch": 24, "dim": 8}
rng = np.random.default_rng(0)
X, WEIGHTS = np.random.default_rng(1).normal(size=(9, 3)).astype("f4"), np.eye(4, 3, dtype="f4")


def head(p0: np.ndarray, term: ex.integrity, inputs: dict[str, np.ndarray]):
    """A step of a program whose logits are a parameter: x picks rows."""
    p = gw.trace(gw.nn.Linear(3, 4, bias=False), inputs["x"])
    with p.edit("names") as e:
        e.set_outputs(logits=p.outputs()[0])
        e.set_weight("weight", p0)

    def loss(logits, targets):
        return functional.cross_entropy(logits, targets, dim=-1)

    (name,) = p.input_names()
    feeds = {name: inputs["x"], **{k: v for k, v in inputs.items() if k != "x"}}
    return gw.compile_step(p, loss, SGD(p, lr=0.0), feeds, also=[term]), feeds


def by_numpy(x: np.ndarray, w: np.ndarray, targets: np.ndarray, marks: np.ndarray | None = None) -> tuple[float, float]:
    z = x @ w.T
    log = z - z.max(-1, keepdims=True)
    log = log - np.log(np.exp(log).sum(-1, keepdims=True))
    marks = np.ones(len(x), bool) if marks is None else marks
    entropy = -(np.exp(log) * log).sum(-1)
    return float(-log[np.arange(len(x)), targets][marks].mean()), float(entropy[marks].mean())


def test_errors_and_entropies_are_those_of_numpy():
    x, w = rng.normal(size=(9, 3)).astype("f4"), rng.normal(size=(4, 3)).astype("f4")
    targets = rng.integers(0, 4, 9)
    step, feeds = head(w, ex.integrity(gamma=0.0), {"x": x, "targets": targets})
    step(feeds)
    epsilon, tau = by_numpy(x, w, targets)
    assert step.reports["integrity.epsilon"].item() == pytest.approx(epsilon, rel=1e-5)
    assert step.reports["integrity.tau"].item() == pytest.approx(tau, rel=1e-5)
    assert step.reports["integrity.pi"].item() == pytest.approx(exp(-epsilon / tau), rel=1e-5)


def test_averages_deviation_alarm_and_latch_follow_the_formulas():
    """Over 60 steps of a training whose world changes, from the reported ε, τ and S alone."""
    run = Run(0, ex.Regeneration(k0=2, grace=20, window=5, alarm=1.5, upkeep=0), **SMALL)
    b = v = rho = 0.0
    alarms = 0
    for t in range(60):
        if t == 40:
            run.stream.shift()
        run.train(run.stream.draw())
        seen = {k.removeprefix("integrity."): x.item() for k, x in run.train.reports.items() if k.startswith("integ")}
        ratio = seen["epsilon"] / max(seen["tau"], 0.05)
        pi = exp(-(0.5 * ratio + 0.5 * seen["surprise"]))
        b, v = (pi, 1e-4) if t == 0 else (b, v)
        d = (pi - b) / (v**0.5 + 0.02)
        alarm = t > 20 and d < -1.5
        alarms += alarm
        rho = 1.0 if alarm else rho * exp(-1 / 5)
        for name, value in (("pi", pi), ("d", d), ("rho", rho), ("alarms", alarms)):
            assert seen[name] == pytest.approx(value, rel=2e-3, abs=2e-3), (t, name)
        assert 0 < seen["pi"] <= 1
        if t >= 20:
            v = 0.99 * v + 0.01 * (pi - b) ** 2
        b = 0.99 * b + 0.01 * pi
    assert alarms > 0


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9])
def test_a_calibrated_model_has_a_level_whatever_its_quality(gamma):
    """ε = τ: e^-α with S = 1, as in a first step with experts, and e^(-α(1-γ)) without experts."""
    run = Run(0, ex.Regeneration(alpha=2.0, gamma=gamma, upkeep=0), **SMALL)
    with run.program.edit("equal scores") as e:
        e.set_weight("head.weight", lambda w: w * 0)
        e.set_weight("head.bias", lambda b: b * 0)
    run.train(run.stream.draw())
    seen = {name: run.train.reports[f"integrity.{name}"].item() for name in ("epsilon", "tau", "surprise", "pi")}
    assert seen["epsilon"] == pytest.approx(np.log(6), rel=1e-5)
    assert seen["epsilon"] == pytest.approx(seen["tau"], rel=1e-5)
    without = exp(-2.0 * (1 - gamma))
    assert seen["pi"] == pytest.approx(without * exp(-2.0 * gamma * seen["surprise"]), rel=1e-5)
    step, feeds = head(np.zeros((4, 3), "f4"), ex.integrity(2.0, gamma), {"x": X, "targets": np.arange(9) % 4})
    step(feeds)
    assert step.reports["integrity.pi"].item() == pytest.approx(without, rel=1e-5)


def test_errors_lower_it():
    levels = []
    for factor in (1.0, -1.0, -3.0):  # targets are the largest scores, the least, and the least by far
        w = factor * WEIGHTS
        step, feeds = head(w, ex.integrity(gamma=0.0), {"x": X, "targets": (X @ WEIGHTS.T).argmax(axis=1)})
        step(feeds)
        levels.append(step.reports["integrity.pi"].item())
    assert 1 >= levels[0] > levels[1] > levels[2] > 0


class Scaled(ex.integrity):
    """Cross-entropy and entropy of another unit."""

    def errors(self, view):
        epsilon, tau = super().errors(view)
        return epsilon * 4.0, tau * 4.0


def test_another_unit_of_errors_and_entropies_changes_no_decision():
    terms = [kind(after=20, window=5, alarm=0.3) for kind in (ex.integrity, Scaled)]
    for term in terms:
        run = Run(0, **SMALL)
        step = gw.compile_step(run.program, objective, SGD(run.program, lr=0.5), run.stream.draw(), also=[term])
        for t in range(60):
            if t == 40:
                run.stream.shift()
            step(run.stream.draw())
    states = [{n: v.item() for n, v in term.states.items() if n not in ("epsilon", "tau")} for term in terms]
    assert states[0] == pytest.approx(states[1], rel=1e-5)
    assert states[0]["alarms"] > 0


def test_surprise_is_the_gradient_of_experts_with_tokens_relative_to_its_average():
    run = Run(1, ex.Regeneration(k0=2, upkeep=0), **SMALL)
    mean = 0.0
    for t in range(5):
        batch = run.stream.draw()
        p = run.program
        out = p(x=gw.tensor(batch["x"]))["logits"]
        for parameter in p.parameters():
            parameter.grad = None
        functional.cross_entropy(out, gw.tensor(batch["targets"]), dim=-1).backward()
        norms = []
        for i in range(4):
            grads = [p.weights[f"mlp.experts.{i}.{n}.weight"].grad for n in ("up", "down")]
            norms.append(sum(float((g.numpy() ** 2).sum()) for g in grads if g is not None) ** 0.5)
        now = float(np.mean([n for n in norms if n > 0]))
        mean = now if t == 0 else 0.99 * mean + 0.01 * now
        run.train(batch)
        assert run.train.reports["integrity.surprise"].item() == pytest.approx(now / mean, rel=1e-3)


def test_masked_tokens_change_nothing():
    x, w = rng.normal(size=(9, 3)).astype("f4"), rng.normal(size=(4, 3)).astype("f4")
    targets, marks = rng.integers(0, 4, 9), np.arange(9) < 5
    p = gw.trace(gw.nn.Linear(3, 4, bias=False), x)
    with p.edit("names") as e:
        e.set_outputs(logits=p.outputs()[0])
        e.set_weight("weight", w)
    (name,) = p.input_names()

    def loss(logits, targets, marks):
        return (functional.cross_entropy(logits, targets, dim=-1, reduction="none") * marks.to("float32")).mean()

    term = ex.integrity(gamma=0.0, mask="marks")
    feeds = {name: x, "targets": targets, "marks": marks}
    step = gw.compile_step(p, loss, SGD(p, lr=0.0), feeds, also=[term])
    step(feeds)
    epsilon, tau = by_numpy(x, w, targets, marks)
    assert step.reports["integrity.pi"].item() == pytest.approx(exp(-epsilon / tau), rel=1e-5)
    before = step.reports["integrity.pi"].item()
    other = x.copy()
    other[5:] += 3
    step({**feeds, name: other})
    assert step.reports["integrity.pi"].item() == before


def test_scores_may_predict_the_next_target():
    x, w = rng.normal(size=(5, 6, 3)).astype("f4"), rng.normal(size=(4, 3)).astype("f4")
    targets = rng.integers(0, 4, (5, 6))
    step, feeds = head(w, ex.integrity(gamma=0.0, shifted=True), {"x": x, "targets": targets})
    step(feeds)
    epsilon, tau = by_numpy(x[:, :-1].reshape(-1, 3), w, targets[:, 1:].reshape(-1))
    assert step.reports["integrity.epsilon"].item() == pytest.approx(epsilon, rel=1e-5)
    assert step.reports["integrity.tau"].item() == pytest.approx(tau, rel=1e-5)


@pytest.mark.parametrize("bad", ["NaN", "infinite ε"])
def test_a_step_that_is_not_finite_is_counted_and_changes_nothing_else(bad):
    w, x = np.eye(4, 3, k=-1, dtype="f4"), np.abs(X) + 40
    w[3] = [-1e38, 0, 0]  # its score is -∞, and so is its log-probability
    term = ex.integrity()
    step, feeds = head(w, term, {"x": x, "targets": np.arange(9) % 3})
    step(feeds)
    before = {name: v.item() for name, v in term.states.items()}
    (name, *_) = feeds
    worse = {**feeds, name: x * np.float32(np.nan)} if bad == "NaN" else {**feeds, "targets": np.arange(9) % 4}
    for streak in (1.0, 2.0):
        step(worse)
        assert step.skipped
        assert {n: v.item() for n, v in term.states.items()} == {**before, "skipped": streak, "streak": streak}
    step(feeds)
    assert not step.skipped
    assert (term.states["skipped"].item(), term.states["streak"].item(), term.states["t"].item()) == (2.0, 0.0, 2.0)


def test_gradients_that_overflow_skip_the_step_though_its_loss_is_finite():
    """Under a GradScaler it is the scaler that skips, and lowers its scale; the loss stays what it is."""
    for scaled in (False, True):
        term, seen = ex.integrity(), []
        r = Run(0, **SMALL)
        scaler = GradScaler(1e20) if scaled else None
        batch = r.stream.draw()
        step = gw.compile_step(r.program, objective, SGD(r.program, lr=0.1), batch, also=[term], scaler=scaler)
        huge = {**batch, "x": batch["x"] * np.float32(1e25)}
        assert np.isfinite(float(objective(r.program(x=huge["x"])["logits"], gw.tensor(huge["targets"])).item()))
        before = {k: v.data.tobytes() for k, v in r.program.weights.items()}
        for _ in range(2):
            seen.append(step(huge).item())
        assert [np.isnan(loss) for loss in seen] == [not scaled] * 2
        assert step.skipped is not scaled
        assert term.states["skipped"].item() == 2
        assert term.states["streak"].item() == (0 if scaled else 2)
        if not scaled:
            assert {k: v.data.tobytes() for k, v in r.program.weights.items()} == before


def test_classes_of_probability_0_add_no_entropy():
    x, w = rng.normal(size=(9, 3)).astype("f4"), rng.normal(size=(4, 3)).astype("f4")
    w[:, 0], w[3], x[:, 0] = 0, [-1e38, 0, 0], 40.0
    step, feeds = head(w, ex.integrity(gamma=0.0), {"x": x, "targets": rng.integers(0, 3, 9)})
    step(feeds)
    epsilon, tau = by_numpy(x, w[:3], feeds["targets"])
    assert not step.skipped
    assert step.reports["integrity.epsilon"].item() == pytest.approx(epsilon, rel=1e-5)
    assert step.reports["integrity.tau"].item() == pytest.approx(tau, rel=1e-5)


def test_settings_out_of_range_and_unknown_names_are_refused():
    settings: list[dict[str, Any]] = [{"alpha": 0.0}, {"gamma": 1.5}, {"window": 0}]
    for wrong in settings:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            ex.integrity(**wrong)
    with pytest.warns(UserWarning, match="at most"):
        ex.integrity(alpha=20.0)
    x, w = rng.normal(size=(9, 3)).astype("f4"), rng.normal(size=(4, 3)).astype("f4")
    step, feeds = head(w, ex.integrity(logits="scores"), {"x": x, "targets": rng.integers(0, 4, 9)})
    with pytest.raises(UsageError, match="scores"):
        step(feeds)
