"""Pruning of a trained model: what it costs, what the report says, plans, undo, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from prune_models import convolutional, images

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.errors import UsageError
from graphwright.models.inspect import flops
from graphwright.progress import Progress
from graphwright.surgery.calibration import Stream
from graphwright.surgery.errors import NothingToPrune, StaleStep
from graphwright.surgery.matrices import NonFiniteWeight
from graphwright.surgery.measure import nats
from graphwright.surgery.pruning.prunable import scope_nodes
from graphwright.surgery.pruning.restore import GramSum, error_of

LEARNED, HELD = tiny_llama.batch(11, 128)[0], tiny_llama.batch(12, 64)[0]


def opened() -> gw.Model:
    return gw.open(tiny_llama.directory("f32"))


def data(tokens: int = 8192) -> sg.Calibration:
    return sg.Calibration(LEARNED, tokens, held_out=HELD)


@pytest.fixture(scope="module")
def pruned() -> tuple[gw.Model, gw.Program, sg.PruneReport]:
    """The model, 30 % of its layers' parameters gone; the program before; the report."""
    model = opened()
    before = model.program.fork()
    return model, before, sg.prune(model, sg.Ratio(0.3), data())


def test_a_trained_model_keeps_its_accuracy_without_training(pruned):
    model, before, _ = pruned
    ids, mask = tiny_llama.batch(13, 256)
    was, now = (tiny_llama.accuracy(_logits(p, ids), ids, mask) for p in (before, model.program))
    assert was >= 0.95
    assert now >= was - 0.01


def _logits(p: gw.Program, ids: np.ndarray) -> np.ndarray:
    feeds = {"ids": ids, "positions": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()}
    return p.run(feeds, keep="outputs")["logits"].to_numpy()


@pytest.mark.deep
def test_other_criteria_lose_more_even_with_restoration():
    """On text, in bits per byte: the bundled model at 40 %."""
    model = gw.open("bundled")
    cal = sg.Calibration.of(model, max_tokens=2048, context=256)
    found = {}
    for method in ("greedy", "magnitude", "random"):
        scope = None if method == "greedy" else "layer"
        p = model.program.fork()
        sg.prune(p, sg.Ratio(0.4), cal, method=method, scope=scope, recipe="units", timed=False)
        found[method] = nats(Stream(p, cal.feeds(p, held=True)))
    assert found["greedy"] < 0.95 * min(found["magnitude"], found["random"])


def test_a_target_ratio_is_reached_within_one_block_of_units(pruned):
    model, before, report = pruned
    counts = [sum(p.spec(n).size for n in p.params() if n in scope_nodes(p)) for p in (before, model.program)]
    assert (report.reached["before"], report.reached["after"]) == tuple(counts)
    assert 0.7 * counts[0] - 16 * 3 * 64 < counts[1] <= 0.7 * counts[0]


def test_every_number_of_the_report_can_be_recomputed(pruned):
    model, before, report = pruned
    for p, facts in ((before, report.before), (model.program, report.after)):
        weights = [p.weights.array(p.key(n)) for n in p.params()]
        assert facts["parameters"] == sum(int(np.prod(w.shape)) for w in weights)
        assert facts["bytes"] == sum(w.nbytes for w in weights)
        assert facts["flops"] == flops(p, {"B": 1, "T": 1})
        assert facts["nats"] == pytest.approx(tiny_all(_logits(p, HELD), HELD), rel=1e-5)
        assert facts["perplexity"] == pytest.approx(math.exp(facts["nats"]))
    assert report.speed is not None
    assert report.speed.low <= report.speed.ratio <= report.speed.high
    plans = {prefer: model.export_plan(prefer) for prefer in ("class", "size")}
    assert report.files == {
        "before": {"level": 1, "bytes": report.before["bytes"]},
        **{name: {"level": plan.level, "bytes": plan.bytes} for name, plan in plans.items()},
    }
    assert report.files["size"]["bytes"] == report.after["bytes"]
    assert report.journal == model.program.journal.hash
    assert report.calibration["tokens"] == 8192
    for step in report.steps:
        assert step.params == sum(math.prod(a) - math.prod(b) for a, b in step.shapes.values())
        for key, (a, b) in step.shapes.items():
            assert (before.weights.array(key).shape, model.program.weights.array(key).shape) == (a, b)


