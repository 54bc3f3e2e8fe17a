"""Compiles Triton's kernels of block-sparse attention for GPUs that are not there; prints a line of facts for each."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from graphwright.array.triton.ahead import compile_kernel
from graphwright.array.triton.launch import Form, check_block
from graphwright.patterns import BlockSize


def show(name: str, fact: Any) -> None:
    print(json.dumps([name, fact]), flush=True)


def compiled(kernel: str, form: Form, dtype: str = "bf16", capability: int = 90) -> dict[str, Any]:
    made = compile_kernel(kernel, form, dtype, capability)
    target = re.search(r"\.target (sm_\d+)", made.ptx)
    return {
        "target": target and target[1], "elf": made.cubin[:4] == b"\x7fELF", "spills": made.spills,
        "shared": made.shared,
        "atomics": re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\..*)", made.ptx, re.MULTILINE),
    }  # fmt: skip


def sizes() -> dict[str, int | None]:
    """The size that the refusal of a block size names; None for one that is not refused, or whose advice is refused."""
    found: dict[str, int | None] = {}
    for name, block, width, dtype in (
        ("1", 1, 64, torch.bfloat16), ("48", 48, 64, torch.bfloat16), ("100", 100, 64, torch.float16),
        ("256", 256, 32, torch.bfloat16), ("128 fp32", 128, 64, torch.float32),
        ("64 x 128 fp32", 64, 128, torch.float32),
    ):  # fmt: skip
        found[name] = None
        try:
            check_block(block, width, dtype)
        except BlockSize as error:
            check_block(error.nearest, width, dtype)
            found[name] = error.nearest
    return found


for each in ("forward", "backward_rows", "backward_columns", "edge_mass", "gate_gradients", "apply_words"):
    show(f"{each} plain", compiled(each, Form(64, 64, 64)))
for compute, number, size in ((80, "bf16", 64), (100, "fp16", 32), (90, "fp32", 64)):
    rich = Form(size, 64, 64, gates=True, softcap=True, start=True)
    for each in ("forward", "backward_columns") if compute == 90 else ("forward",):
        show(f"{each} {number} for {compute}", compiled(each, rich, number, compute))
show("block sizes", sizes())
