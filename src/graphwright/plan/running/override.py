"""A plan, or one of its segments, run by a function of the caller's: the place for a kernel written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import CPU, NDArray
from graphwright.array.layout import span
from graphwright.autograd import Variable, changes
from graphwright.errors import ComputeError, UsageError
from graphwright.plan.errors import place_of
from graphwright.plan.table import CONST, PARAM, STATE

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan

Kernel = Callable[[Mapping[int, NDArray], Mapping[int, NDArray]], object]
"""`fn(ins, outs)`: values by slot; it writes every one of `outs`."""


class OverrideFailed(ComputeError):
    """The function that stands for a plan or segment raised."""


class OverrideMismatch(ComputeError):
    """The function does not compute what it stands for."""


class Override(NamedTuple):
    """A function that stands for instructions `start..stop - 1`; `ins` and `outs` are the slots that it gets."""

    fn: Kernel
    start: int
    stop: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]


def override(plan: Plan, fn: Kernel, segment: int | None = None) -> AbstractContextManager[Override]:
    """Let a function stand for a plan, or one of `plan.segments`, inside the block; what stood there before comes back.

    Args:
        fn: gets what the instructions read from outside and writes what others read of them: outputs and states too.
            `ins` never share memory with `outs`.
    Raises: UsageError for no such segment, or what cannot be called.
    """
    if not callable(fn):
        raise UsageError(
            "what stands for a plan is a function",
            where=plan.program.name,
            expected="fn(ins, outs), which writes every one of outs",
            got=repr(fn)[:80],
            fix="with plan.override(fn): ...",
        )
    segments, start, stop = plan.segments, 0, len(plan.instrs)
    if segment is not None:
        _, start, stop = segments[place_of(plan, "segments", segment, len(segments))]
    return _standing(plan, Override(fn, start, stop, *boundary(plan, start, stop)))


@contextmanager
def _standing(plan: Plan, made: Override) -> Iterator[Override]:
    stack = plan.overrides
    stack.append(made)
    changes.rise()  # workspaces look again
    try:
        yield made
    finally:
        stack.remove(made)
        changes.rise()


def boundary(plan: Plan, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Slots that instructions read from outside, and those of theirs that others read or that outlive the run."""
    inside = plan.instrs[start:stop]
    made = {plan.slots[s].base for instr in inside for s in instr.outs}
    read = dict.fromkeys(s for instr in inside for s in instr.ins if plan.slots[s].base not in made)
    beyond = {plan.slots[s].base for instr in plan.instrs[stop:] for s in instr.ins}
    beyond |= {plan.slots[s].base for s in (*plan.outputs.values(), *plan.watched.values())}
    stored = (PARAM, CONST, STATE)
    kept = [s for i in inside for s in i.outs if s in beyond or plan.buffers[plan.slots[s].buffer].kind in stored]
    return tuple(read), tuple(dict.fromkeys(kept))


class OverrideCall:
    """The call that takes the place of the instructions' own."""

    def __init__(self, plan: Plan, made: Override, view: Callable[[int], NDArray]) -> None:
        self.plan, self.fn = plan, made.fn
        self.outs = {s: view(s) for s in made.outs}
        ins = {s: view(s) for s in made.ins}
        self.ins = ins
        self.apart = [s for s, a in ins.items() if any(_meet(a, o) for o in self.outs.values())]

    def __call__(self) -> None:
        """Run it. Raises: OverrideFailed."""
        given = {**self.ins, **{s: self.ins[s].copy() for s in self.apart}}
        try:
            self.fn(given, self.outs)
        except Exception as error:
            name = getattr(self.fn, "__name__", "the function")
            raise OverrideFailed(f"{name} failed: {error}", where=self.plan.program.name) from error


def check(plan: Plan, feeds: Mapping[str, Any], rtol: float, atol: float) -> None:
    """Run with and without the override on copies of the variables; see `Plan.check_override`."""
    from graphwright.plan.running.executable import Executable

    if not plan.overrides:
        raise UsageError(
            "nothing is overridden",
            where=plan.program.name,
            expected="a check inside of the block",
            got="no function that stands for the plan",
            fix="with plan.override(fn): plan.check_override(feeds)",
        )
    found: list[dict[str, NDArray]] = []
    for overridden in (True, False):
        # what a rewrite relied on stays the program's; nobody writes it
        stored = {b.key for b in plan.buffers if b.kind in (PARAM, CONST, STATE)} - plan.guards.keys()
        copies = {key: Variable(plan.program.weights.array(key).copy(), name=key) for key in stored}
        space = Executable(plan, copies, poison=True)
        space.overridden = overridden
        results = {name: a.to(CPU) for name, a in space.run(feeds).items()}
        found.append({**results, **{f"state {key}": v.data.to(CPU) for key, v in sorted(copies.items())}})
    wrong = []
    for name, expected in found[1].items():
        ours, theirs = (_numbers(a) for a in (found[0][name], expected))
        if not np.allclose(ours, theirs, rtol, atol, equal_nan=True):
            wrong.append(f"{name}: off by up to {np.nanmax(np.abs(ours - theirs), initial=0):.3g}")
            if np.isnan(ours).sum() != np.isnan(theirs).sum():
                wrong[-1] += f", {np.isnan(ours).sum()} values are NaN or were not written"
    if wrong:
        raise OverrideMismatch("not what it stands for:\n  " + "\n  ".join(wrong), where=plan.program.name)


def _numbers(array: NDArray) -> np.ndarray:
    return np.asarray(array.to_numpy("float32") if array.dtype.as_bits else array.to_numpy(), np.float64)


def _meet(a: NDArray, b: NDArray) -> bool:
    """Whether two arrays share bytes."""
    if a.storage is not b.storage:
        return False
    (low, high), (start, end) = (
        (x * t.dtype.itemsize, y * t.dtype.itemsize) for t in (a, b) for x, y in [span(t.layout)]
    )
    return low < end and start < high
