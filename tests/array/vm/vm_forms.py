"""An op by the VM, beside its ATen kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphwright.array import CPU, DType, NDArray, backend, bfloat16, from_numpy
from graphwright.array.vm.encode.operands import Row, View, VmForm
from graphwright.array.vm.running.segment import VmSegment
from graphwright.ops import OPS, compute
from graphwright.ops.expansion import vm_form


def form_of(name: str) -> VmForm:
    """The form of an op that has one."""
    form = vm_form(OPS[name])
    assert form is not None, name
    return form


def encode(
    name: str, outs: Sequence[View], ins: Sequence[View], attrs: Any, work: Sequence[View] | None = None
) -> list[Row] | None:
    """Rows of an op's form, if it has one."""
    form = vm_form(OPS[name])
    return None if form is None else form.rows(outs, ins, attrs, work)


def view(array: NDArray) -> View:
    """An array as the VM sees it."""
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def vm(
    name: str, arrays: Sequence[NDArray], attrs: dict[str, Any], outs: list[NDArray] | None = None
) -> list[NDArray] | None:
    """Results by the VM, into memory of NaNs unless some is given; None if it has no form."""
    if outs is None:
        outs = [unset(s.sizes, s.dtype) for s in OPS[name].specs([a.spec for a in arrays], attrs)]
    views = [view(o) for o in outs], [view(a) for a in arrays]
    if vm_form(OPS[name]) is None:
        return None
    work = [from_numpy(np.full(v.shape, np.nan, v.dtype.numpy)) for v in form_of(name).workspace(*views, attrs)]
    rows = encode(name, *views, attrs, [view(w) for w in work])
    if rows is None:
        return None
    VmSegment([rows])()
    return outs


def unset(shape: Sequence[int], dtype: DType) -> NDArray:
    """Memory of NaNs, or of ones where there are none."""
    if dtype is bfloat16:
        return from_numpy(np.full(shape, 0x7FC0, "u2"), bits=bfloat16)
    return from_numpy(np.full(shape, np.nan if dtype.is_float else 1, dtype.numpy))


def low(x: Any) -> NDArray:
    """Numbers rounded to bfloat16."""
    (made,) = compute(OPS["cast"], [from_numpy(np.asarray(x, np.float32))], {"dtype": bfloat16})
    return made


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
