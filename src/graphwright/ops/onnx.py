"""The `onnx` field of an op's definition: the op as nodes of ONNX opset 20, built without the onnx library.

The field is the type of a node that takes the same operands ("Relu"), or a function. The function takes one `OnnxUse`,
u, adds nodes with `u(type, *names, **attributes)` and returns the names of the results, or None if ONNX cannot express
this use of the op. Ops without the field are exported as their expansion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from graphwright.array.dtype import DType, float32
from graphwright.array.spec import Dim, Spec

OPSET = 20
OPSETS = (OPSET, 23)
"""Supported opsets, the default first."""
ONNX_DTYPES = {
    **{"float32": 1, "uint8": 2, "int8": 3, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10},
    **{"float64": 11, "bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19},
}
"""Numbers of TensorProto.DataType."""


class NodeWriter(Protocol):
    """The ONNX graph under construction."""

    def node(self, kind: str, inputs: Sequence[str], outputs: int, attributes: Mapping[str, Any]) -> tuple[str, ...]:
        """Add a node and return the names of its results. An empty input name leaves an optional input out."""
        ...

    def constant(self, array: np.ndarray) -> str:
        """Add a constant tensor and return its name."""
        ...

    def size(self, dim: str) -> str:
        """Return the name of an int64 tensor [1] that holds the value of a named size."""
        ...

    def body(
        self, nodes: Sequence[tuple[str, Sequence[str], str]], inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]
    ) -> Any:
        """Return a graph for an attribute of a node, such as the steps of a Scan.

        Args:
            nodes: (type, names of inputs, name of the result) of each node.
            inputs, outputs: specs by name.
        """
        ...


@dataclass(frozen=True, slots=True)
class OnnxUse:
    """One use of an op; calling it adds a node with one result and returns the result's name."""

    nodes: NodeWriter  # the graph that nodes are added to
    names: tuple[str, ...]  # names of the operands
    attrs: Mapping[str, Any]  # attributes of the op
    ins: tuple[Spec, ...]  # of the operands; `outs`: of the results
    outs: tuple[Spec, ...]

    def __call__(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.nodes.node(kind, inputs, 1, attributes)[0]

    def several(self, outputs: int, kind: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """Add a node with several results and return their names."""
        return self.nodes.node(kind, inputs, outputs, attributes)

    def ints(self, *values: int) -> str:
        """Add a constant int64 vector and return its name."""
        return self.nodes.constant(np.array(values, np.int64))

    def ints_scalar(self, value: int) -> str:
        """Add a constant int64 scalar and return its name."""
        return self.nodes.constant(np.array(value, np.int64))

    def scalar(self, value: float, like: Spec | None = None) -> str:
        """Add a constant scalar with the dtype of a spec, by default of the first operand, and return its name."""
        return self.nodes.constant(np.array(value, numpy_dtype((like or self.ins[0]).dtype)))

    def shape(self, dims: Sequence[Dim]) -> str:
        """Add a shape as an int64 vector, with named sizes computed when the model runs, and return its name."""
        if all(isinstance(d, int) for d in dims):
            return self.ints(*(int(d) for d in dims))
        parts = [self.nodes.size(d) if isinstance(d, str) else self.ints(d) for d in dims]
        return self("Concat", *parts, axis=0)

    def cast(self, name: str, dtype: DType) -> str:
        """Add a Cast and return its result's name."""
        return self("Cast", name, to=ONNX_DTYPES[dtype.name])

    def axis(self, given: int, operand: int = 0) -> int:
        """Normalise an axis of an operand to 0..rank-1."""
        return given % len(self.ins[operand].shape)


def numpy_dtype(dtype: DType) -> np.dtype:
    """Return the numpy dtype for a constant of this dtype, which is not bfloat16, as numpy lacks it."""
    return np.dtype(dtype.name)


OnnxRow = Callable[[OnnxUse], "str | tuple[str, ...] | None"]


class WholeNode(NamedTuple):
    """The field `onnx_23` of an op that is a single node in opset 23; `row` is the function that adds this node.

    `same` takes the operands' specs and the attributes of a use; it returns True if the node computes what the op does.
    """

    same: Callable[[Sequence[Spec], Mapping[str, Any]], bool]
    row: OnnxRow


def same_operands(kind: str) -> OnnxRow:
    """Return an `onnx` function that adds one node with the op's operands and without attributes."""
    return lambda u: u(kind, *u.names)


def all_float32(ins: Sequence[Spec], attrs: Mapping[str, Any]) -> bool:
    """Return True if all operands are float32.

    For other dtypes the opset-23 node rounds intermediate results at different points than the op.
    """
    return all(spec.dtype is float32 for spec in ins)
