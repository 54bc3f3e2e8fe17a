"""Run an op as a sequence of simpler ops, its expansion, on a backend that has no kernel for it.

The op's `expand` function runs once on specs that record the ops applied to them. On a backend, the steps' kernels are
bound one after the other, with planned scratch buffers for inner values; `workspace`, `bind` and `needs` do for any op
what these methods of a `Backend` do for a kernel. `vm_form` does so for the VM, where an elementwise expansion becomes
one loop over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from graphwright.array.backend import Attrs, Backend, Call, Needs, backend
from graphwright.array.device import CPU
from graphwright.array.dtype import DType, bool_, float32, float64, int64
from graphwright.array.layout import Layout, is_row_major, row_major
from graphwright.array.ndarray import NDArray
from graphwright.array.spec import Spec
from graphwright.array.vm.encode.fuse import TILES, Inner, Member, encode_group
from graphwright.array.vm.encode.operands import Row, View, VmForm
from graphwright.ops.casting import is_cast, target_dtype
from graphwright.ops.registry import Op, get


class ExpansionStep(NamedTuple):
    """One op of an expansion; `ins` and `outs` are indices of the expansion's values."""

    row: Op
    ins: tuple[int, ...]
    attrs: Attrs
    outs: tuple[int, ...]


@dataclass(slots=True)
class Expansion:
    """An op as a sequence of simpler ops."""

    operands: int
    specs: list[Spec]  # of all values; the first `operands` of them are the op's operands
    steps: list[ExpansionStep] = field(default_factory=list)
    constants: dict[int, float] = field(default_factory=dict)  # value -> its number
    results: tuple[int, ...] = ()  # values that are the op's results

    def last_uses(self, roots: Sequence[int]) -> dict[int, int]:
        """Map values to the last step that uses them; results of the op count as used after the last step.

        A use of a view v counts for the value whose memory it shares, `roots[v]`; other values are their own roots.
        """
        last = {roots[v]: n for n, step in enumerate(self.steps) for v in (*step.outs, *step.ins)}
        return last | {roots[v]: len(self.steps) for v in self.results}


def _operators(op: str):  # the type is inferred: that of a Callable binds no self
    """Return the two methods of an operator, such as `__add__` and `__radd__`, that run the op of this name."""
    left = lambda self, other: self.__gw_op__(get(op), (self, other), {})
    return left, lambda self, other: self.__gw_op__(get(op), (other, self), {})


class Arithmetic:
    """Python's arithmetic operators as ops, for operand types with a `__gw_op__` method."""

    __slots__ = ()
    __gw_op__: Callable[..., Any]
    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")

    def __neg__(self) -> Any:
        return self.__gw_op__(get("neg"), (self,), {})


class _Traced(Arithmetic):
    """An operand of `expand`: a spec that records the ops applied to it."""

    def __init__(self, tracer: _Tracer, value: int) -> None:
        self.tracer, self.value, self.spec = tracer, value, tracer.made.specs[value]
        self.shape, self.dtype, self.ndim = self.spec.shape, self.spec.dtype, len(self.spec.shape)

    @staticmethod
    def __gw_op__(row: Op, operands: Sequence[Any], attrs: Attrs, outs: object = None) -> Any:
        return next(o for o in operands if isinstance(o, _Traced)).tracer.record(row, operands, attrs)


class _Tracer:
    def __init__(self, ins: Sequence[Spec], kernels: Backend | _Vm) -> None:
        self.made, self.kernels = Expansion(len(ins), list(ins)), kernels

    def record(self, row: Op, operands: Sequence[Any], attrs: Attrs) -> Any:
        """Append a step, after the casts of its operands; an op without a kernel is expanded in turn."""
        values = self._operands(row, operands)
        if row.view is None and not self.kernels.has_kernel(row.name) and row.expand is not None:
            return row.expand([_Traced(self, v) for v in values], attrs)
        first = len(self.made.specs)
        self.made.specs += row.specs([self.made.specs[v] for v in values], attrs)
        outs = tuple(range(first, len(self.made.specs)))
        self.made.steps.append(ExpansionStep(row, tuple(values), attrs, outs))
        results = tuple(_Traced(self, v) for v in outs)
        return results[0] if len(results) == 1 else results

    def _operands(self, row: Op, operands: Sequence[Any]) -> list[int]:
        kinds = []
        for o in operands:
            if isinstance(o, _Traced):
                kinds.append((o.dtype, "array" if o.shape else "scalar0d"))
            else:
                kinds.append((bool_ if isinstance(o, bool) else int64 if isinstance(o, int) else float64, "python"))
        target, values = target_dtype(row, kinds, None), []
        for port, (o, (dtype, _)) in enumerate(zip(operands, kinds, strict=True)):
            if not isinstance(o, _Traced):
                kind = target or (float32 if dtype is float64 else dtype)
                self.made.constants[len(self.made.specs)] = o
                values.append(len(self.made.specs))
                self.made.specs.append(Spec((), kind))
            elif is_cast(row, port, dtype, target):
                values.append(self.record(get("cast"), (o,), {"dtype": target}).value)
            else:
                values.append(o.value)
        return values


