"""Decisions by an op's name outside `ops/` and the executors' tables: counted, few, each with a reason."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import graphwright
from graphwright.ops import OPS

SOURCE = Path(graphwright.__file__).parent
OWN = ("ops/", "array/cpu/", "array/vm/")

ALLOWED = {
    "evolve/pictures.py": (1, "colours of a picture's legend"),
    "evolve/mutations/layers.py": (2, "the menus a mutation draws activations and attributes from"),
    "models/export/template_match.py": (2, "patterns of the templates: their norm, and key heads read by a table"),
    "program/editing/gate_edits.py": (1, "softmax alone gives -inf scores the weight 0 that a gated unit needs"),
    "program/gates.py": (2, "patterns that `set_gate` writes, and reshapes that keep an axis whole"),
    "program/editing/unfold.py": (1, "the axes along which each op is split into one op per unit"),
    "surgery/factorise/chain.py": (1, "the pattern that `compress` writes"),
    "surgery/findings/heads.py": (1, "ops that keep heads apart, for norms only the one over head_dim"),
    "testing/defects.py": (1, "planted defects"),
}
"""File -> number of decisions, and why a trait would not say it better."""


def names(node: ast.AST) -> list[str | None]:
    """Constants of a literal, or of a collection of literals."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else None]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("frozenset", "set", "tuple"):
        return [n for a in node.args for n in names(a)] or [None]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [n for e in node.elts for n in names(e)]
    if isinstance(node, ast.Dict):
        return [n for k in node.keys if k is not None for n in names(k)]
    return [None]


def decisions(text: str) -> Iterator[int]:
    """Lines that compare an op with a name, or list several ops."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    looked_up = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n).startswith("map(get, ")]
    constants = {  # a list of several ops counts where it is written
        n.targets[0].id: n.value
        for n in tree.body
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and isinstance(n.value, ast.Constant)
    }
    compared = [n for n in nodes if isinstance(n, ast.Compare)]
    other = {id(a) for call in looked_up for a in call.args}
    other |= {id(side) for c in compared for side in (c.left, *c.comparators)}
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [constants.get(s.id, s) if isinstance(s, ast.Name) else s for s in (node.left, *node.comparators)]
            about_ops = any(re.search(r"\bops?\b", ast.unparse(s)) for s in sides if not any(names(s)))
            if about_ops and any(n in OPS for s in sides for n in names(s) if n is not None):
                yield node.lineno
        elif isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and id(node) not in other:
            found = names(node)
            if len(found) > 1 and all(n in OPS for n in found):
                yield node.lineno


def test_decisions_by_op_name_do_not_increase() -> None:
    found: Counter[str] = Counter()
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if not name.startswith(OWN):
            found[name] = len(set(decisions(file.read_text("utf-8"))))
    extra = {name: n for name, n in found.items() if n > ALLOWED.get(name, (0, ""))[0]}
    assert not extra, "ask for a trait of the op instead of its name"
    assert sum(found.values()) < 15


def test_decisions_by_name_are_counted_in_comparisons_and_lists() -> None:
    assert list(decisions('p.op(n) == "linear"')) == [1]
    assert list(decisions('op in {"mul", "add"}')) == [1]
    assert list(decisions('TABLE = ("mul", "add")')) == [1]
    assert list(decisions('_MUL = "mul"\np.op(n) == _MUL')) == [2]
    assert not list(decisions('reduction == "mean"'))
    assert not list(decisions('names = ("mul", "other")'))
