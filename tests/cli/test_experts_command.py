"""The commands `experts` and `upcycle`, and units in `edit --cut`: figures equal those of the API."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex

pytestmark = pytest.mark.usefixtures("warm")
FEW = ("--tokens", "256", "--context", "64")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ex.upcycle(gw.open("bundled"), 4, 2).save(tmp_path_factory.mktemp("made") / "mixture"))


def test_upcycle_saves_a_model_with_equal_logits(call, tmp_path):
    facts = json.loads(call("upcycle", "bundled", tmp_path / "mixture", "--experts", 4, "--save", "--json"))
    assert facts["layers"] == {f"layers.{i}.mlp": 4 for i in range(4)}
    ours, theirs = gw.open(tmp_path / "mixture").logits("The following"), gw.open("bundled").logits("The following")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_upcycle_with_threshold_routers(call, tmp_path):
    out, chosen = tmp_path / "mixture", ("--experts", 4, "--router", "threshold", "--layer", "layers.2.mlp")
    facts = json.loads(call("upcycle", "bundled", out, *chosen, "--save", "--json"))
    assert facts["layers"] == {"layers.2.mlp": 4}
    assert [r.path for r in ex.threshold_routers(gw.open(out).program)] == ["layers.2.mlp.router"]
    assert "topk, threshold" in call("upcycle", "bundled", tmp_path / "no", "--router", "hash", code=2)


def test_usage_scores_and_a_picture(call, mixture, tmp_path):
    svg = tmp_path / "use.svg"
    facts = json.loads(call("experts", mixture, *FEW, "--svg", svg, "--json"))
    assert sum(facts["layers"]["layers.2.mlp"]["count"]) == 2 * 256
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    scored = json.loads(call("experts", mixture, *FEW, "--score", "weights", "--json"))
    np.testing.assert_allclose(
        scored["layers"]["layers.0.mlp"], ex.scores(gw.open(mixture), "weights").layers["layers.0.mlp"]
    )
    assert "no routed layer" in call("experts", "bundled", *FEW, code=2)
    assert "OUT" in call("experts", mixture, "--prune", 0.25, code=2)


def test_units_are_cut_by_axis_and_number(call, mixture, tmp_path):
    call(
        "edit",
        mixture,
        tmp_path / "fewer",
        "--cut",
        "layers.*.mlp.experts: 0 2-3",
        "--cut",
        "layers.1.mlp.down -> no",
        code=2,
    )
    assert not (tmp_path / "fewer").exists()
    call("edit", mixture, tmp_path / "fewer", "--cut", "layers.*.mlp.experts: 0 3")
    assert {layer.size for layer in ex.routed_layers(gw.open(tmp_path / "fewer").program).values()} == {2}
    assert "0-4 9" in call("edit", mixture, tmp_path / "none", "--cut", "layers.*.mlp.experts: some", code=2)
