"""Plan builder: one record per node, reused by the next plan, so that planning after an edit visits few nodes.

A record holds the slots that a node reads after rewrites, the slots of its results and the instruction that computes
them. Planning works from specs: no op runs, no state changes, and no weight is read except constants of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import Layout, NDArray, Spec
from graphwright.graph import NodeId
from graphwright.ops import OPS, Op
from graphwright.plan.options import CompileOptions
from graphwright.plan.planning.fusers import fuser
from graphwright.plan.planning.lowering import LoweringTable, Signature, contiguous
from graphwright.plan.planning.plan_tables import (
    CseTable,
    InstructionOrder,
    NodeRecord,
    PlanTables,
    SharedCopy,
    SourceTable,
    all_records,
)
from graphwright.plan.table import CONST, FOLDED, INPUT, PARAM, STATE, TEMP, Instr
from graphwright.program import kinds
from graphwright.program.incremental import IncrementalWalk
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.plan.planning.fusion import Fusion
    from graphwright.program.program import Program

_KIND = {kinds.PARAM: PARAM, kinds.CONST: CONST, kinds.STATE: STATE, kinds.PATTERN: CONST, kinds.INPUT: INPUT}
FOLD_BYTES = 65536
"""Maximum bytes of a folded value that is larger than what it is computed from."""


class RewriteRule(NamedTuple):
    """A rewrite rule: it is applied to each node record, before the record gets slots and an instruction.

    Attributes:
        apply: called with the builder, a record whose `reads` are set, and its op; returns the slots that replace the
            record's results, or None. It may also change `op`, `attrs` and `reads` of the record.
        matches: True for the ops that the rule is applied to.
    """

    apply: Callable[[PlanBuilder, NodeRecord, Op], tuple[int, ...] | None]
    matches: Callable[[Op], bool]


class PlanBuilder:
    """The node records and tables of a program for given input sizes and options, from which plans are made.

    Args:
        p: the program.
        dims: value of each named size.
        rules: the rewrite rules, in order.
        options: see `CompileOptions`.

    Attributes:
        tables: slots, buffers and instructions.
        order: instructions of all records, in program order.
        records: node -> record.
        given_out: values that are outputs or watched.
        turn: number of plans made so far.
        fusion: the fusion groups of the last plan that had any.
        sent: assign node -> slot of its new value on the device, if that value was computed on the host.
        assumptions: key of a constant whose value a rewrite relied on -> its array, and the array's version then.
        visited: number of record updates so far; tests use it to check that an edit updates few records.
    """

    def __init__(
        self, p: Program, dims: Mapping[str, int], rules: Sequence[RewriteRule], options: CompileOptions
    ) -> None:
        self.tables = PlanTables(LoweringTable(options.chosen, options.device, fuser(options.device)))
        self.program, self.dims, self.rules = p, dict(dims), tuple(rules)
        self.options, self.freeze, self.device = options, options.freeze, options.device
        self.records: dict[NodeId, NodeRecord] = {}
        self.given_out: frozenset[Value] = frozenset()
        self.turn = self.visited = 0
        self.fusion: Fusion | None = None
        self.sent: dict[NodeId, int] = {}
        self.assumptions: dict[str, tuple[NDArray, int]] = {}
        self.order = InstructionOrder()
        self._walk = IncrementalWalk(p)
        self._cse = CseTable(lambda node: p.order_labels.key(node), lambda node: self._revisit((node,)))
        self._copies: dict[Any, SharedCopy] = {}
        self._stale_copies: set[Any] = set()
        self._assigns: list[NodeRecord] | None = None  # in program order, as of the last update
        self._targets: dict[NodeId, NodeId] = {}  # assign node -> the node that it writes
        self._written: set[NodeId] = set()
        self._sources: SourceTable | None = None
        self._history: list[tuple[int, NodeId, NodeRecord | None]] = []
        self._rules_for = cache(lambda op: [rule.apply for rule in rules if rule.matches(OPS[op])])
        self._changed = p.follow()

    # -- updates -----------------------------------------------------------------------------------------------------
    def update(self) -> None:
        """Bring the records up to date with the program, for a new plan."""
        self.turn, self._assigns = self.turn + 1, None
        p, graph = self.program, self.program.graph
        for node in self._changed if self.records else p.assigns():
            self._targets.pop(node, None)
            if node in graph and p.op(node) == kinds.ASSIGN:
                self._targets[node] = p.operands(node)[0].node
        written = set(self._targets.values())
        changed = {*self._changed, *(written ^ self._written)}
        self._changed.clear()
        self._written = written
        self.assumptions = {key: a for key, a in self.assumptions.items() if key in p.weights}
        self.sent.clear()
        self._walk = IncrementalWalk(p)
        if self.records:
            self._revisit(changed)
            for node in changed:
                if node not in graph and (record := self.records.pop(node, None)) is not None:
                    self._history.append((self.turn, node, record))
                    self._retire(record)
            for node in self._walk:
                self._update_record(node, moved=node in changed)
                changed.discard(node)
        else:
            self._make_all()
        for key in self._stale_copies:
            self._move_copy(key)
        self._stale_copies.clear()
        self.order.update(self._order_key, len(self.tables.instrs))

    def records_at(self, turn: int) -> dict[NodeId, NodeRecord]:
        """Return the records as they were when plan number `turn` of this builder was made."""
        records = self.records.copy()  # before the history is read: another thread may extend both
        for changed, node, record in reversed(self._history):
            if changed <= turn:
                break
            if record is None:
                records.pop(node, None)
            else:
                records[node] = record
        return records

    def _make_all(self) -> None:
        records, begins, reads, stops = all_records(self.program)
        self.records = {record.node: record for record in records}
        slots, at = [-1] * begins[-1], 0
        for record, begin, stop in zip(records, begins, stops, strict=False):
            record.reads = tuple([slots[k] for k in reads[at:stop]])
            at = stop
            self._plan(record, None)
            slots[begin : begin + len(record.results)] = record.results
            self._stale_copies.update(record.copies)
        self.visited += len(records)
        self.order.reset([record.instr for record in records if record.instr >= 0])
        self._walk = IncrementalWalk(self.program)  # in order, so no record has to be visited twice

    def _revisit(self, nodes: Iterable[NodeId]) -> None:
        graph = self.program.graph
        self._walk.add(node for node in nodes if node in graph)

    def _update_record(self, node: NodeId, moved: bool) -> None:
        """Rebuild a node's record; schedule its readers if result slots changed. `moved`: an edit changed the node."""
        self.visited += 1
        p, old = self.program, self.records.get(node)
        record = NodeRecord(node, p.path(node), p.op(node), p.attrs(node), p.specs(node), p.operands(node))
        record.reads = tuple([self.records[v.node].results[v.port] for v in record.sources])
        self._plan(record, old)
        self._history.append((self.turn, node, old))
        self.records[node] = record
        if record.op in kinds.SOURCES:
            self._sources = None
        self._stale_copies.update(record.copies)
        if old is not None:
            if old.cse_key is not None and old.cse_key != record.cse_key:
                self._cse.leave(node, old.cse_key)
            self._release_copies(node, set(old.copies) - set(record.copies))
            if old.instr != record.instr or moved:
                self.order.remove(old.instr)
        if record.instr >= 0 and (old is None or old.instr != record.instr or moved):
            self.order.add(record.instr)
        if old is None or old.results != record.results:
            self._revisit(map(p.graph.target, p.graph.out_edges(node)))
        if record.cse_key is not None and old is not None and (moved or old.results != record.results):
            self._cse.changed(node, record.cse_key)

    def _retire(self, record: NodeRecord) -> None:
        """Remove the record of a deleted node from the instruction order, the shared copies and the CSE table."""
        if record.op in kinds.SOURCES:
            self._sources = None
        if record.cse_key is not None:
            self._cse.leave(record.node, record.cse_key)
        self.order.remove(record.instr)
        self._release_copies(record.node, set(record.copies))

    def _order_key(self, q: int) -> tuple[int, int, int]:
        """Return the sort key of an instruction: the position of its node, then its rank among those of the node."""
        return (*self.program.order_labels.key(self.tables.instrs[q].node), self.tables.ranks[q])

    # -- one record --------------------------------------------------------------------------------------------------
    def _plan(self, record: NodeRecord, old: NodeRecord | None) -> None:
        """Set the slots and instruction of a record with known `reads`; `old` is the node's previous record, if any."""
        node, kind = record.node, record.op
        if (row := OPS.get(kind)) is not None and row.sized:
            record.attrs = row.bind_all_sizes(record.attrs, self.dims, record.path)
        if kind in _KIND:
            record.specs = tuple([s.bind(self.dims) for s in record.specs])
            key = record.path if kind == INPUT else record.attrs["key"]
            frozen = node not in self._written and (
                (kind == CONST and bool(self.rules)) or (kind == PARAM and self.freeze)
            )
            record.own = (self._slot(old, 0, Value(node), record.specs[0], _KIND[kind], key, frozen),)
            record.results = record.own
        elif kind == kinds.ASSIGN:
            record.specs = tuple([s.bind(self.dims) for s in record.specs])
        else:
            self._plan_op(record, old)

    def _plan_op(self, record: NodeRecord, old: NodeRecord | None) -> None:
        lowerings, shapes = self.tables.lowerings, self.tables.shapes
        if self.dims:
            lowerings.check_sizes(record, self.dims, shapes)
        if (ways := OPS[record.op].algorithms) is not None:
            record.attrs = ways.forced(record.attrs, getattr(self.options, ways.option))
        signature, reads = lowerings.signature(record, self.dims, shapes), record.reads
        op, record.specs, record.signature = signature.op, signature.specs, signature
        for apply in self._rules_for(record.op):
            replacement = apply(self, record, op)
            if replacement is not None:
                record.results = replacement
                return
        if record.reads is not reads:  # a rule changed the operands, and maybe the op
            record.signature = signature = lowerings.signature(record, self.dims, shapes)
            op = signature.op
        node = record.node
        if op.view is not None or self.passes_on(record, op):
            self._plan_view(record, op, old)
        elif self.depends_on_frozen(record, op) and (op.traits.convert or self._may_fold(record.specs, record.reads)):
            same = old is not None and (old.op, old.reads) == (record.op, record.reads) and old.attrs is record.attrs
            record.results = record.own = tuple(
                self._slot(old if same else None, port, Value(node, port), s, FOLDED, record.path, True)
                for port, s in enumerate(record.specs)
            )
            self.tables.fold(Instr(record.op, record.reads, record.own, (), record.attrs, node))
            record.log("fold", None)
        elif old is None and signature.lowering is not None:
            self._plan_known(record, signature)
        else:
            self._plan_instruction(record, op, old)

    def _plan_known(self, record: NodeRecord, signature: Signature) -> None:
        """Set slots and instruction of a node's first record from its signature."""
        node, tables, lowering = record.node, self.tables, signature.lowering
        assert lowering is not None
        results = enumerate(signature.packed)
        outs = tuple([tables.packed_slot(Value(node, port), packed) for port, packed in results])
        work = tuple([tables.slot(None, spec) for spec in lowering.scratch]) if lowering.scratch else ()
        record.results, record.own = outs, outs + work
        record.instr = tables.instruction(
            Instr(record.op, record.reads, outs, work, record.attrs, node), lowering=lowering
        )

    def _plan_instruction(self, record: NodeRecord, op: Op, old: NodeRecord | None) -> None:
        node, signature, ins = record.node, record.signature, list(record.reads)
        for number in signature.copied:
            why = f"{record.op} needs operand {number} in row-major memory"
            ins[number] = self.contiguous(record, ins[number], number, why)
        # the rule for conversion chains skips conversions, so with different operands the value differs
        known = None if old is None or (op.traits.convert and old.reads != record.reads) else old
        made = [self._slot(known, port, Value(node, port), s, TEMP, "", False) for port, s in enumerate(record.specs)]
        record.results = record.own = tuple(made)
        if op.traits.nary and not ins:
            self._emit(record, old, "full_like", (made[0],), {"value": 0.0}, "a junction without edges is zero")
        else:
            self._emit(record, old, record.op, tuple(ins), record.attrs)

    def _plan_view(self, record: NodeRecord, op: Op, old: NodeRecord | None) -> None:
        tables, dtype = self.tables, record.specs[0].dtype
        source, layout = self.view_of(record, op)
        base, frozen = tables.slots[source], tables.frozen[source]
        known = tables.slots[old.own[0]] if old is not None and old.own else None
        if (
            known is not None
            and (known.base, known.layout, known.dtype) == (base.base, layout, dtype)
            and tables.frozen[known.index] == frozen
        ):
            record.results = record.own = (known.index,)
            return
        made = tables.view(Value(record.node), base.buffer, dtype, layout, base.base, frozen)
        record.results = record.own = (made,)

    def passes_on(self, record: NodeRecord, op: Op) -> bool:
        """Return True if the op is a junction with a single edge whose value is row-major: that value is the result."""
        return op.traits.nary and len(record.reads) == 1 and self.tables.slots[record.reads[0]].layout.contiguous

    def view_of(self, record: NodeRecord, op: Op) -> tuple[int, Layout]:
        """Return (slot to view, layout of the view) for a view op or a junction with a single edge.

        The slot is the operand, or a row-major copy of it if no strides express the view.
        """
        source, slots = record.reads[0], self.tables.slots
        layout = slots[source].layout if op.view is None else record.signature.view_layout
        if layout is None:
            assert op.view is not None
            source = self.contiguous(record, source, 0, f"no view has the strides of this {record.op}")
            layout = op.view(slots[source].layout, record.attrs)
            assert layout is not None
        return source, layout

    def depends_on_frozen(self, record: NodeRecord, op: Op) -> bool:
        """Return True if a node has operands, all frozen (see `PlanTables.frozen`), and updates none of them."""
        frozen = self.tables.frozen
        if not record.reads or not frozen[record.reads[0]]:
            return False
        return not op.traits.update and all(map(frozen.__getitem__, record.reads))

    def _may_fold(self, specs: Iterable[Spec], reads: Iterable[int]) -> bool:
        """Return True if results are small enough to fold: no larger than the buffers of operands, or than 64 KiB."""
        size = sum(s.nbytes for s in specs)
        source = sum(self.tables.buffers[self.tables.holders[s]][1] for s in reads)  # bytes of buffers, not of views
        return size <= max(source, FOLD_BYTES)

    # -- for rewrite rules -------------------------------------------------------------------------------------------
    def replace(
        self, rule: str, record: NodeRecord, by: tuple[int, ...], into: NodeId | None = None, bound: str = ""
    ) -> tuple[int, ...]:
        """Log that a rule replaces the record's results by the slots `by`, with the error bound `bound`; return `by`.

        `into` is the node that computes `by`; by default it is the node of the first slot's value.
        """
        maker = self.tables.slots[by[0]].value
        record.log(rule, maker.node if into is None and maker is not None else into, bound)
        return by

    def node_of(self, slot: int) -> NodeId:
        """Return the node that computes a slot's value.

        For a folded copy this is the node of the copied value, for any other copy the first node that reads the copy.
        """
        value, made = self.tables.slots[slot].value, self.tables.folds.get(self.tables.holders[slot])
        if value is not None:
            return value.node
        if made is not None:
            return made.node
        return next(self.tables.instrs[copy.instr].node for copy in self._copies.values() if copy.target == slot)

    def maker(self, slot: int) -> NodeRecord | None:
        """Return the record of the node whose value a slot holds; None for a copy."""
        value = self.tables.slots[slot].value
        return None if value is None else self.records.get(value.node)

    def constant(self, slot: int) -> float | None:
        """Return the value of a constant with one element, and add the constant to `assumptions`.

        None if the slot holds no such constant, an assign node writes it, or its file-backed bytes were not mapped yet.
        """
        record = self.maker(slot)
        if record is None or record.op != kinds.CONST or record.node in self._written:
            return None
        key = record.attrs["key"]
        array = self.program.weights.array(key)
        if self.tables.slots[slot].spec.size != 1 or (array.storage.readonly and not array.storage.touched):
            return None
        self.assumptions[key] = (array, array.storage.version)
        return array.item()

    def read_once(self, value: Value) -> bool:
        """Return True if exactly one edge reads a value, and it is neither an output nor watched."""
        return value not in self.given_out and len(self.program.graph.out_edges(value.node)) == 1

    def first_equal(self, record: NodeRecord, key: Any) -> NodeRecord | None:
        """Enter a record in the CSE table; return the first earlier record with the same key, if any."""
        record.cse_key = key
        first = self._cse.enter(record.node, key)
        return None if first == record.node else self.records[first]

    # -- slots, copies, instructions ---------------------------------------------------------------------------------
    def _slot(
        self, old: NodeRecord | None, number: int, value: Value | None, spec: Spec, kind: str, key: str, frozen: bool
    ) -> int:
        """Return the slot `old.own[number]` if it has these properties, else a new slot with them.

        `frozen`: see `PlanTables.frozen`. `kind` and `key`: see `Buffer`.
        """
        tables = self.tables
        if old is not None and number < len(old.own):
            slot = tables.slots[old.own[number]]
            if slot.base == slot.index and slot.value == value and tables.frozen[slot.index] == frozen:
                old_kind, _, old_key = tables.buffers[slot.buffer]
                if (old_kind, old_key) == (kind, key) and slot.spec == spec:
                    return slot.index
        return tables.slot(value, spec, kind, key, frozen)

    def _emit(
        self, record: NodeRecord, old: NodeRecord | None, op: str, ins: tuple[int, ...], attrs: Any, why: str = ""
    ) -> None:
        """Set a record's instruction and scratch slots; reuse those of `old`, the node's previous record, if equal."""
        made, tables = record.results, self.tables
        if old is not None and old.instr >= 0:
            had = tables.instrs[old.instr]
            if (had.op, had.ins, had.outs, had.why) == (op, ins, made, why) and had.attrs is attrs:
                record.instr, record.own = old.instr, old.own
                return
        instr = Instr(op, ins, made, (), attrs, record.node, why)
        signature = record.signature if (op, ins) == (record.op, record.reads) else None
        lowering = None if signature is None else signature.lowering
        if lowering is None:
            lowering = tables.lowerings.lowering(instr, tables.slots, tables.shapes)
            if signature is not None:
                signature.lowering = lowering
        record.own = made
        if lowering.scratch:
            scratch = enumerate(lowering.scratch, len(made))
            work = [self._slot(old, i, None, spec, TEMP, "", False) for i, spec in scratch]
            instr = instr._replace(work=tuple(work))
            record.own = (*made, *work)
        record.instr = tables.instruction(instr, lowering=lowering)

    def contiguous(self, record: NodeRecord, slot: int, rank: int, why: str) -> int:
        """Return `slot` if row-major, else a slot with a row-major copy for operand `rank`; `why` is its reason."""
        tables = self.tables
        layout = tables.slots[slot].layout
        if contiguous(layout):
            return slot
        if tables.frozen[slot] and self._may_fold((tables.slots[slot].spec,), (slot,)):
            return tables.folded_copy(slot, self.node_of(tables.slots[slot].base))
        key = (tables.slots[slot].base, layout)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = SharedCopy(slot, tables.slot(None, tables.slots[slot].spec))
        if key not in record.copies:
            copy.wanted[record.node] = (rank, why)
            record.copies = (*record.copies, key)
        return copy.target

    def _release_copies(self, node: NodeId, keys: set[Any]) -> None:
        for key in keys:
            self._copies[key].wanted.pop(node)
        self._stale_copies |= keys

    def _move_copy(self, key: Any) -> None:
        """Move the shared copy with this key to just before its first reader, or remove it if it has no reader."""
        copy = self._copies[key]
        self.order.remove(copy.instr)
        if not copy.wanted:
            del self._copies[key]
            return
        node = min(copy.wanted, key=self.program.order_labels.key)
        rank, why = copy.wanted[node]
        had = self.tables.instrs[copy.instr] if copy.instr >= 0 else None
        if had is None or (had.node, had.why) != (node, why):
            instr = Instr("copy", (copy.source,), (copy.target,), (), {}, node, why)
            copy.instr = self.tables.instruction(instr, rank)
        self.order.add(copy.instr)

    # -- sources and writes ------------------------------------------------------------------------------------------
    def sources(self) -> SourceTable:
        """Return the inputs, params, consts and states in program order; cached until one of them changes."""
        if self._sources is None:
            p = self.program
            nodes = p.order_labels.sorted([n for kind in kinds.SOURCES for n in p.of_kind(kind)])
            records = [self.records[n] for n in nodes]
            slots = [record.own[0] for record in records]
            keys = [None if record.op == INPUT else record.attrs["key"] for record in records]
            self._sources = SourceTable(slots, np.array([self.tables.holders[s] for s in slots], np.int64), keys)
        return self._sources

    def writes(self) -> dict[NodeId, tuple[int, int]]:
        """Map each assign node, in program order, to (slot of the state, slot of its new value)."""
        if self._assigns is None:
            p = self.program
            self._assigns = [self.records[n] for n in p.order_labels.sorted(p.assigns())]
        sent = self.sent
        return {r.node: (r.reads[0], sent.get(r.node, r.reads[1]) if sent else r.reads[1]) for r in self._assigns}
