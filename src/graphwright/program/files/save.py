"""Saving a program: a directory that appears whole or not at all, every byte of it under a checksum.

`program.json` is {"checksum": sha256 of the text behind, "program": {...}}; it holds structure, handles, order and the
digest of each tensor and of each tensor file's header. `journal.jsonl` is the hash chain, `history.safetensors` the
arrays that undo needs and the weights do not have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graphwright import __version__
from graphwright.autograd import Parameter
from graphwright.errors import UsageError
from graphwright.files import atomic_directory, check_free
from graphwright.graph import chain
from graphwright.program.editing.undo_storage import Packer
from graphwright.program.files.forms import handle_form
from graphwright.program.weights import digest_of
from graphwright.safetensors import Checkpoint, TensorData, write_checkpoint

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.autograd import Variable
    from graphwright.files import StrPath
    from graphwright.program.program import Program

FORMAT, SCHEMA = "graphwright-program", 1
PREFIX, MIDDLE, SUFFIX = b'{"checksum":"', b'","program":', b"}\n"
Kept = Literal["full", "edits", "none"]


def save(
    p: Program,
    directory: StrPath,
    history: Kept = "full",
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    companions: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a program; returns the directory.

    Args:
        p: no edit of it is open.
        directory: made here; its parent exists.
        history: `full` keeps the journal and what undo needs, `edits` the journal alone (it can be read and replayed,
            not undone; values of weights are not in it), `none` only its hash, from which the journal goes on.
        overwrite: replace what stands there, in one step.
        max_shard_size: bytes of weights in a file, or "5GB"; beyond it there are several, with an index.
        companions: further files by name, for layers above that keep facts of their own beside the program.
    Raises: DestinationExists, UnwritableTarget, UsageError, CheckpointChanged if a mapped weight's file changed; what
        stood there before still stands.
    """
    if history not in ("full", "edits", "none"):
        raise UsageError("no such history", where="history", expected="full, edits or none", got=history)
    if p.history.open is not None:
        raise UsageError("an edit is open", where=p.name, fix="leave the with-block first")
    check_free(directory, overwrite)
    with p.graph.locked(), atomic_directory(directory, overwrite) as folder:
        digests: dict[str, str] = {}
        stored, tied = _owners(p)
        items = [_tensor(key, p.weights.array(key), digests, key) for key in stored]
        write_checkpoint(folder, items, max_shard_size, stem="weights")
        body: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA,
            "graphwright": __version__,
            "name": p.name,
            "version": p.version,
            "valid": p.valid,
            "graph": p.graph.to_dict(),
            "next_seq": p._seq,
            "labels": [list(p.order_labels.key(n)) for n in p.nodes()],
            "outputs": [
                [name, *handle_form(v.node), v.port] for name, v in zip(p.output_names(), p.outputs(), strict=True)
            ],
            "weights": {
                key: {"tied": tied[key]} if key in tied else _weight(p, key, digests[key]) for key in p.weights
            },
            "journal": None,
            "stacks": None,
            "history": None,
        }
        if history == "full":
            packer = Packer(p)
            body["history"] = packer.pack()
            extra = {d: array for d, array in packer.arrays.items() if d not in set(digests.values())}
            if extra:
                write_checkpoint(folder, [_tensor(d, a, {}, d) for d, a in extra.items()], "1TB", stem="history")
            body["history"]["arrays"] = list(extra)
        base = p.journal.hash if history == "none" else p.journal.chain.base
        body["journal"] = {"entries": 0 if history == "none" else len(p.journal), "base": base, "head": p.journal.hash}
        if history != "none":
            chain.write(folder / "journal.jsonl", p.journal.chain)
            h = p.history
            body["stacks"] = {
                "undoable": [e.seq for e in h.undoable],
                "redoable": [e.seq for e in h.redoable],
                "marks": h.marks,
            }
        if len(p.constraints):
            body["constraints"] = p.constraints.to_json()
        body["files"] = _headers(folder)
        write_body(folder, body)
        for name, data in (companions or {}).items():
            (folder / name).write_bytes(data)
    return Path(directory)


def write_body(folder: Path, body: dict[str, Any]) -> None:
    """Write `program.json` under its checksum."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    (folder / "program.json").write_bytes(PREFIX + sha256(text).hexdigest().encode() + MIDDLE + text + SUFFIX)


def _owners(p: Program) -> tuple[list[str], dict[str, str]]:
    """Keys whose bytes are written, and keys that share the variable of one of them."""
    first: dict[int, str] = {}
    for key, variable in p.weights.items():
        first.setdefault(id(variable), key)
    return list(first.values()), {key: first[id(v)] for key, v in p.weights.items() if first[id(v)] != key}


def _tensor(key: str, array: NDArray, digests: dict[str, str], name: str) -> TensorData:
    """A tensor to be written; its digest is of the very bytes that go into the file."""

    def data() -> Any:
        host = np.ascontiguousarray(array.to_numpy(bits=True)).reshape(-1)
        digests[key] = digest_of(array.spec, host)
        return host

    return TensorData(name, array.dtype.safetensors, array.shape, data)


def _weight(p: Program, key: str, digest: str) -> dict[str, Any]:
    variable: Variable = p.weights[key]
    promise = p.weights.promise_of(p.weights.array(key))
    return {
        "trained": isinstance(variable, Parameter),
        "trainable": variable.requires_grad,
        "name": variable.name,
        "spec": variable.spec.to_json(),
        "blake2b": digest,
        "reference": None if promise is None else promise.reference,
    }


def _headers(folder: Path) -> dict[str, list[Any]]:
    """File -> [size, BLAKE2b-128 of what is not payload]: the header of a tensor file, the whole of an index."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith(".safetensors"):
            found[path.name] = [path.stat().st_size, header_digest(path, Checkpoint(path).files[0].payload_offset)]
        elif path.name.endswith(".json"):
            found[path.name] = [path.stat().st_size, header_digest(path, path.stat().st_size)]
    return found


def header_digest(path: str | os.PathLike[str], length: int) -> str:
    """BLAKE2b-128 of the first `length` bytes of a file."""
    state = blake2b(digest_size=16)
    with open(path, "rb") as file:
        for chunk in _pieces(file, length):
            state.update(chunk)
    return state.hexdigest()


def _pieces(file: Any, length: int) -> Iterable[bytes]:
    while length > 0 and (piece := file.read(min(length, 1 << 20))):
        length -= len(piece)
        yield piece
