"""The store: what a commit writes, compaction and pins, gaps, and files that attack it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bonsai import again, begin, everything, program, train
from safetensors.numpy import load_file, save_file

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import optim
from graphwright.autograd import Tensor
from graphwright.errors import GraphwrightError
from graphwright.lifecycle import compaction, contents, writer
from graphwright.lifecycle.store import Store
from safetensors import safe_open
from seeds import deep

pytestmark = pytest.mark.usefixtures("warm")
EXPERTS = 64


class Experts:
    """A step that trains some of 64 experts, each a matrix of its own, by gradients of the others that are None."""

    def __init__(self) -> None:
        b = gw.Builder("experts")
        x, total = b.input("x", (4, 16)), None
        for i in range(EXPERTS):
            w = b.param(f"experts.{i}", np.full((32, 16), i / 64, np.float32))
            total = b.linear(x, w) if total is None else b.add(total, b.linear(x, w))
        assert total is not None
        b.output(total, "y")
        self.source, self.inputs = b.build(), {"x": None}
        self.optimizer = optim.Adam(self.source, 1e-2)
        self.settings = SimpleNamespace(scaler=None)
        self.touched: Sequence[int] = range(0)

    def variables(self):
        return {}

    def options(self):
        return {"kind": "eager"}

    def refresh(self):
        """An eager step has nothing to update."""

    def __call__(self, feeds):
        for p in self.source.parameters():
            p.grad = None
        for i in self.touched:
            v = self.source.weights[f"experts.{i}"]
            v.grad = Tensor(gw.tensor(np.full((32, 16), 0.1 * (i + 1), np.float32)).data)
        self.optimizer.step()
        return gw.tensor(1.0)


def experts(folder: Path, **options) -> tuple[lf.Life, lf.Segment, Experts]:
    run: Any = Experts()
    life = lf.birth(run.source, folder, name="experts", **options)
    return life, life.segment(run), run


def test_a_commit_writes_the_experts_that_were_trained(tmp_path):
    life, run, train_ = experts(tmp_path / "life")
    run.step({"x": 0})
    full = life.store.live_bytes
    for touched in (range(4), range(60, 64), range(10, 11), range(0)):
        train_.touched = touched
        run.step({"x": 0})
        commit = life.commit(verify=True)
        found = load_file(commit.path)
        names = {n for n in found if n.startswith("model.")}
        assert names == {f"model.experts.{i}" for i in touched}
        assert {n for n in found if n.startswith("optimizer.")} == {
            f"optimizer.adam.experts.{i}.{label}" for i in touched for label in ("m", "v", "steps")
        }
    assert life.store.commits[-4].nbytes < 0.1 * full
    assert len(load_file(life.store.last.path)) == 0


def test_no_change_is_missed_and_no_clean_tensor_is_written(tmp_path):
    """Random experts, manual writes in place, replaced arrays, edits and undo: `verify` compares all digests."""
    life, run, train_ = experts(tmp_path / "life")
    chance = np.random.default_rng(0)
    p, before = train_.source, {}
    for _ in range(deep(1000, 60)):
        train_.touched = [int(i) for i in chance.choice(EXPERTS, 3, replace=False)]
        run.step({"x": 0})
        action, key = chance.integers(6), f"experts.{chance.integers(EXPERTS)}"
        if action == 0:  # manual, in place
            p.weights[key].assign(p.weights[key] * 2.0)
        elif action == 1:  # a write of the same bytes
            p.weights[key].assign(p.weights[key] * 1.0)
        elif action == 2:
            with p.edit("set") as e:
                e.set_weight(key, lambda w: w + 1)
        elif action == 3 and p.history.undoable:
            p.undo()
        elif action == 4:  # another array of the same bytes
            p.weights[key].data = p.weights[key].data.copy()
        commit = life.commit(verify=True)
        now = everything(life)
        written = {n for n in commit.record.tensors if n.startswith(("model.", "optimizer."))}
        if commit.number != before.get("number") and not commit.record.base:
            assert all(before.get(n) != now[n] for n in written)
        before = {**now, "number": commit.number}


def test_between_edits_a_commit_lists_no_variables_and_hashes_what_changed(tmp_path, monkeypatch):
    life, run, train_ = experts(tmp_path / "life")
    for _ in range(2):  # the first makes moments
        run.step({"x": 0})
    hashed, listed = [], []
    real, listing = contents.digest_of, contents.training_variables
    monkeypatch.setattr(contents, "digest_of", lambda spec, data: (hashed.append(1), real(spec, data))[1])
    monkeypatch.setattr(contents, "training_variables", lambda *a: (listed.append(1), listing(*a))[1])
    for i in range(8):
        train_.touched = range(i, i + 3)
        hashed.clear()
        run.step({"x": 0})
        assert len(life.store.last.infos) == len(hashed) == 3 * 4  # weight, two moments, steps
        assert not listed
    with train_.source.edit("one more change") as e:
        e.set_weight("experts.40", lambda w: w + 1)
    hashed.clear()
    run.step({"x": 0})
    assert len(listed) == 1
    assert "model.experts.40" in life.store.last.infos
    assert len(hashed) < 20
    life.commit(verify=True)


@pytest.mark.parametrize("share", [1e-9, 1e9])
def test_commits_of_a_thread_take_a_bounded_share_of_the_time(tmp_path, share, monkeypatch):
    monkeypatch.setattr(writer, "SHARE", share)
    life, run, data = begin(tmp_path / "life", asynchronous=True)
    life._writer.wait()
    train(run, data, 1)
    life._writer.wait()
    first = life.store.last.step
    for age in range(2, 6):
        train(run, data, age)
        life._writer.wait()
    assert (first, life.lag) == ((0, 5) if share < 1 else (1, 0))
    life.commit()
    assert life.lag == 0
    train(run, data, 9)
    life.close()
    assert lf.open(tmp_path / "life", readonly=True).age == 9


def test_compaction_bounds_the_space_and_keeps_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "SLACK", 0)
    life, run, train_ = experts(tmp_path / "life")
    largest = 0
    for i in range(deep(10_000, 120)):
        train_.touched = [i % EXPERTS]
        run.step({"x": 0})
        largest = max(largest, life.store.last.nbytes)
        assert life.store.nbytes <= 2 * life.store.live_bytes + largest
        on_disk = sum(p.stat().st_size for p in (tmp_path / "life" / "commits").iterdir())
        assert on_disk == life.store.nbytes
    assert life.store.commits[0].number > 1
    assert not life.log.of("compaction")  # where all weights change, each commit would add a line
    life.commit(verify=True)
    life.verify()
    assert everything(lf.open(tmp_path / "life", readonly=True)) == everything(life)
    assert len(list((tmp_path / "life" / "structure").iterdir())) == 1


def test_many_commits_are_compacted_and_pinned_steps_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "FILES", 6)
    life, run, data = begin(tmp_path / "life")
    hashes = {}
    for age in range(1, 20):
        train(run, data, age)
        hashes[age] = life.program.hash()
        assert len(life.store.commits) <= 6
        if age == 5:
            life.pin()
        if age == 8:
            life.pin(7)
    life.close()
    with lf.open(tmp_path / "life", readonly=True) as life:
        kept = {c.step for c in (*life.store.commits, *life.store.pins())}
        assert {5, 7, 19} <= kept
        assert {step: life.at(step).hash() for step in kept} == {step: hashes[step] for step in kept}
        with pytest.raises(lf.StepGone) as gone:
            life.at(2)
        assert gone.value.nearest == 5
        life.verify()
    twin = lf.open(tmp_path / "life")
    child = twin.fork(tmp_path / "child", step=7)
    assert child.program.hash() == hashes[7]
    twin.compact()
    assert len(twin.store.commits) == 2  # the base, and the event
    assert [e.kind for e in twin.log][-1] == "compaction"
    assert twin.at(7).hash() == hashes[7]


def test_arrays_of_an_open_life_outlive_the_files_that_were_compacted(tmp_path):
    life, run, data = begin(tmp_path / "life")
    train(run, data, 4)
    wanted = life.program.hash()
    life.close()
    with lf.open(tmp_path / "life") as life:
        life.compact()
        assert life.program.hash() == wanted


def test_an_earlier_commit_can_be_opened_and_what_is_after_it_goes(tmp_path):
    life, run, data = begin(tmp_path / "life")
    hashes = {}
    for age in (1, 2, 3, 4):
        train(run, data, age)
        hashes[age] = life.program.hash()
    number = life.store.commits[2].number
    life.close()
    with lf.open(tmp_path / "life", commit=number, readonly=True) as life:
        assert life.program.hash() == hashes[life.age] == hashes[2]
    assert lf.open(tmp_path / "life", readonly=True).age == 4
    lf.open(tmp_path / "life", commit=number).close()
    with lf.open(tmp_path / "life") as life:
        assert life.age == 2
        life.verify()
    with pytest.raises(lf.NoLife, match="no such commit"):
        lf.open(tmp_path / "life", commit=99)


class SlowWriter:
    """Lets each commit wait for a permit."""

    def __init__(self, monkeypatch) -> None:
        self.go, real = threading.Semaphore(0), Store.write

        def write(store, batch, **options):
            assert self.go.acquire(timeout=30)
            return real(store, batch, **options)

        monkeypatch.setattr(Store, "write", write)


def test_a_slow_disk_delays_no_step_and_each_commit_is_a_whole_step(tmp_path, monkeypatch):
    life, run, data = begin(tmp_path / "life", asynchronous=True)
    slow, states = SlowWriter(monkeypatch), {}
    for age in range(1, 13):
        train(run, data, age)
        states[age] = life.program.hash()
        if age % 4 == 0:
            slow.go.release()
            life._writer.wait()
    assert life.lag > 0
    slow.go.release(100)
    life.close()
    opened = lf.open(tmp_path / "life", readonly=True)
    steps = [c.step for c in opened.store.commits]
    assert len(steps) < 8
    assert steps == sorted(steps)
    assert {s: opened.at(s).hash() for s in steps if s} == {s: states[s] for s in steps if s}
    assert opened.age == 12


def test_a_failure_in_the_writers_thread_reaches_the_training(tmp_path, monkeypatch):
    life, run, data = begin(tmp_path / "life", asynchronous=True)
    train(run, data, 1)
    life.commit()

    def broken(store, batch, **options):
        raise RuntimeError("a defect")

    with monkeypatch.context() as m:
        m.setattr(Store, "write", broken)
        train(run, data, 2)
        with pytest.raises(RuntimeError, match="a defect"):
            life.commit()
    life.commit(verify=True)
    assert life.lag == 0


@pytest.mark.parametrize("durable", ["power", "process"])
def test_without_durability_nothing_is_fsynced(tmp_path, durable, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(fd))
    life, run, data = begin(tmp_path / "life", durable=durable)
    calls.clear()
    train(run, data, 3)
    assert bool(calls) == (durable == "power")
    life.close()
    life, run, data = again(tmp_path / "life", durable=durable)
    assert run.steps == 3


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "life"
    life, run, data = begin(folder)
    train(run, data, 4)
    life.close()
    return folder


def test_a_missing_commit_is_a_gap_and_the_state_before_it_is_offered(written, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    (folder / "commits" / "00000003.safetensors").unlink()
    with pytest.raises(lf.StoreGap) as gap:
        lf.open(folder)
    assert gap.value.number == 3
    assert "commit=2" in str(gap.value.fix)
    assert lf.open(folder, commit=2, readonly=True).age == 1
    (folder / "commits" / "00000001.safetensors").unlink()
    with pytest.raises(lf.StoreGap):
        lf.open(folder, commit=2)


def test_every_flipped_byte_of_a_commit_is_found(written, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    path = folder / "commits" / "00000003.safetensors"
    good, chance = path.read_bytes(), np.random.default_rng(0)
    for at in chance.integers(len(good), size=60):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << chance.integers(8)]) + good[at + 1 :])
        with pytest.raises(GraphwrightError), lf.open(folder, readonly=True) as life:
            life.verify()
    path.write_bytes(good)
    lf.open(folder, readonly=True).verify()


def rewritten(path: Path, **changes) -> None:
    """Write a commit file again with other fields of its record."""
    tensors = load_file(path)
    with safe_open(path, "np") as file:
        record = json.loads(file.metadata()["graphwright.life"])
    save_file(tensors, path, {"graphwright.life": json.dumps({**record, **changes}), "format": "pt"})


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 4}, {"number": -1}, {"number": "3"}, {"schema": 2}, {"step": -1}, {"base": 1},
        {"previous": "0" * 32}, {"structure": "../../../etc/passwd"}, {"structure": "0" * 32},
        {"tensors": {}}, {"tensors": []},
        {"gone": ["a", 1]}, {"gone": "x"}, {"log": [1]}, {"log": [99, 1, "x"]}, {"journal": [0, 10**9, "0" * 64]},
        {"states": 1}, {"training": {}}, {"training": []}, {"unknown": 1}, {"references": {"model.none": "x"}},
        {"states": {"loader": ["dict"] * 90}}, {"step": 10**30},
    ],
    ids=lambda changes: str(changes)[:40],
)  # fmt: skip
def test_hostile_metadata_is_a_typed_error(written, tmp_path, changes):
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    last = max((folder / "commits").iterdir())
    rewritten(last, **changes)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(GraphwrightError):
        again(folder)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"} == before


def test_files_of_other_names_and_kinds_are_refused(written, tmp_path):
    for name, make in {
        "notes.txt": lambda p: p.write_text("x"),
        "1.safetensors": lambda p: p.write_text("x"),
        "00000099.safetensors": lambda p: p.mkdir(),
        "00000100.safetensors": os.mkfifo,
        "00000101.safetensors": lambda p: p.write_bytes(b"\x80\x02pickle..."),
    }.items():
        folder = tmp_path / f"copy of {name}"
        shutil.copytree(written, folder)
        make(folder / "commits" / name)
        with pytest.raises(GraphwrightError):
            lf.open(folder)


def test_a_model_lives_and_is_exported(tmp_path):
    model = gw.open("bundled")
    with lf.birth(model, tmp_path / "life", name="bundled", durable="process") as life:
        receipt = life.export(tmp_path / "out", check="none")
        assert receipt.level == 1
        assert [e.kind for e in life.log][-1] == "export"
        wanted = model.program.hash()
        state = model.program.state_hash()
    with lf.open(tmp_path / "life", like=gw.open("bundled")) as life:
        assert life.program.state_hash() == state
        assert life.program.hash() == wanted
        ids = np.array([[84, 104, 101]])
        np.testing.assert_array_equal(life.model.logits(ids), model.logits(ids))
        life.snapshot(tmp_path / "saved")
    assert gw.load(tmp_path / "saved").hash() == wanted
    with pytest.raises(GraphwrightError, match="no model to export"):
        lf.open(tmp_path / "life", readonly=True).export(tmp_path / "x")
    with pytest.raises(lf.SubstrateMismatch):
        lf.open(tmp_path / "life", like=program())


@pytest.mark.parametrize("name", ["weights.x", "model", "../../model.x"])
def test_tensors_of_unknown_names_are_refused(written, tmp_path, name):
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    path = max((folder / "commits").iterdir())
    with safe_open(path, "np") as file:
        record = json.loads(file.metadata()["graphwright.life"])
    record["tensors"] = {name: next(iter(record["tensors"].values()))}
    metadata = {"graphwright.life": json.dumps(record), "format": "pt"}
    save_file({name: np.zeros(3, np.float32)}, path, metadata)
    with pytest.raises(lf.CommitDamaged, match="no commit"):
        lf.open(folder)
