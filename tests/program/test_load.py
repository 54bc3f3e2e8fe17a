"""Loading what is damaged, newer, contradictory or hostile: a typed error, whatever was done to the files."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import sha256

import numpy as np
import pytest
from program_samples import edited, tiny

from graphwright.program import InvalidProgram, ProgramFileError, load
from graphwright.program.files.save import MIDDLE, PREFIX, SUFFIX
from seeds import DEEP, deep


@pytest.fixture
def saved(tmp_path):
    edited().save(tmp_path / "p")
    return tmp_path / "p"


def flips(path, step: int):
    """Bits of a file that are flipped one at a time: all of them, or one bit of every byte; in the deep profile."""
    size, step = path.stat().st_size, step if DEEP else 8
    return ((i, 1 << bit) for i in range(0, size, deep(1, 2)) for bit in (range(8) if step == 1 else [i // 2 % 8]))


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
def test_truncated_and_missing_files_are_refused(name, saved):
    path = saved / name
    content = path.read_bytes()
    for length in {0, 1, 7, 20, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(ProgramFileError):
            load(saved)
    path.unlink()
    with pytest.raises(ProgramFileError):
        load(saved)


def test_a_flipped_payload_bit_is_found_at_first_use(saved):
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
    """Change the body of a saved program and put the right checksum on it, as an attacker could."""
    text = (folder / "program.json").read_bytes()
    body = json.loads(text)["program"]
    body = change(body) or body
    new = json.dumps(body, separators=(",", ":")).encode()
    (folder / "program.json").write_bytes(PREFIX + sha256(new).hexdigest().encode() + MIDDLE + new + SUFFIX)


def test_a_newer_schema_is_refused_by_name(saved):
    forged(saved, lambda body: body.update(schema=99))
    with pytest.raises(ProgramFileError, match="newer version of graphwright") as caught:
        load(saved)
    assert "pip install" in str(caught.value.fix)


def paths_in(value, path=()):
    """Yield the path of every value inside a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from paths_in(child, (*path, key))


HOSTILE = [None, -1, 2**70, 1.5, "x", "", [], {}, [[]], True, "\x00", {"float": "nan"}, [1] * 9]


@pytest.mark.deep
def test_hostile_values_anywhere_are_typed_errors(saved):
    """With the right checksum, each value of the file is replaced by one of another type: no other error, no hang."""
    original = (saved / "program.json").read_bytes()
    body = json.loads(original)["program"]
    rng = np.random.default_rng(1)
    for n, path in enumerate(p for p in paths_in(body) if p):

        def change(body, path=path, n=n):
            here = body
            for key in path[:-1]:
                here = here[key]
            here[path[-1]] = HOSTILE[(n + int(rng.integers(3))) % len(HOSTILE)]

        forged(saved, change)
        with suppress(ProgramFileError, InvalidProgram):
            load(saved, verify=True)
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
)
def test_contradictory_files_are_refused(change, saved):
    forged(saved, lambda body: (change(body), None)[1])
    with pytest.raises(ProgramFileError):
        load(saved)


def test_deeply_nested_and_invalid_json_is_refused(saved, tmp_path):
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


def test_directories_without_a_program_are_refused(tmp_path):
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ProgramFileError, match=r"program\.json is missing\n.*graphwright\.open"):
            load(directory)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["journal.jsonl", "weights.safetensors"])
def test_a_named_pipe_among_the_files_is_refused_without_waiting(tmp_path, name):
    folder = edited().save(tmp_path / "saved")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ProgramFileError, match="regular file"):
        load(folder)
