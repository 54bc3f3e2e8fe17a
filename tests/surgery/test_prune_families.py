"""Masked equals pruned in families with biases, fused weights and convolutions; sizes and modules by the programs."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from prune_models import convolutional, gpt2_like, images, outputs

import graphwright as gw
from axis_samples import masked
from graphwright import surgery as sg
from graphwright.models.inspect import flops
from graphwright.program.axes.units import Units
from graphwright.surgery.calibration import Stream
from graphwright.surgery.measure import nats
from graphwright.surgery.pruning.allocate import Footprint, trimmed
from graphwright.surgery.pruning.prunable import cheapest, prunable, remove_branch, residual_branches
from models.checkpoints import make

IDS = np.random.default_rng(3).integers(0, 29, (48, 16))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make(tmp_path_factory.mktemp("qwen"), "qwen2", num_hidden_layers=2, intermediate_size=40).path


def family(name: str, qwen, kind: str):
    """A program, its calibration, and feeds to compare on."""
    if name == "cnn":
        return convolutional(kind), sg.Calibration(images(320, dtype=kind), 256), images(7, 1, kind)
    if name == "gpt2":
        p = gpt2_like(dtype=kind)
    else:
        long = "float64" if kind == "f8" else "float32"
        p = gw.open(qwen, dtype=long, compute=long).program
    feeds = sg.Calibration(IDS, 512).feeds(p)[0]
    return p, sg.Calibration(IDS, 512), feeds


@pytest.mark.parametrize(("kind", "tolerance"), [("f8", 1e-10), ("f4", 1e-5)])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "cnn"])
def test_pruned_units_equal_zeroed_units(name, kind, tolerance, qwen):
    p, cal, feeds = family(name, qwen, kind)
    plan = sg.prune(p, sg.Ratio(0.25), cal, restore=False, recipe="units", timed=False, dry_run=True)
    assert plan.steps
    units = Units(p, {s.name: s.units for s in plan.steps}, {s.name: s.size for s in plan.steps})
    expected = outputs(masked(p, units), feeds)
    before = p.hash()
    plan.apply()
    np.testing.assert_allclose(outputs(p, feeds), expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1))
    p.undo()
    assert p.hash() == before


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "cnn"])
def test_restored_weights_and_biases_reduce_the_output_error(name, qwen):
    p, cal, _ = family(name, qwen, "f4")
    feeds = cal.feeds(p, held=True)[0]
    dense, errors = outputs(p, feeds), []
    for restore in (True, False):
        q = p.fork()
        report = sg.prune(
            q, sg.Ratio(0.2), cal, restore=restore, recipe="units", timed=False, method="wanda", scope="layer"
        )
        errors.append(float(((outputs(q, feeds) - dense) ** 2).mean()))
        assert all(bool(s.weights) is restore for s in report.steps)
        if restore and name != "qwen2":
            assert any(k.endswith("bias") for s in report.steps for k in s.weights)
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "cnn"])
def test_predicted_sizes_match_the_cut_program(name, qwen):
    p, _, _ = family(name, qwen, "f4")
    rng = np.random.default_rng(0)
    kinds = ("neurons", "channels", "kv_groups", "head_dim") if name == "qwen2" else ("neurons", "channels")
    axes = prunable(p, kinds=kinds)
    kept = {a.name: int(rng.integers(1, a.size + 1)) for a in axes}
    found = Footprint(p).of(kept)
    cut = trimmed(p, kept)
    assert found.params == sum(cut.spec(n).size for n in cut.params())
    assert found.bytes == sum(cut.spec(n).nbytes for n in cut.params())
    dims = {d: 1 for n in cut.inputs() for d in cut.spec(n).shape if isinstance(d, str)}
    assert found.flops == flops(cut, dims)


@pytest.mark.parametrize("target", ["Params", "Bytes", "Flops"])
def test_a_budget_of_the_whole_program_is_met_within_one_unit(target):
    p = gpt2_like()
    whole = Footprint(p).of()
    name = {"Params": "params", "Bytes": "bytes", "Flops": "flops"}[target]
    most = int(0.85 * getattr(whole, name))
    report = sg.prune(p, getattr(sg, target)(most), sg.Calibration(IDS, 512), recipe="units", timed=False, round_to=1)
    left = getattr(Footprint(p).of(), name)
    unit = {"params": 2 * 16 + 1, "bytes": 4 * 33, "flops": 2 * 2 * 16 + 8 + 33}[name]
    assert most - unit <= left <= most
    assert report.reached["after"] == left


def test_a_latency_budget_is_measured_on_cut_programs(monkeypatch):
    from graphwright.surgery.pruning import allocate as goal

    asked = []

    def ms(p, feeds):  # a clock that tells the size
        asked.append(1)
        return sum(p.spec(n).size for n in p.params()) / 1000

    monkeypatch.setattr(goal, "milliseconds", ms)
    p = gpt2_like()
    sg.prune(p, sg.Latency(6.5), sg.Calibration(IDS, 512), recipe="units", timed=False)
    assert 6.4 <= ms(p, {}) <= 6.5
    assert len(asked) > 3


def test_prunable_modules_are_branches_of_the_residual_path(qwen):
    p = gw.open(qwen).program
    found = residual_branches(p)
    assert [(m.name, m.kind) for m in found] == [
        ("layers.0.attn.o -> layers.0.mid", "attention"), ("layers.0.mlp.down -> layers.0.out", "mlp"),
        ("layers.1.attn.o -> layers.1.mid", "attention"), ("layers.1.mlp.down -> layers.1.out", "mlp"),
    ]  # fmt: skip
    keys = {p.key(n) for n in found[0].nodes if p.op(n) == "param"}
    own = {k for k in p.weights if k.startswith("model.layers.0.") and "mlp" not in k and "post_attention" not in k}
    assert keys == own


def test_the_first_removed_module_has_the_lowest_loss(monkeypatch):
    p = gpt2_like(layers=6, seed=4)
    feeds = sg.Calibration(IDS, 256).feeds(p)
    found = residual_branches(p)
    assert len(found) == 12
    losses = {}
    for module in found:
        twin = p.fork()
        with twin.edit("without") as e:
            remove_branch(e, module)
        losses[module.name] = nats(Stream(twin, feeds))
    monkeypatch.setattr("graphwright.surgery.pruning.prunable.SHORTLIST", 12)
    best, value = cheapest(p, found, Stream(p, feeds))
    assert best.name == min(losses, key=losses.__getitem__)
    assert value == pytest.approx(losses[best.name], rel=1e-6)


def test_the_shortlist_contains_modules_that_rotate_the_stream_least():
    from graphwright.surgery.pruning.prunable import rotation

    p = gpt2_like(layers=2)
    feeds = sg.Calibration(IDS, 256).feeds(p)
    for module, value in rotation(p, residual_branches(p), Stream(p, feeds)).items():
        with p.run(feeds[0]) as run:
            after = run.value(p.graph.target(module.edge)).to_numpy("float64").reshape(-1, 16)
            before = after - run.value(p.edge_value(module.edge)).to_numpy("float64").reshape(-1, 16)
        cosine = (before * after).sum(1) / np.linalg.norm(before, axis=1) / np.linalg.norm(after, axis=1)
        assert value == pytest.approx(1 - cosine.mean(), abs=1e-5)


def test_modules_leave_the_program_and_its_files():
    p = gpt2_like(layers=3)
    whole = set(p.weights)
    report = sg.prune(p, sg.Ratio(0.4), sg.Calibration(IDS, 512), recipe="modules", timed=False)
    gone = whole - set(p.weights)
    assert gone
    assert {k for s in report.steps for k in s.shapes} == gone
    assert all(s.what == "module" and not s.units for s in report.steps)
    p.undo()
    assert set(p.weights) == whole


def test_modules_can_be_removed_in_independent_steps():
    """What one step needs does not depend on another having been applied."""
    p = gpt2_like(layers=2)
    plan = sg.prune(p, sg.Ratio(0.5), sg.Calibration(IDS, 512), recipe="modules", timed=False, dry_run=True)
    for pair in combinations(plan.steps, 2):
        hashes = set()
        for order in (pair, pair[::-1]):
            twin = gpt2_like(layers=2)
            for step in order:
                step.apply(twin)
            hashes.add(twin.hash())
        assert len(hashes) == 1
