"""Serialization of the fields of primitive edits, for the journal and for the undo data of saved programs.

Undo data is applied to the same program, so it names nodes and edges by handle. The journal may be replayed on a
different program, so it names them by path and port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.graph import EdgeId, NodeId
from graphwright.patterns import PatternChange, PatternFileError
from graphwright.program.axes.units import runs
from graphwright.program.files import forms
from graphwright.program.files.forms import handle_form, value_form
from graphwright.program.hashing import encode_attrs
from graphwright.program.patterns import PatternVariable, pattern_form
from graphwright.program.weights import payload_json

if TYPE_CHECKING:
    from graphwright.autograd import Variable
    from graphwright.program.editing.edits import RecordReader
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program

Record = Mapping[str, Any]
"""A journal record, or a part of one."""


class Kind(NamedTuple):
    """The type of a field of an edit: the functions that serialize and deserialize its values.

    Attributes:
        pack, unpack: `pack(packer, value)` returns JSON for undo data; `unpack(unpacker, json)` returns the value.
        record: `record(program, field, value)` returns fields of the journal record; None writes the packed value.
        read: `read(reader, record, field)` returns the value for the program of the reader; None calls `unpack`.
    """

    pack: Callable[[Any, Any], Any]
    unpack: Callable[[Any, Any], Any]
    record: Callable[[Program, str, Any], Record] | None = None
    read: Callable[[RecordReader, Record, str], Any] | None = None


def plain(check: Callable[..., Any], *limits: int) -> Kind:
    """Return the Kind of a field whose values are JSON already. `check(value, *limits)` validates a loaded value."""
    return Kind(lambda _, x: x, lambda _, x: check(x, *limits))


def row(*kinds: Kind, make: Callable[..., Any] = lambda *values: values) -> Kind:
    """Return the Kind of a tuple with one element of each of these kinds. Loading returns `make(*elements)`."""
    return Kind(
        lambda packer, x: [kind.pack(packer, value) for kind, value in zip(kinds, x, strict=True)],
        lambda unpacker, x: make(
            *(kind.unpack(unpacker, value) for kind, value in zip(kinds, forms.array(x, len(kinds)), strict=True))
        ),
    )


def each(kind: Kind) -> Kind:
    """Return the Kind of a tuple of any length whose elements all have the same kind."""
    return Kind(
        lambda packer, x: [kind.pack(packer, value) for value in x],
        lambda unpacker, x: tuple(kind.unpack(unpacker, value) for value in forms.array(x)),
    )


def value_record(p: Program, value: Value) -> dict[str, Any]:
    """Return the journal form of a value: a dict with the path and handle of its node, and its port."""
    return {"path": p.path(value.node), "port": value.port, "handle": handle_form(value.node)}


def _edge_record(p: Program, edge: EdgeId) -> Record:
    src, dst = value_record(p, p.edge_value(edge)), p.path(p.graph.target(edge))
    return {"handle": handle_form(edge), "src": src, "dst": dst, "port": p.edge_port(edge)}


def _handle(kind: type[NodeId] | type[EdgeId], record: Any, read: Any = None) -> Kind:
    return Kind(lambda _, x: handle_form(x), lambda _, x: forms.handle(x, kind), record, read)


NEW_NODE = _handle(NodeId, lambda p, _, n: {"handle": handle_form(n)})
NEW_EDGE = _handle(EdgeId, lambda p, _, e: {"handle": handle_form(e)})
NODE = _handle(
    NodeId,
    lambda p, _, n: {"handle": handle_form(n), "path": p.path(n)},
    lambda r, record, _: r.program.node(record["path"]),
)
EDGE = _handle(EdgeId, lambda p, _, e: _edge_record(p, e), lambda r, record, _: r.edge(record))
TARGET = _handle(NodeId, lambda p, name, n: {name: p.path(n)})
HANDLES = (NEW_NODE, NEW_EDGE, NODE, EDGE, TARGET)
TEXT, INTEGER = plain(forms.text), plain(forms.integer)
PATH = TEXT._replace(record=lambda p, _, x: {"path": x})
FLAG = plain(forms.flag)._replace(record=lambda p, name, x: {name: x} if x else {})
INDICES = Kind(lambda _, x: runs(x), lambda _, x: forms.indices(x))
ATTRS = Kind(lambda _, x: encode_attrs(x), lambda _, x: forms.attrs(x))
SPECS = Kind(lambda _, x: [s.to_json() for s in x], lambda _, x: forms.specs(x))
VALUE = Kind(
    lambda _, x: value_form(x),
    lambda _, x: forms.value(x),
    lambda p, name, x: {name: value_record(p, x)},
    lambda r, record, name: r.value(record[name]),
)
OUTPUTS = each(row(TEXT, VALUE))._replace(
    record=lambda p, name, x: {name: [[output, value_record(p, v)] for output, v in x]},
    read=lambda r, record, name: tuple((output, r.value(v)) for output, v in record[name]),
)
ARRAY = Kind(
    lambda packer, x: packer.array(x),
    lambda unpacker, x: unpacker.array(x),
    lambda p, _, x: {"payload": payload_json(p.weights, x)},
)
CHANGE = Kind(
    lambda _, x: {"block": x.bits.shape[1], **x.to_json()},
    lambda _, x: _change(forms.table(x, None, "change")),
)


def _change(form: Record) -> PatternChange:
    try:
        return PatternChange.from_json(form, forms.integer(form.get("block"), 1, 1 << 16, "change.block"))
    except PatternFileError as error:
        raise forms.wrong("a change of a pattern", error.what, "change") from error


def _variable_record(p: Program, variable: Variable | None) -> Record:
    if variable is None:
        return {}
    if isinstance(variable, PatternVariable):
        return {"pattern": pattern_form(variable.pattern)}
    return {"payload": payload_json(p.weights, variable.data)}


VARIABLE = Kind(
    lambda packer, x: packer.variable(x),
    lambda unpacker, x: unpacker.variable(x),
    lambda p, _, x: _variable_record(p, x),
)
