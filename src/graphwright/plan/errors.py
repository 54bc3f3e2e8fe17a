"""Errors of planning and running plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from graphwright.array import Device, NDArray
from graphwright.array.memory_pool import SLAB, OutOfDeviceMemory
from graphwright.errors import ComputeError, Facts, GraphwrightError, OutOfMemory, UsageError
from graphwright.graph import NodeId
from graphwright.ops.call import kernel_error
from graphwright.plan.table import ARENA
from graphwright.program.run import origin

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.program.program import Program


def checked_index(plan: Any, column: str, i: Any, count: int) -> int:
    """Return `i` as an int. Raises: UsageError if it is not an index into `plan.<column>` with `count` entries."""
    if isinstance(i, int | np.integer) and not isinstance(i, bool) and 0 <= i < count:
        return int(i)
    expected = f"an integer in 0..{count - 1}" if count else f"no index: plan.{column} is empty"
    raise UsageError(f"invalid index of plan.{column}", where=plan.program.name, expected=expected, got=repr(i),
                     fix=f"pass the index of an entry of plan.{column}")  # fmt: skip


class StalePlan(ComputeError):
    """The plan can no longer run: it was closed, or a constant or the shape of a weight changed after planning."""


class StepTorn(ComputeError):
    """A step failed after some states were already updated.

    Attributes:
        failure: the error of the instruction that failed.
        keys: keys of the states that already hold new values; all other states hold their old ones.
    """

    def __init__(self, cause: GraphwrightError, keys: tuple[str, ...]) -> None:
        got = f"new values in {', '.join(keys)}" + ("" if cause.got is None else f"; {cause.got}")
        fix = "restore these states from a copy; an Executable(plan, safe=True) keeps one"
        expected = "all states as before the step"
        super().__init__(cause.what, where=cause.where, got=got, expected=expected, fix=fix)
        self.failure, self.keys = cause, keys


class DeviceFailed(ComputeError):
    """An instruction failed on the device; raised when the host waits for it, to write states or to read a value."""

    @classmethod
    def of(cls, program: Program, node: NodeId, path: str, op: str, ins: Sequence[NDArray], error: Exception) -> Self:
        """Make the error for a node whose kernel, of the op `op` on the operands `ins`, failed with `error`."""
        known = kernel_error(op, ins, error, path)
        made = cls(f"an instruction failed on the device: {known.what}", where=known.where, got=known.got)
        if node in program.graph:
            made.add_note(origin(program, node))
        return made


class PlanOutOfMemory(OutOfMemory):
    """Too little memory for a plan's arena, or for one value; plans whose arena is already allocated still run.

    Attributes:
        needed: bytes of the arena, or of the largest value if nothing was planned.
        lower_bound: minimum bytes of any layout of the arena.
        largest: (bytes, path of the node) for each of the largest buffers.
        room: bytes that are left for the arena beside copies of the outputs; None if this is not known.
        with_remat: bytes of the arena if values are computed again to make it smaller; None if this was not tried.
    """

    def __init__(
        self, what: str, *, needed: int, lower_bound: int, largest: tuple[tuple[int, str], ...],
        room: int | None = None, with_remat: int | None = None, **facts: Unpack[Facts],
    ) -> None:  # fmt: skip
        facts.setdefault("got", "; ".join(f"{path} {size:,}" for size, path in largest))
        facts.setdefault("fix", "a smaller batch, remat=bytes, or several runs on parts of the batch")
        super().__init__(what, **facts)
        self.needed, self.lower_bound, self.largest = needed, lower_bound, largest
        self.room, self.with_remat = room, with_remat

    @classmethod
    def of_arena(cls, plan: Plan, device: Device, cause: Exception) -> Self:
        """Make the error for a plan whose arena cannot be allocated on `device`.

        If the cause says how much memory is left, the error says what computing values again would save.
        """
        first: dict[int, str] = {}
        for slot in plan.result_slots():
            assert slot.value is not None
            first.setdefault(slot.buffer, plan.path(slot.value.node))
        buffers = sorted((b for b in plan.buffers if b.kind in ARENA and b.last >= 0), key=lambda b: -b.nbytes)[:5]
        largest = tuple((b.nbytes, first.get(b.index, "scratch")) for b in buffers)
        facts: Facts = {
            "where": plan.program.name,
            "expected": f"{plan.arena_bytes:,} bytes, of which {plan.lower_bound:,} are live at once",
        }
        room = with_remat = None
        if isinstance(cause, OutOfDeviceMemory) and plan.options.remat is None:
            sizes = [plan.slots[s].spec.nbytes for s in plan.outputs.values()]  # a run returns copies
            room = max(cause.room - sum(-(-size // SLAB) * SLAB for size in sizes), 0)
            with_remat = plan.arena_with_remat(room)
            held = "; ".join(f"{path} {size:,}" for size, path in largest)
            facts["got"] = f"room for {room:,} bytes beside the outputs; the largest buffers: {held}"
            least = f"with remat={with_remat} the arena takes {with_remat:,} bytes"
            facts["fix"] = least if with_remat <= room else f"a smaller batch, as even {least}"
        what = f"out of memory for the plan's arena on {device}"
        known: Any = {"largest": largest, "room": room, "with_remat": with_remat, **facts}
        return cls(what, needed=plan.arena_bytes, lower_bound=plan.lower_bound, **known)


class PlanReplaced(Exception):
    """Internal signal that another thread's edit handed the executable to a later plan before the run began."""