def expansion(row: Op, ins: Sequence[Spec], attrs: Attrs, kernels: Backend | _Vm) -> Expansion:
    """Trace the expansion of an op down to ops that have kernels, or on `_VM` forms of their own."""
    assert row.expand is not None
    tracer = _Tracer(ins, kernels)
    found = row.expand([_Traced(tracer, i) for i in range(len(ins))], attrs)
    tracer.made.results = tuple(t.value for t in (found if isinstance(found, tuple) else (found,)))
    return tracer.made


# -- on a backend ------------------------------------------------------------------------------------------------------
class _Planned(NamedTuple):
    """An expansion with its constants and scratch buffers."""

    made: Expansion
    slots: list[Spec]
    at: dict[int, int]  # value -> the slot that holds it
    copies: dict[tuple[int, int], int]  # (step, operand) -> the slot of a row-major copy
    work: list[list[int]]  # step -> the slots of its kernel's scratch
    constants: dict[int, Any]  # value -> its number, as an array or a view


class _Slots:
    """An allocator of scratch buffers: `take` reuses a released buffer of the same spec, or adds one."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self.free: dict[Spec, list[int]] = {}

    def take(self, spec: Spec) -> int:
        if left := self.free.get(spec):
            return left.pop()
        self.specs.append(spec)
        return len(self.specs) - 1

    def release(self, slot: int) -> None:
        self.free.setdefault(self.specs[slot], []).append(slot)


_plans: dict[tuple[Any, ...], _Planned] = {}
_MOST_PLANS = 1024


def _planned(row: Op, kernels: Backend | _Vm, ins: Sequence[Spec], attrs: Attrs) -> _Planned:
    key = (row, kernels, *ins, repr(attrs))  # by repr, since 0.0 == -0.0
    if (found := _plans.get(key)) is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        found = _plans[key] = _plan(row, kernels, ins, attrs)
    return found


def _plan(row: Op, kernels: Backend | _Vm, ins: Sequence[Spec], attrs: Attrs) -> _Planned:
    made, slots = expansion(row, ins, attrs, kernels), _Slots()
    roots = list(range(len(made.specs)))
    packed = {v: v >= made.operands for v in range(len(made.specs))}  # the layout of an operand is not known here
    for step in made.steps:
        if step.row.view is not None:
            roots[step.outs[0]] = roots[step.ins[0]]
            packed[step.outs[0]] = False
    last, at, copies, work = made.last_uses(roots), dict[int, int](), dict[tuple[int, int], int](), []
    for n, step in enumerate(made.steps):
        needed = (
            range(1) if step.row.view is not None else [p % len(step.ins) for p in step.row.row_major(len(step.ins))]
        )
        for port in needed:
            if not packed[step.ins[port]]:
                copies[n, port] = slots.take(made.specs[step.ins[port]])
        scratch: list[int] = []
        ended = [v for v in at if last[v] == n]
        if step.row.view is None:
            memory = [roots[v] for v in step.ins]
            for out, port in step.row.traits.inplace:  # write over an operand that is not used again
                new, old = step.outs[out], step.ins[port] if port < len(memory) else -1
                if old in ended and memory.count(old) == 1 and made.specs[old] == made.specs[new] and new not in at:
                    at[new] = at[old]
                    ended.remove(old)
            at |= {v: slots.take(made.specs[v]) for v in step.outs if v not in at}
            specs = [made.specs[v] for v in step.outs], [made.specs[v] for v in step.ins]
            scratch = [slots.take(s) for s in kernels.workspace(step.row.name, *specs, step.attrs)]
            for slot in (*scratch, *(copies[n, port] for port in needed if (n, port) in copies)):
                slots.release(slot)
        work.append(scratch)
        for value in (*ended, *(v for v in step.outs if v in at and last[v] == n)):
            slots.release(at[value])
    constants = {value: _number(kernels, made.specs[value].dtype, made.constants[value]) for value in made.constants}
    return _Planned(made, slots.specs, at, copies, work, constants)


def _ends_in_place(made: Expansion) -> bool:
    """Return True if the last step computes the only result, and may write it over each of its operands."""
    return any(
        step.outs == made.results and {(0, port) for port in range(len(step.ins))} <= {*step.row.traits.inplace}
        for step in made.steps[-1:]
    )


def expanded(row: Op, kernels: Backend, attrs: Attrs = MappingProxyType({})) -> bool:
    """Return True if a backend runs an op by its expansion: it has no kernel, or an algorithm is the expansion."""
    if row.expand is None or row.view is not None:
        return False
    asked = row.algorithms is not None and attrs.get("algorithm") in row.algorithms.expands
    return asked or not kernels.has_kernel(row.name)


def workspace(row: Op, kernels: Backend, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return the specs of the scratch buffers that an op needs besides its results."""
    if expanded(row, kernels, attrs):
        return _planned(row, kernels, ins, attrs).slots
    return kernels.workspace(row.name, outs, ins, attrs)


