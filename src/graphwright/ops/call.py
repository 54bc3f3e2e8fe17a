"""Run an op: on arrays directly; on tensors, builder nodes and other operands by their `__gw_op__` method.

All code calls ops through `call("tanh", x)`; the type of x decides whether the op is computed, taped or recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from graphwright.array.backend import Backend, Call, Fresh, backend
from graphwright.array.device import CPU, DeviceMismatch
from graphwright.array.dtype import DType, float32
from graphwright.array.layout import Layout, row_major, span
from graphwright.array.ndarray import NDArray, empty
from graphwright.array.spec import Spec
from graphwright.array.world import CollectivesDiffer, RankLost, WrongWorld
from graphwright.errors import (
    AliasError,
    ComputeError,
    GraphwrightError,
    IndexOutOfRange,
    NonFinite,
    OutOfMemory,
    ShapeError,
    UsageError,
)
from graphwright.ops import expansion
from graphwright.ops.registry import OPS, Attrs, Op, get

MOST_BYTES = 1 << 16
"""Bytes of operands, results and scratch together from which on copying costs as much as binding."""
FEWEST_CALLS = 4


class BoundCalls(NamedTuple):
    """Kernel calls bound to fixed arrays: running them computes `outs` from `ins`."""

    calls: list[Call]
    ins: list[NDArray]
    outs: list[NDArray]


@dataclass(slots=True)
class CachedBindings:
    """A pool of one op's kernel calls, bound to own buffers of given specs; a thread takes one out while running it."""

    row: Op
    kernels: Backend
    specs: Sequence[Spec]  # of the results; `scratch`: of the kernel's scratch
    scratch: Sequence[Spec]
    # pools by the repr of the attributes, since 0.0 == -0.0
    bound: dict[tuple[str, ...], list[BoundCalls]] = field(default_factory=dict)

    @staticmethod
    def pays(ins: Sequence[NDArray], known: _Dispatch, calls: int) -> bool:
        """Return True if reuse saves time: many kernel `calls` or buffers, and small contiguous operands on the CPU."""
        nbytes = sum(a.nbytes for a in ins) + sum(s.nbytes for s in (*known.specs, *known.scratch))
        reusable = all(a.device is CPU and a.contiguous for a in ins)
        many = known.expanded or calls >= FEWEST_CALLS or len(known.scratch) > 1
        return many and nbytes <= MOST_BYTES and reusable

    def run(self, ins: Sequence[NDArray], attrs: Attrs) -> tuple[NDArray, ...]:
        """Compute new arrays from the operands, with a cached binding if one is free."""
        pool = self.bound.setdefault(tuple(map(repr, attrs.values())), [])
        try:
            bound = pool.pop()
        except IndexError:
            bound = self._bind(ins, attrs)
        for own, given in zip(bound.ins, ins, strict=True):
            self.kernels.copy(own, given)
        for call in bound.calls:
            call()
        results = tuple([out.copy() for out in bound.outs])
        pool.append(bound)
        return results

    def _bind(self, ins: Sequence[NDArray], attrs: Attrs) -> BoundCalls:
        own, outs, work = (
            [self.kernels.empty(s.sizes, s.dtype) for s in specs]
            for specs in ([a.spec for a in ins], self.specs, self.scratch)
        )
        return BoundCalls(expansion.bind(self.row, self.kernels, outs, own, attrs, work), own, outs)


def call(name: str, *operands: Any, out: Any = None, **attrs: Any) -> Any:
    """Run an op on operands of any kind and return its result, or a tuple of results.

    Args:
        out: array or tensor, like the operands, to write the result to and to return (a tuple for several results). It
            has exactly the result's spec, and shares memory with an operand only if the op may overwrite that operand.
    Raises: ShapeError, DTypeError, UsageError, AliasError, ReadOnlyArray before anything is written.
    """
    row = OPS.get(name) or get(name)
    outs = None if out is None else out if isinstance(out, tuple) else (out,)
    for operand in operands if outs is None else (*operands, *outs):
        handler = getattr(type(operand), "__gw_op__", None)
        if handler is not None:
            return handler(row, operands, row.complete(attrs), outs)
    if not all(isinstance(operand, NDArray) for operand in operands):
        expected, got = "an array or a tensor", ", ".join(type(o).__name__ for o in operands)
        raise UsageError("no operand is a tensor", where=name, expected=expected, got=got)
    results = compute(row, operands, row.complete(attrs), outs)
    return results[0] if len(results) == 1 else results


def as_dtype(x: Any, dtype: DType) -> Any:
    """Cast an array, tensor or node to a dtype, unless it has the dtype already."""
    return x if x.dtype is dtype else call("cast", x, dtype=dtype)


def widened(formula: Callable[..., Any], *operands: Any) -> Any:
    """Compute a formula of operands of one dtype in float32 or wider; round the result to their dtype."""
    dtype = operands[0].dtype
    return as_dtype(formula(*(as_dtype(x, float32 if dtype.is_low else dtype) for x in operands)), dtype)


