"""PlanBuilder: what planning knows of each node, kept from plan to plan, so that an edit costs what it touched.

A row per node says what it reads once rewrites were used, which slots hold its results and which instruction makes
them. Slots, buffers and instructions are numbered as they come and never change or go away, so that the plans made
before stay what they are. Works from specs alone: no op runs, no weight byte is read, no state moves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from heapq import heappop, heappush
from operator import attrgetter
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import backend
from graphwright.ops import OPS, expansion, get
from graphwright.plan.planning.executors import VM, chooser
from graphwright.plan.planning.lowering import LoweringTable, adjacent
from graphwright.plan.planning.order import CseTable, InstructionOrder
from graphwright.plan.planning.passes import ELSEWHERE, FED, TEMPORARY
from graphwright.plan.planning.records import IndexLists, NodeRecord, RewriteRecord, SharedCopy, SourceTable, listed
from graphwright.plan.table import CONST, FOLDED, HOST, INPUT, PARAM, STATE, TEMP, Instr, Slot
from graphwright.program import Value, kinds

if TYPE_CHECKING:
    from graphwright.array import Device, Layout, NDArray, Spec
    from graphwright.graph import NodeId
    from graphwright.ops import Op
    from graphwright.plan.planning.executors import ExecutorChoice
    from graphwright.plan.planning.fusion import Fusion
    from graphwright.plan.planning.lowering import Lowering, PackedSpec, Signature
    from graphwright.program import Program

walking = RLock()
"""Held by who lets a ledger grow, and by who walks its arrays otherwise: none may grow while another looks at it."""
_CODES = {INPUT: FED, TEMP: TEMPORARY}
_MAIN = 1 << 20  # place of a node's instruction behind the copies that it wants


def _workspace(
    device: Device, op: str, outs: Sequence[Spec], ins: Sequence[Spec], attrs: Mapping[str, Any]
) -> Sequence[Spec]:
    return expansion.workspace(get(op), backend(device), outs, ins, attrs)


class PlanTables:
    """Columns, one entry a slot, buffer or instruction, as rows to look at and as arrays that native loops walk.

    What instructions of one form have in common is kept once, with the form.

    Args:
        forms: what instructions on operands of the same layouts have in common.

    Attributes:
        slots, buffers, instrs: everything that was ever needed; a buffer is (kind, bytes, key).
        frozen, holders, shapes: of each slot, whether it depends on frozen weights alone, its buffer, and a number for
            its dtype and layout.
        sizes, codes: bytes of each buffer in the arena, and where it lies.
        on_host: buffers that lie on the host, though the plan runs on another device.
        folds: folded buffer -> what makes it, when it is asked for with weights of another version.
        alike, ranks: of each instruction, the number of its form, and its place among those of its node.
        reads, outs, works, pairs: of each instruction, buffers it reads, makes and works in, and (result, operand)
            buffers that may be one.
    """

    def __init__(self, forms: LoweringTable) -> None:
        self.forms = forms
        self.slots: list[Slot] = []
        self.frozen: list[bool] = []
        self.holders, self.shapes = array("i"), array("i")
        self.buffers: list[tuple[str, int, str]] = []
        self.sizes, self.codes = array("q"), array("b")
        self.on_host: set[int] = set()
        self.folds: dict[int, Instr] = {}
        self.instrs: list[Instr] = []
        self.alike = array("i")
        self.ranks: list[int] = []
        self.reads, self.outs, self.works = (
            IndexLists(self.instrs, attrgetter(name), self.holders) for name in ("ins", "outs", "work")
        )
        self._pairs: list[tuple[int, ...]] = []
        self._kept: dict[Any, Any] = {}
        self.pairs = IndexLists(self._pairs, lambda pairs: pairs)

    def slot(self, value: Value | None, buffer: int, dtype: Any, layout: Layout, base: int, frozen: bool) -> int:
        """A slot that shows what another one, `base`, lies in."""
        self.slots.append(Slot(index := len(self.slots), value, buffer, dtype, layout, base))
        self.frozen.append(frozen)
        self.holders.append(buffer)
        self.shapes.append(self.forms.number(dtype, layout))
        return index

    def fresh(self, value: Value | None, spec: Spec, kind: str = TEMP, key: str = "", frozen: bool = False) -> int:
        """A slot with a buffer of its own."""
        return self.new(value, self.forms.packed(spec), kind, key, frozen)

    def new(
        self, value: Value | None, packed: PackedSpec, kind: str = TEMP, key: str = "", frozen: bool = False
    ) -> int:
        """As `fresh`."""
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

    def alias(self, slot: int, base: int) -> int:
        """A slot that shows of another one's buffer what `slot` shows of its own."""
        shown, at = self.slots[slot], self.slots[base]
        return self.slot(None, at.buffer, shown.dtype, shown.layout, base, False)

    def keep(self, buffer: int) -> None:
        """Let a buffer lie on the host; one of the arena gets memory of its own there."""
        _, size, key = self.buffers[buffer]
        self.on_host.add(buffer)
        if self.codes[buffer] != ELSEWHERE:
            self.buffers[buffer], self.codes[buffer] = (HOST, size, key), ELSEWHERE

    def fold(self, instr: Instr) -> None:
        """Say what makes folded results; it is no instruction of a run."""
        for slot in instr.outs:
            self.folds[self.holders[slot]] = instr

    def instruction(self, instr: Instr, rank: int = _MAIN, form: Lowering | None = None) -> int:
        """A new instruction; `rank` orders those of one node."""
        form = self.forms.of(instr, self.slots, self.shapes) if form is None else form
        self.instrs.append(instr)
        self.ranks.append(rank)
        self.alike.append(form.number)
        self._pairs.append(self._may_be_one(instr, form) if form.inplace else ())
        return len(self.instrs) - 1

    def _may_be_one(self, instr: Instr, form: Lowering) -> tuple[int, ...]:
        """(Result, operand) buffers of which the result may take the operand's memory."""
        holders, buffers, pairs = self.holders, self.buffers, ()
        for out, place in form.inplace:
            a, b = holders[instr.outs[out]], holders[instr.ins[place]]
            if buffers[a][1] == buffers[b][1]:
                pairs += (a, b)
        return pairs

    def choice(self, q: int) -> ExecutorChoice:
        """What runs an instruction, and why not the VM."""
        return self.forms.all[self.alike[q]].choice

    def native(self, order: np.ndarray) -> np.ndarray:
        """Of instructions, whether the VM runs them."""
        return self._by_form([form.choice.executor == VM for form in self.forms.all], order)

    def joins(self, order: np.ndarray) -> np.ndarray:
        """Of instructions, whether they may be part of a fusion group."""
        return self._by_form([form.joins for form in self.forms.all], order)

    def _by_form(self, facts: list[bool], order: np.ndarray) -> np.ndarray:
        if not any(facts):
            return np.zeros(len(order), np.bool_)
        with walking:  # a plan's tables are decoded by any thread
            return np.array(facts)[np.frombuffer(self.alike, np.int32)[order]]

    # -- what plans come to need again -------------------------------------------------------------------------------
    def saved(self, slot: int, node: NodeId, why: str) -> tuple[int, int]:
        """A slot that holds a copy of another one's value, and the instruction that copies."""

        def make() -> tuple[int, int]:
            at = self.slots[slot]
            target = self.fresh(at.value, at.spec)
            return target, self.instruction(Instr("copy", (slot,), (target,), (), {}, node, why))

        return self._once((slot, node, why), make)

    def committed(self, node: NodeId, new: int, target: int) -> int:
        """The instruction that copies a new value to its state."""
        copy = Instr("copy", (new,), (target,), (), {}, node, "commit")
        return self._once((node, new, target), lambda: self.instruction(copy))

    def packed(self, slot: int, node: NodeId) -> int:
        """A slot that holds, row by row, what a frozen one shows of a node's result; folded."""
        at = self.slots[slot]

        def make() -> int:
            target = self.fresh(None, at.spec, FOLDED, frozen=True)
            self.fold(Instr("copy", (slot,), (target,), (), {}, node, "it is read row by row"))
            return target

        return self._once(("packed", at.base, at.layout), make)

    def shown_as(self, slot: int, base: int) -> int:
        """A slot that shows of another one's buffer what `slot` shows of its own."""
        return self._once(("alias", slot, base), lambda: self.alias(slot, base))

    def reading(self, q: int, ins: tuple[int, ...]) -> int:
        """The instruction that does the same with other operands."""
        return self._once(("reading", q, ins), lambda: self.instruction(self.instrs[q]._replace(ins=ins)))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for an earlier plan, so that it is the same number in the next."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


