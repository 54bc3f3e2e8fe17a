"""`graphwright evolve`: one JSON document, a directory that is resumed, a CSV of one's own, errors in three lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import graphwright as gw
from graphwright import evolve as ev
from graphwright.cli import app


def call(*args, code=0):
    result = CliRunner().invoke(app, ["evolve", *map(str, args)])
    assert result.exit_code == code, (result.output, result.stderr)
    return result.stdout if code == 0 else result.stdout + result.stderr


def test_run_is_saved_and_resumes(tmp_path):
    out = tmp_path / "run"
    first = json.loads(call("xor", "--generations", 3, "--out", out, "--json"))
    assert first["status"] in ("MaxGenerations", "TargetReached")
    assert {p.name for p in out.iterdir()} == {
        "champion", "champion.svg", "fitness.svg", "lineage.html", "species.svg", "state",
    }  # fmt: skip
    rest = json.loads(call("--resume", out, "--generations", 300, "--json"))
    whole = json.loads(call("xor", "--generations", 300, "--json"))
    for name in ("evaluations", "generations", "fitness", "hidden", "links", "champion", "species"):
        assert rest[name] == whole[name]
    program = gw.load(out / "champion")
    answers = program.run(x=np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32))["y"].to_numpy()[:, 0]
    assert ((answers > 0.5) == [0, 1, 1, 0]).all()


def test_run_is_replaced_only_with_overwrite(tmp_path):
    out = tmp_path / "run"
    small = ("xor", "--generations", 2, "--population", 6, "--save-every", 1, "--out", out)
    call(*small)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert f"--resume {out}" in " ".join(call(*small, code=2).split())
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    call(*small, "--seed", 1, "--overwrite")
    assert ev.resume(out / "state.1", ev.tasks.xor()).seed == 1


def test_a_csv_with_a_target_column_is_a_task(tmp_path):
    path = tmp_path / "points.csv"
    rows = [f"{i % 7},{i % 5},{'yes' if i % 7 > i % 5 else 'no'}" for i in range(140)]
    path.write_text("a,b,more\n" + "\n".join(rows) + "\n")
    facts = json.loads(call(path, "--target", "more", "--hybrid", "--generations", 8, "--json"))
    assert facts["metric"]["test"] > 0.9
    assert facts["metric"]["name"] == "accuracy"
    assert "--target COLUMN" in call(path, code=2)
    assert "no such column" in call(path, "--target", "colour", code=2)


def test_a_column_of_numbers_is_predicted(tmp_path):
    path = tmp_path / "line.csv"
    path.write_text("a,b,y\n" + "\n".join(f"{i % 7},{i % 5},{3 * (i % 7) - (i % 5) + 0.5}" for i in range(140)) + "\n")
    facts = json.loads(call(path, "--target", "y", "--hybrid", "--generations", 10, "--json"))
    assert facts["metric"]["name"] == "r2"
    assert facts["metric"]["test"] > 0.95
    facts = json.loads(call(path, "--target", "y", "--generations", 30, "--json"))
    assert facts["metric"]["valid"] > 0.5


def test_runs_print_status_and_lineage_and_errors_are_named(tmp_path):
    text = call("xor", "--seed", 1, "--lineage", "--quiet")
    assert "TargetReached" in text
    assert "the same cases for training, validation and test" in text
    assert "generation 0: founder" in text
    assert "unknown task" in call("chess", code=2)
    assert "TASK is missing" in call(code=2)
    assert call("--resume", tmp_path / "none", code=2)


def test_layer_run_is_saved_and_resumes(tmp_path):
    out = tmp_path / "run"
    facts = json.loads(call("two-moons", "--layers", "--evaluations", 4, "--population", 3, "--out", out, "--json"))
    assert facts["evaluations"] == 4 or facts["status"] == "TargetReached"
    assert {"champion", "champion.svg", "front.svg", "state"} == {f.name for f in out.iterdir()}
    text = call("--resume", out, "--evaluations", 6, "--lineage", "--quiet")
    assert "candidates" in text
    assert "0: start" in text
    assert "cannot be combined" in call("iris", "--layers", "--hybrid", code=2)


@pytest.mark.parametrize("kind", ["--hybrid", "--layers"])
def test_resumed_run_reports_earlier_test_reads(tmp_path, kind):
    out = tmp_path / "run"
    facts = json.loads(call("two-moons", kind, "--generations", 1, "--population", 2, "--out", out, "--json"))
    assert facts["test_reads"] == 1
    assert "the test cases were read 2 times" in call("--resume", out, "--generations", 2)


def test_layers_evolve_on_sequences(tmp_path):
    out = tmp_path / "run"
    facts = json.loads(call("parity", "--layers", "--evaluations", 2, "--population", 2, "--out", out, "--json"))
    assert facts["evaluations"] == 2
    assert gw.load(out / "champion").spec("x").shape[1:] == (8, 1)


def test_seeds_are_reported_as_distributions(tmp_path):
    args = ("xor", "--hybrid", "--generations", 2, "--seeds", 3, "--seed", 5)
    facts = json.loads(call(*args, "--json"))
    assert facts["seeds"] == [5, 6, 7]
    assert set(facts["success"]) == {"rate", "low", "high"}
    assert [r["generations"] for r in facts["runs"]] == [2, 2, 2]
    text = call(*args)
    assert text.startswith(f"{len(facts['solved'])} of 3 seeds solved xor")
    assert "backward passes: median 7,680, quartiles" in text
    assert "e+0" not in call("two-moons", "--hybrid", "--generations", 2, "--seeds", 2)  # 576,000, not 5.76e+05
    assert "cannot save or resume runs from several seeds" in call(*args, "--out", tmp_path / "run", code=2)


def test_a_task_can_be_defined_in_a_python_file(tmp_path):
    own, out = tmp_path / "own.py", tmp_path / "run"
    own.write_text(
        "import numpy as np\nfrom graphwright import evolve as ev\n\n\ndef task():\n"
        "    x = np.random.default_rng(0).normal(size=(60, 2))\n"
        "    return ev.Task(x, x[:, 0] > x[:, 1], target=2.0, name='larger')\n"
    )
    first = json.loads(call("--task", own, "--population", 6, "--generations", 2, "--out", out, "--json"))
    assert (first["task"], first["generations"]) == ("larger", 2)
    assert "--task FILE.py" in call("--resume", out, code=2)
    rest = json.loads(call("--task", own, "--resume", out, "--generations", 3, "--json"))
    assert rest["generations"] == 3
    assert "both given" in call("xor", "--task", own, code=2)
    own.write_text("x = 1\ntask = x / 0\n")
    output = call("--task", own, code=2)
    assert "own.py:2: the task file raised an error" in output.replace("\n", "")
    assert "division by zero" in output
    own.write_text("x = 1\n")
    assert "defines no task" in call("--task", own, code=2)
    assert "does not exist" in call("--task", tmp_path / "none.py", code=2)


def test_the_champion_of_a_csv_stores_its_scale_and_classes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,kind,price\n" + "\n".join(f"{i % 9},{'up' if i % 9 > 4 else 'down'},{2 * i}" for i in range(60)))
    small = ("--generations", 1, "--population", 4)
    call(path, "--target", "kind", *small, "--out", tmp_path / "words")
    assert json.loads((tmp_path / "words" / "outputs.json").read_text()) == {"kind": ["down", "up"]}
    call(path, "--target", "price", *small, "--out", tmp_path / "numbers")
    prices = 2 * np.arange(60)
    assert json.loads((tmp_path / "numbers" / "outputs.json").read_text()) == {
        "price": {"mean": prices.mean(), "std": prices.std()}
    }
    assert set(json.loads((tmp_path / "numbers" / "inputs.json").read_text())) == {"a", "kind=down", "kind=up"}


def test_damaged_state_names_the_previous_one(tmp_path):
    out = tmp_path / "run"
    call("two-moons", "--generations", 3, "--population", 6, "--save-every", 1, "--out", out)
    (out / "state" / "arrays.safetensors").write_bytes(b"?")
    assert "state.1" in call("--resume", out, code=2)
    facts = json.loads(call("--resume", out / "state.1", "--generations", 3, "--out", out, "--json"))
    assert facts["generations"] == 3
    assert json.loads(call("--resume", out, "--generations", 4, "--json"))["generations"] == 4


def test_interrupted_run_reports_what_was_saved(tmp_path):
    own, out = tmp_path / "own.py", tmp_path / "run"
    own.write_text(
        "from graphwright import evolve as ev\n\ncalls = iter(range(1000))\n\n\ndef fitness(answers):\n"
        "    if next(calls) == 3:\n        raise KeyboardInterrupt\n    return answers[:, 0, 0]\n\n\n"
        "task = ev.Task([[0.0], [1.0]], [0, 1], fitness_batch=fitness, split='same')\n"
    )
    small = ("--task", own, "--population", 4, "--generations", 9, "--out", out)
    output = call(*small, code=130)
    assert "nothing was saved yet" in " ".join(output.split())
    output = call(*small, "--overwrite", "--save-every", 1, code=130)
    assert f"2 generations are saved in {out}" in " ".join(output.split()).replace("- ", "-")
    assert ev.resume(out, ev.Task([[0.0], [1.0]], [0, 1], split="same")).generation == 1


def test_resumed_run_refuses_other_settings(tmp_path):
    out = tmp_path / "run"
    call("xor", "--generations", 1, "--population", 4, "--out", out)
    for options in (["--layers"], ["--hybrid"], ["--delays"], ["--population", 8], ["--seed", 3]):
        assert options[0] in call("--resume", out, *options, code=2)
    call("--resume", out, "--generations", 2)


def test_files_that_cannot_be_written_are_named(tmp_path, monkeypatch):
    small = ("xor", "--generations", 2, "--population", 6, "--overwrite", "--json", "--out", tmp_path / "run")
    (tmp_path / "run" / "champion.svg").mkdir(parents=True)
    facts = json.loads(call(*small, code=2).partition("error  ")[0])
    assert (facts["error"], facts["where"]) == ("UnwritableTarget", str(tmp_path / "run" / "champion.svg"))
    (tmp_path / "run" / "champion.svg").rmdir()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("shutil.rmtree", "pathlib.Path.mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(name, full)
            facts = json.loads(call(*small, code=2).partition("error  ")[0])
        assert (facts["error"], facts["where"]) == ("UnwritableTarget", str(tmp_path / "run"))
        assert "free some space" in facts["fix"]


def test_workers_and_islands_give_the_run_of_one_process(tmp_path):
    args = ("xor", "--islands", 2, "--migrate-every", 2, "--population", 8, "--generations", 4, "--json")
    alone, together = tmp_path / "alone", tmp_path / "together"
    facts = [json.loads(call(*args, "--out", alone)), json.loads(call(*args, "--out", together, "--workers", 1))]
    for one in facts:
        assert one.pop("seconds") > 0
    assert facts[0] == facts[1]
    assert facts[0]["islands"] == 2
    for name in ("islands/0/run.json", "islands/1/arrays.safetensors", "run.json"):
        assert (alone / "state" / name).read_bytes() == (together / "state" / name).read_bytes()
    resumed = json.loads(call("--resume", together, "--generations", 5, "--json"))
    assert (resumed["generations"], resumed["islands"]) == (5, 2)
    assert "names no workers" in call("xor", "--workers", "several", code=2)
    assert "number >= 1" in call("xor", "--workers", "0", code=2)
    assert "for one run on neurons" in call("two-moons", "--layers", "--islands", 2, code=2)
    assert "cannot change the settings" in call("--resume", together, "--islands", 3, code=2)
