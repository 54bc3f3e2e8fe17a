"""The store of a life: commit files, structure files, and which file has the newest bytes of each tensor.

A directory has `identity.json`, `life.jsonl`, `journal.jsonl`, `structure/<digest>.json`, `lock`, and the commit files
`commits/<number>.safetensors` and `pins/<number>.safetensors`. The state at a commit is the fold over the headers from
its base on: the newest file that has a tensor has its value, unless a later one lists it as gone. The store owns all
files but `identity.json`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphwright.files import (
    Buffer,
    append_at,
    atomic_write,
    blake2b_128,
    flat_bytes,
    open_regular,
    read_file,
    sweep_files,
)
from graphwright.graph import Chain
from graphwright.lifecycle.commit import NAME, Commit, Record, read_commit
from graphwright.lifecycle.errors import CommitDamaged, NoLife, StepGone, StoreGap
from graphwright.lifecycle.identity import now
from graphwright.lifecycle.log import ChainFile, Mark, read_lines
from graphwright.safetensors import CheckpointNotFound, TensorData, TensorFile, TensorInfo
from graphwright.safetensors.writer import plan_header, write_planned

LOG, JOURNAL, LOCK, ANCESTOR = "life.jsonl", "journal.jsonl", "lock", "ancestor.json"
COMMITS, PINS, STRUCTURE = "commits", "pins", "structure"
_JSON = re.compile(r"[0-9a-f]{32}\.json")


@dataclass(frozen=True, slots=True)
class Home:
    """The commit with the newest bytes of a tensor, with its header entry, digest and `Promise.reference`."""

    commit: Commit
    info: TensorInfo
    digest: str
    reference: str | None

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.commit.path.parent.name}/{self.commit.path.name}: {self.info.key}"


Fold = dict[str, Home]


@dataclass(frozen=True, slots=True)
class Payload:
    """A tensor to write: dtype tag, shape, bytes, digest (a function that computes it), and its `Promise.reference`."""

    tag: str
    shape: tuple[int, ...]
    data: Buffer
    digest: Callable[[], str]
    reference: str | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return flat_bytes(self.data).nbytes


@dataclass(frozen=True, slots=True)
class Batch:
    """The content of one commit: a whole step.

    Attributes:
        step: age in steps.
        tensors: name -> each tensor that may have changed.
        names: names of all tensors of the state.
        structure: digest and text of the structure file.
        log, journal: the new lines of each file, and the hash of its last line.
        states, training: see `Record`.
    """

    step: int
    tensors: Mapping[str, Payload]
    names: Collection[str]
    structure: tuple[str, str]
    log: tuple[Sequence[str], str]
    journal: tuple[Sequence[str], str]
    states: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None


class Store:
    """The files of one life.

    Attributes:
        folder: the directory.
        commits: all commits from the newest base on.
        fold: the state after the last commit.
        cut: number of lines after the heads of the last commit, in `life.jsonl` and `journal.jsonl`.
        durable: False leaves out fsync: commits survive the death of the process, but perhaps not a power loss.
    """

    def __init__(self, folder: Path, commits: Sequence[Commit], *, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        self.commits = list(commits)
        self.fold = fold(self.commits)
        self.cut = {LOG: 0, JOURNAL: 0}

    @classmethod
    def create(cls, folder: Path, *, durable: bool = True) -> Store:
        """Make the folders of a new store in an existing directory."""
        for name in (COMMITS, PINS, STRUCTURE):
            os.mkdir(folder / name)
        return cls(folder, [], durable=durable)

    @classmethod
    def open(cls, folder: Path, *, commit: int | None = None, durable: bool = True) -> Store:
        """Read the headers of a store.

        Args:
            commit: number of the last commit to read; later ones are ignored.
        Raises: NoLife, StoreGap, CommitDamaged.
        """
        return cls(folder, _read_commits(folder, commit), durable=durable)

    # -- reading -------------------------------------------------------------------------------------------------------
    @property
    def last(self) -> Commit:
        """The newest commit."""
        return self.commits[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all commit files since the base."""
        return sum(commit.nbytes for commit in self.commits)

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors of the present state."""
        return sum(home.info.nbytes for home in self.fold.values())

    def lines(self, name: str, base: str, commit: Commit | None = None) -> Chain:
        """Return the lines of `life.jsonl` or `journal.jsonl` up to a commit. Raises: LogCorrupt."""
        record = (commit or self.last).record
        mark = record.log if name == LOG else record.journal
        found, self.cut[name] = read_lines(ChainFile(self.folder / name), mark, base)
        return found

    def structure(self, commit: Commit) -> str:
        """Return the text of the structure file of a commit. Raises: CommitDamaged."""
        path = self.folder / STRUCTURE / f"{commit.record.structure}.json"
        try:
            text = read_file(path)
        except OSError as error:
            raise CommitDamaged("the structure file of a commit is missing", where=path) from error
        if blake2b_128(text) != commit.record.structure:
            raise CommitDamaged("the structure file does not match its digest", where=path)
        return text.decode()

    def pins(self) -> list[Commit]:
        """Return the pinned commits, by step."""
        return sorted((read_commit(path) for path in _numbered(self.folder / PINS).values()), key=lambda c: c.step)

    def at(self, step: int) -> tuple[Commit, Fold]:
        """Return the last commit of a step and the state after it. Raises: StepGone."""
        for i in reversed(range(len(self.commits))):
            if self.commits[i].step == step:
                return self.commits[i], fold(self.commits[: i + 1])
        pins = self.pins()
        for commit in reversed(pins):
            if commit.step == step:
                return commit, fold([commit])
        known = sorted({commit.step for commit in (*self.commits, *pins)}, key=lambda s: abs(s - step))
        raise StepGone(self.folder, step, known[0] if known else None)

    # -- writing -------------------------------------------------------------------------------------------------------
    def sweep(self) -> None:
        """Remove what killed processes left: hidden files, lines after the heads, and files that no commit needs."""
        marks = {LOG: self.last.record.log, JOURNAL: self.last.record.journal}
        for name in (name for name, count in self.cut.items() if count):
            append_at(self.folder / name, marks[name].bytes, b"", durable=self.durable)
        for name, pattern in ((COMMITS, NAME), (PINS, NAME), (STRUCTURE, _JSON), ("", re.compile(".*"))):
            sweep_files(self.folder / name, pattern)
        first, last = self.commits[0].number, self.last.number
        for number, path in _numbered(self.folder / COMMITS).items():
            if not first <= number <= last:
                _remove(path)
        self.sweep_structures()

    def sweep_structures(self) -> None:
        """Remove structure files that no commit and no pin names."""
        needed = {commit.record.structure for commit in (*self.commits, *self.pins())}
        for path in (self.folder / STRUCTURE).iterdir():
            if _JSON.fullmatch(path.name) and path.stem not in needed:
                _remove(path)

    def write(self, batch: Batch, *, base: bool = False) -> Commit:
        """Write a commit: the structure, lines of log and journal, then the commit file; return it. Raises: FileError.

        Tensors whose bytes have not changed are left out, or for a `base` copied from their files; if nothing changed,
        nothing is written and the last commit is returned. After an error the state on disk is that of the last commit.
        """
        digests = {name: payload.digest() for name, payload in batch.tensors.items()}
        new = {n: p for n, p in batch.tensors.items() if n not in self.fold or self.fold[n].digest != digests[n]
               or self.fold[n].reference != p.reference}  # fmt: skip
        names = set(batch.names)
        gone = tuple(sorted(self.fold.keys() - names))
        if self.commits and not (new or gone or batch.log[0] or batch.journal[0] or self._news(batch)):
            return self.last
        self.write_structure(*batch.structure)
        before = self.commits[-1].record if self.commits else None
        marks = {}
        for name, (lines, head) in ((LOG, batch.log), (JOURNAL, batch.journal)):
            empty = Mark(0, 0, head)
            mark = empty if before is None else before.log if name == LOG else before.journal
            marks[name] = ChainFile(self.folder / name).append(mark, lines, head, durable=self.durable)
        record = Record(
            1 if before is None else before.number + 1, batch.step, now(), before is None,
            self.commits[-1].digest if self.commits else "", batch.structure[0], marks[LOG], marks[JOURNAL],
            gone, {name: digests[name] for name in new},
            {name: p.reference for name, p in new.items() if p.reference is not None}, batch.states, batch.training,
        )  # fmt: skip
        items = [TensorData(name, p.tag, p.shape, p.data) for name, p in new.items()]
        if not base:
            return self._add(record, items)
        kept = {name: home for name, home in self.fold.items() if name in names and name not in new}
        digests = {name: home.digest for name, home in kept.items()}
        record = replace(record, base=True, gone=(), tensors={**record.tensors, **digests},
                         references={**record.references, **_references(kept)})  # fmt: skip
        with _Sources() as sources:
            items += [TensorData.stored(sources(home.commit), name) for name, home in kept.items()]
            return self._add(record, items)

    def _news(self, batch: Batch) -> bool:
        last = self.last.record
        now, then = ((x.step, x.states, x.training) for x in (batch, last))
        return now != then or batch.structure[0] != last.structure

    def copy_base(self, record: Record, homes: Fold, target: Path) -> Commit:
        """Write a commit file with all tensors of a state, from file to file; return it."""
        record = replace(
            record, base=True, gone=(), tensors={name: home.digest for name, home in homes.items()},
            references=_references(homes),
        )  # fmt: skip
        with _Sources() as sources:
            items = [TensorData.stored(sources(home.commit), name) for name, home in homes.items()]
            return self._write_file(target, record, items)

    def pin(self, step: int) -> Commit:
        """Copy the state after a step to a file that no compaction removes. Raises: StepGone; FileError."""
        commit, state = self.at(step)
        target = self.folder / PINS / f"{commit.number:08d}.safetensors"
        return commit if commit.path.parent.name == PINS else self.copy_base(commit.record, state, target)

    def add_base(self, record: Record) -> Commit:
        """Write the present state as a commit of its own, on which later ones build; earlier files stay."""
        record = replace(record, number=self.last.number + 1, previous=self.last.digest)
        made = self.copy_base(record, self.fold, self._path(record.number))
        self.commits.append(made)
        self.fold = fold([made])
        return made

    def forget(self, keep: int) -> None:
        """Remove the commit files before the number `keep`, which is a base."""
        gone = [commit for commit in self.commits if commit.number < keep]
        self.commits = [commit for commit in self.commits if commit.number >= keep]
        for commit in gone:
            _remove(commit.path)
        self.sweep_structures()

    def _add(self, record: Record, items: Sequence[TensorData]) -> Commit:
        made = self._write_file(self._path(record.number), record, items)
        self.commits.append(made)
        _apply(self.fold, made)
        return made

    def _write_file(self, path: Path, record: Record, items: Sequence[TensorData]) -> Commit:
        start, header = plan_header(items, record.metadata())
        nbytes = len(start) + sum(info.nbytes for info in header.infos)
        made = Commit(path, record, {info.key: info for info in header.infos}, nbytes, blake2b_128(start))
        try:
            write_planned(path, items, start, durable=self.durable)
        except BaseException:  # an error after the rename, which is the commit point, must not undo the commit
            if not (path.exists() and _header_digest(path, len(start)) == made.digest):
                raise
        return made

    def _path(self, number: int) -> Path:
        return self.folder / COMMITS / f"{number:08d}.safetensors"

    def write_structure(self, digest: str, text: str) -> None:
        """Write a structure file, unless it exists. Raises: UnwritableTarget."""
        path = self.folder / STRUCTURE / f"{digest}.json"
        if not path.exists():
            atomic_write(path, text.encode(), durable=self.durable)


def _header_digest(path: Path, length: int) -> str | None:
    try:
        with open_regular(path) as file:
            return blake2b_128(file.read(length))
    except OSError:
        return None


class _Sources:
    """Opens the files of commits once each, and closes them at the end."""

    def __init__(self) -> None:
        self._open: dict[Path, TensorFile] = {}

    def __call__(self, commit: Commit) -> TensorFile:
        if commit.path not in self._open:
            self._open[commit.path] = TensorFile(commit.path)
        return self._open[commit.path]

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()


def fold(commits: Sequence[Commit]) -> Fold:
    """Return where the newest bytes of each tensor are after some commits, the first of which is a base."""
    found: Fold = {}
    for commit in commits:
        _apply(found, commit)
    return found


def _references(homes: Mapping[str, Home]) -> dict[str, str]:
    return {name: home.reference for name, home in homes.items() if home.reference is not None}


def _apply(found: Fold, commit: Commit) -> None:
    record = commit.record
    if record.base:
        found.clear()
    for name in record.gone:
        found.pop(name, None)
    for name, digest in record.tensors.items():
        found[name] = Home(commit, commit.infos[name], digest, record.references.get(name))


def _read_commits(folder: Path, last: int | None) -> list[Commit]:
    for attempt in range(20):
        try:
            return _read_once(folder, last)
        except CheckpointNotFound:  # a writer compacts the store meanwhile
            if attempt == 19:
                raise
    raise AssertionError("the loop returns or raises")


def _read_once(folder: Path, last: int | None) -> list[Commit]:
    files = _numbered(folder / COMMITS)
    numbers = sorted(number for number in files if last is None or number <= last)
    if not numbers or (last is not None and numbers[-1] != last):
        raise NoLife("the life has no such commit", where=folder / COMMITS, got=last, expected=_listed(files))
    found: list[Commit] = []
    for number in reversed(range(numbers[0], numbers[-1] + 1)):
        if number not in files:
            raise StoreGap(folder / COMMITS, number, max(n for n in numbers if n < number))
        commit = read_commit(files[number])
        if found and found[-1].record.previous != commit.digest:
            raise CommitDamaged("the commit does not build on the one before it", where=found[-1].path,
                                expected=commit.digest, got=found[-1].record.previous)  # fmt: skip
        if found and found[-1].step < commit.step:
            raise CommitDamaged("the steps of commits do not rise", where=found[-1].path)
        found.append(commit)
        if commit.record.base:
            return found[::-1]
    raise StoreGap(folder / COMMITS, numbers[0] - 1, 0)


def _numbered(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by number. Raises: NoLife; CommitDamaged for other names, except hidden ones."""
    if not folder.is_dir():
        raise NoLife("the directory has no life", where=folder.parent)
    found = {}
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match is None and not path.name.startswith("."):
            raise CommitDamaged("a file of another name among the commits", where=path, expected="00000001.safetensors")
        if match is not None:
            found[int(match[1])] = path
    return found


def _listed(files: Mapping[int, Path]) -> str:
    return f"{min(files)} to {max(files)}" if files else "a file in commits/"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
