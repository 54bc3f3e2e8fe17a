"""A derived program that mirrors a source program node by node, under the same names, and follows its edits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import DType, Spec, from_numpy
from graphwright.autograd import Symbol, Tensor, Variable, active_recorder, no_grad
from graphwright.graph import NodeId
from graphwright.ops import Op, call, get
from graphwright.ops.casting import is_cast, target_dtype
from graphwright.program.incremental import IncrementalWalk
from graphwright.program.kinds import CONST, INPUT, SOURCES, STORED
from graphwright.program.op_graph import Value
from graphwright.program.primitives import (
    add_op,
    add_source,
    claim_name,
    delete_edge,
    delete_node,
    discard,
    insert_edge,
    move_edge,
    rekey,
    release_name,
    set_ports,
    update_node,
)
from graphwright.program.recorder import TraceRecorder
from graphwright.program.tombstones import Tombstones
from graphwright.program.weights import add_weight, drop_weight

if TYPE_CHECKING:
    from graphwright.program.program import Program


class MirroredProgram:
    """A program with a copy ("twin") of each needed node of `source`, over the same variables; `source` is not edited.

    A node is needed while a mirrored node, or the owner of the mirror, reads it; reference counts track this.

    Args:
        sizes: values of the named sizes of the inputs.
        low: the 16-bit dtype of autocast; operands are cast as autocast would cast them in a run of the source. None
            for no casts.
        on_drop: called with each source node that is no longer mirrored.
        on_update: called with each source node and its op when its twin is up to date; returns True if the readers of
            the node must be visited too.
    """

    def __init__(
        self,
        source: Program,
        sizes: Mapping[str, int],
        name: str,
        low: DType | None,
        on_drop: Callable[[NodeId], None],
        on_update: Callable[[NodeId, str], bool],
    ) -> None:
        self.source, self.sizes, self.low = source, dict(sizes), low
        self._on_drop, self._on_update = on_drop, on_update
        self.program = source.empty(name)  # the derived program; it has every input of the source
        self.recorder = MirrorRecorder(self.program)
        self.operands: dict[NodeId, list[Value]] = {}  # mirrored node -> the values it read when it was last visited
        self.casts: dict[NodeId, dict[int, NodeId]] = {}  # mirrored node -> operand index -> the cast of autocast
        self.dirty: set[Value] = set()  # values that gained or lost a reader
        self.version = -1  # of `program` after the last update
        self.visited = 0  # nodes visited since the start, for tests of locality
        self._twins: dict[NodeId, NodeId] = {}
        self._readers: dict[NodeId, int] = {}
        self._discarded = self.recorder.discarded
        self._changed = source.follow()
        self._inputs = source.inputs()
        for node in self._inputs:
            spec = source.spec(node).bind(self.sizes)
            self._twins[node] = self.recorder.source(INPUT, source.path(node), spec, {})

    @property
    def changed(self) -> bool:
        """True if the source was edited since the last update."""
        return bool(self._changed)

    @property
    def usable(self) -> bool:
        """True while only the mirror has edited `program` and the inputs of the source are unchanged."""
        p, source = self.program, self.source
        if p.version != self.version or source.inputs() != self._inputs:
            return False
        return all(p.spec(self._twins[n]) == source.spec(n).bind(self.sizes) for n in self._inputs)

    @contextmanager
    def updating(self) -> Iterator[set[NodeId]]:
        """Record operations into the program inside the with-block; yield the source nodes edited since the last block.

        Afterwards discarded nodes and unread constants are deleted. After an error the mirror must not be used again.
        """
        self.recorder.near = self.version >= 0
        changed = set(self._changed)
        self._changed.clear()
        with recording(self.recorder), no_grad():
            yield changed
        self.sweep()
        for node in self.recorder.take_constants(self.unread):
            drop_weight(self.program.weights, self.program.key(node))
            delete_node(self.program, node)
        self.program.version += 1
        self.version = self.program.version

    def update(self, changed: set[NodeId], needed: Sequence[NodeId], released: Sequence[NodeId] = ()) -> set[NodeId]:
        """Update the twins after edits of the nodes `changed`; return the visited nodes.

        The caller now reads the nodes `needed`, which must be mirrored, and no longer reads the nodes `released`.
        """
        graph = self.source.graph
        fresh = self._count_readers(changed, needed, released)
        visited: set[NodeId] = set()
        walk = IncrementalWalk(self.source, {*fresh, *(n for n in changed if n in self.operands and n in graph)})
        for node in walk:
            self.visited += 1
            visited.add(node)
            if self._update_twin(node):
                walk.add(reader for reader in graph.successors(node) if reader in self.operands)
        return visited

    def has_twin(self, node: NodeId) -> bool:
        """Return True if a node of the source is mirrored."""
        return node in self._twins

    def twin(self, value: Value) -> Value:
        """Return the value of the derived program that mirrors a value of the source."""
        return Value(self._twins[value.node], value.port)

    def spec(self, value: Value) -> Spec:
        """Return the spec of a value of the derived program."""
        return self.program.specs(value.node)[value.port]

    def tensor(self, value: Value, recorder: TraceRecorder | None = None) -> Tensor:
        """Return the tensor that stands for a value of the derived program in a trace, by default the mirror's own."""
        return Tensor(Symbol(self.spec(value), value, recorder or self.recorder))

    def rewire(self, node: NodeId, operands: Sequence[Value]) -> None:
        """Rewire a node of the derived program to read these values."""
        rewire(self.program, node, operands)

    def discard(self, nodes: Sequence[NodeId]) -> None:
        """Mark nodes of the derived program for deletion by `sweep`; their names can be reused at once."""
        for node in nodes:
            self._discarded[node] = None
            release_name(self.program, node)

    def unread(self, node: NodeId) -> bool:
        """Return True if a node of the derived program has no readers and is not an output."""
        p = self.program
        return not p.graph.out_degree(node) and all(v.node != node for v in p.outputs())

    def sweep(self) -> None:
        """Delete the discarded nodes."""
        p = self.program
        gone = [n for n in self._discarded if n in p.graph]
        keys = {p.key(n) for n in gone if p.op(n) in STORED}
        discard(p, gone)
        for key in keys:
            if not p.readers(key):
                drop_weight(p.weights, key)
        self._discarded.clear()
        p.tombstones = Tombstones()  # edits of the derived program are never undone

    # -- reference counts --------------------------------------------------------------------------------------------
    def _count_readers(
        self, changed: set[NodeId], needed: Sequence[NodeId], released: Sequence[NodeId]
    ) -> dict[NodeId, None]:
        """Update the reader counts: +1 for nodes in `needed`, -1 in `released`; return the nodes that became needed."""
        graph, readers = self.source.graph, self._readers
        fresh: dict[NodeId, None] = {}
        more, less = list(needed), list(released)
        for node in changed & self.operands.keys():
            before, now = self.operands[node], self._operands_of(node) if node in graph else []
            more += [v.node for v in now]
            less += [v.node for v in before]
            self.dirty.update(v for a, b in zip_longest(before, now) if a != b for v in (a, b) if v is not None)
            self.operands[node] = now
        while more:
            node = more.pop()
            readers[node] = readers.get(node, 0) + 1
            if node not in self.operands:
                self.operands[node] = self._operands_of(node)
                fresh[node] = None
                more += [v.node for v in self.operands[node]]
        while less:
            node = less.pop()
            readers[node] -= 1
            if not readers[node]:
                fresh.pop(node, None)
                before = self.operands.pop(node)
                less += [v.node for v in before]
                self.dirty.update(before)
                self._drop(node)
        return fresh

    def _operands_of(self, node: NodeId) -> list[Value]:
        return [] if self.source.op(node) in SOURCES else self.source.operands(node)

    def _drop(self, node: NodeId) -> None:
        del self._readers[node]
        self.discard(tuple(self.casts.pop(node, {}).values()))
        self._on_drop(node)
        if node in self._twins and node not in self._inputs:
            self.discard((self._twins.pop(node),))

    # -- one twin ----------------------------------------------------------------------------------------------------
    def _update_twin(self, node: NodeId) -> bool:
        """Create or update the copy (twin) of a source node; return True if the readers of the node must be visited."""
        source, p = self.source, self.program
        op, old = source.op(node), self._twins.get(node)
        if op == INPUT:
            twin, moved = self._twins[node], False
        elif op in STORED:
            twin, moved = self._mirror_stored(node, op, old)
        elif not self.operands[node]:
            twin, moved = self._mirror_empty_junction(node, old)
        else:
            twin, moved = self._mirror_op(node, op, old)
        self._twins[node] = twin
        reached = self._on_update(node, op)
        name = source.path(node)
        if p.path(twin) != name:
            self._free_name(name)
            update_node(p, twin, name=name)
        return moved or reached

    def _mirror_stored(self, node: NodeId, op: str, old: NodeId | None) -> tuple[NodeId, bool]:
        source, p = self.source, self.program
        key = source.key(node)
        variable = source.weights[key]
        if old is not None:
            same = p.op(old) == op and p.key(old) == key and p.weights[key] is variable
            if same and p.specs(old) == source.specs(node):
                return old, False
        path = self._fresh_name(node, old)
        if p.weights.has_key(key) and p.weights.at_key(key) is not variable:
            rekey(p, key, p.weights.free_key(key))  # of a recorded constant, or of a twin that is discarded
        add_weight(p.weights, key, variable)
        return self.recorder.source(op, path, source.spec(node), dict(source.attrs(node))), True

    def _mirror_empty_junction(self, node: NodeId, old: NodeId | None) -> tuple[NodeId, bool]:
        """Mirror a junction without edges as a constant zero."""
        source, p = self.source, self.program
        spec = source.spec(node).bind(self.sizes)
        if old is not None and p.op(old) == CONST and p.spec(old) == spec:
            return old, False
        path = self._fresh_name(node, old)
        key = p.weights.free_key(path)
        zero = call("cast", Tensor(from_numpy(np.zeros(spec.sizes, np.float32))), dtype=spec.dtype).data
        add_weight(p.weights, key, Variable(zero, name=key))
        return self.recorder.source(CONST, path, spec, {"key": key}), True

    def _mirror_op(self, node: NodeId, op: str, old: NodeId | None) -> tuple[NodeId, bool]:
        source, p = self.source, self.program
        operands = self._cast_operands(node, get(op))
        attrs = get(op).bind_sizes(source.attrs(node), self.sizes)
        if old is None or p.op(old) != op:
            path = self._fresh_name(node, old)
            return add_op(p, op, operands, attrs, path, self.recorder.after(operands)), True
        if p.operands(old) != operands:
            self.rewire(old, operands)
        if p.attrs(old) != attrs:
            update_node(p, old, attrs=dict(attrs))
        specs = get(op).specs([self.spec(v) for v in operands], attrs, source.path(node))
        moved = p.specs(old) != specs
        if moved:
            update_node(p, old, specs=specs)
        return old, moved

    def _cast_operands(self, node: NodeId, row: Op) -> list[Value]:
        """Return the operands of a node's twin: the twins of the node's operands, or their casts under autocast."""
        operands = [self.twin(v) for v in self.operands[node]]
        if self.low is None:
            return operands
        p, old, casts = self.program, self.casts.pop(node, {}), dict[int, NodeId]()
        specs = [self.spec(v) for v in operands]
        target = target_dtype(row, [(s.dtype, "array" if s.shape else "scalar0d") for s in specs], self.low)
        for number, (value, spec) in enumerate(zip(operands, specs, strict=True)):
            if target is not None and is_cast(row, number, spec.dtype, target):
                cast = old.get(number)
                if cast is None or p.operands(cast) != [value] or p.spec(cast) != Spec(spec.shape, target):
                    name = p.free_name(f"{self.source.path(node)}.cast")
                    cast = add_op(p, "cast", [value], {"dtype": target}, name, self.recorder.after([value]))
                casts[number], operands[number] = cast, Value(cast)
        self.discard([n for n in old.values() if n not in casts.values()])
        if casts:
            self.casts[node] = casts
        return operands

    def _fresh_name(self, node: NodeId, old: NodeId | None) -> str:
        """Discard the old twin of a node, if any, and free the node's name in the derived program; return the name."""
        self.discard(() if old is None else (old,))
        name = self.source.path(node)
        self._free_name(name)
        return name

    def _free_name(self, name: str) -> None:
        """Give the node of the derived program that has this name, if any, another free name."""
        p = self.program
        other = p.free_name(name)
        if other != name:
            update_node(p, p.node(name), name=other)


