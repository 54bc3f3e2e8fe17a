"""Data that a plan builder reuses for the next plan: node records, and append-only tables with array views."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import attrgetter
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import Layout, Spec
from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.plan.options import VM
from graphwright.plan.planning.passes import ELSEWHERE, FED, TEMPORARY
from graphwright.plan.table import FOLDED, HOST, INPUT, TEMP, Instr, Slot
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.plan.planning.lowering import ExecutorChoice, Lowering, LoweringTable, PackedSpec, Signature
    from graphwright.program.program import Program

tables_lock = RLock()
"""Held while a thread appends to tables, and while one reads them as arrays."""
_CODES = {INPUT: FED, TEMP: TEMPORARY}
_MAIN = 1 << 20  # rank of a node's own instruction, after the copies of its operands


class IndexLists:
    """One list of integers per row of a table, concatenated in arrays for native code.

    Args:
        rows: the rows of the table; more may be appended.
        of: called with a row, returns its list.
        names: lookup table that replaces each integer i of the lists by `names[i]`; None to leave them.
    """

    def __init__(
        self, rows: Sequence[Any], of: Callable[[Any], Sequence[int]], names: array[int] | None = None
    ) -> None:
        self._rows, self._of, self._names = rows, of, names
        self._at, self._data = array("I", [0]), array("I")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return views (start of each list, concatenated lists). Drop both before the next call: it may grow them."""
        new = list(map(self._of, self._rows[len(self._at) - 1 :]))
        if new:
            flat = chain.from_iterable(new)
            self._data.extend(flat if self._names is None else map(self._names.__getitem__, flat))
            self._at.extend(list(accumulate(map(len, new), initial=self._at[-1]))[1:])
        data = np.frombuffer(self._data, np.uint32) if self._data else np.zeros(0, np.uint32)
        return np.frombuffer(self._at, np.uint32), data


