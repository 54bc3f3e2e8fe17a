"""`graphwright train --life` and `graphwright life`: a second start resumes; the command tells what the log has."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from graphwright import lifecycle as lf
from graphwright.cli import app
from graphwright.models.train import Trainer

pytestmark = pytest.mark.usefixtures("warm")
RUNNER = CliRunner()


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("What the training reads, some lines of it.\n" * 100, encoding="utf-8")
    return tmp_path


def train(*more: str, steps: int = 4):
    options = ["--steps", str(steps), "--batch", "2", "--window", "16", "--warmup", "1"]
    return RUNNER.invoke(app, ["train", "bundled", "--text", "notes.txt", *options, *more])


def test_an_interrupted_training_of_a_life_is_resumed_by_the_same_command(text, monkeypatch):
    real, count = Trainer.batch, 0

    def interrupted(self, step):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return real(self, step)

    with monkeypatch.context() as m:
        m.setattr(Trainer, "batch", interrupted)
        done = train("--life", "young")
    assert done.exit_code == 130
    assert "2 steps are saved in young; the same command resumes" in done.output
    for wrong, what in [
        (train("--life", "young", steps=5), "options.steps"),
        (train("--life", "young", "--state", "x"), "leave out --state"),
    ]:
        assert wrong.exit_code == 2
        assert what in wrong.output
    done = train("--life", "young", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["life"]["resumed_at"], facts["steps"]) == (2, 4)
    assert train("--life", "other", "--json").exit_code == 0
    with lf.open("young", readonly=True) as young, lf.open("other", readonly=True) as other:
        assert young.program.hash() == other.program.hash()
        assert young.name == "young"
    done = train("--life", "young")
    assert "the training is complete: the state in young is at step 4" in done.output


@pytest.mark.deep
def test_a_life_is_trained_again_after_a_training_ended(text):
    assert train("--life", "young").exit_code == 0
    (text / "notes.txt").write_text("Another text, for later years.\n" * 100, encoding="utf-8")

    def again() -> str:
        done = train("--life", "young", steps=3)
        assert done.exit_code == 0, done.output
        with lf.open("young", readonly=True) as life:
            assert life.age == 7
            starts = [event.facts for event in life.log.of("segment_start")]
            assert [event.facts["steps"] for event in life.log.of("segment_end")] == [4, 3]
            assert {start["objective"] for start in starts} == {"next token"}
        return done.output

    again()
    assert "the training is complete: the state in young is at step 3" in again()  # it is not repeated


def test_the_life_is_shown_as_text_json_and_picture(text):
    assert train("--life", "young", steps=2).exit_code == 0
    done = RUNNER.invoke(app, ["life", "young", "--json", "--log", "--svg", "life.svg", "--verify"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["schema"], facts["name"], facts["age"], len(facts["segments"])) == (1, "young", 2, 1)
    assert [line["kind"] for line in facts["events"]][:2] == ["birth", "segment_start"]
    assert sum(facts["counts"].values()) == facts["verified"]["events"] == len(facts["events"])
    assert (text / "life.svg").read_text().startswith("<svg")
    shown = RUNNER.invoke(app, ["life", "young", "--log"]).stdout
    assert "young, 2 steps" in shown
    assert "segment_end" in shown
    missing = RUNNER.invoke(app, ["life", "missing"])
    assert missing.exit_code == 2
    assert "has no life" in missing.output
