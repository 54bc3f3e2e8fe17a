"""Complex tensors as pairs of real ones: rotations, products, and Fourier transforms as products with matrices.

Only real tensors are values of a program, so a complex one is two, and its operators have rows of their own. A
transform of n entries takes n² products: exact matrices of any size, a named one too, instead of a fast algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import Any

from graphwright.array import float32, float64
from graphwright.autograd import Tensor, create, top
from graphwright.autograd.named_sizes import traced
from graphwright.models.importing.operators.table import find, operator
from graphwright.ops import call
from graphwright.ops.rules import one_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Complex:
    """A complex tensor: its real and its imaginary part, of one shape."""

    real: Tensor
    imag: Tensor

    @property
    def shape(self) -> Any:
        """The shape of both parts."""
        return self.real.shape


_PARTWISE = """
    view reshape _unsafe_view view_copy expand expand_copy slice cat concat split split_with_sizes chunk alias clone
    lift_fresh_copy contiguous lift_fresh detach flatten unflatten squeeze unsqueeze permute transpose t select stack
    unbind narrow movedim flip roll repeat index index_select gather diagonal tril triu expand_as neg sum mean cumsum
    broadcast_to
"""  # fmt: skip
PARTWISE = frozenset(_PARTWISE.split())
"""Operators that are the same for each part: those that rearrange entries, and sums over axes."""

VALUES = {"add": (0, 1), "sub": (0, 1), "where": (1, 2), "masked_fill": (0, 2), "constant_pad_nd": (0, 2),
          "pad": (0, 3)}  # fmt: skip
"""Operators that are the same for each part, and the numbers of the arguments that have parts, numbers too."""

BILINEAR = ("mul", "matmul", "mm", "bmm")
"""Operators of two operands that are linear in each."""


def find_complex(name: str, overload: str) -> Callable[..., Any] | None:
    """Return the function of an operator's overload for complex operands or results, or None."""
    if name in ROWS:
        return ROWS[name]
    real = find(name, overload)
    if real is None:
        return None
    if name in BILINEAR:
        return partial(_bilinear, real)
    return partial(_partwise, real, VALUES.get(name, ())) if name in PARTWISE or name in VALUES else None


@dataclass(frozen=True, slots=True)
class ComplexKind:
    """A complex dtype, by the dtype of its parts."""

    parts: Any


KINDS = {"complex64": ComplexKind(float32), "complex128": ComplexKind(float64)}


def _part(value: Any, imaginary: bool) -> Any:
    """Return the real or the imaginary part of the complex values in an argument; what is real stays."""
    if isinstance(value, Complex | complex):
        return value.imag if imaginary else value.real
    return [_part(v, imaginary) for v in value] if isinstance(value, tuple | list) else value


def _partwise(real: Callable[..., Any], with_parts: Collection[int], *args: Any, **kwargs: Any) -> Any:
    given = [_both(a) if i in with_parts else a for i, a in enumerate(args)]
    parts = [real(*(_part(a, i) for a in given), **{k: _part(v, i) for k, v in kwargs.items()}) for i in (False, True)]
    return tuple(map(Complex, *parts)) if isinstance(parts[0], tuple) else Complex(*parts)


def _both(value: Any) -> Any:
    """Return a tensor or number as a complex one."""
    if isinstance(value, Tensor):
        return Complex(value, call("full_like", value, value=0.0))
    return complex(value) if isinstance(value, int | float) else value


def _bilinear(real: Callable[..., Any], a: Any, b: Any) -> Complex:
    """Return (a + bi)(c + di) = (ac - bd) + (ad + bc)i, or the shorter form where one operand is real."""
    if not isinstance(a, Complex | complex):
        return Complex(real(a, _part(b, False)), real(a, _part(b, True)))
    if not isinstance(b, Complex | complex):
        return Complex(real(_part(a, False), b), real(_part(a, True), b))
    (ar, ai), (br, bi) = ((_part(v, False), _part(v, True)) for v in (a, b))
    return Complex(real(ar, br) - real(ai, bi), real(ar, bi) + real(ai, br))


def _div(a: Any, b: Any) -> Complex:
    """Return a / b = a·conj(b) / |b|²."""
    if not isinstance(b, Complex | complex):
        return Complex(_part(a, False) / b, _part(a, True) / b)
    br, bi = _part(b, False), _part(b, True)
    size, conjugate = br * br + bi * bi, Complex(br, -bi) if isinstance(b, Complex) else b.conjugate()
    return _div(_bilinear(top.mul, a, conjugate), size)


def _exp(x: Complex) -> Complex:
    return polar(top.exp(x.real), x.imag)


def _cast(x: Tensor | Complex, dtype: Any = None, **_: Any) -> Tensor | Complex:
    """Return x in a dtype; of complex numbers in a real one their real parts, as torch does."""
    if isinstance(dtype, ComplexKind):
        parts = (x.real, x.imag) if isinstance(x, Complex) else (x, call("full_like", x, value=0))
        return Complex(*(part.to(dtype.parts) for part in parts))
    return x if dtype is None or not isinstance(x, Complex) else x.real.to(dtype)


