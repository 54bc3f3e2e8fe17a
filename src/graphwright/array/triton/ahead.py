"""Compile the Triton kernels for a GPU that need not be there, and read what they use of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphwright.array.triton import block_attention, words
from graphwright.array.triton.launch import EDGES, GATES, WORDS, Form
from graphwright.report import Report

_ELEMENTS = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")
_TYPES = {
    **dict.fromkeys(("lse", "lse_grad", "less", "edge_grads", "mass", "dgates", "gates"), "*fp32"),
    **dict.fromkeys(("table", "start"), "*i64"), "queue": "*i32", "scale": "fp32", "softcap": "fp32",
}  # fmt: skip
"""Argument -> Triton's name of its type; others are int32."""


@dataclass(frozen=True)
class Compiled(Report):
    """What a compiled kernel uses.

    Attributes:
        name: the kernel.
        registers: per thread.
        spills: bytes of memory that a thread uses for registers it lacks.
        shared: bytes of shared memory of a block.
        ptx, cubin: the code.
    """

    HIDDEN = ("ptx", "cubin")

    name: str
    registers: int
    spills: int
    shared: int
    ptx: str
    cubin: bytes


def compile_kernel(name: str, form: Form, dtype: str = "bf16", capability: int = 90) -> Compiled:
    """Compile a kernel ahead of time.

    Args:
        name: forward, backward_rows, backward_columns, edge_mass, gate_gradients or apply_words.
        form: what it depends on.
        dtype: Triton's name of the dtype of q, k and v.
        capability: compute capability of the GPU, 10·major + minor.
    """
    function = words.apply_words if name == "apply_words" else getattr(block_attention, name)
    constants: dict[str, Any] = {
        "backward_rows": {**form.constants(), "LSE_GRAD": False},
        "edge_mass": {**form.narrow(), "LARGEST": False},
        "gate_gradients": {"GATES": GATES, "EDGES": EDGES},
        "apply_words": {"WIDTH": WORDS},
    }.get(name, form.constants())
    types = {**_TYPES, **dict.fromkeys(_ELEMENTS, f"*{dtype}")}
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in function.arg_names}
    if name == "gate_gradients":
        signature["gates"] = "i32"  # their number
    source = ASTSource(function, signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=form.options)
    registers, spills = _resources(made.asm["cubin"])
    return Compiled(name, registers, spills, made.metadata.shared, made.asm["ptx"], made.asm["cubin"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers of a thread, bytes of its own memory) that the code of one kernel uses."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (max(map(int, re.findall(rf"{what}:(\d+)", text))) for what in ("REG", "STACK", "LOCAL"))
    return registers, stack + local
