"""Models of transformers' classes of other tasks are diagnosed, pruned, gated, drawn and profiled as others are."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import graphwright as gw
from graphwright import surgery as sg
from graphwright.errors import UsageError
from graphwright.models import Model
from graphwright.surgery.pruning.prunable import prunable, prunable_axis

pytest.importorskip("transformers")
from hub_models import saved

from seeds import DEEP, some

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(16, 3, 32, 32)).astype("f4")
IDS, MASK = RNG.integers(3, 99, (16, 12)), np.ones((16, 12), np.int64)
MASK[::2, 9:] = 0
FEEDS = {
    "deit": {"pixel_values": IMAGES}, "resnet": {"pixel_values": IMAGES},
    "electra": {"input_ids": IDS, "attention_mask": MASK},
    "whisper": {"input_features": RNG.normal(size=(12, 8, 100)).astype("f4"),
                "decoder_input_ids": RNG.integers(3, 99, (12, 5))},
}  # fmt: skip
OPENED = [*FEEDS] if DEEP else ["deit", "resnet", "electra"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Any, Model]]:
    """Per class: the module of transformers, and the model opened from its directory."""
    base, found = tmp_path_factory.mktemp("classes"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        for name in OPENED:
            found[name] = saved(name, base / name), gw.open(base / name, tokenizer=False)
    return found


def forked(models: dict[str, tuple[Any, Model]], name: str) -> Model:
    return models[name][1].with_program(models[name][1].program.fork())


@pytest.mark.parametrize(("name", "kind"), [("deit", "heads"), ("electra", "heads"), ("resnet", "channels")])
def test_cut_units_are_those_that_a_masked_checkpoint_has_not(models, name, kind, tmp_path):
    """Without restoring: transformers runs the original file with zeros in the columns that read the units."""
    module, original = models[name]
    model = forked(models, name)
    report = model.prune(0.1, FEEDS[name], kinds=(kind,), recipe="units", restore=False, timed=False)
    shutil.copytree(original.directory, tmp_path / name)
    weights = load_file(original.directory / "model.safetensors")
    axes = original.program.axes()
    for step in report.steps:
        axis = prunable_axis(axes[step.name])
        assert axis is not None
        for consumer in axis.consumers:
            flat = weights[consumer.key].view(len(weights[consumer.key]), -1)
            flat[:, torch.as_tensor(consumer.columns[list(step.units)].reshape(-1))] = 0
    save_file(weights, tmp_path / name / "model.safetensors", {"format": "pt"})
    masked = type(module).from_pretrained(tmp_path / name).eval()
    with torch.no_grad():
        expected = masked(**{k: torch.as_tensor(v) for k, v in FEEDS[name].items()}).logits.numpy()
    found = model.outputs(**FEEDS[name])["logits"]
    assert report.steps
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(found, original.outputs(**FEEDS[name])["logits"], atol=1e-5)


@pytest.mark.parametrize("name", some(OPENED, 2))
def test_sound_models_have_no_errors_and_pruning_adds_no_finding(models, name):
    model = forked(models, name)
    before = {(f.kind, f.where) for f in model.diagnose()}
    assert all(f.severity <= sg.Severity.WARNING for f in model.diagnose())
    assert name == "deit" or not before  # the class begins with tokens and positions of zeros
    found = model.diagnose(inputs=FEEDS[name], loss="logits")
    assert {(f.kind, f.where) for f in found if f.kind != "gain"} == before  # random: tokens collapse
    report = model.prune(0.2, FEEDS[name], timed=False)
    assert report.after["parameters"] < report.before["parameters"]
    assert {(f.kind, f.where) for f in model.diagnose()} <= before
    assert 0 < report.after["relative"] < 1
    with model.edit("a value that is not finite") as e:
        e.set_weight(next(iter(report.steps[0].shapes)), lambda w: w * np.nan)
    assert {f.kind for f in model.diagnose() if (f.kind, f.where) not in before} == {"tensor"}


@pytest.mark.deep
def test_whisper_heads_whose_inputs_hardly_vary_are_pruned(models):
    report = forked(models, "whisper").prune(0.1, FEEDS["whisper"], kinds=("heads",), recipe="units", timed=False)
    assert report.after["relative"] < 0.01


def test_missing_data_name_the_inputs(models):
    with pytest.raises(sg.MissingCalibration, match=r"'pixel_values': array f32\[B, 3, 32, 32\]"):
        forked(models, "deit").prune(0.2, timed=False)
    with pytest.raises(UsageError, match="no loss"):
        forked(models, "deit").diagnose(text="a text")


@pytest.mark.parametrize(("name", "kind"), [("deit", "heads"), ("electra", "neurons"), ("resnet", "channels")])
def test_a_closed_gate_is_a_cut(models, name, kind):
    gated, cut = forked(models, name), forked(models, name)
    group = next(a.group for a in prunable(gated.program, kinds=(kind,)))
    with gated.edit("gates on units") as e:
        (gate,) = e.gate(group.units(range(group.size)), "sigmoid")
        e.set_gate(gate, "open", range(group.size))
        e.set_gate(gate, "closed", [0, 2])
    with cut.edit("without the units") as e:
        e.cut_units(cut.program.axes()[group.name].units([0, 2]))
    found, expected = (m.outputs(**FEEDS[name])["logits"] for m in (gated, cut))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(found, models[name][1].outputs(**FEEDS[name])["logits"], atol=1e-5)


@pytest.mark.parametrize("name", OPENED)
def test_drawings_and_profiles_cover_the_nodes(models, name):
    model = forked(models, name)
    assert "<svg" in model.program.to_svg()
    assert "<html" in model.program.to_html()
    plan = model.program.compile(FEEDS[name])
    timed = str(plan.profile(FEEDS[name], n=1))
    assert {"resnet": "conv"}.get(name, "linear") in timed
    text = str(model.inspect())
    assert "KV cache" not in text
    assert f"per sample of {next(iter(FEEDS[name]))}" in text
