"""Reports: moments against numpy, comparisons against slow ones, and figures made again from the journal."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prune_models import convolutional, gpt2_like, images

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.errors import ShapeError, UsageError
from graphwright.surgery.compare import Moments
from graphwright.surgery.measure import quality

LEARNED, HELD = tiny_llama.batch(21, 48)[0], tiny_llama.batch(22, 8)[0]
numbers = st.lists(st.floats(-1e3, 1e3), max_size=12)


def close(found: Moments, values: list[float]) -> None:
    a = np.array(values)
    assert found.count == len(a)
    if len(a):
        expected = (a.mean(), a.std(), a.min(), a.max())
        np.testing.assert_allclose((found.mean, found.std, found.least, found.most), expected, rtol=1e-9, atol=1e-6)


@settings(deadline=None)
@given(numbers, numbers)
def test_merged_moments_match_moments_of_all_numbers(a, b):
    close(Moments.of(a), a)
    close(Moments.of(a) | Moments.of(b), a + b)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), numbers, max_size=3), st.dictionaries(st.sampled_from("abcd"), numbers))
def test_merged_reports_equal_the_report_of_the_union(left, right):
    made = []
    for part in (left, right):
        report = sg.ErrorReport()
        for name, values in part.items():
            report.add(name, values, seconds=1.0)
        made.append(report)
    both = made[0] | made[1]
    for name in {*left, *right}:
        close(both.layers[name], left.get(name, []) + right.get(name, []))
    close(both.whole, [v for part in (left, right) for values in part.values() for v in values])


def test_a_report_lists_the_worst_first_and_shows_ten():
    report = sg.ErrorReport()
    for i in range(14):
        report.add(f"layer{i:02}", np.array([i, 2.0 * i]), drift=0.1 * i)
    rows = report.to_json()["layers"]
    assert [r["layer"] for r in rows] == [f"layer{i:02}" for i in range(13, -1, -1)]
    assert rows[0] == {"layer": "layer13", "count": 2, "mean": 19.5, "std": 6.5, "min": 13.0, "max": 26.0, "drift": 1.3}
    shown = str(report)
    assert "layer04" in shown
    assert "layer03" not in shown
    assert "4 more layers" in shown


def test_compare_matches_a_reference_comparison():
    a = gw.open(tiny_llama.directory("f32"))
    b = gw.open(tiny_llama.directory("f32"))
    key = "model.layers.1.mlp.up_proj.weight"
    with b.program.edit("another") as e:
        e.set_weight(key, lambda w: w + 0.02 * np.random.default_rng(0).normal(size=w.shape))
    found = sg.compare(a, b, HELD)
    x, y = (m.logits(HELD).astype(np.float64) for m in (a, b))
    assert found.outputs["max_abs"] == pytest.approx(np.abs(x - y).max(), rel=1e-4)
    assert found.outputs["relative"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-4)
    logs = [z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (x, y)]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    assert found.outputs["kl_mean"] == pytest.approx(kl.mean(), rel=1e-3)
    assert found.outputs["kl_max"] == pytest.approx(kl.max(), rel=1e-3)
    assert found.outputs["top1"] == pytest.approx((x.argmax(-1) == y.argmax(-1)).mean())
    everything = np.ones((len(HELD), 63), bool)
    for reported, z in zip(found.outputs["perplexity"], (x, y), strict=True):
        assert reported == pytest.approx(np.exp(tiny_llama.loss(z, HELD, everything)), rel=1e-5)
    greedy = [[m.generate(row[:8], 16).ids for row in HELD[:4]] for m in (a, b)]
    assert found.outputs["greedy"] == pytest.approx(np.mean(np.array(greedy[0]) == np.array(greedy[1])))
    changed = {k for k, w in found.weights.items() if not w["equal"]}
    assert changed == {key}
    v, w = (m.program.weights[key].numpy().astype("f8").reshape(-1) for m in (a, b))
    assert found.weights[key]["cosine"] == pytest.approx(v @ w / np.linalg.norm(v) / np.linalg.norm(w))
    assert found.weights[key]["relative"] == pytest.approx(np.linalg.norm(w - v) / np.linalg.norm(v))
    assert not found.equal
    assert sg.compare(a, a, HELD).equal
    json.dumps(found.to_json())


def test_a_comparison_without_scored_tokens_has_no_perplexity():
    a = gw.open(tiny_llama.directory("f32"))
    assert np.isnan(sg.compare(a, a, [[1], [2]]).outputs["perplexity"]).all()
    with pytest.raises(UsageError, match="prompts"):
        sg.compare(a, a, HELD, prompts=0)


def test_bits_per_byte_count_invalid_utf8_as_bytes():
    """Windows begin and end within characters; a part of a character counts as the bytes that it has."""
    m = gw.open("bundled")
    data = sg.Calibration("où est le café ? " * 40, max_tokens=128, context=13, tokenizer=m.tokenizer)
    found = quality(m.program, data, tokenizer=m.tokenizer)
    score = m.perplexity(data.held["ids"], window=13, stride=12)
    assert found["bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-6)


def test_activation_memory_is_the_size_of_live_values_and_falls_after_a_cut():
    rng, b = np.random.default_rng(0), gw.Builder("wide")
    up, down = (b.param(n, rng.normal(size=s).astype("f4")) for n, s in (("up", (512, 8)), ("down", (8, 512))))
    b.output(b.linear(b.tanh(b.linear(b.input("x", ("B", 8)), up, name="h")), down), "y")
    p = b.build()
    for kept in (512, 128):
        for rows in (64, 256):
            taken = sg.activation_memory(p, {"x": np.zeros((rows, 8), "f4")})
            assert 4 * rows * (kept + 8) <= taken <= 4 * rows * (2 * kept + 16) + 256
        if kept == 512:
            with p.edit("cut") as e:
                e.cut_units(p.axes()["up:0"].units(range(384)))


def test_programs_without_a_common_weight_are_not_equal():
    p, q = convolutional(), convolutional()
    with q.edit("other names") as e:
        for node in list(q.params()):
            e.rename(node, f"other.{q.path(node)}", key=f"other.{q.key(node)}")
    found = sg.compare(p, q, images(4))
    assert not found.weights
    assert not found.equal
    assert len(found.missing) == len(found.extra) == 6
    assert found.outputs["max_abs"] == 0
    cut = convolutional()
    cut.select("first").channels[:2].prune()
    assert sg.compare(p, cut, images(4)).reshaped == ("first.weight", "first.bias", "second.weight")
    with pytest.raises(ShapeError):
        sg.compare(gpt2_like(), gpt2_like(vocab=31), HELD % 29)
    with pytest.raises(UsageError):
        sg.compare(p, q, {})


@pytest.mark.parametrize(
    ("share", "options"),
    [(0.1, {"recipe": "units"}), (0.6, {"recipe": "modules"}), (0.1, {"kinds": ("kv_groups",), "recipe": "units"})],
)
def test_reports_are_recomputed_from_the_journal(share, options):
    p = gw.open(tiny_llama.directory("f32")).program
    cal = sg.Calibration(LEARNED, 1024, held_out=HELD)
    report = sg.prune(p, sg.Ratio(share), cal, timed=False, **options)
    assert (share < 0.5) or len(report.steps) > 1
    with p.edit("something else") as e:
        e.set_weight("norm.weight", lambda w: 1.0 * w)
    again = sg.optimise_report(p, sg.Calibration(LEARNED, 1024, held_out=HELD))
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(report.figures()))
    p.undo(2)
    with pytest.raises(UsageError, match="no pruning"):
        sg.optimise_report(p, cal)
