"""What undoes the entries of a journal, as JSON and arrays: edits by handle, and records that revive what was removed.

Arrays are named by their digest; the JSON says nothing of where they lie. A variable is written once and referred to
by number, since undo and redo hand the same one back and forth.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, NDArray, Storage
from graphwright.autograd import Parameter, Variable
from graphwright.graph import EdgeId, NodeId, Relabelled, RemovedEdge, RemovedNode, RewiredEdge
from graphwright.program.axes.resize import Resized, Sliced
from graphwright.program.axes.units import runs
from graphwright.program.editing.edits import PRIMITIVES, holding, made_by, payloads
from graphwright.program.editing.journal import Undo
from graphwright.program.errors import NotUndoable
from graphwright.program.files import forms
from graphwright.program.hashing import encode_attrs
from graphwright.program.program import Program
from graphwright.program.weights import Promise, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphwright.program.editing.edits import Edit
    from graphwright.program.program import Program

Fetch = Callable[[str, str | None], NDArray]
"""Digest, and the reference that the array counted by -> the array."""


class Packer:
    """Writes undo down; `arrays` collects what it needs by digest."""

    def __init__(self, p: Program) -> None:
        self.arrays: dict[str, NDArray] = {}
        self.variables: list[dict[str, Any]] = []
        self._program = p
        self._live = {id(v): key for key, v in reversed(list(p.weights.items()))}
        self._numbers: dict[int, int] = {}
        self._kept: list[Variable] = []

    def pack(self) -> dict[str, Any]:
        """The whole history of the program: stacks, marks, undo of each entry, graveyard."""
        h, yard = self._program.history, self._program.graveyard
        entries = [e for e in (*h.undoable, *h.redoable) if e.undo is not None]
        undos = {str(e.seq): self.undo(e.undo) for e in entries if e.undo is not None}
        needed = {made_by(edit) for e in entries if e.undo for edit in (*e.undo.forward, *e.undo.inverse)}
        return {
            "undos": undos,
            "removed": [_removed(record) for handle, record in yard.removed.items() if handle in needed],
            "back": {str(int(e)): [_rewired(r) for r in records] for e, records in yard.back.items() if records},
            "forth": {str(int(e)): [_rewired(r) for r in records] for e, records in yard.forth.items() if records},
            "variables": self.variables,
        }

    def undo(self, undo: Undo) -> dict[str, Any]:
        """One entry's undo."""
        return {
            "forward": [self.edit(e) for e in undo.forward],
            "inverse": [self.edit(e) for e in undo.inverse],
            "specs": [
                [forms.handle_form(n), *([s.to_json() for s in side] for side in both)]
                for n, both in undo.specs.items()
            ],
            "valid": list(undo.valid),
            "labels": [[[forms.handle_form(n), label, created] for n, label, created in r.before] for r in undo.labels],
        }

    def edit(self, edit: Edit) -> list[Any]:
        """One primitive edit: its name and its fields in order."""
        name = type(edit).__name__
        return [name, *(WRITERS[kind](self, getattr(edit, field)) for field, kind in FIELDS[name].items())]

    def array(self, array: NDArray) -> list[Any]:
        """An array by its digest, and the reference that it counts by."""
        weights = self._program.weights
        digest, known = weights.digest_of(array), weights.promise_of(array)
        assert array.storage.memory is not None or not array.size  # a save over its own source must not lose it
        self.arrays.setdefault(digest, array)
        return [digest, None if known is None else known.reference]

    def variable(self, variable: Variable | None) -> int | None:
        """A variable by its number."""
        if variable is None:
            return None
        if id(variable) not in self._numbers:
            self._kept.append(variable)
            self._numbers[id(variable)] = len(self.variables)
            key = self._live.get(id(variable))
            self.variables.append(
                {"live": key}
                if key is not None
                else {
                    "trained": isinstance(variable, Parameter),
                    "trainable": variable.requires_grad,
                    "name": variable.name,
                    "array": self.array(variable.data),
                }
            )
        return self._numbers[id(variable)]


