"""`make gpu`: rows that fail, end their process or hang do not stop it; its page; its figures run, unmeasured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from script_modules import SCRIPTS, load

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return load(SCRIPTS / "gpu.py", monkeypatch)


CHILD = """
import json, os, sys, time
rows, names = sys.argv[sys.argv.index("--rows") + 1], sys.argv[sys.argv.index("--rows") + 2:]
with open(rows, "a") as file:
    for name in names:
        file.write(json.dumps({"name": name, "begins": True}) + chr(10)); file.flush()
        if name == "dies":
            sys.stderr.write("device-side assert"); os._exit(134)
        if name == "hangs":
            time.sleep(60)
        file.write(json.dumps({"name": name, "outcome": "passed", "facts": {"x": 1.5}, "seconds": 0.1}) + chr(10))
"""


def test_rows_that_end_their_process_or_hang_are_recorded(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(gpu, "__file__", str(child))
    monkeypatch.setitem(gpu.SECONDS, "plans", 1.5)
    rows = list(gpu.run_group("plans", "cuda", tmp_path, ["a", "dies", "b", "hangs", "c"]))
    assert [(row["name"], row["outcome"]) for row in rows] == [
        ("a", "passed"), ("dies", "failed"), ("b", "passed"), ("hangs", "failed"), ("c", "passed"),
    ]  # fmt: skip
    assert "134" in rows[1]["error"]
    assert "device-side assert" in rows[1]["error"]
    assert "more than 1.5 s" in rows[3]["error"]
    text = gpu.page({"machine": {"device": "cuda", "gpu": "A", "commit": "c"}, "groups": {"plans": rows}})
    assert "| plans | 5 | 3 | 2 | 0 |" in text
    assert "- plans, dies: `the process ended with 134: device-side assert`" in text
    assert "| a | passed | x: 1.5 |" in text


def test_a_failing_row_is_recorded_and_the_next_one_runs(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: str) -> dict[str, Any]:
        raise ValueError("planted")

    found = {"bad": fails, "good": lambda device: {"device": device}}
    monkeypatch.setattr(gpu, "rows_of", lambda group, device: found)
    gpu.work("plans", "sim:6", [], tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    done = {row["name"]: row for row in rows if "outcome" in row}
    assert done["bad"]["error"] == "ValueError: planted"
    assert "fails" in done["bad"]["trace"]
    assert done["good"]["facts"] == {"device": "sim:6"}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu.py"), *options], capture_output=True, text=True)


@pytest.mark.deep
def test_the_checks_run_on_the_simulated_device(tmp_path: Path) -> None:
    done = run("--device", "sim", "--only", "plans,ops/softmax", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["outcome"] for rows in found["groups"].values() for row in rows} == {"passed"}
    (softmax,) = found["groups"]["ops"]
    assert softmax["facts"]["dtypes"] == ["float32", "bfloat16", "float16"]
    assert found["machine"]["device"] == "sim"


def test_without_a_gpu_the_way_out_is_named(gpu: ModuleType, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cuda:99"])
    assert gpu.main() == 2
    assert "make gpu DEVICE=sim" in capsys.readouterr().err


@pytest.mark.deep
def test_all_checks_and_figures_run_on_the_simulated_device(tmp_path: Path) -> None:
    done = run("--device", "sim", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "gpu.json").read_text())["groups"]["figures"]
    assert {row["outcome"] for row in figures} == {"not measured"}
