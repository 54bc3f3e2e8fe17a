"""Program -> rows: order, slots, views resolved to aliases, copies where a layout must change, in-place results, commits.

Works from specs alone: no op runs, no weight byte is read, no state moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphwright.array import CPU, Layout, Spec, backend
from graphwright.array.layout import row_major
from graphwright.graph import NodeId
from graphwright.ops import Op, get
from graphwright.plan.table import CONST, FOLDED, INPUT, PARAM, STATE, TEMP, Buffer, Instr, Slot
from graphwright.program import Program, Value
from graphwright.program.infer import bound_specs
from graphwright.program.kinds import STORED, WRITE


class Lowering:
    """The tables of one plan while they are built.

    Attributes:
        slots, buffers, instrs: the rows.
        at: value -> its slot.
        outputs: name -> slot, for what the caller gets.
        folds: node -> slot, for values computed once from frozen weights.
        pruned: nodes that no output and no write needs.
        commits: write node -> reason, for states whose new value is copied at the end instead of updated in place.
    """

    def __init__(self, p: Program, dims: Mapping[str, int], outputs: Mapping[str, Value], freeze: bool) -> None:
        self.p, self.freeze = p, freeze
        self.slots: list[Slot] = []
        self.buffers: list[Buffer] = []
        self.instrs: list[Instr] = []
        self.at: dict[Value, int] = {}
        self.folds: dict[NodeId, tuple[int, ...]] = {}
        self.commits: dict[NodeId, str] = {}
        self._frozen: set[NodeId] = set()
        self._writes: dict[NodeId, Value] = {}
        needed = p.reachable([*outputs.values(), *p.writes()])
        order = [n for n in p.order() if n in needed]
        self.pruned = [n for n in p.order() if n not in needed]
        self.specs = bound_specs(p, order, dims)
        self._written = {p.operands(n)[0].node for n in p.writes()}
        for node in order:
            self._node(node)
        self.outputs = {name: self.at[value] for name, value in outputs.items()}
        self._drop_unread_folds()
        self._commit()
        self._liveness()

    # -- rows -------------------------------------------------------------------------------------------------------------
    def _buffer(self, kind: str, nbytes: int, key: str = "") -> int:
        self.buffers.append(Buffer(len(self.buffers), kind, nbytes, key))
        return len(self.buffers) - 1

    def _slot(self, value: Value | None, buffer: int, spec: Spec, layout: Layout | None = None) -> int:
        shape: Any = spec.shape
        layout = Layout(shape, row_major(shape)) if layout is None else layout
        self.slots.append(Slot(len(self.slots), value, buffer, spec.dtype, layout))
        return len(self.slots) - 1

    def _fresh(self, value: Value | None, spec: Spec, kind: str = TEMP, key: str = "") -> int:
        return self._slot(value, self._buffer(kind, spec.nbytes, key), spec)

    def _node(self, node: NodeId) -> None:
        p, op = self.p, self.p.op(node)
        if op in STORED:
            kind = {"param": PARAM, "const": CONST, "state": STATE}[op]
            self.at[Value(node)] = self._fresh(Value(node), self.specs[node][0], kind, p.key(node))
            if (kind == CONST or (kind == PARAM and self.freeze)) and node not in self._written:
                self._frozen.add(node)
        elif op == INPUT:
            self.at[Value(node)] = self._fresh(Value(node), self.specs[node][0], INPUT, p.path(node))
        elif op == WRITE:
            target, value = p.operands(node)
            self._writes[node] = value
        else:
            self._op(node, get(op), p.attrs(node))

    def _op(self, node: NodeId, row: Op, attrs: Mapping[str, Any]) -> None:
        operands = self.p.operands(node)
        ins = [self.at[v] for v in operands]
        frozen = bool(operands) and not row.traits.update and all(v.node in self._frozen for v in operands)
        if frozen:
            self._frozen.add(node)
        if row.view is not None or (row.traits.nary and len(ins) == 1):
            self._alias(node, row, ins[0], attrs)
            return
        values = [Value(node, port) for port in range(len(self.specs[node]))]
        if frozen and self._worth_folding(node, operands):
            path = self.p.path(node)
            made = tuple(self._fresh(v, s, FOLDED, path) for v, s in zip(values, self.specs[node], strict=True))
            self.folds[node] = made
        else:
            for place in row.traits.contiguous:
                ins[place] = self._row_major(node, ins[place], f"{row.name} reads operand {place} row by row")
            made = tuple(self._fresh(v, s) for v, s in zip(values, self.specs[node], strict=True))
            if row.traits.nary and not ins:
                self._emit("full_like", (made[0],), made, {"value": 0.0}, node, "a junction without edges is zero")
            else:
                self._emit(row.name, tuple(ins), made, attrs, node)
        self.at.update(zip(values, made, strict=True))

    def _worth_folding(self, node: NodeId, operands: Sequence[Value]) -> bool:
        """Casts of frozen weights are made once; other results only if they do not outgrow what they are made of."""
        size = sum(s.nbytes for s in self.specs[node])
        source = sum(self.specs[v.node][v.port].nbytes for v in operands)
        return size <= max(source, 65536) or self.p.op(node) == "cast"

    def _alias(self, node: NodeId, row: Op, source: int, attrs: Mapping[str, Any]) -> None:
        value, spec = Value(node), self.specs[node][0]
        slot = self.slots[source]
        layout = slot.layout if row.view is None else row.view(slot.layout, attrs)
        if layout is None:
            source = self._row_major(node, source, f"{row.name} of strides that no view can give")
            slot = self.slots[source]
            layout = row.view(slot.layout, attrs)  # type: ignore[misc]  # only a view op comes here
        self.at[value] = self._slot(value, slot.buffer, spec, layout)

    def _row_major(self, node: NodeId, slot: int, why: str) -> int:
        """The slot, or a copy of it that lies row by row."""
        row = self.slots[slot]
        if row.layout.contiguous:
            return slot
        target = self._fresh(None, row.spec)
        self._emit("copy", (slot,), (target,), {}, node, why)
        return target

    def _emit(self, op: str, ins: tuple[int, ...], outs: tuple[int, ...], attrs: Mapping[str, Any], node: NodeId,
              why: str = "") -> None:  # fmt: skip
        specs = [self.slots[s].spec for s in outs]
        scratch = backend(CPU).workspace(op, specs, [self.slots[s].spec for s in ins], attrs)
        work = tuple(self._fresh(None, spec) for spec in scratch)
        self.instrs.append(Instr(op, ins, outs, work, attrs, node, why))

    def _drop_unread_folds(self) -> None:
        """A folded value that only folded values read need not be kept: it is computed on the way."""
        read = {s for i in self.instrs for s in i.ins} | set(self.outputs.values())
        read |= {self.at[v] for v in self._writes.values()}
        buffers = {self.slots[s].buffer for s in read}
        self.folds = {n: made for n, made in self.folds.items() if any(self.slots[s].buffer in buffers for s in made)}

    # -- state ------------------------------------------------------------------------------------------------------------
    def _commit(self) -> None:
        """Bring each written state its new value: by updating in place where nobody reads the old one later, else by a
        copy at the end, after all reads.
        """
        states = {self.slots[self.at[self.p.operands(write)[0]]].buffer for write in self._writes}
        for name, s in self.outputs.items():
            value = self.slots[s].value
            if self.slots[s].buffer in states and value is not None:  # the caller gets what it was at the step's start
                self.outputs[name] = self._fresh(None, self.slots[s].spec)
                self._emit("copy", (s,), (self.outputs[name],), {}, value.node, "an output that this step writes")
        last_read: dict[int, int] = {}
        for i, instr in enumerate(self.instrs):
            for s in instr.ins:
                last_read[self.slots[s].buffer] = i
        producer = {s: i for i, instr in enumerate(self.instrs) for s in instr.outs}
        late: list[tuple[NodeId, int, int]] = []
        for write, value in self._writes.items():
            target = self.at[self.p.operands(write)[0]]
            new = self.at[value]
            state = self.slots[target].buffer
            if self.slots[new].buffer == state:
                continue
            made = producer.get(new)
            if made is not None and self._updates(self.instrs[made], new, state) and last_read.get(state, -1) <= made \
                    and not self._outlives(new):  # fmt: skip
                self._move(self.slots[new].buffer, state)
                continue
            self.commits[write] = "the old value is read after the new one is made" if made is not None else "copied"
            late.append((write, new, target))
        written = {self.slots[t].buffer for _, _, t in late}
        for k, (write, new, target) in enumerate(late):  # a value that is itself another state's memory is saved first
            if self.slots[new].buffer in written:
                saved = self._fresh(None, self.slots[new].spec)
                self._emit("copy", (new,), (saved,), {}, write, "its memory is written in the same commit")
                late[k] = (write, saved, target)
        for write, new, target in late:
            self._emit("copy", (new,), (target,), {}, write, "commit")

    def _updates(self, instr: Instr, slot: int, state: int) -> bool:
        """True if the op may write this result over the operand that lies in the state's memory."""
        traits = get(instr.op).traits if instr.op != "full_like" else None
        if traits is None:
            return False
        out = instr.outs.index(slot)
        return any(o == out and self.slots[instr.ins[i]].buffer == state and self.slots[instr.ins[i]].layout.contiguous
                   for o, i in traits.inplace if i < len(instr.ins))  # fmt: skip

    def _outlives(self, slot: int) -> bool:
        """True if the caller gets this value too."""
        return any(self.slots[s].buffer == self.slots[slot].buffer for s in self.outputs.values())

    def _move(self, old: int, new: int) -> None:
        """Let all slots of one buffer look at another."""
        for i, s in enumerate(self.slots):
            if s.buffer == old:
                self.slots[i] = Slot(s.index, s.value, new, s.dtype, s.layout)
        self.buffers[old].kind = "moved"

    # -- liveness ---------------------------------------------------------------------------------------------------------
    def _liveness(self) -> None:
        """First and last use of every buffer, results put over dying operands where the op allows it."""
        slots, buffers = self.slots, self.buffers
        for i, instr in enumerate(self.instrs):
            for s in (*instr.outs, *instr.work):
                b = buffers[slots[s].buffer]
                b.first = i if b.first < 0 else b.first
                b.last = max(b.last, i)
            for s in instr.ins:
                b = buffers[slots[s].buffer]
                b.last = max(b.last, i)
        end = len(self.instrs)
        for s in self.outputs.values():
            buffers[slots[s].buffer].last = end
        for b in buffers:
            if b.kind == INPUT:
                b.first = 0
        self._in_place()

    def _in_place(self) -> None:
        moves: dict[int, int] = {}
        whole = {b.index: b.nbytes for b in self.buffers}

        def root(b: int) -> int:
            while b in moves:
                b = moves[b]
            return b

        for i, instr in enumerate(self.instrs):
            row = get(instr.op)
            for out, place in row.traits.inplace:
                if place >= len(instr.ins):
                    continue
                o, s = self.slots[instr.outs[out]], self.slots[instr.ins[place]]
                old, new = root(o.buffer), root(s.buffer)
                a, b = self.buffers[old], self.buffers[new]
                shared = sum(1 for other in instr.ins if root(self.slots[other].buffer) == new)
                if (a.kind == TEMP and b.kind == TEMP and old != new and b.last == i and a.first == i and shared == 1
                        and a.nbytes == b.nbytes == whole[new] and s.layout.contiguous and s.layout.offset == 0
                        and o.layout.contiguous):  # fmt: skip
                    moves[old] = new
                    b.last = a.last
                    a.kind = "moved"
                    break
        if moves:
            for i, s in enumerate(self.slots):
                if s.buffer in moves:
                    self.slots[i] = Slot(s.index, s.value, root(s.buffer), s.dtype, s.layout)
