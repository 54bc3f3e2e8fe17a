"""Options are stated once: what type checkers read as `Unpack[...]` is the signature that `help` and editors show."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import graphwright as gw
from graphwright.plan import CompileOptions, compile_program
from graphwright.signatures import keywords, late

SRC = Path(gw.__file__).parent
CONVERTED = {"watch": "Sequence[str]", "device": "Device | str"}
"""Options of `CompileOptions` that a function accepts in more types than the field has."""


def module_of(path: Path) -> str:
    return ".".join(("graphwright", *path.relative_to(SRC).with_suffix("").parts))


def functions(node: ast.AST, path: str = "") -> list[tuple[str, ast.FunctionDef]]:
    """The functions and methods in a file, with dotted names; without overloads."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and not any("overload" in ast.dump(d) for d in child.decorator_list):
            found.append((f"{path}{child.name}", child))
        elif isinstance(child, ast.ClassDef):
            found += functions(child, f"{path}{child.name}.")
    return found


TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(SRC.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in TEXTS.items() if "Unpack[" in text or "TypedDict" in text}
HOMES = {n.name: module_of(path) for path, tree in TREES.items() for n in tree.body if isinstance(n, ast.ClassDef)}
UNPACKED = [
    (module_of(path), name, node.args, kind.slice.id)
    for path, tree in TREES.items()
    for name, node in functions(tree)
    if node.args.kwarg is not None and isinstance(kind := node.args.kwarg.annotation, ast.Subscript)
    if isinstance(kind.slice, ast.Name)
]


@pytest.mark.parametrize(
    ("module", "name", "own", "typed"),
    [pytest.param(*row, id=row[1]) for row in UNPACKED if row[3] != "Facts"],  # errors pass these on to their root
)
def test_keywords_of_a_type_checker_are_those_of_the_signature(module, name, own, typed):
    function: Any = import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    known = {arg.arg for arg in (*own.args, *own.kwonlyargs)}
    shown = [p for p in inspect.signature(function).parameters.values() if p.name not in known]
    assert {p.kind for p in shown} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(p.default is not p.empty for p in shown)
    written = getattr(import_module(HOMES[typed]), typed).__annotations__
    converted = CONVERTED if typed == "CompileKeywords" else {}
    types = {p.name: converted.get(p.name, p.annotation) for p in shown}
    assert list(types.items()) == [(n, kind.__forward_arg__) for n, kind in written.items()]


def test_the_options_of_a_plan_are_written_out_because_other_keywords_are_inputs():
    shown = inspect.signature(compile_program).parameters
    for f in fields(CompileOptions):
        kind = CONVERTED.get(f.name, f.type)
        assert (shown[f.name].kind, shown[f.name].annotation) == (inspect.Parameter.KEYWORD_ONLY, kind)
        assert shown[f.name].default is f.default


def source(a: int, *, b: int = 1, c: str = "x") -> None: ...


def test_keywords_that_a_function_has_itself_stay_as_they_are():
    def function(x: int, *, c: str = "own", **options: Any) -> int:
        return x + options.get("b", 0)

    made: Any = keywords(source)(function)
    assert str(inspect.signature(made)) == "(x: 'int', *, c: 'str' = 'own', b: 'int' = 1) -> 'int'"
    assert made(1, b=2) == 3


class Facade:
    value = 2

    @late
    def times(self):
        """Multiply."""
        return multiplied


def multiplied(facade: Facade, by: int = 3) -> int:
    return facade.value * by


def test_a_late_method_is_the_function_that_it_imports():
    assert Facade.times is multiplied
    assert Facade().times(by=5) == 10
    assert str(inspect.signature(Facade().times)) == "(by: 'int' = 3) -> 'int'"


def test_a_misspelt_option_is_refused():
    model: Any = gw.open("bundled")
    calls = (model.select, {"opp": "linear"}), (model.program.to_svg, {"levels": 2}), (model.new_cache, {"blok": 4})
    for call, wrong in calls:
        with pytest.raises(TypeError, match=next(iter(wrong))):
            call(**wrong)
