"""Lowering of an ONNX graph: run it on symbols, each operator by its row of the table, so that a trace records it.

Values of a run are tensors, lists of tensors (sequences), and arrays of objects: known integers of which some are named
sizes. What follows from known values alone is computed at once and is no node of the program.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from graphwright.array import DType, NDArray
from graphwright.autograd import Parameter, Tensor, as_tensor, stack
from graphwright.autograd.recorder import active_recorder, labelled, scope
from graphwright.errors import GraphwrightError
from graphwright.models.errors import OnnxFileError, UnsupportedOperator
from graphwright.models.importing.onnx_operators import OPERATORS, NotExpressible
from graphwright.models.importing.onnx_operators.indexing import known
from graphwright.models.importing.onnx_operators.named_sizes import SIZE_OPERATORS
from graphwright.models.importing.onnx_operators.shapes import known_sizes
from graphwright.models.importing.onnx_operators.table import OperatorRow

_LARGEST_FOLD = 1 << 14
"""Entries of known operands above which an operator is recorded instead of computed."""
_FOLDED_BYTES = 1 << 28
"""Bytes of results computed at import, above which operators are recorded instead."""
_ODD = re.compile(r"[\x00-\x20*\[{}\ud800-\udfff]|->")


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One node of a graph; an input or output that is left out has the name ""."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A graph that was read and checked.

    Attributes:
        opset: version of the operator set.
        inputs: names of the inputs that are fed.
        tensors: the initializers by name.
        trained: names of the tensors that are weights; None if the file does not say.
    """

    opset: int
    nodes: tuple[OnnxNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, NDArray]
    trained: frozenset[str] | None


@dataclass(eq=False)
class LoweredGraph:
    """A graph as a function of tensors, in the order of its inputs, that returns the outputs by name."""

    graph: OnnxGraph
    stored: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = self._weights()
        for name, array in self.graph.tensors.items():
            label = clean(name)
            self.stored[name] = Parameter(array, True, label) if name in weights else Tensor(array, name=label)
            if name in weights:
                self.stored[name].shared = True  # pyright: ignore[reportAttributeAccessIssue]  # a Variable

    def _weights(self) -> set[str]:
        """Return the names of the initializers that are trained: those of floats that some operator may train."""
        if self.graph.trained is not None:
            return set(self.graph.trained & self.graph.tensors.keys())
        floats = {n for n, array in self.graph.tensors.items() if array.dtype.is_float and array.shape}
        used = {*self.graph.outputs}
        for node in self.graph.nodes:
            row = OPERATORS[node.kind]
            still = {*row.known, *row.fixed}
            used |= {name for i, name in enumerate(node.inputs) if i not in still}
        return floats & used

    def __call__(self, *inputs: Tensor) -> dict[str, Any]:
        """Run the graph; what it computes is recorded if a trace is active."""
        values: dict[str, Any] = {**self.stored, **dict(zip(self.graph.inputs, inputs, strict=True))}
        folded = 0
        for node in self.graph.nodes:
            path = path_of(node)
            token = scope.set(path)
            try:
                results = self._run(node, [values[n] if n else None for n in node.inputs], folded < _FOLDED_BYTES)
            except NotExpressible as error:
                raise UnsupportedOperator(error.what, where=f"{'.'.join(path)} ({node.kind})", expected=error.expected,
                                          got=error.got, fix=error.fix,
                                          operators={node.kind: (".".join(path),)}) from error  # fmt: skip
            except GraphwrightError as error:
                if error.where is None:
                    error.where = f"{'.'.join(path)} ({node.kind})"
                else:
                    error.add_note(f"at {'.'.join(path)} ({node.kind})")
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                got = f"{type(error).__name__}: {error}"[:300]
                raise OnnxFileError("the operator does not fit its operands", where=f"{'.'.join(path)} ({node.kind})",
                                    got=got) from error  # fmt: skip
            finally:
                scope.reset(token)
            for name, value in zip(node.outputs, results, strict=False):
                if isinstance(value, Tensor):
                    folded += value.data.nbytes if isinstance(value.data, NDArray) and not value.is_variable else 0
                    _name(value, path)
                if name:
                    values[name] = value
        return {name: _as_output(name, values[name]) for name in self.graph.outputs}

    def _run(self, node: OnnxNode, operands: list[Any], fold: bool) -> Sequence[Any]:
        row = OPERATORS[node.kind]
        given = {"opset": self.graph.opset, "outputs": sum(map(bool, node.outputs)) if "" not in node.outputs
                 else len(node.outputs)}  # fmt: skip
        options = {**node.attributes, **{n: given[n] for n in row.given}}
        if any(_named(v) for v in operands):
            made = self._sizes(node, operands, {**node.attributes, "outputs": given["outputs"]})
            if made is not NotImplemented:
                return tuple(map(_resolved_sizes, made)) if isinstance(made, tuple) else (_resolved_sizes(made),)
        constant = all(v is None or (isinstance(v, Tensor) and known(v)) for v in operands)
        if constant and (not fold or sum(prod(v.shape) for v in operands if v is not None) > _LARGEST_FOLD):
            operands = [v if v is None or i in row.known else _recorded(v) for i, v in enumerate(operands)]
        kinds = {v.dtype for v in operands if isinstance(v, Tensor) and not (known(v) and not v.ndim)}
        result = row.function(*(_operand(row, i, v, kinds) for i, v in enumerate(operands)), **options)
        return result if isinstance(result, tuple) else (result,)

    def _sizes(self, node: OnnxNode, operands: list[Any], options: dict[str, Any]) -> Any:
        """Compute an operator on known integers of which some are named sizes; NotImplemented if that is impossible."""
        run = SIZE_OPERATORS.get(node.kind)
        if run is None or not all(v is None or _named(v) or (isinstance(v, Tensor) and known(v)) for v in operands):
            return NotImplemented
        arrays = [v if v is None or _named(v) else v.numpy().astype(object) for v in operands]
        wanted = run.__code__.co_varnames
        return run(*arrays, **{n: v for n, v in options.items() if n != "outputs" or "outputs" in wanted})


