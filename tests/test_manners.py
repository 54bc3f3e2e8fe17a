"""A library says nothing by itself: warnings are logged for who listens, and only commands print."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import graphwright

SOURCE = Path(graphwright.__file__).parent
PRINTS = {("program/selection.py", "show"), ("program/axes/units.py", "show")}
"""Functions whose job it is to print."""


def test_log_records_are_shown_only_if_a_handler_is_configured():
    code = "import logging, graphwright\n{}logging.getLogger('graphwright.models').warning('a plugin was skipped')"
    for setup, shown in (("", ""), ("logging.basicConfig();", "WARNING:graphwright.models:a plugin was skipped\n")):
        done = subprocess.run([sys.executable, "-c", code.format(setup)], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", shown)


def test_only_commands_print():
    found = set()
    for path in SOURCE.rglob("*.py"):
        relative = path.relative_to(SOURCE)
        if relative.parts[0] in ("cli", "__main__.py"):
            continue
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if "print(" in text else ():
            if isinstance(function, ast.FunctionDef):
                calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
                if any(isinstance(f, ast.Name) and f.id == "print" for f in calls):
                    found.add((relative.as_posix(), function.name))
    assert found == PRINTS


def test_every_logger_is_named_after_the_package():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if "getLogger" in text else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "logging.getLogger":
                (name,) = call.args
                assert ast.unparse(name) == "__name__" or ast.literal_eval(name).startswith("graphwright"), path
