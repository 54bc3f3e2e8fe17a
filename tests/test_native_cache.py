"""Where compiled code is kept when an installation may be read only: numba's own counters say what was compiled."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core.caching import InTreeCacheLocator
from numba.core.codegen import CPUCodegen

import script_modules
from graphwright import native

SOURCE = "from graphwright.native import njit\n\n@njit(cache=True)\ndef twice(x):\n    return x + x\n"


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reload a package of one function and call it; returns its dispatcher."""
    source = tmp_path / "package" / "code.py"
    source.parent.mkdir()
    source.write_text(SOURCE)
    monkeypatch.setattr(native, "PACKAGE", source.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    native._seed.cache_clear()

    def load() -> Any:
        module = script_modules.load(source, monkeypatch)
        assert module.twice(2) == 4
        return module.twice

    return load


def refuse(self: Any) -> None:
    raise PermissionError(13, "read only", self.get_cache_path())


def counts(function: Any) -> tuple[int, int]:
    """Signatures read from disk and signatures compiled."""
    return sum(function.stats.cache_hits.values()), sum(function.stats.cache_misses.values())


@pytest.mark.parametrize("home", [True, False])
def test_code_built_with_a_read_only_installation_is_used(
    twice: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: bool
) -> None:
    assert counts(twice()) == (0, 1)
    (tmp_path / "package" / "__pycache__" / "code-1.built").touch()
    monkeypatch.setattr(InTreeCacheLocator, "ensure_cache_path", refuse)
    if not home:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # not writable
    function = twice()
    assert counts(function) == (1, 0)
    folder = Path(function.stats.cache_path)
    assert folder.is_relative_to(tmp_path / "home" if home else native._process_folder())
    assert (folder / "code-1.built").exists()
    assert not list(folder.glob("*.part"))


def test_newer_installed_code_replaces_the_users_cache(
    twice: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(InTreeCacheLocator, "ensure_cache_path", refuse)
        assert counts(twice()) == (0, 1)  # nothing to begin with: kept in the user's cache
        assert counts(twice()) == (1, 0)
    source = tmp_path / "package" / "code.py"
    source.write_text(source.read_text().replace("x + x", "2 * x"))
    assert counts(twice()) == (0, 1)
    native._seed.cache_clear()  # another process
    monkeypatch.setattr(InTreeCacheLocator, "ensure_cache_path", refuse)
    assert counts(twice()) == (1, 0)


def test_code_outside_the_package_uses_the_cache_of_numba(tmp_path: Path) -> None:
    assert native.Seeded.from_function(refuse, str(tmp_path / "theirs.py")) is None


def test_inner_functions_are_linked_into_their_callers_at_any_depth() -> None:
    """A diamond of calls, in which `top` calls `least` only by way of others; only `top` has machine code."""
    least = native.inner(lambda x: 3 * x + 1)
    middle = native.inner(lambda x: least(x) - least(-x))
    other = native.inner(lambda x: middle(x) + least(x))
    top = native.njit(lambda x, y: middle(x) * other(y))
    assert [top(x, y) for x in (0, 2) for y in (1, 5)] == [6 * x * (9 * y + 1) for x in (0, 2) for y in (1, 5)]
    (code,), (inner,) = ([d.overloads[s].library for s in d.overloads] for d in (top, least))
    assert code.get_pointer_to_function(next(iter(top.overloads.values())).fndesc.llvm_func_name)
    assert not code._codegen._engine.is_symbol_defined(next(iter(least.overloads.values())).fndesc.llvm_func_name)
    assert type(inner).__name__ == "InnerCode"


CHANGED = """
import logging
logging.basicConfig(format="%(name)s %(message)s")
import numba
from numba.core import codegen
numba.__version__ = "0.99.0"
if {gone}:
    del codegen.JITCodeLibrary
from graphwright import native

@native.inner(error_model="numpy")
def double(x):
    return 2 * x

@native.cfunc("int64(int64)")
def more(x):
    return double(x) + 1

print(more.ctypes(20), native.njit is numba.njit)
"""


@pytest.mark.parametrize("gone", [False, True])
def test_code_is_compiled_by_numba_alone_where_its_internals_have_changed(gone: bool) -> None:
    done = subprocess.run([sys.executable, "-c", CHANGED.format(gone=gone)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["41", str(gone)]
    notice = "graphwright numba 0.99.0 has other internals than 0.68.*, so native code takes longer to build"
    assert done.stderr.startswith(notice) is gone


def test_the_oldest_numba_is_one_whose_internals_are_known() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"numba>={native.TESTED[:-1]}" in project["dependencies"]


def test_no_function_but_the_entry_is_seen_by_other_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes give different functions the same name: a third one that loads both builds must not mix them."""
    passes = SimpleNamespace(run=lambda module, builder: None)  # without optimisation, which inlines
    monkeypatch.setattr(CPUCodegen, "_module_pass_manager", lambda self: (passes, None))
    twice = native.inner(lambda x: x + x)

    @native.njit
    def entry(x: int) -> int:
        return twice(x) + 1

    assert entry(2) == 5
    (made,) = entry.overloads.values()
    defined = [f for f in made.library._final_module.functions if not f.is_declaration]
    assert [f.linkage.name for f in defined if "lambda" in f.name] == ["internal"]
