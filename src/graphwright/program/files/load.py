"""Loading a saved program with its handles and journal. Weights are memory-mapped, and checked on first read.

Files are untrusted: the JSON has a checksum, the type and range of every value is checked, the program is validated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphwright.array import CPU, NDArray, Storage
from graphwright.array.dtype import BY_TAG
from graphwright.autograd import Parameter, Variable
from graphwright.errors import CycleError, GraphwrightError
from graphwright.files import StrPath, blake2b_128, open_regular, parse_json, read_whole
from graphwright.graph import ColumnSpec, chain
from graphwright.ops import OPS
from graphwright.program.builder import new_program
from graphwright.program.constraints import constraint_from_json
from graphwright.program.editing.journal import Entry, Journal
from graphwright.program.editing.undo_storage import Unpacker
from graphwright.program.errors import InvalidProgram, ProgramFileError
from graphwright.program.files import forms
from graphwright.program.files.save import FORMAT, MIDDLE, PREFIX, SCHEMA, SUFFIX, header_digest
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import KINDS, STORED
from graphwright.program.op_graph import EDGE_COLUMNS, NODE_COLUMNS, is_key, is_name
from graphwright.program.patterns import PATTERN_DTYPES, PatternVariable, adopt_all, pattern_from_arrays
from graphwright.program.primitives import list_key, order_back_edges, set_order, set_outputs, touch, update_node
from graphwright.program.program_graph import ProgramGraph
from graphwright.program.validate import validate
from graphwright.program.weights import Promise, add_weight, digest_of
from graphwright.safetensors import Checkpoint

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.patterns import Pattern
    from graphwright.program.program import Program
    from graphwright.safetensors import TensorInfo


class TensorSource(Protocol):
    """The stored arrays of a program: its weights by key, and those of undo data by digest."""

    def keys(self) -> Collection[str]:
        """Return the keys of all stored weights; a tied weight is stored under its first key."""
        ...

    def weight(self, key: str, row: dict[str, Any]) -> NDArray:
        """Return the value of a weight, given its facts. Raises: ProgramFileError."""
        ...

    def pattern(self, key: str, form: Mapping[str, Any]) -> Pattern:
        """Return a stored pattern from its row: the digests of its arrays, or its arrays. Raises: ProgramFileError."""
        ...

    def undo_array(self, digest: str, reference: str | None) -> NDArray:
        """Return an array that undo data refers to. Raises: LookupError."""
        ...


def mapped_array(
    p: Program, info: TensorInfo, read: Callable[[], memoryview], check: Callable[[], None], digest: str,
    reference: str | None, where: str,
) -> NDArray:  # fmt: skip
    """Return a tensor of a file as an array that is memory-mapped, and checked against its digest, on first read.

    Args:
        read, check: as in `Storage.mapped`.
        digest: `array_digest` of the tensor.
        reference: see `Promise`.
        where: file and tensor, for errors.
    """
    kind = BY_TAG.get(info.tag)
    if kind is None:
        known = ", ".join(BY_TAG)
        raise ProgramFileError("unknown dtype of a tensor", where=where, expected=known, got=info.tag)

    def touch() -> memoryview:
        content = read()
        if digest_of(array.spec, content) != digest:
            what = "the bytes of this tensor are damaged: their digest does not match"
            raise ProgramFileError(what, where=where, expected=digest, fix=forms.RESTORE)
        return content

    array = NDArray(Storage.mapped(touch, info.nbytes, CPU, check), kind, info.shape)
    p.weights.promises[array] = Promise(digest, reference)
    return array


class TensorFiles:
    """The tensor files of a saved program, read as memory-mapped arrays."""

    def __init__(self, folder: Path, headers: Mapping[str, Any], held: Sequence[str], p: Program) -> None:
        self.program = p
        self.weights = Checkpoint(folder, stem="weights")
        self.history = Checkpoint(folder, stem="history") if any(n.startswith("history") for n in headers) else None
        self.patterns = Checkpoint(folder, stem="patterns") if any(n.startswith("patterns") for n in headers) else None
        found = [c for c in (self.weights, self.history, self.patterns) if c is not None]
        files = {f.path.name: (f.path, f.payload_offset) for c in found for f in c.files}
        files |= {c.index.name: (c.index, c.index.stat().st_size) for c in found if c.index is not None}
        forms.table(files, headers, "files")
        for name, (path, length) in files.items():
            size, digest = forms.array(headers[name], 2, f"files.{name}")
            if path.stat().st_size != size or header_digest(path, length) != digest:
                raise ProgramFileError("the file changed after the program was saved", where=path, fix=forms.RESTORE)
        self._arrays: list[NDArray] = []
        self.mapped: dict[tuple[str, str | None], NDArray] = {}
        self._homes: dict[str, tuple[Checkpoint, str]] = {}  # digest -> where its bytes are
        for digest in held:
            if self.history is not None:
                self._homes[forms.text(digest, "history.arrays")] = (self.history, digest)

    def keys(self) -> Collection[str]:
        """Return the keys of the weight files."""
        return self.weights.keys()

    def weight(self, key: str, row: dict[str, Any]) -> NDArray:
        """Return the value of a weight, given its facts."""
        at = f"weights.{key}"
        digest, reference = forms.text(row.pop("blake2b"), at), forms.optional_text(row.pop("reference"), at)
        self._homes[digest] = (self.weights, key)
        return self._array(self.weights, key, digest, reference)

    def pattern(self, key: str, form: Mapping[str, Any]) -> Pattern:
        """Return a stored pattern, given the digests of its arrays by name; all its bytes are read and checked."""
        at = f"weights.{key}"
        if self.patterns is None:
            raise ProgramFileError("the file with the patterns is missing", where=at, fix=forms.RESTORE)
        arrays: dict[str, np.ndarray] = {}
        for name, digest in forms.table(form, None, at).items():
            info = self.patterns.info(f"{key}/{name}")
            content = bytearray(self.patterns.bytes(info.key))
            arrays[name] = np.frombuffer(content, PATTERN_DTYPES[info.tag]).reshape(info.shape)
            if blake2b_128(content) != forms.text(digest, at):
                what = "the bytes of a pattern are damaged: their digest does not match"
                raise ProgramFileError(what, where=f"{at}, {name}", expected=digest, fix=forms.RESTORE)
        return pattern_from_arrays(arrays, at)

    def undo_array(self, digest: str, reference: str | None) -> NDArray:
        """Return an array that undo data refers to: that of a weight with equal bytes, if there is one."""
        if (digest, reference) not in self.mapped:
            self._array(*self._homes[digest], digest, reference)
        return self.mapped[digest, reference]

    def _array(self, checkpoint: Checkpoint, key: str, digest: str, reference: str | None) -> NDArray:
        where = f"{checkpoint.path}: {key}"
        file = checkpoint.file_of(key)
        read = partial(file.bytes, key)
        array = mapped_array(self.program, file.info(key), read, file.check_mapped, digest, reference, where)
        self.mapped[digest, reference] = array
        self._arrays.append(array)
        return array

    def touch(self) -> None:
        """Check the bytes of all tensors now."""
        if any(array.storage.memory is None for array in self._arrays):
            raise AssertionError("reading a mapped tensor must return its bytes or raise an error")


MAX_BYTES = 256 << 20  # of program.json: about a million nodes
MAX_NESTING = 80
_BODY = {"format", "schema", "graphwright", "name", "version", "valid", "graph", "next_seq", "labels", "outputs",
         "weights", "journal", "stacks", "history", "files"}  # fmt: skip
_DAMAGE = (GraphwrightError, OSError, LookupError, TypeError, ValueError, OverflowError, AttributeError, AssertionError)
"""The errors that reading a damaged file may raise."""


def load(directory: StrPath, check: bool = True, verify: bool = False) -> Program:
    """Load a program that `save` wrote. Handles are valid or stale as they were when the program was saved.

    Args:
        directory: directory of the saved program.
        check: raise InvalidProgram if the program is invalid. With False it is loaded for repair, with `valid` False.
        verify: check the bytes of all tensors now; by default the bytes of a tensor are checked on first read.
    Raises: ProgramFileError; InvalidProgram with all findings, if `check`.
    """
    if not isinstance(directory, str | os.PathLike) or "\0" in os.fspath(directory):
        raise ProgramFileError("invalid path of a saved program", expected="path of a directory", got=repr(directory))
    folder = Path(directory)
    return read_whole(folder, lambda: _load_checked(folder, check, verify))


def _load_checked(folder: Path, check: bool, verify: bool) -> Program:
    if not (folder / "program.json").is_file():
        raise ProgramFileError("not a saved program: program.json is missing", where=folder,
                               fix="use graphwright.open for Hugging Face directories and saved models")  # fmt: skip
    try:
        return _load(folder, check, verify)
    except InvalidProgram:
        raise
    except ProgramFileError as error:
        if str(folder) not in str(error.where):
            error.where = folder if error.where is None else f"{folder}, {error.where}"
        raise
    except _DAMAGE as error:
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, GraphwrightError):
            what = error.what if error.where is None else f"{error.what} ({error.where})"
        what = f"the saved program is damaged: {what}"[:400]
        raise ProgramFileError(what, where=folder, fix=forms.RESTORE) from error


def _load(folder: Path, check: bool, verify: bool) -> Program:
    body = _read_body(folder)
    files = forms.table(body["files"], None, "files")
    held = [] if body["history"] is None else forms.array(body["history"].pop("arrays"), None, "history.arrays")
    sources: list[TensorFiles] = []

    def open_files(p: Program) -> TensorFiles:
        sources.append(TensorFiles(folder, files, held, p))
        return sources[0]

    p, _ = rebuild(body, open_files, _read_journal(folder, body), check)
    if verify:
        sources[0].touch()
    return p


def rebuild(
    body: Mapping[str, Any], source: Callable[[Program], TensorSource], journal: chain.Chain, check: bool = True
) -> tuple[Program, list[Variable]]:
    """Return the program of a body and the variables of its undo data, in the order of `Packer.objects`.

    Args:
        body: JSON values: `structure_body`, with `weights`, `stacks`, `history` and `constraints`; see `save`.
            `stacks` and `history` may be None.
        source: function from the program, which has its nodes, to its stored arrays.
        journal: its journal.
        check: raise InvalidProgram if the program is invalid.
    """
    p = new_program(forms.text(body["name"], "name"))
    _load_graph(p, body)
    tensors = source(p)
    _load_weights(p, forms.table(body["weights"], None, "weights"), tensors)
    adopt_all(p)
    _check_nodes(p)
    p.version, p.valid = forms.integer(body["version"], field="version"), forms.flag(body["valid"], "valid")
    variables = _load_journal(p, body, journal, tensors)
    for row in forms.array(body.get("constraints", []), None, "constraints"):
        forms.table(row, None, "constraints")
        p.constraints.add(constraint_from_json(row["constraint"]), bool(row["enforce"]))
    report = validate(p)
    if check:
        report.check(p.name)
    p.valid = report.ok
    return p, variables


def _read_body(folder: Path) -> dict[str, Any]:
    path = folder / "program.json"
    with open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ProgramFileError("program.json is too large", where=path, expected=f"at most {MAX_BYTES} bytes")
    start = len(PREFIX) + 64
    text = data[start + len(MIDDLE) : -len(SUFFIX)]
    checksum = data[len(PREFIX) : start]
    if data != PREFIX + checksum + MIDDLE + text + SUFFIX or sha256(text).hexdigest().encode() != checksum:
        raise ProgramFileError("program.json is damaged: its checksum does not match", where=path, fix=forms.RESTORE)
    body = parse_json(text, nesting=MAX_NESTING, where=path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ProgramFileError("not a saved program: unknown format", where=path, expected=f'"format": "{FORMAT}"')
    schema = forms.integer(body.get("schema"), 1, field="schema")
    if schema > SCHEMA:
        raise ProgramFileError("the program was saved by a newer version of graphwright", where=path,
                               expected=f"schema {SCHEMA}", got=f"schema {schema}",
                               fix="update graphwright: pip install -U graphwright")  # fmt: skip
    return forms.table(body, _BODY | (body.keys() & {"constraints"}))


# -- structure --------------------------------------------------------------------------------------
def _load_graph(p: Program, body: Mapping[str, Any]) -> None:
    data = forms.table(body["graph"], None, "graph")
    limits = (p.graph.block, p.graph.max_generation)
    if (data["block"], data["max_generation"]) != limits or type(data["block"]) is not int:
        raise forms.wrong(f"{limits}", (data["block"], data["max_generation"]), "graph: (block, max_generation)")
    for side, declared in (("nodes", NODE_COLUMNS), ("edges", EDGE_COLUMNS)):
        forms.table(forms.table(data[side], None, f"graph.{side}")["columns"], declared, f"graph.{side}.columns")
    strict = {
        "attrs": ColumnSpec(object, encode=encode_attrs, decode=forms.attrs),
        "specs": ColumnSpec(object, encode=lambda specs: [s.to_json() for s in specs], decode=forms.specs),
        "op": ColumnSpec(object, decode=lambda name: forms.text(name, "op")),
        "name": ColumnSpec(object, decode=lambda name: forms.text(name, "name")),
    }
    graph = ProgramGraph.from_dict(data, {**NODE_COLUMNS, **strict}, EDGE_COLUMNS)
    graph.describe = p.history.describe
    nodes = tuple(graph.nodes())
    keys = [
        (forms.integer(label, -(1 << 62), field="labels"), forms.integer(created, field="labels"))
        for label, created in (forms.array(x, 2, "labels") for x in forms.array(body["labels"], len(nodes), "labels"))
    ]
    set_order(p, graph, dict(zip(nodes, keys, strict=True)))
    saved = set(p.back_edges)
    with suppress(CycleError):
        order_back_edges(p)
    if p.back_edges != saved:
        got = f"{len(saved - p.back_edges)} edges that go backwards without closing a cycle"
        raise ProgramFileError("the saved topological order contradicts the edges", got=got)
    for node in nodes:
        touch(p, node)
        _add_later_attrs(p, node)
        if not is_name(p.path(node)):
            raise ProgramFileError("invalid node name", expected="a dotted path", got=repr(p.path(node))[:120])
        if p.path(node) in p._names:
            raise ProgramFileError("two nodes have the same name", got=repr(p.path(node))[:120])
        p._names[p.path(node)] = node
    p._seq = forms.integer(body["next_seq"], max((p.seq(n) + 1 for n in nodes), default=0), field="next_seq")
    for node in sorted(nodes, key=p.seq):
        p._kinds.setdefault(p.op(node), {})[node] = None
    rows = (forms.array(row, 4, "outputs") for row in forms.array(body["outputs"], None, "outputs"))
    outputs = [(forms.text(name, "outputs"), forms.value(value, "outputs")) for name, *value in rows]
    if len(dict(outputs)) != len(outputs):
        raise ProgramFileError("two outputs have the same name", got=", ".join(name for name, _ in outputs)[:120])
    set_outputs(p, dict(outputs))


def _add_later_attrs(p: Program, node: NodeId) -> None:
    """Add the attributes that the node's op did not have when the file was written, with their defaults."""
    row, attrs = OPS.get(p.op(node)), p.attrs(node)
    if row is not None and (absent := [name for name in row.added if name not in attrs]):
        update_node(p, node, attrs={**attrs, **{name: row.attrs[name] for name in absent}})


