"""Compiling: a program, or a function written in the usual way, becomes plans kept per input signature.

Invariant: what runs was planned for the version that is asked; an edit is noticed at the next call, without being told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, Device, Spec, UnboundDim
from graphwright.autograd import Tensor, as_tensor, changes
from graphwright.autograd.modes import modes
from graphwright.errors import UsageError
from graphwright.plan.planning.plan_builder import walking
from graphwright.plan.planning.planner import make_plan, uncollected
from graphwright.plan.running.buckets import PaddingBuckets
from graphwright.program import Program, check_feeds, record
from graphwright.program.derived.rewrite import patched

if TYPE_CHECKING:
    from graphwright.array import DType, NDArray
    from graphwright.plan.plan import Plan
    from graphwright.plan.running.executable import BoundCall, Executable
    from graphwright.program import TraceRecorder
    from graphwright.program.derived.rewrite import PatchPoint

_LIMIT = 32
"""Plans kept per program, and traces per compiled function; the one unused for longest goes first."""


def plan_for(p: Program, inputs: Mapping[str, Spec], outputs: Sequence[str] | None = None, **options: Any) -> Plan:
    """The plan of a program for input specs: the one that was made before, patched if the program was edited since.

    Args:
        options: see `make_plan`.
    """
    plans: OrderedDict[Any, Plan] = p.derived.setdefault("plans", OrderedDict())
    key = (
        tuple(sorted(inputs.items(), key=lambda item: item[0])),
        None if outputs is None else tuple(outputs),
        tuple(sorted((name, tuple(v) if isinstance(v, list) else v) for name, v in options.items())),
    )
    with walking:  # a ledger is brought up to date by one thread at a time
        found = plans.get(key)
        if found is None or not found.fresh:
            before, found = found, make_plan(p, inputs, outputs, **options, before=found)
            plans[key] = found if before is None else before.hand_over(found)
            if len(plans) > _LIMIT:
                plans.popitem(last=False)
        plans.move_to_end(key)
    return found


def compile_program(
    p: Program,
    inputs: Mapping[str, Any] | None = None,
    *,
    outputs: Sequence[str] | None = None,
    freeze: bool = False,
    rewrites: str = "exact",
    layout: str = "reuse",
    watch: Sequence[str] = (),
    executor: str = "aten",
    patch: Sequence[PatchPoint] = (),
    device: Device | str = CPU,
    remat: int | None = None,
    poison: bool = False,
    **named: Any,
) -> Plan:
    """`program.compile(x=(64, 8))`: a plan for given inputs.

    Args:
        inputs: per input a shape, a Spec, or an example array.
        outputs: names of the outputs wanted; all by default.
        freeze: casts of weights are made once per weight version instead of in every run.
        rewrites: "exact", "fast" or "none", see `Options`; `plan.rewrites` lists what was done.
        layout: "reuse" or "naive".
        watch: names of nodes whose values `Executable.watched(name)` gives after a run.
        executor: "aten", "vm", "auto" or "capture", see `Options`.
        device: where it runs. Weights that it only reads are copied there once; those that it writes move there.
        remat: most bytes of the arena; values are computed again until it fits, else BudgetImpossible.
        poison: fill dead memory with NaN in every run, so that a value freed too early shows; it costs time.
        patch: nodes, values or edges whose value is fed: a run takes `patch.<path>` more for each, and what only the
            value itself needed does not run.
    Raises: UnboundDim for a size without a number; UsageError for one name where several are expected; as `make_plan`.
    """
    for option, names in (("outputs", outputs), ("watch", watch), ("patch", patch)):
        if isinstance(names, str):
            raise UsageError(
                f"{option} takes several names",
                where=p.name,
                expected="a list or tuple of names",
                got=repr(names),
                fix=f"{option}=[{names!r}]",
            )
    given = {**(inputs or {}), **named}
    source = p
    if patch:
        p = patched(p, patch)
    specs, dims = {}, {}
    for node in p.inputs():
        name = p.path(node)
        if name in given:
            spec = spec_of(given.pop(name), p.spec(node).dtype)
            assert spec is not None
            if spec.symbolic:
                raise UnboundDim(
                    "a plan is for given sizes",
                    where=f"{p.name}: {name}",
                    expected="numbers",
                    got=spec,
                    fix=f"compile({name}=(64, 8)), or gw.compile(program), which plans for what it is called with",
                )
            specs[name] = spec
            p.spec(node).match(specs[name].shape, dims)
    for node in p.inputs()[: len(p.inputs()) - len(source.inputs())]:  # those of the patches come first
        specs.setdefault(p.path(node), p.spec(node).bind(dims))
    specs.update({name: Spec((), p.spec(p.inputs()[0]).dtype) for name in given})  # unknown names: make_plan lists them
    options = {"freeze": freeze, "rewrites": rewrites, "layout": layout, "watch": tuple(watch), "executor": executor}
    return plan_for(p, specs, outputs, **options, device=Device.parse(device), remat=remat, poison=poison)


def spec_of(value: Any, kind: DType | None) -> Spec | None:
    """The spec that a shape (of dtype `kind`), a Spec or an example array says; None for a shape without a dtype."""
    if isinstance(value, Spec):
        return value
    if isinstance(value, tuple | list) and all(isinstance(n, int | np.integer | str) for n in value):
        return None if kind is None else Spec(tuple(n if isinstance(n, str) else int(n) for n in value), kind)
    return as_tensor(value).spec


class CompiledProgram:
    """`gw.compile(program)`: call it with feeds; it plans what it has not planned."""

    def __init__(
        self,
        program: Program,
        *,
        outputs: Sequence[str] | None = None,
        freeze: bool = False,
        executor: str = "aten",
        device: Device | str = CPU,
        buckets: Mapping[str, Sequence[int]] | None = None,
        mask: str | None = None,
    ) -> None:
        self.program, self.outputs = program, outputs
        self.buckets = None if buckets is None else PaddingBuckets(program, buckets, mask)
        self.options = {"freeze": freeze, "executor": executor, "device": Device.parse(device)}
        self._latest: tuple[Plan, int] | None = None

    def __call__(self, feeds: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """Outputs as tensors: one, or a dict by name."""
        given = {**feeds, **named} if feeds else named
        if self.buckets is not None:
            self.buckets = self.buckets.now()
            found = self.buckets.run(*self.buckets.checked(given), self._run)
        elif (found := self._again(given)) is None:
            found = self._run(check_feeds(self.program, given)[0])
        results = {name: Tensor(array) for name, array in found.items()}
        return next(iter(results.values())) if len(results) == 1 else results

    def _again(self, feeds: Mapping[str, Any]) -> dict[str, NDArray] | None:
        """What the plan of the last call gives, if it fits and nothing changed since; else None."""
        plan, seen = self._latest or (None, -1)
        if plan is None or seen != changes.count or not plan.guarded_fresh:
            return None
        space = plan.executable()
        arrays = space.fitting(map(feeds.get, plan.inputs), len(feeds))
        return None if arrays is None else space.step(arrays)

    def _run(self, feeds: Mapping[str, Any]) -> dict[str, NDArray]:
        specs = {name: tensor.spec for name, tensor in feeds.items()}
        seen = changes.count
        plan = plan_for(self.program, specs, self.outputs, **self.options)
        self._latest = plan, seen
        return plan(feeds)


class CompiledFunction:
    """`gw.compile(fn)`: traces `fn` once per input signature and runs the plan of what it did.

    The traced code may hold a whole training step: parameters and optimizer moments become carried state, read at the
    start and written at the end of the plan. An edit of a program that `fn` runs is noticed at the next call.
    What `fn` does beside tensor operations (printing, counting) happens while tracing only.

    Attributes:
        traces: how often `fn` was traced.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        executor: str = "auto",
        device: Device | str = CPU,
        remat: int | None = None,
    ) -> None:
        self.fn, self.options = fn, {"executor": executor, "device": Device.parse(device), "remat": remat}
        self.traces = 0
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._latest: _Entry | None = None
        self.__name__ = getattr(fn, "__name__", "compiled")
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any) -> Any:
        """Run on tensors, arrays or numbers; returns what `fn` returns, with fresh tensors."""
        entry = self._latest
        arrays = entry.taken(args) if entry is not None else None
        if entry is None or arrays is None:
            tensors = [as_tensor(a) for a in args]
            entry = self._latest = self._entry(tuple(t.spec for t in tensors))
            return entry.shape(entry.executable.run(dict(zip(entry.names, tensors, strict=True))))
        return entry.shape(entry.executable.step(arrays))

    def plan(self, *args: Any) -> Plan:
        """The plan for arguments of these shapes."""
        return self._entry(tuple(as_tensor(a).spec for a in args)).executable.plan

    def bind(self, *args: Any) -> BoundCall:
        """Arguments of these shapes as memory to write to and results as memory to read: a run is one call.

        >>> import numpy as np, graphwright as gw
        >>> square = gw.compile(lambda x: x * x).bind(np.zeros(3, np.float32))
        >>> np.copyto(square.inputs["x"], [1, 2, 3])
        >>> square()
        >>> square.outputs["out"].tolist()
        [1.0, 4.0, 9.0]
        """
        return self.plan(*args).bind()

    def executable(self, *args: Any) -> Executable:
        """The memory in which arguments of these shapes are run."""
        return self._entry(tuple(as_tensor(a).spec for a in args)).executable

    def _entry(self, specs: tuple[Spec, ...]) -> _Entry:
        key = (specs, modes())
        entry = self._entries.get(key)
        if entry is None or not entry.fresh:
            self.traces += 1
            with uncollected():
                entry = self._entries[key] = _Entry(*record(self.fn, specs), self.options)
            entry.mode = key[1]
            if len(self._entries) > _LIMIT:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        entry.seen = changes.count
        return entry


