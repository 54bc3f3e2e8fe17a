"""The verbs of surgery: one JSON document, a model saved that runs, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.cli import app


def call(*args: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == code, done.output + done.stderr
    return done.stdout


def test_an_orthogonal_split_is_saved_and_computes_the_same(tmp_path) -> None:
    directory = tiny_llama.directory("f32")
    facts = json.loads(call("orthogonalize", directory, tmp_path / "out", "--fold", "insert", "--tokens", 0, "--json"))
    assert facts["schema"] == 1
    assert len(facts["rows"]) == 8
    assert facts["options"] == {"per": "matrix", "fold": "insert", "special": False, "inplace": False}
    assert facts["max_error"] <= 1e-5
    ids = tiny_llama.batch(0, 2)[0]
    before, after = gw.open(directory).logits(ids), gw.open(tmp_path / "out").logits(ids)
    assert np.abs(before - after).max() <= 1e-5 * np.abs(before).max()


def test_the_text_tells_what_was_written_and_how_to_export_it(tmp_path) -> None:
    arguments = [tiny_llama.directory("f32"), tmp_path / "out", "--where", "layers.0.attn.q", "--tokens", 0]
    shown = call("orthogonalize", *arguments)
    assert "1 matrix, mean error" in shown
    assert f"wrote {tmp_path / 'out'}, a saved model" in shown
    assert f"graphwright export {tmp_path / 'out'} OUT" in shown
    assert "wrote" not in call("orthogonalize", *arguments, "--dry-run", "--overwrite")


def test_compressing_reports_every_method_and_saves_the_factors(tmp_path) -> None:
    arguments = ["bundled", tmp_path / "out", "--where", "layers.0.mlp", "--budget", "ratio=0.4"]
    arguments += ["--tokens", 256, "--context", 64]
    facts = json.loads(call("compress", *arguments, "--method", "asvd", "--json"))
    assert {"path", "method", "ranks", "ratio", "weight_error", "output_error", "svd_error", "asvd_error", "kl",
            "speed", "slower", "chosen", "applied"} <= set(facts["rows"][0])  # fmt: skip
    assert facts["after"] <= 0.6 * facts["before"]
    assert facts["drift"]["rows"] == 256
    assert len(sg.densify(gw.open(tmp_path / "out").program)) == facts["applied"]
    assert "ratio" in call("compress", *arguments, "--method", "svd", "--dry-run")


def test_invalid_arguments_are_refused(tmp_path) -> None:
    call("compress", "bundled", "--where", "layers.0.mlp", code=2)  # nowhere to save
    for budget in ("0.3", "size=3", "error=much"):
        call("compress", "bundled", tmp_path / "out", "--budget", budget, code=2)
    call("orthogonalize", "bundled", tmp_path / "out", "--where", "layers.9", "--tokens", 0, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["error=0.1", "energy=0.9", "ratio=0.5", "params=1000", "bytes=4000"])
def test_budgets_are_read_from_text(text: str) -> None:
    from graphwright.cli.surgery import budget_of

    kind, number = text.split("=")
    made = budget_of(text)
    assert type(made).__name__.lower() == kind
    assert float(number) in {getattr(made, name) for name in ("most", "share") if hasattr(made, name)}
