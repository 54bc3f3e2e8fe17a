"""CudaBackend: which kernel runs an op on a GPU, and the kernel that applies edits of patterns there.

A kernel is looked up in three tables, in this order: Triton's (`array.triton.kernel`, with the extra `triton`), those
that this package writes with torch's functions for GPUs (`torch_kernels`), and those of the CPU that only call torch.
An op in none of them, and without an expansion, runs on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from graphwright.array.backend import Attrs, Call, MissingKernel, Needs, torch_functions
from graphwright.array.cpu.kernel import KERNELS, TORCH_DTYPE, Kernel, kernel_of
from graphwright.array.cuda.torch_kernels import TORCH
from graphwright.array.device import Device
from graphwright.array.device_backend import Choice, DeviceBackend, Specs, VisibleDriver
from graphwright.array.ndarray import NDArray
from graphwright.array.spec import Spec


@cache
def triton_kernels() -> Mapping[str, Kernel]:
    """Return the table of Triton kernels; it is empty if Triton is not installed."""
    if find_spec("triton") is None:
        return {}
    from graphwright.array.triton.kernel import table

    return table()


class CudaBackend(DeviceBackend):
    """The backend of a GPU.

    Args:
        device: the device.
        driver: its driver; with a driver over host memory, the kernels of a GPU run on the CPU.
        triton: Triton's table of kernels, by default the one of this package.
    """

    def __init__(self, device: Device, driver: VisibleDriver, triton: Mapping[str, Kernel] | None = None) -> None:
        self.triton = triton_kernels() if triton is None else triton
        super().__init__(device, driver, fuses=bool(self.triton))
        self._choices: dict[Any, Choice] = {}

    def has_kernel(self, name: str) -> bool:
        """Return True if a kernel of this name runs on the device."""
        return name in self.triton or name in TORCH or name in torch_functions or _on_any_device(name)

    def choice(self, name: str, outs: Specs, ins: Specs, attrs: Attrs) -> Choice:
        """Return which kernel runs the op `name` on operands of these specs."""
        key = name, *outs, *ins, repr(attrs)
        found = self._choices.get(key)
        if found is None:
            if len(self._choices) >= 4096:
                self._choices.clear()
            found = self._choices[key] = self._choose(name, outs, ins, attrs)
        return found

    def needs(self, name: str, outs: Specs, ins: Specs, attrs: Attrs) -> Needs:
        """Return what the kernel requires of the host; torch allocates for captures in memory of the graph."""
        return replace(super().needs(name, outs, ins, attrs), allocates=False)

    def _choose(self, name: str, outs: Specs, ins: Specs, attrs: Attrs) -> Choice:
        why = ""
        for source, table in (("triton", self.triton), ("torch", TORCH)):
            row = table.get(name)
            if row is not None:
                refused = row.takes(_shapes(outs), _shapes(ins), attrs)
                if not refused:
                    return Choice(source, row)
                why = why or refused
        row = kernel_of(name)
        if row is not None and not row.host:
            return Choice("aten", row)
        return Choice("host", row, why or f"{name} has no kernel for a GPU")

    def word_kernel(self, table: NDArray, memory: NDArray, queue: NDArray) -> Call:
        """Return the call that queues the kernel of a `PatternMirror`. Raises: MissingKernel without Triton."""
        if not self.triton:
            raise MissingKernel("patterns on a GPU need Triton", where=str(self.device),
                                fix="pip install 'graphwright[triton]'")  # fmt: skip
        from graphwright.array.triton import launch

        return self._launched([launch.word_kernel(table.impl, queue.impl)], [memory, queue], [queue])


def _on_any_device(name: str) -> bool:
    return name in KERNELS and not KERNELS[name].host


def _shapes(specs: Specs) -> list[torch.Tensor]:
    """Return row-major tensors without memory of these specs."""
    return [_shape(spec) for spec in specs]


def _shape(spec: Spec) -> torch.Tensor:
    return torch.empty(spec.sizes, dtype=TORCH_DTYPE[spec.dtype], device="meta")
