"""Recording tensor code into a program: the recorder of one trace, and running a function on symbols."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from graphwright.array import NDArray, Spec
from graphwright.array.sizes import is_dim_name
from graphwright.autograd import (
    Symbol,
    Tensor,
    TraceError,
    TraceMutation,
    Variable,
    active_recorder,
    as_tensor,
    scope,
)
from graphwright.autograd.modes import grad_mode
from graphwright.autograd.named_sizes import NamedSizes
from graphwright.autograd.nested import parts, rebuilt
from graphwright.autograd.recorder import differentiating, mark_alias
from graphwright.errors import UsageError
from graphwright.ops import get
from graphwright.program.derived.recompute import Recomputed
from graphwright.program.kinds import CONST, INPUT, KINDS, PARAM
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_assign, add_op, add_source, discard, set_outputs, update_node
from graphwright.program.weights import add_weight, constant_variable, kind_of

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.ops import Op
    from graphwright.program.program import Program


Shape = Sequence[int | str | None]


class TraceRecorder:
    """Adds the operations of one trace to a program.

    Each variable becomes one param or state node, every other array a const, which the recorder keeps alive. After an
    assignment to a variable, later reads get the new value, and the step ends with one assign node.

    Args:
        program: an empty program.
        stops: record `stop_gradient` where gradients end, at `detach()` and after `no_grad` blocks, for a program that
            is differentiated later.
        named: the named sizes of the trace, if it has any.
    """

    def __init__(self, program: Program, stops: bool = False, named: NamedSizes | None = None) -> None:
        self.program, self.named = program, named
        self.stops = stops and grad_mode.get()
        self._untaped: set[NodeId] = set()  # recorded while the tape was off
        self._stopped: dict[Value, Value] = {}
        self.dependencies: dict[int, tuple[Program, int]] = {}
        self.facts: list[tuple[Callable[[], object], object]] = []
        self.variables: dict[int, tuple[Variable, Value]] = {}
        self._current: dict[int, Value] = {}  # id of a variable -> what it holds from here on
        self._consts: dict[int, tuple[NDArray, Value]] = {}
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._written: list[tuple[ref[Tensor], NDArray]] = []
        self._expected: tuple[str, str] | None = None
        self._optional: list[NodeId] = []
        self.recomputed = Recomputed(program)

    # -- the recorder protocol ---------------------------------------------------------------------------------------
    def resolve(self, tensor: Tensor) -> Symbol:
        """Return the symbol, a value of the traced program, that stands for a tensor."""
        return tensor.data if isinstance(tensor.data, Symbol) else Symbol(tensor.spec, self.value_of(tensor), self)

    def record(self, op: Op, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Record one operation."""
        operands, backward = [self._own(s) for s in inputs], differentiating.get()
        if backward:
            operands = [self.recomputed.read(v) for v in operands]
        if self.stops and grad_mode.get():
            operands = [self._without_gradient(v) for v in operands]
        node = add_op(self.program, op.name, operands, attrs, self._name(op.name))
        if self.stops and not grad_mode.get():
            self._untaped.add(node)
        self.recomputed.took(node, backward=backward)
        specs = self.program.specs(node)
        return tuple(Symbol(spec, Value(node, port), self) for port, spec in enumerate(specs))

    def detached(self, symbol: Symbol) -> Symbol:
        """Return a symbol of the same value and memory; in a trace that is differentiated later, a `stop_gradient`."""
        if not self.stops or not symbol.dtype.is_float:
            return symbol.alias()
        (found,) = self.record(get("stop_gradient"), [symbol], {})
        mark_alias(found, symbol)
        return found

    def _without_gradient(self, value: Value) -> Value:
        """Return the value; if it was recorded while the tape was off, a `stop_gradient` of it."""
        if value.node not in self._untaped or not self.program.spec(value).dtype.is_float:
            return value
        if value not in self._stopped:
            name = self.program.free_name(f"{self.program.path(value.node)}.stop_gradient")
            self._stopped[value] = Value(add_op(self.program, "stop_gradient", [value], {}, name))
        return self._stopped[value]

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Record that a variable has `value` from here on."""
        self._source(variable)
        self._current[id(variable)] = self.value_of(value)

    def update(self, targets: Sequence[Variable], op: Op, operands: Sequence[Tensor], attrs: Mapping[str, Any]) -> None:
        """Record that variables hold the results of an operation from here on."""
        for target, symbol in zip(targets, self.record(op, list(map(self.resolve, operands)), attrs), strict=True):
            self.assign(target, Tensor(symbol))

    def assume(self, fact: Callable[[], object]) -> None:
        """Add a guard: the trace is valid as long as `fact()` returns what it returns now."""
        self.facts.append((fact, fact()))

    def optional(self, tensors: Iterable[Tensor]) -> None:
        """Mark results that callers often ignore: their ops are removed at the end if nothing reads them."""
        self._optional += [self.value_of(t).node for t in tensors]

    def label(self, symbol: Symbol, name: str) -> None:
        """Rename the node of a symbol, an op's result, to `name` within the present scope."""
        node, wanted = self._own(symbol).node, ".".join((*scope.get(), name))
        if self.program.op(node) not in KINDS and self.program.path(node) != wanted:
            update_node(self.program, node, name=self.program.free_name(wanted))

    def path(self, symbol: Symbol) -> str:
        """Return the name of a symbol's node."""
        return self.program.path(symbol.handle)

    def before_grad(self, leaf: Tensor) -> None:
        """Save the gradient of a leaf tensor, to restore it after the trace. Raises: TraceError for an old value."""
        if id(leaf) not in self._grads:
            self._grads[id(leaf)] = (leaf, leaf.grad)
            if leaf.grad is not None and not leaf.grad.symbolic:
                fix, where = "call zero_grad() inside the step, before backward()", leaf.name or None
                raise TraceError("the traced step would add to a gradient from before the trace", where=where, fix=fix)

    def before_write(self, constant: Tensor) -> None:
        """Save the array of a constant that is written in place; see `check_written`."""
        assert isinstance(constant.data, NDArray)
        self._written.append((ref(constant), constant.data))

    def apart(self, result: Any) -> Any:
        """Return a result with new tensors in place of constants that were written, which can then be freed."""
        written = {id(tensor) for r, _ in self._written if (tensor := r()) is not None}
        return _renewed(result, written) if written else result

    def check_written(self) -> None:
        """Restore constants that were written and still exist. Raises: TraceMutation for one, made outside the trace.

        Constants that were made in the trace, such as zeros that a loop adds to, are gone with the local variables.
        """
        if any(r() is not None for r, _ in self._written):
            gc.collect()  # local functions that call themselves are cycles
        alive = [(tensor, array) for r, array in reversed(self._written) if (tensor := r()) is not None]
        for tensor, array in alive:
            tensor.data, tensor.node, tensor.requires_grad = array, None, False
        if alive:
            fix = "make the tensor a Variable, whose value is stored from step to step"
            what = "a trace cannot write in place to a tensor made outside of it"
            raise TraceMutation(what, got=alive[0][0].spec, fix=fix)

    def resolved(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the present value of a tensor or variable, unaffected by later assignments."""
        if not isinstance(tensor, Variable):
            return tensor
        value = self.value_of(tensor)
        return Tensor(Symbol(tensor.spec, value, self))

    def recalled(self, tensor: Tensor) -> Tensor:
        """Return a detached tensor of the same value; computed again if a checkpoint discards the value."""
        return Tensor(Symbol(tensor.spec, self.recomputed.read(self.value_of(tensor)), self))

    # -- for programs that run inside a trace ------------------------------------------------------------------------
    def depends(self, program: Program) -> None:
        """Add a guard: the trace is valid for this version of a program only."""
        self.dependencies[id(program)] = (program, program.plan_version)

    def expect(self, op: str, path: str) -> None:
        """Name the next recorded node of this `op` by `path`, the path of the program node that is being run."""
        self._expected = (op, path)

    # -- values ------------------------------------------------------------------------------------------------------
    def value_of(self, tensor: Tensor) -> Value:
        """Return the value in the program that stands for a tensor; an array not seen before becomes a const."""
        data = tensor.data
        if isinstance(tensor, Variable):
            current = self._current.get(id(tensor))
            return self._source(tensor) if current is None else current
        if isinstance(data, Symbol):
            return self._own(data)
        if id(data) not in self._consts:
            name = self.program.free_name(tensor.name or "const")
            key = self.program.weights.free_key(name)
            node = self.constant(name, key, data.spec)
            stored = data if data.contiguous else data.copy()  # plans read weights row by row
            add_weight(self.program.weights, key, constant_variable(stored, key))
            self._consts[id(data)] = (data, Value(node))
        return self._consts[id(data)][1]

    def constant(self, name: str, key: str, spec: Spec) -> Any:
        """Add a const node."""
        return add_source(self.program, CONST, name, spec, {"key": key})

    def _own(self, symbol: Symbol) -> Value:
        if symbol.recorder is not self:
            fix = "return it from its trace and pass it to this one as an argument"
            raise TraceError("the tensor belongs to a different trace", got=symbol.spec, fix=fix)
        return symbol.handle

    def _source(self, variable: Variable) -> Value:
        if id(variable) not in self.variables:
            kind = kind_of(variable)
            name = self.program.free_name(variable.name or kind)
            key = self.program.weights.free_key(name)
            trained = {"trainable": variable.requires_grad} if kind == PARAM else {}
            node = add_source(self.program, kind, name, variable.spec, {"key": key, **trained})
            add_weight(self.program.weights, key, variable)
            self.variables[id(variable)] = (variable, Value(node))
        return self.variables[id(variable)][1]

    def _name(self, op: str) -> str:
        expected, self._expected = self._expected, None
        if expected is None or scope.get():
            return self.program.free_name(".".join((*scope.get(), op)))
        if expected[0] == op:
            return self.program.free_name(expected[1])
        self._expected = expected  # this is a cast that autocast added; the op itself is recorded next
        return self.program.free_name(f"{expected[1]}.{op}")

    # -- the end -----------------------------------------------------------------------------------------------------
    def finish(self, outputs: Mapping[str, Tensor]) -> None:
        """Declare the outputs, and assign the new values of variables."""
        p = self.program
        set_outputs(p, {name: self._without_gradient(self.value_of(t)) for name, t in outputs.items()})
        for key, value in self._current.items():
            source = self.variables[key][1]
            add_assign(p, source, value, p.free_name(f"{p.path(source)}.next"))
        results, unread = {v.node for v in p.outputs()}, self._optional
        while unread:
            node = unread.pop()
            if node in p.graph and p.op(node) not in KINDS and node not in results and not p.out_edges(node):
                unread += p.producers(node)
                discard(p, [node])

    def restore(self) -> None:
        """Restore the gradients that leaves had before the trace."""
        for leaf, grad in self._grads.values():
            leaf.grad = grad


def record_into(
    program: Program, fn: Callable[..., Any], specs: Sequence[Any], named_specs: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None, stops: bool = False, sizes: Mapping[str, Shape] | None = None,
    values: Mapping[str, int] | None = None, keep_names: bool = True,
) -> tuple[TraceRecorder, Any]:  # fmt: skip
    """Run `fn` on symbols and record it into an empty program; returns the recorder and the result of `fn`.

    Args:
        specs: specs of the arguments of `fn`, as `specs_of` returns them. Tensors become inputs, those in tuples, lists
            and dicts with the names `<argument>.<index or key>`.
        named_specs: specs of arguments that are passed by name.
        names: names of the inputs by position; by default those of the function's or module's parameters.
        stops: see `TraceRecorder`.
        sizes, values: shapes of inputs with named sizes, see `trace`, and values of names other than those of `specs`.
        keep_names: False for a trace with these values instead of the names.
    Raises: UsageError for sizes of an unknown input, a wrong number of axes, or sizes that contradict the specs.
    """
    named = NamedSizes() if sizes else None
    recorder = TraceRecorder(program, stops, named if keep_names else None)
    labels = names if names is not None else _parameter_names(fn, len(specs))

    def feed(label: str, spec: Any) -> Any:
        if isinstance(spec, tuple | list | Mapping):
            return rebuilt(spec, {key: feed(f"{label}.{key}", inner) for key, inner in parts(spec).items()})
        if not isinstance(spec, Spec):
            return spec
        program.check_name(label)
        if sizes and label in sizes:
            spec = _with_names(label, spec, sizes[label], named)
            spec = spec if keep_names else spec.bind(values or {})
        symbol = Symbol(spec, Value(add_source(program, INPUT, label, spec, {})), recorder)
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and recorder.named is not None:
                recorder.named.inputs.setdefault(dim, (Tensor(symbol), axis))
        return Tensor(symbol)

    feeds = [feed(label, spec) for label, spec in zip(labels, specs, strict=True)]
    named_feeds = {name: feed(name, spec) for name, spec in (named_specs or {}).items()}
    if sizes and (unknown := [name for name in sizes if name not in program.input_names()]):
        raise UsageError(
            "sizes are given for an unknown input", got=unknown[0], expected=", ".join(program.input_names())
        )
    if named is not None:
        named.values |= values or {}
    token = active_recorder.set(recorder)
    try:
        result = fn(*feeds, **named_feeds)
        recorder.finish(_named(result))
        result = recorder.apart(result)
    finally:
        active_recorder.reset(token)
        recorder.restore()
    recorder.check_written()
    return recorder, result


def _renewed(result: Any, written: set[int]) -> Any:
    """Return a result with new tensors in place of those with these ids."""
    if isinstance(result, Tensor) and id(result) in written:
        new = Tensor(result.data)
        new.node, new.port, new.requires_grad = result.node, result.port, result.requires_grad
        return new
    members = parts(result)
    return rebuilt(result, {key: _renewed(value, written) for key, value in members.items()}) if members else result


def _with_names(label: str, spec: Spec, shape: Shape, sizes: NamedSizes | None) -> Spec:
    """Return the spec of an input with the names of `shape`, and note their values."""
    assert sizes is not None
    named = tuple(have if want is None else want for want, have in zip(shape, spec.sizes, strict=False))
    found, known = Spec(named, spec.dtype), sizes.values
    wrong = [d for d in named if isinstance(d, str) and not is_dim_name(d)]
    if wrong or len(shape) != len(spec.shape) or not found.match(spec.sizes, known):
        what = "a name of a size is not an identifier" if wrong else "the sizes of an input do not match its example"
        raise UsageError(what, where=label, expected=spec, got=f"{tuple(shape)}{f' with {known}' if known else ''}")
    return found


def labelled(result: Any) -> dict[Any, Any]:
    """Return the parts of a function's result by the names of outputs: keys, else out, out_1, ..."""
    if isinstance(result, Mapping):
        return dict(result)
    several = result if isinstance(result, tuple | list) else () if result is None else (result,)
    return {"out" if i == 0 else f"out_{i}": value for i, value in enumerate(several)}


def unlabelled(outputs: Mapping[str, Any]) -> Any:
    """Return the value of `out` alone, a tuple of `out`, `out_1`, ..., or a dict by names: see `labelled`."""
    if not outputs or list(outputs) != list(labelled(tuple(outputs))):
        return dict(outputs)
    return tuple(outputs.values()) if len(outputs) > 1 else outputs["out"]


def output_names(prefix: Any, value: Any) -> Any:
    """Return a part of a result with the names of outputs in place of tensors; None stays None."""
    if isinstance(value, tuple | list | Mapping):
        return rebuilt(value, {key: output_names(f"{prefix}.{key}", inner) for key, inner in parts(value).items()})
    return None if value is None else str(prefix)


def _named(result: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in _leaves("", labelled(result)):
        if name in found:
            raise TraceError("two results of a traced function have the same name", where=name, fix="rename one")
        found[name] = value
    return found


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the results in nested tuples, lists and dicts; None is left out."""
    if isinstance(value, tuple | list | Mapping):
        for key, inner in parts(value).items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, Tensor | NDArray | np.ndarray | np.generic | int | float):
        yield prefix, as_tensor(value)
    elif value is not None:
        expected = "tensors, alone or in tuples, lists and dicts"
        got = type(value).__name__
        raise TraceError("unsupported result of a traced function", where=prefix, expected=expected, got=got)


def _parameter_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    forward = getattr(fn, "forward", None)  # more informative than a module's __call__(*args)
    try:
        given = inspect.signature(forward if callable(forward) else fn).parameters.items()
        known = [name for name, q in given if q.kind in (q.POSITIONAL_ONLY, q.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        known = []
    spare = (name for i in itertools.count() if (name := f"x{i}") not in known[:count])
    return tuple(known[i] if i < len(known) else next(spare) for i in range(count))
