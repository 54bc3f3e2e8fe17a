"""The table of CPU kernels. A kernel returns the specs of the scratch that it needs, and calls bound to operands.

Invariant: the calls of `bind` touch only the bound tensors and allocate no tensor memory, except those that
`tests/plan/test_plan_compile.py` lists.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from graphwright.array.backend import Attrs, Call, Fresh, Needs, torch_functions
from graphwright.array.dtype import DTYPES, DType, float32
from graphwright.array.spec import Spec

Tensors = Sequence[torch.Tensor]
Bind = Callable[[Tensors, Tensors, Attrs, Tensors], "Call | list[Call]"]
Work = Callable[[Sequence[Spec], Sequence[Spec], Attrs], list[Spec]]
Choose = Callable[[Tensors, Attrs], "Fresh | None"]
Asks = Callable[[Sequence[Spec], Attrs], Needs]
Takes = Callable[[Tensors, Tensors, Attrs], str]


def _any_layout(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    """Return "": the `takes` of a kernel that supports all dtypes and layouts."""
    return ""


class Kernel(NamedTuple):
    """One kernel of a table: of ATen's on the CPU here, of Triton's on a GPU in `array.triton.kernel`.

    Attributes:
        bind: (outs, ins, attrs, work) -> calls that compute the results.
        work: (out specs, in specs, attrs) -> specs of the scratch.
        where: the file and line that define the kernel.
        fresh: (ins, attrs) -> a function of operands and attributes that allocates the single result, or None. It may
            depend on the shapes, strides and dtypes of the operands, but not on their values.
        needs: (in specs, attrs) -> the host requirements of one launch.
        takes: (outs, ins, attrs) -> "", or why the kernel does not support these dtypes and layouts. It reads shapes,
            strides and dtypes but no values.
        host: True if it reaches memory of its operands by other means than calls of torch (numpy, numba, the VM), or
            calls torch for the CPU only. A kernel without it runs on any device of torch.
        reads_values: True if `bind` reads values of operands, which must wait for queued writes of them.
    """

    bind: Bind
    work: Work | None
    where: str
    fresh: Choose | None = None
    needs: Asks = lambda ins, attrs: Needs()
    takes: Takes = _any_layout
    host: bool = False
    reads_values: bool = False


KERNELS: dict[str, Kernel] = {}
_NONE = Needs()
TORCH_DTYPE: dict[DType, torch.dtype] = {d: getattr(torch, name) for name, d in DTYPES.items()}
DTYPE_OF: dict[torch.dtype, DType] = {t: d for d, t in TORCH_DTYPE.items()}
_LOW = frozenset(t for d, t in TORCH_DTYPE.items() if d.is_low)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def statistic(dtype: DType) -> DType:
    """Return the dtype in which to compute sums: float32 for 16-bit floats, else the dtype itself."""
    return float32 if dtype.is_low else dtype


@lru_cache(maxsize=512)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def number(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return `value` as a cached 0-d tensor like `like`; ATen would allocate one per call for a number."""
    return _constant(value, like.dtype, like.device)


def copy_to_outputs(outs: Tensors, ins: Tensors) -> list[Call]:
    """Return calls that copy each operand to its output, except where both share memory."""
    return [partial(o.copy_, i) for o, i in zip(outs, ins, strict=True) if o.data_ptr() != i.data_ptr()]


def spec_of(t: torch.Tensor) -> Spec:
    """Return the spec of a tensor."""
    return Spec(tuple(t.shape), DTYPE_OF[t.dtype])


def host(t: torch.Tensor) -> np.ndarray:
    """Return the bits of a tensor as numpy integers, so that numpy can move elements of any dtype."""
    return t.view(_BITS[t.element_size()]).numpy()


def kernel(
    name: str, work: Work | None = None, *, widen: bool = False, fresh: Choose | None = None,
    needs: Needs | Asks = _NONE, takes: Takes = _any_layout, host: bool = False, reads_values: bool = False,
    table: dict[str, Kernel] = KERNELS,
) -> Callable[[Bind], Bind]:  # fmt: skip
    """Return a decorator that registers the `bind` function of a kernel.

    Args:
        work: function (out specs, in specs, attrs) -> specs of the scratch.
        fresh: function (ins, attrs) -> a function that allocates the result, or None (`Kernel.fresh`).
        needs: the host requirements, or a function that returns those of one launch.
        widen: 16-bit operands are converted to float32, and 16-bit results are computed in float32 and rounded once.
        takes: function (outs, ins, attrs) -> "", or why the kernel does not support them.
        host, reads_values: see `Kernel`.
        table: the table that it enters.
    """

    def enter(bind: Bind) -> Bind:
        if name in table:
            raise ValueError(f"kernel {name!r} is already registered")
        code = inspect.unwrap(bind).__code__
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        asks: Asks = (lambda ins, attrs, given=needs: given) if isinstance(needs, Needs) else needs
        made = widened(bind, work) if widen else (bind, work)
        table[name] = Kernel(*made, where, fresh, asks, takes, host, reads_values)
        return bind

    return enter


def out_kernel(name: str, call: Callable[[Tensors, Attrs], partial[Any]], fresh: Choose | None = None) -> None:
    """Register a kernel that is one torch call: `call(ins, attrs)` returns it as a partial that lacks `out=`."""

    @wraps(call)
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Call:
        return partial(call(ins, attrs), out=outs[0])

    kernel(name, fresh=fresh)(bind)


def row_major(call: Fresh) -> Choose:
    """Return a value for `Kernel.fresh`: a function that returns `call` if all operands are row-major, else None."""
    return lambda ins, attrs: call if all(t.is_contiguous() for t in ins) else None


def kernel_of(name: str) -> Kernel | None:
    """Return the kernel of an op, or None; the kernel of an op with a field `aten` is created on first use."""
    found = KERNELS.get(name)
    if found is None and (function := torch_functions.get(name)) is not None:
        call = getattr(torch, function)
        found = KERNELS[name] = Kernel(
            lambda outs, ins, attrs, work: partial(call, *ins, out=outs[0]), None, f"torch.{function}", row_major(call)
        )
    return found


def widened(bind: Bind, work: Work | None) -> tuple[Bind, Work]:
    """Return a kernel and its scratch that convert 16-bit floats to float32, and results back, rounded once."""

    def wide(specs: Sequence[Spec]) -> list[Spec]:
        return [Spec(s.shape, float32) if s.dtype.is_low else s for s in specs]

    def scratch(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        copies = [w for s, w in zip((*ins, *outs), wide((*ins, *outs)), strict=True) if w is not s]
        return copies + (work(wide(outs), wide(ins), attrs) if work is not None else [])

    def bound(outs: Tensors, ins: Tensors, attrs: Attrs, given: Tensors) -> list[Call]:
        spare = iter(given)
        wide_ins, wide_outs = ([next(spare) if t.dtype in _LOW else t for t in side] for side in (ins, outs))
        calls = bind(wide_outs, wide_ins, attrs, list(spare))
        return [
            *(partial(w.copy_, t) for w, t in zip(wide_ins, ins, strict=True) if w is not t),
            *(calls if isinstance(calls, list) else [calls]),
            *(partial(t.copy_, w) for w, t in zip(wide_outs, outs, strict=True) if w is not t),
        ]

    return bound, scratch
