"""The picture of a life: its shapes are the events and the figures of the log."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
from bonsai import begin, cared, train
from scipy.stats import spearmanr

from graphwright import lifecycle as lf
from graphwright.graph import Chain
from graphwright.lifecycle.figures import LATE, POINTS, Curve, Figures
from graphwright.lifecycle.log import KINDS, LifeLog
from graphwright.lifecycle.picture import draw, life_lines
from graphwright.program.errors import ProgramFileError

pytestmark = pytest.mark.usefixtures("warm")
_ENDS = ("birth", "segment_end")  # where the picture and its curves begin and end


def planted() -> LifeLog:
    log = LifeLog(Chain())
    log.add("birth", 0, {})
    for step, kind, name in [
        (10, "expert_died", "a.0"), (20, "expert_born", "a.7"), (25, "expert_reborn", "a.0"),
        (30, "expert_reborn", "a.7"), (40, "expert_retired", "a.7"), (40, "alarm", "pi"), (41, "edit", "x"),
        *((42 + i, kind, kind) for i, kind in enumerate(KINDS) if kind not in _ENDS and "expert" not in kind),
    ]:  # fmt: skip
        log.add(kind, step, {"name": name, "reason": "planted"})
    return log


def test_the_lives_of_experts_are_those_of_the_log():
    found = {line.name: line.spans for line in life_lines(planted())}
    assert found == {"a.0": [(0, 10), (25, None)], "a.7": [(20, 30), (30, 40)]}


def test_every_event_is_drawn_once():
    log = planted()
    root = ElementTree.fromstring(draw(log, "name <&>", 50, None))
    drawn = Counter(e.get("class", "").removeprefix("event-") for e in root.iter() if "event-" in e.get("class", ""))
    assert drawn == {k: n for k, n in log.counts().items() if k not in _ENDS}
    titles = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert "a.7: expert retired at step 40 (planted)" in titles
    assert "alarm at step 40: planted" in titles
    legend = {e.text for e in root.iter() if e.tag.endswith("text")}
    assert {f"{k.replace('_', ' ')} ({n})" for k, n in drawn.items() if k != "segment_start"} <= legend


def test_a_life_draws_its_loss_and_the_figures_of_its_controller(tmp_path):
    life, run, data = begin(tmp_path / "life")
    cared(run, data, 6)
    text = life.to_svg(tmp_path / "life.svg")
    assert (tmp_path / "life.svg").read_text() == text
    found = re.findall(r"<polyline points=\"([^\"]*)\"[^>]*><title>(\w+)", text)
    assert [(name, len(points.split())) for points, name in found] == [("loss", 6), ("pi", 6), ("d", 6)]
    train(run, data, 7)
    run.end()
    opened = lf.open(tmp_path / "life", readonly=True)
    assert opened.to_svg() == life.to_svg()
    assert opened.figures == life.figures
    assert "expert reborn (1)" in text


def test_a_life_without_steps_is_drawn(tmp_path):
    life, _, _ = begin(tmp_path / "life")
    assert ElementTree.fromstring(life.to_svg()) is not None


def test_a_curve_keeps_the_mean_of_equal_spans_in_bounded_space():
    curve, losses = Curve(), [float(i % 7) for i in range(1000)]
    for step, loss in enumerate(losses, 1):
        curve.add(step, {"loss": loss} | ({"pi": 1.0} if step > 500 else {}) | {"bad": float("nan")})
    assert len(curve.points) < POINTS
    assert curve.stride == 8
    for i, point in enumerate(curve.points):
        span = losses[8 * i : 8 * i + 8]
        assert point["step"] == 8 * i + 8
        assert point["loss"] == pytest.approx(sum(span) / 8)
        assert ("pi" in point) == (point["step"] > 500)
        assert "bad" not in point
    figures = Figures(3, curve=curve, waiting=[(4, 0.5)])
    assert Figures.from_json(figures.to_json()) == figures
    for damaged in ([0.5], [[4]], [["4", 0.5]], [[4, "x"]], [[4, float("nan")]], {}):
        with pytest.raises(ProgramFileError, match="waiting"):
            Figures.from_json({**figures.to_json(), "waiting": damaged})


def test_steps_whose_update_was_skipped_have_no_point_and_do_not_wait():
    figures = Figures(10)
    for loss in (1.0, float("nan"), 2.0):
        figures.add(loss, 1, 0)
    assert figures.waiting == [(11, 1.0), (13, 2.0)]
    figures.enter([{"pi": 0.25}, {"pi": 0.75}])
    assert [(p["step"], p["loss"], p["pi"]) for p in figures.curve.points] == [(11, 1.0, 0.25), (13, 2.0, 0.75)]
    assert (figures.steps, figures.skipped, figures.streak) == (3, 1, 0)


def test_figures_that_come_later_are_entered_at_their_steps():
    at_once, later = Figures(3), Figures(3)
    for step in range(1, 301):
        values = {"pi": step / 7, "d": float("nan") if step % 5 else 1.0}
        at_once.add(step / 3, 1, 0)
        at_once.enter([values])
        later.add(step / 3, 1, 0)
        assert len(later.curve.points) <= step // later.curve.stride
        if step % 10 == 0:
            later.enter([{"pi": s / 7, "d": float("nan") if s % 5 else 1.0} for s in range(step - 9, step + 1)])
    assert at_once == later
    later.add(1.0, 1, 0)
    later.add(2.0, 1, 0)
    later.enter([{"pi": 0.0}])  # of the last step
    assert later.measured["pi"] == [at_once.measured["pi"][0], 301, 0.0]
    for _ in range(2 * LATE):  # of a controller that never tells
        later.add(1.0, 1, 0)
    assert len(later.waiting) <= LATE


def test_rank_correlations_are_those_of_scipy():
    rng, curve = np.random.default_rng(0), Curve()
    a, b = rng.integers(0, 9, 100).astype(float), rng.normal(size=100)
    for step, (x, y) in enumerate(zip(a, b + a / 4, strict=True), 1):
        curve.add(step, {"pi": x, "gradient": y, "same": 1.0} | ({"few": x} if step < 3 else {}))
    found = curve.rank_correlations()
    assert found == {"gradient": {"pi": pytest.approx(spearmanr(a, b + a / 4)[0])}}
    assert 0.1 < found["gradient"]["pi"] < 0.9
