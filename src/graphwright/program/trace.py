"""Tracing: the same tensor code, taken down as a program instead of run."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphwright.autograd import Parameter, Symbol, Tensor, TraceError, Variable, active_recorder, as_tensor, scope
from graphwright.autograd.recorder import differentiating
from graphwright.program.derived.recompute import Recomputed
from graphwright.program.kinds import CONST, INPUT, PARAM, STATE
from graphwright.program.op_graph import Value
from graphwright.program.program import Program

if TYPE_CHECKING:
    from graphwright.array import NDArray, Spec
    from graphwright.ops import Op


class TraceRecorder:
    """Writes operations into a program; installed for the time of one trace.

    Variables become param or state nodes by identity, other arrays consts that are held. Assigning to a variable makes
    later reads see the new value and ends the step with one write.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.dependencies: dict[int, tuple[Program, int]] = {}
        self.facts: list[tuple[Callable[[], object], object]] = []
        self.variables: dict[int, tuple[Variable, Value]] = {}
        self._current: dict[int, Tensor] = {}
        self._consts: dict[int, tuple[NDArray, Value]] = {}
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._expected: tuple[str, str] | None = None
        self.recomputed = Recomputed(program)

    # -- the recorder protocol ---------------------------------------------------------------------------------------
    def resolve(self, tensor: Tensor) -> Symbol:
        """The symbol of a tensor."""
        return tensor.data if isinstance(tensor.data, Symbol) else Symbol(tensor.spec, self.value_of(tensor), self)

    def record(self, op: Op, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Take down one operation."""
        operands, backward = [self._own(s) for s in inputs], differentiating.get()
        if backward:
            operands = [self.recomputed.read(v) for v in operands]
        node = self.program.add_op(op.name, operands, attrs, self._name(op.name))
        self.recomputed.took(node, backward=backward)
        specs = self.program.specs(node)
        return tuple(Symbol(spec, Value(node, port), self) for port, spec in enumerate(specs))

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Take down that a variable holds `value` from here on."""
        self._source(variable)
        self._current[id(variable)] = self.resolved(value)

    def assume(self, fact: Callable[[], object]) -> None:
        """Note a fact that the trace holds for."""
        self.facts.append((fact, fact()))

    def path(self, symbol: Symbol) -> str:
        """Name of the node behind a symbol."""
        return self.program.path(symbol.handle)

    def before_grad(self, leaf: Tensor) -> None:
        """Keep a leaf's gradient from before the trace, to put it back afterwards."""
        if id(leaf) not in self._grads:
            self._grads[id(leaf)] = (leaf, leaf.grad)
            if leaf.grad is not None and not leaf.grad.symbolic:
                raise TraceError(
                    "a gradient from before the traced step would be added to",
                    where=leaf.name or None,
                    fix="call zero_grad() inside the step, before backward()",
                )

    def resolved(self, tensor: Tensor) -> Tensor:
        """The value that a tensor has now, also after a variable behind it is assigned to."""
        if not isinstance(tensor, Variable):
            return tensor
        value = self.value_of(tensor)
        return Tensor(Symbol(tensor.spec, value, self))

    # -- for programs that run inside a trace ------------------------------------------------------------------------
    def depends(self, program: Program) -> None:
        """Note that the trace holds for this version of a program only."""
        self.dependencies[id(program)] = (program, program.version)

    def expect(self, op: str, path: str) -> None:
        """Name the next `op` recorded `path`: the node it comes from."""
        self._expected = (op, path)

    # -- values ------------------------------------------------------------------------------------------------------
    def value_of(self, tensor: Tensor) -> Value:
        """The node that stands for a tensor."""
        data = tensor.data
        if isinstance(tensor, Variable):
            current = self._current.get(id(tensor))
            return self._source(tensor) if current is None else self.value_of(current)
        if isinstance(data, Symbol):
            return self._own(data)
        found = self._consts.get(id(data))
        if found is None:
            name = self.program.free_name(tensor.name or "const")
            node = self.constant(name, data.spec)
            self.program.weights.add(name, Variable(data, name=name))
            found = self._consts[id(data)] = (data, Value(node))
        return found[1]

    def constant(self, name: str, spec: Spec) -> Any:
        """A new const node."""
        return self.program.add_source(CONST, name, spec, {"key": name})

    def _own(self, symbol: Symbol) -> Value:
        if symbol.recorder is not self:
            raise TraceError("a tensor of another trace", got=symbol.spec, fix="return it from that trace and feed it")
        return symbol.handle

    def _source(self, variable: Variable) -> Value:
        found = self.variables.get(id(variable))
        if found is None:
            kind = PARAM if isinstance(variable, Parameter) else STATE
            name = self.program.free_name(variable.name or kind)
            attrs: dict[str, Any] = {"key": name}
            if kind == PARAM:
                attrs["trainable"] = variable.requires_grad
            node = self.program.add_source(kind, name, variable.spec, attrs)
            self.program.weights.add(name, variable)
            found = self.variables[id(variable)] = (variable, Value(node))
        return found[1]

    def _name(self, op: str) -> str:
        expected, self._expected = self._expected, None
        if expected is not None and not scope.get():
            path = expected[1] if expected[0] == op else f"{expected[1]}.{op}"
            if expected[0] != op:
                self._expected = expected  # a cast put before it: the op itself still comes
        else:
            path = ".".join((*scope.get(), op))
        return self.program.free_name(path)

    # -- the end -----------------------------------------------------------------------------------------------------
    def finish(self, outputs: Mapping[str, Tensor]) -> None:
        """Declare outputs and writes; give leaves the gradients back that they had before."""
        p = self.program
        p.set_outputs({name: self.value_of(t) for name, t in outputs.items()})
        for key, value in self._current.items():
            source = self.variables[key][1]
            p.add_write(source, self.value_of(value), p.free_name(f"{p.path(source)}.next"))

    def restore(self) -> None:
        """Put back what tracing changed outside the program."""
        for leaf, grad in self._grads.values():
            leaf.grad = grad


def trace(fn: Callable[..., Any], *examples: Any, names: tuple[str, ...] | None = None) -> Program:
    """Run `fn` on symbols of the examples' specs and return what it did as a program.

    Args:
        fn: takes tensors, returns a tensor, a tuple or a dict of tensors, or None (a step that only writes state).
        examples: tensors, arrays or numbers; only shape and dtype matter.
        names: input names; by default those of the parameters of the function, or of a module's `forward`.
    Returns: a Program; its inputs are the examples in order, its outputs `out`, `out_1`, ... or the dict's keys.
    Raises: TraceError where the code asks a symbol for a number.
    """
    return record(fn, tuple(as_tensor(e).spec for e in examples), names)[0]


def record(
    fn: Callable[..., Any],
    specs: tuple[Spec, ...],
    names: tuple[str, ...] | None = None,
) -> tuple[Program, TraceRecorder, Any]:
    """As `trace`, from specs; returns the program, the recorder and what `fn` returned."""
    program = Program(getattr(fn, "__name__", type(fn).__name__))
    recorder = TraceRecorder(program)
    labels = names if names is not None else _parameter_names(fn, len(specs))
    feeds = []
    for label, spec in zip(labels, specs, strict=True):
        program.check_name(label)
        node = program.add_source(INPUT, label, spec, {})
        feeds.append(Tensor(Symbol(spec, Value(node), recorder)))
    token = active_recorder.set(recorder)
    try:
        result = fn(*feeds)
        recorder.finish(_named(result))
    finally:
        active_recorder.reset(token)
        recorder.restore()
    return program, recorder, result


def _named(result: Any) -> dict[str, Tensor]:
    if result is None:
        return {}
    if isinstance(result, Tensor):
        return {"out": result}
    if isinstance(result, Mapping):
        return {str(name): as_tensor(value) for name, value in result.items()}
    if isinstance(result, tuple | list):
        return {"out" if i == 0 else f"out_{i}": as_tensor(value) for i, value in enumerate(result)}
    raise TraceError("a traced function returns tensors", got=type(result).__name__)


def _parameter_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    forward = getattr(fn, "forward", None)  # a module's own parameters say more than its __call__(*args)
    try:
        known = [
            n
            for n, q in inspect.signature(forward if callable(forward) else fn).parameters.items()
            if q.kind in (q.POSITIONAL_ONLY, q.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        known = []
    spare = (name for i in itertools.count() if (name := f"x{i}") not in known[:count])
    return tuple(known[i] if i < len(known) else next(spare) for i in range(count))
