"""Operators that rearrange entries: views, joins, splits, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.autograd import Tensor, create, top
from graphwright.autograd.named_sizes import traced
from graphwright.models.importing.operators.table import equal, operator
from graphwright.nn import functional

_END = 2**63 - 1
"""The end of a slice that has none."""

equal(top, """
    broadcast_to diag_embed diagonal flip movedim narrow permute roll select squeeze stack swapaxes tile tril triu
    transpose unbind unflatten unsqueeze flatten
""")  # fmt: skip
equal(Tensor, "repeat unfold expand_as")
equal(functional, "pixel_shuffle pixel_unshuffle channel_shuffle")
operator("t")(lambda x: x.T if x.ndim == 2 else x)


@operator("view", "reshape", "_unsafe_view", "_reshape_copy", "view_copy")
def view(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return x in a new shape."""
    return x.reshape(tuple(size))


@operator("expand", "expand_copy")
def expand(x: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    """Return x broadcast to a shape, in which -1 keeps the size of x."""
    lead = len(size) - x.ndim
    return x.expand(tuple(x.shape[i - lead] if type(n) is int and n == -1 else n for i, n in enumerate(size)))


@operator("slice")
def slice_(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """x[start:end:step] along one axis."""
    end = None if type(end) is int and end == _END else end
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


@operator("cat", "concat")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along an axis; empty vectors are ignored, as torch does."""
    given = [t for t in tensors if not (t.ndim == 1 and t.spec.shape == (0,))] or list(tensors[:1])
    return top.cat(given, dim=dim)


@operator("split", "split_with_sizes", "split_copy")
def split(x: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Split an axis into parts of one size, or of the given sizes."""
    return tuple(x.split(sizes, dim))


@operator("chunk")
def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split an axis into a number of parts."""
    return tuple(x.chunk(chunks, dim))


@operator("pad")
def pad(x: Tensor, widths: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad or crop the last axes."""
    if mode == "constant" and any(traced(n) for n in widths):
        return _joined(x, widths, 0 if value is None else value)
    return functional.pad(x, widths, mode, value)


def _joined(x: Tensor, widths: Sequence[int], value: float) -> Tensor:
    """Pad by widths that depend on named sizes: join x and constants, from the last axis on."""
    for i in range(len(widths) // 2):
        axis, parts = x.ndim - 1 - i, [x]
        for at, width in ((0, widths[2 * i]), (2, widths[2 * i + 1])):
            if traced(width) or width:
                shape = (*x.shape[:axis], width, *x.shape[axis + 1 :])
                parts.insert(at, create.full(shape, value, dtype=x.dtype))
        x = top.cat(parts, dim=axis)
    return x


@operator("constant_pad_nd")
def constant_pad_nd(x: Tensor, widths: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad or crop the last axes with a constant."""
    return pad(x, widths, "constant", value)


for _mode, _prefix in (("reflect", "reflection"), ("replicate", "replication")):
    for _n in (1, 2, 3):
        operator(f"{_prefix}_pad{_n}d")(lambda x, widths, mode=_mode: functional.pad(x, widths, mode))


@operator("select_scatter")
def select_scatter(x: Tensor, source: Tensor, dim: int, index: Any) -> Tensor:
    """Return x with one entry of an axis replaced by another tensor."""
    at = (slice(None),) * (dim % x.ndim)
    after = [x[(*at, slice(index + 1, None))]] if index != -1 else []
    return top.cat([x[(*at, slice(None, index))], source.unsqueeze(dim % x.ndim), *after], dim=dim)


@operator("slice_scatter")
def slice_scatter(x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """Return x with x[start:end:step] of one axis replaced by another tensor."""
    at = (slice(None),) * (dim % x.ndim)
    end = None if type(end) is int and end == _END else end
    if step != 1:
        return top.slice_scatter(x, source, dim, start, end, step)
    before = [] if type(start) is int and start == 0 else [x[(*at, slice(None, start))]]
    after = [] if end is None else [x[(*at, slice(end, None))]]
    return top.cat([*before, source.expand(x[(*at, slice(start, end))].shape), *after], dim=dim)