class Unpacker:
    """Reads what a `Packer` wrote. Raises: ProgramFileError."""

    def __init__(self, p: Program, data: Mapping[str, Any], fetch: Fetch) -> None:
        self._program, self._fetch = p, fetch
        self._variables = [self._variable(forms.table(v)) for v in forms.array(data["variables"])]
        self.undos = {forms.integer(int(seq), 0): self.undo(undo) for seq, undo in forms.table(data["undos"]).items()}
        for form in forms.array(data["removed"]):
            record = _read_removed(form)
            p.graveyard.removed[record.node if isinstance(record, RemovedNode) else record.edge] = record
        for name, stacks in (("back", p.graveyard.back), ("forth", p.graveyard.forth)):
            for packed, records in forms.table(data[name]).items():
                edge = EdgeId.from_int(int(packed))
                stacks[edge] = [_read_rewired(edge, r) for r in forms.array(records)]

    def undo(self, data: Any) -> Undo:
        """Inverse of `Packer.undo`."""
        data = forms.table(data, ("forward", "inverse", "specs", "valid", "labels"))
        specs = {}
        for row in forms.array(data["specs"]):
            node, old, new = forms.array(row, 3)
            specs[forms.handle(node, NodeId)] = (forms.specs(old), forms.specs(new))
        labels = [
            Relabelled(
                tuple(
                    (
                        forms.handle(n, NodeId),
                        None if label is None else forms.integer(label, -(1 << 62)),
                        forms.integer(created),
                    )
                    for n, label, created in (forms.array(x, 3) for x in forms.array(record))
                )
            )
            for record in forms.array(data["labels"])
        ]
        was, now = forms.array(data["valid"], 2)
        return Undo(
            tuple(self.edit(e) for e in forms.array(data["forward"])),
            tuple(self.edit(e) for e in forms.array(data["inverse"])),
            specs,
            (forms.flag(was), forms.flag(now)),
            labels,
        )

    def edit(self, data: Any) -> Edit:
        """Inverse of `Packer.edit`."""
        name = forms.text((forms.array(data) or [None])[0])
        fields = FIELDS.get(name)
        if fields is None or len(data) != len(fields) + 1:
            raise forms.wrong("a primitive edit", data)
        return PRIMITIVES[name](**{f: READERS[k](self, d) for (f, k), d in zip(fields.items(), data[1:], strict=True)})

    def array(self, data: Any) -> NDArray:
        """Inverse of `Packer.array`."""
        digest, reference = forms.array(data, 2)
        return self._fetch(forms.text(digest), forms.optional_text(reference))

    def variable(self, data: Any) -> Variable | None:
        """Inverse of `Packer.variable`."""
        return None if data is None else self._variables[forms.integer(data, 0, len(self._variables) - 1)]

    def _variable(self, data: dict[str, Any]) -> Variable:
        if data.keys() == {"live"}:
            return self._program.weights[forms.text(data["live"])]
        forms.table(data, ("trained", "trainable", "name", "array"))
        kind = Parameter if forms.flag(data["trained"]) else Variable
        return kind(self.array(data["array"]), forms.flag(data["trainable"]), forms.text(data["name"]))


FIELDS: dict[str, dict[str, str]] = {
    "AddNode": {
        "node": "node",
        "op": "text",
        "attrs": "attrs",
        "name": "text",
        "specs": "specs",
        "seq": "integer",
        "variable": "variable",
    },  # `after` is a hint for the first time only
    "RemoveNode": {"node": "node"},
    "AddEdge": {"edge": "edge", "src": "value", "dst": "node", "port": "integer"},
    "RemoveEdge": {"edge": "edge"},
    "Rewire": {"edge": "edge", "src": "value"},
    "SetAttr": {"node": "node", "attrs": "attrs"},
    "Rename": {"node": "node", "name": "text"},
    "SetWeight": {"key": "text", "array": "array", "inplace": "flag"},
    "ResizeAxis": {
        "axes": "axes",
        "weights": "sliced",
        "attrs": "node_attrs",
        "correct": "flag",
        "inputs": "node_specs",
    },
    "SetOutputs": {"outputs": "outputs"},
    "Remark": {"name": "text", "facts": "attrs"},
}
"""Fields of each primitive, with their kinds."""

