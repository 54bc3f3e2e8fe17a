"""The rows of a plan: buffers hold bytes, slots are views of buffers, instructions write slots from slots.

Invariant: a temp slot is written by one instruction; an address is a buffer's offset plus a slot's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import DType, Layout, Spec
from graphwright.graph import NodeId

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.program.op_graph import Value

INPUT, PARAM, CONST, STATE, TEMP, FOLDED, TILE = "input", "param", "const", "state", "temp", "folded", "tile"
HOST, UNUSED = "host", "unused"
ARENA = frozenset({INPUT, TEMP})
"""Kinds of buffer in the plan's arena; the others are memory of variables."""


@dataclass(slots=True)
class Buffer:
    """One storage.

    Attributes:
        index: position in `plan.buffers`.
        kind: input, param, const, state, temp, folded (computed from frozen weights when the plan is bound), host (an
            input that only the host reads, of a plan on another device), moved (its slots are in another buffer, as an
            in-place result is), unused, or tile (read inside one fusion group only; it has bytes where the group is run
            instruction by instruction).
        nbytes: size.
        key: key of its variable; for a folded result the name of its node, for a folded copy "".
        first, last: first and last instruction that needs its bytes; those of inputs and outputs span the whole run.
        offset: offset in the arena; for a tile its number; -1 for memory of a variable.
        on_host: it is in host memory although the plan runs on another device.
    """

    index: int
    kind: str
    nbytes: int
    key: str = ""
    first: int = -1
    last: int = -1
    offset: int = -1
    on_host: bool = False


class Slot(NamedTuple):
    """A value: a typed view of a buffer.

    Attributes:
        index: position in `plan.slots`.
        value: the value of the program it holds; None for scratch.
        buffer: index of the buffer.
        dtype: element type.
        layout: shape, strides and offset within the buffer, in elements.
        base: the slot this one is a view of, or itself.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # a slot is not searched as a sequence
    value: Value | None
    buffer: int
    dtype: DType
    layout: Layout
    base: int

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        return Spec(self.layout.shape, self.dtype)


class Instr(NamedTuple):
    """One kernel call.

    Attributes:
        op: the kernel: the node's op, or `copy` to change a layout or commit a state.
        ins, outs, work: slots of operands, results and scratch.
        attrs: attributes of the op.
        node: the node it runs.
        why: the reason for a copy that no node asks for.
    """

    op: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    work: tuple[int, ...]
    attrs: Mapping[str, Any]
    node: NodeId
    why: str = ""


class PlanSlice(NamedTuple):
    """Instructions `start..stop - 1` of a plan: `plan[start:stop]`."""

    plan: Plan
    start: int
    stop: int


class Segment(NamedTuple):
    """Instructions `start..stop - 1`, all of one executor: `vm` or `aten`."""

    kind: str
    start: int
    stop: int


class DispatchSchedule(NamedTuple):
    """How instructions become dispatches.

    Attributes:
        groups: runs of elementwise instructions that are one loop over tiles; on a device captured regions.
        coverage: share of instructions inside groups.
        dispatches: calls in one run: one per VM segment or captured region, one per other instruction.
    """

    groups: tuple[tuple[int, ...], ...]
    coverage: float
    dispatches: int


class ArenaSpan(NamedTuple):
    """Bytes of the arena, their buffer, and the first and last instruction that needs them."""

    buffer: int
    offset: int
    nbytes: int
    first: int
    last: int


class Firing(NamedTuple):
    """One application of a rewrite rule.

    Attributes:
        rule: name of the rule.
        node: path of the node it replaced.
        into: path of the node that replaces it.
        bound: for a rule that rounds differently, the largest possible distance from the exact result.
    """

    rule: str
    node: str
    into: str
    bound: str = ""
