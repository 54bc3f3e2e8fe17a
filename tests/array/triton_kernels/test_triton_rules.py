"""Rules for the text of Triton kernels: masks, float32 inside, grids of one axis, no atomics, no locks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "src" / "graphwright" / "array" / "triton"
SCALARS = {
    "block_attention.py": {"_ints", "_word", "_allowed", "_gate", "_shift", "_row", "_edge", "_tokens", "forward",
                           "backward_rows", "backward_columns", "edge_mass", "gate_gradients"},
    "words.py": {"apply_words"},
}  # fmt: skip
"""File -> functions that load or store one word of a table at an index the table itself vouches for."""
UNSAFE = {"atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg", "atomic_and", "atomic_or",
          "atomic_xor", "inline_asm_elementwise"}  # fmt: skip
ARITHMETIC = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions that Triton compiles."""
    for node in ast.walk(tree):
        made = {ast.unparse(d) for d in node.decorator_list} if isinstance(node, ast.FunctionDef) else set()
        if isinstance(node, ast.FunctionDef) and made & {"triton.jit", "compiled"}:
            yield node


def named(call: ast.AST) -> str:
    """Return the last part of the name of a called function."""
    if not isinstance(call, ast.Call):
        return ""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def in_triton(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "tl"


def breaches(source: str, scalars: set[str]) -> list[str]:
    """Return the breaches of the rules in the source of one file."""
    found = []
    for function in functions(ast.parse(source)):
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call) and in_triton(node)):
            where, name = f"{function.name}, line {call.lineno}", named(call)
            if name in UNSAFE:
                found.append(f"{where}: {name}")
            if name == "program_id" and ast.unparse(call.args[0]) != "0":
                found.append(f"{where}: a second axis of a grid, which has at most 65535 programs")
            masked = any(k.arg == "mask" for k in call.keywords)
            if name in ("load", "store") and not masked and function.name not in scalars:
                found.append(f"{where}: {name} without a mask")
            if name == "load" and function.name not in scalars and computed(function, parents, call):
                found.append(f"{where}: arithmetic on a loaded value that is not widened, such as by wide() or .to()")
    return found


def computed(function: ast.FunctionDef, parents: dict[ast.AST, ast.AST], load: ast.Call) -> bool:
    """Whether a loaded value, or the variable that it is assigned to, is an operand of arithmetic as it is."""
    above = parents[load]
    if isinstance(above, ast.Assign) and isinstance(above.targets[0], ast.Name):
        uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == above.targets[0].id]
    else:
        uses = [load]
    return any(isinstance(up := parents[use], ast.BinOp) and isinstance(up.op, ARITHMETIC) for use in uses)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_kernel_text_keeps_the_rules(path: Path) -> None:
    assert breaches(path.read_text(), SCALARS.get(path.name, set())) == []


def test_the_rules_find_what_they_forbid() -> None:
    source = """
@compiled
def bad(x, out, n):
    a = tl.load(x) + 1
    b = tl.load(x, mask=n > 0)
    tl.atomic_add(out, a + tl.program_id(1))
    tl.store(out, a * b)
"""
    assert len(breaches(source, set())) == 6
