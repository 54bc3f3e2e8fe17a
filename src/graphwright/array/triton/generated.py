"""Compile and launch the generated kernels of fusion groups, on torch tensors."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from graphwright.array.backend import Call
from graphwright.array.triton.fused import Kernel

WARPS = 4


@cache
def function(name: str, text: str) -> Any:
    """Return the compiled function of a kernel's source; equal sources share one function."""
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads it
    space: dict[str, Any] = {"__name__": f"graphwright.fused.{name}"}
    exec(compile(text, file, "exec"), space)
    return space[name]


def bind(kernel: Kernel, memory: Sequence[torch.Tensor]) -> Call:
    """Return the call that launches a kernel; `memory` are the tensors of `kernel.memory`."""
    if not kernel.programs:
        return _nothing
    run: Callable[..., Any] = function(kernel.name, kernel.text)[(kernel.programs,)]
    warps = max(WARPS, min(16, kernel.block // 1024))
    arguments = (*memory, *kernel.numbers)
    return lambda: run(*arguments, BLOCK=kernel.block, num_warps=warps)


def _nothing() -> None:
    """The launch of a kernel without elements."""
