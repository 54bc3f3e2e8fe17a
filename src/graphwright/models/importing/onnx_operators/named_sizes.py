"""Operators on known integers of which some are named sizes: arrays of objects, computed entry by entry."""

from __future__ import annotations

import operator as python
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from graphwright.models.importing.onnx_operators.table import ints

SIZE_OPERATORS: dict[str, Callable[..., Any]] = {}


def _entries(values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    made = np.empty(len(values), object)
    for i, value in enumerate(values):
        made[i] = value
    return made.reshape(shape)


def _pointwise(name: str, run: Callable[..., Any]) -> None:
    def over(*arrays: np.ndarray, **_: Any) -> np.ndarray:
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
        columns = [np.broadcast_to(a, shape).reshape(-1) for a in arrays]
        return _entries([run(*(c[i] for c in columns)) for i in range(prod(shape))], shape)

    SIZE_OPERATORS[name] = over


for _name, _run in (
    ("Add", python.add), ("Sub", python.sub), ("Mul", python.mul), ("Div", python.floordiv), ("Mod", python.mod),
    ("Neg", python.neg), ("Abs", abs), ("Max", max), ("Min", min), ("Equal", python.eq), ("Less", python.lt),
    ("Greater", python.gt), ("LessOrEqual", python.le), ("GreaterOrEqual", python.ge), ("Identity", lambda v: v),
    ("Where", lambda c, a, b: a if c else b),
):  # fmt: skip
    _pointwise(_name, _run)


def _entered(function: Callable[..., Any]) -> Callable[..., Any]:
    SIZE_OPERATORS["".join(part.title() for part in function.__name__.strip("_").split("_"))] = function
    return function


@_entered
def _cast(x: np.ndarray, *, to: int) -> Any:
    return x if to in (6, 7) else NotImplemented  # int32 and int64


@_entered
def _gather(x: np.ndarray, ids: np.ndarray, *, axis: int = 0) -> np.ndarray:
    return np.asarray(np.take(x, ids.astype(np.int64), axis), object)


@_entered
def _concat(*parts: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate(parts, axis)


@_entered
def _unsqueeze(x: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.expand_dims(x, tuple(ints(at)))


@_entered
def _squeeze(x: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
    return np.squeeze(x, None if at is None else tuple(ints(at)))


@_entered
def _reshape(x: np.ndarray, shape: np.ndarray, **_: Any) -> np.ndarray:
    return x.reshape(ints(shape))


@_entered
def _slice(
    x: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None, steps: np.ndarray | None = None
) -> np.ndarray:
    first, last, by = ints(starts)[0], ints(ends)[0], 1 if steps is None else ints(steps)[0]
    if x.ndim != 1 or any(type(n) is not int for n in (first, last, by)):
        return NotImplemented
    return x[first : None if by < 0 and last <= -len(x) - 1 else last : by]


@_entered
def _split(x: np.ndarray, sizes: np.ndarray | None = None, *, axis: int = 0, outputs: int, **_: Any) -> Any:
    if sizes is None:
        return tuple(np.split(x, outputs, axis))
    return tuple(np.split(x, np.cumsum(ints(sizes))[:-1], axis))


@_entered
def _reduce_prod(x: np.ndarray, at: np.ndarray | None = None, *, keepdims: int = 1, **_: Any) -> Any:
    return _entries([prod(x.reshape(-1))], (1,) * x.ndim if keepdims else ()) if x.ndim == 1 else NotImplemented


@_entered
def _reduce_sum(x: np.ndarray, at: np.ndarray | None = None, *, keepdims: int = 1, **_: Any) -> Any:
    return _entries([sum(x.reshape(-1))], (1,) * x.ndim if keepdims else ()) if x.ndim == 1 else NotImplemented


@_entered
def _expand(x: np.ndarray, shape: np.ndarray) -> Any:
    wanted = ints(shape)
    if any(type(n) is not int for n in wanted) or prod(wanted) > 1 << 12:
        return NotImplemented
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(wanted)))
