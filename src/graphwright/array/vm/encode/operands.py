"""Types and helpers of VM encoding: operands, instructions, and loops over the axes of several operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from struct import pack, unpack
from typing import Any, NamedTuple

from graphwright.array.dtype import DType, float32
from graphwright.array.layout import is_row_major
from graphwright.array.vm.code import CELLS, PAST, Code

Row = list[int]
Rows = list[Row] | None
"""Rows of code, or None for dtypes or layouts that only another kernel supports."""
Attrs = Mapping[str, Any]
MOST_ROWS = 64
"""The most instructions that outer axes are unrolled to; beyond it another kernel is no slower."""
CACHED = 8 << 20
"""Bytes of a result above which stores bypass the caches; measured: this is slower below and faster above."""


class View(NamedTuple):
    """An operand: dtype, shape and strides in elements, and the address of its first element."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def packed(self) -> bool:
        """True if the layout is row-major."""
        return is_row_major(self.shape, self.strides)


Views = Sequence[View]
Encoder = Callable[[Views, Views, Attrs], Rows]
Workspace = Callable[[Views, Views, Attrs], list[View]]


@dataclass(frozen=True, slots=True, eq=False)
class VmForm:
    """The translation of an op into VM code: the `vm` field of the op's definition.

    The planner passes operands that have layouts but no addresses; when kernels are bound, operands have addresses.

    Attributes:
        encode: (results and workspace, operands, attributes) -> rows of code, or None for dtypes or layouts that only
            another kernel supports.
        work: (results, operands, attributes) -> views of the memory that the code needs besides its scratch.
        code: the opcode, if the op is one float32 instruction per tile.
        by_row: each row of the results depends on a whole row of the first operand.
        limit: bytes of operands and results from which on ATen's kernel is faster; None if it never is.
    """

    encode: Encoder
    work: Workspace | None = None
    code: Code | None = None
    by_row: bool = False
    limit: int | None = None

    def workspace(self, outs: Views, ins: Views, attrs: Attrs) -> list[View]:
        """Return views, without addresses, of the memory that the code needs besides its scratch."""
        return [] if self.work is None else self.work(outs, ins, attrs)

    def rows(self, outs: Views, ins: Views, attrs: Attrs, work: Sequence[View] | None = None) -> Rows:
        """Return rows of code that compute `outs` from `ins`, or None for layouts or dtypes that are not supported.

        `work`: the memory that `workspace` describes; needed only for code that will run.
        """
        return self.encode([*outs, *(self.workspace(outs, ins, attrs) if work is None else work)], ins, attrs)


def form(
    *, work: Workspace | None = None, by_row: bool = False, limit: int | None = None
) -> Callable[[Encoder], VmForm]:
    """Return a decorator that turns an encoder into a `VmForm` with these attributes."""
    return lambda encode: VmForm(encode, work, by_row=by_row, limit=limit)


def row_of(code: Code, *cells: int) -> Row:
    """Return an instruction: the opcode and its words, padded with zeros."""
    return [int(code), *cells] + [0] * (CELLS - 1 - len(cells))


def bits(value: float) -> int:
    """Return the bits of a float64 as an int64 word."""
    return unpack("<q", pack("<d", value))[0]


def table_of(cells: Sequence[int]) -> list[Row]:
    """Split words into rows of 16, the last one padded with zeros."""
    return [[*cells[i : i + CELLS], *[0] * (i + CELLS - len(cells))] for i in range(0, len(cells), CELLS)]


def all_f32(*views: View) -> bool:
    """Return whether all operands are float32."""
    return all(view.dtype is float32 for view in views)


def copy_row(target: int, words: int, source: int) -> Row:
    """Return an instruction that copies `words` adjacent 4-byte elements of any type from one address to another."""
    return row_of(Code.COPY, 1, words, target, 0, 1, source, 0, 1)


def copied(target: View, source: View) -> list[Row]:
    """Encode a copy between row-major operands: no instruction if they share an address or are empty."""
    if target.address == source.address or not target.size:
        return []
    return [copy_row(target.address, target.size * target.dtype.itemsize // 4, source.address)]


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the axes of size > 1 as (size, stride per operand); neighbours are merged if all strides allow it."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for n, *steps in zip(shape, *strides, strict=True):
        if n == 1:
            continue
        if axes and all(outer == inner * n for outer, inner in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * n, tuple(steps))
        else:
            axes.append((n, tuple(steps)))
    return axes


def spread(view: View, shape: tuple[int, ...]) -> list[int]:
    """Return the strides of an operand that is broadcast to `shape`."""
    lead = len(shape) - len(view.shape)
    return [0] * lead + [0 if n == 1 else s for n, s in zip(view.shape, view.strides, strict=True)]


def offsets(axes: Sequence[tuple[int, tuple[int, ...]]], operands: int) -> list[list[int]]:
    """Return, for every combination of indices along `axes`, a list of the element offset in each operand."""
    offsets = [[0] * operands]
    for n, steps in axes:
        offsets = [[p + i * s for p, s in zip(base, steps, strict=True)] for base in offsets for i in range(n)]
    return offsets


def elementwise(code: Code, out: View, ins: Sequence[View], *cells: int) -> Rows:
    """Encode an op: one instruction loops over 2 axes; further axes are unrolled. `cells`: words after the operands."""
    views = [out, *ins]
    if 0 in out.shape:
        return []
    axes = merged(out.shape, [spread(view, out.shape) for view in views])
    scattered = not axes or axes[-1][1][0] != 1 or any(s not in (0, 1) for s in axes[-1][1])
    if scattered:
        axes.append((1, (0,) * len(views)))  # one column
    if prod(n for n, _ in axes[:-2]) > MOST_ROWS and not scattered:
        axes[:-1] = sorted(axes[:-1], key=lambda axis: axis[0])  # the longest one is walked, not unrolled
    if prod(n for n, _ in axes[:-2]) > MOST_ROWS:
        return None
    cols, steps = axes[-1]
    count, jumps = axes[-2] if len(axes) > 1 else (1, (0,) * len(views))
    rows = []
    last = along(out, steps[0])
    for base in offsets(axes[:-2], len(views)):
        operands: list[int] = []
        for view, at, jump, step in zip(views, base, jumps, steps, strict=True):
            operands += [view.address + at * view.dtype.itemsize, jump * view.dtype.itemsize, step]
        operands[2] = last
        rows.append(row_of(code, count, cols, *operands, *cells))
    return rows


def along(out: View, step: int) -> int:
    """Return the step word of a result: PAST (non-temporal stores) for large float32 results of step 1, else `step`."""
    return PAST if step == 1 and out.dtype is float32 and 4 * out.size > CACHED else step


def matrix(view: View) -> tuple[int, int, int] | None:
    """Return (rows, columns, row stride) of an operand [..., C]; None if it is empty or its strides form no matrix."""
    if not view.shape or 0 in view.shape or (view.strides[-1] != 1 and view.shape[-1] != 1):
        return None
    lead = merged(view.shape[:-1], [view.strides[:-1]])
    if len(lead) > 1:
        return None
    return (lead[0][0], view.shape[-1], lead[0][1][0]) if lead else (1, view.shape[-1], 0)
