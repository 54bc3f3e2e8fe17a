"""Learning what a model can do without: what stays, what it costs, what is undone, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import graphwright as gw
from graphwright import structure as st
from graphwright.cli import app
from graphwright.cli.common import bar
from graphwright.errors import UsageError
from graphwright.progress import Progress
from graphwright.structure.report import probabilities

QUICK: dict[str, Any] = {"steps": 40, "batch": 4, "window": 64, "gates": 0.2}
TEXT = "gradients edit the structure of a network; " * 200


def test_learned_pruning_meets_the_target_and_can_be_undone():
    model = gw.open("bundled")
    p = model.program
    start, ids = p.hash(), np.arange(32)[None]
    logits = model.logits(ids)
    gated = 4 * (2 * 192 * 192 + 3 * 192 * 512 + 2 * 192 * 64)
    quick: dict[str, Any] = {**QUICK, "steps": 30, "params": 1e-4}
    found = st.learn(model, ("heads", "neurons"), 0.7, **quick)
    assert not p.gates()
    assert found.options == asdict(st.LearnOptions(**quick))
    text = str(found)
    assert f"params   {int(found.before['parameters']):,} -> {int(found.after['parameters']):,}" in text
    assert re.search(r"loss +[\d.]+ with gates -> [\d.]+ without", text)
    assert "KL divergence from the model as it was" in text
    assert found.after["parameters"] == sum(p.spec(n).size for n in p.params())
    gone = found.before["parameters"] - found.after["parameters"]
    assert 0.28 * gated <= gone <= 0.32 * gated
    assert found.before["bits_per_byte"] < found.after["bits_per_byte"] < found.before["bits_per_byte"] + 0.6
    assert found.history[-1]["cost"] < found.history[0]["cost"]
    assert found.probabilities.shape == (len(found.history), len(found.names)) == (len(found.history), 24 + 2048)
    assert found.hardened.gap is not None
    assert all((p.axes()[f"layers.{i}.mlp.neurons"].size) % 16 == 0 for i in range(4))
    assert [e.author for e in p.journal] == ["gate"] * 3  # gates, weights, the cut
    p.undo(3)
    assert p.hash() == start
    assert np.array_equal(model.logits(ids), logits)


@pytest.mark.deep
def test_gradients_choose_better_than_random():
    """As many heads cut at random, in the same model, cost more."""
    from graphwright.models.bundled import pydoc_split

    held = pydoc_split()[1][:4000]
    model = gw.open("bundled")
    learned = st.learn(model, ("heads",), 0.6, held_out=held, **QUICK)
    cut = len(learned.hardened.cut)
    rng, losses = np.random.default_rng(0), []
    for _ in range(3):
        other = gw.open("bundled")
        with other.program.edit("some heads") as e:
            for layer, ids in enumerate(_draw(rng, cut)):
                if ids:
                    e.cut_units(other.select(f"layers.{layer}.attn").heads[ids], ragged=True)
        losses.append(other.perplexity(held).bits_per_byte)
    assert learned.after["bits_per_byte"] < np.median(losses)


def _draw(rng, count):
    """So many of 24 heads, never all six of a layer."""
    while True:
        chosen = rng.choice(24, count, replace=False)
        rows = [sorted(int(h) % 6 for h in chosen if h // 6 == layer) for layer in range(4)]
        if all(len(row) < 6 for row in rows):
            return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 1.0}, "target is out of range"),
        ({"units": ("tails",)}, "unknown kinds of units"),
        ({"units": ()}, "no kinds of units"),
        ({"text": "too short"}, "too short"),
        ({"steps": 0}, "whole number >= 1"),
        ({"window": 1}, "whole number >= 2"),
        ({"seed": -1}, "from 0 to"),
        ({"params": -0.1}, ">= 0"),
        ({"gates": float("nan")}, "a finite number > 0"),
        ({"units": ("heads",), "target": 0.01, "held_out": TEXT[:200]}, "protected elements alone exceed"),
    ],
)
def test_invalid_requests_are_refused_and_change_nothing(change, message):
    model = gw.open("bundled")
    start = model.program.hash()
    with pytest.raises(UsageError, match=message):
        st.learn(model, **{**QUICK, **change})
    assert model.program.hash() == start


def test_a_failure_during_learning_leaves_the_model_unchanged():
    model, seen = gw.open("bundled"), []
    start = model.program.hash()

    def stop(progress):
        seen.append(progress)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        st.learn(model, ("heads",), 0.5, progress=stop, params=1e-3, **QUICK)
    assert model.program.hash() == start
    assert not model.program.gates()
    rows = seen[-1].table
    assert list(rows) == [f"layers.{i}.attn.heads" for i in range(4)]
    assert all(row["of"] == 6 and row["least"] <= row["mean"] <= 1 for row in rows.values())


def test_the_progress_bar_shows_the_table_of_the_last_event(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with bar() as progress:
        assert progress is not None
        progress(Progress("learn", 1, 2, {"loss": 0.5}, {"layers.0.heads": {"open": 5.0, "of": 6.0}}))
        progress(Progress("learn", 2, 2, {"loss": 0.25}, {"layers.0.heads": {"open": 4.0, "of": 6.0}}))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"open +of", shown)
    assert re.findall(r"layers\.0\.heads +(\d)", shown)[-1] == "4"


@pytest.mark.deep
@pytest.mark.usefixtures("warm")
def test_the_command_writes_a_checkpoint_and_a_picture(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:3000])
    args = ["search", "bundled", str(tmp_path / "out"), "--units", "heads", "--target", "0.8", "--steps", "6", "--lr",
            "2", "--batch", "2", "--window", "32", "--heal", "2", "--text", str(text),
            "--check", "none", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert len(facts["healing"]["losses"]) == 2
    assert facts["hardened"]["counts"]["units"]["after"] < facts["hardened"]["counts"]["units"]["before"] == 24
    picture = (tmp_path / "out.gates.svg").read_text()
    assert picture.count("<polyline") == 24
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "model.safetensors: sha256" in result.output
    assert "not in the receipt" not in result.output
    assert gw.open(tmp_path / "out").logits(np.arange(8)[None]).shape == (1, 8, 256)


@pytest.mark.parametrize("options", [["--prefer", "small"], ["--check", "perhaps"], ["--lr", "0"], ["--seed", "-1"]])
def test_the_command_refuses_invalid_options_before_training(options, tmp_path, monkeypatch):
    monkeypatch.setattr(st.JointOptimizer, "step", lambda *_: pytest.fail("a step was made"))
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["search", "bundled", str(out), *options])
    assert done.exit_code == 2, done.output
    assert "expected" in done.output
    assert not out.exists()


def test_many_gates_are_drawn_as_one_line_per_axis():
    values = np.linspace(0, 1, 5 * 200).reshape(5, 200)
    names = [f"a.neurons[{i}]" for i in range(100)] + [f"b<c.neurons[{i}]" for i in range(100)]
    picture = probabilities(values, names, [True] * 200, 20)
    assert picture.count("<polyline") == 2
    assert "b&lt;c.neurons" in picture
