"""Running a row: on arrays here, on anything else (tensors, builder nodes) by the operand's own `__gw_op__`.

This is the one door to an op. A vjp, a module and a user write `call("tanh", x)`; what happens depends on what x is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphwright.array.backend import Backend, backend
from graphwright.array.device import CPU, Device, DeviceMismatch
from graphwright.array.layout import span
from graphwright.array.ndarray import NDArray, empty
from graphwright.array.spec import Spec
from graphwright.errors import AliasError, ComputeError, GraphwrightError, IndexOutOfRange, NonFinite, ShapeError
from graphwright.ops.registry import Attrs, Op, get


def call(name: str, *operands: Any, out: Any = None, **attrs: Any) -> Any:
    """Run an op on operands of any kind; one result, or a tuple of results.

    Args:
        out: what the result is written into, of its exact spec and of the kind of the operands; one per result. It may
            lie on an operand only as the row's `inplace` trait allows. It is what is returned.
    Raises: ShapeError, DTypeError, UsageError, AliasError, ReadOnlyArray before anything is written.
    """
    row = get(name)
    outs = None if out is None else out if isinstance(out, tuple) else (out,)
    for operand in operands if outs is None else (*operands, *outs):
        handler = getattr(type(operand), "__gw_op__", None)
        if handler is not None:
            full = row.complete(attrs)
            return handler(row, operands, full) if outs is None else handler(row, operands, full, outs)
    results = compute(row, operands, row.complete(attrs), outs)
    return results[0] if len(results) == 1 else results


def compute(
    row: Op, ins: Sequence[NDArray], attrs: Attrs, outs: Sequence[NDArray] | None = None
) -> tuple[NDArray, ...]:
    """Run an op on arrays; attributes are complete.

    Args:
        outs: arrays to write, of exactly the inferred specs; fresh ones (or views of the operand) by default.
    Raises: ShapeError, DTypeError, UsageError before any kernel runs.
    """
    device, ins = on_one_device(row.name, ins, outs or ())
    kernels = backend(device)
    specs, scratch = _prepared(row, ins, attrs, kernels)
    if row.view is not None and outs is None:
        layout = row.view(ins[0].layout, attrs)
        if layout is not None:
            return (ins[0].view(layout),)
    if row.view is not None:  # a view that must copy, or that was asked into given memory
        if outs is not None and not writable_over(row, outs, ins):
            raise AliasError("out shares memory with the operand", where=row.name, fix="give a copy")
        source = contiguous(ins[0])
        layout = row.view(source.layout, attrs)
        assert layout is not None, f"{row.name}: no view of a contiguous array"
        target = empty(specs[0].sizes, specs[0].dtype, device) if outs is None else outs[0]
        if target.spec != specs[0]:
            raise ShapeError(
                "out must have exactly the spec of the result", where=row.name, expected=specs[0], got=target.spec
            )
        return (target.copy_from(source.view(layout)),)
    ins = [a if min(a.strides, default=0) >= 0 else a.copy() for a in ins]
    for place in row.row_major(len(ins)):
        ins[place] = contiguous(ins[place])
    if outs is None:
        outs = [kernels.empty(s.shape, s.dtype) for s in specs]  # pyright: ignore[reportArgumentType]  # all are numbers
    else:
        for out, spec in zip(outs, specs, strict=True):
            if out.spec != spec:
                raise ShapeError(
                    "out must have exactly the spec of the result", where=row.name, expected=spec, got=out.spec
                )
        if not writable_over(row, outs, ins):
            raise AliasError(
                "out shares memory with an operand that the op still reads", where=row.name, fix="give a copy"
            )
        for out in outs:
            out.writable()
    work = [kernels.empty(s.sizes, s.dtype) for s in scratch]
    try:
        for run in kernels.bind(row.name, outs, ins, attrs, work):
            run()
    except (IndexError, RuntimeError) as error:
        if isinstance(error, GraphwrightError) and not isinstance(error, NonFinite):
            raise
        raise kernel_error(row.name, ins, error) from error
    return tuple(outs)


_known: dict[Any, tuple[tuple[Spec, ...], list[Spec]]] = {}
_MOST_KNOWN = 4096


def _prepared(row: Op, ins: Sequence[NDArray], attrs: Attrs, kernels: Backend) -> tuple[tuple[Spec, ...], list[Spec]]:
    """Specs of results and scratch; remembered, since loops ask for the same again. Raises: as `Op.specs`."""
    key: Any = (row.infer, row.name, kernels, *attrs.values(), *[(a.shape, a.dtype) for a in ins])
    try:
        found = _known.get(key)
    except TypeError:  # an attribute that cannot be hashed
        key = found = None
    if found is None:
        given = [a.spec for a in ins]
        specs = row.specs(given, attrs)
        scratch = [] if row.view is not None else kernels.workspace(row.name, specs, given, attrs)
        found = specs, scratch
        if key is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = found
    return found


def on_one_device(op: str, ins: Sequence[NDArray], outs: Sequence[NDArray] = ()) -> tuple[Device, Sequence[NDArray]]:
    """Where an op runs, and its operands there: numbers (arrays of no axes) on the CPU join the others.

    Raises: DeviceMismatch for any other mix.
    """
    device = ins[0].storage.device if ins else CPU
    for array in (*ins, *outs):
        if array.storage.device is not device:
            break
    else:
        return device, ins
    given = [*outs, *ins]
    device = next((a.device for a in given if a.device != CPU), CPU)
    for array in given:
        if array.device != device and (array.device != CPU or array.shape or any(array is o for o in outs)):
            raise DeviceMismatch(
                "operands lie on different devices",
                where=op,
                expected=device,
                got=f"{array.spec} on {array.device}",
                fix=f'to("{device}")',
            )
    return device, [a.to(device) for a in ins]


def writable_over(row: Op, outs: Sequence[NDArray], ins: Sequence[NDArray]) -> bool:
    """True if no output shares memory with an operand, save exactly and where the row lets it take that memory."""
    readers: dict[int, list[int]] = {}
    for i, operand in enumerate(ins):
        readers.setdefault(id(operand.storage), []).append(i)
    for o, out in enumerate(outs):
        for i in readers.get(id(out.storage), ()):
            operand = ins[i]
            exact = operand is out or (operand.layout == out.layout and operand.dtype is out.dtype)
            if exact and row.overwrites(o, i, len(ins), len(outs)):
                continue
            (a, b), (c, d) = span(operand.layout), span(out.layout)
            size, other = operand.dtype.itemsize, out.dtype.itemsize
            if a * size < d * other and c * other < b * size:
                return False
    return True


def kernel_error(op: str, ins: Sequence[NDArray], error: Exception, where: str | None = None) -> ComputeError:
    """A backend's exception as one of ours: which op, on what; an index past its axis as IndexOutOfRange."""
    place = op if where is None else f"{where} ({op})"
    if isinstance(error, NonFinite):
        return NonFinite(error.what, where=place, got=error.got)
    bounds = isinstance(error, IndexError) or any(text in str(error) for text in ("out of bounds", "out of range"))
    kind = IndexOutOfRange if bounds else ComputeError
    said = (str(error) or type(error).__name__).splitlines()[0]
    return kind(f"{op} failed: {said}", where=place, got=", ".join(repr(a.spec) for a in ins))


def contiguous(array: NDArray) -> NDArray:
    """The array itself if its elements lie in row-major order, else a copy that does."""
    return array if array.contiguous else array.copy()
