"""Saving and loading: same program, same handles, same history; every damaged bit is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from program_samples import counters, edited, fingerprint, outputs, random_program, tiny, weight_bytes

from graphwright.array import CPU, DTYPES, NDArray, Spec, Storage, bfloat16, empty, float32
from graphwright.autograd import Parameter
from graphwright.errors import UsageError
from graphwright.files import DestinationExists
from graphwright.graph import StaleHandle
from graphwright.program import Builder, InvalidProgram, NotUndoable, load, replay, weights
from graphwright.program.hashing import decode_attrs, encode_attrs
from graphwright.safetensors import Checkpoint, TensorData, write_tensors


@pytest.fixture
def saved(tmp_path):
    edited().save(tmp_path / "p")
    return tmp_path / "p"


def test_a_loaded_program_equals_the_saved_one(saved):
    p, q = edited(), load(saved)
    assert fingerprint(q) == fingerprint(p)
    assert counters(q)[:2] == counters(p)[:2]
    assert q.graph.hash(positions=True) == p.graph.hash(positions=True)
    assert q.graph.next_node() == p.graph.next_node()
    assert q.graph.next_edge() == p.graph.next_edge()
    assert q.history.marks == p.history.marks
    assert q.state_hash() == p.state_hash()
    assert q.journal[-1].after == q.state_hash()


def test_another_process_can_undo_to_the_start(saved):
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


def test_handles_stay_valid_or_stale_after_loading(tmp_path):
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


def test_history_edits_is_readable_but_cannot_be_undone(tmp_path):
    p = edited()
    q = load(p.save(tmp_path / "p", history="edits"))
    assert q.journal.hash == p.journal.hash
    with pytest.raises(NotUndoable, match="no undo data was stored"):
        q.undo()
    with q.edit("more") as e:
        e.rename("r", "rr")
    q.undo()
    assert q.hash() == p.hash()
    assert not (tmp_path / "p" / "history.safetensors").exists()


def test_history_none_continues_from_the_hash(tmp_path):
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


def test_a_program_can_be_saved_over_its_own_source(saved):
    q = load(saved)
    wanted = fingerprint(load(saved))
    with pytest.raises(DestinationExists):
        q.save(saved)
    q.save(saved, overwrite=True)
    assert fingerprint(load(saved, verify=True)) == wanted
    q.undo(3)  # what undo needs was mapped from the files that are gone now
    assert q.hash() == tiny().hash()


def test_saved_weights_can_be_sharded(tmp_path):
    p = random_program(3)
    q = load(p.save(tmp_path / "p", max_shard_size=100), verify=True)
    assert len(list((tmp_path / "p").glob("weights-*.safetensors"))) > 1
    assert outputs(q) == outputs(p)


def test_failed_saves_leave_no_files(tmp_path):
    p = tiny()
    with pytest.raises(UsageError, match="history"):
        p.save(tmp_path / "p", history="some")  # pyright: ignore[reportArgumentType]  # that is the point
    with p.edit("open"), pytest.raises(UsageError, match="open"):
        p.save(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_program_loads_only_with_check_false(tmp_path):
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


def test_weights_of_an_opened_checkpoint_hash_by_reference(tmp_path):
    """Hashes in the journal name untouched weights as `source`; after saving and loading they still do."""
    write_tensors(tmp_path / "model.safetensors", [TensorData("w", "F32", (2, 3), np.ones((2, 3), "f4"))])
    source, untouched = Checkpoint(tmp_path / "model.safetensors"), tiny()
    storage = Storage.mapped(lambda: source.bytes("w"), 24, CPU)
    untouched.weights["w"].data = NDArray(storage, float32, (2, 3))
    p = untouched.fork()
    first = p.state_hash()
    with p.edit("replace") as e:
        e.set_weight("w", np.zeros((2, 3), "f4"))
    p.undo()
    assert p.state_hash() == p.journal[0].before == first
    q = load(p.save(tmp_path / "p"))
    assert q.state_hash() == first
    q.redo()
    assert q.state_hash() == q.journal[0].after
    q = load(q.save(tmp_path / "q"))
    q.undo()
    assert q.state_hash() == first
    assert q.hash() == untouched.hash()


def opened(path, seed=0):
    """Two linear maps whose weights are untouched in a checkpoint."""
    rng = np.random.default_rng(seed)
    if not path.exists():
        tensors = {"a": (8, 3), "b": (2, 8)}
        write_tensors(path, [TensorData(k, "F32", n, rng.normal(size=n).astype("f4")) for k, n in tensors.items()])
    source = Checkpoint(path)
    b = Builder("two maps")
    w = [b.param(k, np.zeros(n, "f4")) for k, n in (("a", (8, 3)), ("b", (2, 8)))]
    b.output(b.linear(b.relu(b.linear(b.input("x", ("N", 3)), w[0])), w[1]), "y")
    p = b.build()
    for key, v in p.weights.items():
        of = Storage.mapped(lambda key=key: source.bytes(key), v.data.nbytes, CPU)
        v.data = NDArray(of, float32, v.shape)
        p.weights.refer(v.data)
    return p


def test_slices_of_an_opened_checkpoint_hash_by_reference(tmp_path, monkeypatch):
    """Their bytes are hashed on request, not by the edit; what is written to counts by its bytes."""
    p = opened(tmp_path / "m.safetensors")
    hashed = []
    real = weights.array_digest
    monkeypatch.setattr(weights, "array_digest", lambda array: (hashed.append(array), real(array))[1])
    states = [p.state_hash()]
    for gone in ([1, 4], [0], [0]):
        p.axes().of("b", 1)[0].units(gone).prune()
        states.append(p.state_hash())
    assert not hashed
    assert len(set(states)) == 4
    assert [e.after for e in p.journal] == states[1:]
    assert [p.at(i).state_hash() for i in range(3)] == states[1:]
    q = load(p.save(tmp_path / "p"))
    for r in (p, q, load(q.save(tmp_path / "q"))):
        r.undo(2)
        assert r.state_hash() == states[1]
        r.redo(2)
        assert r.state_hash() == states[3]
    again = opened(tmp_path / "m.safetensors")
    replay(list(p.journal)[:3], again)
    assert again.state_hash() == states[3]
    assert again.hash() == q.hash() == p.hash()
    other = opened(tmp_path / "m.safetensors")
    other.axes().of("b", 1)[0].units([1, 3]).prune()
    assert other.state_hash() != states[1]
    foreign = opened(tmp_path / "other.safetensors", seed=1)
    assert foreign.state_hash() == states[0]  # equal names, until its bytes are copied
    foreign.axes().of("b", 1)[0].units([1, 4]).prune()
    assert foreign.state_hash() != states[1]
    array = other.weights.array("b")
    array.to_numpy()[0, 0] += 1
    array.storage.written()
    assert other.weights.reference("b") == other.weights.digest("b") == real(array)


def test_undo_to_a_source_changed_on_disk_is_refused(saved):
    q = load(saved)
    with q.edit("replace") as e:
        e.set_weight("w", np.zeros((2, 3), "f4"))
    before = fingerprint(q)
    os.utime(saved / "weights.safetensors", ns=(0, 0))
    with pytest.raises(NotUndoable, match="cannot read the values") as caught:
        q.undo()
    assert "entry 5: replace" in str(caught.value.where)
    assert str(saved / "weights.safetensors") in str(caught.value.got)
    assert fingerprint(q) == before


def test_undo_to_a_replaced_source_restores_the_opened_bytes(saved):
    q = load(saved)
    before = q.hash()
    with q.edit("replace") as e:
        e.set_weight("w", np.zeros((2, 3), "f4"))
    (saved / "other").write_bytes(b"something else")
    (saved / "other").replace(saved / "weights.safetensors")
    q.undo()
    assert q.hash() == before


def overwritten(file):
    """The same file with other bytes, one second later."""
    content, before = bytearray(file.read_bytes()), file.stat()
    content[-4:] = b"\xff" * 4
    with file.open("r+b") as out:
        out.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    assert file.stat().st_ino == before.st_ino


@pytest.mark.parametrize("touched", [False, True])
def test_undo_to_an_overwritten_source_is_refused_even_if_it_was_read(saved, touched):
    q = load(saved)
    if touched:
        q.weights.array("w").to_numpy()
    with q.edit("replace") as e:
        e.set_weight("w", np.zeros((2, 3), "f4"))
    before = counters(q), q.structure_hash()
    overwritten(saved / "weights.safetensors")
    with pytest.raises(NotUndoable, match="cannot read the values") as caught:
        q.undo()
    assert str(saved / "weights.safetensors") in str(caught.value.got)
    assert "changed after it was opened" in str(caught.value.got)
    assert (counters(q), q.structure_hash()) == before


def test_undo_to_a_source_replaced_after_reading_succeeds(saved):
    q = load(saved)
    start = q.hash()
    with q.edit("replace") as e:
        e.set_weight("w", np.zeros((2, 3), "f4"))
    (saved / "other").write_bytes(b"something else")
    (saved / "other").replace(saved / "weights.safetensors")
    q.undo()
    assert q.hash() == start


def test_a_saved_journal_replays(saved):
    p = tiny()
    replay(saved, p)
    assert p.hash() == load(saved).hash()


VALUES = [float("nan"), float("inf"), float("-inf"), 0.0, 1.0, np.float64(2.5), np.float32("inf")]


def test_nan_and_inf_attributes_round_trip(tmp_path):
    """Each has a hash of its own, and comes back from a file as what it was."""
    seen = set()
    for i, value in enumerate(VALUES):
        b = Builder("filled")
        b.output(b.full_like(b.input("x", (2,)), value=value, name="fill"), "y")
        p = b.build()
        p.save(tmp_path / str(i))
        q = load(tmp_path / str(i))
        assert q.hash() == p.hash()
        found = q.run(x=np.zeros(2, "f4"))["y"].to_numpy()
        assert np.array_equal(found, np.full(2, value, "f4"), equal_nan=True)
        assert type(q.attrs(q.node("fill"))["value"]) is float
        seen.add(p.structure_hash())
    assert len(seen) == len(VALUES) - 1  # the infinities of two types are one


def test_attributes_of_every_type_round_trip():
    attrs = {"a": None, "b": True, "c": "text", "d": (1, (2.5, "x")), "e": bfloat16, "f": Spec(("B", 3), bfloat16)}
    assert decode_attrs(json.loads(json.dumps(encode_attrs(attrs)))) == attrs
    with pytest.raises(UsageError, match="the value of an attribute has an unsupported type"):
        encode_attrs({"a": object()})
