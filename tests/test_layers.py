"""The layer order: each folder imports only those below it; some libraries only in their own layer."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

SRC = Path(__file__).parents[1] / "src" / "graphwright"
LEVELS = [
    {"errors", "native", "plugins", "progress", "report", "signatures"},
    {"arguments", "builds", "files", "timing", "workers"},
    {"safetensors", "settings"},
    {"graph"},
    {"patterns"},
    {"array"},
    {"ops"},
    {"autograd"},
    {"program"},
    {"plan"},
    {"nn", "optim", "amp", "data", "distributions", "metrics"},
    {"models", "evolve"},
    {"surgery", "structure"},
    {"attention", "distributed", "experts", "lifecycle"},
    {"cli", "testing"},
    {"__init__", "__main__"},
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}
ONLY_IN = {
    "torch": {"array", "patterns", "models/importing"},  # patterns: only to make block masks of FlexAttention
    "triton": {"array"},
    "numba": {"native", "array", "plan"},
    "ray": {"workers"},
    "transformers": {"models"},
    "tokenizers": {"models"},
    "onnx": {"models"},
    "onnxruntime": {"models"},
    "typer": {"cli"},
    "rich": {"cli"},
    "pickle": set(),
}
ALONE = {
    "models/export/clean_check.py"
}  # a script of its own process: it imports torch there, and nothing of the package
FACADES_REACH_UP = {
    ("program/program.py", "graphwright.plan.compile"),
    ("program/program.py", "graphwright.models.onnx"),
    ("program/program.py", "graphwright.nn.as_module"),
    ("models/model.py", "graphwright.surgery"),
}
"""Methods of a facade whose code is in a layer above import it when they are called: (file, module)."""
REGISTRIES_LOAD = {
    ("program/constraints.py", "graphwright.surgery.constraints"),
    ("patterns/pattern.py", "graphwright.attention"),
}
"""A registry, when it is read, loads the module of a layer above that enters its rows, by name: (file, module).

So do the methods of `Pattern` whose code is in `attention`, which all layers between them import."""
FACADES = {
    "program/program.py": {"program/builder.py": "constructs programs, for tracing, taping and loading too"},
    "plan/plan.py": {"plan/compile.py": "caches the plans that it makes"},
    "plan/running/executable.py": {
        "plan/plan.py": "makes the executables of a plan",
        "plan/profiler.py": "times the runs of executables",
        "plan/running/capture.py": "derives the executable that captures graphs",
        "plan/running/parallel.py": "derives the executable that runs on several threads",
    },
    "models/model.py": {"models/open.py": "makes the models that it opens"},
}
"""Facade -> the files of its folder that import it, with the reason; all others know it as a type only."""


def layer(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import, those inside functions too; TYPE_CHECKING blocks apart."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for n in ast.walk(block)
    }
    package = ("graphwright", *path.relative_to(SRC).with_suffix("").parts[:-1])
    found = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def loaded_by_name(path: Path) -> set[str]:
    """Modules of the package that `import_module` loads, by a literal name."""
    calls = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call))
    names = [n.args[0] for n in calls if ast.unparse(n.func).endswith("import_module")]
    literals = {str(n.value) for n in names if isinstance(n, ast.Constant)}
    return {name for name in literals if name.startswith("graphwright.")}


def problems(path: Path, found: list[tuple[int, str]]) -> list[str]:
    """Imports that point up or sideways, or name a library that another layer owns."""
    where, wrong = layer(path), []
    if str(path.relative_to(SRC)) in ALONE:
        return [f"{path.name}:{line} imports {name}" for line, name in found if name.startswith("graphwright")]
    for line, name in found:
        top, _, rest = name.partition(".")
        folder = str(path.relative_to(SRC).parent)
        if top in ONLY_IN and where not in ONLY_IN[top] and folder not in ONLY_IN[top]:
            wrong.append(
                f"{path.relative_to(SRC)}:{line} imports {top}, which belongs to {sorted(ONLY_IN[top]) or 'no folder'}"
            )
        if top != "graphwright":
            continue
        target = rest.split(".")[0]
        if target not in LEVEL:  # a name of the package itself: its version
            if target not in ("__version__", "") and where not in ("__init__", "__main__"):
                wrong.append(f"{path.relative_to(SRC)}:{line} imports {name} from the package itself")
            continue
        if (str(path.relative_to(SRC)), name.rpartition(".")[0]) in FACADES_REACH_UP:
            continue
        if target != where and LEVEL[target] >= LEVEL[where]:
            wrong.append(f"{path.relative_to(SRC)}:{line} ({where}) imports {name}: not below it")
    return wrong


FILES = sorted(SRC.rglob("*.py"))


def test_each_facade_import_that_reaches_up_exists():
    found = {(str(path.relative_to(SRC)), name.rpartition(".")[0]) for path in FILES for _, name in imports(path)}
    assert found >= FACADES_REACH_UP


def test_modules_loaded_by_name_are_of_a_lower_layer_or_listed_as_registries():
    found = {(str(path.relative_to(SRC)), name) for path in FILES for name in loaded_by_name(path)}
    up = {(file, name) for file, name in found if LEVEL[name.split(".")[1]] >= LEVEL[layer(SRC / file)]}
    assert up == REGISTRIES_LOAD


@pytest.mark.parametrize("facade", FACADES)
def test_facades_are_imported_by_no_other_file_of_their_folder(facade):
    module = "graphwright." + facade.removesuffix(".py").replace("/", ".")
    folder = SRC / facade.split("/")[0]
    importers = {
        str(path.relative_to(SRC))
        for path in folder.rglob("*.py")
        if path != folder / "__init__.py"
        and any(name == module or name.startswith(f"{module}.") for _, name in imports(path))
    }
    assert importers == FACADES[facade].keys()


def test_every_folder_has_a_level():
    assert {layer(f) for f in FILES} == set(LEVEL)


def test_imports_only_refer_to_lower_layers():
    assert [wrong for path in FILES for wrong in problems(path, imports(path))] == []


def test_no_import_circle_has_more_than_two_files():
    modules = {".".join(("graphwright", *path.relative_to(SRC).with_suffix("").parts)): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = nx.DiGraph()
    for module, path in modules.items():
        for _, name in imports(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                graph.add_edge(module, target)
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 2] == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ops/x.py", "from graphwright.autograd import Tensor"),
        ("ops/x.py", "def f():\n    import torch"),
        ("nn/x.py", "from graphwright import optim"),
        ("program/x.py", "from ..plan import Plan"),
        ("models/x.py", "import pickle"),
    ],
)
def test_planted_violations_are_found(tmp_path, monkeypatch, name, line):
    monkeypatch.setattr(f"{__name__}.SRC", tmp_path)
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(line)
    assert problems(path, imports(path))


def test_no_file_exceeds_900_lines():
    lines = {str(path.relative_to(SRC)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > 900} == {}