def compute(
    row: Op, ins: Sequence[NDArray], attrs: Attrs, outs: Sequence[NDArray] | None = None
) -> tuple[NDArray, ...]:
    """Run an op on arrays; `attrs` has a value for each attribute.

    Args:
        outs: arrays for the results, of exactly the inferred specs; by default new arrays, or views of the operand.
    Raises: ShapeError, DTypeError, UsageError before any kernel runs.
    """
    if outs is not None:
        ins = on_one_device(row.name, ins, outs)
    device = ins[0].device if ins else CPU
    kernels = backend(device)
    key: list[Any] = [row, kernels]
    for a in ins:
        if a.device is not device:
            return compute(row, on_one_device(row.name, ins), attrs)
        key += (a.dtype, a.shape, a.strides)
    if attrs:
        key += attrs.values()  # 0.0 and -0.0 are equal keys; no cached fact depends on the sign
    try:
        known = _known.get(known_by := tuple(key))
    except TypeError:  # an attribute that cannot be hashed
        known = known_by = None
    try:
        if known is None:
            known = _select(known_by, row, ins, attrs, kernels)
        if outs is None:
            if known.fresh is not None:
                made = known.fresh(*map(_impl, ins), **attrs)
                return (NDArray.owning(made, known.specs[0], known.strides),)
            if known.view is not None:
                view, base = known.view, ins[0]
                return (NDArray(base.storage, base.dtype, view.shape, view.strides, base.offset + view.offset),)
            if known.cached is not None:
                return known.cached.run(ins, attrs)
        if row.view is not None:
            return (_copied(row, ins[0], attrs, known.specs[0], outs),)
        if outs is not None and any(min(out.strides, default=0) < 0 for out in outs):  # kernels cannot write there
            _check_outs(row, outs, ins, known.specs)
            return tuple(out.copy_from(made) for out, made in zip(outs, compute(row, ins, attrs), strict=True))
        return _bound(row, ins, attrs, outs, known, kernels)
    except (IndexError, MemoryError, RuntimeError) as error:
        if isinstance(error, GraphwrightError) and not isinstance(error, NonFinite):
            raise
        raise kernel_error(row.name, ins, error) from error


def _bound(
    row: Op, ins: Sequence[NDArray], attrs: Attrs, outs: Sequence[NDArray] | None, known: _Dispatch, kernels: Backend
) -> tuple[NDArray, ...]:
    new = outs is None
    if known.copied:
        ins = [a.copy() if at in known.copied else a for at, a in enumerate(ins)]
    if outs is None:
        outs = [kernels.empty(s.shape, s.dtype) for s in known.specs]  # pyright: ignore[reportArgumentType]  # all are numbers
    else:
        _check_outs(row, outs, ins, known.specs)
    work = [kernels.empty(s.sizes, s.dtype) for s in known.scratch]
    if known.expanded:
        calls = expansion.bind(row, kernels, outs, ins, attrs, work)
    else:
        calls = kernels.bind(row.name, outs, ins, attrs, work)
    for run in calls:
        run()
    if new and not row.traits.update and CachedBindings.pays(ins, known, len(calls)):
        known.cached = CachedBindings(row, kernels, known.specs, known.scratch)
    return tuple(outs)


def _copied(row: Op, operand: NDArray, attrs: Attrs, spec: Spec, outs: Sequence[NDArray] | None) -> NDArray:
    """Run a view op as a copy, because strides cannot express the view or the caller passed an output array."""
    if outs is not None and not writable_over(row, outs, [operand]):
        raise AliasError("out shares memory with the operand", where=row.name, fix="pass a copy of the operand")
    source = contiguous(operand)
    layout = row.view(source.layout, attrs) if row.view is not None else None
    assert layout is not None, f"{row.name}: no view of a contiguous array"
    target = empty(spec.sizes, spec.dtype, operand.device) if outs is None else outs[0]
    if target.spec != spec:
        raise ShapeError("out does not match the result's spec", where=row.name, expected=spec, got=target.spec)
    return target.copy_from(source.view(layout))


def _check_outs(row: Op, outs: Sequence[NDArray], ins: Sequence[NDArray], specs: Sequence[Spec]) -> None:
    """Check the given outputs and mark each as written. Raises: ShapeError, AliasError, ReadOnlyArray."""
    for out, spec in zip(outs, specs, strict=True):
        if out.spec != spec:
            raise ShapeError("out does not match the result's spec", where=row.name, expected=spec, got=out.spec)
    if not writable_over(row, outs, ins):
        raise AliasError("out shares memory with an operand that the op reads", where=row.name, fix="copy the operand")
    for out in outs:
        out.writable()


_impl = attrgetter("impl")


