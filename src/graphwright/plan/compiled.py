"""Compiled programs and functions. They are planned at the first call with new input shapes or after an edit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, Any, Unpack, overload

from graphwright.array import NDArray, Spec
from graphwright.autograd import Tensor, as_tensor, changes
from graphwright.autograd.modes import modes
from graphwright.autograd.nested import parts, rebuilt
from graphwright.errors import UsageError
from graphwright.plan.compile import CACHED, plan_for
from graphwright.plan.errors import PlanReplaced
from graphwright.plan.options import CompileKeywords, CompileOptions, compile_options
from graphwright.plan.planning.lowering import wait_for_vm
from graphwright.plan.planning.planner import uncollected
from graphwright.plan.running.buckets import PaddingBuckets
from graphwright.program.builder import record
from graphwright.program.exclusive import exclusive
from graphwright.program.program import Program
from graphwright.program.recorder import labelled, output_names
from graphwright.program.run import check_feeds
from graphwright.program.traced_arguments import add_tensors, flat_specs, hashed, specs_of
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.plan.running.executable import BoundCall, Executable
    from graphwright.program.recorder import TraceRecorder

Trace = tuple[Program, "TraceRecorder", Any]
"""A traced program, its recorder, and the result of the traced function."""
Args = tuple[Any, ...]
Signature = tuple[tuple[Any, ...], dict[str, Any]]
"""Specs of arguments by position and by name, see `specs_of`."""


class CompiledProgram:
    """A callable that plans a program for new input shapes and after edits, and runs it: `gw.compile(program)`.

    Args:
        outputs: names of the outputs to compute; None for all.
        options: see `CompileOptions`.
        buckets: if given, pads the feeds to a few sizes.
    """

    def __init__(
        self, program: Program, outputs: Sequence[str] | None, options: CompileOptions, buckets: PaddingBuckets | None
    ) -> None:
        self.program, self.outputs, self.options, self.buckets = program, outputs, options, buckets
        self._latest: tuple[Plan, int] | None = None

    def __call__(self, feeds: Mapping[str, Any] | None = None, **named: Any) -> dict[str, Tensor]:
        """Run on inputs by name (a mapping or keywords), and return the outputs by name."""
        given = {**feeds, **named} if feeds else named
        found = self._run_latest(given) if self.buckets is None else None
        if found is None:
            with exclusive(self.program):
                if self.buckets is None:
                    found = self._run(check_feeds(self.program, given)[0])
                else:
                    self.buckets = self.buckets.current()
                    found = self.buckets.run(*self.buckets.checked(given), self._run)
        return {name: Tensor(array) for name, array in found.items()}

    def _run_latest(self, feeds: Mapping[str, Any]) -> dict[str, NDArray] | None:
        """Run the plan of the last call if it fits `feeds` and nothing that it depends on changed; else return None."""
        plan, seen = self._latest or (None, -1)
        if plan is None or seen != changes.count or not plan.assumptions_hold:
            return None
        space = plan.executable()
        arrays = space.fitting(map(feeds.get, plan.inputs), len(feeds))
        if arrays is not None:
            with suppress(PlanReplaced):
                return space.step(arrays, plan=plan)
        return None

    def _run(self, feeds: Mapping[str, Any]) -> dict[str, NDArray]:
        specs = {name: tensor.spec for name, tensor in feeds.items()}
        seen = changes.count
        plan = plan_for(self.program, specs, self.outputs, self.options)
        self._latest = plan, seen
        return plan(feeds)


class CompiledFunction:
    """A function traced once per input signature, whose calls run the plan of the trace: `gw.compile(fn)`.

    The signature is that of all arguments: structure, shapes and dtypes of tensors, and values of constants, which are
    all arguments other than tensors, arrays, numbers and tuples, lists and dicts of these.
    The traced code may be a whole training step: parameters and optimizer moments become loop-carried state, read at
    the start and written at the end of the plan. After an edit of a program that `fn` runs, the next call traces again.
    Side effects of `fn` other than tensor operations (printing, counting) happen while tracing only.

    Args:
        sizes: named sizes of the arguments, see `gw.trace`: one trace is planned for each of their values.

    Attributes:
        traces: how often `fn` was traced; a trace with named sizes counts once.
    """

    def __init__(
        self, fn: Callable[..., Any], options: CompileOptions, sizes: Mapping[str, Sequence[int | str | None]] | None
    ) -> None:
        self.fn, self.options, self.sizes = fn, options, sizes
        self.traces = 0
        self._entries: OrderedDict[Any, _TracedSignature] = OrderedDict()
        self._latest: _TracedSignature | None = None
        self.__name__ = getattr(fn, "__name__", "compiled")
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run on the arguments of `fn`, and return new tensors in the structure that `fn` returns."""
        entry = self._latest
        arrays = entry.fitting(args, named) if entry is not None else None
        if arrays is None:
            entry, arrays = self._other(args, named)
        if entry is None or arrays is None:
            entry = self._latest = self._entry(args, named)
            return entry.result(entry.executable.run(dict(zip(entry.names, entry.tensors(args, named), strict=True))))
        return entry.result(entry.executable.step(arrays))

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Return the method of an object: its calls have the object as their first argument, a constant."""
        return self if owner is None else MethodType(self, owner)

    def _other(self, args: Args, named: Mapping[str, Any]) -> tuple[_TracedSignature | None, list[Any] | None]:
        """Return the trace of an earlier call that fits the arguments, with the arguments as arrays."""
        for key, entry in reversed(self._entries.items()):
            arrays = None if entry is self._latest else entry.fitting(args, named)
            if arrays is not None:
                self._latest = entry
                self._entries.move_to_end(key)
                return entry, arrays
        return None, None

    def plan(self, *args: Any, **named: Any) -> Plan:
        """Return the plan for arguments of these shapes and dtypes."""
        return self.executable(*args, **named).plan

    def bind(self, *args: Any, **named: Any) -> BoundCall:
        """Return a call on numpy arrays of fixed memory, for arguments of these shapes and dtypes: see `BoundCall`.

        It waits up to 3 s if the VM is being built, because a bound call never plans again.

        >>> import numpy as np, graphwright as gw
        >>> square = gw.compile(lambda x: x * x).bind(np.zeros(3, np.float32))
        >>> np.copyto(square.inputs["x"], [1, 2, 3])
        >>> square()
        >>> square.outputs["out"].tolist()
        [1.0, 4.0, 9.0]
        """
        wait_for_vm(self.options)
        return self.plan(*args, **named).bind()

    def executable(self, *args: Any, **named: Any) -> Executable:
        """Return the executable that runs arguments of these shapes and dtypes."""
        return self._entry(args, named).executable

    def _entry(self, args: Args, named: Mapping[str, Any]) -> _TracedSignature:
        specs = tuple(map(specs_of, args)), {name: specs_of(value) for name, value in named.items()}
        key = hashed(specs), modes()
        entry = self._entries.get(key)
        if entry is None or not entry.fresh:
            with uncollected():
                trace = self._trace_of(specs, key[1])
                if trace is None:
                    self.traces += 1
                    trace = record(self.fn, *specs, sizes=self.sizes)
                entry = self._entries[key] = _TracedSignature(trace, specs, self.options)
            entry.modes = key[1]
            if len(self._entries) > CACHED:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        entry.seen = changes.count
        return entry

    def _trace_of(self, specs: Signature, mode: tuple[Any, ...]) -> Trace | None:
        """Return a trace with named sizes that holds for arguments of these specs."""
        for entry in reversed(self._entries.values()) if self.sizes else ():
            if entry.modes == mode and entry.fresh and entry.admits(specs):
                return entry.trace
        return None


class _TracedSignature:
    """The trace of a function, planned for one input signature."""

    def __init__(self, trace: Trace, specs: Signature, options: CompileOptions) -> None:
        self.trace, self.specs = trace, specs
        self._flat = not specs[1] and all(isinstance(spec, Spec) for spec in specs[0])
        program, recorder, result = trace
        self.program, self.dependencies = program, recorder.dependencies
        self.names = list(program.input_names())
        given = dict(zip(self.names, flat_specs(specs), strict=True))
        self.executable = plan_for(program, given, None, options).new_executable(shared=True)
        self.modes: tuple[Any, ...] = ()
        self.seen = -1
        self._single = isinstance(result, Tensor)
        names = {name: output_names(name, part) for name, part in labelled(result).items()}
        several = isinstance(result, tuple | list | Mapping)
        self._names = rebuilt(result, names) if several else names.get("out")
        self._facts = recorder.facts
        self._variables = [(v, v.requires_grad, v.spec) for v, _ in recorder.variables.values()]

    def fitting(self, args: Args, named: Mapping[str, Any]) -> list[Any] | None:
        """Return the arguments as arrays; None if they have other specs, or if the trace may no longer be valid."""
        if self.seen != changes.count or self.modes != modes():
            return None
        if self._facts and any(fact() != value for fact, value in self._facts):
            return None
        if self._flat:
            return None if named else self.executable.fitting(args, len(args))
        found: list[Any] = []
        return self.executable.fitting(found, len(found)) if add_tensors(self.specs, (args, named), found) else None

    def tensors(self, args: Args, named: Mapping[str, Any]) -> list[Tensor]:
        """Return what the arguments of the traced signature have in place of its specs, as tensors."""
        found: list[Any] = []
        add_tensors(self.specs, (args, named), found)
        return [as_tensor(value) for value in found]

    def admits(self, specs: Signature) -> bool:
        """Return whether the trace holds for arguments of these specs."""
        found: list[Spec] = []
        if not add_tensors(self.specs, specs, found):
            return False
        dims: dict[str, int] = {}
        pairs = zip(map(self.program.spec, self.program.inputs()), found, strict=True)
        return all(want.dtype is spec.dtype and want.match(spec.sizes, dims) for want, spec in pairs)

    @property
    def fresh(self) -> bool:
        """True until something that the trace relies on changes: the version of a program that the function runs, a
        variable's spec or `requires_grad`, or the mode of a module.
        """
        return (
            all(v.requires_grad == trained and v.spec == spec for v, trained, spec in self._variables)
            and all(fact() == value for fact, value in self._facts)
            and all(p.plan_version == version for p, version in self.dependencies.values())
            and self.executable.plan.fresh
        )

    def result(self, outputs: Mapping[str, NDArray]) -> Any:
        """Return the outputs in the structure that the function returned."""
        if self._single:
            return Tensor(outputs["out"])
        return _filled(self._names, outputs)


def _filled(names: Any, outputs: Mapping[str, NDArray]) -> Any:
    """Return the structure of a result with tensors in place of the names of outputs."""
    if isinstance(names, str):
        return Tensor(outputs[names])
    return names if names is None else rebuilt(names, {k: _filled(n, outputs) for k, n in parts(names).items()})


@overload
def compile(
    target: Program, *, outputs: Sequence[str] | None = None, buckets: Mapping[str, Sequence[int]] | None = None,
    mask: str | None = None, **options: Unpack[CompileKeywords],
) -> CompiledProgram: ...  # fmt: skip
@overload
def compile(
    target: Callable[..., Any], *, sizes: Mapping[str, Sequence[int | str | None]] | None = None,
    **options: Unpack[CompileKeywords],
) -> CompiledFunction: ...  # fmt: skip
@keywords(CompileOptions)
def compile(
    target: Program | Callable[..., Any], *, outputs: Sequence[str] | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None, mask: str | None = None,
    sizes: Mapping[str, Sequence[int | str | None]] | None = None, **options: Unpack[CompileKeywords],
) -> CompiledProgram | CompiledFunction:  # fmt: skip
    """Return a callable that plans a program or a function for each new set of input shapes, and runs the plan.

    Args:
        target: a Program, or a function of tensors (which may be a whole training step).
        outputs: of a program, names of the outputs to compute; all by default.
        buckets, mask: of a program, see `PaddingBuckets`: `buckets={"T": [16, 128]}`.
        sizes: of a function, named sizes of its arguments, see `gw.trace`: `sizes={"x": ("B", None)}`. One trace is
            then planned for each value of B, instead of a new trace for each.
        options: see `CompileOptions`.
    Returns: a callable with the arguments of the target.
    Raises: UsageError if the target is not callable, if it is a function and outputs, buckets or mask is given, or if
        it is a program and sizes is given; at the first call the errors of `gw.trace`.
    """
    if isinstance(target, Program):
        if sizes is not None:
            raise UsageError("gw.compile of a program was given sizes, but its inputs have named sizes of their own",
                             where=f"gw.compile({target.name!r})", expected="no sizes", got=sizes,
                             fix="gw.trace(fn, *examples, sizes=...)")  # fmt: skip
        padding = None if buckets is None else PaddingBuckets(target, buckets, mask)
        return CompiledProgram(target, outputs, compile_options(**options), padding)
    if not callable(target):
        raise UsageError("gw.compile needs a Program or a function of tensors", where="gw.compile",
                         expected="a Program, or a callable", got=repr(target)[:80],
                         fix="gw.compile(program), gw.compile(fn), or @gw.compile above a function")  # fmt: skip
    given = [name for name, value in (("outputs", outputs), ("buckets", buckets), ("mask", mask)) if value is not None]
    if given:
        raise UsageError("gw.compile of a function was given options that only a program has",
                         where=f"gw.compile({repr(target)[:80]})", expected="no outputs, buckets or mask",
                         got=", ".join(given), fix="gw.compile(gw.trace(fn, *examples), ...)")  # fmt: skip
    return CompiledFunction(target, compile_options(**options), sizes)
