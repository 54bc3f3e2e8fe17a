"""Generated modeling code: what a journal or a checkpoint of strangers says stays text and never becomes code."""

from __future__ import annotations

import ast

import numpy as np
import pytest

import graphwright as gw
from graphwright.models.codegen import generate

TRAPS = [
    '"""\nplanted()\n"""', "@forward@", "\\", '"] + planted() + w["x', "{planted()}", "' + planted() + '", 'a\\"]; planted()',
]  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_names_and_reasons_stay_text(trap):
    p = gw.open("bundled").program
    key = trap.replace("\n", "") + ".2.w"
    with p.edit(trap) as e:
        w = e.param("layers.2.extra", np.zeros((192, 192), np.float32), key=key)
        e.connect(e.add("linear", "layers.1.out", w, name="layers.2." + trap.replace("\n", "").replace(".", "")), "layers.2.out")
    text = generate(p, "x", [trap, "@shapes@"])["modeling_x.py"]
    tree = ast.parse(text)
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "planted"]
    assert sum(isinstance(n, ast.Expr) for n in tree.body) == 1  # the docstring
    words = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    assert key in words
