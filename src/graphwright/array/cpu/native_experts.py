"""Calls of the VM's loops for mixtures of experts in float32, where the VM is built; else ATen's kernels run.

A call runs on one thread, so the bits of its results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.formulas.experts import FIRST, Expert, experts_of
from graphwright.array.vm.code import Code

Failed = Callable[[], Any]
"""A function that raises the error of invalid operands."""


def dispatch(outs: Tensors, choice: torch.Tensor, experts: int, failed: Failed) -> Call | None:
    """Return the call of DISPATCH, or None if the VM is not built."""
    loops = _loops()
    if loops is None or not all(t.is_contiguous() for t in (choice, *outs)):
        return None
    addresses = choice.data_ptr(), choice.dtype is torch.bool, *(t.data_ptr() for t in outs)
    row = np.array([0, *choice.shape, experts, *addresses], np.int64)
    return partial(_call, loops, Code.DISPATCH, row, 0, failed)


def mixture(
    ins: Tensors, attrs: Attrs, tile: int, work: Mapping[str, torch.Tensor], out: torch.Tensor | None, failed: Failed,
    g: torch.Tensor | None = None, found: Mapping[int, torch.Tensor] | None = None, op: Code = Code.EXPERTS,
) -> Call | None:  # fmt: skip
    """Return the call of EXPERTS or another opcode `op`; None if the VM is not built, or for other operands.

    Args:
        ins: operands of `expert_mlp`; for EXPERT_PROBE with the surprise in place of the weights.
        tile: the most tokens of a tile.
        work: scratch by name.
        out: the result, the gradient of x, or the gain.
        g: gradient of the result.
        found: index of an operand -> its gradient.
    """
    x, offsets, rows, pairs, weights = ins[:FIRST]
    gradients, wide = found or {}, () if g is None else (g,)
    results, biases = () if out is None else (out,), (t for t in ins[FIRST:] if t.ndim == 1)
    packed = [*ins[:FIRST], *wide, *results, *gradients.values(), *biases]
    floats = [x, weights, *wide, *ins[FIRST:]]
    if any(t.dtype is not torch.float32 for t in floats) or not all(t.is_contiguous() for t in packed):
        return None
    loops = _loops()
    if loops is None:
        return None
    from graphwright.array.vm.experts import ACTS, EXPERT_CELLS, KINDS, TABLE

    experts = experts_of(ins[FIRST:], attrs)
    code = np.zeros(TABLE + EXPERT_CELLS * len(experts), np.int64)
    others = (out, g, gradients.get(4), *(work.get(name) for name in "xgoavsht"))
    sizes = (*x.shape, tile, len(experts), KINDS.index(attrs["kind"]), ACTS.index(attrs["act"]), len(rows))
    operands = (x, offsets, rows, pairs, weights, *others)
    code[1 : 9 + len(operands)] = [*sizes, weights.numel(), *map(_address, operands)]
    slots = experts_of(range(FIRST, len(ins)), attrs)
    width = EXPERT_CELLS - 1
    table = [c for e, s in zip(experts, slots, strict=True) for c in (len(e.up), *_cells(e, s, gradients, width))]
    code[TABLE:] = table
    if op == Code.EXPERT_PROBE:
        code[13], code[16] = 0, weights.data_ptr()
    return partial(_call, loops, op, code, work["scratch"].data_ptr(), failed)


def _cells(e: Expert, slots: Expert, gradients: Mapping[int, torch.Tensor], width: int) -> list[int]:
    """Return the words of one expert after the first; `slots` has the indices of its operands."""
    cells: list[int] = []
    for at in range(0, len(e), 2):
        matrix, bias = e[at : at + 2]
        strides = (0, 0) if matrix is None else (4 * s for s in matrix.stride())
        cells += [_address(matrix), *strides, _address(bias), *(_address(gradients.get(s)) for s in slots[at : at + 2])]
    return cells + [0] * (width - len(cells))


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _loops() -> Any:
    """Return the function of the loops, or None if it is not built."""
    from graphwright.array.vm.machine import loops_of, part  # loads numba

    return loops_of("experts") if part.ready else None


def _call(loops: Any, code: Code, row: np.ndarray, scratch: int, failed: Failed) -> None:
    if loops(code, row.ctypes.data, 0, scratch):
        failed()
