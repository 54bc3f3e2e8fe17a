"""Load a file that is in no package, such as one of scripts/, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a new module of the file; it is in sys.modules, where dataclasses look it up, until the test ends."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
