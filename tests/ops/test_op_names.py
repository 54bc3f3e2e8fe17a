"""Decisions by an op's name outside `ops/` and the executors' tables: counted, few, each with a reason beside it.

A decision is a comparison, a match case, `of_kind`, `select(op=)` or a collection of names; building an op is none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import graphwright
from graphwright.ops import OPS
from graphwright.ops.registry import Traits

SOURCE = Path(graphwright.__file__).parent
OWN = ("ops/", "array/cpu/", "array/cuda/", "array/triton/", "array/vm/", "models/importing/")
REASON = "# by name:"

FIELDS = frozenset({
    *("expert_mlp", "fold", "gate", "index", "junction", "last", "log", "mean", "size", "step", "sum", "where"),
})  # fmt: skip
"""Names of ops that are also usual keys of dicts; as keys they count only among other names of ops."""
OTHER: dict[str, set[str]] = {
    "array/formulas/gates.py": {"GATE_KINDS"},
    "attention/decoding.py": {"attention.granularity"},
    "attention/native_sparse.py": {"self.granularity"},
    "attention/selected_pattern.py": {"attention.granularity"},
    "cli/demo.py": {"preferences"},  # of an export
    "cli/evolve.py": {"b.mutation"},
    "data/grids.py": {"KINDS"},  # of tasks
    "evolve/pictures.py": {"kinds.get(edge.dst)"},  # kinds of drawn nodes
    "array/formulas/experts.py": {"ACTS", "algorithm"},
    "attention/attend.py": {"where"},
    "attention/propose.py": {"candidates"},
    "patterns/edits.py": {"rows"},  # of columns
    "program/editing/pattern_gates.py": {"where"},
    "experts/edits.py": {"birth"},
    "experts/routed.py": {"layers"},  # all of them
    "experts/upcycle.py": {"layers"},
    "lifecycle/figures.py": {"name"},  # of a figure
    "models/export/template_levels.py": {"d.kind"},
    "models/export/ladder.py": {"prefer", "self.prefer"},  # kinds of deviations, preferences
    "models/export/template_match.py": {"kind"},  # of deviations
    "models/architectures/encoder.py": {"fields"},  # dimensions
    "models/architectures/modernbert.py": {"more"},
    "models/train.py": {"differing"},  # fields of a checkpoint
    "autograd/indexing.py": {"reduce"},
    "autograd/pointwise.py": {"rounding_mode"},
    "autograd/reductions.py": {"rounding", "interpolation"},  # between entries
    "nn/embeddings.py": {"mode"},  # of bags
    "nn/init.py": {"_GAINS"},  # of the nonlinearities that torch names
    "nn/losses.py": {"reduction"},
    "nn/resampling.py": {"mode", "_RANKS"},  # of interpolation
    "plan/planning/hazards.py": {"b.kind"},  # kinds of memory
    "plan/planning/remat.py": {"self.kind(base)"},
    "program/draw/dot.py": {"box.kind"},
    "program/draw/style.py": {"scale"},  # of colours
    "program/draw/svg.py": {"b.kind"},
    "program/run.py": {"keep"},
    "structure/elements.py": {"_ON_TENSORS", "p.attrs(gate.handle)['where']"},  # functions of a formula
    "structure/graph.py": {"self.form", "to", "q.action"},  # forms of schedules, ways to harden, actions of policies
    "structure/optimizer.py": {"_UPDATES"},  # functions of a formula
}
"""File -> expressions and variables that hold words of another vocabulary, in which a name of an op is none."""

Decision = tuple[int, str]
Collected = ast.Tuple | ast.List | ast.Set


@cache
def tree(file: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(file.read_text("utf-8"))


@cache
def read_traits() -> set[str]:
    """Names that the package reads as traits of an op."""
    reading = re.compile(r"\b(?:traits|traits\(.*?\)|row|t)\.(?=(\w+))|of_traits\((\w+)=")
    texts = (file.read_text("utf-8") for file in SOURCE.rglob("*.py"))
    return {name or asked for text in texts for name, asked in reading.findall(text)}


@cache
def constants(file: Path) -> Mapping[str, str]:
    """Map the constants of a module that are names of ops to these."""
    return _constants(tree(file))


def _constants(tree: ast.Module) -> dict[str, str]:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("graphwright."):
            file = SOURCE.parent / f"{node.module.replace('.', '/')}.py"
            known = constants(file) if file.is_file() else {}
            found |= {a.asname or a.name: known[a.name] for a in node.names if a.name in known}
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for name, given in pairs:
                if isinstance(name, ast.Name) and isinstance(given, ast.Constant) and given.value in OPS:
                    found[name.id] = given.value
    return found


class Finder(ast.NodeVisitor):
    """Collects the decisions of a module; `other` has expressions of another vocabulary, see `OTHER`."""

    def __init__(self, tree: ast.Module, other: Collection[str] = ()) -> None:
        self.known, self.other = _constants(tree), other
        self.found: list[Decision] = []
        self.met: set[str] = set()  # entries of `other` that were needed
        self.targets: list[str] = []  # of the assignment around the visited node
        self.visit(tree)

    def add(self, node: ast.expr | ast.stmt | ast.pattern, about: Collection[str] = ()) -> None:
        if needed := [text for text in about if text in self.other]:
            self.met.update(needed)
        else:
            self.found.append((node.lineno, ast.unparse(node)))

    def name(self, node: ast.AST | None) -> str | None:
        """The string of a constant, or of a variable that holds one."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    def names(self, node: ast.AST) -> list[str | None]:
        """The strings of a constant or a literal collection, keys of a dict; None for other entries."""
        if isinstance(node, ast.Dict | Collected):
            return [self.name(e) for e in (node.keys if isinstance(node, ast.Dict) else node.elts)]
        return [self.name(node)]

    def leaves(self, node: ast.AST) -> Iterator[str]:
        """The strings among the values of a dict, in nested collections too."""
        if isinstance(node, ast.Dict | Collected):
            for value in node.values if isinstance(node, ast.Dict) else node.elts:
                yield from self.leaves(value)
        elif (name := self.name(node)) is not None:
            yield name

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Subscript) and self.name(t.slice) in OPS for t in targets):
            self.add(node)
        self.targets = [ast.unparse(t) for t in targets]
        if node.value is not None and self.targets != ["__all__"]:
            self.visit(node.value)
        self.targets = []

    visit_AnnAssign = visit_AugAssign = visit_Assign

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        literal = [s for s in sides if any(n is not None for n in self.names(s))]
        rest = [s for s in sides if s not in literal]
        if any(n in OPS for s in literal for n in self.names(s)):
            self.add(node, [ast.unparse(s) for s in rest])
        for side in rest:
            self.visit(side)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        if self.name(node.value) in OPS:
            self.add(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        asked = list(node.args) if called == "of_kind" else []
        asked += [k.value for k in node.keywords if called == "select" and k.arg == "op"]
        about_op = called in ("startswith", "endswith") and re.search(r"\bops?\b", ast.unparse(node.func))
        keyed = called == "dict" and any(k.arg in OPS for k in node.keywords)
        if about_op or keyed or any(n in OPS for a in asked for n in self.names(a)):
            self.add(node)
        for child in [node.func, *node.args, *node.keywords]:
            built = called == "add" and child in node.args[:1] and isinstance(child, ast.Subscript)
            self.visit(child.slice if built else child)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not ast.unparse(node.value).endswith("Literal"):  # a type
            self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict | Collected) -> None:
        names = self.names(node)
        lists = 2 * sum(n in OPS for n in names) > len(names)
        if isinstance(node, ast.Dict):
            values = [*self.leaves(node)]
            lists |= any(n in OPS and n not in FIELDS for n in names)
            lists |= 2 * sum(n in OPS for n in values) >= max(len(values), 1)
        if lists:  # collections inside of it belong to the same decision
            self.add(node, self.targets)
        else:
            self.generic_visit(node)

    visit_Tuple = visit_List = visit_Set = visit_Dict