class _Entry:
    """One traced signature."""

    def __init__(self, program: Program, recorder: TraceRecorder, result: Any, options: Mapping[str, Any]) -> None:
        self.program, self.dependencies = program, recorder.dependencies
        self.names = [program.path(n) for n in program.inputs()]
        specs = {program.path(n): program.spec(n) for n in program.inputs()}
        self.executable = plan_for(program, specs, **options).new_executable(shared=True)
        self.mode: tuple[Any, ...] = ()
        self.seen = -1
        self._result, self._one = result, isinstance(result, Tensor)
        self._facts = recorder.facts
        self._variables = [(v, v.requires_grad, v.spec) for v, _ in recorder.variables.values()]

    def taken(self, args: Sequence[Any]) -> list[NDArray] | None:
        """The arrays of tensors that fit this signature, if nothing changed since it was asked for; else None."""
        if self.seen != changes.count or self.mode != modes():
            return None
        if self._facts and any(fact() != value for fact, value in self._facts):
            return None
        return self.executable.fitting(args, len(args))

    @property
    def fresh(self) -> bool:
        """False once what the trace relied on is not so any more: the version of a program that the function ran, a
        variable's spec and whether it is trained, the mode of a module.
        """
        if any(v.requires_grad != trained or v.spec != spec for v, trained, spec in self._variables):
            return False
        if any(fact() != value for fact, value in self._facts):
            return False
        return all(p.version == version for p, version in self.dependencies.values()) and self.executable.plan.fresh

    def shape(self, outputs: Mapping[str, NDArray]) -> Any:
        """Outputs in the form that the function returned them."""
        if self._one:
            return Tensor(outputs["out"])
        if self._result is None:
            return None
        tensors = {name: Tensor(array) for name, array in outputs.items()}
        if isinstance(self._result, Mapping):
            return {name: tensors[str(name)] for name in self._result}
        return type(self._result)(tensors.values())


def compile(target: Program | Callable[..., Any], **options: Any) -> Any:
    """Make a program or a function run by plan.

    Args:
        target: a Program, or a function of tensors (a training step included).
        options: `executor` ("aten" computes the bits of a run; "auto", the default for a function, may use the VM,
            whose functions lie within 2.5 units in the last place), `device`; `remat` for a function; for a Program
            `outputs`, `freeze`, and `buckets={"T": [16, 128]}` with `mask`, see `Buckets`.
    Returns: a CompiledProgram or CompiledFunction, to be called like the target.
    Raises: UsageError for anything else.
    """
    if isinstance(target, Program):
        return CompiledProgram(target, **options)
    if not callable(target):
        raise UsageError(
            "what is compiled is a Program or a function of tensors",
            where="gw.compile",
            expected="a Program, or something that can be called",
            got=repr(target)[:80],
            fix="gw.compile(program), gw.compile(fn), or @gw.compile above a function",
        )
    return CompiledFunction(target, **options)
