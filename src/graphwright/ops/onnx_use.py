"""What rows of the ONNX table are given: one use of an op, and where nodes are written. Plain data, no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from graphwright.array.dtype import DType
from graphwright.array.spec import Dim, Spec

ONNX_DTYPES = {
    **{"float32": 1, "uint8": 2, "int8": 3, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10},
    **{"float64": 11, "bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19},
}
"""Numbers of TensorProto.DataType."""


class Nodes(Protocol):
    """What rows write into."""

    def node(self, kind: str, inputs: Sequence[str], outputs: int, attributes: Mapping[str, Any]) -> tuple[str, ...]:
        """Add a node; names of its results. An empty input name leaves an optional input out."""
        ...

    def constant(self, array: np.ndarray) -> str:
        """The name of a tensor of fixed values."""
        ...

    def size(self, dim: str) -> str:
        """The name of an int64 [1] that holds a named size."""
        ...


@dataclass(frozen=True, slots=True)
class Use:
    """One use of an op.

    Attributes:
        nodes: written into.
        names: of the operands.
        attrs: of the op.
        ins, outs: specs of operands and results.
    """

    nodes: Nodes
    names: tuple[str, ...]
    attrs: Mapping[str, Any]
    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]

    def __call__(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.nodes.node(kind, inputs, 1, attributes)[0]

    def several(self, outputs: int, kind: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """A node of several results."""
        return self.nodes.node(kind, inputs, outputs, attributes)

    def ints(self, *values: int) -> str:
        """A vector of fixed int64."""
        return self.nodes.constant(np.array(values, np.int64))

    def ints_scalar(self, value: int) -> str:
        """A fixed int64 without axes."""
        return self.nodes.constant(np.array(value, np.int64))

    def scalar(self, value: float, like: Spec | None = None) -> str:
        """A number of the dtype of a spec, by default of the first operand."""
        return self.nodes.constant(np.array(value, numpy_dtype((like or self.ins[0]).dtype)))

    def shape(self, dims: Sequence[Dim]) -> str:
        """A shape as a vector, named sizes looked up."""
        if all(isinstance(d, int) for d in dims):
            return self.ints(*(int(d) for d in dims))
        parts = [self.nodes.size(d) if isinstance(d, str) else self.ints(d) for d in dims]
        return self("Concat", *parts, axis=0)

    def cast(self, name: str, dtype: DType) -> str:
        """A value in another dtype."""
        return self("Cast", name, to=ONNX_DTYPES[dtype.name])

    def axis(self, given: int, operand: int = 0) -> int:
        """A possibly negative axis of an operand as 0..rank-1."""
        return given % len(self.ins[operand].shape)


def numpy_dtype(dtype: DType) -> np.dtype:
    """The dtype of a constant; bfloat16 has none in numpy and none is written."""
    return np.dtype(dtype.name)
