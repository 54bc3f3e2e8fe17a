"""The primitive edits: immutable objects with `check`, `invert` and `apply`. Transactions are lists of these edits.

Tested invariant: `apply` and then `apply` of the inverse edit leave the hash and the bytes of a program unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from graphwright.array import NDArray, empty
from graphwright.autograd import Parameter, Variable
from graphwright.errors import ShapeError, UsageError
from graphwright.graph import CapacityError, EdgeId, NodeId
from graphwright.ops import get
from graphwright.program.editing import fields as f
from graphwright.program.errors import NameTaken, NotAJunction, PortEmpty, PortTaken, ReplayConflict
from graphwright.program.files import forms
from graphwright.program.gates import RESERVED
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import CONST, KINDS, PARAM, PATTERN, SOURCES, STATE, STORED
from graphwright.program.op_graph import MAX_PORT, Value, is_key
from graphwright.program.patterns import PatternVariable, adopt, check_free, read_pattern
from graphwright.program.primitives import (
    delete_edge,
    delete_node,
    insert_edge,
    insert_node,
    move_edge,
    rekey,
    set_outputs,
    update_node,
)
from graphwright.program.weights import add_weight, drop_weight, sort_by_creation

if TYPE_CHECKING:
    from graphwright.array import DType, Spec
    from graphwright.patterns import PatternChange
    from graphwright.program.program import Program

PRIMITIVES: dict[str, type[Edit]] = {}
"""The primitive edits by name; a subclass of `Edit` registers itself."""


class Edit:
    """A primitive edit: one change of a program.

    `invert` and `to_json` are called before `apply`, while the old state still exists; `touches` is called after it.

    Attributes:
        packed: dict from the name of each saved field to its `fields.Kind`, which serializes values of the field.
        handles: names of the fields that hold the handle of a node or edge.
        issued: handle of the node or edge that the edit adds; None if it adds none.
        written: keys of the weights whose values the edit sets.
        payloads: the arrays that the edit holds, such as the new value of a weight.
    """

    __slots__ = ()
    packed: ClassVar[Mapping[str, f.Kind]] = {}
    handles: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):  # a base of primitives
            PRIMITIVES[cls.__name__] = cls
        cls.handles = tuple(name for name, kind in cls.packed.items() if kind in f.HANDLES)

    @property
    def issued(self) -> NodeId | EdgeId | None:
        return next((getattr(self, n) for n, kind in self.packed.items() if kind in (f.NEW_NODE, f.NEW_EDGE)), None)

    @property
    def written(self) -> tuple[str, ...]:
        return ()

    @property
    def payloads(self) -> tuple[NDArray, ...]:
        return ()

    def check(self, p: Program) -> None:
        """Raise an error if the edit cannot be applied to `p`. The program is not changed."""
        raise NotImplementedError

    def invert(self, p: Program) -> Edit:
        """Return the edit that reverts this one."""
        raise NotImplementedError

    def apply(self, p: Program) -> None:
        """Apply the edit to a program without checking it."""
        raise NotImplementedError

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        """Return the nodes whose operands, attributes or weight the edit changed, without removed nodes."""
        graph = p.graph
        handles = [h for name in self.handles if (h := getattr(self, name)) in graph]
        return tuple([h if isinstance(h, NodeId) else graph.target(h) for h in handles])

    def to_json(self, p: Program) -> dict[str, Any]:
        """Return the journal record: a dict that names nodes by path, weights by key, and also contains the handles."""
        record: dict[str, Any] = {"edit": type(self).__name__}
        for name, kind in self.packed.items():
            value = getattr(self, name)
            if kind.record is None:
                record[name] = kind.pack(None, value)
            else:
                record.update(kind.record(p, name, value))
        return record

    @classmethod
    def read(cls, r: RecordReader, record: f.Record) -> Edit:
        """Return the edit that a journal record describes, with its names looked up in the program `r.program`."""
        kinds = cls.packed.items()
        return cls(**{n: k.read(r, record, n) if k.read is not None else k.unpack(None, record[n]) for n, k in kinds})

    def replaced(self, p: Program) -> tuple[str, ...]:
        """Return the keys of the weights whose present values the inverse edit will store. Call this before `apply`."""
        return self.written

    def with_payloads(self, swaps: Mapping[int, NDArray]) -> Self:
        """Return the edit with some arrays replaced: `swaps` maps the `id()` of an old array to the new array."""
        return self


@dataclass(slots=True)
class RecordReader:
    """Reads edits from journal records for a program, which may differ from the program that was recorded.

    Attributes:
        program: the program in which paths, ports and keys are looked up.
        payload: function from the `payload` field of a record to the array that it names.
        ports: dict from (path of a junction, recorded port) to the port used instead if the recorded port was taken.
        dtype: dtype of new floating-point weights; None for the recorded dtype.
    """

    program: Program
    payload: Callable[[Any], NDArray]
    ports: dict[tuple[str, int], int] = field(default_factory=dict)
    dtype: DType | None = None

    def edit(self, record: f.Record) -> Edit:
        """Return the edit that a record describes. Raises: UnknownNode, PortEmpty, ReplayConflict, ProgramFileError."""
        if record["edit"] not in PRIMITIVES:
            raise ReplayConflict("unknown kind of edit", got=record["edit"], expected=", ".join(PRIMITIVES))
        return PRIMITIVES[record["edit"]].read(self, record)

    def value(self, form: Mapping[str, Any]) -> Value:
        """Return the value that a record names by the path of its node and the index of the result (`port`)."""
        return Value(self.program.node(forms.text(form["path"], "path")), forms.integer(form["port"], field="port"))

    def edge(self, record: Mapping[str, Any]) -> EdgeId:
        """Return the edge that a record names by the path of its target and the port that it enters."""
        p = self.program
        dst = p.node(forms.text(record["dst"], "dst"))
        port = self.ports.get((record["dst"], record["port"]), record["port"])
        found = next((e for e in p.in_edges(dst) if p.edge_port(e) == port), None)
        if found is None:
            taken = ", ".join(f"{p.edge_port(e)} from {p.path(p.edge_value(e))}" for e in p.in_edges(dst))
            expected = f"one of the edges on port {taken}" if taken else "an edge, but the node has none"
            raise PortEmpty("no edge enters this port", where=f"{p.path(dst)}, port {port}", expected=expected)
        return found

    def array(self, form: Any, dtype: DType) -> NDArray:
        """Return a copy, in dtype `dtype`, of the array that the `payload` field of a record names."""
        array = self.payload(form)
        return array.copy() if array.dtype is dtype else empty(array.shape, dtype).copy_from(array)


def _check_value(p: Program, value: Value) -> None:
    """Raise StaleHandle if the node of a value was removed, ShapeError if the node has no result with its index."""
    count = len(p.specs(p.node(value)))
    if not 0 <= value.port < count:
        expected = f"0 to {count - 1}" if count else "a node with a result"
        what = "the node has no result with this index"
        raise ShapeError(what, where=p.path(value), expected=expected, got=value.port)


_KIND_ATTRS = {PARAM: {"key", "trainable", "axes", "born"}, CONST: {"key", "axes"}, STATE: {"key", "axes"},
               PATTERN: {"key"}}  # fmt: skip


def _check_attrs(op: str, attrs: Mapping[str, Any], where: str) -> None:
    if op not in KINDS:
        get(op).complete(attrs, where)
    elif unknown := attrs.keys() - _KIND_ATTRS.get(op, set()):
        expected = ", ".join(sorted(_KIND_ATTRS.get(op, ()))) or "none"
        raise UsageError(f"unknown attributes of the {op} node", where=where, got=", ".join(unknown), expected=expected)


def _check_free_key(p: Program, key: Any, where: str) -> None:
    if p.weights.has_key(key):
        fix = "choose another key=, or change the weight with e.set_weight(key, value)"
        raise NameTaken("another weight has this key", where=where, got=key, fix=fix)
    if not is_key(key):
        expected = "text of 1 to 4096 bytes, not __metadata__"
        raise NameTaken("invalid checkpoint key", where=where, expected=expected, got=repr(key)[:80])


@dataclass(frozen=True, slots=True)
class AddNode(Edit):
    """Add a node without edges. Its handle is `node`; `variable` is the new weight of a param, const, state or pattern.

    The node is inserted after the node `after` in the topological order, so that adding its edges needs no reordering.
    Records name it, so that a replay gives the order of the program that was recorded.
    """

    packed = {"node": f.NEW_NODE, "op": f.TEXT, "attrs": f.ATTRS, "name": f.PATH, "specs": f.SPECS,
              "seq": f.INTEGER, "variable": f.VARIABLE}  # `after` matters only at the first time  # fmt: skip
    node: NodeId
    op: str
    attrs: Mapping[str, Any]
    name: str
    specs: tuple[Spec, ...]
    seq: int
    variable: Variable | None = None
    after: NodeId | None = None

    @property
    def payloads(self) -> tuple[NDArray, ...]:
        if self.variable is None or isinstance(self.variable, PatternVariable):
            return ()
        return (self.variable.data,) if isinstance(self.variable.data, NDArray) else ()

    def check(self, p: Program) -> None:
        p.check_name(self.name)
        _check_attrs(self.op, self.attrs, self.name)
        if self.op not in STORED:
            return
        if self.variable is not None:
            _check_free_key(p, self.attrs.get("key"), self.name)
            if isinstance(self.variable, PatternVariable):
                check_free(self.variable.pattern, p, self.name)
        elif not p.weights.has_key(self.attrs.get("key", "")):
            fix = f"add the node by e.{self.op}(name, array)"
            raise UsageError(f"the new {self.op} has neither a value nor the key of a weight", where=self.name, fix=fix)

    def invert(self, p: Program) -> Edit:
        return RemoveNode(self.node)

    def to_json(self, p: Program) -> dict[str, Any]:
        after = {} if self.after is None else {"after": p.path(self.after)}
        return {**Edit.to_json(self, p), **after}

    def apply(self, p: Program) -> None:
        if self.variable is not None:
            add_weight(p.weights, self.attrs["key"], self.variable)
            if isinstance(self.variable, PatternVariable):
                adopt(p, self.variable)
        node = insert_node(p, self.op, self.attrs, self.name, self.specs, self.seq, self.node, self.after)
        assert node == self.node, "handles are issued in a fixed order"

    @classmethod
    def read(cls, r: RecordReader, record: f.Record) -> Edit:
        attrs, variable, specs = forms.attrs(record["attrs"]), None, forms.specs(record["specs"])
        if "payload" in record:
            array = r.payload(record["payload"])
            array = r.array(record["payload"], (r.dtype or array.dtype) if array.dtype.is_float else array.dtype)
            kind = Parameter if record["op"] == PARAM else Variable
            variable = kind(array, bool(attrs.get("trainable", False)) and array.dtype.is_float, attrs["key"])
            specs = (array.spec,)
        if "pattern" in record:
            variable = PatternVariable(read_pattern(record["pattern"]), attrs["key"])
        p = r.program
        after = p.find(record.get("after"))  # None in another program, which lacks this node
        return cls(p.graph.next_node(), record["op"], attrs, record["path"], specs, p._seq, variable, after)

    def with_payloads(self, swaps: Mapping[int, NDArray]) -> Self:
        """Replace the array inside `variable` in place, because other edits refer to the same Variable object."""
        if self.payloads and self.variable is not None and id(self.variable.data) in swaps:
            self.variable.data, self.variable.shared = swaps[id(self.variable.data)], True
        return self


@dataclass(frozen=True, slots=True)
class RemoveNode(Edit):
    """Remove a node that has no edges."""

    packed = {"node": f.NODE}
    node: NodeId

    def check(self, p: Program) -> None:
        path = p.path(p.node(self.node))
        if p.graph.in_degree(self.node) or p.graph.out_degree(self.node):
            ends = [p.path(p.edge_value(x)) for x in p.in_edges(self.node)]
            ends += [p.path(p.graph.target(x)) for x in p.out_edges(self.node)]
            fix, got = "call e.remove(node), which removes its edges too", f"edges with {', '.join(ends)}"
            raise UsageError("the node to remove still has edges", where=path, got=got, fix=fix)
        if any(v.node == self.node for v in p.outputs()):
            fix = "call e.set_outputs(...) without this node first"
            raise UsageError("cannot remove a node that is an output of the program", where=path, fix=fix)

    def invert(self, p: Program) -> Edit:
        n, attrs = self.node, p.attrs(self.node)
        variable = p.weights[attrs["key"]] if p.op(n) in STORED and not self._shared(p) else None
        return AddNode(n, p.op(n), attrs, p.path(n), p.specs(n), p.seq(n), variable)

    def _shared(self, p: Program) -> bool:
        """Return True if another node reads the same variable."""
        return len(p.readers(p.key(self.node))) > 1

    def apply(self, p: Program) -> None:
        if p.op(self.node) in STORED and not self._shared(p):
            drop_weight(p.weights, p.key(self.node))
        delete_node(p, self.node)

    def replaced(self, p: Program) -> tuple[str, ...]:
        return (p.key(self.node),) if p.op(self.node) in STORED else ()


@dataclass(frozen=True, slots=True)
class AddEdge(Edit):
    """Add an edge with the handle `edge` from the value `src` to a port of the node `dst`."""

    packed = {"edge": f.NEW_EDGE, "src": f.VALUE, "dst": f.TARGET, "port": f.INTEGER}
    edge: EdgeId
    src: Value
    dst: NodeId
    port: int

    def check(self, p: Program) -> None:
        _check_value(p, self.src)
        dst = p.node(self.dst)
        if p.op(dst) in SOURCES:
            raise NotAJunction(f"edges cannot enter {p.op(dst)} nodes: they have no operands", where=p.path(dst))
        if type(self.port) is not int or self.port < 0:
            raise UsageError("invalid port number", where=p.path(dst), expected=f"0 to {MAX_PORT}", got=repr(self.port))
        if self.port > MAX_PORT:
            fix = "sum some edges in another junction and connect that junction"
            raise CapacityError("the port number is too large; a junction does not reuse the ports of removed edges",
                                where=p.path(dst), expected=f"<= {MAX_PORT}", got=self.port, fix=fix)  # fmt: skip
        if any(p.edge_port(e) == self.port for e in p.graph.in_edges(self.dst)):
            fix = "call e.rewire(edge, new_src) to change the source of that edge"
            raise PortTaken("the port already has an edge", where=f"{p.path(self.dst)}, port {self.port}", fix=fix)

    def invert(self, p: Program) -> Edit:
        return RemoveEdge(self.edge)

    def apply(self, p: Program) -> None:
        edge = insert_edge(p, self.src, self.dst, self.port, self.edge)
        assert edge == self.edge, "handles are issued in a fixed order"

    @classmethod
    def read(cls, r: RecordReader, record: f.Record) -> Edit:
        p = r.program
        dst, port = p.node(record["dst"]), forms.integer(record["port"], field="port")
        if p.is_junction(dst) and any(p.edge_port(e) == port for e in p.in_edges(dst)):
            free = int(p.graph.node(dst, "next_port"))
            r.ports[record["dst"], port] = free
            port = free
        return cls(p.graph.next_edge(), r.value(record["src"]), dst, port)


@dataclass(frozen=True, slots=True)
class RemoveEdge(Edit):
    """Remove an edge. The other edges of its nodes keep their ports."""

    packed = {"edge": f.EDGE}
    edge: EdgeId

    def check(self, p: Program) -> None:
        p.graph.endpoints(self.edge)  # raises StaleHandle

    def invert(self, p: Program) -> Edit:
        return AddEdge(self.edge, p.edge_value(self.edge), p.graph.target(self.edge), p.edge_port(self.edge))

    def apply(self, p: Program) -> None:
        delete_edge(p, self.edge)


@dataclass(frozen=True, slots=True)
class Rewire(Edit):
    """Change the source of an edge. The edge keeps its handle and port."""

    packed = {"edge": f.EDGE, "src": f.VALUE}
    edge: EdgeId
    src: Value

    def check(self, p: Program) -> None:
        _check_value(p, self.src)
        p.graph.endpoints(self.edge)

    def invert(self, p: Program) -> Edit:
        return Rewire(self.edge, p.edge_value(self.edge))

    def apply(self, p: Program) -> None:
        move_edge(p, self.edge, self.src)


@dataclass(frozen=True, slots=True)
class SetAttr(Edit):
    """Replace all attributes of a node by `attrs`, which must contain the unchanged attributes too."""

    packed = {"node": f.NODE, "attrs": f.ATTRS}
    node: NodeId
    attrs: Mapping[str, Any]

    def check(self, p: Program) -> None:
        op, path = p.op(p.node(self.node)), p.path(self.node)
        _check_attrs(op, self.attrs, path)
        encode_attrs(self.attrs)
        if op in STORED and self.attrs.get("key") != (old := p.key(self.node)):
            if old in RESERVED:
                raise UsageError("this key cannot change: the weights of gates are found by their keys", where=path)
            _check_free_key(p, self.attrs.get("key"), path)

    def invert(self, p: Program) -> Edit:
        return SetAttr(self.node, p.attrs(self.node))

    def apply(self, p: Program) -> None:
        if p.op(self.node) in STORED and (old := p.key(self.node)) != (new := self.attrs["key"]):
            rekey(p, old, new)
        op = p.op(self.node)
        complete = dict(self.attrs) if op in KINDS else get(op).complete(self.attrs)  # a dtype may be given by name
        update_node(p, self.node, attrs=complete)


@dataclass(frozen=True, slots=True)
class Rename(Edit):
    """Rename a node; its checkpoint key does not change."""

    packed = {"node": f.NODE, "name": f.TEXT}
    node: NodeId
    name: str

    def check(self, p: Program) -> None:
        p.node(self.node)
        p.check_name(self.name)

    def invert(self, p: Program) -> Edit:
        return Rename(self.node, p.path(self.node))

    def apply(self, p: Program) -> None:
        update_node(p, self.node, name=self.name)


@dataclass(frozen=True, slots=True)
class SetWeight(Edit):
    """Set the array of a weight. All nodes that share a tied weight see the new array. No file is written.

    With `inplace` the values are copied into the existing memory, unless that memory belongs to a file or is shared.
    """

    packed = {"key": f.TEXT, "array": f.ARRAY, "inplace": f.FLAG}
    key: str
    array: NDArray
    inplace: bool = False

    @property
    def written(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def payloads(self) -> tuple[NDArray, ...]:
        return (self.array,)

    def check(self, p: Program) -> None:
        variable = p.weights.at_key(self.key)  # raises UnknownNode
        if isinstance(variable, PatternVariable):
            raise UsageError("the table of a pattern cannot be set", where=self.key,
                             fix=f"edit the pattern: program.patterns[{self.key!r}].connect(query, key)")  # fmt: skip
        present = variable.spec
        if self.inplace and self.array.spec != present:
            what = "inplace=True cannot change the shape or dtype of a weight"
            raise ShapeError(what, where=self.key, expected=present, got=self.array.spec)

    def invert(self, p: Program) -> Edit:
        present = p.weights.array(self.key)
        if self.inplace and p.history.owns(p.weights[self.key]):
            return SetWeight(self.key, present.copy(), True)
        return SetWeight(self.key, present)

    def apply(self, p: Program) -> None:
        variable = p.weights[self.key]
        if not self.inplace:
            variable.data = self.array
        elif p.history.owns(variable):
            variable.data.copy_from(self.array)
        else:
            variable.data = self.array.copy()
        variable.shared = not self.inplace  # the journal holds the array itself, or a copy of it
        for node in self.touches(p):
            update_node(p, node, specs=(self.array.spec,))

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return p.readers(self.key)

    @classmethod
    def read(cls, r: RecordReader, record: f.Record) -> Edit:
        present = r.program.weights.array(record["key"]).dtype
        array, inplace = r.array(record["payload"], present), forms.flag(record.get("inplace", False), "inplace")
        return cls(record["key"], array, inplace)

    def with_payloads(self, swaps: Mapping[int, NDArray]) -> Self:
        return replace(self, array=swaps.get(id(self.array), self.array))


@dataclass(frozen=True, slots=True)
class EditPattern(Edit):
    """Change the edges of a pattern. Plans are not affected, because tables are data."""

    packed = {"key": f.TEXT, "change": f.CHANGE}
    key: str
    change: PatternChange

    def check(self, p: Program) -> None:
        if not isinstance(p.weights.at_key(self.key), PatternVariable):  # raises UnknownNode
            raise UsageError("this weight is not a pattern", where=self.key, expected=", ".join(p.patterns) or "none")

    def invert(self, p: Program) -> Edit:
        return EditPattern(self.key, self.change.invert())

    def apply(self, p: Program) -> None:
        variable = p.weights.at_key(self.key)
        assert isinstance(variable, PatternVariable)
        self.change.apply(variable.pattern)
        variable.follow(self.change)


@dataclass(frozen=True, slots=True)
class SetOutputs(Edit):
    """Replace the outputs of the program by `outputs`, an ordered tuple of (name, value)."""

    packed = {"outputs": f.OUTPUTS}
    outputs: tuple[tuple[str, Value], ...]

    def check(self, p: Program) -> None:
        for _, value in self.outputs:
            _check_value(p, value)

    def invert(self, p: Program) -> Edit:
        return SetOutputs(tuple(zip(p.output_names(), p.outputs(), strict=True)))

    def apply(self, p: Program) -> None:
        set_outputs(p, dict(self.outputs))


@dataclass(frozen=True, slots=True)
class Annotation(Edit):
    """Write a note to the journal: `facts` about the node, weight or axis `name`. The program does not change."""

    packed = {"name": f.TEXT, "facts": f.ATTRS}
    name: str
    facts: Mapping[str, Any]

    def check(self, p: Program) -> None:
        encode_attrs(self.facts)

    def invert(self, p: Program) -> Edit:
        return self

    def apply(self, p: Program) -> None:
        pass


def sort_weights(p: Program, edits: Iterable[Edit]) -> None:
    """Sort the weights of a program by creation order if one of the edits adds a param, const or state."""
    if any(getattr(edit, "op", None) in STORED for edit in edits):
        sort_by_creation(p)
