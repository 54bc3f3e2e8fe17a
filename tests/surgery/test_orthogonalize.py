"""Orthogonalising a model: errors as stored, exact folds, heads, drift, and what is refused; beside numpy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from networks import interrupting

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.program import EmptySelection, Program
from graphwright.surgery.orthogonal.methods import gram_error, polar

ATTENTION = "layers.*.attn.{q,k,v,o}"
BOUND = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


def opened(dtype: str = "float32", compute: str = "float32"):
    return gw.open(tiny_llama.directory("f32"), dtype=dtype, compute=compute)


def weight(p: Program, path: str) -> np.ndarray:
    return p.weights.array(p.key(p.node(path))).to_numpy("float64")


@pytest.fixture(scope="module")
def data() -> sg.Calibration:
    return sg.Calibration(tiny_llama.batch(1, 8)[0])


@pytest.mark.parametrize("method", ["polar", "qr", "newton_schulz"])
@pytest.mark.parametrize("dtype", BOUND)
def test_the_reported_error_is_that_of_the_stored_weight(dtype: str, method: str) -> None:
    model = opened(dtype, "float64" if dtype == "float64" else "float32")
    found = model.orthogonalize(ATTENTION, method)
    assert found.method == method
    assert len(found.rows) == 8
    for row in found.rows:
        stored = weight(model.program, row.path)
        assert gram_error(stored) == pytest.approx(row.error, abs=1e-15)
        assert row.error <= BOUND[dtype]
        assert row.condition_after - 1 <= 2 * BOUND[dtype] * max(row.shape)
    if dtype == "float64":
        assert found.mean_error <= 1e-8
        assert all(row.condition_after - 1 <= 1e-8 for row in found.rows)
    assert found.mean_error == pytest.approx(np.mean([r.error for r in found.rows]))


def test_selected_matrices_are_processed_or_skipped_with_a_reason() -> None:
    p = opened().program
    found = sg.orthogonalize(p, "**", dry_run=True)
    assert {r.path for r in found.rows} | {s.path for s in found.skipped} == {p.path(n) for n in p.params()}
    reasons = {s.path: s.reason for s in found.skipped}
    assert "named" in reasons["embed.weight"]
    assert "named" in reasons["lm_head.weight"]
    assert "dimension" in reasons["norm.weight"]
    assert sg.orthogonalize(p, "lm_head", dry_run=True).rows[0].shape == (256, 64)
    wide = sg.orthogonalize(p, "layers.0.attn.k", dry_run=True).rows[0]
    assert wide.shape == (32, 64)
    assert wide.error <= 1e-5
    assert wide.distance > 0.1  # wide ones are processed, not counted as 0


@pytest.mark.parametrize("per", ["matrix", "head"])
def test_inserting_the_second_factor_keeps_the_function(per: Any) -> None:
    for dtype, bound in (("float64", 1e-8), ("float32", 1e-5)):
        model = opened(dtype, dtype)
        ids = tiny_llama.batch(3, 4)[0]
        feeds = {"ids": ids, "positions": np.broadcast_to(np.arange(64), ids.shape).copy()}
        before = model.program.run(feeds, keep="outputs")["logits"].to_numpy()
        start = model.program.hash()
        found = model.orthogonalize(ATTENTION, fold="insert", per=per)
        after = model.program.run(feeds, keep="outputs")["logits"].to_numpy()
        assert np.abs(after - before).max() <= bound * np.abs(before).max()
        assert model.program.hash() != start
        assert model.program.op(model.program.node("layers.0.attn.q.inner")) == "linear"
        assert found.max_error <= BOUND[dtype]
        assert len(model.program.journal) == 1
        model.program.undo()
        assert model.program.hash() == start


def test_a_bias_is_added_after_both_factors() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 6))
    for shape in ((4, 6), (9, 6)):
        w, bias = rng.standard_normal(shape), rng.standard_normal(shape[0])
        b = gw.Builder("one")
        operands = b.input("x", ("B", 6), "float64"), b.param("fc.weight", w), b.param("fc.bias", bias)
        b.output(b.linear(*operands, name="fc"), "y")
        p = b.build()
        sg.orthogonalize(p, "fc", fold="insert")
        assert np.abs(p(x=x)["y"].numpy() - (x @ w.T + bias)).max() <= 1e-12


def test_heads_are_made_orthonormal_one_by_one() -> None:
    p = opened("float64", "float64").program
    before = {name: weight(p, f"layers.1.attn.{name}.weight") for name in "qkvo"}
    found = sg.orthogonalize(p, "layers.1.attn.{q,k,v,o}", per="head")
    assert [r.parts for r in found.rows] == [4, 2, 2, 4]
    for name, count in (("q", 4), ("k", 2), ("v", 2), ("o", 4)):
        now = weight(p, f"layers.1.attn.{name}.weight")
        axis = 1 if name == "o" else 0
        for was, block in zip(np.split(before[name], count, axis), np.split(now, count, axis), strict=True):
            assert gram_error(block) <= 1e-10
            assert np.abs(block - polar(was)).max() <= 1e-12
        assert gram_error(now) > 1e-3  # the whole is not: a matrix of orthonormal tiles is no orthonormal matrix


def test_orthogonalising_one_head_keeps_the_bytes_of_the_others() -> None:
    p = opened().program
    before = {name: weight(p, f"layers.1.attn.{name}.weight") for name in "qkvo"}
    found = sg.orthogonalize(p, p.select("layers.1.attn").heads[3])
    assert len(found.rows) == 4
    indices = {"q": (0, range(48, 64)), "k": (0, range(16, 32)), "v": (0, range(16, 32)), "o": (1, range(48, 64))}
    for name, (axis, mine) in indices.items():
        was, now = before[name], weight(p, f"layers.1.attn.{name}.weight")
        others = [i for i in range(was.shape[axis]) if i not in mine]
        assert np.array_equal(np.take(was, others, axis), np.take(now, others, axis))
        assert gram_error(np.take(now, mine, axis)) <= 1e-5


def test_absorbing_values_into_the_output_map_is_exact() -> None:
    model = opened("float64", "float64")
    ids = tiny_llama.batch(3, 4)[0]
    feeds = {"ids": ids, "positions": np.broadcast_to(np.arange(64), ids.shape).copy()}
    before = model.program.run(feeds, keep="outputs")["logits"].to_numpy()
    nodes = len(model.program)
    model.orthogonalize("layers.*.attn.v", per="head", fold="absorb")
    after = model.program.run(feeds, keep="outputs")["logits"].to_numpy()
    assert np.abs(after - before).max() <= 1e-8
    assert len(model.program) == nodes
    for block in np.split(weight(model.program, "layers.0.attn.v.weight"), 2):
        assert gram_error(block) <= 1e-10
    with pytest.raises(sg.NotAbsorbable) as refused:
        model.orthogonalize("layers.*.attn.q", per="head", fold="absorb")
    assert refused.value.between == "rope layers.0.attn.rope_q"
    with pytest.raises(sg.NotAbsorbable, match=r"factor P"):
        model.orthogonalize("layers.*.attn.{v,k}", per="head", fold="absorb")


def test_no_other_scale_gives_a_smaller_error() -> None:
    p = opened("float64", "float64").program
    w = weight(p, "layers.0.attn.k.weight")
    row = sg.orthogonalize(p, "layers.0.attn.k", fold="scale").rows[0]
    now = weight(p, "layers.0.attn.k.weight")
    q = polar(w)
    assert row.scale == pytest.approx(np.linalg.svd(w, compute_uv=False).mean())
    assert np.abs(now - row.scale * q).max() <= 1e-12
    assert all(np.linalg.norm(w - now) <= np.linalg.norm(w - s * q) for s in np.linspace(0.5, 1.5, 101) * row.scale)


def test_predicted_drift_matches_measured_drift(data: sg.Calibration) -> None:
    model = opened("float64", "float64")
    p, old = model.program, model.program.fork()
    found = sg.orthogonalize(p, ATTENTION, calibration=data)
    (feeds,) = data.feeds(old)
    layers = [row.path.removesuffix(".weight") for row in found.rows]
    runs = [q.run(feeds, keep="outputs", capture=layers) for q in (old, p)]
    a, b = (r["logits"].to_numpy() for r in runs)
    assert found.drift is not None
    assert found.drift.relative == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-6)
    assert found.drift.max_abs == pytest.approx(np.abs(b - a).max(), rel=1e-6)
    assert found.drift.same_top == pytest.approx((a.argmax(-1) == b.argmax(-1)).mean())
    assert found.drift.relative > 0.05  # Q alone is no lossless step, and the report says so
    pa, pb = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    assert found.drift.kl == pytest.approx((pa * np.log(pa / pb)).sum(-1).mean(), rel=1e-6)
    for row, layer in zip(found.rows, layers, strict=True):
        x, y = (r.value(layer).to_numpy() for r in runs)
        assert row.measured is not None
        assert row.measured.relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-6)
    first = next(r for r in found.rows if r.path == "layers.0.attn.v.weight")  # nothing before it has changed
    assert first.measured is not None
    assert first.predicted == pytest.approx(first.measured.relative, rel=1e-6)
    assert "logits differ" in str(found)


def test_a_dry_run_reports_the_same_and_changes_nothing(data: sg.Calibration) -> None:
    p = opened().program
    start = p.hash()
    planned = sg.orthogonalize(p, ATTENTION, fold="insert", calibration=data, dry_run=True).to_json()
    assert p.hash() == start
    assert not len(p.journal)
    done = sg.orthogonalize(p, ATTENTION, fold="insert", calibration=data).to_json()
    for facts in (planned, done):
        facts.pop("dry_run")
        for row in facts["rows"]:
            row.pop("seconds")
    assert json.loads(json.dumps(planned)) == json.loads(json.dumps(done))


def test_in_place_keeps_the_memory_of_the_weight() -> None:
    def built() -> Program:
        b = gw.Builder("one")
        w = np.random.default_rng(0).standard_normal((6, 6))
        b.output(b.linear(b.input("x", ("B", 6), "float64"), b.param("fc.weight", w), name="fc"), "y")
        return b.build()

    for inplace in (True, False):
        p = built()
        seen = p.weights["fc.weight"].data
        address, before = seen.to_numpy().ctypes.data, seen.to_numpy().copy()
        sg.orthogonalize(p, "fc", inplace=inplace)
        assert (p.weights["fc.weight"].data.to_numpy().ctypes.data == address) is inplace
        assert gram_error(weight(p, "fc.weight")) <= 1e-10
        p.undo()
        assert np.array_equal(p.weights["fc.weight"].data.to_numpy(), before)


def test_a_tied_weight_is_processed_once() -> None:
    p = gw.open("bundled").program
    found = sg.orthogonalize(p, "{embed,lm_head}", fold="insert")
    assert [r.path for r in found.rows] == ["embed.weight"]
    assert {p.op(n) for n in p.select("embed.*") if p.op(n) != "param"} <= {"linear", "cast", "embedding", "permute"}


def test_every_option_changes_the_result() -> None:
    p = opened().program
    square = "layers.0.attn.q"
    base = sg.orthogonalize(p, square, dry_run=True).rows[0]
    others: list[dict[str, Any]] = [{"method": "qr"}, {"per": "head"}, {"fold": "scale"}]
    for options in others:
        other = sg.orthogonalize(p, square, dry_run=True, **options).rows[0]
        assert (other.distance, other.error) != (base.distance, base.error), options
    moved, plain = (sg.orthogonalize(p, "layers.*.attn.{q,o}", special=s, dry_run=True).rows for s in (True, False))
    assert [a.distance for a in moved] != [b.distance for b in plain]  # one of them has determinant -1


def test_refused_calls_change_nothing() -> None:
    p = opened().program
    start = p.hash()
    with pytest.raises(EmptySelection):
        sg.orthogonalize(p, "layers.9.attn.q")
    with pytest.raises(EmptySelection):
        sg.orthogonalize(p, "norm")
    refused: list[tuple[dict[str, Any], str]]
    refused = [({"method": "svd"}, "method"), ({"per": "tile"}, "per"), ({"fold": "both"}, "fold")]
    refused += [({"fold": "absorb"}, "per head"), ({"fold": "insert", "inplace": True}, "inplace")]
    for options, text in refused:
        with pytest.raises(ValueError, match=text):
            sg.orthogonalize(p, ATTENTION, **options)
    with p.edit("damage") as e:
        e.set_weight("layers.1.attn.o.weight", lambda w: np.where(np.arange(w.size).reshape(w.shape) == 130, np.nan, w))
    damaged = p.hash()
    with pytest.raises(sg.NonFiniteWeight) as found:
        sg.orthogonalize(p, ATTENTION)
    assert (found.value.key, found.value.index) == ("model.layers.1.self_attn.o_proj.weight", (2, 2))
    assert p.hash() == damaged
    p.undo()
    assert p.hash() == start


def test_an_interrupted_run_is_undone_or_keeps_finished_matrices() -> None:
    p = opened().program
    start = p.hash()

    stop = interrupting(3)
    with pytest.raises(KeyboardInterrupt):
        sg.orthogonalize(p, ATTENTION, progress=stop)
    assert p.hash() == start
    kept = sg.orthogonalize(p, ATTENTION, progress=stop, keep_partial=True)
    assert (len(kept.rows), kept.interrupted) == (3, True)
    assert len(kept.rows) + len(kept.skipped) == 8
    p.undo()
    assert p.hash() == start


def test_integer_matrices_are_refused() -> None:
    b = gw.Builder("ints")
    table = b.param("table.weight", np.arange(12).reshape(4, 3), trainable=False)
    b.output(b.embedding(table, b.input("ids", ("B",), "int64"), name="table"), "y")
    with pytest.raises(sg.DtypeUnsupported):
        sg.orthogonalize(b.build(), "table")
