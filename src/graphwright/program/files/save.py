"""Saving a program: a directory written atomically, with checksums over every byte.

`program.json` is {"checksum": sha256 of the JSON of the program, "program": {...}}. It has structure, handles, order,
and digests of all tensors and tensor file headers. `journal.jsonl` is the journal, a hash chain.
`history.safetensors` has the arrays that only undo needs, `patterns.safetensors` those of attention patterns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graphwright import __version__
from graphwright.array import NDArray
from graphwright.autograd import Parameter, Variable
from graphwright.errors import UsageError
from graphwright.files import StrPath, atomic_directory, blake2b_128, check_free, flat_bytes, open_regular
from graphwright.graph import chain
from graphwright.program.editing.undo_storage import Packer
from graphwright.program.exclusive import exclusive
from graphwright.program.files.forms import value_form
from graphwright.program.patterns import PATTERN_DTYPES
from graphwright.program.weights import digest_of
from graphwright.safetensors import Checkpoint, TensorData, write_checkpoint

if TYPE_CHECKING:
    from graphwright.patterns import Pattern
    from graphwright.program.program import Program

FORMAT, SCHEMA = "graphwright-program", 1
PREFIX, MIDDLE, SUFFIX = b'{"checksum":"', b'","program":', b"}\n"
_TAGS = {np.dtype(name): tag for tag, name in PATTERN_DTYPES.items()}
HistoryMode = Literal["full", "edits", "none"]


def save(
    p: Program,
    directory: StrPath,
    *,
    history: HistoryMode = "full",
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    companions: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a program to a directory; return the directory.

    Args:
        directory: the directory to create; its parent must exist.
        history: "full" saves the journal and the data to undo it. "edits" saves the journal without that data and
            without weight values, to read and replay. "none" saves the hash from which a new journal continues.
        overwrite: replace an existing directory atomically.
        max_shard_size: maximum size of a weight file, in bytes or as text like "5GB"; several files get an index.
        companions: dict from file name to bytes of further files to write to the directory.
    Raises: DestinationExists, UnwritableTarget; UsageError while an edit is open; CheckpointChanged if the file of a
        mapped weight changed. An existing directory is then unchanged.
    """
    if history not in ("full", "edits", "none"):
        raise UsageError("unknown history mode", where="history", expected="full, edits or none", got=history)
    check_free(directory, overwrite)
    with exclusive(p), atomic_directory(directory, overwrite) as folder:
        if p.history.open is not None:
            raise UsageError("cannot save while an edit is open", where=p.name, fix="leave the with-block first")
        digests: dict[str, str] = {}
        tied = tied_keys(p)
        held = p.patterns
        items = [
            _tensor(key, p.weights.array(key), digests) for key in p.weights if key not in tied and key not in held
        ]
        write_checkpoint(folder, items, max_shard_size, stem="weights")
        rows = {key: {"tied": tied[key]} for key in tied}
        rows |= {key: {"pattern": digests_of} for key, digests_of in _write_patterns(folder, held).items()}
        body: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA,
            "graphwright": __version__,
            **structure_body(p),
            "weights": {key: rows[key] if key in rows else _weight(p, key, digests[key]) for key in p.weights},
            "journal": None,
            "stacks": None,
            "history": None,
        }
        if history == "full":
            packer = Packer(p)
            body["history"] = packer.pack()
            extra = {d: array for d, array in packer.arrays.items() if d not in set(digests.values())}
            if extra:
                write_checkpoint(folder, [_tensor(d, a, {}) for d, a in extra.items()], "1TB", stem="history")
            body["history"]["arrays"] = list(extra)
        base = p.journal.hash if history == "none" else p.journal.chain.base
        body["journal"] = {"entries": 0 if history == "none" else len(p.journal), "base": base, "head": p.journal.hash}
        if history != "none":
            chain.write(folder / "journal.jsonl", p.journal.chain)
            body["stacks"] = stacks_body(p)
        if len(p.constraints):
            body["constraints"] = p.constraints.to_json()
        body["files"] = _headers(folder)
        write_body(folder, body)
        for name, data in (companions or {}).items():
            (folder / name).write_bytes(data)
    return Path(directory)


