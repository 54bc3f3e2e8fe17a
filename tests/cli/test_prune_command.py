"""`graphwright prune` and `verify A B`: the API's plan, one JSON document, nothing written by a dry run."""

from __future__ import annotations

import json

import pytest

import graphwright as gw
from graphwright.surgery import Calibration, Ratio

SMALL = ("--recipe", "units", "--tokens", 512, "--context", 128, "--no-time")


@pytest.mark.deep
def test_dry_run_matches_the_api_and_writes_nothing(call, tmp_path):
    facts = json.loads(call("prune", "bundled", tmp_path / "out", "--target", 0.2, *SMALL, "--dry-run", "--json"))
    assert facts["schema"] == 1
    assert not (tmp_path / "out").exists()
    model = gw.open("bundled")
    cal = Calibration.of(model, max_tokens=512, context=128)
    plan = model.prune(Ratio(0.2), cal, recipe="units", timed=False, dry_run=True)
    assert facts["plan"]["layers"] == json.loads(json.dumps(plan.to_json()))["layers"]
    keys = {"target", "reached", "before", "after", "files", "speed", "calibration", "settings", "attempts", "warnings",
            "journal"}  # fmt: skip
    assert keys | {"schema", "seconds", "layers"} == set(facts["plan"])


def test_the_pruned_model_is_written_and_differs(call, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "smaller"
    text.write_text("The value of an expression is the value of its last operand. " * 200)
    options = ("--round-to", 8, "--text", text, "--of", "flops", "--check", "none", "--quiet")
    output = call("prune", "bundled", out, "--target", 0.1, *options, *SMALL)
    assert "flops" in output
    receipt = json.loads((out / "receipt.json").read_text())
    cost = receipt["cost"]["bytes"]
    assert receipt["level"] == 3
    checkpoint = gw.open("bundled").checkpoint
    assert checkpoint is not None
    assert cost["program"] < cost["after"] == cost["before"] == checkpoint.nbytes
    assert f"{cost['after']:,} bytes of weights with zeros" in output
    assert f"{cost['program']:,} (--prefer size" in output
    small = tmp_path / "size"
    output = call("prune", "bundled", small, "--target", 0.1, *options, *SMALL, "--prefer", "size")
    assert json.loads((small / "receipt.json").read_text())["level"] == 5
    assert "zeros" not in output.splitlines()[-1]
    assert "OUT is missing" in call("prune", "bundled", code=2)
    assert "params, flops, bytes" in call("prune", "bundled", out, "--of", "weight", code=2)


def test_workers_give_the_plan_of_one_process(call, pool, monkeypatch):
    """The pool of the tests stands in for new processes."""
    args = ("prune", "bundled", "--method", "magnitude", "--recipe", "units", "--tokens", 1024, "--no-time")
    alone, seen = json.loads(call(*args, "--dry-run", "--json"))["plan"], []
    monkeypatch.setattr("graphwright.surgery.calibration.pool_of", lambda given: seen.append(given) or pool)
    plan = json.loads(call(*args, "--dry-run", "--json", "--workers", 2))["plan"]
    assert {**plan, "seconds": 0} == {**alone, "seconds": 0}
    assert seen[-1] == "2"
    monkeypatch.undo()
    assert "names no workers" in call("prune", "bundled", "--dry-run", "--workers", "several", code=2)


@pytest.mark.deep
def test_two_models_can_be_compared(call, tmp_path):
    facts = json.loads(call("verify", "bundled", "bundled", "--json"))
    assert facts["equal"] is True
    assert facts["outputs"]["top1"] == 1.0
    out = tmp_path / "saved"
    call("prune", "bundled", out, "--method", "magnitude", "--save", "--quiet", *SMALL)
    model = gw.open(out)
    assert model.program.journal[-1].author == "pass"
    assert "of another shape" in call("verify", "bundled", out, code=1)
