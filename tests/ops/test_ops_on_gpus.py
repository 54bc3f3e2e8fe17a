"""Kernels of a GPU without one: on tensors that are not the host's, and by the backend over simulated memory."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchgen
from emulated_gpu import GPU, OnDevice, emulated
from op_cases import draws

from graphwright.array import CPU, Device, NDArray, from_numpy
from graphwright.array.backend import Needs
from graphwright.array.cpu.kernel import KERNELS, TORCH_DTYPE, Kernel, kernel, kernel_of
from graphwright.array.cuda.cuda_backend import CudaBackend
from graphwright.array.cuda.torch_kernels import TORCH
from graphwright.array.spec import Spec
from graphwright.ops import OPS, call, compute, expansion
from graphwright.testing.oracle import assert_close

THERE = Device("sim:1")
"""The device of the fixture `gpu`."""
FEW = 1
"""Draws of an op in the ordinary profile."""
TABLES = [("torch", name) for name in TORCH] + [
    ("aten", name) for name in OPS if (row := kernel_of(name)) is not None and not row.host and name not in TORCH
]


def _row(table: str, name: str) -> Kernel:
    row = TORCH.get(name) if table == "torch" else kernel_of(name)
    assert row is not None
    return row


def _operands(name: str, k: int) -> tuple[list[NDArray], dict[str, Any]]:
    """Operands in float32, but for those whose dtype is fixed."""
    inputs, attrs = draws(name, k + 1)[k]
    narrow = [x.astype(np.float32) if x.dtype == np.float64 and x.ndim else x for x in inputs]
    for given in (narrow, [x.astype(np.float32) if x.dtype == np.float64 else x for x in inputs], inputs):
        arrays = [from_numpy(np.array(x)) for x in given]
        try:
            OPS[name].specs([a.spec for a in arrays], attrs)
        except Exception:  # refused by the op
            continue
        return arrays, attrs
    raise AssertionError(name)


def _run(row: Kernel, arrays: list[NDArray], outs: list[Spec], attrs: Any, on_host: bool) -> tuple[list[Any], Any]:
    """Run a kernel on the emulated device; operands whose values the host reads are there if `on_host`."""
    specs = [a.spec for a in arrays]
    asked = row.needs(specs, attrs)
    ins = [a.impl.clone() if on_host and i in asked.reads else OnDevice(a.impl.clone()) for i, a in enumerate(arrays)]
    made, work = (
        [OnDevice(torch.empty(s.sizes, dtype=TORCH_DTYPE[s.dtype])) for s in given]
        for given in (outs, row.work(outs, specs, attrs) if row.work else [])
    )
    with emulated() as device:
        with torch.device(GPU):
            calls = row.bind(made, ins, attrs, work)
        device.syncs = 0
        for step in calls if isinstance(calls, list) else [calls]:
            step()
    return [t.held for t in made], device


@cache
def _on_cuda() -> dict[str, str]:
    """Operator of ATen -> how torch dispatches it, by the table that torch is generated from."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = re.split(r"(?m)^- func: ", path.read_text(encoding="utf-8"))[1:]
    found = {}
    for entry in entries:
        name = entry.partition("(")[0]
        found[name if "." in name else f"{name}.default"] = entry
        for more in re.findall(r"(?m)^  autogen: (.+)$", entry):
            found |= {each.strip(): "Composite" for each in more.split(",")}
    return found


def _has_cuda_kernel(operator: str) -> bool:
    name = operator.removeprefix("aten.")
    if name.partition(".")[0] in ("lift_fresh", "detach"):
        return True
    entry = _on_cuda().get(name, "")
    if "structured_delegate" in entry:
        entry = _on_cuda()[re.search(r"structured_delegate: (\S+)", entry).group(1)]  # pyright: ignore[reportOptionalMemberAccess]
    return "CUDA" in entry or "Composite" in entry or "  dispatch:" not in entry


def test_operators_of_the_cpu_alone_are_known() -> None:
    assert _has_cuda_kernel("aten.add.out")
    assert _has_cuda_kernel("aten.index_select.out")
    assert not _has_cuda_kernel("aten.mkldnn_linear.default")


@pytest.mark.parametrize(("table", "name"), TABLES)
def test_kernels_for_gpus_touch_no_memory_of_the_host(table: str, name: str) -> None:
    """They compute the CPU's values, read nothing that they do not declare, and call only what CUDA has."""
    row = _row(table, name)
    for k in range(FEW):
        arrays, attrs = _operands(name, k)
        truth = compute(OPS[name], [a.copy() for a in arrays], attrs)
        outs = [t.spec for t in truth]
        if row.takes([t.impl for t in truth], [a.impl for a in arrays], attrs):
            continue
        asked = row.needs([a.spec for a in arrays], attrs)
        for on_host in (True, False) if asked.reads else (False,):
            made, device = _run(row, arrays, outs, attrs, on_host)
            assert not device.syncs or asked.answers or asked.reads, f"{name} waits {device.syncs} times"
            assert not [o for o in device.operators if not _has_cuda_kernel(o)]
            for mine, other in zip(made, truth, strict=True):
                host = mine.float() if mine.dtype == torch.bfloat16 else mine
                assert_close(from_numpy(host.numpy()), other.to_numpy(), rtol=2e-5, atol=2e-5, what=name)


