"""The table of Triton kernels, by op: the records of the CPU's table, with the dtypes and layouts that they support.

`bind` returns launches and other calls. Kernels obey these rules, which tests/array/triton_kernels/test_triton_rules.py
checks: every load and store of a tile is masked; values are computed in float32, in float64 for float64 operands; no
atomics, so that equal operands give equal bits; sizes and strides are arguments that no kernel is compiled for, and
constants only select a layout, a size of tiles or an attribute; a grid has one axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton

from graphwright.array.cpu.kernel import Kernel, Tensors
from graphwright.array.cpu.kernel import kernel as register

TRITON: dict[str, Kernel] = {}
"""Op -> its kernel; `table` fills it."""
_FAMILIES = (
    "attention embedding experts grouped launch loss norm optimize paged random reduce rope scatter select softmax"
)
ALL_REGISTERS = 255
"""Value of `Launch.registers` for kernels with large tiles."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Tiles(NamedTuple):
    """Rows (or queries) and columns (or keys) of the tiles of a kernel, warps of a program, stages of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


TileTable = dict[tuple[int, int], tuple[Tiles | None, Tiles | None, Tiles | None, Tiles | None]]
"""(Bytes of an element, least width) -> tiles of forms that are aligned, aligned and rich, not aligned, and not aligned
and rich; None where all spill. What a rich form has beside the others, a table says. Where sizes and strides are not
aligned, each element has an address of its own in registers.
"""


def tiles_of(table: TileTable, size: int, width: int, rich: bool, aligned: bool) -> Tiles | None:
    """Return the tiles for elements of `size` bytes and rows of `width` elements, a power of two."""
    four = table.get((size, max(64, width)))
    return four and four[2 * (not aligned) + rich]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton function; calling it queues the launch, or does nothing if its grid is empty.

    Attributes:
        function: the function, from `compiled`.
        grid: number of programs, along one axis.
        args: arguments other than constants, in order.
        constants: values of the `tl.constexpr` arguments.
        warps, stages: warps of a program, and stages of its software pipeline.
        registers: most registers of a thread; None: the assembler may spill some so that more programs run at once.
    """

    function: Any
    grid: tuple[int]
    args: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    def __call__(self) -> None:
        if all(self.grid):
            self.function[self.grid](*self.args, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int | None]:
        """Triton's options of the launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def compiled(function: Callable[..., Any]) -> Any:
    """Return a Triton function that is not compiled again for other values of its annotated arguments.

    By default Triton compiles for an integer that is 1 and for one divisible by 16. Here annotated arguments (int32
    counts, int64 strides, float64 numbers) have one form; the constant ALIGNED says that sizes and strides of rows are
    divisible by 8 (`rows.UNIT`). Pointers are not annotated: there is a form for those aligned to 16 bytes, and one for
    others.
    """
    numbers = [name for name, kind in inspect.get_annotations(function).items() if kind != "tl.constexpr"]
    return triton.jit(function, do_not_specialize=numbers)


kernel: Any = partial(register, table=TRITON)
"""Returns a decorator that registers the `bind` function of a kernel; see `array.cpu.kernel.kernel`."""


def table() -> dict[str, Kernel]:
    """Return the kernel of each op that has one."""
    for family in _FAMILIES.split():
        import_module(f"graphwright.array.triton.{family}")  # registers its kernels
    return TRITON


def one_float(tensors: Tensors) -> str:
    """Return "" if the tensors share a floating dtype that kernels support, else the reason."""
    kinds = {t.dtype for t in tensors}
    if len(kinds) == 1 and kinds <= {*FLOATS}:
        return ""
    return f"the operands are not of one floating dtype: {', '.join(sorted(map(str, kinds)))}"
