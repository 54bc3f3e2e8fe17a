"""The tables of a plan: buffers hold bytes, slots are views of buffers, instructions read and write slots.

Invariant: exactly one instruction writes each slot of a temp buffer; the address of an element is the offset of its
buffer plus the offset that the slot's layout gives.
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
    """One block of memory.

    Attributes:
        index: position in `plan.buffers`.
        kind: input, param, const, state, temp, folded (computed from frozen weights when the plan is bound), host (an
            input that only the host reads, in a plan for a device), moved (its slots use the memory of another buffer,
            as in-place results do), unused, or tile (used inside one fusion group only; it gets memory only if the
            group is run instruction by instruction).
        nbytes: size in bytes.
        key: key of its variable, or path of the input or folded node whose value it holds; else "".
        first, last: first and last instruction that needs its bytes; an input is needed from the start of the run, an
            output to its end.
        offset: offset in the arena; for a tile the index of the tile; -1 for memory of a variable.
        on_host: True if it is in host memory although the plan runs on a device.
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
        value: the program value that it holds; None for scratch and for row-major copies.
        buffer: index of the buffer.
        dtype: element type.
        layout: shape, strides and offset within the buffer, in elements.
        base: index of the slot that this one is a view of, or its own index.
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
        op: the kernel: the node's op, or `copy` to change a layout or write a state.
        ins, outs, work: slots of operands, results and scratch.
        attrs: attributes of the op.
        node: the node that it runs or prepares operands for.
        why: the reason for an instruction that is not the node's own op, such as a copy; else "".
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
    """The grouping of instructions into dispatches.

    Attributes:
        groups: fusion groups, each executed as one loop over tiles; on a device with graphs, captured regions.
        coverage: fraction of the instructions that are in groups.
        dispatches: calls in one run: one per VM segment or captured region, and one per other instruction.
    """

    groups: tuple[tuple[int, ...], ...]
    coverage: float
    dispatches: int


class ArenaSpan(NamedTuple):
    """A span of the arena: the buffer that uses it, and the first and last instruction that needs it."""

    buffer: int
    offset: int
    nbytes: int
    first: int
    last: int


class Firing(NamedTuple):
    """One application of a rewrite rule.

    Attributes:
        rule: name of the rule.
        node: path of the replaced node.
        into: path of the node that replaces it, or "constant".
        bound: for a rule that rounds differently, the largest possible distance from the exact result.
    """

    rule: str
    node: str
    into: str
    bound: str = ""
