"""Generated kernels of fusion groups in Triton's interpreter: each op beside the CPU's kernel, groups beside the VM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphwright.array import float32
from graphwright.array.triton import expressions, fused
from graphwright.array.vm.encode.operands import View
from graphwright.errors import UsageError
from graphwright.ops import OPS
from graphwright.program import Builder
from triton_process import facts

SCRIPT = Path(__file__).parent / "interpreted_fused.py"
ALLOWED = {"rms_norm": 64}
"""Op -> allowed distance, in units of the precision, relative to max(1e-3, |y|, `TERMS`); 4 for the others."""


def check(found: dict[str, Any]) -> None:
    groups = {name: found.pop(name) for name in ("elementwise", "random", "mixed", "captured")}
    assert set(found) == {*expressions.EXPRESSIONS, *expressions.ROWS}
    for name, worst in found.items():
        assert worst, f"{name} was not generated for any dtype"
        for dtype, far in worst.items():
            most = 0 if dtype[:3] in ("int", "boo") else 3 if dtype.endswith("16") else ALLOWED.get(name, 4)
            assert far <= most, (name, dtype)
    assert groups["elementwise"]["groups"] > 5
    for name in ("elementwise", "random"):
        assert groups[name]["distance"] < 5000, name  # of chains of up to 24 ops, some of which cancel
    for name, (far, count) in groups["mixed"].items():
        assert (far < 16, count) == (True, 1), name
    edited = groups["captured"]
    assert edited.pop("distance") < 1e-5
    assert edited == {"captures": 3, "groups": [[3], [5], [3]], "state": "captured"}


@pytest.mark.triton
def test_generated_kernels_equal_those_of_the_cpu(tmp_path: Path) -> None:
    check(facts(SCRIPT, tmp_path, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore"))


@pytest.mark.triton
@pytest.mark.deep
def test_generated_kernels_of_all_shapes_and_400_programs(tmp_path: Path) -> None:
    check(facts(SCRIPT, tmp_path, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore", DEEP="1"))


def test_all_elementwise_ops_of_the_vm_have_an_expression() -> None:
    known = {*expressions.EXPRESSIONS, *expressions.ROWS}
    assert known <= set(OPS)
    assert {name for name, o in OPS.items() if o.vm and (o.traits.elementwise or o.vm.by_row)} <= known


def test_a_plan_shows_the_source_of_its_groups() -> None:
    b = Builder("shown")
    x = b.input("x", (64, 100))
    b.output(b.mul(b.exp(x), b.silu(x)), "y")
    plan = b.build().compile(x=(64, 100), executor="vm")
    text = plan.kernel(0)
    assert text == plan.kernel(0)
    assert "silu" in text
    assert (text.count("tl.load"), text.count("tl.store")) == (1, 1)
    with pytest.raises(UsageError, match="groups"):
        plan.kernel(1)


def test_text_does_not_depend_on_sizes() -> None:
    def text(rows: int, cols: int) -> str:
        b = Builder("sized")
        x, w = b.input("x", (rows, cols)), b.input("w", (cols,))
        b.output(b.mul(b.rms_norm(x, w, eps=1e-5), b.relu(x)), "y")
        return b.build().compile({"x": (rows, cols), "w": (cols,)}, executor="vm").kernel(0)

    assert len({text(*size) for size in ((2, 64), (7, 100), (33, 513))}) == 1


def test_offsets_of_far_elements_are_64_bits_wide() -> None:
    def text(step: int) -> str:
        x, y = View(float32, (2, 8192), (1, step)), View(float32, (2, 8192), (8192, 1))
        operands = fused.Operand(0, x), fused.Operand(1, y)
        return fused.kernel((2, 8192), [fused.Member("softmax", {}, operands[1], operands[:1])]).text

    near, far = text(2**18 - 64), text(2**18 + 64)
    assert "int64" not in near
    assert "row = tl.program_id(0).to(tl.int64)" in far
    assert "i1 = tl.arange(0, BLOCK).to(tl.int64)" in far


@pytest.mark.triton
@pytest.mark.deep
def test_generated_kernels_compile_for_gpus_without_spills(tmp_path: Path) -> None:
    found = facts(SCRIPT.with_name("compiled_fused.py"), tmp_path)
    assert {name.rpartition(" ")[2] for name in found} == {"sm_80", "sm_90", "sm_100"}
    assert max(made["ops"] for made in found.values()) >= 20
    for name, made in found.items():
        assert made["elf"], name
        assert (made["spills"], made["atomics"]) == (0, []), name