def _check_nodes(p: Program) -> None:
    """Check the invariants of nodes that even an invalid program satisfies. Raises: ProgramFileError."""
    for node in p.nodes():
        ports = [p.edge_port(e) for e in p.in_edges(node)]
        next_port = p.graph.node(node, "next_port")
        if len(set(ports)) != len(ports):
            raise ProgramFileError("two edges enter the same port", where=p.path(node), got=ports)
        if wrong := [port for port in ports if not 0 <= port < next_port]:
            expected = f"ports >= 0 and < {next_port}"
            raise ProgramFileError("edges enter invalid ports", where=p.path(node), expected=expected, got=wrong)
        for v in p.operands(node):
            forms.integer(v.port, 0, len(p.specs(v.node)) - 1, f"src_port of an edge into {p.path(node)}")
        if p.op(node) in STORED:
            p.weights.at_key(forms.text(p.attrs(node)["key"], "key"))  # raises UnknownNode
            list_key(p, node)
        if p.op(node) in KINDS and len(p.specs(node)) != (p.op(node) != "assign"):
            what = f"this {p.op(node)} node has a wrong number of results"
            expected = int(p.op(node) != "assign")
            raise ProgramFileError(what, where=p.path(node), expected=expected, got=len(p.specs(node)))
    for v in p.outputs():
        forms.integer(v.port, 0, len(p.specs(v.node)) - 1, "outputs")


