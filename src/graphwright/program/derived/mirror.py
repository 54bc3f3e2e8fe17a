"""A program mirrored in another that is derived from it, node by node under the same names, and kept up to date.

Which nodes are mirrored follows from counting: a node is needed as long as a needed one, or who derives, reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Spec, from_numpy
from graphwright.autograd import Symbol, Tensor, Variable
from graphwright.graph import NodeId
from graphwright.ops import call, get
from graphwright.ops.casting import is_cast, target_dtype
from graphwright.program.kinds import CONST, INPUT, SOURCES, STORED
from graphwright.program.op_graph import Value
from graphwright.program.recorder import TraceRecorder
from graphwright.program.tombstones import Tombstones

if TYPE_CHECKING:
    from graphwright.array import DType
    from graphwright.ops import Op
    from graphwright.program.program import Program


class Mirror:
    """Twins of the nodes of `source` that are needed, in `program`, over the same variables.

    Args:
        source: the program; it is never changed.
        sizes: numbers for named sizes of its inputs.
        name: of the derived program.
        low: the 16-bit float of autocast: operands are cast as it would while the source runs; None for no casts.

    Attributes:
        program: what is derived; all inputs of the source are inputs of it.
        looked_at: nodes looked at since the start, for tests of locality.
    """

    def __init__(self, source: Program, sizes: Mapping[str, int], name: str, low: DType | None = None) -> None:
        self.source, self.sizes, self.low = source, dict(sizes), low
        self.program = source.empty(name)
        self.looked_at = 0
        self._recorder = Recorder(self.program)
        self._twins: dict[NodeId, NodeId] = {}
        self._reads: dict[NodeId, list[Value]] = {}  # what each mirrored node read when it was looked at last
        self._readers: dict[NodeId, int] = {}  # edges by which mirrored nodes and who derives need a node
        self._casts: dict[NodeId, dict[int, NodeId]] = {}  # per mirrored node, place -> cast of that operand
        self._ends: set[Value] = set()  # values that lost or got a reader
        self._trash: dict[NodeId, None] = {}
        self._changed = source.follow()
        self._inputs = source.inputs()
        for node in self._inputs:
            spec = source.spec(node).bind(self.sizes)
            self._twins[node] = self._recorder.source(INPUT, source.path(node), spec, {})

    def _fits(self) -> bool:
        """True while the source has the inputs it had."""
        p, source = self.program, self.source
        return source.inputs() == self._inputs and all(
            p.spec(self._twins[n]) == source.spec(n).bind(self.sizes) for n in self._inputs
        )

    def _mirror(self, changed: set[NodeId], needed: Sequence[NodeId], released: Sequence[NodeId] = ()) -> set[NodeId]:
        """Bring forward nodes up to date; returns the nodes that were looked at.

        Args:
            changed: nodes of the source.
            needed, released: nodes that who derives reads from now on, and those that it reads no more.
        """
        source, graph = self.source, self.source.graph
        fresh = self._count(changed, needed, released)
        touched: set[NodeId] = set()
        key = source.order_labels.key
        work = [(key(n), n) for n in {*fresh, *(n for n in changed if n in self._reads and n in graph)}]
        work.sort()
        seen = {n for _, n in work}
        heap = work  # sorted, so a heap
        while heap:
            node = heappop(heap)[1]
            seen.discard(node)
            self.looked_at += 1
            again = self._mirror_one(node, touched)
            if again:
                for reader in graph.successors(node):
                    if reader in self._reads and reader not in seen:
                        seen.add(reader)
                        heappush(heap, (key(reader), reader))
        return touched

    def _count(self, changed: set[NodeId], needed: Sequence[NodeId], released: Sequence[NodeId]) -> list[NodeId]:
        """Count readers anew where edges changed; returns the nodes that are needed now and were not."""
        graph, readers = self.source.graph, self._readers
        fresh: dict[NodeId, None] = {}
        more, less = list(needed), list(released)
        for node in changed:
            if node in self._reads:
                now = self._sources_of(node) if node in graph else []
                more += [v.node for v in now]
                less += [v.node for v in self._reads[node]]
                for v in self._reads[node]:  # a reader less, though its own node may be as it was
                    self._ends.add(v)
                self._reads[node] = now
        while more:
            node = more.pop()
            readers[node] = readers.get(node, 0) + 1
            if node not in self._reads:
                self._reads[node] = self._sources_of(node)
                fresh[node] = None
                more += [v.node for v in self._reads[node]]
        while less:
            node = less.pop()
            readers[node] -= 1
            if not readers[node]:
                fresh.pop(node, None)
                for v in self._reads.pop(node):
                    less.append(v.node)
                    self._ends.add(v)
                self._forget(node)
        return list(fresh)

    def _sources_of(self, node: NodeId) -> list[Value]:
        return [] if self.source.op(node) in SOURCES else self.source.operands(node)

    def _forget(self, node: NodeId) -> None:
        """A forward node is needed no more."""
        del self._readers[node]
        self._dropped(node)
        twin = self._twins.get(node)
        if twin is not None and node not in self._inputs:
            del self._twins[node]
            self._throw((twin,))

    def _dropped(self, node: NodeId) -> None:
        """Told of a node that is not mirrored any more."""
        self._throw(tuple(self._casts.pop(node, {}).values()))

    def _noticed(self, node: NodeId, op: str) -> bool:
        """Told of a node whose twin is up to date; True if its readers have to be looked at for another reason."""
        return False

    def _mirror_one(self, node: NodeId, touched: set[NodeId]) -> bool:
        """Make or update a node's twin; True if its readers have to be looked at."""
        source, p = self.source, self.program
        op, had = source.op(node), self._twins.get(node)
        touched.add(node)
        self._ends.update(self._reads[node])
        if op == INPUT:
            twin = self._twins[node]
            moved = False
        elif op in STORED:
            twin, moved = self._stored(node, op, had)
        elif not self._reads[node]:
            twin, moved = self._empty(node, had)
        else:
            twin, moved = self._copied(node, op, had)
        self._twins[node] = twin
        turned = self._noticed(node, op)
        if source.path(node) != p.path(twin):
            self._rename(twin, source.path(node))
        return moved or turned

    def _stored(self, node: NodeId, op: str, had: NodeId | None) -> tuple[NodeId, bool]:
        source, p = self.source, self.program
        key = source.key(node)
        variable = source.weights[key]
        if had is not None:
            same = p.op(had) == op and p.key(had) == key and p.weights[key] is variable
            if same and p.specs(had) == source.specs(node):
                return had, False
            self._throw((had,))
        self._free(source.path(node))
        p.weights.add(key, variable)
        return self._recorder.source(op, source.path(node), source.spec(node), dict(source.attrs(node))), True

    def _empty(self, node: NodeId, had: NodeId | None) -> tuple[NodeId, bool]:
        """A junction without edges: zeros."""
        source, p = self.source, self.program
        spec = source.spec(node).bind(self.sizes)
        if had is not None and p.op(had) == CONST and p.spec(had) == spec:
            return had, False
        if had is not None:
            self._throw((had,))
        path = source.path(node)
        self._free(path)
        key = path if path not in p.weights else f"{path}.zero"
        zero = call("cast", Tensor(from_numpy(np.zeros(spec.sizes, np.float32))), dtype=spec.dtype).data
        p.weights.add(key, Variable(zero, name=key))
        return self._recorder.source(CONST, path, spec, {"key": key}), True

    def _copied(self, node: NodeId, op: str, had: NodeId | None) -> tuple[NodeId, bool]:
        source, p = self.source, self.program
        operands = self._operands(node, get(op))
        attrs = source.attrs(node)
        if had is None or p.op(had) != op:
            if had is not None:
                self._throw((had,))
            path = source.path(node)
            self._free(path)
            return p.add_op(op, operands, attrs, path, self._recorder.behind(operands)), True
        if p.operands(had) != operands:
            self.lead_to(had, operands)
        if p.attrs(had) != attrs:
            p.update_node(had, attrs=dict(attrs))
        specs = get(op).specs([p.specs(v.node)[v.port] for v in operands], attrs, source.path(node))
        moved = p.specs(had) != specs
        if moved:
            p.update_node(had, specs=specs)
        return had, moved

    def _operands(self, node: NodeId, row: Op) -> list[Value]:
        """What the twin of a node reads: twins, or casts of them."""
        operands = [self._twin(v) for v in self._reads[node]]
        if self.low is None:
            return operands
        p, had, casts = self.program, self._casts.pop(node, {}), dict[int, NodeId]()
        specs = [p.specs(v.node)[v.port] for v in operands]
        target = target_dtype(row, [(s.dtype, "array" if s.shape else "scalar0d") for s in specs], self.low)
        for place, (value, spec) in enumerate(zip(operands, specs, strict=True)):
            if target is not None and is_cast(row, place, spec.dtype, target):
                known = had.get(place)
                if known is None or p.operands(known) != [value] or p.spec(known) != Spec(spec.shape, target):
                    name = p.free_name(f"{self.source.path(node)}.cast")
                    known = p.add_op("cast", [value], {"dtype": target}, name, self._recorder.behind([value]))
                casts[place], operands[place] = known, Value(known)
        self._throw([n for n in had.values() if n not in casts.values()])
        if casts:
            self._casts[node] = casts
        return operands

    def lead_to(self, node: NodeId, operands: Sequence[Value]) -> None:
        """Let a node read these values, in order."""
        p = self.program
        edges = p.in_edges(node)
        if len(edges) == len(operands):
            for edge, value in zip(edges, operands, strict=True):
                if p.edge_value(edge) != value:
                    p.move_edge(edge, value)
            return
        for edge in edges:
            p.delete_edge(edge)
        for port, value in enumerate(operands):
            p.insert_edge(value, node, port)

    # -- names and rubbish -------------------------------------------------------------------------------------------
    def _twin(self, value: Value) -> Value:
        return Value(self._twins[value.node], value.port)

    def _tensor(self, value: Value) -> Tensor:
        """A value of the gradient program, to write on with."""
        return Tensor(Symbol(self.program.specs(value.node)[value.port], value, self._recorder))

    def _throw(self, nodes: Sequence[NodeId]) -> None:
        """Nodes that nothing will read; their names are free at once."""
        for node in nodes:
            self._trash[node] = None
            self.program.release_name(node)

    def _free(self, name: str) -> None:
        """Take a name away from whatever backward node has it."""
        p = self.program
        other = p.free_name(name)
        if other != name:
            p.update_node(p.node(name), name=other)

    def _rename(self, node: NodeId, name: str) -> None:
        p = self.program
        if p.path(node) != name:
            self._free(name)
            p.update_node(node, name=name)

    def _sweep(self) -> None:
        """Take thrown nodes out."""
        p = self.program
        gone = [n for n in self._trash if n in p.graph]
        keys = {p.key(n) for n in gone if p.op(n) in STORED}
        p.discard(gone)
        for key in keys:
            if not p.readers(key):
                p.weights.drop(key)
        self._trash.clear()
        p.tombstones = Tombstones()  # nothing is undone here