class PlanTables:
    """Slots, buffers and instructions of all plans of a builder; rows never change, so older plans stay valid.

    Attributes:
        lowerings: the signatures and lowerings that instructions share.
        slots, buffers, instrs: the rows; a buffer is (kind, bytes, key).
        frozen, holders, shapes: per slot, whether its value is a frozen weight, a folded value or a view of one, its
            buffer, and the id of its dtype and layout.
        sizes, codes: per buffer, its bytes in the arena, and its location as a number: `FED` (input in the arena),
            `TEMPORARY` (other buffer in the arena) or `ELSEWHERE` of module `passes`.
        on_host: buffers that are in host memory although the plan is for a device.
        folds: folded buffer -> the instruction that computes it once, outside of runs.
        lowering_of: per instruction, the number of its lowering.
        ranks: per instruction, a number that orders the instructions of one node.
        reads, outs, works, pairs: per instruction, its operand, result and scratch buffers, and the (result, operand)
            buffers that may share memory.
    """

    def __init__(self, lowerings: LoweringTable) -> None:
        self.lowerings = lowerings
        self.slots: list[Slot] = []
        self.frozen: list[bool] = []
        self.holders, self.shapes = array("i"), array("i")
        self.buffers: list[tuple[str, int, str]] = []
        self.sizes, self.codes = array("q"), array("b")
        self.on_host: set[int] = set()
        self.folds: dict[int, Instr] = {}
        self.instrs: list[Instr] = []
        self.lowering_of = array("i")
        self.ranks: list[int] = []
        self.reads, self.outs, self.works = (
            IndexLists(self.instrs, attrgetter(name), self.holders) for name in ("ins", "outs", "work")
        )
        self._pairs: list[tuple[int, ...]] = []
        self.pairs = IndexLists(self._pairs, lambda pairs: pairs)
        self._cache: dict[Any, Any] = {}

    # -- new rows ----------------------------------------------------------------------------------------------------
    def view(self, value: Value | None, buffer: int, dtype: Any, layout: Layout, base: int, frozen: bool) -> int:
        """Add a slot that is a view of the slot `base` in `buffer`; return its index."""
        self.slots.append(Slot(index := len(self.slots), value, buffer, dtype, layout, base))
        self.frozen.append(frozen)
        self.holders.append(buffer)
        self.shapes.append(self.lowerings.shape_number(dtype, layout))
        return index

    def slot(self, value: Value | None, spec: Spec, kind: str = TEMP, key: str = "", frozen: bool = False) -> int:
        """Add a slot with its own buffer, whose `kind` and `key` are as in `Buffer`; return the slot's index."""
        return self.packed_slot(value, self.lowerings.packed(spec), kind, key, frozen)

    def packed_slot(
        self, value: Value | None, packed: PackedSpec, kind: str = TEMP, key: str = "", frozen: bool = False
    ) -> int:
        """Add a slot with its own buffer, as `slot` does, for a spec whose size and layout are known."""
        index, buffer = len(self.slots), len(self.buffers)
        nbytes, room, dtype, layout, shape = packed
        self.buffers.append((kind, nbytes, key))
        self.sizes.append(room)
        self.codes.append(_CODES.get(kind, ELSEWHERE))
        self.slots.append(Slot(index, value, buffer, dtype, layout, index))
        self.frozen.append(frozen)
        self.holders.append(buffer)
        self.shapes.append(shape)
        return index

    def instruction(self, instr: Instr, rank: int = _MAIN, lowering: Lowering | None = None) -> int:
        """Add an instruction and return its id; `rank` orders those of one node. A `lowering` of None is looked up."""
        if lowering is None:
            lowering = self.lowerings.lowering(instr, self.slots, self.shapes)
        self.instrs.append(instr)
        self.ranks.append(rank)
        self.lowering_of.append(lowering.number)
        self._pairs.append(self._shareable(instr, lowering) if lowering.inplace else ())
        return len(self.instrs) - 1

    def _shareable(self, instr: Instr, lowering: Lowering) -> tuple[int, ...]:
        """Return the pairs of result and operand buffers of an instruction that may share memory, as a flat tuple."""
        holders, buffers, pairs = self.holders, self.buffers, ()
        for out, operand in lowering.inplace:
            a, b = holders[instr.outs[out]], holders[instr.ins[operand]]
            if buffers[a][1] == buffers[b][1]:
                pairs += (a, b)
        return pairs

    def move_to_host(self, buffer: int) -> None:
        """Put a buffer into host memory, outside of the arena."""
        _, size, key = self.buffers[buffer]
        self.on_host.add(buffer)
        if self.codes[buffer] != ELSEWHERE:
            self.buffers[buffer], self.codes[buffer] = (HOST, size, key), ELSEWHERE

    def fold(self, instr: Instr) -> None:
        """Register an instruction as constant-folded: it runs once per weight version, not in every run."""
        for slot in instr.outs:
            self.folds[self.holders[slot]] = instr

    # -- facts of instructions ---------------------------------------------------------------------------------------
    def choice(self, q: int) -> ExecutorChoice:
        """Return the executor of instruction `q`, and the reason if it is not the VM."""
        return self.lowerings.all[self.lowering_of[q]].choice

    def native(self, order: np.ndarray) -> np.ndarray:
        """Return the mask of the instructions in `order` that run on the VM."""
        return self._by_lowering([low.choice.executor == VM for low in self.lowerings.all], order)

    def fusible(self, order: np.ndarray) -> np.ndarray:
        """Return the mask of the instructions in `order` that may join a fusion group."""
        return self._by_lowering([low.fusible for low in self.lowerings.all], order)

    def collective(self, order: np.ndarray) -> np.ndarray:
        """Return the mask of the instructions in `order` that talk to other ranks."""
        return self._by_lowering([low.collective for low in self.lowerings.all], order)

    def _by_lowering(self, facts: list[bool], order: np.ndarray) -> np.ndarray:
        if not any(facts):
            return np.zeros(len(order), np.bool_)
        with tables_lock:
            return np.array(facts)[np.frombuffer(self.lowering_of, np.int32)[order]]

    def overwritten(self, q: int) -> set[tuple[int, int]]:
        """Return the pairs (result, slot) of instruction `q`: it may write the result into the memory of the slot.

        It may if exactly one operand reads the slot, in the slot's own layout, and the op may overwrite that operand.
        """

        def make() -> set[tuple[int, int]]:
            instr, slots = self.instrs[q], self.slots
            bases = [slots[s].base for s in instr.ins]
            readers, found = Counter(bases), set[tuple[int, int]]()
            for out, operand in get(instr.op).inplace(len(bases), len(instr.outs)):
                base = bases[operand] if operand < len(bases) else -1
                if readers[base] == 1 and slots[instr.ins[operand]].layout == slots[base].layout:
                    found.add((instr.outs[out], base))
            return found

        return self._once(("overwritten", q), make)

    # -- rows that later plans need again ----------------------------------------------------------------------------
    def saved_copy(self, slot: int, node: NodeId, why: str) -> tuple[int, int]:
        """Return (slot of a copy of the value in `slot`, id of the copying instruction with fields `node`, `why`)."""

        def make() -> tuple[int, int]:
            at = self.slots[slot]
            target = self.slot(at.value, at.spec)
            return target, self.instruction(Instr("copy", (slot,), (target,), (), {}, node, why))

        return self._once((slot, node, why), make)

    def commit_copy(self, node: NodeId, new: int, target: int) -> int:
        """Return the id of the instruction by which an assign node copies slot `new` into the state's slot `target`."""
        copy = Instr("copy", (new,), (target,), (), {}, node, "commit")
        return self._once((node, new, target), lambda: self.instruction(copy))

    def folded_copy(self, slot: int, node: NodeId) -> int:
        """Return the slot of a row-major copy of a frozen value, made again only when the weights change."""
        at = self.slots[slot]

        def make() -> int:
            target = self.slot(None, at.spec, FOLDED, frozen=True)
            self.fold(Instr("copy", (slot,), (target,), (), {}, node, "its reader needs row-major memory"))
            return target

        return self._once(("packed", at.base, at.layout), make)

    def same_view_of(self, slot: int, base: int) -> int:
        """Return a slot that is a view of the slot `base`, with the dtype and layout of `slot`."""
        at, to = self.slots[slot], self.slots[base]
        return self._once(
            ("view", slot, base), lambda: self.view(None, to.buffer, at.dtype, at.layout, base, frozen=False)
        )

    def with_operands(self, q: int, ins: tuple[int, ...]) -> int:
        """Return the id of a copy of instruction `q` that reads the operands `ins`."""
        return self._once(("reading", q, ins), lambda: self.instruction(self.instrs[q]._replace(ins=ins)))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, cached by `key`, so that later plans get the same slots and instructions."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