# -- tensors ----------------------------------------------------------------------------------------
def _load_weights(p: Program, data: Mapping[str, Any], tensors: TensorSource) -> None:
    rows = {key: forms.table(row, None, f"weights.{key}") for key, row in data.items()}
    stored = {key: row for key, row in rows.items() if row.keys() not in ({"tied"}, {"pattern"})}
    forms.table(stored, tensors.keys(), "weights")
    made: dict[str, Variable] = {}
    for key, row in stored.items():
        at = f"weights.{key}"
        array = tensors.weight(key, row := dict(row))
        forms.table(row, ("trained", "trainable", "name", "spec"), at)
        if not is_key(key):
            raise ProgramFileError("invalid checkpoint key", got=repr(key)[:120])
        if array.spec != forms.spec(row["spec"], at):
            raise ProgramFileError("the shape or dtype in the tensor file differs from program.json", where=key,
                                   expected=row["spec"], got=array.spec)  # fmt: skip
        kind = Parameter if forms.flag(row["trained"], at) else Variable
        made[key] = kind(array, forms.flag(row["trainable"], at), forms.text(row["name"], at))
    for key, row in rows.items():
        if "pattern" in row and key not in stored:
            made[key] = PatternVariable(tensors.pattern(key, row["pattern"]), key)
    for key, row in data.items():
        add_weight(p.weights, key, made[key] if key in made else made[forms.text(row["tied"], f"weights.{key}")])


