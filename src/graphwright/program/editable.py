"""Editable: a structure as primitive edits, the builder and the tracer change it, with its order kept and logged.

Invariant: a change that raises has changed nothing; what is taken out can be revived under its handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from graphwright.array import Spec
from graphwright.errors import CycleError
from graphwright.graph import EdgeId, Graph, NodeId, OnlineOrder, Relabelled
from graphwright.ops import get
from graphwright.program.editing.graveyard import Graveyard
from graphwright.program.editing.loose import Forward, backward
from graphwright.program.errors import BadName, NameTaken
from graphwright.program.following import Changed, Followers
from graphwright.program.kinds import SOURCES, WRITE
from graphwright.program.structure import Structure, Value, is_name


class Editable(Structure):
    """A structure that can be changed; each change tells its hash and its followers.

    Attributes:
        graveyard: what revives handles on undo.
        order_log: takes down changes of the order while an edit is open.
        admits_cycles: True while an edit with `check=False` is open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order_log: list[Relabelled[NodeId]] | None = None
        self.admits_cycles = False
        self.graveyard = Graveyard()
        self._seq = 0
        self._followers = Followers()

    # -- names -------------------------------------------------------------------------------------------------------
    def free_name(self, wanted: str) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ... behind one that is taken; the first if there is no gap."""
        if wanted not in self._names:
            return wanted
        taken, free = 1, 2
        while f"{wanted}_{free}" in self._names:  # by doubling, then halving: a long trace asks for one name very often
            taken, free = free, 2 * free
        while free - taken > 1:
            middle = (taken + free) // 2
            taken, free = (middle, free) if f"{wanted}_{middle}" in self._names else (taken, middle)
        return f"{wanted}_{free}"

    def check_name(self, name: str) -> None:
        """Raises: BadName for a name that is no dotted path, NameTaken for one in use."""
        if not is_name(name):
            raise BadName("a name is a dotted path without empty segments or control characters", got=repr(name)[:80])
        if name in self._names:
            raise NameTaken("a node of this name exists", where=name, fix="name= another, or e.rename the old one")

    def release_name(self, node: NodeId) -> None:
        """Let others take the name of a node that is about to go."""
        name = self.path(node)
        if self._names.get(name) == node:
            del self._names[name]

    # -- the order ---------------------------------------------------------------------------------------------------
    @property
    def order_frozen(self) -> bool:
        """True while undo or redo restores labels from its log."""
        return self.graveyard.mode != "edit"

    def _reorder(self, change: Callable[[], Relabelled[NodeId]], *, moves: bool = False) -> None:
        """Change the order and log it for undo; while undoing, the log itself restores the order.

        Args:
            moves: nodes may come before others that they came after.
        """
        if not self.order_frozen:
            record = change()
            if record and moves:
                self._moved(record)
            if record and self.order_log is not None:
                self.order_log.append(record)

    def restore_order(self, record: Relabelled[NodeId]) -> Relabelled[NodeId]:
        """Take a change of the order back; returns the record that makes it again."""
        self._moved(record)
        return self.order_labels.restore(record)

    def _moved(self, record: Relabelled[NodeId]) -> None:
        for node, _, _ in record.before:
            self._followers.note(node)

    def follow(self) -> Changed:
        """A set that collects the nodes that change from now on, as long as it is held."""
        return self._followers.follow()

    def _touch(self, node: NodeId) -> None:
        self._structure.touch(node)
        self._followers.note(node)

    def set_order(self, graph: Graph, labels: Mapping[NodeId, tuple[int, int]]) -> None:
        """Take another graph and the saved keys of its nodes; edges against them are loose."""
        self.graph, self.loose = (
            graph,
            {e for e in graph.edges() for src, dst in [graph.endpoints(e)] if labels[src] >= labels[dst]},
        )
        self.order_labels = OnlineOrder.from_labels(Forward(graph, self.loose), labels)

    def find_loose(self, valid: bool) -> None:
        """After labels were restored: see which edges go against the order. A valid program has none."""
        self.loose.clear()
        if not valid:
            self.loose |= backward(self.graph, self.order_labels)

    def straighten(self) -> None:
        """Put loose edges into the order that close no cycle any more. Raises: CycleError if some are left."""
        left: CycleError | None = None
        for edge in sorted(self.loose):
            self.loose.discard(edge)
            try:
                self._order_edge(*self.graph.endpoints(edge))
            except CycleError as error:
                self.loose.add(edge)
                left = left or error
        if left is not None:
            raise left

    def _admit_edge(self, src: NodeId, dst: NodeId) -> bool:
        """Make room in the order for an edge, or say False if it closes a cycle and the open edit lets it."""
        try:
            self._order_edge(src, dst)
        except CycleError:
            if not self.admits_cycles:
                raise
            return False
        return True

    def _order_edge(self, src: NodeId, dst: NodeId) -> None:
        """Make room in the order for an edge. Raises: CycleError naming the path, nothing changed."""
        try:
            self._reorder(lambda: self.order_labels.add_edge(src, dst), moves=True)
        except CycleError as error:
            names = [self.path(n) for n in error.path]
            raise CycleError(
                "an edge would close a cycle",
                path=error.path,
                where=f"{self.path(src)} -> {self.path(dst)}",
                got=" -> ".join([*names, names[0]]),
                fix="cut an edge on the path, or e.connect(src, junction, delay=1)",
            ) from error

    # -- nodes and edges ---------------------------------------------------------------------------------------------
    def insert_node(
        self,
        op: str,
        attrs: Mapping[str, Any],
        name: str,
        specs: tuple[Spec, ...],
        seq: int | None = None,
        handle: NodeId | None = None,
        after: NodeId | None = None,
        before: NodeId | None = None,
    ) -> NodeId:
        """Put a node in, unconnected. With `handle`, revive the node that had it; `after`, `before` hint its place."""
        number = self._seq if seq is None else seq
        revived = self.graveyard.revive(self.graph, handle)
        node = revived
        if revived is None:
            node = self.graph.add_node(op=op, attrs=MappingProxyType(dict(attrs)), name=name, specs=specs, seq=number)
            self._seq = max(self._seq, number + 1)
        self._reorder(lambda: self.order_labels.insert(node, after=after, before=before, created=number))
        self._names[name] = node
        self._kinds.setdefault(op, {})[node] = None
        self._list_key(node)
        if revived is not None:
            self._unsorted.add(op)
        self._touch(node)
        return node

    def delete_node(self, node: NodeId) -> None:
        """Take an unconnected node out; its handle can be revived."""
        self._leave(node)
        self._reorder(lambda: self.order_labels.remove(node))
        self.graveyard.bury(node, self.graph.remove_node(node))

    def discard(self, nodes: Sequence[NodeId]) -> None:
        """Take nodes out with all their edges, for good: nothing revives them. Nodes that stay read none of them."""
        self._reorder(lambda: self.order_labels.remove(*nodes))
        for node in nodes:
            self._leave(node)
            self.loose.difference_update(edge.edge for edge in self.graph.remove_node(node).edges)

    def _leave(self, node: NodeId) -> None:
        self._structure.forget(node)
        self._followers.note(node)
        self.release_name(node)
        del self._kinds[self.op(node)][node]
        self._unlist_key(node)

    def insert_edge(self, src: Value, dst: NodeId, port: int | None = None, handle: EdgeId | None = None) -> EdgeId:
        """Put an edge in; the port is the target's next one by default. Raises: CycleError, nothing changed."""
        if port is None:
            port = int(self.graph.node(dst, "next_port"))
        fits = self._admit_edge(src.node, dst)
        edge = self.graveyard.revive(self.graph, handle)
        if edge is None:
            edge = self.graph.add_edge(src.node, dst, src_port=src.port, dst_port=port)
        if not fits:
            self.loose.add(edge)
        if port >= self.graph.node(dst, "next_port"):
            self.graph.set_node(dst, next_port=port + 1)
        self._touch(dst)
        return edge

    def delete_edge(self, edge: EdgeId) -> None:
        """Take an edge out; its handle can be revived."""
        dst = self.graph.target(edge)
        self.graveyard.bury(edge, self.graph.remove_edge(edge))
        self.loose.discard(edge)
        self._touch(dst)

    def move_edge(self, edge: EdgeId, src: Value) -> None:
        """Let an edge start at another value. Raises: CycleError, nothing changed."""
        dst = self.graph.target(edge)
        fits = self._admit_edge(src.node, dst)
        self.graveyard.rewire(self.graph, edge, src.node)
        (self.loose.discard if fits else self.loose.add)(edge)
        self.graph.set_edge(edge, src_port=src.port)
        self._touch(dst)

    def update_node(self, node: NodeId, **columns: Any) -> None:
        """Change columns of a node: attrs, specs or name."""
        if "name" in columns:
            del self._names[self.path(node)]
            self._names[columns["name"]] = node
            for edge in self.graph.out_edges(node):
                self._touch(self.graph.target(edge))
        if "attrs" in columns:
            columns["attrs"] = MappingProxyType(dict(columns["attrs"]))
            self._unlist_key(node)
        self.graph.set_node(node, **columns)
        if "attrs" in columns:
            self._list_key(node)
        self._touch(node)

    def add_op(
        self, op: str, operands: Sequence[Value], attrs: Mapping[str, Any], name: str, after: NodeId | None = None
    ) -> NodeId:
        """Put an op node in with its edges and inferred specs, while a program is built; `after` hints its place."""
        row = get(op)
        full = row.complete(attrs, name)
        specs = row.specs([self.specs(v.node)[v.port] for v in operands], full, name)
        node = self.insert_node(op, full, name, specs, after=after)
        for port, operand in enumerate(operands):
            self.insert_edge(operand, node, port)
        return node

    def add_source(
        self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any], before: NodeId | None = None
    ) -> NodeId:
        """Put an input, param, const or state node in; `before` hints its place."""
        assert kind in SOURCES
        return self.insert_node(kind, attrs, name, (spec,), before=before)

    def add_write(self, target: Value, value: Value, name: str) -> NodeId:
        """Put a write node in: `value` is what the source `target` has in the next step."""
        node = self.insert_node(WRITE, {}, name, ())
        self.insert_edge(target, node, 0)
        self.insert_edge(value, node, 1)
        return node

    def set_outputs(self, outputs: Mapping[str, Value]) -> None:
        """Declare the results, by name and in order."""
        self._outputs = dict(outputs)
        self._structure.touch_outputs()

    def set_output(self, name: str, value: Value) -> None:
        """Declare one more result."""
        self.set_outputs({**self._outputs, name: value})
