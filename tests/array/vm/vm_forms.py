"""An op by the VM, beside its ATen kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphwright.array import CPU, NDArray, backend, from_numpy
from graphwright.array.vm.encode import View, encode
from graphwright.array.vm.running.segment import VmSegment
from graphwright.ops import OPS, compute


def view(array: NDArray) -> View:
    """An array as the VM sees it."""
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def vm(
    name: str, arrays: Sequence[NDArray], attrs: dict[str, Any], outs: list[NDArray] | None = None
) -> list[NDArray] | None:
    """Results by the VM, into memory of NaNs unless some is given; None if it has no form."""
    if outs is None:
        specs = OPS[name].specs([a.spec for a in arrays], attrs)
        outs = [from_numpy(np.full(s.sizes, np.nan if s.dtype.is_float else 1, s.dtype.numpy)) for s in specs]
    rows = encode(name, [view(o) for o in outs], [view(a) for a in arrays], attrs)
    if rows is None:
        return None
    VmSegment([rows])()
    return outs


def agree(name: str, arrays: Sequence[NDArray], attrs: dict[str, Any], atol: float = 2e-6, rtol: float = 2e-6) -> bool:
    """Compare with ATen; False if the VM has no form."""
    found = vm(name, arrays, attrs)
    for mine, other in zip(found or (), compute(OPS[name], arrays, attrs) if found else (), strict=True):
        np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=rtol, atol=atol, err_msg=name)
    return found is not None


def single(x: Any) -> NDArray:
    """An array in float32 where it was float64."""
    x = np.asarray(x)
    return from_numpy(x.astype(np.float32) if x.dtype == np.float64 else x)