# -- journal and history ----------------------------------------------------------------------------
def _read_journal(folder: Path, body: Mapping[str, Any]) -> chain.Chain:
    facts = forms.table(body["journal"], ("entries", "base", "head"), "journal")
    if body["stacks"] is None:
        return chain.Chain(base=forms.text(facts["head"], "journal.head"))
    head, base = (forms.text(facts[name], f"journal.{name}") for name in ("head", "base"))
    found = chain.read(os.fspath(folder / "journal.jsonl"), head=head, base=base)
    if len(found) != forms.integer(facts["entries"], field="journal.entries"):
        raise forms.wrong(f"{len(found)}, as in journal.jsonl", facts["entries"], "journal.entries")
    return found


def _load_journal(p: Program, body: Mapping[str, Any], journal: chain.Chain, tensors: TensorSource) -> list[Variable]:
    p.journal = Journal(journal)
    for i, entry in enumerate(p.journal):
        forms.integer(entry.seq, i, i, "seq of an entry in journal.jsonl")
    if body["stacks"] is None:
        return []
    has_undo = body["history"] is not None
    variables = _load_history(p, forms.table(body["history"], None, "history"), tensors) if has_undo else []
    stacks = forms.table(body["stacks"], ("undoable", "redoable", "marks"), "stacks")
    h, last = p.history, len(p.journal) - 1
    h.undoable, h.redoable = (
        [p.journal[forms.integer(seq, 0, last, f"stacks.{s}")] for seq in forms.array(stacks[s], None, f"stacks.{s}")]
        for s in ("undoable", "redoable")
    )
    marks = forms.table(stacks["marks"], None, "stacks.marks")
    h.marks = {name: forms.integer(seq, -1, last, f"stacks.marks.{name}") for name, seq in marks.items()}
    return variables


def _load_history(p: Program, data: dict[str, Any], tensors: TensorSource) -> list[Variable]:
    forms.table(data, ("undos", "removed", "back", "forth", "variables"), "history")
    unpacker = Unpacker(p, data, tensors.undo_array)
    for seq, undo in unpacker.undos.items():
        entry = p.journal[forms.integer(seq, 0, len(p.journal) - 1, "history.undos")]
        p.journal.put(Entry(**{name: getattr(entry, name) for name in Entry.__slots__ if name != "undo"}, undo=undo))
    return unpacker.variables