_KIND = {kinds.PARAM: PARAM, kinds.CONST: CONST, kinds.STATE: STATE, kinds.INPUT: INPUT}
FOLD_BYTES = 65536
"""A folded constant may take this much memory even if it outgrows what it is made of."""


class RewriteRule(NamedTuple):
    """A rewrite.

    Attributes:
        use: looks at a row whose `reads` are known; slots that stand for its results, or None. It may bring `reads`
            nearer.
        wants: which ops it looks at.
    """

    use: Callable[[PlanBuilder, NodeRecord, Op], tuple[int, ...] | None]
    wants: Callable[[Op], bool]


class PlanBuilder(PlanTables):
    """Rows of a program for given sizes and options.

    Args:
        dims: numbers for named sizes.
        rules: the rewrites, in order.
        freeze: conversions of weights are made once per weight version.
        executor: see `Options`.
        device: where the plans run.

    Attributes:
        rows: node -> row.
        held: values that outputs and watches give out.
        turn: rises with every plan made of the ledger.
        fusion: the groups of the last plan that has some.
        sent: write node -> slot of its new value on the device, where that was made on the host.
        guards: constants whose values a rewrite relied on, with their versions.
        settled: rows that were looked at since the start, for tests of locality.
    """

    def __init__(
        self,
        p: Program,
        dims: Mapping[str, int],
        rules: Sequence[RewriteRule],
        *,
        freeze: bool,
        executor: str,
        device: Device,
    ) -> None:
        super().__init__(LoweringTable(chooser(executor, device), partial(_workspace, device)))
        self.program, self.dims, self.rules, self.freeze, self.device = p, dict(dims), tuple(rules), freeze, device
        self.held: frozenset[Value] = frozenset()
        self.sent: dict[NodeId, int] = {}
        self.rows: dict[NodeId, NodeRecord] = {}
        self.fusion: Fusion | None = None
        self._order = InstructionOrder()
        self.guards: dict[str, tuple[NDArray, int]] = {}
        self.settled = self.turn = 0
        self._equal = CseTable(lambda node: p.order_labels.key(node), self._mark)  # labels may be others later
        self._copies: dict[Any, SharedCopy] = {}
        self._written: set[NodeId] = set()
        self._sources: SourceTable | None = None
        self._heap: list[tuple[tuple[int, int], NodeId]] = []
        self._waiting: set[NodeId] = set()
        self._recopied: set[Any] = set()
        self._was: list[tuple[int, NodeId, NodeRecord | None]] = []
        self._rules_for = cache(lambda name: [rule.use for rule in rules if rule.wants(OPS[name])])
        self._changed = p.follow()

    @property
    def order(self) -> np.ndarray:
        """Instructions of all rows, as they run."""
        return self._order.now

    # -- keeping up --------------------------------------------------------------------------------------------------
    def sync(self) -> None:
        """Bring the rows up to the program's present state, for a new plan."""
        self.turn += 1
        p, graph = self.program, self.program.graph
        written = {p.operands(n)[0].node for n in p.assigns()}
        changed = {*self._changed, *(written ^ self._written)}
        self._changed.clear()
        self._written = written
        self.sent.clear()
        if not self.rows:
            self._settle_all()
            changed.clear()
        for node in changed:
            if node in graph:
                self._mark(node)
            elif (row := self.rows.get(node)) is not None:
                self._was.append((self.turn, node, row))
                del self.rows[node]
                self._retire(row)
        while self._heap:
            _, node = heappop(self._heap)
            self._waiting.discard(node)
            if node in graph:
                self._settle(node, moved=node in changed)
                changed.discard(node)
        for key in self._recopied:
            self._make_copy(key)
        self._recopied.clear()
        self._order.settle(self._key, len(self.instrs))

    def rows_at(self, turn: int) -> dict[NodeId, NodeRecord]:
        """The rows as they were when the plan of a turn was made."""
        rows = self.rows.copy()  # before the list is read: what another thread changes meanwhile is undone or not there
        for changed, node, row in reversed(self._was):
            if changed <= turn:
                break
            if row is None:
                rows.pop(node, None)
            else:
                rows[node] = row
        return rows

    def _settle_all(self) -> None:
        """Look at every node once, in order."""
        rows, begins, reads, stops = listed(self.program)
        self.rows = {row.node: row for row in rows}
        slots, at = [-1] * begins[-1], 0
        for row, begin, stop in zip(rows, begins, stops, strict=False):
            row.reads = tuple([slots[k] for k in reads[at:stop]])
            at = stop
            self._looked_at(row, None)
            slots[begin : begin + len(row.results)] = row.results
        for row in rows:
            if row.copies:
                self._recopied.update(row.copies)
        self.settled += len(rows)
        self._order.are([row.instr for row in rows if row.instr >= 0])
        self._heap.clear()  # in order, nothing has to be looked at twice
        self._waiting.clear()

    def _mark(self, node: NodeId) -> None:
        if node not in self._waiting and node in self.program.graph:
            self._waiting.add(node)
            heappush(self._heap, (self.program.order_labels.key(node), node))

    def _settle(self, node: NodeId, moved: bool) -> None:
        """Look at a node again, and have those looked at that depend on what is new about it."""
        self.settled += 1
        old = self.rows.get(node)
        row = self._row(node, old)
        self._was.append((self.turn, node, old))
        self.rows[node] = row
        if row.op in kinds.SOURCES:
            self._sources = None
        self._recopied.update(row.copies)
        if old is not None:
            if old.group is not None and old.group != row.group:
                self._equal.leave(node, old.group)
            for key in set(old.copies) - set(row.copies):
                self._copies[key].wanted.pop(node)
                self._recopied.add(key)
            if old.instr != row.instr or moved:
                self._order.goes(old.instr)
        if row.instr >= 0 and (old is None or old.instr != row.instr or moved):
            self._order.comes(row.instr)
        if old is None or old.results != row.results:
            graph = self.program.graph
            for edge in graph.out_edges(node):
                self._mark(graph.target(edge))
        if row.group is not None and old is not None and (moved or old.results != row.results):
            self._equal.changed(node, row.group)

    def _retire(self, row: NodeRecord) -> None:
        if row.op in kinds.SOURCES:
            self._sources = None
        if row.group is not None:
            self._equal.leave(row.node, row.group)
        self._order.goes(row.instr)
        for key in set(row.copies):
            self._copies[key].wanted.pop(row.node)
            self._recopied.add(key)

    def _key(self, q: int) -> tuple[int, int, int]:
        """By which instructions run in order: the place of their node, then their rank within it."""
        return (*self.program.order_labels.key(self.instrs[q].node), self.ranks[q])

    # -- one row -----------------------------------------------------------------------------------------------------
    def _row(self, node: NodeId, old: NodeRecord | None) -> NodeRecord:
        p = self.program
        row = NodeRecord(node, p.path(node), p.op(node), p.attrs(node), p.specs(node), p.operands(node))
        row.reads = tuple([self.rows[v.node].results[v.port] for v in row.sources])
        return self._looked_at(row, old)

    def _looked_at(self, row: NodeRecord, old: NodeRecord | None) -> NodeRecord:
        """Fill what follows from what a row reads."""
        node, kind, specs = row.node, row.op, row.specs
        if kind in _KIND:
            row.specs = specs = tuple([s.bind(self.dims) for s in specs])
            key = row.path if kind == INPUT else row.attrs["key"]
            still = node not in self._written and (
                (kind == CONST and bool(self.rules)) or (kind == PARAM and self.freeze)
            )
            row.results = row.own = (self._fresh(old, 0, Value(node), specs[0], _KIND[kind], key, still),)
        elif kind == kinds.ASSIGN:
            row.specs = tuple([s.bind(self.dims) for s in specs])
        else:
            self._op(row, old)
        return row

    def _op(self, row: NodeRecord, old: NodeRecord | None) -> None:
        alike, reads = self.forms.alike(row, self.dims, self.shapes), row.reads
        op, row.specs, row.alike = alike.op, alike.specs, alike
        for use in self._rules_for(row.op):
            stands = use(self, row, op)
            if stands is not None:
                row.results = stands
                return
        if row.reads is not reads:  # a rule looked further back, or has put another op there
            row.alike = alike = self.forms.alike(row, self.dims, self.shapes)
            op = alike.op
        if op.view is not None or (op.traits.nary and len(row.reads) == 1):
            self._view(row, op, old)
            return
        node, frozen = row.node, self.still(row, op)
        if frozen and (op.traits.convert or self._worth_folding(row.specs, row.reads)):
            same = old is not None and (old.op, old.reads) == (row.op, row.reads) and old.attrs is row.attrs
            row.results = row.own = tuple(
                self._fresh(old if same else None, port, Value(node, port), s, FOLDED, row.path, True)
                for port, s in enumerate(row.specs)
            )
            self.fold(Instr(row.op, row.reads, row.own, (), row.attrs, node))
            row.uses = (*row.uses, RewriteRecord("fold", node, None))
            return
        if old is None and alike.form is not None:
            self._as_known(row, alike.made, alike.form, frozen)
            return
        ins = list(row.reads)
        for place in alike.copied:
            ins[place] = self.contiguous(row, ins[place], place, f"{row.op} reads operand {place} row by row")
        if old is None:
            made = [self.new(Value(node, port), packed, TEMP, "", frozen) for port, packed in enumerate(alike.made)]
        else:
            converted = row.reads if op.traits.convert else None
            values = [(port, Value(node, port), s) for port, s in enumerate(row.specs)]
            made = [self._fresh(old, port, value, s, TEMP, "", frozen, converted) for port, value, s in values]
        row.results = row.own = tuple(made)
        if op.traits.nary and not ins:
            self._emit(row, old, "full_like", (made[0],), {"value": 0.0}, "a junction without edges is zero")
        else:
            self._emit(row, old, row.op, tuple(ins), row.attrs, alike=None if alike.copied else alike)

    def _as_known(self, row: NodeRecord, made: Sequence[PackedSpec], form: Lowering, frozen: bool) -> None:
        """A new row like another one, which nothing has to be found out of."""
        node = row.node
        outs = tuple([self.new(Value(node, port), packed, TEMP, "", frozen) for port, packed in enumerate(made)])
        work = tuple([self.fresh(None, spec) for spec in form.scratch]) if form.scratch else ()
        row.results, row.own = outs, outs + work
        row.instr = self.instruction(Instr(row.op, row.reads, outs, work, row.attrs, node), form=form)

    def still(self, row: NodeRecord, op: Op) -> bool:
        """True if a row depends on frozen weights alone."""
        if not row.reads or not self.frozen[row.reads[0]]:
            return False
        return not op.traits.update and all(map(self.frozen.__getitem__, row.reads))

    def _worth_folding(self, specs: Iterable[Spec], reads: Iterable[int]) -> bool:
        """What is made of frozen weights is kept only if it does not outgrow its sources; conversions always are."""
        size = sum(s.nbytes for s in specs)
        source = sum(self.buffers[self.slots[s].buffer][1] for s in reads)  # bytes, not what views show
        return size <= max(source, FOLD_BYTES)

    def _view(self, row: NodeRecord, op: Op, old: NodeRecord | None) -> None:
        source, layout = self.shown(row, op)
        base = self.slots[source]
        kept = self.slots[old.own[0]] if old is not None and old.own else None
        if (
            kept is not None
            and (kept.base, kept.layout, kept.dtype) == (base.base, layout, row.specs[0].dtype)
            and self.frozen[kept.index] == self.frozen[source]
        ):
            row.results = row.own = (kept.index,)
            return
        made = self.slot(Value(row.node), base.buffer, row.specs[0].dtype, layout, base.base, self.frozen[source])
        row.results = row.own = (made,)

    def shown(self, row: NodeRecord, op: Op) -> tuple[int, Layout]:
        """What a view is taken of, a copy where it must be one, and the layout."""
        source = row.reads[0]
        layout = self.slots[source].layout if op.view is None else row.alike.shown
        if layout is None:
            assert op.view is not None
            source = self.contiguous(row, source, 0, f"{row.op} of strides that no view can give")
            layout = op.view(self.slots[source].layout, row.attrs)
            assert layout is not None
        return source, layout

    # -- for rules ---------------------------------------------------------------------------------------------------
    def stand(
        self, rule: str, row: NodeRecord, by: tuple[int, ...], into: NodeId | None = None, bound: str = ""
    ) -> tuple[int, ...]:
        """Note that other slots stand for a row's results; `into` is the node that made them, if it is not plain."""
        maker = self.slots[by[0]].value
        row.uses = (
            *row.uses,
            RewriteRecord(rule, row.node, maker.node if into is None and maker is not None else into, bound),
        )
        return by

    def node_of(self, slot: int) -> NodeId:
        """The node that a slot stands for; of a folded copy what it is of, of another copy the first that wants it."""
        value, made = self.slots[slot].value, self.folds.get(self.holders[slot])
        if value is not None:
            return value.node
        if made is not None:
            return made.node
        return next(self.instrs[copy.instr].node for copy in self._copies.values() if copy.target == slot)

    def maker(self, slot: int) -> NodeRecord | None:
        """The row that a slot was made for; None for a copy."""
        value = self.slots[slot].value
        return None if value is None else self.rows.get(value.node)

    def number(self, slot: int) -> float | None:
        """The value of a constant of one element that nobody writes, else None; reads no mapped page."""
        row = self.maker(slot)
        if row is None or row.op != kinds.CONST or row.node in self._written or self.slots[slot].spec.size != 1:
            return None
        key = row.attrs["key"]
        array = self.program.weights.array(key)
        if array.storage.readonly and not array.storage.touched:
            return None
        self.guards[key] = (array, array.storage.version)
        return array.item()

    def read_once(self, value: Value) -> bool:
        """True if a value is read by one edge and given out nowhere."""
        return value not in self.held and len(self.program.graph.out_edges(value.node)) == 1

    # -- rows that do the same ---------------------------------------------------------------------------------------
    def first_of(self, row: NodeRecord, key: Any) -> NodeRecord | None:
        """Enter a row into the group of rows with this key; the first of them if that is another one."""
        row.group = key
        first = self._equal.enter(row.node, key)
        return None if first == row.node else self.rows[first]

    # -- slots, copies, instructions ---------------------------------------------------------------------------------
    def _fresh(
        self,
        old: NodeRecord | None,
        place: int,
        value: Value | None,
        spec: Spec,
        kind: str,
        key: str,
        frozen: bool,
        converted: tuple[int, ...] | None = None,
    ) -> int:
        """The slot that the row had for this, if it still fits, else a new one.

        Args:
            converted: what a conversion reads; chains of them look through it, so other operands are another value.
        """
        if old is not None and place < len(old.own) and (converted is None or converted == old.reads):
            slot = self.slots[old.own[place]]
            if slot.base == slot.index and slot.value == value and self.frozen[slot.index] == frozen:
                had, _, name = self.buffers[slot.buffer]
                if (had, name) == (kind, key) and slot.spec == spec:
                    return slot.index
        return self.fresh(value, spec, kind, key, frozen)

    def _emit(
        self,
        row: NodeRecord,
        old: NodeRecord | None,
        op: str,
        ins: tuple[int, ...],
        attrs: Mapping[str, Any],
        why: str = "",
        alike: Signature | None = None,
    ) -> None:
        """The row's instruction, with the scratch its kernel wants; `alike` knows the form, if it is the row's own."""
        made = row.results
        if old is not None and old.instr >= 0:
            had = self.instrs[old.instr]
            if (had.op, had.ins, had.outs, had.why) == (op, ins, made, why) and had.attrs is attrs:
                row.instr, row.own = old.instr, old.own
                return
        instr = Instr(op, ins, made, (), attrs, row.node, why)
        form, row.own = alike.form if alike is not None else None, made
        if form is None:
            form = self.forms.of(instr, self.slots, self.shapes)
            if alike is not None:
                alike.form = form
        if form.scratch:
            work = [self._fresh(old, len(made) + i, None, spec, TEMP, "", False) for i, spec in enumerate(form.scratch)]
            instr = instr._replace(work=tuple(work))
            row.own = (*made, *work)
        row.instr = self.instruction(instr, form=form)

    def contiguous(self, row: NodeRecord, slot: int, place: int, why: str) -> int:
        """The slot, or a copy of it that lies row by row; rows that want the same one share it.

        That of a frozen value is a folded value like others: it is made when the weights are new, not in a run.
        """
        layout = self.slots[slot].layout
        if adjacent(layout):
            return slot
        if self.frozen[slot] and self._worth_folding((self.slots[slot].spec,), (slot,)):
            return self.packed(slot, self.node_of(self.slots[slot].base))
        key = (self.slots[slot].base, layout)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = SharedCopy(slot, self.fresh(None, self.slots[slot].spec))
        if key not in row.copies:
            copy.wanted[row.node] = (place, why)
            row.copies = (*row.copies, key)
        return copy.target

    def _make_copy(self, key: Any) -> None:
        """Let a copy be made just before the first row that wants it."""
        copy = self._copies[key]
        self._order.goes(copy.instr)
        if not copy.wanted:
            del self._copies[key]
            return
        node = min(copy.wanted, key=self.program.order_labels.key)
        place, why = copy.wanted[node]
        had = self.instrs[copy.instr] if copy.instr >= 0 else None
        if had is None or (had.node, had.why) != (node, why):
            copy.instr = self.instruction(Instr("copy", (copy.source,), (copy.target,), (), {}, node, why), place)
        self._order.comes(copy.instr)

    # -- sources -----------------------------------------------------------------------------------------------------
    def sources(self) -> SourceTable:
        """What inputs, params, consts and states are; found again only when one of them changed."""
        if self._sources is None:
            p = self.program
            nodes = p.order_labels.sorted([n for kind in kinds.SOURCES for n in p.of_kind(kind)])
            rows = [self.rows[n] for n in nodes]
            slots = [row.own[0] for row in rows]
            keys = [None if row.op == INPUT else row.attrs["key"] for row in rows]
            self._sources = SourceTable(slots, np.array([self.holders[s] for s in slots], np.int64), keys)
        return self._sources

    # -- carried state -----------------------------------------------------------------------------------------------
    def writes(self) -> dict[NodeId, tuple[int, int]]:
        """Write node, in order -> (slot of the state, slot of its new value)."""
        p = self.program
        found = (self.rows[n] for n in p.order_labels.sorted(p.assigns()))
        return {row.node: (row.reads[0], self.sent.get(row.node, row.reads[1])) for row in found}
