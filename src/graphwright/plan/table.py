"""The rows of a plan: buffers hold bytes, slots are views of them, instructions write slots from slots.

Invariant: a temp slot is written by one instruction; every address is a buffer's offset plus a slot's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import Spec

if TYPE_CHECKING:
    from graphwright.array import DType, Layout
    from graphwright.graph import NodeId
    from graphwright.program import Value

INPUT, PARAM, CONST, STATE, TEMP, FOLDED, TILE = "input", "param", "const", "state", "temp", "folded", "tile"
HOST, UNUSED = "host", "unused"
ARENA = frozenset({INPUT, TEMP})
"""Kinds of buffer that lie in the plan's arena; the others are memory of variables."""


@dataclass(slots=True)
class Buffer:
    """One storage.

    Attributes:
        index: place in `plan.buffers`.
        kind: input, param, const, state, temp, folded (computed from frozen weights when the plan is bound), host (an
            input that only the host reads, of a plan on another device), moved (its slots lie in another buffer, as an
            in-place result does), unused (nobody needs it), or tile (only a fusion group looks at it; it has bytes
            where the group is run instruction by instruction).
        nbytes: size.
        key: of the variable behind it; of a folded result its node, of a folded copy nothing.
        first, last: instructions between which its bytes are needed, both included; inputs and outputs are widened to
            the whole run.
        offset: place in the arena; of a tile its number; -1 for memory of a variable.
        on_host: it lies on the host, though the plan runs on another device: kernels there ask for its value.
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
        index: place in `plan.slots`.
        value: node and result it stands for; None for scratch.
        buffer: index of the buffer.
        dtype: element type.
        layout: shape, strides and offset within the buffer, in elements.
        base: the slot whose value it shows: itself, or for a view the slot it was taken of.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # a slot is no sequence to search
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
        op: kernel to run: the node's op, or `copy` where a layout has to change or a state is committed.
        ins, outs, work: slot indices.
        attrs: of the op.
        node: the node it runs.
        why: for a copy that no node asked for, the reason.
    """

    op: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    work: tuple[int, ...]
    attrs: Mapping[str, Any]
    node: NodeId
    why: str = ""


class Segment(NamedTuple):
    """A run of instructions `start..stop - 1` of one executor: `vm` or `aten`."""

    kind: str
    start: int
    stop: int


class DispatchSchedule(NamedTuple):
    """How instructions become dispatches.

    Attributes:
        groups: runs of elementwise instructions that are one loop over tiles.
        coverage: share of instructions inside groups.
        dispatches: calls of one run: a segment of the VM is one, each other instruction too.
    """

    groups: tuple[tuple[int, ...], ...]
    coverage: float
    dispatches: int


class ArenaSpan(NamedTuple):
    """Bytes of the arena: whose they are, and between which instructions, both included."""

    buffer: int
    offset: int
    nbytes: int
    first: int
    last: int


class Firing(NamedTuple):
    """One use of a rewrite: the rule, the path of the node it was used on, and what stands for it now.

    Attributes:
        bound: for a rule that rounds otherwise, how far a result may lie from the exact rewrites' one.
    """

    rule: str
    node: str
    into: str
    bound: str = ""