def tiny_all(logits: np.ndarray, ids: np.ndarray) -> float:
    return tiny_llama.loss(logits, ids, np.ones((len(ids), ids.shape[1] - 1), bool))


def test_the_errors_of_a_step_match_the_two_programs(pruned):
    """The last step: layers before it are as they are in the pruned program, its own product as it was."""
    model, before, report = pruned
    step = report.steps[-1]
    assert step.name == "layers.1.mlp.neurons"
    mixed, after = model.program.fork(), model.program
    stay = np.delete(np.arange(step.size), step.units)
    for held, reported in ((False, step.error), (True, step.held_out)):
        rows = []
        for feeds in data().feeds(before, held=held):
            x = after.run(feeds).value("layers.1.mlp.norm").to_numpy("float64").reshape(-1, 64)
            gate, up = (
                x @ before.weights[f"model.layers.1.mlp.{n}_proj.weight"].numpy().T.astype("f8") for n in ("gate", "up")
            )
            rows.append(gate / (1 + np.exp(-gate)) * up)
        a = np.concatenate(rows)
        w, made = (p.weights["model.layers.1.mlp.down_proj.weight"].numpy().astype("f8") for p in (before, after))
        y = a @ w.T
        measured = ((a[:, stay] @ made.T - y) ** 2).sum() / (y**2).sum()
        assert reported == pytest.approx(measured, rel=1e-3)
        if not held:
            assert step.plain == pytest.approx(error_of(w, w[:, stay], GramSum.of(a).moments(), stay), rel=1e-3)
    assert step.error <= step.plain
    del mixed


def test_undo_restores_every_byte_and_the_model_still_runs(pruned):
    model, before, _ = pruned
    made = model.generate(HELD[0, :20], 12).ids
    ids = HELD[0, :20]
    for _ in range(12):
        ids = np.append(ids, model.logits(ids)[-1].argmax())
    assert made == ids[20:].tolist()
    entry = model.program.journal[-1]
    assert entry.author == "pass"
    after = model.program.hash()
    model.program.undo()
    assert model.program.hash() == before.hash()
    model.program.redo()
    assert model.program.hash() == after


def test_pruning_nothing_makes_no_edit():
    model = opened()
    report = model.prune(sg.Ratio(0.0), data(512), timed=False)
    assert report.empty
    assert not report.steps
    assert len(model.program.journal) == 0
    assert report.after == report.before


def test_single_steps_match_the_whole_plan_and_planning_changes_nothing():
    one, two = opened().program, opened().program
    before = one.hash()
    plan = sg.prune(one, sg.Ratio(0.25), data(2048), dry_run=True, timed=False)
    assert one.hash() == before
    assert len(one.journal) == 0
    assert len(plan.steps) >= 2
    plan.apply()
    for step in plan.steps:
        step.apply(two)
    assert one.hash() == two.hash()
    assert len(one.journal) == 1
    assert len(two.journal) == len(plan.steps)
    assert plan.report.after["nats"] == pytest.approx(nats(Stream(one, data(2048).feeds(one, held=True))))
    assert "down_proj.weight: [64, 128] => [64, " in plan.details()
    assert plan.report.to_json()["layers"][0]["name"] == plan.steps[0].name


def test_a_step_whose_group_was_edited_is_refused():
    p = opened().program
    plan = sg.prune(p, sg.Ratio(0.25), data(1024), dry_run=True, timed=False)
    with p.edit("meanwhile") as e:
        e.set_weight("layers.1.mlp.up.weight", lambda w: 1.01 * w)
    before = p.hash()
    with pytest.raises(StaleStep, match="up_proj"):
        plan.apply()
    assert p.hash() == before


def test_layers_are_scored_on_the_outputs_of_pruned_layers():
    plans = [sg.prune(opened().program, sg.Ratio(0.3), data(2048), dry_run=True, timed=False, recipe="units",
                      scope="layer", method="obs", sequential=s) for s in (True, False)]  # fmt: skip
    assert [s.name for s in plans[0].steps] == ["layers.0.mlp.neurons", "layers.1.mlp.neurons"]
    assert plans[0].steps[0].units == plans[1].steps[0].units
    assert plans[0].steps[1].quantiles != plans[1].steps[1].quantiles
    p = opened().program
    dense = sg.scores(p.axes()["layers.1.mlp.neurons"], data(2048), "obs")
    np.testing.assert_allclose(plans[1].steps[1].quantiles, np.quantile(dense, [0, 0.25, 0.5, 0.75, 1]), rtol=1e-9)
    assert plans[1].steps[1].units == tuple(np.sort(np.argsort(dense, kind="stable")[: len(plans[1].steps[1].units)]))


