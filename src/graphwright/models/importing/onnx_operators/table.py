"""The table of ONNX operators: for each, the function of tensors that computes the same.

A row has the name of an operator of the domain `ai.onnx` and a function. The function takes the operator's inputs by
position (None for an input that is left out) and its attributes by name. It returns a tensor, or a tuple for several
results. While a graph is lowered, the function is traced: what it computes becomes nodes of the program.

Two keyword arguments are given to functions that have them: `opset`, the version of the operator set, and `outputs`,
the number of results that the graph names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from graphwright.array import DType
from graphwright.array.dtype import DTYPES
from graphwright.autograd import Tensor
from graphwright.errors import OutOfMemory, UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])

MOST_ENTRIES = 1 << 30
"""Entries of a tensor above which a size in a file counts as damaged or hostile."""
_GIVEN = ("opset", "outputs")


class NotExpressible(UsageError):
    """A use of an operator that the table cannot express, although it has the operator."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One row of the table.

    Attributes:
        function: computes the operator.
        known: positions of inputs that the function takes as numpy arrays, because shapes follow from their values;
            -1 stands for all.
        fixed: positions of inputs that training never changes, such as running statistics.
        numbers: True to pass inputs without axes whose value is known as Python numbers.
        attributes: names of the attributes.
        given: which of `opset` and `outputs` the function takes.
    """

    function: Callable[..., Any]
    known: tuple[int, ...]
    fixed: tuple[int, ...]
    numbers: bool
    attributes: frozenset[str]
    given: tuple[str, ...]


OPERATORS: dict[str, OperatorRow] = {}


def operator(
    *names: str, known: Sequence[int] = (), fixed: Sequence[int] = (), numbers: bool = False
) -> Callable[[_Function], _Function]:
    """Enter a function under names of operators; see `OperatorRow` for the other arguments."""

    def enter(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        given = tuple(n for n in _GIVEN if n in named)
        row = OperatorRow(function, tuple(known), tuple(fixed), numbers, frozenset(named) - set(given), given)
        for name in names:
            assert name not in OPERATORS, f"two rows of {name}"
            OPERATORS[name] = row
        return function

    return enter


def equal(names: str, home: Any, **options: Any) -> None:
    """Enter operators without attributes whose function in `home` has their name in lower case, or after a colon."""
    for entry in names.split():
        name, _, other = entry.partition(":")
        function = getattr(home, other or name.lower())
        operator(name, **options)(_without_attributes(function))


def _without_attributes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: function(*inputs)


# -- what rows share ---------------------------------------------------------------------------------------------------
def dtype_of(number: int) -> DType:
    """Return the dtype with a number of `onnx.TensorProto.DataType`. Raises: NotExpressible."""
    if number not in _BY_NUMBER:
        raise NotExpressible("tensors of this ONNX data type cannot be imported", got=type_name(number),
                             expected=", ".join(DTYPES))  # fmt: skip
    return _BY_NUMBER[number]


_BY_NUMBER = {d.onnx: d for d in DTYPES.values()}


def type_name(number: int) -> str:
    """Return the name of an ONNX data type."""
    from onnx import TensorProto

    return TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else str(number)


def bounded(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return a shape as a tuple. Raises: OutOfMemory for one that no network has."""
    count = prod(n for n in shape if type(n) is int)
    if count > MOST_ENTRIES:
        raise OutOfMemory("a shape in the file is too large", expected=f"at most {MOST_ENTRIES} entries", got=count)
    return tuple(shape)


def ints(values: Any) -> list[Any]:
    """Return known values, row-major, as a list of ints and named sizes."""
    flat = np.asarray(values).reshape(-1)
    return list(flat) if flat.dtype == object else [int(v) for v in flat]


def fixed_sizes(x: Tensor, axes: Sequence[int], why: str) -> tuple[int, ...]:
    """Return the sizes of axes as ints. Raises: NotExpressible if one is named."""
    sizes = [x.spec.shape[axis] for axis in axes]
    if any(isinstance(n, str) for n in sizes):
        raise NotExpressible(f"{why} needs fixed sizes", expected="ints", got=x.spec,
                             fix="give the sizes of the inputs as ints in sizes=")  # fmt: skip
    return tuple(int(n) for n in sizes)


def text(value: Any) -> str:
    """Return an attribute that is a string."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
