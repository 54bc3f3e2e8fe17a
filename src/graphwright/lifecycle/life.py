"""A life: a program with an identity, a diary and a store, in which every step that was committed survives.

A life owns its directory, the segment that trains its program, and the writer of its commits. `Tracker` knows what the
last commit has; a commit stages what changed since, and the writer makes it durable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from graphwright.array import BY_TAG, NDArray, Spec, from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.autograd.random import Generator
from graphwright.errors import GraphwrightError, UsageError
from graphwright.files import FileError, HeldLock, StrPath, atomic_directory, atomic_write
from graphwright.graph import Chain
from graphwright.graph.chain import GENESIS
from graphwright.lifecycle.branches import Merged, make_fork, merge
from graphwright.lifecycle.compaction import compact
from graphwright.lifecycle.contents import Contents, Digests, Tracker, payload
from graphwright.lifecycle.contract import check_contract, contract_of
from graphwright.lifecycle.errors import CommitDamaged, LifeBusy, LifeExists, ResumeMismatch
from graphwright.lifecycle.figures import Figures
from graphwright.lifecycle.identity import Identity
from graphwright.lifecycle.log import LifeLog
from graphwright.lifecycle.moments import HeldMoments, give_moments, split
from graphwright.lifecycle.picture import draw
from graphwright.lifecycle.replay import Added, replay_life
from graphwright.lifecycle.segment import Schedule, Segment, default_generator, key_of
from graphwright.lifecycle.store import LOCK, LOG, Batch, Commit, Payload, Store
from graphwright.lifecycle.structure import MappedFiles, Restored, Structure, restore, structure_key, structure_of
from graphwright.lifecycle.verify import Divergence, Verified, divergence, verify
from graphwright.lifecycle.writer import Writer
from graphwright.optim.optimizer import Optimizer
from graphwright.program import Program
from graphwright.program.exclusive import exclusive
from graphwright.program.files.values import flattened, unflattened
from graphwright.program.weights import array_digest

if TYPE_CHECKING:
    from graphwright.optim.training_step import CompiledStep
    from graphwright.program.editing.journal import Entry

HORIZON = 64
"""Number of latest edits that can be undone, also after a restart."""
Durable = Literal["power", "process"]


class Life:
    """A life; made by `birth` and `open`. In a `with` block it is closed at the end.

    Attributes:
        folder: its directory.
        identity: who it is.
        program: the program; edit and train it as any other.
        model: the model of the program, if one was given.
        log: its diary.
        age: steps that it was trained.
        training: the open segment, or None.
        store: its files.
        readonly: True if it cannot be changed.
        cut: lines of log and journal that had no commit when it was opened, by file.
    """

    def __init__(
        self, folder: Path, identity: Identity, program: Program, log: LifeLog, store: Store, *, model: Any = None,
        lock: HeldLock | None = None, asynchronous: bool = False, age: int = 0, readonly: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.identity, self.program, self.log, self.store = folder, identity, program, log, store
        self.model, self.age, self.readonly, self._lock = model, age, readonly, lock
        self.training: Segment | None = None
        self.cut: Mapping[str, int] = {}
        self._logged = len(program.journal)  # entries of the journal that the log names
        self._writer = Writer(store, asynchronous=asynchronous)
        self._tracker, self._digests = Tracker(), Digests()
        self._contents: Contents | None = None
        self._structure: Structure | None = None
        self._held = HeldMoments()
        self._named: dict[str, NDArray] = {}  # moments that are held, as the last commit has them
        self._undo: set[str] = set()  # names of written undo arrays
        self._added: dict[str, NDArray] = {}  # values of new weights that no commit has yet, by digest
        self._states: Mapping[str, Any] = {}
        self._detached: set[str] = set()  # names of tensors of a training that is not running
        self._facts: Mapping[str, Any] | None = None
        self._generator_key: str | None = None

    def _adopt(self, found: Restored) -> None:
        """Take the present state as that of the last commit, from which the program was made."""
        self._held, self._digests, self.cut = found.held, Digests(found.digests), dict(self.store.cut)
        self._generator_key = found.generator
        self._detach()

    # -- what it is ----------------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """Its present name."""
        renamed = self.log.of("rename")
        return renamed[-1].facts["name"] if renamed else self.identity.name

    @property
    def lag(self) -> int:
        """Steps that no commit has yet."""
        return self.age - self.store.last.step

    @property
    def resumable(self) -> bool:
        """Whether the last commit has a training, which `resume` continues."""
        return self.training is None and self._facts is not None

    @property
    def reason(self) -> str | None:
        """Why the last commit could not be written; None if it was."""
        return None if self._writer.error is None else str(self._writer.error)

    def __repr__(self) -> str:
        lag = f", {self.lag} not on disk" if self.lag else ""
        return f"Life({self.name!r}, {self.age} steps{lag}, {len(self.store.commits)} commits in {self.folder.name})"

    # -- commits -------------------------------------------------------------------------------------------------------
    def commit(self, *, verify: bool = False) -> Commit:
        """Write everything that changed since the last commit, and wait until it is written; return the last commit.

        Args:
            verify: compute the digests of all tensors, to prove that no change was missed.
        Raises: UnwritableTarget if it cannot be written; CommitDamaged for a missed change; UsageError while an edit is
            open, or for a life that is read-only or closed.
        """
        self._check_writable()
        self._writer.wait()
        if self.training is not None and self.program.history.open is None:
            self.training.train.refresh()  # states of terms follow edits, as they would at the next step
        self._write(copy=False, verify=verify)
        self._writer.wait()
        if self._writer.error is not None:
            raise self._writer.error
        return self.store.last

    def _commit_step(self) -> None:
        """Write what changed, in the background if the life is asynchronous; a failure shows in `lag` and `reason`."""
        self._check_writable()
        self._writer.check()
        if not self._writer.ready:
            return
        with suppress(FileError):  # noted by the writer
            self._write(copy=self._writer.asynchronous)

    def _write(self, *, copy: bool, verify: bool = False) -> None:
        began = perf_counter()
        try:
            batch = self._stage(copy=copy)
            if verify:
                self._verify_clean(batch)
            self._writer.submit(batch, began)
        except FileError:
            raise
        except BaseException:  # such as an interrupt: what is noted as written may not be, so all digests decide again
            self._tracker, self._undo, self._named = Tracker(), set(), {}
            raise

    def _stage(self, *, copy: bool) -> Batch:
        p = self.program
        with exclusive(p):
            if p.history.open is not None:
                raise UsageError("cannot commit while an edit is open", where=p.name, fix="leave the with-block first")
            self._log_edits()
            if failed := self._writer.take_failed():
                self._tracker.forget(failed)
                self._undo -= failed
            train = None if self.training is None else self.training.train
            generator = self._generator_key
            if self._structure is None or self._structure.key != structure_key(p, generator):
                optimizer = None if train is None else train.optimizer
                self._structure = structure_of(p, optimizer, self._held, self._digests, generator)
            if self._contents is None or not self._contents.fresh(train):
                self._contents = Contents(p, train)
            tensors: dict[str, Payload] = {}
            for name in self._tracker.changed(self._contents):
                v = self._contents[name].variable
                known = p.weights.promise_of(v.data) if name.startswith("model.") else None
                reference = None if known is None else known.reference
                tensors[name] = payload(v.data, reference, copy=copy, host=self._contents.host(name))
            written = {d for d in self._structure.added if f"undo.{d}" in self.store.fold}
            self._added = {d: a for d, a in self._added.items() if d in self._structure.added - written}
            undo = {f"undo.{d}": (d, array) for d, array in {**self._added, **self._structure.arrays}.items()}
            for name in undo.keys() - self._undo:
                digest, array = undo[name]
                made = payload(array)
                tensors[name] = Payload(made.tag, made.shape, made.data, lambda digest=digest: digest)
            self._undo = {*undo, *(f"undo.{d}" for d in written)}
            states, arrays = self._states_now()
            tensors |= {name: payload(array, copy=copy) for name, array in arrays.items()}
            named = self._held.named(p) if self.training is None else {}
            tensors |= {n: payload(array) for n, array in named.items() if self._named.get(n) is not array}
            self._named = named
            names = {*self._contents, *self._undo, *self._detached, *named, *arrays}
            facts = self._facts if self.training is None else self.training.training()
            last = self.store.commits[-1].record if self.store.commits else None
            log, journal = self.log.chain, p.journal.chain
            marks = (0, 0) if last is None else (last.log.lines, last.journal.lines)
            lines = [([link.line for link in c.links[n:]], c.head) for c, n in zip((log, journal), marks, strict=True)]
            structure = (self._structure.digest, self._structure.text)
            return Batch(self.age, tensors, names, structure, lines[0], lines[1], states, facts)

    def _states_now(self) -> tuple[Mapping[str, Any], dict[str, NDArray]]:
        """Return the states of loader, schedule and generator as trees, and the arrays in them by name."""
        if self.training is None:
            return self._states, {}
        trees: dict[str, Any] = {}
        arrays: dict[str, NDArray] = {}
        for part, holder in self.training.parts.items():
            if holder is not None:
                trees[part], found = flattened({part: dict(holder.state_dict())})
                arrays |= {f"states.{key}": array for key, array in found.items()}
        return trees, arrays

    def _verify_clean(self, batch: Batch) -> None:
        train = None if self.training is None else self.training.train
        for name, holding in Contents(self.program, train).items():
            home = self.store.fold.get(name)
            if name not in batch.tensors and (home is None or payload(holding.variable.data).digest() != home.digest):
                raise CommitDamaged("a change of a tensor was missed", where=name, fix="report this as a defect")

    def _log_edits(self) -> None:
        """Log the journal entries that the log does not name yet."""
        for entry in self._take_edits():
            facts = {"entry": entry.seq, "hash": entry.hash, "why": entry.why, "author": entry.author}
            self.log.add("edit", self.age, facts)

    def _take_edits(self) -> Sequence[Entry]:
        """Return the journal entries that the log does not name yet, which it then does; hold the values they add."""
        journal = self.program.journal
        entries = journal[self._logged :]
        for weight in Added.by(entries):
            if weight.now is not None and array_digest(weight.now) == weight.digest:
                self._added[weight.digest] = weight.now  # is copied before the weight is trained
        self._logged = len(journal)
        return entries

    def _check_writable(self) -> None:
        if self.readonly or self._lock is None:
            what = "the life was opened read-only" if self.readonly else "the life is closed"
            raise UsageError(what, where=self.folder, fix="open it again: lf.open(directory)")

    # -- training ------------------------------------------------------------------------------------------------------
    def segment(
        self, train: CompiledStep, data: Any = None, *, objective: str = "", scheduler: Schedule | None = None,
        rng: Generator | None = None,
    ) -> Segment:  # fmt: skip
        """Begin a training of the program: `with life.segment(train, data=loader) as run: ...`.

        Args:
            train: step of this program, made by `compile_step`; its moments are as it has them.
            data: a loader, whose position is saved and whose dataset the log names; or a dict of facts about the data.
            objective: text for the log.
            scheduler: a learning-rate schedule, which each step advances; its state is saved.
            rng: a generator whose state is saved; by default the default one.
        Raises: UsageError if the step is of another program, or a segment is open.
        """
        self._begin(train)
        contract = contract_of(train, data, scheduler, objective)
        run = Segment(self, train, Figures(self.age), contract, data, scheduler, rng or default_generator())
        self._log_edits()
        self.training, self._detached, self._held, self._named = run, set(), HeldMoments(), {}
        self._generator_key = key_of(self.program, run.parts["rng"])
        self.log.add("segment_start", self.age, {**contract, "seed": run.parts["rng"].seed})
        return run

    def resume(
        self, train: CompiledStep, data: Any = None, *, objective: str | None = None,
        scheduler: Schedule | None = None, rng: Generator | None = None,
    ) -> Segment:  # fmt: skip
        """Continue the last training where the last commit left it, bit for bit; arguments are as for `segment`.

        Everything is read and checked before anything changes. Without `objective`, it is that of the training.
        Raises: ResumeMismatch if no training can be resumed, or `train` or `data` differ; CommitDamaged; UsageError.
        """
        self._begin(train)
        if self._facts is None:
            fix = "life.segment(train, ...) begins one"
            raise ResumeMismatch("the life has no training to resume", where=self.folder, fix=fix)
        self.commit()  # edits since the life was opened
        then = self._facts["contract"]
        now = contract_of(train, data, scheduler, str(then.get("objective", "")) if objective is None else objective)
        check_contract(then, now, self.folder)
        generator = rng or default_generator()
        run = Segment(self, train, Figures.from_json(self._facts["segment"]), then, data, scheduler, generator)
        self._check_names(train)
        others = {n: h.variable for n, h in Contents(self.program, train).items() if n in self._detached}
        with MappedFiles() as files:
            host = {n: files.array(self.program, self.store.fold[n]).to_numpy(bits=True).copy() for n in others}
            self._load_states(run, files)
        for name, variable in others.items():
            variable.assign(Tensor(from_numpy(host[name], bits=variable.dtype)))
        if isinstance(train.optimizer, Optimizer):
            give_moments(self._held, train.optimizer)
        self._held, self._named = HeldMoments(), {}
        for variable in self.program.weights.values():  # aligned as in the first run: kernels may depend on it
            known = self.program.weights.promise_of(variable.data)
            if known is None or known.reference is None:
                variable.own()
        if self._generator_key is not None and self.program.weights.has_key(self._generator_key):
            generator.key = self.program.weights.at_key(self._generator_key)
        self._tracker.note(Contents(self.program, train))
        self.training, self._detached, self._structure = run, set(), None
        if run.figures.ended:
            run.figures = Figures(self.age)
            self.log.add("segment_start", self.age, {**then, "seed": generator.seed})
        else:
            self.log.add("restore", self.age, {"commit": self.store.last.number, "cut": dict(self.cut)})
        return run

    def _begin(self, train: CompiledStep) -> None:
        self._check_writable()
        if self.training is not None:
            raise UsageError("a segment is open", where=self.name, fix="leave its with-block, or call its end()")
        if train.source is not self.program:
            raise ResumeMismatch("the step trains another program", where=self.name, got=train.source.name,
                                 fix="compile_step(life.program, ...)")  # fmt: skip

    def _check_names(self, train: CompiledStep) -> None:
        """Check that a step has the variables that the life has of its training; new parameters have none yet."""
        p = self.program
        own = {n: h.variable.spec for n, h in Contents(p, train).items() if not n.startswith("model.")}
        held = {n: a.spec for n, a in self._named.items()}
        infos = {n: self.store.fold[n].info for n in self._detached if not n.startswith("states.")}
        stored = held | {n: Spec(i.shape, BY_TAG[i.tag]) for n, i in infos.items() if i.tag in BY_TAG}
        known = {parts[1] for parts in (split(n, p) for n in held) if parts is not None}
        new = {n for n in own.keys() - stored.keys() if (parts := split(n, p)) is not None and parts[1] not in known}
        wrong = [f"{n}: missing in the life" for n in own.keys() - stored.keys() - new]
        wrong += [f"{n}: missing in the step" for n in stored.keys() - own.keys()]
        wrong += [f"{n}: expected {own[n]}, got {stored[n]}" for n in own.keys() & stored.keys() if own[n] != stored[n]]
        if wrong:
            what = "the training differs from the one that the life would resume:\n  " + "\n  ".join(sorted(wrong)[:20])
            raise ResumeMismatch(what, where=self.folder, fix="make model, optimizer and step as in that training")

    def _load_states(self, run: Segment, files: MappedFiles) -> None:
        parts = {name: part for name, part in run.parts.items() if part is not None}
        if parts.keys() != self._states.keys():
            raise ResumeMismatch("the training has other parts than the one that the life would resume",
                                 where=self.folder, expected=sorted(self._states), got=sorted(parts))  # fmt: skip
        stored = {n.removeprefix("states."): h for n, h in self.store.fold.items() if n.startswith("states.")}
        arrays = {name: files.array(self.program, home).to_numpy().copy() for name, home in stored.items()}
        states = {name: unflattened(self._states[name], arrays, self.folder)[name] for name in parts}
        before = {name: part.state_dict() for name, part in parts.items()}
        try:
            for name, part in parts.items():
                part.load_state_dict(states[name])
        except GraphwrightError as error:
            for name, part in parts.items():
                part.load_state_dict(before[name])
            raise ResumeMismatch("a state cannot be restored", where=self.folder, got=error) from error

    def _leave(self, run: Segment) -> None:
        """Write everything and close a segment that ended."""
        self.commit()
        optimizer = run.train.optimizer
        if isinstance(optimizer, Optimizer):
            for parameter, state in list(optimizer.state.items()):
                arrays = {label: v.data.copy() for label, v in state.variables().items()}
                self._held.add(optimizer.name, parameter, arrays)
        self._detach()

    def _suspend(self) -> None:
        """Close the life after an exception in a segment: its program is ahead of its last commit, or within a step."""
        self.close()

    def _detach(self) -> None:
        """Hold what the last commit has of a training until it is resumed."""
        self.training = None
        record, names = self.store.last.record, set(self.store.fold)
        self._states, self._facts = record.states, record.training
        self._undo = {n for n in names if n.startswith("undo.")}
        self._named = self._held.named(self.program)
        self._detached = {n for n in names if n.partition(".")[0] not in ("model", "undo")} - self._named.keys()
        self._tracker.note(Contents(self.program, None))

    # -- events --------------------------------------------------------------------------------------------------------
    @property
    def figures(self) -> Figures | None:
        """Figures of the open segment, else of the last one that a commit has; None without any."""
        if self.training is not None:
            return self.training.figures
        return None if self._facts is None else Figures.from_json(self._facts["segment"])

    def to_json(self) -> dict[str, Any]:
        """Return identity, age, sizes, segments and counts of events as JSON values."""
        figures = self.figures
        ended = [dict(event.facts) for event in self.log.of("segment_end")]
        rows = [*ended, *([] if figures is None or figures.ended else [figures.to_json()])]
        columns = ("start", "steps", "items", "tokens", "loss_first", "loss_last")
        return {
            "name": self.name,
            "identity": {"id": self.identity.id, "name": self.identity.name, "time": self.identity.time,
                         "parent": self.identity.parent},
            "age": self.age,
            "commits": len(self.store.commits),
            "bytes": self.store.nbytes,
            "live_bytes": self.store.live_bytes,
            "segments": [{name: row[name] for name in columns} for row in rows],
            "counts": self.log.counts(),
        }  # fmt: skip

    def to_svg(self, path: StrPath | None = None) -> str:
        """Draw loss and other figures, experts and events over steps; return the SVG, and write it to `path` if given.

        Raises: UnwritableTarget.
        """
        text = draw(self.log, self.name, self.age, self.figures)
        if path is not None:
            atomic_write(path, text.encode())
        return text

    def rename(self, name: str) -> None:
        """Give the life another name; the identity keeps the name of its birth."""
        self._check_writable()
        if not isinstance(name, str) or not name:
            raise UsageError("invalid name of a life", expected="a non-empty string", got=repr(name))
        self.log.add("rename", self.age, {"name": name})
        self.commit()

    def export(self, directory: StrPath, **options: Any) -> Any:
        """Export the model; see `Model.export`. Raises: UsageError if the life was opened without `like=model`."""
        if self.model is None:
            fix = "lf.open(directory, like=gw.open(source)), or life.snapshot(directory)"
            raise UsageError("the life has no model to export, only a program", where=self.name, fix=fix)
        receipt = self.model.export(directory, **options)
        if not self.readonly:
            self.log.add("export", self.age, {"hash": self.program.hash()})
            self.commit()
        return receipt

    def compact(self) -> None:
        """Write all live tensors to one commit, and remove the earlier ones; pinned steps stay. Raises: FileError.

        Commits of steps do it where superseded bytes exceed live ones; only this call is an event of the log.
        """
        self.commit()
        self.log.add("compaction", self.age, compact(self.store))
        self.commit()

    def pin(self, step: int | None = None) -> None:
        """Keep the state after a step, by default the present one, through compactions. Raises: StepGone; FileError."""
        if step is None or step == self.age:
            self.commit()
        self._check_writable()
        self._writer.wait()
        self.store.pin(self.age if step is None else step)

    def fork(self, directory: StrPath, *, name: str | None = None, step: int | None = None) -> Life:
        """Begin another life with the state of this one, now or after a step; return it, opened.

        It has an identity of its own, which names this life, the same log and journal up to then, and can be resumed.
        Raises: LifeExists; StepGone; UnwritableTarget.
        """
        folder = Path(directory)
        _check_new(folder)
        if self.readonly:
            self._writer.wait()
        else:
            self.commit()
        identity = make_fork(self, folder, name or f"fork of {self.name}", step)
        if not self.readonly:
            self.log.add("fork", self.age, {"id": identity.id, "name": identity.name, "step": step or self.age})
            self.commit()
        return open(folder)

    def merge(self, other: Life | StrPath, *, prefer: Literal["ours", "theirs"] | None = None) -> Merged:
        """Merge a fork of this life into it, or its parent, or another fork of the same commit.

        The other life's edits since they parted are replayed, then one edit sets the weights that only the other life
        changed; their moments come with them. Undo reverts the merge like any edit.

        Args:
            other: the other life, or its directory.
            prefer: whose value a weight gets that both changed.
        Raises: MergeConflict naming such weights, if `prefer` is None; ReplayConflict for an edit that does not fit;
            UsageError if they have no common commit or a segment is open. Then nothing changes.
        """
        if self.training is not None:
            raise UsageError("a segment is open", where=self.name, fix="end it, then merge")
        if prefer not in (None, "ours", "theirs"):
            raise UsageError("unknown value of `prefer`", expected="ours, theirs or None", got=prefer)
        given = other if isinstance(other, Life) else open(other, readonly=True)
        if not given.readonly:
            given.commit()
        self.commit()
        found = merge(self, given, prefer)
        facts = {"id": given.identity.id, "name": given.name, "step": given.age, "taken": list(found.taken)}
        self.log.add("merge", self.age, facts)
        self.commit()
        return found

    def _take_moments(self, other: Life, keys: Sequence[str]) -> None:
        """Take the moments of some parameters from another life."""
        for key in keys:
            moments = other._moments_of(key)
            if moments is not None:
                self._held.add(moments[0], self.program.weights[key], moments[1])

    def _moments_of(self, key: str) -> tuple[str, dict[str, NDArray]] | None:
        """Return name of the optimizer and copies of the moments of a parameter, by label; None without any."""
        variable = self.program.weights[key]
        found = self._held.of(variable)
        if found is not None:
            return found.owner, {label: array.copy() for label, array in found.arrays.items()}
        optimizer = None if self.training is None else self.training.train.optimizer
        if not isinstance(optimizer, Optimizer) or not isinstance(variable, Parameter):
            return None
        state = optimizer.state_of(variable)
        arrays = {label: v.data.copy() for label, v in state.variables().items()}
        return optimizer.name, arrays

    def verify(self) -> Verified:
        """Read everything that is stored, and check each byte, line and hash, and that log and journal agree.

        Raises: CommitDamaged naming file and tensor; LogCorrupt naming the line.
        """
        self._writer.wait()
        return verify(self)

    def same(self, other: Life | StrPath) -> Divergence | None:
        """Return None if another life has the same log, else where the logs begin to differ.

        A copy of the directory has the same log until one of the two is trained.
        """
        given = other if isinstance(other, Life) else open(other, readonly=True)
        return divergence(self.log, given.log)

    def at(self, step: int) -> Program:
        """Return the program as it was after a step, read-only. Raises: StepGone naming the nearest stored step."""
        self._writer.wait()
        program = restore(self.store, *self.store.at(step)).program
        program.readonly = True
        return program

    def replay(self, onto: Program, *, step: int | None = None) -> tuple[Entry, ...]:
        """Apply the edits of this life to another program; return its new journal entries.

        A program that is trained on the same data, and gets the edits of each step after that step, ends with the same
        weights. Values come from the store; it has those of edits that can still be undone.

        Args:
            onto: such as the program at birth, trained beside.
            step: only the edits that were made after this step, and before the next; by default all at once.
        Raises: ReplayConflict for an edit that does not fit, or a value that is no longer stored.
        """
        self._writer.wait()
        return replay_life(self, onto, step, self._added)

    def snapshot(self, directory: StrPath, **options: Any) -> Path:
        """Save the program to a directory, which needs no life to be opened; see `Program.save`."""
        return self.program.save(directory, **options)

    def _move(self, folder: Path) -> None:
        """Use the store in `folder`, to which the directory was renamed."""
        self.folder = folder
        self.store = self._writer.store = Store.open(folder, durable=self.store.durable)

    def close(self) -> None:
        """Write what is pending, and give the directory free. Raises: UnwritableTarget; the life is closed anyway."""
        if self._lock is None:
            return
        try:
            if self.training is not None:
                self._writer.wait()
                if self.lag and self.training.whole:
                    self.commit()
        finally:
            self._writer.close()
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Life:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def birth(
    target: Any, directory: StrPath, *, name: str, seed: int = 0, asynchronous: bool = False, durable: Durable = "power"
) -> Life:
    """Begin the life of a program in a new directory: identity, log, and a first commit with everything.

    Args:
        target: a program, or a model, whose program it is; it stays in use.
        directory: a directory that does not exist or is empty; its parent exists.
        name: name of the life.
        seed: seed of the training, for the record.
        asynchronous: write the commits of steps in a thread, spaced so that they take about a tenth of the time.
        durable: `power` fsyncs every commit; `process` survives the death of the process only.
    Raises: LifeExists; UnwritableTarget; UsageError.
    """
    program, model = _program_of(target)
    _check_durable(durable)
    if not isinstance(name, str) or not name:
        raise UsageError("invalid name of a life", expected="a non-empty string", got=repr(name))
    folder = Path(directory)
    _check_new(folder)
    identity = Identity.new(program, name, seed)
    if program.undo_horizon is None:
        program.undo_horizon = HORIZON
        program.history.trim()
    log = LifeLog(Chain(base=GENESIS))
    facts = {"id": identity.id, "name": name, "structure": identity.structure, "entries": len(program.journal)}
    log.add("birth", 0, facts)
    with atomic_directory(folder) as temporary:
        lock = HeldLock(temporary / LOCK)
        store = Store.create(temporary, durable=durable == "power")
        life = Life(temporary, identity, program, log, store, model=model, lock=lock, asynchronous=asynchronous)
        life._generator_key = key_of(program, default_generator())
        life.commit()
        identity.write(temporary)
    life._move(folder)
    return life


def open(
    directory: StrPath, *, like: Any = None, readonly: bool = False, commit: int | None = None,
    asynchronous: bool = False, durable: Durable = "power",
) -> Life:  # fmt: skip
    """Open a life at its last commit; lines of log and journal that no commit names are cut and counted.

    Args:
        directory: the directory of the life.
        like: a program or model with the sizes of the life at birth; of a model, the life's `model` has the files.
        readonly: look at it while another process may train it.
        commit: number of the commit to open; later ones are removed, unless `readonly`.
        asynchronous, durable: as for `birth`.
    Raises: NoLife; LifeBusy(pid); SubstrateMismatch; StoreGap, CommitDamaged, LogCorrupt for a damaged store.
    """
    folder = Path(directory)
    _check_durable(durable)
    identity = Identity.read(folder)
    program, model = (None, None) if like is None else _program_of(like)
    if program is not None:
        identity.check(program)
    lock = None if readonly else HeldLock(folder / LOCK)
    if lock is not None and lock.holder is not None:
        raise LifeBusy(folder, lock.holder)
    try:
        store = Store.open(folder, commit=commit, durable=durable == "power")
        log = LifeLog(store.lines(LOG, GENESIS))
        found = restore(store, store.last, store.fold)
        if lock is not None:
            store.sweep()
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    model = None if model is None else model.with_program(found.program)
    life = Life(folder, identity, found.program, log, store, model=model, lock=lock, asynchronous=asynchronous,
                age=store.last.step, readonly=readonly)  # fmt: skip
    life._adopt(found)
    return life


def _program_of(target: Any) -> tuple[Program, Any]:
    program = getattr(target, "program", target)
    if not isinstance(program, Program):
        raise UsageError("only programs and models live", expected="a Program or a Model", got=type(target).__name__)
    return program, None if program is target else target


def _check_new(folder: Path) -> None:
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        fix = "lf.open(directory) continues a life; or choose another directory"
        raise LifeExists("the directory is not empty", where=folder, fix=fix)


def _check_durable(durable: str) -> None:
    if durable not in ("power", "process"):
        raise UsageError("unknown value of `durable`", expected="power or process", got=durable)
