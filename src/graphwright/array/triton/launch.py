"""Launches of the Triton kernels of block-sparse attention on torch tensors, bound once as the CPU's kernels are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.formulas.block_attention import named
from graphwright.array.triton import block_attention as kernels
from graphwright.array.triton.kernel import ALL_REGISTERS, Launch, Tiles, TileTable, kernel, tiles_of
from graphwright.array.triton.rows import all_aligned
from graphwright.array.triton.words import apply_words
from graphwright.errors import DTypeError
from graphwright.patterns import table as words
from graphwright.patterns.errors import BlockSize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of q, k and v that the kernels support."""
BLOCKS = (16, 32, 64, 128)
"""Block sizes of patterns that the kernels support: tiles of the matrix units."""
WIDEST = 256
"""Width of the widest heads that the kernels support."""
TILES: dict[str, TileTable] = {
    "forward": {
        (2, 64): (Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 1), Tiles(128, 64, 8, 1)),
        (2, 128): (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
        (2, 256): (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        (4, 64): (Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 2), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
        (4, 128): (Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
        (4, 256): (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    },
    "backward_rows": {
        (2, 64): (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 1), Tiles(128, 64, 8, 1), Tiles(64, 32, 8, 1)),
        (2, 128): (Tiles(64, 128, 8, 1), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
        (2, 256): (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        (4, 64): (Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
        (4, 128): (Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1)),
        (4, 256): (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    },
    "backward_columns": {
        (2, 64): (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
        (2, 128): (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
        (2, 256): (Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        (4, 64): (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
        (4, 128): (Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
        (4, 256): (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    },
    "edge_mass": {
        (2, 64): (Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 1), Tiles(128, 128, 8, 1)),
        (2, 128): (Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 1), Tiles(128, 128, 8, 1)),
        (2, 256): (Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 2), Tiles(64, 128, 8, 1), Tiles(64, 128, 8, 1)),
        (4, 64): (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
        (4, 128): (Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
        (4, 256): (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    },
}  # fmt: skip
"""Kernel -> its largest tiles without spills; a form is rich with gates or a softcap.

Only float32 wider than 128 spills, in any tile.
"""
WORDS = 256
"""Words that the kernel of edits applies at once."""
GATES, EDGES = 32, 64
"""Gates of a program, and edges that it reads at once, when gradients of gates are added."""


def check_block(block: int) -> None:
    """Raise BlockSize, with the nearest size that has kernels, if a pattern's block size has none."""
    if block not in BLOCKS:
        nearest = min(BLOCKS, key=lambda each: (abs(each - block), -each))
        raise BlockSize(block, nearest, f"one of {[*BLOCKS]} on CUDA")


def padded(width: int) -> int:
    """Return the columns of a tile with `width` used ones: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def aligned_heads(*heads: torch.Tensor) -> bool:
    """Return whether widths and strides of q, k, v [N, H, T, width] are aligned."""
    return all_aligned(*(n for t in heads for n in (t.shape[3], *t.stride()[:3])))


@dataclass(frozen=True, slots=True)
class Form:
    """What a compiled kernel depends on.

    Attributes:
        block: tokens per block.
        d, dv: widths of q and of v.
        size: bytes of an element.
        aligned: whether widths and strides are aligned.
        gates, inside, start, softcap: whether there are gates, inside the softmax, a q_start, a softcap.
        wide: widen 16-bit operands of products, for the interpreter.
    """

    block: int
    d: int
    dv: int
    size: int = 2
    aligned: bool = True
    gates: bool = False
    inside: bool = True
    start: bool = False
    softcap: bool = False
    wide: bool = False

    def tiles(self, kernel: str) -> Tiles:
        """Return the tiles of a kernel, at most a block of queries by a block of keys."""
        rich, width = self.gates or self.softcap, padded(max(self.d, self.dv))
        found = tiles_of(TILES[kernel], self.size, width, rich, self.aligned)
        assert found is not None, "_takes refuses wider heads"
        return found._replace(rows=min(found.rows, self.block), columns=min(found.columns, self.block))

    def row_parts(self, kernel: str) -> int:
        """Return the number of tiles of a kernel in a block of queries."""
        return self.block // self.tiles(kernel).rows

    def launch(self, function: Any, programs: int, args: tuple[Any, ...], read_v: bool = True, **more: bool) -> Launch:
        """Return the launch of a kernel, with more of its constants.

        Args:
            read_v: whether the kernel reads v.
        """
        tiles = self.tiles(function.__name__)
        constants: dict[str, Any] = {
            "BLOCK": self.block, "TILE_Q": tiles.rows, "TILE_K": tiles.columns, "ALIGNED": self.aligned, "D": self.d,
            "D_PADDED": padded(self.d), "GATES": self.gates, "INSIDE": self.inside, "START": self.start,
            "SOFTCAP": self.softcap, "WIDE": self.wide, **more,
        }  # fmt: skip
        if read_v:
            constants |= {"DV": self.dv, "DV_PADDED": padded(self.dv)}
        return Launch(function, (programs,), args, constants, tiles.warps, tiles.stages, ALL_REGISTERS)


class _Bound:
    """Operands of one launch, in the order of the kernels' arguments."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, table: torch.Tensor,
                 extra: Tensors, attrs: Attrs) -> None:  # fmt: skip
        if q.dtype not in DTYPES:
            raise DTypeError("no Triton kernel for this dtype", expected="float32, float16, bfloat16", got=q.dtype)
        known = table.tolist()
        check_block(known[words.BLOCK])
        self.q, self.k, self.v, self.table = q, k, v, table
        given = named(extra, attrs)
        self.gates, start = given.get("gates"), given.get("q_start")
        self.lse_grad = given.get("lse_grad")
        self.start = table if start is None else start
        cap = attrs["softcap"]
        self.strides = [s for t in (self.q, self.k, self.v) if t is not None for s in t.stride()[:3]]
        self.form = _form(known[words.BLOCK], [t for t in (q, k, v) if t is not None], given, attrs)
        n, heads, queries, _ = q.shape
        groups, keys = k.shape[1], k.shape[2]
        self.slots = known[words.ROOM] or known[words.EDGE_SLOTS]
        self.sizes = (queries, keys, heads, groups)
        self.factors = (float(attrs["scale"]), float(cap or 1.0))
        self.row_blocks = -(-queries // self.form.block) + (start is not None)
        self.keys, self.pairs, self.key_pairs = keys, n * heads, n * groups

    def of_rows(self, function: Any, args: tuple[Any, ...], **more: bool) -> Launch:
        """Return the launch of a kernel with a program per tile of queries, and with more of its constants."""
        programs = self.row_blocks * self.form.row_parts(function.__name__) * self.pairs
        return self.form.launch(function, programs, args, self.v is not None, **more)

    def of_columns(self, function: Any, args: tuple[Any, ...]) -> Launch:
        """Return the launch of a kernel with a program per tile of keys."""
        tiles = -(-self.keys // self.form.tiles(function.__name__).columns)
        return self.form.launch(function, tiles * self.key_pairs, args)

    @property
    def gate_values(self) -> torch.Tensor:
        """The gates; any tensor if there are none."""
        return self.q if self.gates is None else self.gates


def _form(block: int, operands: Tensors, given: Mapping[str, torch.Tensor], attrs: Attrs) -> Form:
    """Return the form of kernels for q, k and, if it is read, v."""
    q, v = operands[0], operands[-1]
    return Form(block, q.shape[3], v.shape[3], q.element_size(), aligned_heads(*operands), "gates" in given,
                attrs["where"] == "exp", "q_start" in given, attrs["softcap"] is not None,
                knobs.runtime.interpret)  # fmt: skip


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if ins[0].dtype not in DTYPES:
        return f"no Triton kernel of block-sparse attention for {ins[0].dtype}"
    rows = [t for t in ins[:3] if t.dim() == 4]  # q, k, and v where there is one
    if (width := max(t.shape[3] for t in rows)) > WIDEST:
        return f"heads of {width}"
    if any(t.stride(-1) != 1 for t in rows):
        return "the entries of a head are not contiguous"
    if not all(t.is_contiguous() for t in (*outs, *ins[len(rows) :])):
        return "a result, a statistic or a gradient is not contiguous"
    return ""


@kernel("block_sdpa", takes=_takes, reads_values=True)
def block_sdpa(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    """Bind the op `block_sdpa`. Raises: BlockSize, DTypeError."""
    q, k, v, table, *extra = ins
    b, (out, lse) = _Bound(q, k, v, table, extra, attrs), outs
    args = (b.q, b.k, b.v, table, b.gate_values, b.start, out, lse, *b.sizes, *b.factors, *b.strides)
    return b.of_rows(kernels.forward, args)


@kernel("block_sdpa_backward", takes=_takes, reads_values=True)
def block_sdpa_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Bind the op `block_sdpa_backward`: rows for dq and gates, then columns for dk and dv. Raises: as `block_sdpa`."""
    (q, k, v, table, *extra), (out, lse, grad) = ins[:-3], ins[-3:]
    b, (dq, dk, dv, *rest) = _Bound(q, k, v, table, extra, attrs), outs
    less, parts = torch.empty_like(lse), b.pairs * b.form.row_parts("backward_rows")
    edge_grads = lse.new_empty(parts if rest else 1, b.slots if rest else 1)
    shared = (b.q, b.k, b.v, table, b.gate_values, b.start)
    of_rows = (*shared, out, lse, lse if b.lse_grad is None else b.lse_grad, grad, dq, less, edge_grads, *b.sizes,
               b.slots, *b.factors, *b.strides)  # fmt: skip
    of_columns = (*shared, lse, less, grad, dk, dv, *b.sizes, *b.factors, *b.strides)
    return [
        edge_grads.zero_,
        b.of_rows(kernels.backward_rows, of_rows, LSE_GRAD=b.lse_grad is not None),
        b.of_columns(kernels.backward_columns, of_columns),
        *(
            Launch(
                kernels.gate_gradients, (-(-len(dgates) // GATES),),
                (table, edge_grads, dgates, parts, b.slots, b.slots, len(dgates)), {"GATES": GATES, "EDGES": EDGES},
            )
            for dgates in rest
        ),
    ]  # fmt: skip


@kernel("block_mass", takes=_takes, reads_values=True)
def block_mass(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Bind the op `block_mass`. Raises: as `block_sdpa`."""
    (q, k, table, lse, *extra), (mass,) = ins, outs
    b = _Bound(q, k, None, table, extra, attrs)
    largest, slots = attrs["reduce"] == "max", len(mass)
    found = lse.new_empty(2, b.pairs * b.form.row_parts("edge_mass"), slots)
    args = (b.q, b.k, table, b.gate_values, b.start, lse, found, *b.sizes, slots, *b.factors, *b.strides)

    def reduce() -> None:
        if largest:
            torch.amax(found[0], 0, out=mass)
        else:
            torch.div(found[0].sum(0), found[1].sum(0).clamp(min=1), out=mass)

    return [found.zero_, b.of_rows(kernels.edge_mass, args, LARGEST=largest), reduce]


def word_kernel(table: torch.Tensor, queue: torch.Tensor) -> Launch:
    """Bind the kernel that applies the words of a mirror's queue to the arrays of its table."""
    return Launch(apply_words, (1,), (table, queue), {"WIDTH": WORDS})
