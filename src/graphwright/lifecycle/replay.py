"""Replay of a life's edits on another program, at the steps at which they were made.

The journal names values by digest. The value with which an edit added a parameter is gone once it was trained, so that
commits have it among the undo data, as long as the edit can be undone.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import BY_TAG, NDArray, Spec, from_numpy
from graphwright.lifecycle.errors import CommitDamaged
from graphwright.lifecycle.store import Commit, Store
from graphwright.program.editing.replay import replay
from graphwright.program.errors import ReplayConflict
from graphwright.program.weights import array_digest
from graphwright.safetensors import TensorFile

if TYPE_CHECKING:
    from graphwright.lifecycle.life import Life
    from graphwright.program import Program
    from graphwright.program.editing.journal import Entry


class StoredValues(Mapping[str, NDArray]):
    """All tensors of a store by digest, also those of earlier commits and of pins; read on access."""

    def __init__(self, store: Store) -> None:
        commits = (*store.pins(), *store.commits)
        self._homes = {digest: (c, name) for c in commits for name, digest in c.record.tensors.items()}

    def __getitem__(self, digest: str) -> NDArray:
        commit, name = self._homes[digest]
        array = _read(commit, name)
        if array_digest(array) != digest:
            raise CommitDamaged("the bytes of a tensor do not match their digest", where=f"{commit.path}: {name}")
        return array

    def __contains__(self, digest: object) -> bool:
        return digest in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def _read(commit: Commit, name: str) -> NDArray:
    info = commit.infos[name]
    kind = BY_TAG[info.tag]
    with TensorFile(commit.path) as file:
        host = np.frombuffer(bytearray(file.bytes(name)), kind.numpy)
    return from_numpy(host.reshape(info.shape), bits=kind)


@dataclass(frozen=True, slots=True)
class Added:
    """A weight that a journal entry adds: its key and spec, the digest of its value, and its present value, if known.

    Weights whose values the journal itself has are not among them.
    """

    key: str
    spec: Spec
    digest: str
    now: NDArray | None

    @classmethod
    def by(cls, entries: Iterable[Entry]) -> Iterator[Added]:
        """Yield the weights that entries add."""
        for entry in entries:
            for i, record in enumerate(entry.edits):
                named = record.get("payload", {}) if record["edit"] == "AddNode" else {}
                if "blake2b" in named and "values" not in named:
                    now = () if entry.undo is None else entry.undo.forward[i].payloads
                    spec = Spec.from_json(named["spec"])
                    yield cls(record["attrs"]["key"], spec, named["blake2b"], now[0] if now else None)


def replay_life(life: Life, onto: Program, step: int | None, values: Mapping[str, NDArray]) -> tuple[Entry, ...]:
    """Apply the edits of a life to another program; see `Life.replay`."""
    journal, before = life.program.journal, len(onto.journal)
    stored = ChainMap(dict(values), StoredValues(life.store))  # pyright: ignore[reportArgumentType]  # only read
    if step is None:
        replay(journal[life.log[0].facts["entries"] :], onto=onto, payloads=stored)
        return tuple(onto.journal[before:])
    numbers = [event.facts["entry"] for event in life.log if event.step == step and "entry" in event.facts]
    for entry in (journal[i] for i in dict.fromkeys(numbers)):
        reverted = entry.undoes if entry.undoes is not None else entry.redoes
        if reverted is None:
            replay([entry], onto=onto, payloads=stored)
            continue
        stack = onto.history.undoable if entry.undoes is not None else onto.history.redoable
        wanted = journal[reverted].why
        if not stack or stack[-1].why != wanted:
            what = "the entry reverts an edit that is not the latest one of this program"
            got = repr(stack[-1].why) if stack else "no edit"
            raise ReplayConflict(what, where=f"entry {entry.seq} ({entry.why})", expected=repr(wanted), got=got)
        (onto.undo if entry.undoes is not None else onto.redo)()
    return tuple(onto.journal[before:])