def test_restoring_is_never_worse_in_any_layer():
    plan = sg.prune(
        opened().program, sg.Ratio(0.4), data(2048), dry_run=True, timed=False, recipe="units", method="magnitude"
    )
    for step in plan.steps:
        assert step.error is not None
        assert step.plain is not None
        assert step.error <= step.plain
        assert step.weights
        assert step.ridge == 1e-4


@pytest.mark.deep
def test_each_option_changes_the_plan():
    """Every public argument but the seed of a method that draws nothing."""

    def made(**options: Any) -> tuple[Any, ...]:
        given = {"recipe": "units", "round_to": 1, **options}
        plan = sg.prune(
            opened().program, given.pop("target", sg.Ratio(0.25)), data(1024), dry_run=True, timed=False, **given
        )
        return tuple(
            (s.name, s.units, tuple(sorted((k, a.tobytes()) for k, a in s.weights.items()))) for s in plan.steps
        )

    base = made()
    assert base == made()
    for options in (
        {"method": "wanda"}, {"method": "taylor"}, {"method": "obs"}, {"scope": "layer"}, {"scope": "global"},
        {"scope": "kind", "method": "wanda"}, {"kinds": ("kv_groups",), "target": sg.Ratio(0.1)}, {"where": "layers.1"},
        {"protect": "layers.0.mlp"}, {"round_to": 16}, {"min_keep": 0.6}, {"uniform": True}, {"restore": False},
        {"sequential": False}, {"ridge": 0.05}, {"recipe": "modules"}, {"target": sg.Ratio(0.25, "flops")},
    ):  # fmt: skip
        assert made(**options) != base, options
    assert made(method="random", seed=1) != made(method="random", seed=2)


def test_sizes_are_multiples_and_protected_layers_stay():
    p = opened().program
    plan = sg.prune(
        p, sg.Ratio(0.25), data(1024), round_to=16, dry_run=True, timed=False, recipe="units", protect="layers.0"
    )
    (step,) = plan.steps
    assert step.name == "layers.1.mlp.neurons"
    assert (step.size - len(step.units)) % 16 == 0
    same = sg.prune(p, sg.Ratio(0.2), data(1024), uniform=True, dry_run=True, timed=False, recipe="units")
    assert len({len(s.units) for s in same.steps}) == 1


def test_uniform_layers_lose_no_attention_module():
    """One layer without attention would be unlike the others, and the original class has no such layer."""
    model = opened()
    report = sg.prune(model, sg.Ratio(0.2), data(1024), uniform=True, timed=False)
    assert [a["share"] for a in report.attempts] == [0]
    assert model.export_plan().level == 2


def test_the_text_names_each_attempt(pruned):
    *_, report = pruned
    at = next(i for i, row in enumerate(str(report).splitlines()) if row.startswith("  tried"))
    rows = str(report).splitlines()[at : at + 3]
    assert "units alone: a loss of " in rows[0]
    assert rows[0].endswith(" on the calibration data")
    assert [row.split(":")[0].strip() for row in rows[1:]] == [f"{k} % as attention modules" for k in (25, 50)]


def test_the_report_of_a_convolutional_network_counts_samples():
    report = sg.prune(convolutional(), 0.2, sg.Calibration(images(512)), timed=False)
    assert [a["share"] for a in report.attempts] == [0], "there is no attention to remove"
    text = str(report)
    assert "token" not in text
    assert f"FLOP/sample   {report.before['flops']:,.0f} => {report.after['flops']:,.0f}" in text
    assert f"parameters    {report.before['parameters']:,.0f} => {report.after['parameters']:,.0f}" in text
    assert "384 samples learned from, 128 held out" in text


