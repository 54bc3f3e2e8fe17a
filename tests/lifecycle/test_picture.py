"""The picture of a life: its shapes are the events and the figures of the log."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

import pytest
from bonsai import begin, cared, train

from graphwright import lifecycle as lf
from graphwright.graph import Chain
from graphwright.lifecycle.figures import POINTS, Curve, Figures
from graphwright.lifecycle.log import KINDS, LifeLog
from graphwright.lifecycle.picture import draw, life_lines

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
    figures = Figures(3, curve=curve)
    assert Figures.from_json(figures.to_json()) == figures
