"""Quantised operators, exact as ONNX defines them: integers are computed in float64, which holds them below 2⁵³."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array import float32, float64, iinfo, int32, uint8
from graphwright.array.dtype import DType
from graphwright.autograd import Tensor, as_tensor, top
from graphwright.models.importing.onnx_operators.elementwise import converted
from graphwright.models.importing.onnx_operators.networks import conv
from graphwright.models.importing.onnx_operators.table import NotExpressible, dtype_of, operator
from graphwright.ops.axes import axis_of


def _spread(t: Tensor, x: Tensor, axis: int, block: int = 0) -> Tensor:
    """Return a scale or zero point in a shape that broadcasts to x: of the tensor, of an axis, or of blocks of it."""
    if not t.ndim or t.spec.shape == (1,):
        return t.reshape(())
    at = axis_of(axis, x.ndim)
    if block:
        n = int(x.spec.shape[at])
        wide = top.repeat_interleave(t, block, at, output_size=block * int(t.spec.shape[at]))
        return wide.narrow(at, 0, n)
    return t.reshape([-1 if i == at else 1 for i in range(x.ndim)])


@operator("QuantizeLinear", fixed=(1, 2))
def quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, saturate: int = 1, block_size: int = 0,
    output_dtype: int = 0, precision: int = 0,
) -> Tensor:  # fmt: skip
    """x / scale + zero, rounded to even and clamped to the range of the result."""
    kind = zero.dtype if zero is not None else dtype_of(output_dtype) if output_dtype else uint8
    fine = dtype_of(precision) if precision else scale.dtype if not x.dtype.is_float else x.dtype
    ratio = x.to(fine) / _spread(scale, x, axis, block_size).to(fine)
    if kind.kind == "float8":
        return converted(ratio, kind, bool(saturate))
    whole = top.round(ratio).to(float64)
    return _clamped(whole if zero is None else whole + _spread(zero, x, axis, block_size).to(float64), kind)


def _clamped(x: Tensor, kind: DType) -> Tensor:
    limits = iinfo(kind)
    return x.clamp(float(limits.min), float(limits.max)).to(kind)


@operator("DequantizeLinear", fixed=(0, 1, 2))
def dequantize(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    """(x - zero)·scale."""
    wide = x.to(float32)
    if zero is not None and x.dtype.kind != "float8":
        wide = wide - _spread(zero, x, axis, block_size).to(float32)
    made = wide * _spread(scale, x, axis, block_size).to(float32)
    return made.to(dtype_of(output_dtype) if output_dtype else scale.dtype)


@operator("DynamicQuantizeLinear")
def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as uint8 between its smallest and largest entry, with scale and zero point."""
    low, high = top.minimum(x.min(), as_tensor(np.float32(0))), top.maximum(x.max(), as_tensor(np.float32(0)))
    scale = (high - low) / 255.0
    zero = top.round((0.0 - low / scale).clamp(0.0, 255.0)).to(uint8)
    return quantize(x, scale, zero), scale, zero


# -- products of integers ----------------------------------------------------------------------------------------------
def _centred(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    wide = x.to(float64)
    if zero is None:
        return wide
    at = zero.to(float64)
    if zero.ndim == 1 and zero.spec.shape != (1,):
        at = at.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return wide - (at.reshape(()) if zero.spec.shape == (1,) else at)


@operator("MatMulInteger", fixed=(2, 3))
def matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    """(A - zero)(B - zero) of integers, int32."""
    return top.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1)).to(int32)


@operator("ConvInteger", fixed=(2, 3))
def conv_integer(x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None, *,
                 auto_pad: Any = "NOTSET", dilations: Any = None, group: int = 1, kernel_shape: Any = None,
                 pads: Any = None, strides: Any = None) -> Tensor:  # fmt: skip
    """Cross-correlation of integers less their zero points, int32."""
    return conv(_centred(x, x_zero, 1), _centred(w, w_zero, 0), auto_pad=auto_pad, dilations=dilations, group=group,
                kernel_shape=kernel_shape, pads=pads, strides=strides).to(int32)  # fmt: skip


def _requantised(y: Tensor, scale: Tensor, out_scale: Tensor, out_zero: Tensor) -> Tensor:
    made = top.round((y * scale / out_scale.to(float64)).to(float64)) + out_zero.to(float64)
    return _clamped(made, out_zero.dtype)


@operator("QLinearMatMul", fixed=(1, 2, 4, 5, 6, 7))
def qlinear_matmul(
    a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor, y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:  # fmt: skip
    """The product of quantised matrices, quantised."""
    if y_zero.dtype.kind == "float8":
        raise NotExpressible("QLinearMatMul of 8-bit floats", got=y_zero.spec)
    product = top.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1))
    rows = a_scale.to(float64)
    rows = rows.reshape(-1, 1) if a_scale.ndim == 1 and a_scale.spec.shape != (1,) else rows
    return _requantised(product, rows * b_scale.to(float64), y_scale, y_zero)


@operator("QLinearConv", fixed=(1, 2, 4, 5, 6, 7))
def qlinear_conv(
    x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor, y_scale: Tensor,
    y_zero: Tensor, bias: Tensor | None = None, *, auto_pad: Any = "NOTSET", dilations: Any = None, group: int = 1,
    kernel_shape: Any = None, pads: Any = None, strides: Any = None,
) -> Tensor:  # fmt: skip
    """Cross-correlation of quantised tensors, quantised."""
    made = conv(_centred(x, x_zero, 1), _centred(w, w_zero, 0), auto_pad=auto_pad, dilations=dilations, group=group,
                kernel_shape=kernel_shape, pads=pads, strides=strides)  # fmt: skip
    channels = (1, -1, *(1,) * (x.ndim - 2))
    if bias is not None:
        made = made + bias.to(float64).reshape(*channels)
    scale = x_scale.to(float64) * w_scale.to(float64)
    return _requantised(made, scale.reshape(*channels) if w_scale.ndim else scale, y_scale, y_zero)