@dataclass(slots=True)
class _Dispatch:
    """Inferred specs and selected kernel of an op, cached per attributes and operand dtypes, shapes and strides."""

    specs: tuple[Spec, ...]  # of the results; `scratch`: of the kernel's scratch
    scratch: list[Spec]
    copied: frozenset[int]  # indices of operands that are copied to row-major memory first
    view: Layout | None  # layout of a view relative to the operand's offset, or None
    fresh: Fresh | None  # call that allocates and computes the one result, see `Backend.fresh`
    strides: tuple[int, ...]  # strides of a newly allocated first result
    expanded: bool  # the backend runs the op by its expansion
    cached: CachedBindings | None = None  # reusable bindings of a kernel of many calls


_known: dict[Any, _Dispatch] = {}
_MOST_KNOWN = 4096


def _select(key: tuple[Any, ...] | None, row: Op, ins: Sequence[NDArray], attrs: Attrs, kernels: Backend) -> _Dispatch:
    """Infer specs and select a kernel; cache both under `key`, unless it is None. Raises: UsageError if that fails."""
    given = [a.spec for a in ins]
    specs = row.specs(given, attrs)
    view = fresh = None
    scratch: list[Spec] = []
    copied = {i for i, a in enumerate(ins) if min(a.strides, default=0) < 0}
    copied |= {i % len(ins) for i in row.row_major(len(ins)) if not ins[i].contiguous}
    if row.view is not None:
        view = row.view(Layout(ins[0].shape, ins[0].strides), attrs)
    else:
        if any(s.nbytes >= 1 << 63 for s in specs):
            got = ", ".join(map(repr, specs))
            raise OutOfMemory(
                "the result is too large for any machine", where=row.name, expected="< 2**63 bytes", got=got
            )
        scratch = expansion.workspace(row, kernels, specs, given, attrs)
        if not copied:
            fresh = kernels.fresh(row.name, ins, attrs)
    known = _Dispatch(
        specs,
        scratch,
        frozenset(copied),
        view,
        fresh,
        row_major(specs[0].sizes) if specs else (),
        expansion.expanded(row, kernels, attrs),
    )
    if key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known


def on_one_device(op: str, ins: Sequence[NDArray], outs: Sequence[NDArray] = ()) -> Sequence[NDArray]:
    """Copy 0-d CPU operands to the device of the others; return all operands.

    Raises: DeviceMismatch if the other arrays are on different devices.
    """
    device = ins[0].device if ins else CPU
    for array in (*ins, *outs) if outs else ins:
        if array.device is not device:
            break
    else:
        return ins
    given = [*outs, *ins]
    device = next((a.device for a in given if a.device != CPU), CPU)
    for array in given:
        if array.device != device and (array.device != CPU or array.shape or any(array is o for o in outs)):
            got, fix = f"{array.spec} on {array.device}", f'move it with to("{device}")'
            what = "operands or outputs are on different devices"
            raise DeviceMismatch(what, where=op, expected=device, got=got, fix=fix)
    return [a.to(device) for a in ins]


def writable_over(row: Op, outs: Sequence[NDArray], ins: Sequence[NDArray]) -> bool:
    """Return True if no output shares memory with an operand, except where the op may overwrite that operand."""
    readers: dict[int, list[int]] = {}
    for i, operand in enumerate(ins):
        readers.setdefault(id(operand.storage), []).append(i)
    count, results = len(ins), len(outs)
    for o, out in enumerate(outs):
        for i in readers.get(id(out.storage), ()):
            operand = ins[i]
            exact = operand is out or (operand.layout == out.layout and operand.dtype is out.dtype)
            if exact and row.overwrites(o, i, count, results):
                continue
            (a, b), (c, d) = span(operand.layout), span(out.layout)
            size, other = operand.dtype.itemsize, out.dtype.itemsize
            if a * size < d * other and c * other < b * size:
                return False
    return True


FULL = ("allocate memory", "out of memory", "Storage size calculation overflowed", "integer multiplication overflow")
"""Parts of torch's messages when an allocation fails."""


def kernel_error(op: str, ins: Sequence[NDArray], error: Exception, where: str | None = None) -> GraphwrightError:
    """Wrap an exception of a kernel in an error that names op and operands; errors about ranks keep their class.

    An index error gives IndexOutOfRange, an allocation that failed OutOfMemory.
    """
    at = op if where is None else f"{where} ({op})"
    if isinstance(error, NonFinite):
        return NonFinite(error.what, where=at, got=error.got)
    if isinstance(error, RankLost | WrongWorld | CollectivesDiffer):
        error.where = at
        return error
    bounds = isinstance(error, IndexError) or any(text in str(error) for text in ("out of bounds", "out of range"))
    full = isinstance(error, MemoryError) or any(text in str(error) for text in FULL)
    kind = OutOfMemory if full else IndexOutOfRange if bounds else ComputeError
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return kind(f"{op} failed: {reason}", where=at, got=", ".join(repr(a.spec) for a in ins))


def contiguous(array: NDArray) -> NDArray:
    """Return the array if it is row-major, else a row-major copy."""
    return array if array.contiguous else array.copy()
