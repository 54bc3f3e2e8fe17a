"""Elementwise operators, comparisons, casts and constants."""

from __future__ import annotations

from typing import Any

from graphwright.array import bool_, float32, int64
from graphwright.array.sizes import Size, divided
from graphwright.autograd import Tensor, as_tensor, create, top
from graphwright.autograd.named_sizes import traced
from graphwright.models.importing.operators.table import equal, operator
from graphwright.nn import functional

equal(top, """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil cos cosh div eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmod
    ge gt isfinite isinf isnan le lerp lgamma digamma log log10 log1p log2 logaddexp logical_and logical_not logical_or
    logical_xor lt masked_fill maximum minimum mul ne neg reciprocal remainder round rsqrt sigmoid sign sin sinh
    sqrt sub tan tanh trunc where nan_to_num square addcmul addcdiv fmax fmin
    copysign hypot signbit xlogy angle
""")  # fmt: skip
equal(functional, """
    celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu softplus softshrink
    hardshrink softsign tanhshrink logsigmoid threshold prelu
""")  # fmt: skip
operator("special_erf")(top.erf)
operator("log_sigmoid_forward")(lambda x: (functional.logsigmoid(x), None))


@operator("clamp")
def clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """Return x where it is between two bounds, else the nearer one."""
    bounds = [b.tensor(x.dtype) if traced(b) else b for b in (low, high)]
    if any(isinstance(b, Tensor) for b in bounds):
        bounds = [b if b is None or isinstance(b, Tensor) else as_tensor(b) for b in bounds]
    return top.clamp(x, *bounds)


operator("clamp_min")(clamp)
operator("clamp_max")(lambda x, high: clamp(x, None, high))


@operator("pow")
def pow_(x: Any, exponent: Any) -> Tensor:
    """xᵖ, elementwise; for bools, whose only powers in torch are by the numbers 0 and 1, x or true."""
    if isinstance(x, Tensor) and x.dtype is bool_ and isinstance(exponent, bool):
        return x if exponent else top.logical_or(x, True)
    return top.pow(x, exponent)


@operator("rsub")
def rsub(x: Any, other: Any, alpha: Any = 1) -> Tensor:
    """other - alpha·x."""
    return top.sub(as_tensor(other), x, alpha=alpha)


# -- values that stay as they are --------------------------------------------------------------------------------------
@operator("alias", "lift_fresh_copy", "contiguous", "lift_fresh")
def same(x: Tensor, **_: Any) -> Tensor:
    """Return the operand."""
    return x


@operator("detach")
def detach(x: Tensor) -> Tensor:
    """Return the operand without its gradient."""
    return x.detach()


@operator("clone")
def clone(x: Tensor, **_: Any) -> Tensor:
    """Return the operand: a captured graph has no writes, so a copy is the same value."""
    return x


@operator("copy")
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return `source` in the dtype of x, broadcast to its shape."""
    return source.to(x.dtype).expand(x.shape)


@operator("_to_copy")
def to_copy(x: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    """Return x in a dtype."""
    return x if dtype is None else x.to(dtype)


@operator("to.dtype", "to.other", "type_as")
def to(x: Tensor, kind: Any, *_: Any, **__: Any) -> Tensor:
    """Return x in a dtype, given as itself or as that of a tensor."""
    return x.to(kind.dtype if isinstance(kind, Tensor) else kind)


@operator("to.device", "to.dtype_layout")
def to_device(x: Tensor, device: Any = None, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    """Return x in a dtype; a program has one device."""
    return to_copy(x, dtype)


@operator("_assert_tensor_metadata", "_assert_async")
def nothing(*_: Any, **__: Any) -> None:
    """Return None: a check of the capture, which the specs of the program repeat."""


# -- constants ---------------------------------------------------------------------------------------------------------
@operator("arange", "arange.start", "arange.start_step")
def arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None, **_: Any) -> Tensor:
    """start, start + step, ..., below end; of one number, 0 to it."""
    if traced(step) and (count := divided(_size(end) - _size(start), _size(step))) is not None:
        return create.arange(0, step.sizes.size(count), 1, dtype=dtype) * step + start
    if traced(start) or traced(end):  # named sizes are counted in whole numbers
        floats = [type(n) is float and n.is_integer() for n in (start, end, step)]
        start, end, step = (int(n) if whole else n for n, whole in zip((start, end, step), floats, strict=True))
        dtype = float32 if dtype is None and any(floats) else dtype
    return create.arange(start, end, step, dtype=dtype)


def _size(n: Any) -> Size:
    return Size(Size.of(n).terms)


@operator("full", "new_full")
def full(*args: Any, dtype: Any = None, **_: Any) -> Tensor:
    """Return a tensor of one value; `new_full` has the dtype of its first operand."""
    like = args[0] if isinstance(args[0], Tensor) else None
    size, value = args[1:] if like is not None else args
    return _filled(size, value, like.dtype if dtype is None and like is not None else dtype)


def _filled(size: Any, value: Any, dtype: Any) -> Tensor:
    if isinstance(value, Tensor):
        return (value if dtype is None else value.to(dtype)).expand(tuple(size))
    if dtype is None:
        dtype = bool_ if isinstance(value, bool) else int64 if isinstance(value, int) else float32
    return create.full(tuple(size), value, dtype=dtype)


def _constant(value: float) -> Any:
    def made(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return _filled(size, value, float32 if dtype is None else dtype)

    return made


def _constant_like(value: float) -> Any:
    def made(x: Tensor, size: Any = None, *, dtype: Any = None, **_: Any) -> Tensor:
        return _filled(x.shape if size is None else size, value, x.dtype if dtype is None else dtype)

    return made


for _name, _value in (("ones", 1.0), ("zeros", 0.0), ("empty", 0.0)):
    operator(_name)(_constant(_value))
    operator(f"{_name}_like", f"new_{_name}")(_constant_like(_value))


@operator("full_like")
def full_like(x: Tensor, value: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    """Return a tensor of one value with the shape, and by default the dtype, of x."""
    return _filled(x.shape, value, x.dtype if dtype is None else dtype)


@operator("empty_permuted", "empty_strided", "new_empty_strided")
def empty_permuted(*args: Any, dtype: Any = None, **_: Any) -> Tensor:
    """Return zeros of a shape, whose order in memory the plan chooses."""
    like = args[0] if isinstance(args[0], Tensor) else None
    size = args[0 if like is None else 1]
    return _filled(size, 0.0, dtype or (float32 if like is None else like.dtype))


@operator("scalar_tensor", "prims::scalar_tensor")
def scalar_tensor(value: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    """Return a number as a tensor without axes."""
    return _filled((), value, float32 if dtype is None else dtype)


@operator("eye", "eye.m")
def eye(n: int, m: int | None = None, *, dtype: Any = None, **_: Any) -> Tensor:
    """Return the identity matrix."""
    return create.eye(n, m, dtype=dtype)


@operator("linspace.default")
def linspace(start: float, end: float, steps: int, *, dtype: Any = None, **_: Any) -> Tensor:
    """Return `steps` numbers from start to end, both included."""
    return create.linspace(start, end, steps, dtype=dtype)