class InstructionOrder:
    """A list of instructions sorted by key, with batched insertions and removals.

    Attributes:
        now: int32 array of instruction ids, as of the last `update`.
    """

    def __init__(self) -> None:
        self.now = np.zeros(0, np.int32)
        self._removed: set[int] = set()
        self._added: list[int] = []

    def remove(self, instr: int) -> None:
        """Remove an instruction at the next `update`; -1 is ignored."""
        self._removed.add(instr)

    def add(self, instr: int) -> None:
        """Insert an instruction at the next `update`."""
        self._added.append(instr)

    def reset(self, instrs: list[int]) -> None:
        """Replace the whole order."""
        self.now = np.array(instrs, np.int32)

    def update(self, key: Callable[[int], tuple[int, ...]], count: int) -> None:
        """Apply the removals and insertions since the last update to `now`.

        Args:
            key: returns the sort key of an instruction.
            count: number of instructions in the tables.
        """
        removed, added, order = self._removed - {-1}, self._added, self.now
        if removed:
            out = np.zeros(count, np.bool_)
            out[list(removed)] = True
            order = order[~out.take(order)]
        if len(added) * 8 > len(order):
            order = np.array(sorted([*order.tolist(), *added], key=key), np.int32)
        elif added:
            added.sort(key=key)
            order = _inserted(order, added, [bisect_left(order, key(q), key=key) for q in added])
        self.now, self._removed, self._added = order, set(), []


def _inserted(order: np.ndarray, added: list[int], at: list[int]) -> np.ndarray:
    """Insert each `added[i]` before index `at[i]`; `at` is ascending. Faster than `np.insert` for few insertions."""
    pieces: list[Any] = []
    for start, stop, q in zip([0, *at], at, added, strict=False):
        pieces += (order[start:stop], [q])
    return np.concatenate([*pieces, order[at[-1] :]], dtype=np.int32)


class RewriteRecord(NamedTuple):
    """One application of a rewrite rule: the replaced node, the node `into` which replaces it (None for a constant),
    and an error bound, or "" if no bit changes.
    """

    rule: str
    node: NodeId
    into: NodeId | None
    bound: str = ""


@dataclass(slots=True, eq=False)
class NodeRecord:
    """The planning results of one node.

    Attributes:
        node, path, op, attrs: the node, its path, op and attributes; a rewrite may change `op` and `attrs`.
        specs: specs of the results; without named sizes once the record is planned.
        sources: operands of the node in the program.
        reads: slots of the operands, after rewrites.
        results: slots of the results; if a rewrite replaced the node by another one, slots of the other node's record.
        own: slots made for this record, including the scratch of its instruction.
        instr: id of its instruction, or -1.
        copies: keys of the row-major copies of operands that it reads; several nodes may share one.
        rewrites: rewrites applied to the node.
        cse_key: key that is equal for records that compute the same value; None for a record that is never merged.
        signature: planning results shared with records of equal op, attributes, specs and operand layouts.
    """

    node: NodeId
    path: str
    op: str
    attrs: Mapping[str, Any]
    specs: tuple[Spec, ...]
    sources: Sequence[Value]
    reads: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    instr: int = -1
    copies: tuple[Any, ...] = ()
    rewrites: tuple[RewriteRecord, ...] = ()
    cse_key: Any = None
    signature: Signature = None  # pyright: ignore[reportAssignmentType]  # set for every op

    def log(self, rule: str, into: NodeId | None, bound: str = "") -> None:
        """Append a rewrite of this node to `rewrites`."""
        self.rewrites = (*self.rewrites, RewriteRecord(rule, self.node, into, bound))


