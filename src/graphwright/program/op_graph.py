"""Structure: the named graph of ops under a program, as everyone reads it; `Editable` changes it.

Invariant: names are unique, kinds are listed by creation, and every edge that is not loose goes forwards in the order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from graphwright.array import Spec
from graphwright.errors import CycleError
from graphwright.graph import ColumnSpec, EdgeId, Graph, NodeId, OnlineOrder
from graphwright.ops import OPS, get
from graphwright.program.errors import BadName, ForeignNode, NameTaken, UnknownEdge, UnknownNode
from graphwright.program.hashing import decode_attrs, encode_attrs
from graphwright.program.kinds import INPUT, PARAM, SOURCES, STATE, STORED, WRITE
from graphwright.program.tombstones import Forward, Graveyard, backward

if TYPE_CHECKING:
    from graphwright.graph import Relabelled
    from graphwright.program.hashing import StructureHash


class Value(NamedTuple):
    """One result of a node: what an edge carries."""

    node: NodeId
    port: int = 0


NODE_COLUMNS = {
    "op": object,
    "attrs": ColumnSpec(object, encode=encode_attrs, decode=decode_attrs),
    "name": object,
    "specs": ColumnSpec(
        object,
        encode=lambda specs: [s.to_json() for s in specs],
        decode=lambda data: tuple(Spec.from_json(s) for s in data),
    ),
    "seq": "i8",
    "next_port": "i4",
}
EDGE_COLUMNS = {"src_port": "i4", "dst_port": "i4"}
MAX_PORT = 2**31 - 2


class Structure:
    """Nodes by name, edges by port, and their order: what a program is without its weights and its past.

    Attributes:
        graph: nodes and edges.
        order_labels: the topological order, kept while edges come and go.
        loose: edges that close a cycle, let in by an edit with `check=False`; they are left out of the order.
    """

    _structure: StructureHash

    def __init__(self) -> None:
        self.graph = Graph(node_columns=NODE_COLUMNS, edge_columns=EDGE_COLUMNS, block=8)
        self.loose: set[EdgeId] = set()
        self.order_labels: OnlineOrder[NodeId] = OnlineOrder(Forward(self.graph, self.loose))
        self._names: dict[str, NodeId] = {}
        self._outputs: dict[str, Value] = {}
        self._kinds: dict[str, dict[NodeId, None]] = {}
        self._unsorted: set[str] = set()  # kinds whose nodes are not in order of creation, as one came back
        self._keyed: dict[str, set[NodeId]] = {}  # nodes that stand for a weight
        self._keys: tuple[str, ...] | None = ()

    def node(self, ref: NodeId | Value | str) -> NodeId:
        """The handle of a node given by handle, value or name.

        Raises: UnknownNode naming the nearest names; StaleHandle for a deleted node.
        """
        if isinstance(ref, str):
            found = self._names.get(ref)
            if found is None:
                near = get_close_matches(ref, self._names, 3, 0.5)
                raise UnknownNode(
                    "no node of this name", where=ref, fix=f"did you mean {', '.join(near)}?" if near else None
                )
            return found
        node = ref.node if isinstance(ref, Value) else ref
        if not isinstance(node, NodeId):
            raise ForeignNode("not a node of this program", got=repr(ref), expected="a NodeId, a Value or a name")
        self.graph.node(node, "seq")  # raises StaleHandle
        return node

    def nodes_of(self, refs: Any) -> list[NodeId]:
        """Handles of one node or of several. Raises: UnknownNode, StaleHandle, ForeignNode."""
        if isinstance(refs, NodeId | Value | str):
            return [self.node(refs)]
        if not isinstance(refs, Iterable):
            raise ForeignNode("not nodes of this program", got=repr(refs), expected="handles, values or names")
        return [self.node(ref) for ref in refs]

    def value(self, ref: NodeId | Value | str) -> Value:
        """A result of a node: of a Value itself, of a handle or name the first one."""
        return Value(self.node(ref), ref.port if isinstance(ref, Value) else 0)

    def path(self, ref: NodeId | EdgeId | Value) -> str:
        """The dotted name of a node; of an edge `source -> target`."""
        if isinstance(ref, EdgeId):
            src, dst = self.graph.endpoints(ref)
            return f"{self.path(src)} -> {self.path(dst)}"
        return self.graph.node(ref.node if isinstance(ref, Value) else ref, "name")

    def op(self, node: NodeId) -> str:
        """The op of a node, or its kind if it is a source or a write."""
        return self.graph.node(node, "op")

    def attrs(self, node: NodeId) -> Mapping[str, Any]:
        """The attributes of a node, read-only: `e.set_attr` changes them."""
        return self.graph.node(node, "attrs")

    def specs(self, node: NodeId) -> tuple[Spec, ...]:
        """Specs of all results of a node."""
        return self.graph.node(node, "specs")

    def spec(self, ref: NodeId | Value | str) -> Spec:
        """Spec of one result."""
        node, port = self.value(ref)
        return self.specs(node)[port]

    def meta(self, ref: NodeId | Value | str) -> Mapping[str, Any]:
        """What is known of a node, by name and read-only: `path`, `op`, `attrs`, `specs`, `seq`."""
        n = self.node(ref)
        known = {"path": self.path(n), "op": self.op(n), "attrs": self.attrs(n), "specs": self.specs(n)}
        return MappingProxyType({**known, "seq": self.seq(n)})

    def seq(self, node: NodeId) -> int:
        """Creation number."""
        return self.graph.node(node, "seq")

    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes, oldest slot first."""
        return tuple(self.graph.nodes())

    def beginning(self, text: str) -> list[NodeId]:
        """Nodes whose paths begin with a text, in no order."""
        names = [name for name in tuple(self._names) if name.startswith(text)]
        return [self._names[name] for name in names]

    def of_kind(self, kind: str) -> tuple[NodeId, ...]:
        """Nodes of one op or kind, in order of creation."""
        if kind in self._unsorted:
            self._kinds[kind] = dict.fromkeys(sorted(self._kinds[kind], key=self.seq))
            self._unsorted.discard(kind)
        return tuple(self._kinds.get(kind, ()))

    def inputs(self) -> tuple[NodeId, ...]:
        """Input nodes, in order of creation."""
        return self.of_kind(INPUT)

    def params(self) -> tuple[NodeId, ...]:
        """Param nodes, in order of creation; tied weights are one node with several readers."""
        return self.of_kind(PARAM)

    def states(self) -> tuple[NodeId, ...]:
        """State nodes, in order of creation."""
        return self.of_kind(STATE)

    def writes(self) -> tuple[NodeId, ...]:
        """Nodes that end a step by writing a state or a param."""
        return self.of_kind(WRITE)

    def junctions(self) -> tuple[NodeId, ...]:
        """Nodes that take any number of edges, in topological order."""
        return tuple(sorted(self.of_kind("junction"), key=self.order_labels.key))

    def is_junction(self, node: NodeId) -> bool:
        """True if edges into the node may be added and cut."""
        op = OPS.get(self.op(node))
        return op is not None and op.traits.nary

    def outputs(self) -> tuple[Value, ...]:
        """The program's results, in order of declaration."""
        return tuple(self._outputs.values())

    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order of declaration."""
        return tuple(self.path(n) for n in self.inputs())

    def output_names(self) -> tuple[str, ...]:
        """Names of the results, in order of declaration."""
        return tuple(self._outputs)

    def output(self, name: str) -> Value:
        """A result by its name. Raises: UnknownNode."""
        if not isinstance(name, str) or name not in self._outputs:
            raise UnknownNode("no output of this name", where=name, expected=", ".join(self._outputs))
        return self._outputs[name]

    def key(self, node: NodeId) -> str:
        """Checkpoint key of a param, const or state node. Raises: UnknownNode for other nodes."""
        if self.op(node) not in STORED:
            raise UnknownNode("only params, consts and states have a key", where=self.path(node), got=self.op(node))
        return self.attrs(node)["key"]

    def readers(self, key: str) -> tuple[NodeId, ...]:
        """Nodes that stand for a weight."""
        return tuple(sorted(self._keyed.get(key, ()), key=lambda n: (self.op(n), self.seq(n))))

    def weight_keys(self) -> tuple[str, ...]:
        """Checkpoint keys that nodes stand for, in alphabetical order."""
        if self._keys is None:
            self._keys = tuple(sorted(self._keyed))
        return self._keys

    def _list_key(self, node: NodeId) -> None:
        if self.op(node) in STORED:
            self._keyed.setdefault(self.key(node), set()).add(node)
            self._keys = None

    def _unlist_key(self, node: NodeId) -> None:
        if self.op(node) in STORED:
            nodes = self._keyed[self.key(node)]
            nodes.discard(node)
            if not nodes:
                del self._keyed[self.key(node)]
            self._keys = None

    def in_edges(self, ref: NodeId | str) -> tuple[EdgeId, ...]:
        """Edges into a node, by port."""
        edges, graph = self.graph.in_edges(self.node(ref)), self.graph
        return tuple(sorted(edges, key=lambda e: graph.edge(e, "dst_port"))) if len(edges) > 1 else tuple(edges)

    def out_edges(self, ref: NodeId | str) -> tuple[EdgeId, ...]:
        """Edges out of a node, by creation of the reader and its port."""
        graph = self.graph
        return tuple(
            sorted(
                graph.out_edges(self.node(ref)),
                key=lambda e: (graph.node(graph.target(e), "seq"), graph.edge(e, "dst_port")),
            )
        )

    def edge(self, ref: EdgeId | str) -> EdgeId:
        """The handle of an edge given by handle, or by its ends: `edge("layers.1.mlp.down -> layers.1.out")`.

        Raises: UnknownEdge naming what enters the target, also if several edges have these ends; UnknownNode.
        """
        if isinstance(ref, EdgeId):
            return ref
        if not isinstance(ref, str) or "->" not in ref:
            raise UnknownEdge(
                "not an edge of this program",
                got=repr(ref),
                expected='an EdgeId, or "source -> target" with their names',
            )
        source, target = (self.node(name.strip()) for name in ref.split("->", 1))
        edges = self.in_edges(target)
        found = [e for e in edges if self.graph.source(e) == source]
        if len(found) != 1:
            enters = ", ".join(dict.fromkeys(self.path(self.graph.source(e)) for e in edges))
            raise UnknownEdge(
                f"{len(found)} edges have these ends" if found else "there is no such edge",
                where=ref,
                expected=None if found else f"from {enters}" if enters else "another target: nothing enters this one",
                fix=f"pick one of program.in_edges({self.path(target)!r})" if found else None,
            )
        return found[0]

    def edge_value(self, edge: EdgeId) -> Value:
        """What an edge carries."""
        return Value(self.graph.source(edge), self.graph.edge(edge, "src_port"))

    def edge_port(self, edge: EdgeId) -> int:
        """The port of its target that an edge enters."""
        return self.graph.edge(edge, "dst_port")

    def operands(self, node: NodeId) -> list[Value]:
        """What a node reads, by port."""
        graph = self.graph
        return [Value(graph.source(e), graph.edge(e, "src_port")) for e in self.in_edges(node)]

    def consumers(self, ref: NodeId | Value | str) -> tuple[NodeId, ...]:
        """Nodes that read a value (of a node: any of its results), each once."""
        node = self.node(ref)
        edges = self.out_edges(node)
        if isinstance(ref, Value):
            edges = tuple(e for e in edges if self.graph.edge(e, "src_port") == ref.port)
        return tuple(dict.fromkeys(self.graph.target(e) for e in edges))

    def producers(self, ref: NodeId | str) -> tuple[NodeId, ...]:
        """Nodes that a node reads, each once, by port."""
        return tuple(dict.fromkeys(v.node for v in self.operands(self.node(ref))))

    def order(self) -> list[NodeId]:
        """All nodes so that each comes after what it reads; deterministic."""
        return sorted(self.graph.nodes(), key=self.order_labels.key)

    def reachable(self, roots: Iterable[Value | NodeId], beyond: Collection[NodeId] = ()) -> set[NodeId]:
        """The roots and everything they depend on; what only nodes of `beyond` depend on is left out."""
        stack = [r.node if isinstance(r, Value) else r for r in roots]
        seen = set(stack)
        while stack:
            node = stack.pop()
            for before in self.graph.predecessors(node) if node not in beyond else ():
                if before not in seen:
                    seen.add(before)
                    stack.append(before)
        return seen

    def __len__(self) -> int:
        return self.graph.node_count

    def structure_hash(self) -> str:
        """sha256 over structure alone: names, ops, attributes, specs, edges, outputs."""
        return self._structure.structure()

    def node_digest(self, node: NodeId) -> bytes:
        """32 bytes over a node's name, op, attributes, specs and what it reads."""
        return self._structure.node_digest(self.node(node))


def is_name(name: object) -> bool:
    """True for a dotted path without empty segments or control characters, at most 4096 long, that UTF-8 can hold."""
    if not isinstance(name, str) or not 0 < len(name) <= 4096 or not all(name.split(".")):
        return False
    return not any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name)


def is_key(key: object) -> bool:
    """True for a text that can name a tensor in a checkpoint."""
    if not isinstance(key, str) or any(0xD800 <= ord(c) < 0xE000 for c in key):
        return False
    return 0 < len(key.encode()) <= 4096 and key != "__metadata__"


class Changed(set[NodeId]):
    """Nodes that were put in, taken out, changed, rewired or moved in the order since this was last cleared."""


class Followers:
    """The sets to enter changes into; one that nobody holds any more is left out."""

    def __init__(self) -> None:
        self._sets: list[ref[Changed]] = []

    def follow(self) -> Changed:
        """A new set."""
        made = Changed()
        self._sets = [r for r in self._sets if r() is not None] + [ref(made)]
        return made

    def note(self, node: NodeId) -> None:
        """Enter a change."""
        for known in self._sets:
            found = known()
            if found is not None:
                found.add(node)


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
