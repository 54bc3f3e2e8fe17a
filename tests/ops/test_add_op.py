"""The guide adds an op in under 40 lines of one file; it runs eagerly, traced, planned, gated, as code and as ONNX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession

import graphwright as gw
from graphwright import Builder
from graphwright.array import CPU, backend, bfloat16, float32, from_numpy
from graphwright.autograd import autocast_to, tensor
from graphwright.models.codegen.source import generate
from graphwright.models.onnx import to_model
from graphwright.ops import OPS, call, expansion, surface
from graphwright.testing.gradcheck import GradientMismatch, gradcheck, gradgradcheck, mutants
from graphwright.testing.oracle import assert_bits, assert_close

GUIDE = Path(__file__).parents[2] / "docs" / "ops.md"


@pytest.fixture
def softsign() -> Iterator[str]:
    """The guide's class, registered for one test."""
    (text,) = [b for b in re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S) if '@op("softsign")' in b]
    exec(text, {})
    yield text
    del OPS["softsign"]


def inputs(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32)


def test_the_documented_op_takes_less_than_40_lines(softsign: str) -> None:
    assert len([line for line in softsign.splitlines() if line.strip()]) < 40
    x = np.random.default_rng(0).normal(size=(3, 4))
    assert_close(call("softsign", from_numpy(x)), torch.nn.functional.softsign(torch.from_numpy(x)), rtol=1e-15)
    gradcheck(lambda t: call("softsign", t), [x])
    gradgradcheck(lambda t: call("softsign", t), [x])
    for _, broken in mutants(OPS["softsign"]):
        with pytest.raises(GradientMismatch):
            gradcheck(lambda t, row=broken: t.__gw_op__(row, (t,), {}), [x])


def test_an_added_op_keeps_its_dtype_under_autocast_and_runs_in_a_plan(softsign: str) -> None:
    x = inputs(1)
    with autocast_to(bfloat16):
        assert call("softsign", tensor(x)).dtype is float32
        assert call("softsign", tensor(x).to(bfloat16)).dtype is bfloat16
    b = Builder()
    b.output(b.softsign(b.input("x", ("N", 4)), name="act"), "y")
    p = b.build()
    assert_bits(p.compile(x=(3, 4))({"x": x})["y"], call("softsign", from_numpy(x)))
    assert p.spec(p.node("act")).shape == ("N", 4)


@pytest.mark.parametrize("executor", ["aten", "vm"])
def test_an_added_op_without_a_kernel_runs_on_each_executor(softsign: str, executor: str) -> None:
    assert "softsign" not in backend(CPU).kernels()
    assert expansion.expanded(OPS["softsign"], backend(CPU))
    b = Builder()
    b.output(b.softsign(b.tanh(b.input("x", ("N", 4)))), "y")
    plan, x = b.build().compile(x=(3, 4), executor=executor), inputs(2)
    assert {t.executor for t in plan.profile({"x": x}, 1).timings} == {executor}
    np.testing.assert_allclose(plan({"x": x})["y"].to_numpy(), np.tanh(x) / (1 + abs(np.tanh(x))), rtol=1e-6)


def test_an_added_op_is_traced_and_gated(softsign: str) -> None:
    traced = gw.trace(lambda x: call("softsign", x) * 2.0, tensor(inputs(3)))
    (node,) = traced.of_kind("softsign")
    feeds = {traced.path(traced.inputs()[0]): inputs(4)}
    (name,) = traced.output_names()
    before = traced.run(feeds)[name].to_numpy()
    np.testing.assert_allclose(before, 2 * inputs(4) / (1 + abs(inputs(4))), rtol=1e-6)
    with traced.edit("a gate") as e:
        gate = e.gate(node, "scale", init=0.5)
    assert gate is not None
    np.testing.assert_allclose(traced.run(feeds)[name].to_numpy(), 0.5 * before, rtol=1e-6)


def test_an_added_op_is_exported_as_code_and_as_onnx(softsign: str) -> None:
    model = gw.open("bundled")
    with model.program.edit("another activation") as e:
        old = model.program.node("layers.0.mlp.act")
        new = e.add("softsign", "layers.0.mlp.gate", name="layers.0.mlp.softsign")
        e.rewire(model.program.out_edges(old)[0], new)
    assert model.export_plan().level == 5
    assert any("F.softsign(" in text for text in generate(model.program, "0", []).files.values())
    b = Builder()
    b.output(b.softsign(b.input("x", (3, 4))), "y")
    session = InferenceSession(to_model(b.build()).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": inputs(5)})
    np.testing.assert_allclose(np.asarray(found), inputs(5) / (1 + abs(inputs(5))), rtol=1e-6)


def test_an_added_op_without_source_text_is_generated_as_its_expansion(softsign: str) -> None:
    object.__setattr__(OPS["softsign"], "emit", None)
    model = gw.open("bundled")
    with model.program.edit("another activation") as e:
        old = model.program.node("layers.0.mlp.act")
        new = e.add("softsign", "layers.0.mlp.gate", name="layers.0.mlp.softsign")
        e.rewire(model.program.out_edges(old)[0], new)
    text = "".join(generate(model.program, "0", []).files.values())
    assert "F.softsign(" not in text
    assert "torch.abs(" in text


def test_an_added_op_has_its_function(softsign: str) -> None:
    x = tensor(inputs(6))
    assert_bits(surface.functions()["softsign"](x).data, call("softsign", x).data)
