"""The scripts that `make` calls: one clear line if they fail, nothing installed twice, pins without addresses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seeds import some

ROOT = Path(__file__).parents[1]
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "{log}"
case "$*" in
  *ensurepip*) exit {no_venv} ;;
  *version_info*) exit {too_old} ;;
  -V) echo Python 3.10.1 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *"pip install"*) exit {no_network} ;;
  *"pip freeze"*) cat "{frozen}" ;;
esac
"""
FROZEN = """\
-e git+https://example.org/x@1234#egg=x
Zope==5.0 --hash=sha256:abcd
graphwright==0.1.0
local @ file:///home/user/local
numpy==2.5.1
pytest==9.2.0
pytest-timeout==2.4.0
torch==2.13.0+cpu
yaml-thing==1.0+cu128
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of what the scripts read, and a Python that only writes down what it is asked."""
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "frozen").write_text(FROZEN, encoding="utf-8")
    fake(tmp_path)
    (tmp_path / "shim").write_text(
        "#!/bin/sh\necho not here, >&2; echo but elsewhere >&2; exit 127\n", encoding="utf-8"
    )
    (tmp_path / "shim").chmod(0o755)
    return tmp_path


def fake(directory: Path, *, too_old: int = 0, no_venv: int = 0, no_network: int = 0) -> None:
    facts = {"too_old": too_old, "no_venv": no_venv, "no_network": no_network}
    text = PYTHON.format(log=directory / "log", frozen=directory / "frozen", **facts)
    for path in (directory / "python", directory / ".venv" / "bin" / "python"):
        if path.parent.exists():
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)


