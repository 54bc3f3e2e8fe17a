"""Program: a graph of op nodes and its weights. The one representation of a model, built, imported, traced or evolved.

Invariant: outside an open edit every port has its edge, every spec is the one its op infers, and there is no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from graphwright.array import NDArray, Spec
from graphwright.autograd import Parameter
from graphwright.errors import CycleError, UsageError
from graphwright.graph import ColumnSpec, EdgeId, Graph, NodeId, OnlineOrder, Relabelled
from graphwright.ops import OPS, get
from graphwright.program.errors import BadName, ForeignNode, NameTaken, UnknownEdge, UnknownNode
from graphwright.program.graveyard import Graveyard
from graphwright.program.hashing import StructureHash, decode_attrs, encode_attrs
from graphwright.program.kinds import CONST, INPUT, PARAM, SOURCES, STATE, STORED, WRITE
from graphwright.program.loose import Forward, backward
from graphwright.program.weights import Weights

if TYPE_CHECKING:
    from pathlib import Path

    from graphwright.files import StrPath
    from graphwright.program.diff import ProgramDiff
    from graphwright.program.journal import Entry, Journal
    from graphwright.program.running import Run
    from graphwright.program.selection import Selection
    from graphwright.program.transaction import Transaction
    from graphwright.program.validate import AssemblyReport


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


class Program:
    """A directed graph of operations that is edited while it runs.

    Attributes:
        graph: nodes and edges; read it freely, change it through `edit` only.
        weights: variables by checkpoint key.
        history_bytes: of arrays that undo keeps in memory; beyond it the oldest lie in a temporary file, none is lost.
        version: rises with every committed edit; a plan belongs to one version.
        derived: what layers above keep with the program and can make again (plans); it goes with it.
        journal: every edit that was made, undone and redone.
        valid: False while an edit with `check=False` left it broken; `validate()` says where.
        loose: edges that close a cycle, let in by an edit with `check=False`; they are left out of the order.
        readonly: True for a past state given by `at`; fork it to go on from there.
    """

    compiler: ClassVar[Callable[..., Any] | None] = None
    """Set by the layer that plans, so that `program.compile(...)` needs no import upwards."""

    def __init__(self, name: str = "program") -> None:
        from graphwright.program.history import History
        from graphwright.program.journal import Journal

        self.name = name
        self.graph = Graph(node_columns=NODE_COLUMNS, edge_columns=EDGE_COLUMNS, block=8)
        self.loose: set[EdgeId] = set()
        self.order_labels: OnlineOrder[NodeId] = OnlineOrder(Forward(self.graph, self.loose))
        self.weights = Weights()
        self.version = 0
        self.journal: Journal = Journal()
        self.history_bytes = 4 << 30
        self.valid = True
        self.readonly = False
        self._names: dict[str, NodeId] = {}
        self._outputs: dict[str, Value] = {}
        self._kinds: dict[str, dict[NodeId, None]] = {}
        self._seq = 0
        self.derived: dict[str, Any] = {}
        self.graveyard = Graveyard()
        self._structure = StructureHash(self)
        self.history = History(self)
        self.graph.describe = self.history.describe

    # -- looking -----------------------------------------------------------------------------------------------------
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
        """The attributes of a node."""
        return self.graph.node(node, "attrs")

    def specs(self, node: NodeId) -> tuple[Spec, ...]:
        """Specs of all results of a node."""
        return self.graph.node(node, "specs")

    def spec(self, ref: NodeId | Value | str) -> Spec:
        """Spec of one result."""
        node, port = self.value(ref)
        return self.specs(node)[port]

    def seq(self, node: NodeId) -> int:
        """Creation number."""
        return self.graph.node(node, "seq")

    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes, oldest slot first."""
        return tuple(self.graph.nodes())

    def of_kind(self, kind: str) -> tuple[NodeId, ...]:
        """Nodes of one op or kind, in order of creation."""
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

    def constants(self) -> dict[str, NDArray]:
        """The arrays of all params and consts by checkpoint key, each once, in order of their nodes."""
        stored = [n for n in self.order() if self.op(n) in (PARAM, CONST)]
        return {key: self.weights.array(key) for key in dict.fromkeys(self.key(n) for n in stored)}

    def output_names(self) -> tuple[str, ...]:
        """Names of the results, in order of declaration."""
        return tuple(self._outputs)

    def output(self, name: str) -> Value:
        """A result by its name. Raises: UnknownNode."""
        if name not in self._outputs:
            raise UnknownNode("no output of this name", where=name, expected=", ".join(self._outputs))
        return self._outputs[name]

    def key(self, node: NodeId) -> str:
        """Checkpoint key of a param, const or state node. Raises: UnknownNode for other nodes."""
        if self.op(node) not in STORED:
            raise UnknownNode("only params, consts and states have a key", where=self.path(node), got=self.op(node))
        return self.attrs(node)["key"]

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

    def select(self, pattern: str = "**", **filters: Any) -> Selection:
        """Nodes by path pattern and filters; see `Selection`."""
        from graphwright.program.selection import Selection

        return Selection.of(self, pattern, **filters)

    def hash(self) -> str:
        """sha256 over structure and the bytes of all weights; equal programs have equal hashes."""
        return self._structure.full()

    def structure_hash(self) -> str:
        """sha256 over structure alone: names, ops, attributes, specs, edges, outputs."""
        return self._structure.structure()

    def node_digest(self, node: NodeId) -> bytes:
        """32 bytes over a node's name, op, attributes, specs and what it reads."""
        return self._structure.node_digest(node)

    def state_hash(self) -> str:
        """As `hash`, with weights that lie untouched in an opened file counted by reference; reads no payload."""
        return self._structure.full(mapped_by_reference=True)

    # -- beside others -----------------------------------------------------------------------------------------------
    def fork(self, name: str | None = None) -> Program:
        """A program of its own that starts as this one is and shares weights until written; see `program.fork`."""
        from graphwright.program.fork import fork

        return fork(self, name)

    def at(self, ref: str | int) -> Program:
        """A past state as a read-only program: of a mark, or after a journal entry; see `program.fork`."""
        from graphwright.program.fork import at

        return at(self, ref)

    def diff(self, other: Program) -> ProgramDiff:
        """What changed from `other` to this program; see `program.diff`."""
        from graphwright.program.diff import diff

        return diff(self, other)

    def validate(self) -> AssemblyReport:
        """Check everything against everything else and report all that does not fit; see `program.validate`."""
        from graphwright.program.validate import validate

        return validate(self)

    def extract(self, selection: Selection | Sequence[NodeId]) -> Program:
        """A selection as a program that shares weights; see `program.replace`."""
        from graphwright.program.replace import extract

        return extract(self, list(selection))

    def save(
        self,
        directory: StrPath,
        history: Literal["full", "edits", "none"] = "full",
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        companions: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Save into a directory that appears whole or not at all; see `program.save`."""
        from graphwright.program.save import save

        return save(self, directory, history, overwrite, max_shard_size, companions)

    # -- drawing -----------------------------------------------------------------------------------------------------
    def to_dot(self, path: StrPath | None = None, **options: Any) -> str:
        """A picture as Graphviz DOT, also written to `path` if given; see `graphwright.program.draw.to_dot`."""
        from graphwright.program.draw import to_dot, written

        return written(to_dot(self, **options), path)

    def to_svg(self, path: StrPath | None = None, **options: Any) -> str:
        """A picture as SVG, also written to `path` if given; see `graphwright.program.draw.to_svg`."""
        from graphwright.program.draw import to_svg, written

        return written(to_svg(self, **options), path)

    def to_html(self, path: StrPath | None = None, **options: Any) -> str:
        """A page with groups to open and close, also written to `path`; see `graphwright.program.draw.to_html`."""
        from graphwright.program.draw import to_html, written

        return written(to_html(self, **options), path)

    def _repr_html_(self) -> str:
        from graphwright.program.draw import notebook

        return notebook(self)

    # -- running -----------------------------------------------------------------------------------------------------
    def run(
        self,
        feeds: Mapping[str, Any] | None = None,
        *,
        keep: str | Sequence[Any] = "all",
        capture: Any = (),
        patch: Mapping[Any, Any] | None = None,
        **named: Any,
    ) -> Run:
        """Run node by node, so that every value can be read; see `graphwright.program.running.run`."""
        from graphwright.program.running import run

        return run(self, {**(feeds or {}), **named}, keep=keep, capture=capture, patch=patch)

    def __call__(self, **feeds: Any) -> Any:
        """Run on tensors, differentiable and traceable; one tensor, or a dict if there are several outputs."""
        from graphwright.program.interpret import evaluate

        results = evaluate(self, feeds)
        return next(iter(results.values())) if len(results) == 1 else results

    def parameters(self) -> list[Parameter]:
        """The trainable variables, in order of creation, tied ones once: what an optimizer takes."""
        found = (self.weights[self.key(n)] for n in self.params() if self.attrs(n).get("trainable", True))
        return list(dict.fromkeys(v for v in found if isinstance(v, Parameter)))

    def grad(
        self, outputs: Any, wrt: Sequence[Any], sizes: Mapping[str, int] | None = None, *, seeded: bool = False
    ) -> Program:
        """The program of d Σ outputs / d wrt; see `graphwright.program.differentiate`."""
        from graphwright.program.differentiate import differentiate

        return differentiate(self, outputs, wrt, sizes or {}, seeded)

    def compile(self, *args: Any, **options: Any) -> Any:
        """A plan for given input shapes; see `graphwright.plan.compile`."""
        if Program.compiler is None:
            raise UsageError("no planner is loaded", fix="import graphwright.plan")
        return Program.compiler(self, *args, **options)

    # -- editing -----------------------------------------------------------------------------------------------------
    def edit(
        self, why: str, *, author: str = "human", tool: str | None = None, check: bool = True, keep_undo: bool = True
    ) -> Transaction:
        """Open an edit: `with program.edit("drop a branch") as e: ...` is one undo step.

        Args:
            why: what the journal says.
            author: `human`, `gate`, `evolution` or `pass`.
            tool: name of the program that edits, if one does.
            check: False admits a broken state, a cycle too (`program.valid` is False then), so that it can be repaired.
            keep_undo: False keeps nothing to undo it with: `undo` stops there.
        Raises: on exit PortEmpty, SpecMismatch or CycleError; with any error the program is as before, bit for bit.
        """
        from graphwright.program.transaction import Transaction

        return Transaction(self, why, author, tool, check, keep_undo)

    def undo(self, n: int = 1) -> None:
        """Take back the last `n` edits: structure and weight bytes. Raises: NotUndoable, and nothing is undone."""
        self.history.walk(n, back=True)

    def redo(self, n: int = 1) -> None:
        """Make the last `n` undone edits again. Raises: NotUndoable, and nothing is redone."""
        self.history.walk(n, back=False)

    def mark(self, name: str) -> None:
        """Name the present state for `rollback`."""
        self.history.mark(name)

    def rollback(self, name: str) -> int:
        """Undo to a mark; returns the number of entries undone."""
        return self.history.rollback(name)

    def blame(self, ref: NodeId | Value | EdgeId | str) -> list[Entry]:
        """Journal entries that made or changed a node, an edge, a path or a checkpoint key; also of deleted ones."""
        if isinstance(ref, str):
            return self.history.blame(self._names.get(ref), ref)
        return self.history.blame(ref.node if isinstance(ref, Value) else ref, None)

    def on_edit(self, listener: Callable[[Entry], object]) -> Callable[[], None]:
        """Call `listener(entry)` after each commit, undo and redo; returns the call that stops it.

        `entry.edits` is what was done, `entry.cone` the nodes that inference looked at. The commit stands whatever the
        listener does: its exception is logged by `graphwright.program`.
        """
        self.history.listeners.append(listener)
        return lambda: self.history.listeners.remove(listener)

    def __len__(self) -> int:
        return self.graph.node_count

    def __repr__(self) -> str:
        return (
            f"Program({self.name!r}, {len(self)} nodes, {self.graph.edge_count} edges, "
            f"{len(self.params())} params, version {self.version})"
        )

    # -- changing: the ground that edits, the builder and the tracer stand on ----------------------------------------
    def free_name(self, wanted: str) -> str:
        """`wanted`, or the first `wanted_2`, `wanted_3`, ... that no node has."""
        if wanted not in self._names:
            return wanted
        n = 2
        while f"{wanted}_{n}" in self._names:
            n += 1
        return f"{wanted}_{n}"

    def check_name(self, name: str) -> None:
        """Raises: BadName for a name that is no dotted path, NameTaken for one in use."""
        if not is_name(name):
            raise BadName("a name is a dotted path without empty segments or control characters", got=repr(name[:80]))
        if name in self._names:
            raise NameTaken("a node of this name exists", where=name, fix="name= another, or e.rename the old one")

    @property
    def order_frozen(self) -> bool:
        """True while undo or redo restores labels from its log."""
        return self.graveyard.mode != "edit"

    def _reorder(self, change: Callable[[], Relabelled[NodeId]]) -> None:
        """Change the order and log it for undo; while undoing, the log itself restores the order."""
        if not self.order_frozen:
            record = change()
            if record and self.history.open is not None:
                self.history.open.relabelled.append(record)

    def set_order(self, graph: Graph, labels: Mapping[NodeId, tuple[int, int]]) -> None:
        """Take another graph and the saved keys of its nodes; edges against them are loose."""
        self.graph, self.loose = (
            graph,
            {e for e in graph.edges() for src, dst in [graph.endpoints(e)] if labels[src] >= labels[dst]},
        )
        self.order_labels = OnlineOrder.from_labels(Forward(graph, self.loose), labels)

    def find_loose(self) -> None:
        """After labels were restored: see which edges go against the order."""
        self.loose.clear()
        if not self.valid:
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
            if self.history.open is None or self.history.open.check:
                raise
            return False
        return True

    def _order_edge(self, src: NodeId, dst: NodeId) -> None:
        """Make room in the order for an edge. Raises: CycleError naming the path, nothing changed."""
        try:
            self._reorder(lambda: self.order_labels.add_edge(src, dst))
        except CycleError as error:
            names = [self.path(n) for n in error.path]
            raise CycleError(
                "an edge would close a cycle",
                path=error.path,
                where=f"{self.path(src)} -> {self.path(dst)}",
                got=" -> ".join([*names, names[0]]),
                fix="cut an edge on the path, or e.connect(src, junction, delay=1)",
            ) from error

    def insert_node(
        self,
        op: str,
        attrs: Mapping[str, Any],
        name: str,
        specs: tuple[Spec, ...],
        seq: int | None = None,
        handle: NodeId | None = None,
        after: NodeId | None = None,
    ) -> NodeId:
        """Put a node in, unconnected. With `handle`, revive the node that had it; `after` hints at its place."""
        number = self._seq if seq is None else seq
        revived = self.graveyard.revive(self.graph, handle)
        node = revived
        if revived is None:
            node = self.graph.add_node(op=op, attrs=dict(attrs), name=name, specs=specs, seq=number)
            self._seq = max(self._seq, number + 1)
        self._reorder(lambda: self.order_labels.insert(node, after=after, created=number))
        self._names[name] = node
        self._kinds.setdefault(op, {})[node] = None
        if revived is not None:  # kinds are listed in order of creation, also after an undo
            self._kinds[op] = dict.fromkeys(sorted(self._kinds[op], key=self.seq))
        self._structure.touch(node)
        return node

    def delete_node(self, node: NodeId) -> None:
        """Take an unconnected node out; its handle can be revived."""
        name, op = self.path(node), self.op(node)
        self._structure.forget(node)
        del self._names[name]
        del self._kinds[op][node]
        self._reorder(lambda: self.order_labels.remove(node))
        self.graveyard.bury(node, self.graph.remove_node(node))

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
        self._structure.touch(dst)
        return edge

    def delete_edge(self, edge: EdgeId) -> None:
        """Take an edge out; its handle can be revived."""
        dst = self.graph.target(edge)
        self.graveyard.bury(edge, self.graph.remove_edge(edge))
        self.loose.discard(edge)
        self._structure.touch(dst)

    def move_edge(self, edge: EdgeId, src: Value) -> None:
        """Let an edge start at another value. Raises: CycleError, nothing changed."""
        dst = self.graph.target(edge)
        fits = self._admit_edge(src.node, dst)
        self.graveyard.rewire(self.graph, edge, src.node)
        (self.loose.discard if fits else self.loose.add)(edge)
        self.graph.set_edge(edge, src_port=src.port)
        self._structure.touch(dst)

    def sort_weights(self, edits: Sequence[object]) -> None:
        """After edits that put nodes in or out: list the weights by creation of the first node that stands for each."""
        if not any(getattr(edit, "op", None) in STORED for edit in edits):
            return
        ranks: dict[str, int] = {}
        for node in (n for kind in STORED for n in self.of_kind(kind)):
            ranks[self.key(node)] = min(ranks.get(self.key(node), self.seq(node)), self.seq(node))
        self.weights.sort(ranks)

    def update_node(self, node: NodeId, **columns: Any) -> None:
        """Change columns of a node: attrs, specs or name."""
        if "name" in columns:
            del self._names[self.path(node)]
            self._names[columns["name"]] = node
            for edge in self.graph.out_edges(node):
                self._structure.touch(self.graph.target(edge))
        self.graph.set_node(node, **columns)
        self._structure.touch(node)

    def add_op(self, op: str, operands: Sequence[Value], attrs: Mapping[str, Any], name: str) -> NodeId:
        """Put an op node in with its edges and inferred specs; used while a program is built."""
        row = get(op)
        full = row.complete(attrs, name)
        specs = row.specs([self.specs(v.node)[v.port] for v in operands], full, name)
        node = self.insert_node(op, full, name, specs)
        for port, operand in enumerate(operands):
            self.insert_edge(operand, node, port)
        return node

    def add_source(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """Put an input, param, const or state node in."""
        assert kind in SOURCES
        return self.insert_node(kind, attrs, name, (spec,))

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
