"""Overrides: functions of the caller, such as handwritten kernels, that run instead of a plan or one segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from graphwright.array import NDArray
from graphwright.array.layout import span
from graphwright.autograd import changes
from graphwright.errors import ComputeError, UsageError
from graphwright.plan.errors import checked_index
from graphwright.plan.table import CONST, PARAM, STATE

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan

Kernel = Callable[[Mapping[int, NDArray], Mapping[int, NDArray]], object]
"""`fn(ins, outs)`: both map slots to arrays; the function writes all of `outs`."""


class OverrideFailed(ComputeError):
    """The overriding function raised an exception."""


class OverrideMismatch(ComputeError):
    """The values computed by the overriding function differ from the plan's."""


class Override(NamedTuple):
    """A function that replaces the instructions `start..stop - 1`, reading the slots `ins` and writing `outs`."""

    fn: Kernel
    start: int
    stop: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]


def override(plan: Plan, fn: Kernel, segment: int | None = None) -> AbstractContextManager[Override]:
    """Run a function instead of a whole plan or one of `plan.segments`, inside a `with` block; blocks may be nested.

    Args:
        fn: called as `fn(ins, outs)`, which map slots to arrays. `ins` are the values that the replaced instructions
            read but do not compute; `outs` are the arrays to fill with the values that other instructions, outputs and
            states need. No array of `ins` shares memory with one of `outs`.
    Raises: UsageError if `segment` is out of range or `fn` is not callable.
    """
    if not callable(fn):
        raise UsageError("the override is not callable", where=plan.program.name,
                         expected="fn(ins, outs), which writes all of outs", got=repr(fn)[:80],
                         fix="with plan.override(fn): ...")  # fmt: skip
    segments, start, stop = plan.segments, 0, len(plan.instrs)
    if segment is not None:
        _, start, stop = segments[checked_index(plan, "segments", segment, len(segments))]
    return _overridden(plan, Override(fn, start, stop, *boundary(plan, start, stop)))


@contextmanager
def _overridden(plan: Plan, made: Override) -> Iterator[Override]:
    stack = plan.overrides
    stack.append(made)
    changes.rise()  # executables refresh
    try:
        yield made
    finally:
        stack.remove(made)
        changes.rise()


def boundary(plan: Plan, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (slots that instructions `start..stop - 1` read but do not compute, slots that they compute for others).

    A slot is computed for others if a later instruction reads it, the plan returns it, or it belongs to a variable.
    """
    inside = plan.instrs[start:stop]
    made = {plan.slots[s].base for instr in inside for s in instr.outs}
    read = dict.fromkeys(s for instr in inside for s in instr.ins if plan.slots[s].base not in made)
    beyond = {plan.slots[s].base for instr in plan.instrs[stop:] for s in instr.ins}
    beyond |= {plan.slots[s].base for s in (*plan.outputs.values(), *plan.watched.values())}
    stored = (PARAM, CONST, STATE)
    kept = [s for i in inside for s in i.outs if s in beyond or plan.buffers[plan.slots[s].buffer].kind in stored]
    return tuple(read), tuple(dict.fromkeys(kept))


class OverrideCall:
    """A call of an override's function, bound to arrays over the memory of its slots."""

    def __init__(self, plan: Plan, made: Override, view: Callable[[int], NDArray]) -> None:
        self.plan, self.fn = plan, made.fn
        self.outs = {s: view(s) for s in made.outs}
        ins = {s: view(s) for s in made.ins}
        self.ins = ins
        self.apart = [s for s, a in ins.items() if any(_share_memory(a, o) for o in self.outs.values())]

    def __call__(self) -> None:
        """Run the function. Raises: OverrideFailed if the function raises."""
        given = {**self.ins, **{s: self.ins[s].copy() for s in self.apart}}
        try:
            self.fn(given, self.outs)
        except Exception as error:
            name = getattr(self.fn, "__name__", "the function")
            raise OverrideFailed(f"the override {name} failed: {error}", where=self.plan.program.name) from error


def _share_memory(a: NDArray, b: NDArray) -> bool:
    if a.storage is not b.storage:
        return False
    (low, high), (start, end) = (
        (x * t.dtype.itemsize, y * t.dtype.itemsize) for t in (a, b) for x, y in [span(t.layout)]
    )
    return low < end and start < high