def script(directory: Path, *command: str, python: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": python or str(directory / "python"), "VENV": ".venv"}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)


def installs(directory: Path) -> list[str]:
    calls = (directory / "log").read_text(encoding="utf-8").splitlines()
    return [extra for call in calls if "pip install" in call for extra in re.findall(r"\.\[(.*)\]", call)]


@pytest.mark.parametrize(
    ("facts", "python", "words"),
    [
        ({}, "/no/such/python3", "there is no '/no/such/python3'"),
        ({"too_old": 1}, None, "is Python 3.10.1"),
        ({}, "./shim", "a command that does not run"),
        ({"no_venv": 1}, None, "venv module is missing"),
    ],
)
def test_an_unusable_python_is_reported_in_one_line(
    directory: Path, facts: dict, python: str | None, words: str
) -> None:
    fake(directory, **facts)
    done = script(directory, "scripts/environment.sh", "hf", python=python)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert words in line
    assert not (directory / ".venv").exists()


def test_a_second_run_installs_nothing(directory: Path) -> None:
    for extras in ("hf", "hf", "all,dev", "hf", "all,dev"):
        assert script(directory, "scripts/environment.sh", extras).returncode == 0
    assert installs(directory) == ["hf", "hf,all,dev"]  # what is there is asked for again, so that nothing is lost
    assert sum("-m venv" in call for call in (directory / "log").read_text(encoding="utf-8").splitlines()) == 1
    with open(directory / "constraints.txt", "a", encoding="utf-8") as file:
        file.write("another==1.0\n")
    script(directory, "scripts/environment.sh", "hf")
    assert installs(directory)[2:] == ["hf"]


def test_a_failed_installation_is_retried(directory: Path) -> None:
    fake(directory, no_network=1)
    assert script(directory, "scripts/environment.sh", "hf").returncode == 1
    assert not list((directory / ".venv").glob(".extras-*"))
    fake(directory)
    assert script(directory, "scripts/environment.sh", "hf").returncode == 0
    assert installs(directory) == ["hf", "hf"]


def test_a_lock_writes_names_and_versions_that_count_as_installed(directory: Path) -> None:
    script(directory, "scripts/environment.sh", "hf")
    assert script(directory, "scripts/lock.sh").returncode == 0
    assert (directory / "constraints.txt").read_text(encoding="utf-8").splitlines() == [
        "torch==2.13.0",
        "numpy==2.5.1",
        "pytest==9.2.0",
        "pytest-timeout==2.4.0",
        next(line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line.startswith("triton")),
        "yaml-thing==1.0",
        "Zope==5.0",
    ]
    script(directory, "scripts/environment.sh", "hf")
    assert installs(directory) == ["hf"]


@pytest.mark.linux
def test_triton_is_installed_once_in_a_folder_of_its_own_and_may_be_missing(directory: Path) -> None:
    script(directory, "scripts/environment.sh", "hf")
    fake(directory, no_network=1)
    missing = script(directory, "scripts/triton.sh")
    assert (missing.returncode, "are skipped" in missing.stderr) == (0, True)
    fake(directory)
    for _ in range(2):
        assert script(directory, "scripts/triton.sh").returncode == 0
    calls = [call for call in (directory / "log").read_text(encoding="utf-8").splitlines() if "--target" in call]
    assert len(calls) == 2
    assert all(".venv/apart triton==" in call for call in calls)


def test_a_failed_lock_leaves_the_pins_unchanged(directory: Path) -> None:
    before = (directory / "constraints.txt").read_bytes()
    script(directory, "scripts/environment.sh", "hf")
    (directory / "frozen").write_text("numpy==2.5.1\n", encoding="utf-8")  # an environment without torch
    assert script(directory, "scripts/lock.sh").returncode != 0
    assert (directory / "constraints.txt").read_bytes() == before


def test_the_pins_of_this_repository_are_exact_and_unique() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    assert len({line.split("==")[0].lower() for line in lines}) == len(lines)


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    targets = phony.split()
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == targets
    assert sorted(targets) == sorted(re.findall(r"^([a-z]+):", text, re.M))


# -- floors of coverage ------------------------------------------------------------------------------------------------
FLOORS = ("autograd", "graph", "models", "ops", "plan", "program")


@pytest.mark.parametrize(
    ("change", "code"),
    [({}, 0), ({"ops": (80, 15)}, 1), ({"array": (0, 0)}, 0), ({"plan": None}, 1)],
    ids=["held", "one below", "a folder without a floor", "one not measured"],
)
def test_a_folder_below_its_floor_fails_the_run(tmp_path: Path, change: dict, code: int) -> None:
    wanted = {**dict.fromkeys((*FLOORS, "array"), (80, 18)), **change}  # covered lines of 80 and branches of 20
    files = {
        f"src/graphwright/{folder}/{half}.py": {
            "summary": {
                "covered_lines": counts[0] // 2,
                "covered_branches": counts[1] // 2,
                "num_statements": 40,
                "num_branches": 10,
            }
        }
        for folder, counts in wanted.items()
        if counts is not None
        for half in ("a", "deeper/graph")
    }
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"files": files}), encoding="utf-8")
    command = [sys.executable, ROOT / "scripts" / "coverage_by_folder.py", report]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[1:]}
    expected = {f: f"{c[0] // 2 * 2 + c[1] // 2 * 2:.1f}%" for f, c in wanted.items() if c is not None}
    assert rows == expected
    assert bool(done.stderr) == bool(code)


# -- what tests/conftest.py does with a skip ---------------------------------------------------------------------------
CASES = """
import pytest

@pytest.mark.browser
def test_browser(): pass

@pytest.mark.skip(reason="too slow")
def test_skips_on_its_own(): pass

def test_module_missing(): pytest.importorskip("no_such_module")

@pytest.mark.xfail(reason="open", raises=ZeroDivisionError)
def test_known(): 1 / 0
"""


@pytest.mark.parametrize("present", some([True, False], 2))
def test_tests_skip_only_if_the_marked_requirement_is_missing(tmp_path: Path, present: bool) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    if present:
        (tmp_path / "bin" / "chromium").touch()
        (tmp_path / "bin" / "chromium").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "test_cases.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    outcome = re.findall(r"(\d+) (passed|failed|error|skipped|xfailed)", done.stdout.splitlines()[-1])
    seen = "passed" if present else "skipped"
    assert sorted(outcome) == sorted([("1", "failed"), ("1", "error"), ("1", seen), ("1", "xfailed")])
    assert ("not run: needs a system Chromium" in done.stdout) != present
