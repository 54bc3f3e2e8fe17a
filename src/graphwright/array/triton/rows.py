"""Arrays as rows: [outer, rows, columns] with a stride each, and the tiles that programs take of them.

A kernel treats the columns of a row together. Programs take tiles of ROWS rows; a row longer than the widest tile is
read in a loop of COLUMNS columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

ALONG, ACROSS, ANY = 0, 1, 2
"""Layouts: the columns are contiguous, or the rows, or neither."""
UNIT = tl.constexpr(8)
"""Elements of which sizes and strides of aligned forms are multiples: 16 bytes of a 16-bit dtype are read at once."""
MOST = 2**31 - 2**16
"""Most entries along an axis: the number after the last tile is an int32 too."""


def all_aligned(*sizes: int) -> bool:
    """Return whether all sizes are multiples of `UNIT`."""
    return all(n % UNIT.value == 0 for n in sizes)


@triton.jit
def wide(x):
    """Convert to float32; float64 stays."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def number(value, like):
    """Convert a float64 argument to the dtype in which `like` is computed."""
    return tl.full([], value, like.dtype)


@triton.jit
def narrow(value, pointer):
    """Convert to the dtype of the elements at `pointer`."""
    return value.to(pointer.dtype.element_ty)


@triton.jit
def tanh(x):
    """Return tanh of float32: near 0 by its series, where few digits of 2 / (1 + e^-2x) - 1 are left."""
    square = x * x
    rest = -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835 - square * (1382 / 155925))))
    return tl.where(tl.abs(x) < 0.35, x + x * square * rest, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def multiple(value, ALIGNED: tl.constexpr):
    """Return `value`; if ALIGNED, the compiler learns that it is divisible by `UNIT`."""
    if ALIGNED:
        return value // UNIT * UNIT
    else:
        return value


@triton.jit
def along_two(first):
    """Return the numbers of a program along two axes, the first of which has `first` programs and runs fastest.

    Grids have one axis, as a GPU's second one has at most 65535 programs.
    """
    return tl.program_id(0) % first, tl.program_id(0) // first


@triton.jit
def tile_rows(program, rows, blocks, ROWS: tl.constexpr):
    """Return the index along the axes before the rows, the rows [ROWS, 1] of a program, and which of them exist.

    The program of this number has ROWS of `rows` rows; `blocks` programs have all of them.
    """
    outer = (program // blocks).to(tl.int64)
    row = (program % blocks) * ROWS + tl.arange(0, ROWS)
    return outer, row.to(tl.int64)[:, None], (row < rows)[:, None]


class Tile(NamedTuple):
    """Rows and columns of a program's tile, whether it loops over columns, and its warps."""

    rows: int
    columns: int
    loop: bool
    warps: int


TILES = (Tile(32, 32, False, 4), Tile(8, 128, False, 4), Tile(2, 512, False, 4), Tile(1, 2048, False, 4),
         Tile(1, 8192, False, 8))  # fmt: skip
"""Tiles of contiguous columns, narrowest first: so 20 shapes compile at most so many kernels, and LONG."""
LONG = Tile(1, 4096, True, 8)
SIDEWAYS = Tile(64, 32, True, 4)
"""Tile of columns that are not contiguous, of any number."""


def tile_of(columns: int, layout: int) -> Tile:
    """Return the tile for rows of so many columns."""
    if layout != ALONG:
        return SIDEWAYS
    return next((tile for tile in TILES if columns <= tile.columns), LONG)


def merged(t: torch.Tensor, axes: Sequence[int]) -> tuple[int, int] | None:
    """Return (size, stride) of adjacent axes as one axis, or None if its elements are not evenly spaced."""
    size, stride = 1, 1
    for axis in reversed(axes):
        n = t.shape[axis]
        if n == 1:
            continue
        if size == 1:
            stride = t.stride(axis)
        elif t.stride(axis) != size * stride and t.numel():
            return None
        size *= n
    return size, stride


@dataclass(frozen=True, slots=True)
class Rows:
    """Arrays of one shape as [outer, rows, columns].

    Attributes:
        outer, rows, columns: sizes.
        strides: of each array, those of the three axes.
    """

    outer: int
    rows: int
    columns: int
    strides: tuple[tuple[int, int, int], ...]

    @property
    def layout(self) -> int:
        """The layout of all arrays."""
        if all(s[2] == 1 for s in self.strides) or self.columns == 1:
            return ALONG
        return ACROSS if all(s[1] == 1 for s in self.strides) else ANY

    @property
    def aligned(self) -> bool:
        """Whether rows begin, and end, at multiples of `UNIT` elements from the arrays' first."""
        last = self.columns if self.layout == ALONG else self.rows
        inner = 1 if self.layout == ALONG else 2
        others = (s[i] for s in self.strides for i in (0, inner))
        return self.layout != ANY and all_aligned(last, *others)

    @property
    def tile(self) -> Tile:
        """The tile of a program."""
        return tile_of(self.columns, self.layout)

    @property
    def blocks(self) -> int:
        """Programs for the rows of one outer index."""
        return -(-self.rows // self.tile.rows)

    @property
    def grid(self) -> tuple[int]:
        """Programs of a launch."""
        return (self.outer * self.blocks,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Arguments of a kernel: rows, columns, programs of an outer index."""
        return self.rows, self.columns, self.blocks

    @property
    def steps(self) -> tuple[int, ...]:
        """Arguments of a kernel: the strides of all arrays, array by array."""
        return tuple(s for each in self.strides for s in each)

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of a kernel that treats these rows."""
        tile = self.tile
        return {"ROWS": tile.rows, "COLUMNS": tile.columns, "LOOP": tile.loop, "LAYOUT": self.layout,
                "ALIGNED": self.aligned}  # fmt: skip


def rows_along(tensors: Sequence[torch.Tensor], first: int, last: int) -> Rows | str:
    """Return arrays of one shape as rows whose columns are the axes `first`..`last` - 1, or why that is impossible."""
    rank = tensors[0].dim()
    found = []
    for t in tensors:
        parts = [merged(t, range(*bounds)) for bounds in ((0, first), (first, last), (last, rank))]
        if None in parts:
            return f"the axes of a layout do not merge: shape {tuple(t.shape)}, strides {t.stride()}"
        found.append(parts)
    (outer, columns, inner) = (size for size, _ in found[0])
    if max(outer, columns, inner) > MOST:
        return f"an axis has more than {MOST} entries"
    if inner == 1:  # the leading axes are the rows
        return Rows(1, outer, columns, tuple((0, a[1], b[1]) for a, b, _ in found))
    return Rows(outer, inner, columns, tuple((a[1], c[1], b[1]) for a, b, c in found))