@dataclass(slots=True, eq=False)
class SharedCopy:
    """A row-major copy of the slot `source` in the slot `target`, made by the instruction `instr`.

    `wanted` maps each node that reads the copy to (number of the operand, why it needs the copy).
    """

    source: int
    target: int
    instr: int = -1
    wanted: dict[NodeId, tuple[int, str]] = field(default_factory=dict)


class SourceTable(NamedTuple):
    """Inputs, params, consts and states in program order: slots, buffers, and weight keys (None for an input)."""

    slots: list[int]
    holders: np.ndarray
    keys: list[str | None]


class CseTable:
    """A table of nodes by the value that they compute, for common-subexpression elimination (CSE).

    The first of several nodes that compute the same value is their representative.

    Args:
        order: returns the sort key of a node.
        revisit: called with each node whose representative may have changed.
    """

    def __init__(self, order: Callable[[NodeId], Any], revisit: Callable[[NodeId], None]) -> None:
        self._order, self._revisit = order, revisit
        self._members: dict[Any, dict[NodeId, None]] = {}
        self._first: dict[Any, NodeId] = {}

    def enter(self, node: NodeId, key: Any) -> NodeId:
        """Add a node; return the first node with the same key (it computes the same value), maybe the node itself."""
        members, known = self._members.setdefault(key, {}), self._first.get(key)
        members[node] = None
        candidates = members if known is None or known == node else (known, node)  # all: `known` left or moved
        first = min(candidates, key=self._order)
        if first != known:
            self._first[key] = first
            self._revisit_others(node, key)
        return first

    def leave(self, node: NodeId, key: Any) -> None:
        """Remove a node from those with this key; if it was their representative, the next one takes its part."""
        members = self._members[key]
        del members[node]
        if self._first.get(key) == node:
            del self._first[key]
            self._revisit_others(node, key)
        if not members:
            del self._members[key]

    def changed(self, node: NodeId, key: Any) -> None:
        """Revisit the other nodes with this key if `node` represents them; it was moved or has new result slots."""
        if self._first.get(key) == node:
            self._revisit_others(node, key)

    def _revisit_others(self, node: NodeId, key: Any) -> None:
        for other in self._members[key]:
            if other != node:
                self._revisit(other)


class AllRecords(NamedTuple):
    """Fresh records of all nodes in program order. The results of all nodes are numbered consecutively in that order.

    Attributes:
        records: one record per node.
        begins: per record the number of its first result, followed by the total number of results.
        reads: numbers of the results that records read, sorted by record and port.
        stops: per record the end of its entries in `reads`.
    """

    records: list[NodeRecord]
    begins: list[int]
    reads: list[int]
    stops: list[int]


def all_records(p: Program) -> AllRecords:
    """Make a record for every node of a program."""
    graph = p.graph
    flat = graph.csc()
    nodes = list(flat.nodes)
    order = np.array(sorted(range(len(nodes)), key=list(map(p.order_labels.key, nodes)).__getitem__), np.int64)
    position = np.empty(len(nodes), np.int64)
    position[order] = np.arange(len(nodes))
    names, ops, attrs, specs = (np.asarray(graph.nodes[c])[order].tolist() for c in ("name", "op", "attrs", "specs"))
    nodes = [nodes[i] for i in order.tolist()]
    results = np.fromiter(map(len, specs), np.int64, len(nodes))
    begins = np.concatenate([[0], np.cumsum(results)])

    targets = position[np.repeat(np.arange(len(nodes)), np.diff(flat.indptr))]
    by_port = np.lexsort((np.asarray(graph.edges["dst_port"][flat.edges]), targets))
    ports = np.asarray(graph.edges["src_port"][flat.edges])[by_port]
    reads = (begins[position[flat.indices[by_port]]] + ports).tolist()
    stops = np.cumsum(np.bincount(targets, minlength=len(nodes))).tolist()

    owners = np.repeat(np.arange(len(nodes)), results)
    numbers = np.arange(len(owners)) - begins[owners]
    values = list(map(Value, map(nodes.__getitem__, owners.tolist()), numbers.tolist()))
    sources = tuple(map(values.__getitem__, reads))
    read = [sources[a:b] for a, b in zip([0, *stops], stops, strict=False)]
    return AllRecords(list(map(NodeRecord, nodes, names, ops, attrs, specs, read)), begins.tolist(), reads, stops)
