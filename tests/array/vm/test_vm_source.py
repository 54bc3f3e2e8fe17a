"""The source hash that decides on recompilation covers every compiled file and no other."""

from __future__ import annotations

import ast
import inspect
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from graphwright.array import formulas
from graphwright.array.vm import machine

FOLDER = Path(machine.__file__).parent


def imported(module: str) -> set[str]:
    """Modules of the package that a module imports."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphwright"):
            assert node.module is not None
            inner = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name for name in inner if _is_module(name)} or {node.module}
    return found


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module itself
        return False


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, which the machine takes for its own."""
    directory = tmp_path / "vm"
    shutil.copytree(FOLDER, directory, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(machine, "__file__", str(directory / "machine.py"))
    return directory


def test_every_compiled_file_is_in_the_source_hash() -> None:
    seen: set[str] = set()
    waiting = {machine.__name__}
    while waiting:
        seen |= waiting
        waiting = {other for module in waiting for other in imported(module)} - seen
    folders = FOLDER, Path(formulas.__file__).parent
    stamped = {f"graphwright.array.{folder.name}.{file.stem}" for folder in folders for file in folder.glob("*.py")}
    stamped |= {"graphwright.patterns.table"}
    packages = {"graphwright.array", "graphwright.patterns", "graphwright.array.vm", "graphwright.array.formulas"}
    assert seen - stamped <= {
        *packages,
        "graphwright.native",
        "graphwright.builds",
        "graphwright.errors",
    }  # which contain no loop
    assert stamped - seen == {"graphwright.array.vm.__init__", "graphwright.array.formulas.__init__"}


def test_source_hash_changes_with_loops_only(copied: Path) -> None:
    before = machine.source()
    assert machine.source() == before
    for around in ("encode/share.py", "encode/fuse.py", "running/segment.py", "running/team.py", "running/call.py"):
        (copied / around).write_text("# another\n")
    assert machine.source() == before
    known = {before}
    for loops in ("products.py", "code.py", "machine.py"):
        (copied / loops).write_text((copied / loops).read_text() + "\n")
        assert machine.source() not in known
        known.add(machine.source())


@pytest.mark.parametrize("group", range(len(machine.GROUPS)))
def test_numba_recompiles_every_group_of_loops_when_a_file_changes(group: int) -> None:
    """numba's cache key holds the closure of a function: that must have the hash, as it checks one file only."""
    held = inspect.getclosurevars(machine._compiled(group)._pyfunc).nonlocals
    assert held["source"] == machine.source()
