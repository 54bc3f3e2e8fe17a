"""Forks of a life, and merges of a fork into the life that it comes from, or the other way round.

A fork has `ancestor.json`: the digests of all tensors and the length of the journal when it was made. So a merge needs
no old commit: a value was changed if its digest differs from that of the ancestor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.errors import UsageError
from graphwright.files import JsonError, StrPath, UnreadableFile, atomic_directory, atomic_write, read_json
from graphwright.graph.chain import GENESIS
from graphwright.lifecycle.errors import MergeConflict, StoreDamaged
from graphwright.lifecycle.identity import Identity, now
from graphwright.lifecycle.log import ChainFile, LifeLog, Mark
from graphwright.lifecycle.replay import Added, StoredValues
from graphwright.lifecycle.store import ANCESTOR, COMMITS, JOURNAL, LOG, Store
from graphwright.lifecycle.structure import read_structure
from graphwright.program.editing.replay import replay
from graphwright.program.errors import ProgramFileError
from graphwright.program.files import forms
from graphwright.program.fork import abstract_fork
from graphwright.report import Report

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.lifecycle.life import Life
    from graphwright.program.editing.journal import Entry

_LIMIT = 256 << 20  # bytes of ancestor.json


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The commit at which a fork was made: its number, the length of the journal, and the digest of each tensor."""

    commit: int
    entries: int
    tensors: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Ancestor:
        """Read the file. Raises: StoreDamaged."""
        path = folder / ANCESTOR
        try:
            data = forms.table(read_json(path, _LIMIT), cls.__dataclass_fields__, ANCESTOR)
            for name in ("commit", "entries"):
                forms.integer(data[name], field=name)
            for name, digest in forms.table(data["tensors"], None, "tensors").items():
                forms.text(digest, name)
        except (JsonError, ProgramFileError, UnreadableFile) as error:
            raise StoreDamaged("the ancestor of a fork is damaged", where=path, got=error.what) from error
        return cls(**data)


def make_fork(life: Life, directory: StrPath, name: str, step: int | None) -> Identity:
    """Write a new life with the live tensors of another one, at a step or now; return its identity."""
    store = life.store
    commit, state = (store.last, store.fold) if step is None else store.at(step)
    origin = {"id": life.identity.id, "step": commit.step, "commit": commit.number}
    identity = Identity.fork(life.identity, name, origin)
    base = str(read_structure(store, commit)["base"])
    log = LifeLog(store.lines(LOG, GENESIS, commit))
    log.add("fork", commit.step, {"id": identity.id, "name": name, "parent": origin})
    journal = store.lines(JOURNAL, base, commit)
    with atomic_directory(directory) as folder:
        child = Store.create(folder)
        marks = [
            ChainFile(folder / file).append(Mark(0, 0, chain.head), chain.lines(), chain.head, durable=True)
            for file, chain in ((LOG, log.chain), (JOURNAL, journal))
        ]
        child.write_structure(commit.record.structure, store.structure(commit))
        record = replace(commit.record, number=1, time=now(), previous="", log=marks[0], journal=marks[1])
        child.copy_base(record, state, folder / COMMITS / f"{1:08d}.safetensors")
        digests = {name: home.digest for name, home in state.items()}
        ancestor = {"commit": commit.number, "entries": len(journal), "tensors": digests}
        atomic_write(folder / ANCESTOR, (json.dumps(ancestor, sort_keys=True) + "\n").encode())
        identity.write(folder)
    return identity


@dataclass(frozen=True, slots=True, repr=False)
class Merged(Report):
    """Result of a merge.

    Attributes:
        entries: `seq` of the journal entries of the other life that were replayed.
        taken: keys of the weights whose values come from the other life.
        kept: keys of the weights that only this life changed.
    """

    entries: tuple[int, ...]
    taken: tuple[str, ...]
    kept: tuple[str, ...]


def merge(life: Life, other: Life, prefer: str | None) -> Merged:
    """Merge another life into this one; see `Life.merge`."""
    ancestor = _common(life, other)
    p, theirs = life.program, other.program
    entries: Sequence[Entry] = theirs.journal[ancestor.entries :]
    trial, values = p, _values(entries, other)
    if entries:
        trial = abstract_fork(p)
        replay(entries, onto=trial, payloads=values)
    taken, kept, both = _sides(life, other, ancestor, trial.weights.keys())
    if both and prefer is None:
        raise MergeConflict(life.name, tuple(both))
    taken += both if prefer == "theirs" else []
    kept += both if prefer == "ours" else []
    wrong = [key for key in taken if trial.weights[key].spec != theirs.weights[key].spec]
    if wrong:  # values of one shape, an edit of the other: neither is the other's
        raise MergeConflict(life.name, tuple(wrong))
    if entries:
        replay(entries, onto=p, payloads=values)
    if taken:
        with p.edit(f"merge of {other.name}", author="lifecycle", tool="life.merge") as e:
            for key in taken:
                e.set_weight(key, theirs.weights[key].data)
    life._take_moments(other, taken)
    return Merged(tuple(entry.seq for entry in entries), tuple(taken), tuple(kept))


def _common(life: Life, other: Life) -> Ancestor:
    """Return the state at which two lives parted. Raises: UsageError if they have no common commit."""
    ours, theirs = life.identity, other.identity
    if theirs.parent is not None and theirs.parent["id"] == ours.id:
        return Ancestor.read(other.folder)
    if ours.parent is not None and ours.parent["id"] == theirs.id:
        return Ancestor.read(life.folder)
    if ours.parent is not None and theirs.parent is not None and ours.parent["id"] == theirs.parent["id"]:
        first, second = Ancestor.read(life.folder), Ancestor.read(other.folder)
        if (first.tensors, first.entries) == (second.tensors, second.entries):
            return first
    raise UsageError("the lives have no common commit", where=life.name, got=other.name,
                     fix="only a fork and its parent, or two forks of one state, can be merged")  # fmt: skip


def _values(entries: Sequence[Entry], other: Life) -> dict[str, NDArray]:
    """Return a value for each weight that entries add, by its digest in the journal.

    Where the value with which it was added is not stored, it is the present one, or zeros if the weight was removed
    again; the merge sets the present one anyway.
    """
    stored, weights = StoredValues(other.store), other.program.weights
    found: dict[str, NDArray] = {}
    for weight in Added.by(entries):
        now = weights.array(weight.key) if weights.has_key(weight.key) else None
        if weight.digest in stored:
            now = stored[weight.digest]
        elif now is None or now.spec != weight.spec:
            now = from_numpy(np.zeros(weight.spec.sizes, weight.spec.dtype.numpy), bits=weight.spec.dtype)
        found[weight.digest] = now
    return found


def _sides(life: Life, other: Life, ancestor: Ancestor, keys: Any) -> tuple[list[str], list[str], list[str]]:
    """Return the keys of weights that only the other life changed, that only this one changed, and that both did."""
    taken: list[str] = []
    kept: list[str] = []
    both: list[str] = []
    for key in keys:
        name = f"model.{key}"
        here, there = (store.fold[name].digest if name in store.fold else None for store in (life.store, other.store))
        before = ancestor.tensors.get(name)
        if there in (None, before) or here == there:
            if here != before and here != there:
                kept.append(key)
        elif here == before or here is None:
            taken.append(key)
        else:
            both.append(key)
    return taken, kept, both
