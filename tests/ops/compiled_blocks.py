"""Compiles Triton's kernels of block-sparse attention for GPUs that are not there; prints a line of facts for each."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import torch

from graphwright.array.triton import block_attention
from graphwright.array.triton.ahead import compile_launch
from graphwright.array.triton.kernel import Launch
from graphwright.array.triton.launch import EDGES, GATES, Form, check_block, word_kernel
from graphwright.patterns import BlockSize


def show(name: str, fact: Any) -> None:
    print(json.dumps([name, fact]), flush=True)


def launches(form: Form, dtype: torch.dtype) -> dict[str, Launch]:
    """Return a launch of each kernel of block-sparse attention on tensors that have no memory."""
    form = replace(form, size=dtype.itemsize, aligned=form.d % 8 == form.dv % 8 == 0)
    tokens, heads = 2 * form.block, 2
    q, v = (torch.empty(1, heads, tokens, n, dtype=dtype, device="meta") for n in (form.d, form.dv))
    floats = torch.empty(tokens, device="meta")
    table, start = (torch.empty(64, dtype=torch.int64, device="meta") for _ in range(2))
    sizes, scales, strides = (tokens, tokens, heads, heads), (0.5, 1.5), (s for t in (q, q, v) for s in t.stride()[:3])
    ints, operands, grid = (*scales, *strides), (q, q, v, table, floats, start), 2
    of_rows = (*operands, v, floats, floats, v, q, floats, floats, *sizes, 64, *ints)
    of_mass = (q, q, table, floats, start, floats, floats, *sizes, 64, *ints[:8])
    kernels = block_attention
    return {
        "forward": form.launch(kernels.forward, grid, (*operands, v, floats, *sizes, *ints)),
        "backward_rows": form.launch(kernels.backward_rows, grid, of_rows, LSE_GRAD=False),
        "backward_columns": form.launch(
            kernels.backward_columns, grid, (*operands, floats, floats, v, q, v, *sizes, *ints)
        ),
        "edge_mass": form.launch(kernels.edge_mass, grid, of_mass, False, LARGEST=False),
        "gate_gradients": Launch(
            kernels.gate_gradients, (grid,), (table, floats, floats, 2, 64, 64, 64), {"GATES": GATES, "EDGES": EDGES}
        ),
        "apply_words": word_kernel(table, torch.empty(9, dtype=torch.int32, device="meta")),
    }


def compiled(kernel: str, form: Form, dtype: torch.dtype = torch.bfloat16, capability: int = 90) -> dict[str, Any]:
    made = compile_launch(launches(form, dtype)[kernel], capability)
    target = re.search(r"\.target (sm_\d+)", made.ptx)
    return {
        "target": target and target[1], "elf": made.cubin[:4] == b"\x7fELF", "spills": made.spills,
        "shared": made.shared, "atomics": made.atomics,
    }  # fmt: skip


def sizes() -> dict[str, int | None]:
    """The size that the refusal of a block size names; None for one that is not refused, or whose advice is refused."""
    found: dict[str, int | None] = {}
    for block in (1, 48, 100, 128, 256):
        found[str(block)] = None
        try:
            check_block(block)
        except BlockSize as error:
            check_block(error.nearest)
            found[str(block)] = error.nearest
    return found


if __name__ == "__main__":
    for each in ("forward", "backward_rows", "backward_columns", "edge_mass", "gate_gradients", "apply_words"):
        show(f"{each} plain", compiled(each, Form(64, 64, 64)))
    for compute, number, block, width in (
        (80, torch.bfloat16, 64, 64), (100, torch.float16, 32, 64), (90, torch.float32, 64, 64),
        (90, torch.bfloat16, 128, 128), (80, torch.bfloat16, 128, 72), (80, torch.float16, 128, 33),
        (90, torch.float32, 128, 33),
    ):  # fmt: skip
        rich = Form(block, width, width, gates=True, softcap=True, start=True)
        for each in ("forward", "backward_rows", "backward_columns", "edge_mass"):
            show(f"{each} {number} {block} {width} for {compute}", compiled(each, rich, number, compute))
    show("block sizes", sizes())
