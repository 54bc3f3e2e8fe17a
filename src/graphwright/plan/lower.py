"""Draft -> rows: slots, views resolved to aliases, copies where a layout must change.

Works from specs alone: no op runs, no weight byte is read, no state moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphwright.array import CPU, Layout, Spec, backend
from graphwright.array.layout import is_row_major, row_major
from graphwright.graph import NodeId
from graphwright.ops import Op, get
from graphwright.plan.draft import Draft, Firing, Ref, Row
from graphwright.plan.table import CONST, FOLDED, INPUT, PARAM, STATE, TEMP, Buffer, Instr
from graphwright.program import Value, kinds

_KIND = {kinds.PARAM: PARAM, kinds.CONST: CONST, kinds.STATE: STATE, kinds.INPUT: INPUT}
FOLD_BYTES = 65536
"""A folded constant may take this much memory even if it outgrows what it is made of."""


class Rows:
    """The tables of one plan while they are built; slots as parallel columns.

    Attributes:
        values, buffer_of, specs, layouts, bases: the columns of the slots.
        buffers, instrs: the rows.
        at: result -> its slot.
        outputs, watched: name -> slot.
        writes: write node -> (slot of the state, slot of its new value).
        folds: node -> slots of values computed once from frozen weights.
    """

    def __init__(self, draft: Draft, *, freeze: bool, fold: bool) -> None:
        self.draft, self.freeze, self.fold = draft, freeze, fold
        self.values: list[Value | None] = []
        self.buffer_of: list[int] = []
        self.specs: list[Spec] = []
        self.layouts: list[Layout] = []
        self.bases: list[int] = []
        self.buffers: list[Buffer] = []
        self.instrs: list[Instr] = []
        self.at: dict[Ref, int] = {}
        self.writes: dict[NodeId, tuple[int, int]] = {}
        self.folds: dict[NodeId, tuple[int, ...]] = {}
        self._copies: dict[tuple[int, Layout], int] = {}
        self._frozen: set[int] = set()
        self._workspace = backend(CPU).workspace
        self._written = {row.operands[0].row for row in draft.rows if row.op == kinds.WRITE}
        for i, (row, wanted) in enumerate(zip(draft.rows, draft.needed(), strict=True)):
            if wanted:
                self._row(i, row)
        self.outputs = {name: self.at[draft.find(ref)] for name, ref in draft.outputs.items()}
        self.watched = {name: self.at[draft.find(ref)] for name, ref in draft.watched.items()}
        self._drop_unread_folds()

    # -- making rows -------------------------------------------------------------------------------------------------
    def slot(self, value: Value | None, buffer: int, spec: Spec, layout: Layout, base: int = -1) -> int:
        """A new slot; a view names the slot it was taken of as `base`."""
        index = len(self.values)
        self.values.append(value)
        self.buffer_of.append(buffer)
        self.specs.append(spec)
        self.layouts.append(layout)
        self.bases.append(index if base < 0 else base)
        return index

    def fresh(self, value: Value | None, spec: Spec, kind: str = TEMP, key: str = "") -> int:
        """A slot with a buffer of its own."""
        shape: Any = spec.shape
        size = spec.dtype.itemsize
        for n in shape:
            size *= n
        self.buffers.append(Buffer(len(self.buffers), kind, size, key))
        return self.slot(value, len(self.buffers) - 1, spec, Layout(shape, row_major(shape)))

    def emit(
        self,
        op: str,
        ins: tuple[int, ...],
        outs: tuple[int, ...],
        attrs: Mapping[str, Any],
        node: NodeId,
        why: str = "",
    ) -> None:
        """A new instruction, with the scratch its kernel wants."""
        specs = self.specs
        scratch = self._workspace(op, [specs[s] for s in outs], [specs[s] for s in ins], attrs)
        work = tuple([self.fresh(None, spec) for spec in scratch])
        self.instrs.append(Instr(op, ins, outs, work, attrs, node, why))

    def contiguous(self, slot: int) -> bool:
        """True if a slot's elements lie row by row."""
        layout = self.layouts[slot]
        return is_row_major(layout.shape, layout.strides)

    # -- nodes -------------------------------------------------------------------------------------------------------
    def _row(self, i: int, row: Row) -> None:
        kind = _KIND.get(row.op)
        if kind is not None:
            key = self.draft.path(i) if kind == INPUT else row.attrs["key"]
            self.at[Ref(i)] = self.fresh(Value(row.node), row.specs[0], kind, key)
            if i not in self._written and ((kind == CONST and self.fold) or (kind == PARAM and self.freeze)):
                self._frozen.add(i)
        elif row.op == kinds.WRITE:
            self.writes[row.node] = (self.at[row.operands[0]], self.at[row.operands[1]])
        else:
            self._op(i, row, get(row.op))

    def _op(self, i: int, row: Row, op: Op) -> None:
        ins = [self.at[ref] for ref in row.operands]
        frozen = bool(ins) and not op.traits.update and all(ref.row in self._frozen for ref in row.operands)
        if frozen:
            self._frozen.add(i)
        if op.view is not None or (op.traits.nary and len(ins) == 1):
            self._alias(i, row, op, ins[0])
            return
        node = row.node
        if frozen and self._worth_folding(row, op):
            path = self.draft.path(i)
            made = tuple(self.fresh(Value(node, port), s, FOLDED, path) for port, s in enumerate(row.specs))
            self.folds[node] = made
            self.draft.log.append(Firing("fold", path, "constant"))
        else:
            narrow = any(self.specs[ins[place]].dtype is not row.specs[0].dtype for place in op.traits.narrow)
            for place in range(len(ins)) if narrow else op.row_major(len(ins)):
                ins[place] = self.row_major(node, ins[place], f"{row.op} reads operand {place} row by row")
            made = tuple([self.fresh(Value(node, port), s) for port, s in enumerate(row.specs)])
            if op.traits.nary and not ins:
                self.emit("full_like", (made[0],), made, {"value": 0.0}, node, "a junction without edges is zero")
            else:
                self.emit(row.op, tuple(ins), made, row.attrs, node)
        for port, slot in enumerate(made):
            self.at[Ref(i, port)] = slot

    def _worth_folding(self, row: Row, op: Op) -> bool:
        """Conversions of frozen weights are made once; other results only if they do not outgrow their sources."""
        size = sum(s.nbytes for s in row.specs)
        source = sum(
            self.buffers[self.buffer_of[self.at[ref]]].nbytes for ref in row.operands
        )  # bytes, not what views show
        return size <= max(source, FOLD_BYTES) or op.traits.convert

    def _alias(self, i: int, row: Row, op: Op, source: int) -> None:
        layout = self.layouts[source] if op.view is None else op.view(self.layouts[source], row.attrs)
        if layout is None:
            assert op.view is not None
            source = self.row_major(row.node, source, f"{row.op} of strides that no view can give")
            layout = op.view(self.layouts[source], row.attrs)
            assert layout is not None
        self.at[Ref(i)] = self.slot(Value(row.node), self.buffer_of[source], row.specs[0], layout, self.bases[source])

    def row_major(self, node: NodeId, slot: int, why: str) -> int:
        """The slot, or a copy of it that lies row by row; a copy made before is used again."""
        if self.contiguous(slot):
            return slot
        key = (self.bases[slot], self.layouts[slot])
        target = self._copies.get(key)
        if target is None:
            target = self._copies[key] = self.fresh(None, self.specs[slot])
            self.emit("copy", (slot,), (target,), {}, node, why)
        return target

    def _drop_unread_folds(self) -> None:
        """A folded value that only folded values read need not be kept: it is computed on the way."""
        if not self.folds:
            return
        read = {s for i in self.instrs for s in i.ins} | {*self.outputs.values(), *self.watched.values()}
        read |= {new for _, new in self.writes.values()}
        buffers = {self.buffer_of[s] for s in read}
        self.folds = {n: made for n, made in self.folds.items() if any(self.buffer_of[s] in buffers for s in made)}