@contextmanager
def recording(recorder: TraceRecorder) -> Iterator[None]:
    """Record the operations inside the with-block with this recorder."""
    token = active_recorder.set(recorder)
    try:
        yield
    finally:
        active_recorder.reset(token)


def rewire(p: Program, node: NodeId, operands: Sequence[Value]) -> None:
    """Rewire a node of a derived program to read these values; edges of equal operands at both ends stay."""
    edges, before = p.in_edges(node), p.operands(node)
    if len(edges) == len(operands):
        for edge, old, value in zip(edges, before, operands, strict=True):
            if old != value:
                move_edge(p, edge, value)
        return
    short = min(len(edges), len(operands))
    start = next((i for i in range(short) if before[i] != operands[i]), short)
    end = next((i for i in range(short - start) if before[-1 - i] != operands[-1 - i]), short - start)
    for edge in edges[start : len(edges) - end]:
        delete_edge(p, edge)
    stop = len(operands) - end
    set_ports(p, node, edges[len(edges) - end :], stop)
    for port, value in enumerate(operands[start:stop], start):
        insert_edge(p, value, node, port)


class MirrorRecorder(TraceRecorder):
    """A recorder that adds operations to a derived program.

    Attributes:
        made: nodes recorded since the caller last cleared this list.
        near: insert each node right after its last operand, so that an update does not disturb the order.
        discarded: nodes that will be deleted; see `MirroredProgram.sweep`.
        spare: discarded nodes that the next operations of the same op reuse, so that readers of equal results and the
            plan's memory for them need no change.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.made: list[NodeId] = []
        self.near = False
        self.discarded: dict[NodeId, None] = {}
        self.spare: list[NodeId] = []
        self._first: NodeId | None = None

    def source(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """Add an input, param, const or state before all other nodes; return it."""
        if self._first is not None and self._first not in self.program.graph:
            self._first = min(self.program.nodes(), key=self.program.order_labels.key)
        self._first = add_source(self.program, kind, name, spec, attrs, before=self._first)
        return self._first

    def take_constants(self, unread: Callable[[NodeId], bool]) -> list[NodeId]:
        """Forget the recorded constants with `unread(node)` True; return their nodes, which the caller deletes."""
        gone = {key: value.node for key, (_, value) in self._consts.items() if unread(value.node)}
        self._consts = {key: known for key, known in self._consts.items() if key not in gone}
        return list(gone.values())

    def constant(self, name: str, key: str, spec: Spec) -> NodeId:
        """Add a const node."""
        return self.source(CONST, name, spec, {"key": key})

    def record(self, op: Any, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Reuse a spare node for one operation, or add one."""
        operands, name = [self._own(s) for s in inputs], self._name(op.name)
        node = next((n for n in self.spare if self.program.op(n) == op.name), None)
        if node is None:
            node = add_op(self.program, op.name, operands, attrs, name, self.after(operands, op))
        else:
            self._reuse(node, op, operands, attrs, name)
        self.made.append(node)
        return self.symbols(node)

    def _reuse(self, node: NodeId, op: Op, operands: Sequence[Value], attrs: Mapping[str, Any], name: str) -> None:
        p = self.program
        self.spare.remove(node)
        del self.discarded[node]
        claim_name(p, node, name)
        rewire(p, node, operands)
        full = op.complete(attrs, name)
        if full != p.attrs(node):
            update_node(p, node, attrs=full)
        specs = op.specs([p.specs(v.node)[v.port] for v in operands], full, name)
        if specs != p.specs(node):
            update_node(p, node, specs=specs)

    def symbols(self, node: NodeId) -> tuple[Symbol, ...]:
        """Return the results of a node as symbols of this recorder."""
        return tuple(Symbol(spec, Value(node, port), self) for port, spec in enumerate(self.program.specs(node)))

    def after(self, operands: Sequence[Value], op: Op | None = None) -> NodeId | None:
        """Return the node after which to insert an op that reads these operands; None to append it.

        One that talks to other ranks follows all such ops, whatever its operands, which may differ among the ranks.
        """
        if not self.near or not operands:
            return None
        nodes = [v.node for v in operands]
        if op is not None and op.traits.collective and not op.traits.waits:
            nodes += self.program.of_traits(collective=True, waits=False)
        return max(nodes, key=self.program.order_labels.key)
