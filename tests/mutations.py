"""Functions with one planted bug each, made from their source: what the tests of gradients and headers must find.

A mutant differs from the original in one node of its syntax tree: a sign, a term, a factor, a comparison, a condition.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import FunctionType, ModuleType
from typing import Any

Change = tuple[str, ast.AST]


def terms(node: ast.AST) -> Iterator[Change]:
    """Another sign, and each term or factor left out."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "without its sign", node.operand
    if not isinstance(node, ast.BinOp):
        return
    if isinstance(node.op, ast.Add | ast.Sub):
        other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "with the other sign", ast.BinOp(node.left, other, node.right)
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        yield "without its right side", node.left
        yield "without its left side", node.right


def conditions(node: ast.AST) -> Iterator[Change]:
    """A comparison that is off by one or the other way round, a condition left out, a check that is not made."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            for other in _COMPARED.get(type(op), ()):
                ops = [other() if i == index else o for i, o in enumerate(node.ops)]
                yield f"with {other.__name__}", ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            left = [v for i, v in enumerate(node.values) if i != index]
            yield f"without part {index}", ast.BoolOp(node.op, left) if len(left) > 1 else left[0]
    if isinstance(node, ast.If) and any(isinstance(line, ast.Raise) for line in node.body):
        yield "is not checked", ast.Pass()


_COMPARED: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}


def changed(tree: ast.Module, changes: Callable[[ast.AST], Iterator[Change]]) -> Iterator[tuple[str, ast.Module]]:
    """Copies of a tree that differ in one node each, with what was changed where."""
    lines = {id(n): line for line in ast.walk(tree) if isinstance(line, ast.stmt) for n in ast.walk(line)}
    for index, node in enumerate(ast.walk(tree)):
        for which, (what, _) in enumerate(changes(node)):
            copy = deepcopy(tree)
            old = next(n for i, n in enumerate(ast.walk(copy)) if i == index)
            new = list(changes(old))[which][1]
            text, line = (ast.unparse(n).splitlines()[0] for n in (node, lines[id(node)]))
            where = f" in `{line}`" if len(text) < 4 else ""
            yield f"`{text}` {what}{where}", _Replace(old, new).done(copy)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def done(self, tree: ast.Module) -> ast.Module:
        return ast.fix_missing_locations(self.visit(tree))

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def function_mutants(fn: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """A function with one of its terms changed, or one of those of a function of its module that it calls."""
    called = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    parts = [f for f in called if isinstance(f, FunctionType) and f.__module__ == fn.__module__]
    own = _tree(fn)
    for part in (fn, *parts):
        source = _tree(part)
        for what, tree in changed(source, terms):
            space = dict(fn.__globals__)
            exec(compile(tree, "<mutant>", "exec"), space)
            if part is not fn:
                exec(compile(own, "<mutant>", "exec"), space)
            yield f"{_name(source)}: {what}", space[_name(own)]


def _name(tree: ast.Module) -> str:
    (made,) = tree.body
    assert isinstance(made, ast.FunctionDef)
    return made.name


def _tree(fn: FunctionType) -> ast.Module:
    """The source of a function, or of a lambda as a function of the name it is assigned to."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    made = tree.body[0]
    if isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Name) and isinstance(made.value, ast.Lambda):
        body: list[ast.stmt] = [ast.Return(made.value.body)]
        made = ast.FunctionDef(name=made.targets[0].id, args=made.value.args, body=body, decorator_list=[])
    assert isinstance(made, ast.FunctionDef)
    made.decorator_list = []
    return ast.fix_missing_locations(ast.Module([made], []))


def module_mutants(module: ModuleType, keep: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Namespaces of a module with one change in one of its functions; first, under "none", the module as it is.

    Args:
        keep: names that stay the module's own objects: classes, whose instances are compared with others.
    """
    tree = ast.parse(inspect.getsource(module))
    yield "none", _space(tree, module, keep)
    for index, part in enumerate(tree.body):
        if isinstance(part, ast.FunctionDef):
            for what, mutant in changed(ast.Module([part], []), conditions):
                body = [*tree.body[:index], *mutant.body, *tree.body[index + 1 :]]
                yield f"{part.name}: {what}", _space(ast.Module(body, []), module, keep)


def _space(tree: ast.Module, module: ModuleType, keep: tuple[str, ...]) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(tree, "<mutant>", "exec"), space)
    space.update({name: getattr(module, name) for name in keep})
    return space