def needs(row: Op, kernels: Backend, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> Needs:
    """Return the host requirements, such as operand values, of an op's kernel or of all kernels of its expansion."""
    if not expanded(row, kernels, attrs):
        return kernels.needs(row.name, outs, ins, attrs)
    made, reads, asked = expansion(row, ins, attrs, kernels), set[int](), []
    for step in (s for s in made.steps if s.row.view is None):
        specs = [made.specs[v] for v in step.outs], [made.specs[v] for v in step.ins]
        asked.append(found := kernels.needs(step.row.name, *specs, step.attrs))
        reads |= {step.ins[port] for port in found.reads}
    return Needs(
        tuple(sorted(v for v in reads if v < made.operands)),
        any(a.answers for a in asked) or any(v >= made.operands for v in reads),
        any(a.allocates for a in asked),
        next((a.fallback for a in asked if a.fallback), ""),
    )


def bind(
    row: Op, kernels: Backend, outs: Sequence[NDArray], ins: Sequence[NDArray], attrs: Attrs, work: Sequence[NDArray]
) -> list[Call]:
    """Bind an op's kernel, or those of its expansion, to arrays; `work`: the scratch buffers listed by `workspace`."""
    if not expanded(row, kernels, attrs):
        return kernels.bind(row.name, outs, ins, attrs, work)
    planned = _planned(row, kernels, [a.spec for a in ins], attrs)
    return _bound(planned, row, kernels, outs, ins, work)


def _bound(
    planned: _Planned, row: Op, kernels: Any, outs: Sequence[Any], ins: Sequence[Any], work: Sequence[Any]
) -> list[Any]:
    """Return the calls of all steps on arrays, or on `_VM` the rows of code on views."""
    made, calls = planned.made, list[Any]()
    arrays: dict[int, Any] = {**dict(enumerate(ins)), **planned.constants}
    arrays |= {value: work[slot] for value, slot in planned.at.items()}
    if not row.inplace(len(ins), len(outs)) or _ends_in_place(made):  # no operand is read after a result is written
        arrays |= {v: out for v, out in zip(made.results, outs, strict=True) if v in planned.at}

    def copied(target: Any, source: Any) -> Any:
        calls.extend(kernels.bind("copy", [target], [source], {}, ()))
        return target

    for n, step in enumerate(made.steps):
        given = [arrays[v] for v in step.ins]
        for port in range(len(given)):
            slot = planned.copies.get((n, port))
            if slot is not None and not is_row_major(given[port].shape, given[port].strides):
                given[port] = copied(work[slot], given[port])
        if step.row.view is not None:
            base = given[0]
            layout = step.row.view(Layout(base.shape, base.strides), step.attrs)
            assert layout is not None, f"{step.row.name}: no view of a contiguous array"
            arrays[step.outs[0]] = _viewed(base, layout)
            continue
        scratch = [work[slot] for slot in planned.work[n]]
        calls += kernels.bind(step.row.name, [arrays[v] for v in step.outs], given, step.attrs, scratch)
    for out, value in zip(outs, made.results, strict=True):
        if arrays[value] is not out:
            copied(out, arrays[value])
    return calls


def _number(kernels: Backend | _Vm, dtype: DType, value: float) -> Any:
    """Return a number as a 0-d array, or on `_VM` as a view."""
    if isinstance(kernels, _Vm):
        return kernels.number(dtype, value)
    made = kernels.empty((), dtype)
    for fill in kernels.bind("full_like", [made], [made], {"value": value}, ()):
        fill()
    return made


def _viewed(base: Any, layout: Layout) -> Any:
    """Return a view, with a layout relative to `base`, of an array or of a VM operand."""
    if isinstance(base, View):
        return View(base.dtype, layout.shape, layout.strides, base.address + layout.offset * base.dtype.itemsize)
    return NDArray(base.storage, base.dtype, layout.shape, layout.strides, base.offset + layout.offset)


# -- on the VM ---------------------------------------------------------------------------------------------------------
SMALL = 1 << 16
"""Bytes of operands and results from which on ATen's kernel of an op is faster than the code of its expansion."""


class _Refused(Exception):
    """An op of an expansion has no VM form for its dtypes or layouts."""


class _Vm:
    """The VM as a backend: its kernels are VM forms of single ops, its arrays are views, its calls rows of code."""

    def __init__(self) -> None:
        self._numbers: dict[Any, np.ndarray] = {}  # kept alive: rows of code hold their addresses

    def has_kernel(self, name: str) -> bool:
        return get(name).vm is not None

    def number(self, dtype: DType, value: float) -> View:
        """Return a view of a number in memory. Raises: _Refused for a dtype that numpy lacks."""
        if dtype.as_bits:
            raise _Refused
        held = self._numbers.setdefault((dtype, repr(value)), np.array(value, dtype.numpy))
        return View(dtype, (), (), held.ctypes.data)

    def workspace(self, name: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        made, read = ([View(s.dtype, s.sizes, row_major(s.sizes)) for s in specs] for specs in (outs, ins))
        return [Spec(v.shape, v.dtype) for v in self._form(name).workspace(made, read, attrs)]

    def bind(
        self, name: str, outs: Sequence[View], ins: Sequence[View], attrs: Attrs, work: Sequence[View]
    ) -> list[Row]:
        """Return rows of code. Raises: _Refused."""
        form = self._form(name)
        fits = [w.shape for w in work] == [w.shape for w in form.workspace(outs, ins, attrs)]
        rows = form.rows(outs, ins, attrs, work) if fits else None
        if rows is None:
            raise _Refused
        return rows

    def _form(self, name: str) -> VmForm:
        form = get(name).vm
        if form is None:
            raise _Refused
        return form


_VM = _Vm()


@cache
def vm_form(row: Op) -> VmForm | None:
    """Return how the VM runs an op: by `row.vm`, or else by its expansion. None if it cannot.

    An elementwise expansion is one loop over tiles; the steps of another one follow each other, and their inner values
    are in planned memory.
    """
    if row.vm is not None or row.expand is None or row.view is not None:
        return row.vm

    def work(outs: Sequence[View], ins: Sequence[View], attrs: Attrs) -> list[View]:
        try:
            if _fused(row, outs, ins, attrs) is None:
                planned = _planned(row, _VM, _specs(ins), attrs)
                return [View(s.dtype, s.sizes, row_major(s.sizes)) for s in planned.slots]
        except _Refused:
            pass
        return []

    def encode(outs: Sequence[View], ins: Sequence[View], attrs: Attrs) -> list[Row] | None:
        try:
            rows = _fused(row, outs, ins, attrs)
            if rows is None:
                planned = _planned(row, _VM, _specs(ins), attrs)
                results = len(outs) - len(planned.slots)
                rows = _bound(planned, row, _VM, outs[:results], ins, outs[results:])
            return rows
        except _Refused:
            return None

    return VmForm(encode, work, limit=None if expanded(row, backend(CPU)) else SMALL)


def _specs(views: Sequence[View]) -> list[Spec]:
    return [Spec(v.shape, v.dtype) for v in views]


def _fused(row: Op, outs: Sequence[View], ins: Sequence[View], attrs: Attrs) -> list[Row] | None:
    """Encode an elementwise expansion as one loop over tiles; return None if the op's expansion is not one."""
    if not row.traits.elementwise:
        return None
    made = expansion(row, _specs(ins), attrs, _VM)
    out, last = outs[0], made.last_uses(range(len(made.specs)))
    for step in made.steps:
        result = made.specs[step.outs[0]]
        if step.row.vm is None or not step.row.traits.elementwise or result.shape != out.shape:
            return None
    if len(made.results) != 1 or made.results[0] < made.operands:
        return None
    if any(spec.dtype not in (float32, bool_) for spec in made.specs):
        return None
    held: dict[int, View | Inner] = dict(enumerate(ins))
    held |= {value: _VM.number(float32, number) for value, number in made.constants.items()}
    free, members = list(range(TILES - 1, -1, -1)), []
    for n, step in enumerate(made.steps):
        (value,) = step.outs
        if value != made.results[0] and not free:
            return None
        held[value] = out if value == made.results[0] else Inner(free.pop())
        assert step.row.vm is not None
        dtypes = [made.specs[v].dtype for v in (*step.outs, *step.ins)]
        members.append(Member(step.row.vm, [held[value]], [held[v] for v in step.ins], step.attrs, dtypes))
        for v in {*step.ins, value}:
            if last[v] == n and isinstance(tile := held[v], Inner):
                free.append(tile.tile)
    return encode_group(out.shape, members)
