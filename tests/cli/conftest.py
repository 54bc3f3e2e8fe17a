"""Calling the command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from graphwright.cli import app


@pytest.fixture
def call() -> Callable[..., str]:
    """What a call prints: stdout, and after one that is to fail stderr as well."""

    def run(*args: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(a) for a in args])
        assert result.exit_code == code, (args, result.exit_code, result.output, result.stderr)
        return result.stdout if code == 0 else result.stdout + result.stderr

    return run
