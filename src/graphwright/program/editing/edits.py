"""The primitive edits: frozen values with `check -> invert -> apply`. Every change of a program is a list of these.

Test property: for any edit that passes `check`, apply and then the inverse give the same hash and the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from graphwright.array import NDArray
from graphwright.errors import ShapeError, UsageError
from graphwright.graph import CapacityError
from graphwright.ops import get
from graphwright.program.axes.resize import ResizeAxis
from graphwright.program.errors import NameTaken, NotAJunction, PortTaken
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import CONST, KINDS, PARAM, SOURCES, STATE, STORED
from graphwright.program.op_graph import MAX_PORT, is_key
from graphwright.program.weights import payload_json

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.autograd import Variable
    from graphwright.graph import EdgeId, NodeId
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program


class Edit(Protocol):
    """One change. `invert` is asked for before `apply`, while what is about to go still exists."""

    def check(self, p: Program) -> None:
        """Raise the reason why the edit cannot be made; change nothing."""
        ...

    def invert(self, p: Program) -> Edit:
        """The edit that takes this one back."""
        ...

    def apply(self, p: Program) -> None:
        """Make the change."""
        ...

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        """Nodes whose operands or attributes change; asked for after `apply`."""
        ...

    def to_json(self, p: Program) -> dict[str, Any]:
        """Paths, ports and keys beside handles; asked for before `apply`."""
        ...


def _value(p: Program, value: Value) -> dict[str, Any]:
    return {"path": p.path(value), "port": value.port, "handle": _handle(value.node)}


def _handle(handle: NodeId | EdgeId) -> list[int]:
    return [handle.index, handle.generation]


def _check_value(p: Program, value: Value) -> None:
    """Raises: StaleHandle, ShapeError for a result that the node does not have."""
    count = len(p.specs(p.node(value)))
    if not 0 <= value.port < count:
        raise ShapeError(
            "the node has no such result", where=p.path(value), expected=f"0 to {count - 1}", got=value.port
        )


_KIND_ATTRS = {PARAM: {"key", "trainable", "axes"}, CONST: {"key", "axes"}, STATE: {"key", "axes"}}


def _check_attrs(op: str, attrs: Mapping[str, Any], where: str) -> None:
    if op not in KINDS:
        get(op).complete(attrs, where)
    elif unknown := attrs.keys() - _KIND_ATTRS.get(op, set()):
        raise UsageError(
            f"a {op} does not take these attributes",
            where=where,
            got=", ".join(unknown),
            expected=", ".join(sorted(_KIND_ATTRS.get(op, ()))) or "none",
        )


@dataclass(frozen=True, slots=True)
class AddNode:
    """Put a node in, unconnected; `node` is the handle it gets. Params, consts and states bring their variable.

    `after` hints at the place in topological order where the node's edges will put it.
    """

    node: NodeId
    op: str
    attrs: Mapping[str, Any]
    name: str
    specs: tuple[Spec, ...]
    seq: int
    variable: Variable | None = None
    after: NodeId | None = None

    def check(self, p: Program) -> None:
        p.check_name(self.name)
        _check_attrs(self.op, self.attrs, self.name)
        if self.op not in STORED:
            return
        key = self.attrs.get("key")
        if self.variable is None and key not in p.weights:
            raise UsageError("a new param, const or state needs a value", where=self.name, fix="e.param(name, array)")
        if self.variable is not None and (key in p.weights or not is_key(key)):
            raise NameTaken(
                "a weight has this key, or the key is no text",
                where=self.name,
                got=key,
                fix="key= another, or e.set_weight(key, value) to change it",
            )

    def invert(self, p: Program) -> Edit:
        return RemoveNode(self.node)

    def apply(self, p: Program) -> None:
        if self.variable is not None:
            p.weights.add(self.attrs["key"], self.variable)
        node = p.insert_node(self.op, self.attrs, self.name, self.specs, self.seq, self.node, self.after)
        assert node == self.node, "handles are issued in a fixed order"

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return (self.node,)

    def to_json(self, p: Program) -> dict[str, Any]:
        record = {
            "edit": "AddNode",
            "handle": _handle(self.node),
            "op": self.op,
            "attrs": encode_attrs(self.attrs),
            "path": self.name,
            "specs": [s.to_json() for s in self.specs],
            "seq": self.seq,
        }
        if self.variable is not None:
            record["payload"] = payload_json(p.weights, self.variable.data)
        return record


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """Take an unconnected node out."""

    node: NodeId

    def check(self, p: Program) -> None:
        path = p.path(p.node(self.node))
        if p.graph.in_degree(self.node) or p.graph.out_degree(self.node):
            ends = [p.path(p.edge_value(x)) for x in p.in_edges(self.node)]
            ends += [p.path(p.graph.target(x)) for x in p.out_edges(self.node)]
            raise UsageError(
                "a node is removed after its edges",
                where=path,
                got=f"edges with {', '.join(ends)}",
                fix="e.remove(node) removes both",
            )
        if any(v.node == self.node for v in p.outputs()):
            raise UsageError("the node is an output of the program", where=path, fix="e.set_outputs(...) first")

    def invert(self, p: Program) -> Edit:
        n, attrs = self.node, p.attrs(self.node)
        variable = p.weights[attrs["key"]] if p.op(n) in STORED and not self._shared(p) else None
        return AddNode(n, p.op(n), attrs, p.path(n), p.specs(n), p.seq(n), variable)

    def _shared(self, p: Program) -> bool:
        """True if another node reads the same variable."""
        return len(p.readers(p.key(self.node))) > 1

    def apply(self, p: Program) -> None:
        if p.op(self.node) in STORED and not self._shared(p):
            p.weights.drop(p.key(self.node))
        p.delete_node(self.node)

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return ()

    def to_json(self, p: Program) -> dict[str, Any]:
        return {"edit": "RemoveNode", "handle": _handle(self.node), "path": p.path(self.node)}


@dataclass(frozen=True, slots=True)
class AddEdge:
    """Connect a value to a port; `edge` is the handle it gets."""

    edge: EdgeId
    src: Value
    dst: NodeId
    port: int

    def check(self, p: Program) -> None:
        _check_value(p, self.src)
        dst = p.node(self.dst)
        if p.op(dst) in SOURCES:
            raise NotAJunction("a source reads nothing", where=p.path(dst), got=p.op(dst))
        if type(self.port) is not int or self.port < 0:
            raise UsageError("no such port", where=p.path(dst), expected=f"0 to {MAX_PORT}", got=repr(self.port))
        if self.port > MAX_PORT:
            raise CapacityError(
                "a port has 31 bits, and a junction gives none out twice",
                where=p.path(dst),
                expected=f"<= {MAX_PORT}",
                got=self.port,
                fix="e.insert its edges' sum into another junction",
            )
        if any(p.edge_port(e) == self.port for e in p.graph.in_edges(self.dst)):
            raise PortTaken(
                "a port takes exactly one edge, and has it",
                where=f"{p.path(self.dst)}, port {self.port}",
                fix="e.rewire(edge, new_src) replaces what it reads",
            )

    def invert(self, p: Program) -> Edit:
        return RemoveEdge(self.edge)

    def apply(self, p: Program) -> None:
        edge = p.insert_edge(self.src, self.dst, self.port, self.edge)
        assert edge == self.edge, "handles are issued in a fixed order"

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return (self.dst,)

    def to_json(self, p: Program) -> dict[str, Any]:
        return {
            "edit": "AddEdge",
            "handle": _handle(self.edge),
            "src": _value(p, self.src),
            "dst": p.path(self.dst),
            "port": self.port,
        }


@dataclass(frozen=True, slots=True)
class RemoveEdge:
    """Remove one edge; the others keep their port order."""

    edge: EdgeId

    def check(self, p: Program) -> None:
        p.graph.endpoints(self.edge)  # raises StaleHandle

    def invert(self, p: Program) -> Edit:
        return AddEdge(self.edge, p.edge_value(self.edge), p.graph.target(self.edge), p.edge_port(self.edge))

    def apply(self, p: Program) -> None:
        p.delete_edge(self.edge)

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return ()

    def to_json(self, p: Program) -> dict[str, Any]:
        dst = p.graph.target(self.edge)
        return {
            "edit": "RemoveEdge",
            "handle": _handle(self.edge),
            "src": _value(p, p.edge_value(self.edge)),
            "dst": p.path(dst),
            "port": p.edge_port(self.edge),
        }


@dataclass(frozen=True, slots=True)
class Rewire:
    """Let an edge start at another value; handle and port stay."""

    edge: EdgeId
    src: Value

    def check(self, p: Program) -> None:
        _check_value(p, self.src)
        p.graph.endpoints(self.edge)

    def invert(self, p: Program) -> Edit:
        return Rewire(self.edge, p.edge_value(self.edge))

    def apply(self, p: Program) -> None:
        p.move_edge(self.edge, self.src)

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return (p.graph.target(self.edge),)

    def to_json(self, p: Program) -> dict[str, Any]:
        return {
            "edit": "Rewire",
            "handle": _handle(self.edge),
            "dst": p.path(p.graph.target(self.edge)),
            "port": p.edge_port(self.edge),
            "src": _value(p, self.src),
        }


@dataclass(frozen=True, slots=True)
class SetAttr:
    """Change attributes of a node; `attrs` holds all of them."""

    node: NodeId
    attrs: Mapping[str, Any]

    def check(self, p: Program) -> None:
        op, path = p.op(p.node(self.node)), p.path(self.node)
        _check_attrs(op, self.attrs, path)
        encode_attrs(self.attrs)
        if op in STORED:
            key = self.attrs.get("key")
            if key != p.key(self.node) and (key in p.weights or not is_key(key)):
                raise NameTaken("a weight has this key, or the key is no text", where=path, got=key)

    def invert(self, p: Program) -> Edit:
        return SetAttr(self.node, p.attrs(self.node))

    def apply(self, p: Program) -> None:
        if p.op(self.node) in STORED and (old := p.key(self.node)) != (new := self.attrs["key"]):
            p.weights.rekey(old, new)
            for reader in p.readers(old):
                p.update_node(reader, attrs={**p.attrs(reader), "key": new})
        op = p.op(self.node)
        complete = dict(self.attrs) if op in KINDS else get(op).complete(self.attrs)  # a dtype may come as its name
        p.update_node(self.node, attrs=complete)

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return (self.node,)

    def to_json(self, p: Program) -> dict[str, Any]:
        return {
            "edit": "SetAttr",
            "handle": _handle(self.node),
            "path": p.path(self.node),
            "attrs": encode_attrs(self.attrs),
        }


@dataclass(frozen=True, slots=True)
class Rename:
    """Give a node another name; its checkpoint key stays."""

    node: NodeId
    name: str

    def check(self, p: Program) -> None:
        p.node(self.node)
        p.check_name(self.name)

    def invert(self, p: Program) -> Edit:
        return Rename(self.node, p.path(self.node))

    def apply(self, p: Program) -> None:
        p.update_node(self.node, name=self.name)

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return (self.node,)

    def to_json(self, p: Program) -> dict[str, Any]:
        return {"edit": "Rename", "handle": _handle(self.node), "path": p.path(self.node), "name": self.name}


@dataclass(frozen=True, slots=True)
class SetWeight:
    """Put another array under a key; all readers of a tied weight see it. The file it came from is never written.

    With `inplace` the values go into the memory that is there, unless a file or somebody else holds it.
    """

    key: str
    array: NDArray
    inplace: bool = False

    def check(self, p: Program) -> None:
        present = p.weights[self.key].spec  # raises UnknownNode
        if self.inplace and self.array.spec != present:
            raise ShapeError(
                "a value written in place keeps the spec", where=self.key, expected=present, got=self.array.spec
            )

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
        variable.shared = not self.inplace  # the journal holds the array, but for a copy
        for node in self.touches(p):
            p.update_node(node, specs=(self.array.spec,))

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return p.readers(self.key)

    def to_json(self, p: Program) -> dict[str, Any]:
        record = {"edit": "SetWeight", "key": self.key, "payload": payload_json(p.weights, self.array)}
        return {**record, "inplace": True} if self.inplace else record


@dataclass(frozen=True, slots=True)
class SetOutputs:
    """Declare the results of the program, by name and in order."""

    outputs: tuple[tuple[str, Value], ...]

    def check(self, p: Program) -> None:
        for _, value in self.outputs:
            _check_value(p, value)

    def invert(self, p: Program) -> Edit:
        return SetOutputs(tuple(zip(p.output_names(), p.outputs(), strict=True)))

    def apply(self, p: Program) -> None:
        p.set_outputs(dict(self.outputs))

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return ()

    def to_json(self, p: Program) -> dict[str, Any]:
        return {"edit": "SetOutputs", "outputs": [[name, _value(p, value)] for name, value in self.outputs]}


@dataclass(frozen=True, slots=True)
class Remark:
    """Say in the journal why something is done: `facts` about what `name` names. Nothing is changed."""

    name: str
    facts: Mapping[str, Any]

    def check(self, p: Program) -> None:
        encode_attrs(self.facts)

    def invert(self, p: Program) -> Edit:
        return self

    def apply(self, p: Program) -> None:
        pass

    def touches(self, p: Program) -> tuple[NodeId, ...]:
        return ()

    def to_json(self, p: Program) -> dict[str, Any]:
        return {"edit": "Remark", "name": self.name, "facts": encode_attrs(self.facts)}


_STRUCTURE = (AddNode, RemoveNode, AddEdge, RemoveEdge, Rewire, SetAttr, Rename, SetWeight, ResizeAxis, SetOutputs)
PRIMITIVES: dict[str, type] = {c.__name__: c for c in (*_STRUCTURE, Remark)}


def payloads(edit: Edit) -> tuple[NDArray, ...]:
    """The arrays that an edit puts in."""
    if isinstance(edit, AddNode):
        data = None if edit.variable is None else edit.variable.data
        return (data,) if isinstance(data, NDArray) else ()
    if isinstance(edit, ResizeAxis):
        return tuple(w.array for w in edit.weights)
    return (edit.array,) if isinstance(edit, SetWeight) else ()


def holding(edit: Edit, swaps: Mapping[int, NDArray]) -> Edit:
    """An edit with another array for those whose id is given; a variable, which keeps its identity, takes it itself."""
    if not any(id(array) in swaps for array in payloads(edit)):
        return edit
    if isinstance(edit, AddNode) and edit.variable is not None:
        edit.variable.data, edit.variable.shared = swaps[id(edit.variable.data)], True
        return edit
    if isinstance(edit, ResizeAxis):
        return replace(edit, weights=tuple(w._replace(array=swaps.get(id(w.array), w.array)) for w in edit.weights))
    assert isinstance(edit, SetWeight)
    return replace(edit, array=swaps[id(edit.array)])


def written(edit: Edit) -> tuple[str, ...]:
    """Keys of the weights that an edit gives other values."""
    if isinstance(edit, ResizeAxis):
        return tuple(w.key for w in edit.weights)
    return (edit.key,) if isinstance(edit, SetWeight) else ()


def replaced(edit: Edit, p: Program) -> tuple[str, ...]:
    """Keys of the weights whose values the inverse of an edit keeps; asked for before `apply`."""
    if isinstance(edit, RemoveNode):
        return (p.key(edit.node),) if p.op(edit.node) in STORED else ()
    return written(edit)


def made_by(edit: Edit) -> NodeId | EdgeId | None:
    """The handle that an edit issues, if it issues one."""
    return edit.node if isinstance(edit, AddNode) else edit.edge if isinstance(edit, AddEdge) else None
