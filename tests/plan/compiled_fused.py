"""Compiles generated kernels ahead of time: a long group, and a group over rows; prints what they use as JSON lines."""

from __future__ import annotations

import json

import torch

import graphwright as gw
from graphwright.array import Device
from graphwright.array.backend import use
from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.array.triton import generated
from graphwright.array.triton.ahead import compile_launch
from graphwright.plan.planning.fusion import kernel_of
from graphwright.testing.simulated_device import SimBackend

FUNCTIONS = ("tanh", "sigmoid", "gelu", "exp", "log1p", "erf", "sin", "silu", "rsqrt", "expm1", "softplus", "round")


def long(shape: tuple[int, ...]) -> gw.Program:
    """A chain of many functions with results that are read again later, of a transposed and a broadcast operand."""
    b = gw.Builder("long")
    x, y, w = b.input("x", shape), b.input("y", shape[::-1]), b.input("w", shape[-1:])
    made = [b.mul(x, w)]
    for k, name in enumerate(FUNCTIONS):
        made.append(b.add(b.op(name, made[-1]), made[k // 2]))
    transposed = b.permute(y, axes=tuple(reversed(range(len(shape)))))
    b.output(b.where(b.lt(made[-1], transposed), made[-1], transposed), "z")
    return b.build()


def rows(shape: tuple[int, ...]) -> gw.Program:
    """A residual sum, its norm and an activation, and the softmax of a sum with a number per row."""
    b = gw.Builder("rows")
    x, y, w = b.input("x", shape), b.input("y", shape), b.input("w", shape[-1:])
    h = b.add(x, y)
    b.output(b.silu(b.rms_norm(h, w, eps=1e-5)), "z")
    b.output(b.softmax(b.add(h, b.input("t", (*shape[:-1], 1)))), "p")
    return b.build()


if __name__ == "__main__":
    use(Device("sim"), SimBackend(Device("sim"), fuses=True))
    for name, p in (("long", long((64, 48))), ("rows", rows((64, 1000))), ("wide rows", rows((8, 8192)))):
        layout = p.compile({p.path(n): p.spec(n).sizes for n in p.inputs()}, device="sim").buffer_layout
        groups = [(region, group) for region in layout.fusion.regions for group in region.groups]
        for number, (region, group) in enumerate(groups):
            kernel, _ = kernel_of(layout, region, group)
            memory = [torch.empty(0, dtype=TORCH_DTYPE[o.view.dtype], device="meta") for o in kernel.memory]
            for capability in (80, 90, 100):
                made = compile_launch(generated.bind(kernel, memory), capability)
                facts = {"registers": made.registers, "spills": made.spills, "atomics": list(made.atomics)}
                label = f"{name} {number} sm_{capability}"
                print(
                    json.dumps([label, {**facts, "elf": made.cubin[:4] == b"\x7fELF", "ops": len(group)}]), flush=True
                )
