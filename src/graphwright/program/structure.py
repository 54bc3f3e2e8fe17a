"""Structure: the named graph of ops under a program, as everyone reads it; `Editable` changes it.

Invariant: names are unique, kinds are listed by creation, and every edge that is not loose goes forwards in the order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

from graphwright.array import Spec
from graphwright.graph import ColumnSpec, EdgeId, Graph, NodeId, OnlineOrder
from graphwright.ops import OPS
from graphwright.program.editing.loose import Forward
from graphwright.program.errors import ForeignNode, UnknownEdge, UnknownNode
from graphwright.program.hashing import StructureHash, decode_attrs, encode_attrs
from graphwright.program.kinds import INPUT, PARAM, STATE, STORED, WRITE


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
