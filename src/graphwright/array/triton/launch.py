"""Launches of the Triton kernels of block-sparse attention on torch tensors, bound once as the CPU's kernels are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.formulas.block_attention import named
from graphwright.array.triton import block_attention as kernels
from graphwright.array.triton.kernel import Launch, kernel
from graphwright.array.triton.words import apply_words
from graphwright.errors import DTypeError
from graphwright.patterns import table as words
from graphwright.patterns.errors import BlockSize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of q, k and v that the kernels support."""
BLOCKS = (16, 32, 64, 128)
"""Block sizes of patterns that the kernels support: tiles of the matrix units."""
MOST_WIDE = 64 * 64
"""Elements of the largest tile of float32."""
WORDS = 256
"""Words that the kernel of edits applies at once."""
GATES, EDGES = 32, 64
"""Gates of a program, and edges that it reads at once, when gradients of gates are added."""


def check_block(block: int, width: int, dtype: torch.dtype) -> None:
    """Raise BlockSize, with the nearest size that has kernels, if a pattern's block size has none.

    `width` is the wider of q's and v's. Tiles of float32 that are wider than 64 need smaller blocks, as they exceed the
    shared memory of a block of threads.
    """
    most = MOST_WIDE // max(padded(width), 64) if dtype == torch.float32 else BLOCKS[-1]
    allowed = [each for each in BLOCKS if each <= most]
    if block not in allowed:
        nearest = min(allowed, key=lambda each: (abs(each - block), -each))
        raise BlockSize(block, nearest, f"one of {allowed} on CUDA, for {dtype} and width {width}")


def padded(width: int) -> int:
    """Return the columns of a tile with `width` used ones: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def warps(block: int, width: int) -> int:
    """Return the number of warps of a program with tiles [block, width]; the same choice everywhere."""
    return 4 if block * width <= 32 * 64 else 8


@dataclass(frozen=True, slots=True)
class Form:
    """What a compiled kernel depends on.

    Attributes:
        block: tokens per block.
        d, dv: widths of q and of v.
        gates, inside, start, softcap: whether there are gates, inside the softmax, a q_start, a softcap.
        wide: widen 16-bit operands of products, for the interpreter.
    """

    block: int
    d: int
    dv: int
    gates: bool = False
    inside: bool = True
    start: bool = False
    softcap: bool = False
    wide: bool = False

    def constants(self) -> dict[str, Any]:
        """Return the constants of `forward` and of the kernels of its gradients."""
        return {**self.narrow(), "DV": self.dv, "DV_PADDED": padded(self.dv)}

    def narrow(self) -> dict[str, Any]:
        """Return the constants of kernels that read no v."""
        return {
            "BLOCK": self.block, "D": self.d, "D_PADDED": padded(self.d), "GATES": self.gates, "INSIDE": self.inside,
            "START": self.start, "SOFTCAP": self.softcap, "WIDE": self.wide,
        }  # fmt: skip

    @property
    def options(self) -> dict[str, int]:
        """Number of warps and of pipeline stages."""
        return {"warps": warps(self.block, max(padded(self.d), padded(self.dv))), "stages": 2}


class _Bound:
    """Operands of one launch, in the order of the kernels' arguments."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, table: torch.Tensor,
                 extra: Tensors, attrs: Attrs) -> None:  # fmt: skip
        if q.dtype not in DTYPES:
            raise DTypeError("no Triton kernel for this dtype", expected="float32, float16, bfloat16", got=q.dtype)
        known = table.tolist()
        check_block(known[words.BLOCK], max(t.shape[3] for t in (q, k, v) if t is not None), q.dtype)
        self.q, self.k, self.v, self.table = q, k, v, table
        given = named(extra, attrs)
        self.gates, start = given.get("gates"), given.get("q_start")
        self.lse_grad = given.get("lse_grad")
        self.start = table if start is None else start
        cap = attrs["softcap"]
        self.form = Form(known[words.BLOCK], q.shape[3], q.shape[3] if v is None else v.shape[3],
                         self.gates is not None, attrs["where"] == "exp", start is not None, cap is not None,
                         knobs.runtime.interpret)  # fmt: skip
        n, heads, queries, _ = q.shape
        groups, keys = k.shape[1], k.shape[2]
        self.slots = known[words.ROOM] or known[words.EDGE_SLOTS]
        self.sizes = (queries, keys, heads, groups)
        self.factors = (float(attrs["scale"]), float(cap or 1.0))
        self.strides = [s for t in (self.q, self.k, self.v) if t is not None for s in t.stride()[:3]]
        block = self.form.block
        self.rows = (-(-queries // block) + (start is not None)) * n * heads
        self.columns = -(-keys // block) * n * groups
        self.pairs = n * heads

    def launch(self, function: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
        """Return the launch of a kernel with the warps and stages of the form."""
        return Launch(function, (programs,), args, constants, **self.form.options)

    @property
    def gate_values(self) -> torch.Tensor:
        """The gates; any tensor if there are none."""
        return self.q if self.gates is None else self.gates


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if ins[0].dtype not in DTYPES:
        return f"no Triton kernel of block-sparse attention for {ins[0].dtype}"
    rows = [t for t in ins[:3] if t.dim() == 4]  # q, k, and v where there is one
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
    return b.launch(kernels.forward, b.rows, args, b.form.constants())


@kernel("block_sdpa_backward", takes=_takes, reads_values=True)
def block_sdpa_backward(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """Bind the op `block_sdpa_backward`: rows for dq and gates, then columns for dk and dv. Raises: as `block_sdpa`."""
    (q, k, v, table, *extra), (out, lse, grad) = ins[:-3], ins[-3:]
    b, (dq, dk, dv, *rest) = _Bound(q, k, v, table, extra, attrs), outs
    less = torch.empty_like(lse)
    edge_grads = lse.new_empty(b.pairs if rest else 1, b.slots if rest else 1)
    shared = (b.q, b.k, b.v, table, b.gate_values, b.start)
    of_rows = (*shared, out, lse, lse if b.lse_grad is None else b.lse_grad, grad, dq, less, edge_grads, *b.sizes,
               b.slots, *b.factors, *b.strides)  # fmt: skip
    of_columns = (*shared, lse, less, grad, dk, dv, *b.sizes, *b.factors, *b.strides)
    constants = b.form.constants()
    return [
        edge_grads.zero_,
        b.launch(kernels.backward_rows, b.rows, of_rows, {**constants, "LSE_GRAD": b.lse_grad is not None}),
        b.launch(kernels.backward_columns, b.columns, of_columns, constants),
        *(
            Launch(
                kernels.gate_gradients, (-(-len(dgates) // GATES),),
                (table, edge_grads, dgates, b.pairs, b.slots, b.slots, len(dgates)), {"GATES": GATES, "EDGES": EDGES},
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
    found = lse.new_empty(2, b.pairs, slots)
    args = (b.q, b.k, table, b.gate_values, b.start, lse, found, *b.sizes, slots, *b.factors, *b.strides)

    def reduce() -> None:
        if largest:
            torch.amax(found[0], 0, out=mass)
        else:
            torch.div(found[0].sum(0), found[1].sum(0).clamp(min=1), out=mass)

    constants = {**b.form.narrow(), "LARGEST": largest}
    return [found.zero_, b.launch(kernels.edge_mass, b.rows, args, constants), reduce]


def word_kernel(table: torch.Tensor, queue: torch.Tensor) -> Launch:
    """Bind the kernel that applies the words of a mirror's queue to the arrays of its table."""
    return Launch(apply_words, (1,), (table, queue), {"WIDTH": WORDS})
