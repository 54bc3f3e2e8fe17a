"""Compile and bind the generated kernels of fusion groups, on torch tensors."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from graphwright.array.triton.fused import Kernel
from graphwright.array.triton.kernel import Launch

WARPS, MOST_WARPS = 4, 16


@cache
def function(name: str, text: str) -> Any:
    """Return the Triton function of a kernel's source; equal sources share one."""
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads it
    space: dict[str, Any] = {"__name__": f"graphwright.fused.{name}"}
    exec(compile(text, file, "exec"), space)
    return space[name]


def bind(kernel: Kernel, memory: Sequence[torch.Tensor]) -> Launch:
    """Return the launch of a kernel; `memory` are the tensors of `kernel.memory`."""
    warps = max(WARPS, min(MOST_WARPS, kernel.block // 512))
    arguments = (*memory, *kernel.numbers)
    return Launch(function(kernel.name, kernel.text), (kernel.programs,), arguments, {"BLOCK": kernel.block}, warps)
