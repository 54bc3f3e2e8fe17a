"""Saving and loading: same program, same handles, same history; every damaged bit is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
from program_samples import counters, fingerprint, outputs, random_program, tiny, weight_bytes

from graphwright.array import DTYPES, empty
from graphwright.autograd import Parameter
from graphwright.errors import UsageError
from graphwright.files import DestinationExists
from graphwright.graph import StaleHandle
from graphwright.program import Builder, InvalidProgram, NotUndoable, ProgramFileError, load, replay
from graphwright.program.save import MIDDLE, PREFIX, SUFFIX


def edited():
    """A program with a past and something undone; weights changed by structure, by value and by training."""
    p = tiny()
    with p.edit("scale") as e:
        e.set_weight("w", lambda w: w * 2)
        e.insert(p.in_edges("r")[0], "tanh", name="t")
    with p.edit("link") as e:
        e.link("x", "j", np.full((2, 3), 0.5, "f4"))
        e.cut(p.in_edges("j")[0])
    with p.edit("train"):
        p.weights["w"].own().to_numpy()[0] = 7
    p.mark("trained")
    with p.edit("rename") as e:
        e.rename("t", "act.t")
    p.undo()
    return p


@pytest.fixture
def saved(tmp_path):
    edited().save(tmp_path / "p")
    return tmp_path / "p"


def test_a_loaded_program_is_the_saved_one(saved):
    p, q = edited(), load(saved)
    assert fingerprint(q) == fingerprint(p)
    assert counters(q)[:2] == counters(p)[:2]
    assert q.graph.hash(places=True) == p.graph.hash(places=True)
    assert q.graph.next_node() == p.graph.next_node()
    assert q.graph.next_edge() == p.graph.next_edge()
    assert q.history.marks == p.history.marks
    assert q.state_hash() == p.state_hash()
    assert q.journal[-1].after == q.state_hash()


def test_another_process_undoes_to_the_origin(saved):
    origin = tiny()
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from graphwright.program import load\n"
        "p = load(sys.argv[1]); p.redo(); p.undo(4); first = p.hash(); p.redo(4)\n"
        "print(first, p.hash())"
    )
    here = os.path.dirname(__file__)
    run = subprocess.run([sys.executable, "-c", script, saved, here], capture_output=True, text=True, check=True)
    last = edited()
    last.redo()
    assert run.stdout.split() == [origin.hash(), last.hash()]


def test_handles_stay_alive_or_stale(tmp_path):
    p = tiny()
    j, cut = p.node("j"), p.in_edges("j")[0]
    with p.edit("cut") as e:
        e.cut(cut)
        gone = e.add("relu", "x", name="gone")
    with p.edit("remove") as e:
        e.remove(gone)
    q = load(p.save(tmp_path / "p"))
    assert q.path(j) == "j"
    with pytest.raises(StaleHandle, match="was gone, removed by entry 1: remove"):
        q.node(gone)
    with pytest.raises(StaleHandle, match="was h -> j, port 0, removed by entry 0: cut"):
        q.graph.endpoints(cut)
    q.undo(2)
    assert q.graph.target(cut) == j
    with q.edit("new") as e:
        assert e.add("relu", "x") not in (gone, j)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_keeps_its_bits(name, tmp_path):
    bits = np.random.default_rng(0).integers(0, 256, 48, dtype="u1")
    array = empty((6,), DTYPES[name])
    host = array.to_numpy(bits=True)
    host[...] = (bits[: host.nbytes] % 2).astype(bool)[:6] if name == "bool" else bits[: host.nbytes].view(host.dtype)
    b = Builder()
    b.output(b.const("c", array), "c")
    p = b.build()
    q = load(p.save(tmp_path / "p"), verify=True)
    assert weight_bytes(q) == weight_bytes(p)
    assert q.hash() == p.hash()


def test_empty_and_scalar_tensors(tmp_path):
    b = Builder()
    b.output(b.const("none", np.zeros((0, 3), "f4")), "none")
    b.output(b.const("one", np.float32(3).reshape(())), "one")
    p = b.build()
    assert weight_bytes(load(p.save(tmp_path / "p"), verify=True)) == weight_bytes(p)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    b, shared = Builder(), Parameter(random_program(0).weights.array("m0.w").copy(), name="shared")
    x = b.input("x", (2, 4))
    one, two = b.param("one", shared), b.param("two", shared)
    b.output(b.linear(b.linear(x, one), two), "y")
    p = b.build()
    q = load(p.save(tmp_path / "p"))
    assert q.weights["one"] is q.weights["two"]
    assert (tmp_path / "p" / "weights.safetensors").stat().st_size < 64 + 200
    assert q.hash() == p.hash()


def test_weights_are_mapped_and_written_by_copy_only(saved):
    q = load(saved)
    assert not q.weights.array("w").storage.touched
    assert q.state_hash()  # needs no byte of them
    assert not q.weights.array("w").storage.touched
    before = (saved / "weights.safetensors").read_bytes()
    q.weights["w"].own().to_numpy()[...] = 0
    assert (saved / "weights.safetensors").read_bytes() == before


def test_history_edits_can_be_read_not_undone(tmp_path):
    p = edited()
    q = load(p.save(tmp_path / "p", history="edits"))
    assert q.journal.hash == p.journal.hash
    with pytest.raises(NotUndoable, match="not kept"):
        q.undo()
    with q.edit("more") as e:
        e.rename("r", "rr")
    q.undo()
    assert q.hash() == p.hash()
    assert not (tmp_path / "p" / "history.safetensors").exists()


def test_history_none_goes_on_from_the_hash(tmp_path):
    p = edited()
    q = load(p.save(tmp_path / "p", history="none"))
    assert len(q.journal) == 0
    assert q.journal.hash == p.journal.hash
    with q.edit("more") as e:
        e.rename("r", "rr")
    assert q.journal[0].prev == p.journal.hash
    again = load(q.save(tmp_path / "q"))
    again.journal.verify()
    assert again.journal.hash == q.journal.hash


def test_saving_over_its_own_source(saved):
    q = load(saved)
    wanted = fingerprint(load(saved))
    with pytest.raises(DestinationExists):
        q.save(saved)
    q.save(saved, overwrite=True)
    assert fingerprint(load(saved, verify=True)) == wanted
    q.undo(3)  # what undo needs was mapped from the files that are gone now
    assert q.hash() == tiny().hash()


def test_sharded(tmp_path):
    p = random_program(3)
    q = load(p.save(tmp_path / "p", max_shard_size=100), verify=True)
    assert len(list((tmp_path / "p").glob("weights-*.safetensors"))) > 1
    assert outputs(q) == outputs(p)


def test_refusals_leave_nothing(tmp_path):
    p = tiny()
    with pytest.raises(UsageError, match="history"):
        p.save(tmp_path / "p", history="some")
    with p.edit("open"), pytest.raises(UsageError, match="open"):
        p.save(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_program_opens_for_repair_only(tmp_path):
    p = tiny()
    with p.edit("break", check=False) as e:
        e.set_weight("w", np.zeros((2, 5), "f4"))
    assert not p.valid
    p.save(tmp_path / "p")
    with pytest.raises(InvalidProgram) as caught:
        load(tmp_path / "p")
    assert [m.where for m in caught.value.findings] == ["h"]
    q = load(tmp_path / "p", check=False)
    assert not q.valid
    with pytest.raises(InvalidProgram):
        q.run(x=np.zeros((1, 3), "f4"))
    q.undo()
    assert q.valid
    assert q.hash() == tiny().hash()


# -- damage ---------------------------------------------------------------------------------------------------------
def flips(path, step: int):
    """Bits of a file that are flipped one at a time: all of them, or one bit of every byte."""
    size = path.stat().st_size
    return ((i, 1 << bit) for i in range(size) for bit in (range(8) if step == 1 else [i % 8]))


@pytest.mark.parametrize("name", ["program.json", "journal.jsonl", "weights.safetensors", "history.safetensors"])
def test_every_flipped_bit_is_found(name, tmp_path):
    p = tiny()
    with p.edit("scale") as e:
        e.set_weight("w", lambda w: w + 1)
    folder = p.save(tmp_path / "p")
    path = folder / name
    content = path.read_bytes()
    file = os.open(path, os.O_RDWR)
    try:
        for i, mask in flips(path, 1 if len(content) < 700 else 8):
            os.pwrite(file, bytes([content[i] ^ mask]), i)
            with pytest.raises(ProgramFileError):
                load(folder, verify=True)
            os.pwrite(file, content[i : i + 1], i)
    finally:
        os.close(file)
    assert load(folder, verify=True).hash() == p.hash()


@pytest.mark.parametrize("name", ["program.json", "journal.jsonl", "weights.safetensors", "history.safetensors"])
def test_cut_off_or_missing_files(name, saved):
    path = saved / name
    content = path.read_bytes()
    for length in {0, 1, 7, 20, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(ProgramFileError):
            load(saved)
    path.unlink()
    with pytest.raises(ProgramFileError):
        load(saved)


def test_a_payload_bit_is_found_at_the_first_touch(saved):
    path = saved / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    q = load(saved)
    with pytest.raises(ProgramFileError, match="damaged"):
        q.run(x=np.zeros((1, 3), "f4"))
    with pytest.raises(ProgramFileError):
        q.hash()


def forged(folder, change) -> None:
    """Change the body of a saved program and put the right checksum on it, as a stranger could."""
    text = (folder / "program.json").read_bytes()
    body = json.loads(text)["program"]
    body = change(body) or body
    new = json.dumps(body, separators=(",", ":")).encode()
    (folder / "program.json").write_bytes(PREFIX + sha256(new).hexdigest().encode() + MIDDLE + new + SUFFIX)


def test_a_newer_schema_is_named(saved):
    forged(saved, lambda body: body.update(schema=99))
    with pytest.raises(ProgramFileError, match="newer graphwright") as caught:
        load(saved)
    assert "pip install" in caught.value.fix


def places(value, path=()):
    """All places in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