WRITERS: dict[str, Callable[[Packer, Any], Any]] = {
    "node": lambda _, x: forms.handle_form(x),
    "edge": lambda _, x: forms.handle_form(x),
    "value": lambda _, x: forms.value_form(x),
    "text": lambda _, x: x,
    "integer": lambda _, x: x,
    "flag": lambda _, x: x,
    "attrs": lambda _, x: encode_attrs(x),
    "specs": lambda _, x: [s.to_json() for s in x],
    "array": Packer.array,
    "variable": Packer.variable,
    "outputs": lambda _, x: [[name, forms.value_form(v)] for name, v in x],
    "axes": lambda _, x: [[axis, of, runs(places)] for axis, of, places in x],
    "sliced": lambda packer, x: [
        [key, packer.array(array), [[dim, runs(old)] for dim, old in places]] for key, array, places in x
    ],
    "node_attrs": lambda _, x: [[forms.handle_form(node), encode_attrs(attrs)] for node, attrs in x],
    "node_specs": lambda _, x: [[forms.handle_form(node), [s.to_json() for s in specs]] for node, specs in x],
}
READERS: dict[str, Callable[[Unpacker, Any], Any]] = {
    "node": lambda _, x: forms.handle(x, NodeId),
    "edge": lambda _, x: forms.handle(x, EdgeId),
    "value": lambda _, x: forms.value(x),
    "text": lambda _, x: forms.text(x),
    "integer": lambda _, x: forms.integer(x),
    "flag": lambda _, x: forms.flag(x),
    "attrs": lambda _, x: forms.attrs(x),
    "specs": lambda _, x: forms.specs(x),
    "array": Unpacker.array,
    "variable": Unpacker.variable,
    "outputs": lambda _, x: tuple(
        (forms.text(n), forms.value(v)) for n, v in (forms.array(o, 2) for o in forms.array(x))
    ),
    "axes": lambda _, x: tuple(
        Resized(forms.text(axis), forms.integer(of), forms.places(places))
        for axis, of, places in (forms.array(row, 3) for row in forms.array(x))
    ),
    "sliced": lambda packer, x: tuple(_sliced(packer, forms.array(row, 3)) for row in forms.array(x)),
    "node_attrs": lambda _, x: tuple(
        (forms.handle(node, NodeId), forms.attrs(attrs))
        for node, attrs in (forms.array(row, 2) for row in forms.array(x))
    ),
    "node_specs": lambda _, x: tuple(
        (forms.handle(node, NodeId), forms.specs(specs))
        for node, specs in (forms.array(row, 2) for row in forms.array(x))
    ),
}


def _sliced(unpacker: Unpacker, row: list[Any]) -> Sliced:
    places = ((forms.integer(dim, 0, forms.MAX_RANK), forms.places(old))
              for dim, old in (forms.array(p, 2) for p in forms.array(row[2])))  # fmt: skip
    return Sliced(forms.text(row[0]), unpacker.array(row[1]), tuple(places))


def _removed(record: RemovedNode | RemovedEdge) -> list[Any]:
    c = record.columns
    if isinstance(record, RemovedNode):
        return [
            "node",
            forms.handle_form(record.node),
            c["op"],
            encode_attrs(c["attrs"]),
            c["name"],
            [s.to_json() for s in c["specs"]],
            c["seq"],
            c["next_port"],
        ]
    return [
        "edge",
        *map(forms.handle_form, record[:3]),
        c["src_port"],
        c["dst_port"],
        record.out_position,
        record.in_position,
    ]


def _read_removed(data: Any) -> RemovedNode | RemovedEdge:
    if forms.array(data)[:1] == ["node"]:
        _, node, op, attrs, name, specs, seq, next_port = forms.array(data, 8)
        columns = {
            "op": forms.text(op),
            "attrs": forms.attrs(attrs),
            "name": forms.text(name),
            "specs": forms.specs(specs),
            "seq": forms.integer(seq),
            "next_port": forms.integer(next_port, 0, 2**31 - 1),
        }
        return RemovedNode(forms.handle(node, NodeId), columns, ())
    _, edge, src, dst, src_port, dst_port, out_place, in_place = forms.array(data, 8)
    ports = {"src_port": forms.integer(src_port, 0, 2**31 - 1), "dst_port": forms.integer(dst_port, 0, 2**31 - 1)}
    return RemovedEdge(
        forms.handle(edge, EdgeId),
        forms.handle(src, NodeId),
        forms.handle(dst, NodeId),
        ports,
        forms.integer(out_place, -1),
        forms.integer(in_place, -1),
    )


