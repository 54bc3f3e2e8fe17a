"""A commit file: a safetensors file of the tensors that changed, with the rest in its metadata.

`__metadata__["graphwright.life"]` is JSON with the fields of `Record`. Names of tensors begin with `model.` (weights by
key), `optimizer.`, `scaler.`, `compiled.`, `states.` (arrays of a loader or schedule) or `undo.` (by digest). A commit
with `base` has every tensor; all earlier files are then superseded. The file appears by one rename, the commit point:
the structure file, the log and the journal that it names are written before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphwright.errors import GraphwrightError
from graphwright.files import UnreadableFile, blake2b_128, open_regular, parse_json
from graphwright.graph import canonical_json
from graphwright.lifecycle.errors import CommitDamaged
from graphwright.lifecycle.log import Mark
from graphwright.program.files import forms
from graphwright.safetensors import CheckpointNotFound, TensorFile, TensorInfo

SCHEMA = 1
KEY = "graphwright.life"
PARTS = ("model", "optimizer", "scaler", "compiled", "states", "undo")
NAME = re.compile(r"(\d{8})\.safetensors")
_NESTING = 200
_HEX = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Record:
    """What a commit file says besides its tensors.

    Attributes:
        number: number of the file; numbers rise by one.
        step: age of the life in steps.
        time: UTC, ISO 8601.
        base: True if the file has every tensor, so that it does not build on earlier files.
        previous: digest of the header of the commit before; "" for the first.
        structure: digest of the structure file.
        log, journal: how far `life.jsonl` and `journal.jsonl` count.
        gone: names of tensors of earlier commits that no longer exist.
        tensors: name -> digest of each tensor in the file.
        references: name -> text that stands for the bytes of a tensor in hashes of the program; see `Promise`.
        states: states of loader, schedule and random generator, as trees; see `program.files.values`.
        training: what a training must share to be resumed, and the running figures of its segment; None without one.
    """

    number: int
    step: int
    time: str
    base: bool
    previous: str
    structure: str
    log: Mark
    journal: Mark
    gone: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file. Raises: UsageError if a state is not JSON."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            KEY: canonical_json({**values, "schema": SCHEMA, "log": self.log.form(), "journal": self.journal.form()})
        }

    @classmethod
    def read(cls, metadata: Mapping[str, str], where: Path) -> Record:
        """Read and check the metadata of a file. Raises: CommitDamaged."""
        try:
            data = forms.table(
                parse_json(metadata[KEY].encode(), nesting=_NESTING, where=where), {"schema", *cls.__slots__}
            )
            if forms.integer(data.pop("schema"), 1, field="schema") != SCHEMA:
                what, fix = "unknown schema of a commit", "update graphwright"
                raise CommitDamaged(what, where=where, expected=SCHEMA, fix=fix)
            for name in ("number", "step"):
                forms.integer(data[name], field=name)
            forms.flag(data["base"], "base")
            for name in ("time", "previous", "structure"):
                forms.text(data[name], name)
            data["log"], data["journal"] = _mark(data["log"], "log"), _mark(data["journal"], "journal")
            data["gone"] = tuple(forms.text(name, "gone") for name in forms.array(data["gone"], None, "gone"))
            for name in ("tensors", "references"):
                for key, value in forms.table(data[name], None, name).items():
                    forms.text(value, f"{name}.{key}")
            forms.table(data["states"], None, "states")
            if data["training"] is not None:
                forms.table(data["training"], ("contract", "segment"), "training")
            digests = (*data["tensors"].values(), data["structure"], *filter(None, [data["previous"]]))
            if wrong := [text for text in digests if not _HEX.fullmatch(text)]:
                raise forms.wrong("a digest of 32 hex digits", wrong[0])
            if wrong := [n for n in data["tensors"] if n.partition(".")[0] not in PARTS or "." not in n]:
                raise forms.wrong(f"names that begin with {', '.join(PARTS)}", wrong[0])
        except CommitDamaged:
            raise
        except (GraphwrightError, KeyError, TypeError, AttributeError) as error:
            got = error.what if isinstance(error, GraphwrightError) else repr(error)
            raise CommitDamaged("the commit file is no commit", where=where, got=got[:200]) from error
        return cls(**data)


def _mark(form: Any, name: str) -> Mark:
    lines, length, head = forms.array(form, 3, name)
    return Mark(forms.integer(lines, field=name), forms.integer(length, field=name), forms.text(head, name))


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit file that was read: its record, tensors, size in bytes and the digest of its header."""

    path: Path
    record: Record
    infos: Mapping[str, TensorInfo]
    nbytes: int
    digest: str

    @property
    def number(self) -> int:
        """Number of the commit."""
        return self.record.number

    @property
    def step(self) -> int:
        """Age of the life at the commit, in steps."""
        return self.record.step


def read_commit(path: Path) -> Commit:
    """Read the header of a commit file. Raises: CommitDamaged; CheckpointNotFound if there is no file."""
    try:
        with TensorFile(path) as file:
            with open_regular(path) as raw:
                digest = blake2b_128(raw.read(file.payload_offset))
            infos, metadata, nbytes = file.infos, file.metadata, file.identity.size
    except CheckpointNotFound:
        raise
    except (GraphwrightError, OSError, UnreadableFile) as error:
        raise CommitDamaged("the commit file is damaged", where=path, got=getattr(error, "what", error)) from error
    record = Record.read(metadata, path)
    found = {info.key: info for info in infos}
    if found.keys() != record.tensors.keys() or not record.references.keys() <= found.keys():
        raise CommitDamaged("the commit file has other tensors than its metadata says", where=path)
    match = NAME.fullmatch(path.name)
    if match is None or int(match[1]) != record.number:
        raise CommitDamaged("the commit file has another number than its name", where=path, got=record.number)
    return Commit(path, record, found, nbytes, digest)