@pytest.mark.parametrize(
    ("kind", "ragged"), [("kv_groups", False), ("queries", False), ("heads", True), ("head_dim", False)]
)
def test_heads_are_cut_by_group_equally_or_singly(kind, ragged):
    model = opened()
    report = sg.prune(model, sg.Ratio(0.06), data(1024), kinds=(kind,), recipe="units", timed=False)
    assert report.steps
    assert all(s.ragged is ragged and s.weights for s in report.steps)
    assert model.generate(HELD[0, :8], 4).ids[0] == int(model.logits(HELD[0, :8])[-1].argmax())


def test_a_recurrent_network_is_refused_with_the_reason_of_its_axis():
    """Its recurrent weight has the axis twice, as result and as operand."""
    net, state = gw.nn.LSTM(3, 4), np.zeros((1, 2, 4), "f4")
    p = gw.trace(net, np.zeros((5, 2, 3), "f4"), (state, state))
    with pytest.raises(NothingToPrune, match="is an input of the program"):
        sg.prune(p, 0.2)


def test_a_number_is_the_share_of_a_ratio():
    reports = [sg.prune(opened(), target, data(512), timed=False) for target in (0.1, sg.Ratio(0.1))]
    assert reports[0].target == reports[1].target
    assert reports[0].steps[0].units == reports[1].steps[0].units
    with pytest.raises(UsageError, match="share") as caught:
        sg.prune(opened(), 1.5, data(512))
    assert "1.5" in str(caught.value)


def test_an_unreachable_target_reports_the_nearest_reachable_one():
    p = opened().program
    with pytest.raises(sg.BudgetUnreachable) as caught:
        sg.prune(p, sg.Ratio(0.9), data(512), timed=False)
    assert caught.value.best > caught.value.asked
    assert len(p.journal) == 0


def test_invalid_requests_are_refused_before_anything_runs():
    p = opened().program
    with pytest.raises(NothingToPrune):
        sg.prune(p, sg.Ratio(0.1), data(512), where="embed")
    with pytest.raises(sg.MissingCalibration):
        sg.prune(p, sg.Ratio(0.1))
    with pytest.raises(sg.CalibrationTooSmall, match="noise"):
        sg.prune(p, sg.Ratio(0.1), sg.Calibration(LEARNED[:4], 64, held_out=HELD[:1]), timed=False)
    with p.edit("broken") as e:
        e.set_weight("layers.1.mlp.up.weight", lambda w: np.where(np.arange(w.size).reshape(w.shape) == 70, np.nan, w))
    with pytest.raises(NonFiniteWeight) as caught:
        sg.prune(p, sg.Ratio(0.1), data(512), timed=False)
    assert caught.value.index == (1, 6)
    assert len(p.journal) == 1


def test_an_interruption_changes_nothing():
    p = opened().program
    before = p.hash()

    def stop(progress: Any) -> None:
        if progress.what == "restoring" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sg.prune(p, sg.Ratio(0.3), data(512), timed=False, progress=stop)
    assert p.hash() == before
    assert p.history.open is None


def test_few_calibration_rows_warn_and_a_ridge_allows_fewer():
    cal = sg.Calibration(LEARNED[:4], 192, held_out=HELD[:1])
    report = sg.prune(opened().program, sg.Ratio(0.1), cal, timed=False, recipe="units")
    assert any("few" in w for w in report.warnings)
    small = sg.Calibration(LEARNED[:4], 64, held_out=HELD[:1])
    assert sg.prune(opened().program, sg.Ratio(0.1), small, timed=False, ridge=0.1, recipe="units").steps


def test_an_exported_model_loads_in_transformers_with_equal_logits(pruned, tmp_path):
    model, _, _ = pruned
    receipt = model.export(tmp_path / "smaller", check="none")
    again = gw.open(tmp_path / "smaller") if receipt.level < 5 else None
    if again is not None:
        np.testing.assert_allclose(again.logits(HELD[:2]), model.logits(HELD[:2]), atol=1e-5)
    assert receipt.to_json()


def test_progress_of_each_phase_ends_at_its_total():
    seen: list[Progress] = []
    opened().prune(sg.Ratio(0.3), data(512), progress=seen.append)
    last = {event.what: event for event in seen}
    assert {"scoring", "restoring"} <= last.keys()
    assert [e for e in last.values() if e.done != e.total] == []
