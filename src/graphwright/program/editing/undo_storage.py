"""Storage of the undo data of journal entries: as JSON and arrays in saved programs, and in a temporary file.

The JSON names arrays by digest, not by the file that stores them. A Variable is written once and referred to by index,
because undo and redo must restore the same object.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, NDArray, Storage
from graphwright.autograd import Parameter, Variable
from graphwright.graph import EdgeId, Relabelled, RemovedEdge, RemovedNode, RewiredEdge
from graphwright.program.editing import fields as f
from graphwright.program.editing.edits import PRIMITIVES
from graphwright.program.editing.fields import each, plain, row
from graphwright.program.editing.journal import Undo
from graphwright.program.errors import NotUndoable, ProgramFileError
from graphwright.program.files import forms
from graphwright.program.patterns import PatternVariable, pattern_form, read_pattern
from graphwright.program.weights import Promise, digest_of

if TYPE_CHECKING:
    from graphwright.program.editing.edits import Edit
    from graphwright.program.program import Program

Fetch = Callable[[str, str | None], NDArray]
"""(digest, reference that names the array in a state's hash) -> the array."""
_PORT, _POSITION = plain(forms.integer, 0, 2**31 - 1), plain(forms.integer, -1)
_LABEL = plain(lambda x: None if x is None else forms.integer(x, -(1 << 62)))
_SPECS = each(row(f.NODE, f.SPECS, f.SPECS))
_LABELS = each(each(row(f.NODE, _LABEL, f.INTEGER)))
_COLUMNS = {"op": f.TEXT, "attrs": f.ATTRS, "name": f.TEXT, "specs": f.SPECS, "seq": f.INTEGER, "next_port": _PORT}
_NODE = row(f.NODE, *_COLUMNS.values())
_EDGE = row(f.EDGE, f.NODE, f.NODE, _PORT, _PORT, _POSITION, _POSITION)
_REWIRES = each(row(f.NODE, f.NODE, f.NODE, f.NODE, _POSITION, _POSITION))


class Packer:
    """Converts undo data to JSON.

    Args:
        p: the program.
        digest: function from an array to its digest; by default it is computed, or known from the file of the array.

    Attributes:
        arrays: digest -> array, of all arrays that the JSON refers to.
        variables: JSON form of each variable that the JSON refers to.
        objects: these variables.
    """

    def __init__(self, p: Program, digest: Callable[[NDArray], str] | None = None) -> None:
        self.arrays: dict[str, NDArray] = {}
        self.variables: list[dict[str, Any]] = []
        self.objects: list[Variable] = []
        self._program, self._digest = p, digest or p.weights.digest_of
        self._live = {id(v): key for key, v in reversed(list(p.weights.items()))}
        self._numbers: dict[int, int] = {}

    def pack(self) -> dict[str, Any]:
        """Return the JSON form of the undo data of all entries, with the tombstones and the variables."""
        h, tombstones = self._program.history, self._program.tombstones
        undos = {e.seq: e.undo for e in (*h.undoable, *h.redoable) if e.undo is not None}
        needed = {edit.issued for undo in undos.values() for edit in undo.edits}
        return {
            "undos": {str(seq): self.undo(undo) for seq, undo in undos.items()},
            "removed": [self._removed(record) for handle, record in tombstones.removed.items() if handle in needed],
            "back": self._rewires(tombstones.back),
            "forth": self._rewires(tombstones.forth),
            "variables": self.variables,
        }

    def undo(self, undo: Undo) -> dict[str, Any]:
        """Return the JSON form of the undo data of one entry."""
        return {
            "forward": [self.edit(e) for e in undo.forward],
            "inverse": [self.edit(e) for e in undo.inverse],
            "specs": _SPECS.pack(self, [(n, *both) for n, both in undo.specs.items()]),
            "valid": list(undo.valid),
            "labels": _LABELS.pack(self, [record.before for record in undo.labels]),
        }

    def edit(self, edit: Edit) -> list[Any]:
        """Return the JSON form of a primitive edit: a list of its name and then its fields in order."""
        return [type(edit).__name__, *(kind.pack(self, getattr(edit, name)) for name, kind in edit.packed.items())]

    def array(self, array: NDArray) -> list[Any]:
        """Add an array to `arrays`; return [digest, text that stands for its bytes in program hashes, or None]."""
        digest, known = self._digest(array), self._program.weights.promise_of(array)
        assert array.storage.memory is not None or not array.size  # read it now: the save may replace its file
        self.arrays.setdefault(digest, array)
        return [digest, None if known is None else known.reference]

    def variable(self, v: Variable | None) -> int | None:
        """Return the index of a variable in `variables`, adding the variable if it is new; None for None."""
        if v is None:
            return None
        if id(v) not in self._numbers:
            self.objects.append(v)
            self._numbers[id(v)] = len(self.variables)
            facts = {"trained": isinstance(v, Parameter), "trainable": v.requires_grad, "name": v.name}
            if id(v) in self._live:
                form: dict[str, Any] = {"live": self._live[id(v)]}
            elif isinstance(v, PatternVariable):
                form = {"pattern": pattern_form(v.pattern), "name": v.name}
            else:
                form = {**facts, "array": self.array(v.data)}
            self.variables.append(form)
        return self._numbers[id(v)]

    def _removed(self, record: RemovedNode | RemovedEdge) -> list[Any]:
        c = record.columns
        if isinstance(record, RemovedNode):
            return ["node", *_NODE.pack(self, (record.node, *(c[name] for name in _COLUMNS)))]
        fields = (*record[:3], c["src_port"], c["dst_port"], record.out_position, record.in_position)
        return ["edge", *_EDGE.pack(self, fields)]

    def _rewires(self, stacks: Mapping[EdgeId, list[RewiredEdge]]) -> dict[str, Any]:
        fields = attrgetter("source", "target", "new_source", "new_target", "out_position", "in_position")
        return {str(int(edge)): _REWIRES.pack(self, map(fields, rows)) for edge, rows in stacks.items() if rows}


class Unpacker:
    """Restores undo data from the JSON of a `Packer`. Raises: ProgramFileError.

    Attributes:
        variables: the variables that the undo data refers to, as in `Packer.objects`.
        undos: seq -> undo data.
    """

    def __init__(self, p: Program, data: Mapping[str, Any], fetch: Fetch) -> None:
        self._program, self._fetch = p, fetch
        self.variables = [self._variable(v) for v in forms.array(data["variables"], None, "history.variables")]
        undos = forms.table(data["undos"], None, "history.undos")
        self.undos = {int(seq): self.undo(undo) for seq, undo in undos.items()}
        for form in forms.array(data["removed"], None, "history.removed"):
            record = self._removed(form)
            p.tombstones.removed[record[0]] = record
        for name, stacks in (("back", p.tombstones.back), ("forth", p.tombstones.forth)):
            for packed, records in forms.table(data[name], None, f"history.{name}").items():
                edge = EdgeId.from_int(int(packed))
                stacks[edge] = [
                    RewiredEdge(edge, source, target, out, into, new_source, new_target)
                    for source, target, new_source, new_target, out, into in _REWIRES.unpack(self, records)
                ]

    def undo(self, data: Any) -> Undo:
        """Return the undo data of one entry from its JSON form."""
        data = forms.table(data, ("forward", "inverse", "specs", "valid", "labels"), "history.undos")
        sides = (forms.array(data[side], None, f"history.undos: {side}") for side in ("forward", "inverse"))
        forward, inverse = (tuple(map(self.edit, side)) for side in sides)
        specs = {node: (before, after) for node, before, after in _SPECS.unpack(self, data["specs"])}
        was, now = row(f.FLAG, f.FLAG).unpack(self, data["valid"])
        labels = [Relabelled(before) for before in _LABELS.unpack(self, data["labels"])]
        return Undo(forward, inverse, specs, (was, now), labels)

    def edit(self, data: Any) -> Edit:
        """Return a primitive edit from its JSON form."""
        at = "history.undos: an edit"
        kind = PRIMITIVES.get(forms.text((forms.array(data, None, at) or [None])[0], at))
        if kind is None or len(data) != len(kind.packed) + 1:
            raise forms.wrong("a primitive edit: [name, *fields]", data, at)
        try:
            return kind(**{name: k.unpack(self, d) for (name, k), d in zip(kind.packed.items(), data[1:], strict=True)})
        except ProgramFileError as error:
            error.where = error.where or f"field history.undos: {data[0]}"
            raise

    def array(self, data: Any) -> NDArray:
        """Return the array that a JSON list [digest, reference] names."""
        digest, reference = forms.array(data, 2, "history: array")
        return self._fetch(forms.text(digest, "history: array"), forms.optional_text(reference, "history: array"))

    def variable(self, data: Any) -> Variable | None:
        """Return the variable with this index; None for null."""
        return None if data is None else self.variables[forms.integer(data, 0, len(self.variables) - 1, "variable")]

    def _variable(self, data: Any) -> Variable:
        at = "history.variables"
        if forms.table(data, None, at).keys() == {"live"}:
            return self._program.weights[forms.text(data["live"], at)]
        if data.keys() == {"pattern", "name"}:
            return PatternVariable(read_pattern(data["pattern"]), forms.text(data["name"], at))
        forms.table(data, ("trained", "trainable", "name", "array"), at)
        kind = Parameter if forms.flag(data["trained"], at) else Variable
        return kind(self.array(data["array"]), forms.flag(data["trainable"], at), forms.text(data["name"], at))

    def _removed(self, data: Any) -> RemovedNode | RemovedEdge:
        if forms.array(data, None, "history.removed")[:1] == ["node"]:
            node, *columns = _NODE.unpack(self, data[1:])
            return RemovedNode(node, dict(zip(_COLUMNS, columns, strict=True)), ())
        edge, src, dst, src_port, dst_port, *positions = _EDGE.unpack(self, data[1:])
        return RemovedEdge(edge, src, dst, {"src_port": src_port, "dst_port": dst_port}, *positions)


# -- the temporary file ------------------------------------------------------------------------------------------------
_log = logging.getLogger("graphwright.program")
ALIGNMENT = 64


class UndoSpill:
    """Limits the memory of arrays that only undo data holds, by moving the oldest arrays to a temporary file."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._counted = self._since = 0  # bytes at the last count, and of later entries
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self.moved = 0  # bytes in the file

    def entered(self, undo: Undo | None) -> None:
        """Count the bytes of new undo data; if the total exceeds `program.history_bytes`, move arrays to the file."""
        if undo is not None:
            self._since += sum({id(a): a.nbytes for a in undo.arrays() if not a.storage.readonly}.values())
        if self._counted + self._since > self._program.history_bytes:
            self._make_room()

    def _make_room(self) -> None:
        p = self._program
        live = {id(v.data.storage) for v in p.weights.values() if isinstance(v.data, NDArray)}
        held = {
            id(array): array
            for entry in p.journal
            if entry.undo is not None
            for array in entry.undo.arrays()
            if array.size and not array.storage.readonly and id(array.storage) not in live
        }
        total, moved = sum(array.nbytes for array in held.values()), dict[int, NDArray]()
        least = p.history_bytes // 2 if total > p.history_bytes else total
        try:
            for number, array in held.items():  # the oldest first: recent edits are undone most often
                if total <= least:
                    break
                moved[number] = self._move(array)
                total -= array.nbytes
        except OSError as error:
            _log.warning("undo exceeds history_bytes in memory: cannot write a temporary file: %s", error)
        if moved:
            self._replace(moved)
        self._counted, self._since = total, 0

    def _move(self, array: NDArray) -> NDArray:
        """Write an array to the file; return an equal array that memory-maps the file on first use."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="graphwright-undo-")  # noqa: SIM115  # open as long as this is
            weakref.finalize(self, self._file.close)
        start = -(-self.moved // ALIGNMENT) * ALIGNMENT
        content = np.ascontiguousarray(array.to_numpy(bits=True)).reshape(-1)
        digest, known = digest_of(array.spec, content), self._program.weights.promise_of(array)
        self._file.seek(start)
        self._file.write(content.data)
        self._file.flush()
        self.moved = start + content.nbytes
        storage = Storage.mapped(self._reader(array, start, digest), content.nbytes, CPU)
        twin = NDArray(storage, array.dtype, array.shape)
        self._program.weights.promises[twin] = Promise(digest, None if known is None else known.reference)
        return twin

    def _reader(self, array: NDArray, start: int, digest: str) -> Callable[[], memoryview]:
        spec, size = array.spec, array.nbytes

        def read() -> memoryview:
            assert self._file is not None
            if self._map is None or len(self._map) < start + size:
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            content = memoryview(self._map)[start : start + size]
            if digest_of(spec, content) != digest:
                raise NotUndoable("the temporary file with the undo data is damaged", where=self._program.name)
            return content

        return read

    def _replace(self, moved: dict[int, NDArray]) -> None:
        """Replace arrays in all undo data by their copies in the file: `moved` maps the `id()` of each to its copy."""
        h, journal = self._program.history, self._program.journal
        for entry in journal:
            undo = entry.undo
            if undo is not None and any(id(array) in moved for array in undo.arrays()):
                both = undo.forward, undo.inverse
                forward, inverse = (tuple(e.with_payloads(moved) for e in side) for side in both)
                journal.put(replace(entry, undo=replace(undo, forward=forward, inverse=inverse)))
        h.undoable, h.redoable = ([journal[e.seq] for e in stack] for stack in (h.undoable, h.redoable))
