"""Build programs: op by op with a Builder, or by tracing a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graphwright.array import Spec, float32
from graphwright.array import dtype as as_dtype
from graphwright.array.spec import check_dims
from graphwright.autograd import Parameter, Variable
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import OPS
from graphwright.patterns import Pattern
from graphwright.program.errors import ForeignNode, NameTaken
from graphwright.program.kinds import CONST, INPUT, PARAM, PATTERN, STATE
from graphwright.program.named_sizes import try_other_sizes
from graphwright.program.op_graph import Value
from graphwright.program.patterns import PatternVariable, adopt, adopt_all, check_free
from graphwright.program.primitives import add_assign, add_op, add_source, set_output
from graphwright.program.program import Program
from graphwright.program.recorder import TraceRecorder, record_into
from graphwright.program.residual_sums import join_residuals
from graphwright.program.traced_arguments import specs_of
from graphwright.program.weights import add_weight, as_array


def new_program(name: str) -> Program:
    """Return a program without nodes."""
    return Program(name)


class _Built(Value):
    """A value that also stores its program, because equal handles may occur in different programs."""

    program: Program


class Builder:
    """Builder of a new `Program`, with one method per op, named after the op.

    >>> b = Builder()
    >>> x = b.input("x", ("B", 2))
    >>> w = b.param("w", [[1.0], [2.0]])
    >>> b.output(b.tanh(b.matmul(x, w), name="act"), name="y")
    >>> b.build().spec("act")
    f32[B, 1]
    """

    def __init__(self, name: str = "program") -> None:
        self._root, self._prefix = self, ()
        self._building = new_program(name)

    @property
    def _program(self) -> Program:
        return self._root._building

    def input(self, name: str, dims: Sequence[int | str], dtype: object = float32) -> Value:
        """Add an input; each of `dims` is an int, or a str as a named size. Raises: NameTaken, ShapeError."""
        name = self._full(name)
        self._program.check_name(name)
        return self._value(add_source(self._program, INPUT, name, Spec(check_dims(dims, name), as_dtype(dtype)), {}))

    def param(self, name: str, value: Any, *, key: str | None = None, trainable: bool = True) -> Value:
        """Add a param by its initial value, or a `Parameter` to share; `key`: checkpoint key, by default the name."""
        name = self._full(name)
        variable = value if isinstance(value, Variable) else Parameter(as_array(value), trainable, key or name)
        return self._stored(PARAM, name, variable, {"key": key or name, "trainable": trainable})

    def const(self, name: str, value: Any) -> Value:
        """Add a fixed tensor, by its value or as a `Variable` whose array is used without a copy."""
        return self._fixed(CONST, self._full(name), value)

    def state(self, name: str, value: Any) -> Value:
        """Add a loop-carried tensor with its initial value; `assign` sets its next value."""
        return self._fixed(STATE, self._full(name), value)

    def op(self, op: str, *inputs: Value | NodeId, name: str | None = None, **attrs: Any) -> Any:
        """Add an op; returns a value, or a tuple of values for an op with several results.

        Raises: UnknownOp, ForeignNode, ShapeError, DTypeError, each with the node's path.
        """
        p = self._program
        operands = [self._mine(i) for i in inputs]
        label = p.free_name(self._full(op)) if name is None else self._full(name)
        p.check_name(label)
        node = add_op(p, op, operands, attrs, label)
        values = tuple(self._value(node, port) for port in range(len(p.specs(node))))
        return values[0] if len(values) == 1 else values

    def assign(self, state: Value | NodeId, value: Value | NodeId) -> None:
        """Set the value that a state (or param) will have in the next step."""
        p, target = self._program, self._mine(state)
        add_assign(p, target, self._mine(value), p.free_name(f"{p.path(target)}.next"))

    def pattern(self, name: str, pattern: Pattern) -> Value:
        """Add the table of an attention pattern, which belongs to the program from now on.

        Raises: UsageError if the pattern belongs to another program.
        """
        name = self._full(name)
        check_free(pattern, self._program, name)
        variable = PatternVariable(pattern, name)
        made = self._stored(PATTERN, name, variable, {"key": name})
        adopt(self._program, variable)
        return made

    def output(self, value: Value | NodeId, name: str) -> None:
        """Declare an output. Raises: NameTaken."""
        if name in self._program.output_names():
            raise NameTaken("another output has this name", where=name)
        set_output(self._program, name, self._mine(value))

    def spec(self, value: Value | NodeId) -> Spec:
        """Return the spec of a value."""
        return self._program.spec(self._mine(value))

    def scope(self, name: str) -> Builder:
        """Return a builder of the same program that prefixes names with `name.`."""
        inner = Builder.__new__(Builder)
        inner._root, inner._prefix = self._root, (*self._prefix, name)
        return inner

    def build(self) -> Program:
        """Return the program and start a new, empty one. Raises: UsageError if nothing is output or assigned."""
        if not self._program.outputs() and not self._program.assigns():
            raise UsageError("the program has no output and assigns no state", fix="b.output(value, name='y')")
        program, self._root._building = self._program, new_program(self._program.name)
        return program

    def __getattr__(self, name: str) -> Any:
        if name not in OPS:
            raise AttributeError(f"Builder has no method {name!r}, and no op has this name")

        return partial(self.op, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPS]

    def _full(self, name: str) -> str:
        return ".".join((*self._prefix, name))

    def _mine(self, ref: Value | NodeId) -> Value:
        value = ref if isinstance(ref, Value) else Value(ref)
        foreign = isinstance(ref, _Built) and ref.program is not self._program
        if foreign or not isinstance(value.node, NodeId) or value.node not in self._program.graph:
            expected = "a value that this builder returned since the last build()"
            raise ForeignNode("not a value of the program that is being built", expected=expected, got=repr(ref))
        return value

    def _fixed(self, kind: str, name: str, value: Any) -> Value:
        variable = value if isinstance(value, Variable) else Variable(as_array(value), name=name)
        return self._stored(kind, name, variable, {"key": name})

    def _stored(self, kind: str, name: str, variable: Variable, attrs: dict[str, Any]) -> Value:
        self._program.check_name(name)
        add_weight(self._program.weights, attrs["key"], variable)
        return self._value(add_source(self._program, kind, name, variable.spec, attrs))

    def _value(self, node: NodeId, port: int = 0) -> Value:
        made = _Built(node, port)
        made.program = self._program
        return made


def trace(
    fn: Callable[..., Any], *examples: Any, names: tuple[str, ...] | None = None,
    sizes: Mapping[str, Sequence[int | str | None]] | None = None, **named: Any,
) -> Program:  # fmt: skip
    """Run `fn` on symbols with the specs of the examples, and return the recorded program.

    Args:
        fn: takes tensors; returns a tensor, or tuples, lists and dicts of tensors, or None if it only updates state.
        examples: tensors, arrays or numbers, of which only shapes and dtypes matter; constants, which are None, bools,
            strings and other objects; or tuples, lists and dicts of these, such as the states of an LSTM, with inputs
            named `<argument>.<index or key>`.
        named: examples of arguments that are passed by name.
        names: input names; by default the parameter names of the function, or of a module's `forward`.
        sizes: dict from input name to its shape with named sizes, such as `{"x": ("B", "T", 32)}`; None is the size of
            the example. A named size stays variable and is at least 1. The code sees an int that may be computed with;
            `fn` is traced again for each outcome of comparisons of sizes.
    Returns: a Program with the examples as inputs and the outputs `out`, `out_1`, ... or the dict's keys; nested
        results are named like `out_1.0.1`. A residual sum x + f(x) is a junction, named `<module>.out` or `.mid`.
    Raises: TraceError if the code needs the concrete value of a symbol, as `if x > 0` does, or is valid for one value
        of a named size only; UsageError for `sizes` that do not match the examples.
    """
    specs = tuple(map(specs_of, examples)), {name: specs_of(example) for name, example in named.items()}
    program, recorder, _ = record(fn, *specs, names, sizes, stops=True)
    backward = (recorder.program.path(n) for n in recorder.recomputed.backward)
    join_residuals(program, set(map(program.node, backward)))
    adopt_all(program)
    return program


def record(
    fn: Callable[..., Any], specs: Sequence[Any], named: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None, sizes: Mapping[str, Sequence[int | str | None]] | None = None,
    stops: bool = False,
) -> tuple[Program, TraceRecorder, Any]:  # fmt: skip
    """Trace `fn` on symbols with these specs, by position and by name.

    For `sizes` see `trace`, for `stops` see `TraceRecorder`.
    Returns: the program, the recorder and the result of `fn`.
    """

    def traced(values: Mapping[str, int] | None = None, keep_names: bool = True) -> tuple[Program, TraceRecorder, Any]:
        program = new_program(getattr(fn, "__name__", type(fn).__name__))
        return program, *record_into(program, fn, specs, named, names, stops, sizes, values, keep_names)

    made = traced()
    if made[1].named is not None:
        try_other_sizes(*made[:2], lambda values, keep_names: traced(values, keep_names)[:2])
    return made