ROWS: dict[str, Callable[..., Any]] = {
    "real": lambda x: x.real, "imag": lambda x: x.imag, "div": _div, "exp": _exp,
    "abs": lambda x: top.hypot(x.real, x.imag), "angle": lambda x: top.atan2(x.imag, x.real),
    "_conj": lambda x: Complex(x.real, -x.imag), "conj_physical": lambda x: Complex(x.real, -x.imag),
    "_to_copy": _cast, "reciprocal": lambda x: _div(1.0, x),
    "_assert_tensor_metadata": lambda *_, **__: None,
    **dict.fromkeys(("resolve_conj", "resolve_neg", "_conj_copy"), lambda x: x),
}  # fmt: skip
"""Operators with a rule of their own."""


def _row(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function for complex operands or results, so that torch does not decompose the operator either."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.update(dict.fromkeys(names, function))
        return operator(*names)(function)

    return enter


@_row("polar")
def polar(size: Tensor, angle: Tensor) -> Complex:
    """size·e^(i·angle)."""
    return Complex(size * top.cos(angle), size * top.sin(angle))


@_row("complex")
def pair(real: Tensor, imag: Tensor) -> Complex:
    """real + i·imag."""
    one_dtype(real.spec, imag.spec)
    return Complex(real, imag)


@_row("view_as_complex", "view_as_complex_copy")
def view_as_complex(x: Tensor) -> Complex:
    """Return [..., 2] as complex numbers."""
    return Complex(x[..., 0], x[..., 1])


@_row("view_as_real", "view_as_real_copy")
def view_as_real(x: Complex) -> Tensor:
    """Return complex numbers as [..., 2]."""
    return top.stack([x.real, x.imag], -1)


# -- Fourier transforms ------------------------------------------------------------------------------------------------
def _matrix(n: Any, columns: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of 2π·i·k / n for i < n and k < columns; products i·k are taken modulo n, as they repeat."""
    kind = float64 if like.dtype is float64 else float32
    turns = create.arange(n).unsqueeze(1) * create.arange(columns).unsqueeze(0) % n
    angle = turns.to(kind) * (2 * pi) / (n.tensor(kind) if traced(n) else n)
    return top.cos(angle), top.sin(angle)


def _scaled(x: Any, sizes: Sequence[Any], normalization: int) -> Any:
    """Divide by the root of the number of entries (1) or by it (2)."""
    kind = (x.real if isinstance(x, Complex) else x).dtype
    for part in sizes if normalization else ():
        n = part.tensor(kind) if traced(part) else part
        n = n if normalization == 2 else top.sqrt(n) if traced(part) else n**0.5
        x = Complex(x.real / n, x.imag / n) if isinstance(x, Complex) else x / n
    return x


def _along(x: Complex, axis: int, forward: bool) -> Complex:
    """Return Σ_t x_t e^(∓2πi·tk/n) along an axis of n entries."""
    real, imag = x.real.movedim(axis, -1), x.imag.movedim(axis, -1)
    n = real.shape[-1]
    cos, sin = _matrix(n, n, real)
    sin = sin if forward else -sin
    made = real @ cos + imag @ sin, imag @ cos - real @ sin
    return Complex(*(part.movedim(-1, axis) for part in made))


@_row("_fft_c2c")
def fourier(x: Complex, dim: Sequence[int], normalization: int, forward: bool) -> Complex:
    """Discrete Fourier transform over axes, or its inverse."""
    sizes = [x.shape[axis] for axis in dim]
    x = _both(x)
    for axis in dim:
        x = _along(x, axis, forward)
    return _scaled(x, sizes, normalization)


@_row("_fft_r2c")
def fourier_of_real(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Complex:
    """Discrete Fourier transform of real values; one-sided: the first n // 2 + 1 entries of the last of the axes."""
    *others, last = dim
    n = x.shape[last]
    real = x.movedim(last, -1)
    cos, sin = _matrix(n, n // 2 + 1 if onesided else n, real)
    made = Complex(*(part.movedim(-1, last) for part in (real @ cos, -(real @ sin))))
    made = fourier(made, others, 0, True)
    return _scaled(made, [x.shape[axis] for axis in dim], normalization)


@_row("_fft_c2r")
def fourier_to_real(x: Complex, dim: Sequence[int], normalization: int, size: Any) -> Tensor:
    """Inverse transform to `size` real values, of the first half of the entries along the last of the axes."""
    *others, last = dim
    sizes = [*(x.shape[axis] for axis in others), size]
    x = fourier(x, others, 0, False)
    real, imag = x.real.movedim(last, -1), x.imag.movedim(last, -1)
    cos, sin = (part.transpose(0, 1)[: real.shape[-1]] for part in _matrix(size, size, real))
    k = create.arange(real.shape[-1])
    alone = top.logical_or(k == 0, k * 2 == size)  # all other entries stand for two
    twice = top.where(alone, 1.0, 2.0).to(real.dtype)
    made = (real * twice) @ cos - (imag * twice) @ sin
    return _scaled(made.movedim(-1, last), sizes, normalization)
