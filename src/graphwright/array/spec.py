"""Spec: the shape and dtype of a value. A dimension is an int, or a name or text of names that a run binds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import cast, overload

import numpy as np

from graphwright.array.dtype import DType, dtype
from graphwright.array.sizes import Dim, bound, is_dim_name, is_dim_text, names_of
from graphwright.errors import ShapeError, UsageError


class UnboundDim(UsageError):
    """The size of a named dimension was requested before an input bound it."""


def check_dims(
    dims: object, where: str | None = None, is_dim: Callable[[object], bool] = is_dim_name
) -> tuple[Dim, ...]:
    """Return a list or tuple of ints and names as a tuple. Raises: ShapeError for an invalid size or name.

    Args:
        is_dim: which strings are valid, by default names only.
    """
    given = dims if isinstance(dims, list | tuple) else (dims, None)
    found = tuple(int(d) if isinstance(d, int | np.integer) and not isinstance(d, bool) else d for d in given)
    if not all(is_dim(d) if isinstance(d, str) else type(d) is int and 0 <= d < 1 << 63 for d in found):
        expected = "a tuple of ints >= 0 and < 2**63, and names that are Python identifiers"
        raise ShapeError("invalid shape", where=where, expected=expected, got=repr(dims)[:120])
    return cast("tuple[Dim, ...]", found)


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape (ints, names such as `"B"`, and sizes computed from names such as `"B*T"`) and dtype.

    >>> Spec(("B", 8), float32)
    f32[B, 8]
    """

    shape: tuple[Dim, ...]
    dtype: DType

    @property
    def symbolic(self) -> bool:
        """True if a dimension depends on a name."""
        return str in map(type, self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape as ints. Raises: UnboundDim if a dimension is a name."""
        if self.symbolic:
            raise UnboundDim("a named dimension has no size yet", got=repr(self), fix="run or compile with real inputs")
        return cast("tuple[int, ...]", self.shape)

    @property
    def size(self) -> int:
        """Number of elements. Raises: UnboundDim if a dimension is a name."""
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous array of this spec."""
        return self.size * self.dtype.itemsize

    def bind(self, dims: Mapping[str, int]) -> Spec:
        """Replace names by their sizes; names that are not in `dims` are kept. Raises: ShapeError below 0."""
        if not self.symbolic:
            return self
        return Spec(tuple([bound(d, dims) for d in self.shape]), self.dtype)

    def match(self, shape: tuple[int, ...], dims: dict[str, int]) -> bool:
        """Return whether `shape` matches; a name that is not in `dims` matches any size and is added to `dims`."""
        if len(shape) != len(self.shape):
            return False
        return all(
            dims.setdefault(want, have) == have if isinstance(want, str) else want == have
            for want, have in zip(self.shape, shape, strict=True)
        )

    def to_json(self) -> list:
        """Return `[dtype name, [dims]]`."""
        return [self.dtype.name, list(self.shape)]

    @staticmethod
    def from_json(data: list) -> Spec:
        """Return the spec that `to_json` encoded. Raises: ShapeError, DTypeError for an invalid one."""
        return Spec(check_dims(data[1], is_dim=is_dim_text), dtype(data[0]))

    def __repr__(self) -> str:
        kind = self.dtype
        letter = {"float": "f", "int": "i", "uint": "u"}.get(kind.kind)
        name = kind.name if letter is None else f"{'b' if kind.name == 'bfloat16' else ''}{letter}{8 * kind.itemsize}"
        return f"{name}[{', '.join(map(str, self.shape))}]"


def sample_sizes(specs: Iterable[Spec]) -> dict[str, int]:
    """Return a size for each named dimension of specs, to run samples: 3 for the first, one more for each further."""
    names = dict.fromkeys(name for s in specs for d in s.shape for name in names_of(d))
    return {name: 3 + i for i, name in enumerate(names)}


@overload
def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]: ...
@overload
def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]: ...
def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the broadcast shape; a dimension of named size broadcasts only with itself and 1. Raises: ShapeError."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        size: Dim = 1
        for shape in shapes:
            here = shape[axis] if -axis <= len(shape) else 1
            if here == 1 or here == size:
                continue
            if size != 1:
                fix = f"reshape or expand one operand: {' and '.join(map(str, shapes))}"
                where = f"axis {axis}"
                raise ShapeError("shapes do not broadcast", where=where, expected=size, got=here, fix=fix)
            size = here
        result.append(size)
    return tuple(result)
