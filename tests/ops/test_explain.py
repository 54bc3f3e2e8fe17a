"""`explain` says of each op what its row holds: formula, gradient, expansion, kernel and cost."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from op_cases import draws

import graphwright
from graphwright.array import CPU, Spec, backend, dtype
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import OPS, UnknownOp, explain, op

PACKAGE = Path(graphwright.__file__).parent
GOLDEN = Path(__file__).parent / "explained.txt"


def explained(name: str) -> str:
    """What `explain` says of an op and its first sample, without the line of its kernel."""
    inputs, attrs = draws(name, 1)[0]
    specs = [Spec(x.shape, dtype(x.dtype)) for x in map(np.asarray, inputs)]
    return re.sub(r"(array/cpu/\w+\.py):\d+", r"\1", explain(name, *specs, **attrs))


def golden() -> dict[str, str]:
    """Op -> its stored text. `FREEZE_EXPLAINED=1 pytest tests/ops/test_explain.py` writes them again."""
    if os.environ.get("FREEZE_EXPLAINED"):
        GOLDEN.write_text("".join(f"=== {name}\n{explained(name)}\n" for name in sorted(OPS)), "utf-8")
    parts = re.split(r"^=== (\w+)\n", GOLDEN.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {name: text.removesuffix("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


STORED = golden()


@pytest.mark.parametrize("name", OPS)
def test_explanations_equal_the_stored_texts(name: str) -> None:
    assert explained(name) == STORED[name]


def test_no_explanation_is_stored_for_a_removed_op() -> None:
    assert sorted(STORED) == sorted(OPS)


@pytest.mark.parametrize("doc", [None, "", "  \n "])
def test_ops_without_a_docstring_are_refused(doc: str | None) -> None:
    cells = {"arity": 1, "infer": lambda x: x, "vjp": None, "sample": lambda rng: ([], {}), "why": {"vjp": "-"}}
    with pytest.raises(UsageError, match="docstring"):
        op("never_explained")(type("Silent", (), {**cells, "__doc__": doc}))
    assert "never_explained" not in OPS


@pytest.mark.parametrize("name", OPS)
def test_each_op_is_explained(name: str) -> None:
    row = OPS[name]
    inputs, attrs = draws(name, 1)[0]
    specs = [Spec(x.shape, dtype(x.dtype)) for x in map(np.asarray, inputs)]
    text = explain(name, *specs, **attrs)
    assert row.doc.strip().splitlines()[0] in text
    assert ("return" in text.split("gradient\n")[1].split("expansion\n")[0]) == (row.vjp is not None)
    assert row.vjp is not None or row.why["vjp"] in text
    assert ("a primitive" in text) == (row.expand is None)
    cost = row.cost(specs, row.specs(specs, attrs), attrs)
    assert f"{cost.flops} FLOPs, {cost.read} bytes read, {cost.write} bytes written" in text
    if row.aten is not None:
        assert text.split("kernel\n  ")[1].startswith(f"torch.{row.aten}\n")
    elif row.view is None and not backend(CPU).has_kernel(name):
        assert "kernel\n  none: the expansion runs\n" in text
    elif row.view is None:
        (found,) = re.findall(r"kernel\n  (array/cpu/\w+\.py):(\d+)", text)
        lines = (PACKAGE / found[0]).read_text("utf-8").splitlines()
        assert re.match(r"(    )?(@\w+\(|def |lambda |(out_)?kernel\()", lines[int(found[1]) - 1])


def test_shapes_of_other_operands_are_inferred_from_the_first() -> None:
    assert "f32[4, 16, 64], f32[64] -> f32[4, 16, 64]" in explain("rms_norm", (4, 16, 64))
    assert "f32[8, 32], f32[10, 32]" in explain("linear", (8, 32), (10, 32))
    assert "f32[2, 3] -> f32[2, 3]: 6 FLOPs, 24 bytes read, 24 bytes written" in explain("tanh", (2, 3))
    assert "give the shapes of all operands" in explain("rope", (3,))


def test_mismatched_shapes_and_unknown_ops_are_refused() -> None:
    with pytest.raises(ShapeError, match="rms_norm"):
        explain("rms_norm", (4, 16), (4,))
    with pytest.raises(UnknownOp, match="softmax"):
        explain("sofmax")
