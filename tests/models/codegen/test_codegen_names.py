"""Generated modeling code: text of an untrusted journal or checkpoint stays text and never becomes code."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest

import graphwright as gw
from graphwright.models import ExportLevelImpossible
from graphwright.models.codegen.source import generate

TRAPS = [
    '"""\nplanted()\n"""',
    "@forward@",
    "\\",
    '"] + planted() + w["x',
    "{planted()}",
    "' + planted() + '",
    'a\\"]; planted()',
]


def edited(why: str, name: str, key: str):
    p = gw.open("bundled").program
    with p.edit(why) as e:
        w = e.param("layers.2.extra", np.zeros((192, 192), np.float32), key=key)
        e.connect(e.add("linear", "layers.1.out", w, name=name), "layers.2.out")
    return p


@pytest.mark.parametrize("trap", TRAPS)
def test_names_and_reasons_never_become_code(trap):
    name = "layers.2." + re.sub(r"[\n.*\[\]{}]", "", trap).strip()  # without characters that names cannot have
    text = generate(edited(trap, name, "layers.2.extra"), "x", [trap, "@shapes@"]).files["modeling_x.py"]
    tree = ast.parse(text)
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert "planted" not in called
    assert sum(isinstance(n, ast.Expr) for n in tree.body) == 1  # the docstring


@pytest.mark.parametrize("trap", TRAPS)
def test_a_key_that_could_be_code_is_refused(trap):
    with pytest.raises(ExportLevelImpossible, match="key"):
        generate(edited("x", "layers.2.skip", trap.replace("\n", "")), "x", [])
