"""Identity and log: written once, only growing; tampering is found with its line, and the log tells the whole run."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from bonsai import X, again, begin, cared, program, step, train

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import nn
from graphwright.errors import UsageError
from graphwright.graph import Chain
from graphwright.lifecycle.log import LifeLog, Mark

pytestmark = pytest.mark.usefixtures("warm")


def test_the_identity_is_written_once(tmp_path):
    life, run, data = begin(tmp_path / "life")
    path = tmp_path / "life" / "identity.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    for age in range(1, 6):
        train(run, data, age)
        life.close()
        life, run, data = again(tmp_path / "life")
        life.rename(f"name {age}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert life.name == "name 5"
    content = json.loads(path.read_text())
    assert content["name"] == "bonsai"
    assert content["structure"] == program().structure_hash()
    assert content["parent"] is None
    other = lf.birth(program(), tmp_path / "other", name="bonsai")
    assert other.identity.id != life.identity.id
    with pytest.raises(UsageError, match="invalid name"):
        life.rename("")


def test_a_life_of_another_substrate_is_refused(tmp_path):
    begin(tmp_path / "life")[0].close()
    wider = gw.trace(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3)), gw.tensor(X[:8]))
    with pytest.raises(lf.SubstrateMismatch) as mismatch:
        lf.open(tmp_path / "life", like=wider)
    assert (mismatch.value.expected, mismatch.value.got) == (16, 24)
    with lf.open(tmp_path / "life", like=program()) as life:
        name = next(n for n, a in life.program.axes().items() if a.size == 16)
        with life.program.edit("fewer neurons live") as e:
            e.cut_units(life.program.axes()[name].units([3]))
    with lf.open(tmp_path / "life", like=program()) as life:
        assert life.age == 0


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A life with two segments, a controller, an edit and an undo."""
    folder = tmp_path_factory.mktemp("written") / "life"
    life, run, data = begin(folder)
    with run:
        cared(run, data, 9)
    with life.program.edit("manual") as e:
        e.set_weight("0.bias", lambda w: w * 0)
    life.program.undo()
    with life.segment(step(life.program), data, objective="again") as run:
        cared(run, data, 13)
    life.close()
    return folder


def changed(written: Path, target: Path, name: str, change) -> Path:
    shutil.copytree(written, target)
    path = target / name
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    return target


@pytest.mark.parametrize("name", ["life.jsonl", "journal.jsonl"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b"e", b"E", 1), *lines[3:]], 3),
        (lambda lines: [*lines[:1], *lines[2:]], 2),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3),
        (lambda lines: lines[:-1], None),
        (lambda lines: [], 0),
    ],
    ids=["a changed line", "a lost line", "an added line", "a lost end", "nothing left"],
)
def test_tampering_is_found_with_its_line(written, tmp_path, name, change, line):
    last = len((written / name).read_bytes().splitlines()) - 1
    folder = changed(written, tmp_path / "copy", name, change)
    with pytest.raises(lf.LogCorrupt) as corrupt:
        lf.open(folder)
    assert corrupt.value.line == (last if line is None else line)


def test_lines_after_the_heads_are_cut_and_counted(written, tmp_path):
    folder = changed(written, tmp_path / "copy", "life.jsonl", lambda lines: [*lines, b"half a li"])
    with lf.open(folder, readonly=True) as life:
        assert life.cut == {"life.jsonl": 1, "journal.jsonl": 0}
    with lf.open(folder) as life:
        assert life.cut["life.jsonl"] == 1
    assert (folder / "life.jsonl").read_bytes() == (written / "life.jsonl").read_bytes()


def test_a_forged_event_that_fits_the_chain_contradicts_the_journal(written, tmp_path):
    """A forger who also writes the commit is found by the journal."""
    shutil.copytree(written, tmp_path / "copy")
    life = lf.open(tmp_path / "copy")
    forged = LifeLog(Chain())
    for event in life.log:
        facts = {**event.facts, "hash": "0" * 64} if event.kind == "expert_reborn" else event.facts
        forged.add(event.kind, event.step, facts)
    wrong = next(e.seq for e in forged.of("expert_reborn")) + 1
    life.log.chain.links[:] = forged.chain.links
    record = life.store.last.record
    (tmp_path / "copy" / "life.jsonl").write_text("".join(f"{line}\n" for line in forged.chain.lines()))
    length = (tmp_path / "copy" / "life.jsonl").stat().st_size
    mark = Mark(len(forged), length, forged.chain.head)
    life.store.add_base(replace(record, log=mark))
    with pytest.raises(lf.LogCorrupt, match="not there") as corrupt:
        life.verify()
    assert corrupt.value.line == wrong


def test_the_run_is_reconstructed_from_the_log_alone(written):
    lines = [json.loads(line)["entry"] for line in (written / "life.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "birth"
    ends = [line["facts"] for line in lines if line["kind"] == "segment_end"]
    assert sum(end["steps"] for end in ends) == lines[-1]["step"] == 13
    assert [(end["start"], end["steps"], end["items"]) for end in ends] == [(0, 9, 72), (9, 4, 32)]
    starts = [line["facts"] for line in lines if line["kind"] == "segment_start"]
    assert [start["objective"] for start in starts] == ["three classes", "again"]
    assert starts[0]["data"] == {"name": "TensorDataset", "items": 64, "digest": starts[0]["data"]["digest"]}
    assert starts[0]["optimizer"]["class"] == "AdamW"
    assert starts[0]["step"]["inputs"] == {"x": "f32[8, 8]", "y": "i64[8]"}
    assert [line["step"] for line in lines if line["kind"] == "expert_reborn"] == [4, 8, 12]
    assert [line["step"] for line in lines if line["kind"] == "edit"] == [9, 9]
    curve = ends[0]["curve"]["points"]
    assert [point["step"] for point in curve] == list(range(1, 10))
    assert (curve[0]["loss"], curve[-1]["loss"]) == (ends[0]["loss_first"], ends[0]["loss_last"])
    assert ends[0]["alarms"] == 1
    assert ends[0]["measured"]["pi"] == {"mean": pytest.approx(0.4), "least": 0.4}


def test_unknown_events_and_facts_are_refused():
    log = LifeLog(Chain())
    with pytest.raises(UsageError, match="unknown kind"):
        log.add("party", 0, {})
    with pytest.raises(UsageError, match="cannot represent"):
        log.add("alarm", 0, {"d": float("nan")})
    assert len(log) == 0
    log.add("alarm", 3, {"d": -4})
    assert "alarm" in str(log)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b'{"schema": 1}', b"\xff", b"[" * 100, b'{"schema": 7}'],
    ids=["empty", "no fields", "a list", "few fields", "no text", "deep", "newer"],
)
def test_a_damaged_identity_is_a_typed_error(written, tmp_path, content):
    shutil.copytree(written, tmp_path / "copy")
    (tmp_path / "copy" / "identity.json").write_bytes(content)
    with pytest.raises(lf.StoreDamaged):
        lf.open(tmp_path / "copy")