def _named(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _resolved_sizes(value: np.ndarray) -> Any:
    """Return an array of objects as a tensor if none of them is a named size."""
    entries = list(value.reshape(-1))
    if all(isinstance(v, bool | np.bool_) for v in entries):
        return as_tensor(np.array(entries, bool).reshape(value.shape))
    return known_sizes([int(v) if isinstance(v, np.integer) else v for v in entries], value.shape)


def _operand(row: OperatorRow, position: int, value: Any, kinds: Collection[DType]) -> Any:
    """Return an operand as the function of a row takes it; `kinds`: dtypes of the operands that are not numbers."""
    if value is None or isinstance(value, list):
        return value
    if position in row.known:
        if _named(value):
            return value
        if not known(value) and not value.is_variable:
            raise NotExpressible("a shape or an option depends on values that only a run knows",
                                 expected=f"input {position} known at import", got=value.spec,
                                 fix="export the network with this input constant")  # fmt: skip
        return Tensor(value.data).numpy()
    if _named(value):
        return value.item() if row.numbers and not value.ndim else _size_tensor(value)
    number = row.numbers and known(value) and not value.ndim and value.dtype in kinds
    return value.item() if number and value.dtype.kind in ("float", "int") else value


def _size_tensor(values: np.ndarray) -> Tensor:
    """Return known integers with named sizes as a tensor that a run computes."""
    parts = [v.tensor() if type(v) is not int else as_tensor(np.array(v, np.int64)) for v in values.reshape(-1)]
    return stack(parts, 0).reshape(*values.shape)


def _recorded(value: Tensor) -> Tensor:
    """Return a known tensor as a value of the trace, so that what follows from it is recorded."""
    recorder = active_recorder.get()
    return value if recorder is None else Tensor(recorder.resolve(value))


def _as_output(name: str, value: Any) -> Any:
    if isinstance(value, list):
        raise UnsupportedOperator("an output is a sequence of tensors", where=name, expected="a tensor",
                                  operators={"sequence output": (name,)})  # fmt: skip
    return _size_tensor(value) if _named(value) else value


# -- names -------------------------------------------------------------------------------------------------------------
def clean(name: str) -> str:
    """Return a name of the file as the path of a node: without characters that paths cannot have."""
    return ".".join(_ODD.sub("_", part) for part in name[:4000].split(".") if part) or "unnamed"


def path_of(node: OnnxNode) -> tuple[str, ...]:
    """Return the path of a node: its name, split at `/` and `.`; without a name that of its first output."""
    name = node.name or next((n for n in node.outputs if n), node.kind)
    parts = [part for part in re.split(r"[/.]", name[:4000]) if part]
    return tuple(_ODD.sub("_", part) for part in parts) or (node.kind,)


def _name(value: Tensor, path: tuple[str, ...]) -> None:
    """Give the node of a result, if it was recorded for the node of this path, that path."""
    recorder = active_recorder.get()
    if recorder is None or not value.symbolic or not recorder.path(value.data).startswith(".".join(path) + "."):  # pyright: ignore[reportArgumentType]  # a symbol
        return
    token = scope.set(path[:-1])
    try:
        labelled(value, path[-1])
    finally:
        scope.reset(token)