def test_a_kernel_that_reaches_host_memory_is_found() -> None:
    """The check itself: each mistake raises."""
    table: dict[str, Kernel] = {}
    kernel("bits", table=table)(lambda o, i, a, w: lambda: o[0].copy_(torch.from_numpy(i[0].numpy() + 1)))
    kernel("mixed", table=table)(lambda o, i, a, w: lambda: torch.add(i[0], torch.ones(3, device="cpu"), out=o[0]))
    kernel("late", table=table)(lambda o, i, a, w: lambda: o[0].copy_(i[0] * torch.arange(3)))
    kernel("waits", table=table)(lambda o, i, a, w: lambda: o[0].fill_(i[0].sum().item()))
    x = from_numpy(np.ones(3, np.float32))
    for name, problem in (("bits", "cannot see"), ("mixed", "mixes"), ("late", "mixes")):
        with pytest.raises((TypeError, RuntimeError), match=problem):
            _run(table[name], [x], [x.spec], {}, True)
    assert _run(table["waits"], [x], [x.spec], {}, True)[1].syncs == 1


# -- the backend -------------------------------------------------------------------------------------------------------
def _agrees(name: str, count: int, dtype: Any = None) -> None:
    for inputs, attrs in draws(name, count):
        arrays = [from_numpy(np.array(x)) for x in inputs]
        truth = compute(OPS[name], arrays, attrs)
        made = compute(OPS[name], [a.to(THERE) for a in arrays], attrs)
        for mine, other in zip(made, truth, strict=True):
            assert mine.device == THERE
            assert_close(mine.to(CPU), other.to_numpy(), rtol=1e-9, atol=1e-9, what=name)


@pytest.mark.parametrize("name", OPS)
def test_ops_have_the_values_of_the_cpu(name: str, gpu: CudaBackend) -> None:
    _agrees(name, 1)


@pytest.mark.deep
@pytest.mark.parametrize("name", OPS)
def test_all_draws_have_the_values_of_the_cpu(name: str, gpu: CudaBackend) -> None:
    _agrees(name, 6)


ON_HOST = {"block_entropy", "block_entropy_backward", "block_gate_gradient", "block_mass", "block_sdpa",
           "block_sdpa_backward"}  # fmt: skip
"""Ops that run on the host without Triton."""


def test_only_attention_over_patterns_runs_on_the_host_without_triton(gpu: CudaBackend) -> None:
    found = set()
    for name, row in OPS.items():
        if row.view is None and not expansion.expanded(row, gpu, draws(name, 1)[0][1]):
            arrays, attrs = _operands(name, 0)
            specs = [a.spec for a in arrays]
            choice = gpu.choice(name, OPS[name].specs(specs, attrs), specs, attrs)
            found |= {name} if choice.source == "host" else set()
            assert bool(choice.why) == (choice.source == "host")
    assert found == ON_HOST


def test_a_kernel_of_triton_is_preferred_where_it_takes_the_operands(gpu: CudaBackend) -> None:
    seen: list[str] = []

    def bind(outs: Any, ins: Any, attrs: Any, work: Any) -> Any:
        assert all(t.is_contiguous() for t in ins)
        return lambda: seen.append("ran") or torch.tanh(ins[0], out=outs[0])

    def takes(outs: Any, ins: Any, attrs: Any) -> str:
        if ins[0].dtype != torch.float32:
            return "not float32"
        return "" if ins[0].is_contiguous() else "a gap between rows"

    gpu.triton = {"tanh": Kernel(bind, None, "here", takes=takes)}
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert_close(call("tanh", from_numpy(x).to(THERE)).to(CPU), np.tanh(x), rtol=1e-6)
    assert_close(call("tanh", from_numpy(x).to(THERE).permute(1, 0)).to(CPU), np.tanh(x.T), rtol=1e-6)
    assert seen == ["ran", "ran"]
    assert_close(call("tanh", from_numpy(x.astype("f8")).to(THERE)).to(CPU), np.tanh(x.astype("f8")), rtol=1e-12)
    assert seen == ["ran", "ran"]


def test_an_op_without_a_kernel_runs_on_the_host_with_a_reason(gpu: CudaBackend, monkeypatch: Any) -> None:
    monkeypatch.setitem(KERNELS, "tanh", KERNELS.get("tanh", kernel_of("tanh"))._replace(host=True))  # pyright: ignore
    x = from_numpy(np.arange(3, dtype=np.float32)).to(THERE)
    monkeypatch.setattr("graphwright.array.cuda.cuda_backend.torch_functions", {})
    gpu._choices.clear()
    asked = gpu.needs("tanh", [x.spec], [x.spec], {})
    assert asked == Needs(fallback="tanh has no kernel for a GPU")
    assert_close(call("tanh", x).to(CPU), np.tanh(np.arange(3)), rtol=1e-6)
