"""Nothing that was committed is lost: a kill at any moment, a fault at any file operation, a power loss after any."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from bonsai import again, begin, everything, loader, program, step, train

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright.errors import GraphwrightError
from graphwright.files import FileError
from graphwright.lifecycle import compaction
from graphwright.testing.faults import KINDS, Disk, inject, record, snapshot
from seeds import deep

pytestmark = pytest.mark.usefixtures("warm")
CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from graphwright.lifecycle import compaction
compaction.FILES = 5
from bonsai import again, begin
folder = Path({folder!r})
life, run, data = (again if folder.exists() else begin)(folder, asynchronous={asynchronous})
while True:
    for batch in data:
        run.step(batch)
        print("ready", flush=True)
        time.sleep(0.01)
"""


def child(folder: Path, asynchronous: bool) -> subprocess.Popen:
    text = CHILD.format(tests=str(Path(__file__).parent), folder=str(folder), asynchronous=asynchronous)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.deep), True])
def test_a_killed_process_resumes_with_the_same_bits(tmp_path, asynchronous):
    """Kills of a training process at random moments; the state after each is that of a run without interruptions."""
    folder, chance, ages = tmp_path / "life", random.Random(asynchronous), [0]
    for _ in range(deep(25, 2)):
        with child(folder, asynchronous) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                assert process.stdout.readline() == b"ready\n", process.stderr.read().decode()[-3000:]
                with pytest.raises(lf.LifeBusy) as busy:
                    lf.open(folder)
                assert busy.value.pid == process.pid
                time.sleep(chance.uniform(0.02, 0.4))
            finally:
                os.kill(process.pid, signal.SIGKILL)
        life = lf.open(folder, readonly=True)
        ages.append(life.age)
        life.verify()
    assert ages == sorted(ages)
    assert ages[-1] > 0
    life, run, data = again(folder)
    train(run, data, ages[-1] + 3)
    other, run, data = begin(tmp_path / "whole")
    train(run, data, ages[-1] + 3)
    assert everything(life) == everything(other)
    left = [p.name for p in folder.rglob("*") if p.name.startswith(".") or p.name.endswith(".tmp")]
    assert left == []


OPERATIONS = ("step", "edit", "base", "compaction", "rename", "pin", "end", "merge")


class Trial:
    """One operation on a life in a directory, such as a step with its commit."""

    def __init__(self, work: Path, operation: str) -> None:
        self.work, self.operation, self.made = work, operation, 0
        life, run, data = begin(work / "before")
        self.batch = next(iter(data))
        run.step(self.batch)
        if operation == "edit":
            with life.program.edit("an edit before") as e:
                e.set_weight("0.bias", lambda w: w + 1)
        run.step(self.batch)
        if operation == "merge":
            run.end()
            with life.fork(work / "branch") as branch, branch.program.edit("another weight") as e:
                out = branch.program.outputs()[0]
                e.set_outputs(out=e.add("add", out, e.param("more", np.ones(3, np.float32)), name="sum"))
                e.set_weight("3.bias", lambda w: w + 2)
        life.close()
        self.old = snapshot(work / "before")
        self.states = {"old": self._state(work / "before")}
        folder = self.fresh()
        with record(folder) as self.operations:
            self.run(folder)
        self.states["new"] = self._state(folder)

    def fresh(self, tree: dict | None = None) -> Path:
        self.made += 1
        folder = self.work / f"{self.made:05d}"
        folder.mkdir()
        for name, content in sorted((self.old if tree is None else tree).items()):
            if content is None:
                (folder / name).mkdir(exist_ok=True)
            else:
                (folder / name).write_bytes(content)
        return folder

    def run(self, folder: Path) -> None:
        """Open, and do the operation."""
        gw.manual_seed(7)
        compaction.FILES = 2 if self.operation == "base" else 512
        with lf.open(folder) as life:
            match self.operation:
                case "merge":
                    life.merge(self.work / "branch")
                case "rename":
                    life.rename("another name")
                case "pin":
                    life.pin(1)
                case "compaction":
                    life.resume(step(life.program), loader())
                    compaction.compact(life.store)
                case "end":
                    life.resume(step(life.program), loader()).end()
                case _:
                    run = life.resume(step(life.program), loader())
                    if self.operation == "edit":
                        with life.program.edit("an edit") as e:
                            e.set_weight("3.bias", lambda w: w + 1)
                    run.step(self.batch)
                    life.commit()

    def _state(self, folder: Path) -> tuple:
        life = lf.open(folder, readonly=True)
        life.verify()
        pins = [life.at(commit.step).hash() for commit in life.store.pins()]
        ended = len(life.log.of("segment_end"))
        return life.age, everything(life), life.program.hash(), len(life.program.journal), life.name, pins, ended

    def check(self, folder: Path, story: str, allowed: tuple[str, ...]) -> None:
        """The life opens in an allowed state; the next commit leaves no waste."""
        state = self._state(folder)
        assert state in [self.states[name] for name in allowed], f"{story}: {state[0]} {state[3]}"
        with lf.open(folder) as life:
            life.rename("after the fault")
            assert len(life.log.of("rename")) == 1 + (state[4] == "another name")
        life = lf.open(folder, readonly=True)
        life.verify()
        assert life.cut == {"life.jsonl": 0, "journal.jsonl": 0}
        assert not [p for p in folder.rglob(".*")], story
        numbers = [int(p.stem) for p in (folder / "commits").iterdir()]
        assert sorted(numbers) == [c.number for c in life.store.commits]