def decisions(text: str, *other: str) -> list[Decision]:
    """Line and source of each decision in a module."""
    return Finder(ast.parse(text), other).found


def files() -> Iterator[tuple[str, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if not name.startswith(OWN):
            yield name, file.read_text("utf-8")


def test_every_decision_by_op_name_has_a_reason() -> None:
    found, bare, unused = [], [], []
    for file, text in files():
        lines, finder = text.splitlines(), Finder(tree(SOURCE / file), OTHER.get(file, ()))
        for line, source in finder.found:
            found.append((file, line))
            if not any(REASON in near for near in lines[max(line - 2, 0) : line]):
                bare.append(f"{file}:{line}: {source:.90}")
        unused += [(file, text) for text in OTHER.get(file, set()) - finder.met]
    assert not bare, f"ask for a trait of the op, or give the reason in a comment `{REASON} ...`:\n{chr(10).join(bare)}"
    assert not unused, "OTHER lists an expression that is compared with no name of an op"
    assert len(found) < 17


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('p.op(n) == "linear"', 1),
        ('loss == "bce"', 1),
        ('op in {"mul", "add"}', 1),
        ('(op == "mul", op == "add")', 2),
        ('TABLE = ("mul", "add")', 1),
        ('TABLE = frozenset({"mul", "other", "add"})', 1),
        ('_MUL = "mul"\np.op(n) == _MUL', 1),
        ('_MUL, _ADD = "mul", "add"\np.of_kind(_ADD)', 2),
        ('p.of_kind("dropout"), p.of_kind("slice")', 2),
        ('p.select(where, op="linear")', 1),
        ('p.op(n).startswith("rope")', 1),
        ('{"sdpa": attention}', 1),
        ('{"sdpa": attention, "other": f, "another": g}', 1),
        ('table["sdpa"] = attention', 1),
        ("dict(sdpa=attention)", 1),
        ('TABLE = {"a": ("x", "mul"), "b": (("y", "add"),)}', 1),
        ('match op:\n case "mul" | "add": pass', 2),
        ("from graphwright.program.derived.recompute import BARRIER\np.op(n) == BARRIER", 1),
        ('e.add("linear", x, name="out")', 0),
        ('e.add(("tanh", "sigmoid")[k], x)', 0),
        ('call("mul", a, b)', 0),
        ('Literal["bce", "cross_entropy"]', 0),
        ('names = ("mul", "other")', 0),
        ('{"mean": m, "std": s}', 0),
    ],
)
def test_decisions_are_counted_in_every_form_and_constructions_are_not(text: str, count: int) -> None:
    assert len(decisions(text)) == count


def test_names_of_other_vocabularies_are_excluded_by_expression() -> None:
    assert not decisions('scale == "linear"', "scale")
    assert decisions('p.op(n) == "linear"', "scale")


@pytest.mark.parametrize("trait", Traits.__slots__)
def test_every_trait_is_read_and_documented(trait: str) -> None:
    """A trait that no code reads is deleted, with its lines in the definitions of ops."""
    assert trait in read_traits()
    assert f"`{trait}`" in (Path(__file__).parents[2] / "docs" / "ops.md").read_text("utf-8")
