"""The public names with their signatures are frozen in `public_api.txt`; a change edits that file and the changelog."""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import re
from collections.abc import Callable
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import pytest

import graphwright as gw
from graphwright.errors import GraphwrightError

FROZEN = Path(__file__).parent / "public_api.txt"
PARTS = ("OpGraph", "TensorBase", "OpMethods", "Report")  # bases that are not public
MODULES = (
    "amp",
    "errors",
    "array",
    "attention",
    "autograd",
    "data",
    "distributions",
    "evolve",
    "evolve.mutations",
    "evolve.pictures",
    "evolve.tasks",
    "attention",
    "experts",
    "files",
    "graph",
    "lifecycle",
    "metrics",
    "models",
    "nn",
    "nn.functional",
    "nn.init",
    "nn.utils",
    "nn.utils.rnn",
    "ops",
    "optim",
    "optim.lr_scheduler",
    "patterns",
    "plan",
    "program",
    "safetensors",
    "structure",
    "surgery",
    "testing.defects",
    "testing.faults",
    "testing.gradcheck",
    "testing.oracle",
    "testing.planted",
    "testing.shift",
    "testing.simulated_device",
    "workers",
)


def describe(name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        lines = [f"class {name}{constructor(value)}"]
        for member, attr in sorted(_members(value).items()):
            if member.startswith("_") and member not in ("__call__",):
                continue
            if not isinstance(attr, staticmethod | classmethod | property | cached_property):
                attr = getattr(value, member)  # a method of `late` is then the function that it imports
            if inspect.isfunction(attr) or isinstance(attr, staticmethod | classmethod):
                fn = attr.__func__ if isinstance(attr, staticmethod | classmethod) else attr
                lines.append(f"    {member}{signature(fn)}")
            elif isinstance(attr, property | cached_property):
                lines.append(f"    {member}")
        return lines
    if callable(value):
        return [f"{name}{signature(value)}"]
    return [name]


def _members(cls: type) -> dict[str, object]:
    """Its own members, and those of bases that are not public."""
    bases = [c for c in reversed(cls.__mro__) if c is cls or c.__qualname__ in PARTS]
    return {name: attr for c in bases for name, attr in vars(c).items()}


def constructor(cls: type) -> str:
    """The signature of a class that states one: the fields of a dataclass or tuple, or the parameters of `__init__`."""
    if fields := getattr(cls, "_fields", None) or (is_typeddict(cls) and cls.__annotations__):
        return f"({', '.join(fields)})"
    inherited = cls is not GraphwrightError and cls.__init__ is GraphwrightError.__init__
    if inherited or issubclass(cls, Enum) or getattr(cls, "_is_protocol", False):
        return ""
    ours = (c for c in cls.__mro__ if c.__module__.startswith("graphwright."))
    return signature(cls) if any({"__init__", "__new__"} & vars(c).keys() for c in ours) else ""


def signature(fn: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(fn, eval_str=False))
    except (TypeError, ValueError):
        return "(...)"


def current() -> str:
    lines = [f"graphwright.{name}" for name in sorted(gw.__all__) if not name.startswith("__")]
    for module in MODULES:
        loaded = __import__(f"graphwright.{module}", fromlist=["*"])
        for name in sorted(getattr(loaded, "__all__", None) or _reachable(loaded)):
            value = getattr(loaded, name)
            if not inspect.ismodule(value):
                lines += [f"graphwright.{module}: {line}" for line in describe(name, value)]
    return "\n".join(lines) + "\n"


def _reachable(module: ModuleType) -> set[str]:
    """The names that a module without `__all__` defines, and those that it takes by `from ... import *`."""
    tree = ast.parse(inspect.getsource(module))
    stars = [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and n.names[0].name == "*" and n.module]
    taken = {name for star in stars for name in import_module(star).__all__}
    return taken | {n for n, v in vars(module).items() if _defined(n, v, module)}


def _defined(name: str, value: object, module: ModuleType) -> bool:
    """Whether a module without `__all__` defines a public class or function of this name."""
    known = inspect.isclass(value) or inspect.isfunction(value)
    return known and not name.startswith("_") and value.__module__ == module.__name__


def test_the_public_api_matches_the_stored_one():
    now = current()
    if os.environ.get("FREEZE_API"):
        FROZEN.write_text(now, encoding="utf-8")
    frozen = FROZEN.read_text(encoding="utf-8")
    diff = "\n".join(
        difflib.unified_diff(frozen.splitlines(), now.splitlines(), "public_api.txt", "now", lineterm="", n=0)
    )
    assert not diff, (
        f"the public API changed; edit tests/public_api.txt (FREEZE_API=1 writes it) and CHANGELOG.md\n{diff}"
    )


def options(fn: Callable[..., Any]) -> dict[str, str]:
    """The parameters after the first, which is the object that the function is about."""
    return {p.name: f"{p.kind.name} {p}" for p in list(inspect.signature(fn).parameters.values())[1:]}


@pytest.mark.parametrize(
    ("method", "twin", "without"),
    [
        (gw.models.Model.diagnose, gw.surgery.diagnose, ()),
        (gw.models.Model.save, gw.program.save, ("companions",)),
        (gw.models.Model.parameters, gw.program.Program.parameters, ()),
        (gw.program.Selection.gate, gw.program.Units.gate, ()),
    ],
)
def test_the_same_verb_takes_the_same_options_everywhere(method, twin, without):
    assert options(method) == {name: text for name, text in options(twin).items() if name not in without}
    returned = {inspect.signature(fn).return_annotation for fn in (method, twin)}
    assert len(returned) == 1


def test_star_imports_are_frozen_too():
    lines = current().splitlines()
    for name in ("relu", "cross_entropy", "linear", "conv2d", "sigmoid"):  # defined there, taken, generated
        assert any(line.startswith(f"graphwright.nn.functional: {name}(") for line in lines)


def test_a_progress_callback_is_always_called_progress():
    assert set(re.findall(r"(\w+): 'ProgressCallback", current())) == {"progress"}


def test_every_public_name_resolves():
    for name in gw.__all__:
        assert getattr(gw, name) is not None


def test_type_stub_names_what_the_package_exports():
    stub = ast.parse((Path(gw.__file__).parent / "__init__.pyi").read_text(encoding="utf-8"))
    names = {a.asname for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert names | {"__version__"} == set(dir(gw))
