"""Builder: write a program down op by op, by hand or from an architecture's data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.array import Spec, dtype, float32
from graphwright.autograd import Parameter, Variable
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import OPS
from graphwright.program.errors import ForeignNode, NameTaken
from graphwright.program.kinds import CONST, INPUT, PARAM, STATE
from graphwright.program.op_graph import Value
from graphwright.program.program import Program
from graphwright.program.weights import as_array


class _Built(Value):
    """A value that knows what it is of: handles of two programs may be the same number."""

    program: Program


class Builder:
    """Collects nodes and gives them out as a `Program`; one method per op, named like it.

    >>> b = Builder()
    >>> x = b.input("x", ("B", 2))
    >>> w = b.param("w", [[1.0], [2.0]])
    >>> b.output(b.tanh(b.matmul(x, w), name="act"), name="y")
    >>> b.build().spec("act")
    f32[B, 1]
    """

    def __init__(self, name: str = "program") -> None:
        self._root, self._prefix = self, ()
        self._building = Program(name)

    @property
    def _program(self) -> Program:
        return self._root._building

    def input(self, name: str, dims: Sequence[int | str], dtype: object = float32) -> Value:
        """An input; dimensions are sizes or names. Raises: NameTaken."""
        return self._source(INPUT, name, Spec(tuple(dims), _named(dtype)), {})

    def param(self, name: str, value: Any, *, key: str | None = None, trainable: bool = True) -> Value:
        """A trained tensor with its first value, or a `Parameter` that is shared with its owner."""
        name = self._full(name)
        variable = value if isinstance(value, Variable) else Parameter(as_array(value), trainable, key or name)
        return self._stored(PARAM, name, variable, {"key": key or name, "trainable": trainable})

    def const(self, name: str, value: Any) -> Value:
        """A fixed tensor."""
        name = self._full(name)
        return self._stored(CONST, name, Variable(as_array(value), name=name), {"key": name})

    def state(self, name: str, value: Any) -> Value:
        """A tensor carried from step to step, with its first value."""
        name = self._full(name)
        return self._stored(STATE, name, Variable(as_array(value), name=name), {"key": name})

    def op(self, op: str, *inputs: Value | NodeId, name: str | None = None, **attrs: Any) -> Any:
        """Add an op; one value, or a tuple of values for an op with several results.

        Raises: UnknownOp, ForeignNode, ShapeError, DTypeError, each with the node's path.
        """
        p = self._program
        operands = [self._mine(i) for i in inputs]
        label = p.free_name(self._full(op)) if name is None else self._full(name)
        p.check_name(label)
        node = p.add_op(op, operands, attrs, label)
        values = tuple(self._value(node, port) for port in range(len(p.specs(node))))
        return values[0] if len(values) == 1 else values

    def carry(self, src: Value | NodeId, state: Value | NodeId) -> None:
        """Let a state (or param) have the value of `src` in the next step."""
        p, target = self._program, self._mine(state)
        p.add_write(target, self._mine(src), p.free_name(f"{p.path(target)}.next"))

    def output(self, value: Value | NodeId, name: str) -> None:
        """Declare a result. Raises: NameTaken."""
        if name in self._program.output_names():
            raise NameTaken("an output of this name is declared", where=name)
        self._program.set_output(name, self._mine(value))

    def spec(self, value: Value | NodeId) -> Spec:
        """Spec of a value added so far."""
        return self._program.spec(self._mine(value))

    def scope(self, name: str) -> Builder:
        """A builder of the same program whose names start with `name.`."""
        inner = Builder.__new__(Builder)
        inner._root, inner._prefix = self._root, (*self._prefix, name)
        return inner

    def build(self) -> Program:
        """The program; the builder starts a new, empty one. Raises: UsageError without outputs."""
        if not self._program.outputs() and not self._program.writes():
            raise UsageError("a program needs an output", fix="b.output(value, name='y')")
        program, self._root._building = self._program, Program(self._program.name)
        return program

    def __getattr__(self, name: str) -> Any:
        if name not in OPS:
            raise AttributeError(f"Builder has no method and there is no op {name!r}")

        def add(*inputs: Value | NodeId, name: str | None = None, _op: str = name, **attrs: Any) -> Any:
            return self.op(_op, *inputs, name=name, **attrs)

        return add

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPS]

    def _full(self, name: str) -> str:
        return ".".join((*self._prefix, name))

    def _mine(self, ref: Value | NodeId) -> Value:
        value = ref if isinstance(ref, Value) else Value(ref)
        foreign = isinstance(ref, _Built) and ref.program is not self._program
        if foreign or not isinstance(value.node, NodeId) or value.node not in self._program.graph:
            raise ForeignNode("not a node of this builder", got=repr(ref))
        return value

    def _source(self, kind: str, name: str, spec: Spec, attrs: dict[str, Any]) -> Value:
        name = self._full(name)
        self._program.check_name(name)
        return self._value(self._program.add_source(kind, name, spec, attrs))

    def _stored(self, kind: str, name: str, variable: Variable, attrs: dict[str, Any]) -> Value:
        self._program.check_name(name)
        self._program.weights.add(attrs["key"], variable)
        return self._value(self._program.add_source(kind, name, variable.spec, attrs))

    def _value(self, node: NodeId, port: int = 0) -> Value:
        made = _Built(node, port)
        made.program = self._program
        return made


def _named(kind: object) -> Any:
    return dtype(kind)