def _rewired(r: RewiredEdge) -> list[Any]:
    return [*map(forms.handle_form, (r.source, r.target, r.new_source, r.new_target)), r.out_position, r.in_position]


def _read_rewired(edge: EdgeId, data: Any) -> RewiredEdge:
    *ends, out_place, in_place = forms.array(data, 6)
    source, target, new_source, new_target = (forms.handle(n, NodeId) for n in ends)
    return RewiredEdge(
        edge, source, target, forms.integer(out_place, -1), forms.integer(in_place, -1), new_source, new_target
    )


_log = logging.getLogger("graphwright.program")
ALIGNMENT = 64


class Spill:
    """Keeps what the undo of a program's entries holds in memory below a limit.

    Attributes:
        moved: bytes in the file.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._counted = self._since = 0  # bytes at the last count, and of entries that came since
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self.moved = 0

    def entered(self, undo: Undo | None) -> None:
        """An entry was made, undone or redone, so that undo alone may hold its arrays now: count, and make room."""
        if undo is not None:
            self._since += sum({id(a): a.nbytes for a in _arrays(undo) if not a.storage.readonly}.values())
        if self._counted + self._since > self._program.history_bytes:
            self._make_room()

    def _make_room(self) -> None:
        p = self._program
        live = {id(v.data.storage) for v in p.weights.values() if isinstance(v.data, NDArray)}
        held = {
            id(array): array
            for entry in p.journal
            if entry.undo is not None
            for array in _arrays(entry.undo)
            if array.size and not array.storage.readonly and id(array.storage) not in live
        }
        total = sum(array.nbytes for array in held.values())
        moved: dict[int, NDArray] = {}
        if total > p.history_bytes:
            try:
                for number, array in held.items():  # the oldest first: the last edits are undone most
                    if total <= p.history_bytes // 2:
                        break
                    moved[number] = self._move(array)
                    total -= array.nbytes
            except OSError as error:
                _log.warning("undo keeps more than history_bytes in memory: no temporary file takes it: %s", error)
        if moved:
            self._replace(moved)
        self._counted, self._since = total, 0

    def _move(self, array: NDArray) -> NDArray:
        """Write an array to the file; returns one that maps it at its first use."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="graphwright-undo-")  # noqa: SIM115  # open as long as this is
            weakref.finalize(self, self._file.close)
        start = -(-self.moved // ALIGNMENT) * ALIGNMENT
        content = np.ascontiguousarray(array.to_numpy(bits=True)).reshape(-1)
        digest = digest_of(array.spec, content)
        known = self._program.weights.promise_of(array)
        reference = None if known is None else known.reference
        self._file.seek(start)
        self._file.write(content.data)
        self._file.flush()
        self.moved = start + content.nbytes
        twin = NDArray(
            Storage.mapped(self._reader(array, start, digest), content.nbytes, CPU), array.dtype, array.shape
        )
        self._program.weights.promises[twin] = Promise(digest, reference)
        return twin

    def _reader(self, array: NDArray, start: int, digest: str) -> Callable[[], memoryview]:
        spec, size = array.spec, array.nbytes

        def read() -> memoryview:
            assert self._file is not None
            if self._map is None or len(self._map) < start + size:
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            content = memoryview(self._map)[start : start + size]
            if digest_of(spec, content) != digest:
                raise NotUndoable("the temporary file that holds what undo needs was damaged", where=self._program.name)
            return content

        return read

    def _replace(self, moved: dict[int, NDArray]) -> None:
        """Let the entries hold other arrays for those moved out."""
        h, journal = self._program.history, self._program.journal
        for entry in journal:
            if entry.undo is not None and any(id(array) in moved for array in _arrays(entry.undo)):
                forward, inverse = (
                    tuple(holding(edit, moved) for edit in side) for side in (entry.undo.forward, entry.undo.inverse)
                )
                journal.put(replace(entry, undo=replace(entry.undo, forward=forward, inverse=inverse)))
        h.undoable, h.redoable = ([journal[e.seq] for e in stack] for stack in (h.undoable, h.redoable))


def _arrays(undo: Undo) -> Iterator[NDArray]:
    return (array for edit in (*undo.inverse, *undo.forward) for array in payloads(edit))