HOSTILE = [None, -1, 2**70, 1.5, "x", "", [], {}, [[]], True, "\x00", {"float": "nan"}, [1] * 9]


def test_hostile_values_anywhere_are_typed_errors(saved):
    """With the right checksum: each place of the file gets a value of another kind; never another error, never a hang."""
    original = (saved / "program.json").read_bytes()
    body = json.loads(original)["program"]
    rng = np.random.default_rng(1)
    for n, path in enumerate(p for p in places(body) if p):
        def change(body, path=path, n=n):
            here = body
            for key in path[:-1]:
                here = here[key]
            here[path[-1]] = HOSTILE[(n + int(rng.integers(3))) % len(HOSTILE)]

        forged(saved, change)
        try:
            load(saved, verify=True)
        except (ProgramFileError, InvalidProgram):
            pass
        (saved / "program.json").write_bytes(original)
    load(saved, verify=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.pop("labels"),
        lambda b: b["graph"].update(block=2**30),
        lambda b: b["graph"]["nodes"]["columns"].pop("op"),
        lambda b: b["graph"]["nodes"]["columns"]["name"]["rows"].__setitem__(0, "w"),
        lambda b: b["graph"]["edges"]["columns"]["src_port"]["rows"].__setitem__(0, 7),
        lambda b: b["labels"].reverse(),
        lambda b: b["outputs"][0].__setitem__(1, 99),
        lambda b: b.update(next_seq=0),
        lambda b: b["weights"]["w"].update(spec=["float32", [3, 2]]),
        lambda b: b["weights"].pop("w"),
        lambda b: b["journal"].update(head="0" * 64),
        lambda b: b["files"].pop("weights.safetensors"),
        lambda b: b["stacks"]["undoable"].append(10**9),
    ],
)  # fmt: skip
def test_contradictions_are_found(change, saved):
    forged(saved, lambda body: (change(body), None)[1])
    with pytest.raises(ProgramFileError):
        load(saved)


def test_deep_nesting_and_other_texts(saved, tmp_path):
    for text in (b"", b"{}", b"[" * 100_000, b'{"checksum":"', b"\xff" * 100):
        (saved / "program.json").write_bytes(text)
        with pytest.raises(ProgramFileError):
            load(saved)
    text = b"[" * 500 + b"]" * 500
    (saved / "program.json").write_bytes(PREFIX + sha256(text).hexdigest().encode() + MIDDLE + text + SUFFIX)
    with pytest.raises(ProgramFileError, match="nest"):
        load(saved)
    with pytest.raises(ProgramFileError):
        load(tmp_path / "nowhere")


def test_a_saved_journal_replays(saved):
    p = tiny()
    replay(saved, p)
    assert p.hash() == load(saved).hash()