class NewLife(Trial):
    """A birth, or a fork of `life` to `child`, in a directory: the new life is whole or not there."""

    def __init__(self, work: Path, operation: str) -> None:
        self.work, self.operation, self.made, self.name = work, operation, 0, "child"
        (work / "before").mkdir()
        if operation == "fork":
            life, run, data = begin(work / "before" / "life")
            train(run, data, 2)
            life.close()
        self.old = snapshot(work / "before")
        self.states = {"old": self._state(work / "before")}
        folder = self.fresh()
        with record(folder) as self.operations:
            self.run(folder)
        self.states["new"] = self._state(folder)

    def run(self, folder: Path) -> None:
        if self.operation == "birth":
            lf.birth(program(), folder / self.name, name="x").close()
        else:
            with lf.open(folder / "life") as life:
                life.fork(folder / self.name, name="x").close()

    def _state(self, folder: Path) -> tuple:
        lives = [folder / name for name in ("life", self.name)]
        return tuple(super(NewLife, self)._state(path) for path in lives if (path / "identity.json").exists())

    def check(self, folder: Path, story: str, allowed: tuple[str, ...]) -> None:
        """The new life is whole, or can be made now; nothing else is left."""
        state = self._state(folder)
        assert state in [self.states[name] for name in allowed], story
        if state == self.states["old"]:
            self.run(folder)
            assert self._state(folder) == self.states["new"], story
        names = {"life", self.name} if self.operation == "fork" else {self.name}
        assert {p.name for p in folder.iterdir()} == names, story


def made(factory: pytest.TempPathFactory, operation: str) -> Trial:
    kind = Trial if operation in OPERATIONS else NewLife
    return kind(factory.mktemp(operation), operation)


@pytest.fixture(scope="module", params=[*OPERATIONS, "birth", "fork"])
def trial(request, tmp_path_factory):
    yield made(tmp_path_factory, request.param)
    compaction.FILES = 512


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_file_operation_leaves_the_old_or_the_new_state(trial, kind):
    at = 0
    while True:
        folder, failed = trial.fresh(), False
        with inject(folder, kind, at) as log:
            try:
                trial.run(folder)
            except (OSError, GraphwrightError):
                failed = True
        hit = next((op for op in log if op.fault), None)
        if hit is None:
            break
        trial.check(folder, f"{kind} at {at}: {hit}", ("old", "new") if failed else ("new",))
        at += deep(1, 3 if kind == "ENOSPC" else 7)
    assert at > 2


def test_a_power_loss_after_any_file_operation_leaves_the_old_or_the_new_state(trial):
    disk, seen = Disk(trial.old), set()
    for done, operation in enumerate([*trial.operations, None]):
        for story, tree in disk.states(1):
            tree = {name: content for name, content in tree.items() if Path(name).name != "lock"}
            mark = frozenset(tree.items())
            if mark not in seen:
                seen.add(mark)
                trial.check(trial.fresh(tree), f"power loss after operation {done}: {story}", ("old", "new"))
        if operation is not None:
            disk.apply(operation)
    assert len(seen) > 5


def test_a_training_continues_on_a_full_disk_and_writes_everything_later(tmp_path, monkeypatch, caplog):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 2)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    train(run, data, 5)
    assert (life.lag, life.age) == (3, 5)
    assert "No space left" in str(life.reason)
    assert len([r for r in caplog.records if "could not be written" in r.message]) == 1
    assert lf.open(tmp_path / "life", readonly=True).age == 2
    with pytest.raises(FileError, match="free some space"):
        life.commit()
    monkeypatch.setattr(os, "write", real)
    train(run, data, 6)
    assert (life.lag, life.reason) == (0, None)
    life.commit(verify=True)
    whole, run, data = begin(tmp_path / "whole")
    for age in (2, 5, 6):
        train(run, data, age)
    assert everything(life) == everything(whole)
    assert lf.open(tmp_path / "life", readonly=True).program.hash() == whole.program.hash()


def test_an_error_after_the_rename_does_not_undo_the_commit(tmp_path, monkeypatch):
    """The directory could not be fsynced: the commit is there, and the next one builds on it."""
    life, run, data = begin(tmp_path / "life")
    train(run, data, 1)

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as m:
        m.setattr("graphwright.files.atomic.fsync_directory", broken)
        train(run, data, 2)
    assert (life.lag, life.store.last.step) == (0, 2)
    assert lf.open(tmp_path / "life", readonly=True).age == 2
    train(run, data, 3)
    life.verify()
    assert [c.step for c in life.store.commits] == [0, 1, 2, 3]
