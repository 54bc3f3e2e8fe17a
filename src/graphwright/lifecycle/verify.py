"""Checks of a whole life: every byte against its digest, every line against its hash, log and journal each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import BY_TAG, Spec
from graphwright.graph.chain import GENESIS
from graphwright.lifecycle.errors import CommitDamaged, LogCorrupt
from graphwright.lifecycle.log import LifeLog
from graphwright.lifecycle.store import JOURNAL, LOG, Commit
from graphwright.lifecycle.structure import read_structure
from graphwright.program.editing.journal import Journal
from graphwright.program.weights import digest_of
from graphwright.report import Report
from graphwright.safetensors import TensorFile

if TYPE_CHECKING:
    from graphwright.lifecycle.life import Life


@dataclass(frozen=True, slots=True, repr=False)
class Verified(Report):
    """Result of `life.verify()`: numbers of commits (pinned ones included), tensors, bytes, events and entries."""

    commits: int
    tensors: int
    bytes: int
    events: int
    entries: int


def verify(life: Life) -> Verified:
    """Check everything that is stored; see `Life.verify`."""
    store = life.store
    commits = [*store.commits, *store.pins()]
    for commit in commits:
        read_structure(store, commit)
    tensors = [_check(commit) for commit in commits]
    log = LifeLog(store.lines(LOG, GENESIS))
    base = str(read_structure(store, store.last)["base"])
    journal = Journal(store.lines(JOURNAL, base))
    _agree(log, journal)
    return Verified(len(commits), sum(tensors), sum(c.nbytes for c in commits), len(log), len(journal))


def _check(commit: Commit) -> int:
    """Compare the bytes of all tensors of a commit with their digests; return the number of tensors."""
    with TensorFile(commit.path) as file:
        for name, info in commit.infos.items():
            spec = Spec(tuple(info.shape), BY_TAG[info.tag]) if info.tag in BY_TAG else None
            if spec is None or digest_of(spec, file.bytes(name)) != commit.record.tensors[name]:
                raise CommitDamaged("the bytes of a tensor do not match their digest", where=f"{commit.path}: {name}")
    return len(commit.infos)


def _agree(log: LifeLog, journal: Journal) -> None:
    """Check that log and journal name the same edits."""
    first = next((event.facts.get("entries", 0) for event in log.of("birth")), 0)
    named: set[int] = set()
    for event in log:
        seq, digest = event.facts.get("entry"), event.facts.get("hash")
        if seq is None:
            continue
        known = type(seq) is int and 0 <= seq < len(journal)
        if not known or journal[seq].hash != digest:
            got = f"entry {seq} with hash {str(digest)[:12]}"
            raise LogCorrupt(
                "the event names a journal entry that is not there", where=LOG, line=event.seq + 1, got=got
            )
        named.add(seq)
    if missing := [entry.seq for entry in journal[first:] if entry.seq not in named]:
        raise LogCorrupt("the log does not name an entry of the journal", where=JOURNAL, line=missing[0] + 1)


class Divergence(NamedTuple):
    """The first line, counted from 1, at which two logs differ, and its event in each; None if a log has ended."""

    line: int
    here: Any
    there: Any


def divergence(here: LifeLog, there: LifeLog) -> Divergence | None:
    """Return where two logs begin to differ; None if they are equal."""
    for i in range(max(len(here), len(there))):
        pair = [log[i] if i < len(log) else None for log in (here, there)]
        if i >= min(len(here), len(there)) or here.chain.links[i].hash != there.chain.links[i].hash:
            return Divergence(i + 1, *pair)
    return None
