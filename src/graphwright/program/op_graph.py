"""OpGraph: nodes by name, edges by port and the topological order. A program is an OpGraph with weights and history.

Invariant: names are unique, the nodes of each kind are listed in creation order, and every edge except the back edges
goes forwards in the topological order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref as weak

from graphwright.array import Spec
from graphwright.errors import check_type
from graphwright.graph import ColumnSpec, EdgeId, Graph, NodeId, OnlineOrder
from graphwright.ops import result_names, traits
from graphwright.program.errors import BadName, ForeignNode, NameTaken, UnknownEdge, UnknownNode
from graphwright.program.hashing import StructureHash, decode_attrs, encode_attrs
from graphwright.program.kinds import ASSIGN, INPUT, PARAM, STATE, STORED
from graphwright.program.program_graph import ProgramGraph
from graphwright.program.tombstones import ForwardNeighbours, Tombstones

if TYPE_CHECKING:
    from graphwright.graph import Relabelled


class Value(NamedTuple):
    """One result of a node."""

    node: NodeId
    port: int = 0


Ref = NodeId | Value | str
"""A node by handle, by one of its results, or by name: its path, or the checkpoint key of a weight; a value also by the
name of a result, as `sort.indices` or `sort.1`."""
NODE_COLUMNS = {
    "op": object,
    "attrs": ColumnSpec(object, encode=encode_attrs, decode=decode_attrs),
    "name": object,
    "specs": ColumnSpec(
        object, encode=lambda x: [s.to_json() for s in x], decode=lambda x: tuple(map(Spec.from_json, x))
    ),
    "seq": "i8",
    "next_port": "i4",
}
EDGE_COLUMNS = {"src_port": "i4", "dst_port": "i4"}
MAX_PORT = 2**31 - 2


class ChangedNodes(set[NodeId]):
    """Nodes that were added, removed, changed, rewired or reordered since this set was last cleared."""


class OpGraph:
    """A directed graph of ops, read by name, handle or value; the functions of `program/primitives.py` change it.

    Attributes:
        graph: nodes and edges with their columns.
        order_labels: the topological order, updated as edges come and go.
        back_edges: edges that close a cycle, admitted by an edit with `check=False`; the order leaves them out.
        tombstones: records of removed nodes and edges, from which undo restores the same handles.
        order_log: records of the changes of the order in the open edit; None if no edit is open.
        admits_cycles: True while an edit with `check=False` is open.
    """

    def __init__(self) -> None:
        self.graph: Graph = ProgramGraph(node_columns=NODE_COLUMNS, edge_columns=EDGE_COLUMNS, block=8)
        self.back_edges: set[EdgeId] = set()
        self.order_labels: OnlineOrder[NodeId] = OnlineOrder(ForwardNeighbours(self.graph, self.back_edges))
        self.order_log: list[Relabelled[NodeId]] | None = None
        self.admits_cycles = False
        self.tombstones = Tombstones()
        self._structure = StructureHash(self)
        self._names: dict[str, NodeId] = {}
        self._outputs: dict[str, Value] = {}
        self._kinds: dict[str, dict[NodeId, None]] = {}
        self._unsorted: set[str] = set()  # kinds with a restored node, whose nodes are no longer in creation order
        self._keyed: dict[str, set[NodeId]] = {}  # checkpoint key -> nodes that read it
        self._keys: tuple[str, ...] | None = ()
        self._seq = 0
        self._followers: list[weak[ChangedNodes]] = []

    # -- nodes -------------------------------------------------------------------------------------------------------
    def node(self, ref: Ref) -> NodeId:
        """Return the handle of a node; a name is its path, or the checkpoint key of a param, const or state.

        A key that several nodes read gives the first of them. Raises: UnknownNode listing similar names, StaleHandle,
        ForeignNode.
        """
        if isinstance(ref, str):
            found = self._names.get(ref) or next(iter(self.readers(ref)), None)
            if found is None:
                near = ", ".join(get_close_matches(ref, dict.fromkeys((*self._names, *self._keyed)), 3, 0.5))
                raise UnknownNode("no node has this name", where=ref, fix=f"did you mean {near}?" if near else None)
            return found
        node = ref.node if isinstance(ref, Value) else ref
        if not isinstance(node, NodeId):
            raise ForeignNode("not a node of this program", got=repr(ref), expected="a NodeId, a Value or a name")
        self.graph.node(node, "seq")  # raises StaleHandle
        return node

    def find(self, path: object) -> NodeId | None:
        """Return the handle of the node with a path, or None."""
        return self._names.get(path) if isinstance(path, str) else None

    def nodes_of(self, refs: Any) -> list[NodeId]:
        """Return the handles of one node or of several. Raises: UnknownNode, StaleHandle, ForeignNode."""
        if isinstance(refs, Ref):
            return [self.node(refs)]
        try:
            several = list(refs)
        except TypeError:
            got, expected = repr(refs), "handles, values or names"
            raise ForeignNode("not nodes of this program", got=got, expected=expected) from None
        return [self.node(ref) for ref in several]

    def value(self, ref: Ref) -> Value:
        """Return a result of a node: the Value itself, the first one for a handle or a node's name, or one by name.

        A result is named by its op, as `sort.indices`, or by its number, as `sort.1`. Raises: UnknownNode.
        """
        if isinstance(ref, str) and ref not in self._names:
            head, _, last = ref.rpartition(".")
            if (node := self._names.get(head)) is not None:
                names, count = self.result_names(node), len(self.specs(node))
                if last in names or last in map(str, range(count)):
                    return Value(node, names.index(last) if last in names else int(last))
                if count > 1:
                    fix = " or ".join(f"{head}.{name}" for name in names)
                    raise UnknownNode("the node has no result of this name", where=ref, fix=f"name {fix}")
        return Value(self.node(ref), ref.port if isinstance(ref, Value) else 0)

    def result_names(self, node: NodeId) -> tuple[str, ...]:
        """Return the names of all results of a node: those that its op gives them, else their numbers."""
        return result_names(self.op(node), len(self.specs(node)))

    def path(self, ref: NodeId | EdgeId | Value) -> str:
        """Return the dotted name of a node, of a value, or `source -> target` for an edge.

        The first result of a node has the node's name; the others have it followed by the name of the result.
        """
        if isinstance(ref, EdgeId):
            return f"{self.path(self.edge_value(ref))} -> {self.path(self.graph.target(ref))}"
        name = self.graph.node(ref.node if isinstance(ref, Value) else ref, "name")
        if not isinstance(ref, Value) or not ref.port:
            return name
        names = self.result_names(ref.node)
        made = f"{name}.{names[ref.port]}" if ref.port < len(names) else ""
        return made if made and made not in self._names else f"{name}.{ref.port}"

    def op(self, node: NodeId) -> str:
        """Return the op of a node, or its kind (`input`, `param`, `const`, `state`, `assign`) if it is no op."""
        return self.graph.node(node, "op")

    def attrs(self, node: NodeId) -> Mapping[str, Any]:
        """Return the attributes of a node, read-only; change them with `e.set_attr`."""
        return self.graph.node(node, "attrs")

    def specs(self, node: NodeId) -> tuple[Spec, ...]:
        """Return the specs of all results of a node."""
        return self.graph.node(node, "specs")

    def spec(self, ref: Ref) -> Spec:
        """Return the spec of one result."""
        node, port = self.value(ref)
        return self.specs(node)[port]

    def meta(self, ref: Ref) -> Mapping[str, Any]:
        """Return the `path`, `op`, `attrs`, `specs` and `seq` of a node as a read-only mapping."""
        n = self.node(ref)
        known = {"path": self.path(n), "op": self.op(n), "attrs": self.attrs(n), "specs": self.specs(n)}
        return MappingProxyType({**known, "seq": self.seq(n)})

    def seq(self, node: NodeId) -> int:
        """Return the creation number of a node."""
        return self.graph.node(node, "seq")

    def nodes(self) -> tuple[NodeId, ...]:
        """Return all nodes, in order of their handles' indices."""
        return tuple(self.graph.nodes())

    def with_prefix(self, text: str) -> list[NodeId]:
        """Return the nodes whose paths start with a text, in no particular order."""
        check_type("text", text, str, "a text")
        return [node for name, node in tuple(self._names.items()) if name.startswith(text)]

    def of_kind(self, kind: str) -> tuple[NodeId, ...]:
        """Return the nodes of one op or kind, in creation order."""
        check_type("kind", kind, str, "the name of an op or kind")
        if kind in self._unsorted:
            self._kinds[kind] = dict.fromkeys(sorted(self._kinds[kind], key=self.seq))
            self._unsorted.discard(kind)
        return tuple(self._kinds.get(kind, ()))

    def of_traits(self, **wanted: Any) -> tuple[NodeId, ...]:
        """Return the nodes whose op has traits with these values, in creation order: `p.of_traits(attention=True)`."""
        kinds = [k for k in self._kinds if all(getattr(traits(k), name) == value for name, value in wanted.items())]
        return tuple(sorted((n for kind in kinds for n in self._kinds[kind]), key=self.seq))

    def inputs(self) -> tuple[NodeId, ...]:
        """Return the input nodes, in creation order."""
        return self.of_kind(INPUT)

    def params(self) -> tuple[NodeId, ...]:
        """Return the param nodes, in creation order; a tied weight is one node with several readers."""
        return self.of_kind(PARAM)

    def states(self) -> tuple[NodeId, ...]:
        """Return the state nodes, in creation order."""
        return self.of_kind(STATE)

    def assigns(self, ref: Ref | None = None) -> tuple[NodeId, ...]:
        """Return the nodes that assign the next value of a state or a param; with `ref`, only nodes that read `ref`."""
        return self.of_kind(ASSIGN) if ref is None else tuple(n for n in self.consumers(ref) if self.op(n) == ASSIGN)

    def junctions(self) -> tuple[NodeId, ...]:
        """Return the junctions, nodes that sum any number of edges, in topological order."""
        return tuple(sorted(self.of_traits(nary=True), key=self.order_labels.key))

    def is_junction(self, node: NodeId) -> bool:
        """Return True if a node is a junction, into which edges can be added and cut."""
        return traits(self.op(node)).nary

    def outputs(self) -> tuple[Value, ...]:
        """Return the outputs of the program, in order of declaration."""
        return tuple(self._outputs.values())

    def input_names(self) -> tuple[str, ...]:
        """Return the names of the inputs, in order of declaration."""
        return tuple(self.path(n) for n in self.inputs())

    def output_names(self) -> tuple[str, ...]:
        """Return the names of the outputs, in order of declaration."""
        return tuple(self._outputs)

    def output(self, name: str) -> Value:
        """Return an output by name. Raises: UnknownNode."""
        if not isinstance(name, str) or name not in self._outputs:
            raise UnknownNode("no output has this name", where=name, expected=", ".join(self._outputs))
        return self._outputs[name]

    def key(self, node: NodeId) -> str:
        """Return the checkpoint key of a param, const or state node. Raises: UnknownNode for other nodes."""
        if self.op(node) not in STORED:
            expected = "a param, const or state"
            what = "the node has no checkpoint key"
            raise UnknownNode(what, where=self.path(node), expected=expected, got=self.op(node))
        return self.attrs(node)["key"]

    def readers(self, key: str) -> tuple[NodeId, ...]:
        """Return the param, const and state nodes that read a weight."""
        return tuple(sorted(self._keyed.get(key, ()), key=lambda n: (self.op(n), self.seq(n))))

    def weight_keys(self) -> tuple[str, ...]:
        """Return the checkpoint keys that nodes read, in alphabetical order."""
        if self._keys is None:
            self._keys = tuple(sorted(self._keyed))
        return self._keys

    # -- edges -------------------------------------------------------------------------------------------------------
    def in_edges(self, ref: NodeId | str) -> tuple[EdgeId, ...]:
        """Return the edges into a node, in port order."""
        return self.graph.in_edges(self.node(ref), "dst_port")

    def out_edges(self, ref: NodeId | str) -> tuple[EdgeId, ...]:
        """Return the edges out of a node, sorted by the creation number of the reader, then by port."""
        graph, edges = self.graph, self.graph.out_edges(self.node(ref))
        return tuple(sorted(edges, key=lambda e: (graph.node(graph.target(e), "seq"), graph.edge(e, "dst_port"))))

    def edge(self, ref: EdgeId | str) -> EdgeId:
        """Return the handle of an edge given by handle or by its ends, `"layers.1.mlp.down -> layers.1.out"`.

        Raises: UnknownEdge listing the sources of the target, also if several edges match; UnknownNode.
        """
        if isinstance(ref, EdgeId):
            return ref
        if not isinstance(ref, str) or "->" not in ref:
            expected = 'an EdgeId, or "source -> target" by name'
            raise UnknownEdge("not an edge of this program", got=repr(ref), expected=expected)
        first, second = (name.strip() for name in ref.split("->", 1))
        value, target = self.value(first), self.node(second)
        edges = self.in_edges(target)
        found = [e for e in edges if self.graph.source(e) == value.node]
        if len(found) > 1 or first not in self._names:  # a node's name stands for its first result if several enter
            found = [e for e in found if self.edge_value(e) == value]
        if len(found) != 1:
            sources = ", ".join(dict.fromkeys(self.path(self.edge_value(e)) for e in edges))
            fix = f"pick one of program.in_edges({self.path(target)!r})" if found else None
            expected = None if found else f"a source among {sources}" if sources else "a target that has edges"
            what = f"{len(found)} edges connect these nodes" if found else "no edge connects these nodes"
            raise UnknownEdge(what, where=ref, expected=expected, fix=fix)
        return found[0]

    def edge_value(self, edge: EdgeId) -> Value:
        """Return the value that an edge carries."""
        return Value(self.graph.source(edge), self.graph.edge(edge, "src_port"))

    def edge_port(self, edge: EdgeId) -> int:
        """Return the port of the target that an edge enters."""
        return self.graph.edge(edge, "dst_port")

    def operands(self, node: NodeId) -> list[Value]:
        """Return the values that a node reads, in port order."""
        return list(map(Value, *self.graph.sources(self.node(node), "dst_port", "src_port")))

    def consumers(self, ref: Ref) -> tuple[NodeId, ...]:
        """Return the nodes that read a value, or any result of a node, each once."""
        if isinstance(ref, str) and ref not in self._names:
            ref = self.value(ref)
        node = self.node(ref)
        edges = self.out_edges(node)
        if isinstance(ref, Value):
            edges = tuple(e for e in edges if self.graph.edge(e, "src_port") == ref.port)
        return tuple(dict.fromkeys(self.graph.target(e) for e in edges))

    def producers(self, ref: NodeId | str) -> tuple[NodeId, ...]:
        """Return the nodes that a node reads, each once, in port order."""
        return tuple(dict.fromkeys(v.node for v in self.operands(self.node(ref))))

    def order(self) -> list[NodeId]:
        """Return all nodes in topological order; equal histories give equal orders."""
        return sorted(self.graph.nodes(), key=self.order_labels.key)

    def reachable(self, roots: Iterable[Value | NodeId], beyond: Collection[NodeId] = ()) -> set[NodeId]:
        """Return the roots and all their ancestors; the search does not continue past nodes in `beyond`."""
        check_type("roots", roots, Iterable, "a list of values or nodes")
        nodes = [r.node if isinstance(r, Value) else r for r in roots]
        return _closure(nodes, lambda n: () if n in beyond else self.graph.predecessors(n))

    def dependents(self, nodes: Iterable[NodeId]) -> set[NodeId]:
        """Return some nodes and all their descendants."""
        check_type("nodes", nodes, Iterable, "a list of nodes")
        return _closure(nodes, self.graph.successors)

    def __len__(self) -> int:
        return self.graph.node_count

    def structure_hash(self) -> str:
        """Return the sha256 of the structure: names, ops, attributes, specs, edges and outputs."""
        return self._structure.structure()

    def node_digest(self, node: NodeId) -> bytes:
        """Return 32 bytes that hash a node's name, op, attributes, specs and operands."""
        return self._structure.node_digest(self.node(node))

    # -- names -------------------------------------------------------------------------------------------------------
    def free_name(self, wanted: str) -> str:
        """Return `wanted`, or if this name is taken, the first free name among `wanted_2`, `wanted_3`, ..."""
        check_type("wanted", wanted, str, "a name")
        if wanted not in self._names:
            return wanted
        taken, free = 1, 2
        while f"{wanted}_{free}" in self._names:  # by doubling, then bisection: long traces ask for one name often
            taken, free = free, 2 * free
        while free - taken > 1:
            middle = (taken + free) // 2
            taken, free = (middle, free) if f"{wanted}_{middle}" in self._names else (taken, middle)
        return f"{wanted}_{free}"

    def check_name(self, name: str) -> None:
        """Raise BadName for a name that is not a dotted path, NameTaken for one in use."""
        if not is_name(name):
            expected = "a dotted path without empty segments, control characters, `->` and the characters of patterns"
            raise BadName("invalid node name", expected=expected, got=repr(name)[:80])
        if name in self._names:
            raise NameTaken("another node has this name", where=name, fix="pass another name=, or rename the old one")

    # -- changes -----------------------------------------------------------------------------------------------------
    def follow(self) -> ChangedNodes:
        """Return a set that collects every node that changes from now on, for as long as the caller holds it."""
        made = ChangedNodes()
        self._followers = [r for r in self._followers if r() is not None] + [weak(made)]
        return made

    def _note(self, node: NodeId) -> None:
        for follower in self._followers:
            if (changed := follower()) is not None:
                changed.add(node)


def _closure(nodes: Iterable[NodeId], neighbours: Callable[[NodeId], Iterable[NodeId]]) -> set[NodeId]:
    stack = list(nodes)
    seen = set(stack)
    while stack:
        for node in neighbours(stack.pop()):
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return seen


_FORBIDDEN = re.compile(r"[\x00-\x1f\ud800-\udfff*\[{}]|->|^\s|\s$")
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_name(name: object) -> bool:
    """Return True for a dotted path of at most 4096 characters that patterns and `source -> target` can address.

    It has no empty segments, control characters, `->`, any of `*[{}`, or space at an end.
    """
    if not isinstance(name, str) or not 0 < len(name) <= 4096 or not all(name.split(".")):
        return False
    return _FORBIDDEN.search(name) is None


def is_key(key: object) -> bool:
    """Return True for a text that can name a tensor in a checkpoint."""
    if not isinstance(key, str) or _SURROGATE.search(key) is not None:
        return False
    return 0 < len(key.encode()) <= 4096 and key != "__metadata__"