def structure_body(p: Program) -> dict[str, Any]:
    """Return the graph of a program with its handles, order and outputs, as JSON values."""
    return {
        "name": p.name,
        "version": p.version,
        "valid": p.valid,
        "graph": p.graph.to_dict(),
        "next_seq": p._seq,
        "labels": [list(p.order_labels.key(n)) for n in p.nodes()],
        "outputs": [[name, *value_form(v)] for name, v in zip(p.output_names(), p.outputs(), strict=True)],
    }


def stacks_body(p: Program) -> dict[str, Any]:
    """Return the undo and redo stacks and the marks, by `seq` of entries, as JSON values."""
    h = p.history
    undoable, redoable = ([e.seq for e in stack] for stack in (h.undoable, h.redoable))
    return {"undoable": undoable, "redoable": redoable, "marks": dict(h.marks)}


def tied_keys(p: Program) -> dict[str, str]:
    """Return a dict from each further key of a tied weight to its first key, under which its bytes are written."""
    first: dict[int, str] = {}
    for key, variable in p.weights.items():
        first.setdefault(id(variable), key)
    return {key: first[id(v)] for key, v in p.weights.items() if first[id(v)] != key}


def weight_row(variable: Variable) -> dict[str, Any]:
    """Return the facts of a weight without its value, as JSON values."""
    return {
        "trained": isinstance(variable, Parameter),
        "trainable": variable.requires_grad,
        "name": variable.name,
        "spec": variable.spec.to_json(),
    }


def _write_patterns(folder: Path, held: Mapping[str, Pattern]) -> dict[str, dict[str, str]]:
    """Write the arrays of patterns by key; return per key a dict from the name of an array to its digest."""
    items, digests = list[TensorData](), dict[str, dict[str, str]]()
    for key, pattern in held.items():
        arrays = {name: np.ascontiguousarray(array) for name, array in pattern.to_arrays().items()}
        items += [TensorData(f"{key}/{n}", _TAGS[a.dtype], a.shape, lambda a=a: a) for n, a in arrays.items()]
        digests[key] = {name: blake2b_128(flat_bytes(array)) for name, array in arrays.items()}
    if items:
        write_checkpoint(folder, items, "1TB", stem="patterns")
    return digests


def write_body(folder: Path, body: dict[str, Any]) -> None:
    """Write `body` as the file `program.json`, with its checksum."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    (folder / "program.json").write_bytes(PREFIX + sha256(text).hexdigest().encode() + MIDDLE + text + SUFFIX)


def _tensor(key: str, array: NDArray, digests: dict[str, str]) -> TensorData:
    """Return a tensor to write. Writing it sets `digests[key]` to the digest of its bytes."""

    def data() -> Any:
        host = np.ascontiguousarray(array.to_numpy(bits=True)).reshape(-1)
        digests[key] = digest_of(array.spec, host)
        return host

    return TensorData(key, array.dtype.safetensors, array.shape, data)


def _weight(p: Program, key: str, digest: str) -> dict[str, Any]:
    promise = p.weights.promise_of(p.weights.array(key))
    reference = None if promise is None else promise.reference
    return {**weight_row(p.weights[key]), "blake2b": digest, "reference": reference}


def _headers(folder: Path) -> dict[str, list[Any]]:
    """Return a dict from tensor or index file to [size, BLAKE2b-128 of its header (of the whole file for an index)]."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            size = path.stat().st_size
            header = size if path.suffix == ".json" else Checkpoint(path).files[0].payload_offset
            found[path.name] = [size, header_digest(path, header)]
    return found


def header_digest(path: str | os.PathLike[str], length: int) -> str:
    """Return the BLAKE2b-128 digest of the first `length` bytes of a file."""
    with open_regular(path) as file:
        return blake2b_128(file.read(length))