class Recorder(TraceRecorder):
    """Notes what it writes; once `near`, puts it just behind what it reads, so that the order need not be repaired."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.made: list[NodeId] = []
        self.near = False
        self.front: NodeId | None = None

    def source(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """A new input, param, const or state, in front of everything else."""
        if self.front is not None and self.front not in self.program.graph:
            self.front = min(self.program.nodes(), key=self.program.order_labels.key)
        self.front = self.program.add_source(kind, name, spec, attrs, before=self.front)
        return self.front

    def constants(self) -> list[NodeId]:
        """Nodes of the numbers that vjps wrote down."""
        return [value.node for _, value in self._consts.values()]

    def drop(self, node: NodeId) -> None:
        """Forget such a node."""
        self._consts = {k: known for k, known in self._consts.items() if known[1].node != node}

    def constant(self, name: str, spec: Spec) -> NodeId:
        """A new const node."""
        return self.source(CONST, name, spec, {"key": name})

    def record(self, op: Any, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Take down one operation."""
        operands = [self._own(s) for s in inputs]
        node = self.program.add_op(op.name, operands, attrs, self._name(op.name), self.behind(operands))
        self.made.append(node)
        return tuple(Symbol(spec, Value(node, port), self) for port, spec in enumerate(self.program.specs(node)))

    def behind(self, operands: Sequence[Value]) -> NodeId | None:
        """The last of what is read."""
        if not self.near or not operands:
            return None
        return max((v.node for v in operands), key=self.program.order_labels.key)
