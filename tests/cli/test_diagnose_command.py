"""`graphwright diagnose`: exit codes, one JSON document, pictures, repairs, and programs that were left broken."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import graphwright as gw
from graphwright.cli import app
from graphwright.testing.defects import plant

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    """A saved model with a dead end, one with a cycle, and a saved program without a model."""
    directory = tmp_path_factory.mktemp("hurt")
    model = gw.open("bundled")
    plant(model.program, "dead_end", 1)
    plant(model.program, "blocked_gradient", 1)
    model.save(directory / "hurt")
    plant(model.program, "cycle", 1)
    model.save(directory / "broken")
    b = gw.Builder("plain")
    x = b.input("x", (2, 3))
    b.output(b.tanh(x, name="t"), "y")
    p = b.build()
    plant(p, "isolated", 1)
    p.save(directory / "plain")
    return directory


def run(*args):
    return RUNNER.invoke(app, ["diagnose", *map(str, args)])


def test_exit_codes_depend_on_findings(hurt):
    assert run("bundled").exit_code == 0
    assert "no defects" in run("bundled").stdout
    for name in ("hurt", "broken", "plain"):
        assert run(hurt / name).exit_code == 1, name
    assert run(hurt / "nowhere").exit_code == 2
    assert run("bundled", "--kind", "nonsense").exit_code == 2
    assert run(hurt / "hurt", "--fix").exit_code == 2  # without a destination
    assert run(hurt / "hurt", "--kind", "cycle").exit_code == 0


def test_json_output_is_one_document(hurt):
    done = run(hurt / "broken", "--json")
    data = json.loads(done.stdout)
    assert data["schema"] == 1
    assert [f["kind"] for f in data["findings"]] == ["cycle", "blocked_gradient", "dead_end"]
    assert data["counts"]["critical"] == 1
    assert json.loads(run(hurt / "nowhere", "--json").stdout)["ok"] is False


def test_fixed_model_is_saved_without_findings(hurt, tmp_path):
    done = run(hurt / "broken", "--fix", "--out", tmp_path / "repaired", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert len(data["fixed"]) == len(data["found"]["findings"]) == 3
    assert data["findings"] == []
    assert gw.load(tmp_path / "repaired").valid
    assert run(hurt / "plain", "--fix", "--out", tmp_path / "plain").exit_code == 0
    assert gw.load(tmp_path / "plain").journal[-1].tool == "graphwright diagnose"


def test_fixed_model_opens_as_a_model(hurt, tmp_path):
    assert run(hurt / "broken", "--fix", "--out", tmp_path / "repaired").exit_code == 0
    assert gw.open(tmp_path / "repaired").generate("The", 2)


def test_diagnose_writes_pictures_and_runs_a_text(hurt, tmp_path):
    (tmp_path / "text.txt").write_text("What a text does to a model is seen in its gradients. " * 4, encoding="utf-8")
    svg, page = tmp_path / "f.svg", tmp_path / "f.html"
    assert run(hurt / "hurt", "--svg", svg, "--text", tmp_path / "text.txt").exit_code == 1
    assert "nothing reads the result" in svg.read_text()
    assert run(hurt / "hurt", "--svg", page).exit_code == 1
    assert page.read_text().startswith("<!doctype html>")
    assert run(hurt / "hurt", "--text", tmp_path / "none.txt").exit_code == 2
