"""The example under each command's --help runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphwright.cli import app
from graphwright.cli.common import Commands

pytestmark = pytest.mark.usefixtures("warm")
RUNNER = CliRunner()
SMALLER = {"train": ["--steps", "1", "--batch", "2", "--window", "16"], "export": ["--check", "none"]}
"""Options that come after those of the example: a shorter run of the same."""
ELSEWHERE, DEEP = ("search", "prune", "train", "verify", "export", "demo"), pytest.mark.deep
"""Verbs whose lines run in `test_docs` in every run; `make demo` runs the demo."""
VERBS = list(Commands.ALL)


def example(verb: str) -> str:
    """The line after `Example:`, which ends the help."""
    shown = RUNNER.invoke(app, [verb, "--help"], terminal_width=400)
    found = re.search(r"Example: (graphwright .*)\Z", " ".join(shown.output.split()))
    assert found, shown.output
    return found[1]


@pytest.mark.timeout(400)  # the demo is twelve chapters
@pytest.mark.parametrize("verb", [pytest.param(v, marks=DEEP if v in ELSEWHERE else ()) for v in VERBS])
def test_the_example_of_each_help_runs(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("What the example of train reads, some lines of it.\n" * 200, encoding="utf-8")
    commands = [shlex.split(part) for part in example(verb).split("&&")]
    assert any(command[1] == verb for command in commands)
    for program, *args in commands:
        done = RUNNER.invoke(app, [*args, *SMALLER.get(args[0], [])])
        assert (program, done.exit_code) == ("graphwright", 0), done.output[-2000:]
        assert done.stdout.strip()
