"""What can go wrong when a plan runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.errors import ComputeError, GraphwrightError
from graphwright.plan.table import ARENA

if TYPE_CHECKING:
    from graphwright.array import Device
    from graphwright.plan.plan import Plan


class StepTorn(ComputeError):
    """A step failed after some states were updated in place.

    Attributes:
        failure: what failed.
        keys: of the states that hold new values; the others hold old ones.
    """

    def __init__(self, cause: GraphwrightError, keys: tuple[str, ...]) -> None:
        super().__init__(
            cause.what,
            where=cause.where,
            got=cause.got,
            expected=f"{', '.join(keys)} as before the step",
            fix="restore these states from a copy; a Workspace(plan, safe=True) keeps one",
        )
        self.failure, self.keys = cause, keys


class DeviceFailed(ComputeError):
    """An instruction failed on the device, which the host learns when it waits for it: in front of the commit."""


class OutOfMemory(ComputeError):
    """There is no room for a plan's arena; plans that have theirs go on.

    Attributes:
        needed: bytes of the arena.
        lower_bound: the least that any layout of the plan takes.
        largest: (bytes, path of the node) of the largest buffers.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        first: dict[int, str] = {}
        for slot in plan.shown():
            assert slot.value is not None
            first.setdefault(slot.buffer, plan.path(slot.value.node))
        largest = sorted((b for b in plan.buffers if b.kind in ARENA and b.last >= 0), key=lambda b: -b.nbytes)[:5]
        self.needed, self.lower_bound = plan.arena_bytes, plan.lower_bound
        self.largest = tuple((b.nbytes, first.get(b.index, "scratch")) for b in largest)
        super().__init__(
            f"no room for the plan's arena on {device}",
            where=plan.program.name,
            expected=f"{self.needed:,} bytes, of which {self.lower_bound:,} are live at once",
            got="; ".join(f"{path} {size:,}" for size, path in self.largest),
            fix="a smaller batch, remat=bytes, or rows in parts",
        )
