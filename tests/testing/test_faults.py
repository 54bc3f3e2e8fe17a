"""The harness must catch each classic mistake of saving, and pass a save that makes none of them."""

import errno
import io
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from graphwright.errors import UsageError
from graphwright.testing.faults import KINDS, Disk, NotAtomic, Operation, check_atomic, inject, record

NEW = b"new content, longer than one byte"


def old_file(folder: Path) -> None:
    (folder / "model").write_bytes(b"old")


def stage(folder: Path, *, sync_file: bool = True, sync_folder: bool = True, loop: bool = True) -> None:
    """The correct way with a fixed temporary name, and switches to leave a step out."""
    temp = folder / ".model.tmp"
    fd = os.open(temp, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    try:
        done = 0
        while done < len(NEW):
            with suppress(InterruptedError):
                done += os.write(fd, NEW[done:])
            if done and not loop:
                break
        if sync_file:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temp, folder / "model")
    if sync_folder:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def in_place(folder: Path) -> None:
    (folder / "model").write_bytes(NEW)


def without_syncing_the_file(folder: Path) -> None:
    stage(folder, sync_file=False)


def without_syncing_the_folder(folder: Path) -> None:
    stage(folder, sync_folder=False)


def without_looking_at_short_writes(folder: Path) -> None:
    stage(folder, loop=False)


def with_errors_swallowed(folder: Path) -> None:
    with suppress(OSError):
        stage(folder)


def with_old_removed_first(folder: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(folder / "model")
    stage(folder)


def with_a_new_temporary_name_each_time(folder: Path) -> None:
    temp = folder / f".model.{os.urandom(4).hex()}"
    with open(temp, "wb") as file:
        file.write(NEW)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, folder / "model")
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def test_a_correct_save_survives_every_fault_and_every_crash(tmp_path):
    survived = check_atomic(tmp_path, old_file, stage)
    assert survived.operations == 8
    assert survived.faults > 15
    assert survived.crashes > 4


@pytest.mark.parametrize(
    ("save", "fault"),
    [
        (in_place, "EIO at operation 1: write model: the fault left an invalid state"),
        (without_syncing_the_file, "power loss .*: names arrived, content did not"),
        (without_syncing_the_folder, "power loss after operation 5 .*: only what was fsynced"),
        (without_looking_at_short_writes, "short at operation 0: write"),
        (with_errors_swallowed, "EIO at operation 0: open"),
        (with_old_removed_first, "EIO at operation 1: open"),
        (with_a_new_temporary_name_each_time, "EIO at operation 1: write .*: the next save does not clean up"),
    ],
)
def test_each_classic_mistake_is_found_at_its_fault(tmp_path, save, fault):
    with pytest.raises(NotAtomic) as caught:
        check_atomic(tmp_path, old_file, save)
    assert caught.match(fault)


def test_saving_two_files_separately_is_found_as_not_atomic(tmp_path):
    def save_both(folder: Path) -> None:
        stage(folder)
        shutil.copy(folder / "model", folder / "index")

    with pytest.raises(NotAtomic, match="old or new, whole"):
        check_atomic(tmp_path, old_file, save_both)


def test_a_save_without_a_change_is_refused(tmp_path):
    with pytest.raises(UsageError, match="changes nothing"):
        check_atomic(tmp_path, old_file, lambda folder: None)


def test_a_save_through_unobserved_calls_is_refused(tmp_path):
    unseen = io.FileIO  # writes in C, past `os` and `open`

    def save(folder: Path) -> None:
        with unseen(folder / "model", "w") as file:
            file.write(NEW)

    with pytest.raises(UsageError, match="not intercepted"):
        check_atomic(tmp_path, old_file, save)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_fault_occurs_exactly_at_the_requested_operation(tmp_path, kind):
    fd = os.open(tmp_path / "f", os.O_CREAT | os.O_WRONLY)
    os.close(fd)
    with inject(tmp_path, kind, 2 if kind == "short" else 3) as log:
        fd = os.open(tmp_path / "f", os.O_WRONLY)  # operation 0, of a short write none
        assert os.write(fd, b"one") == os.write(fd, b"two") == 3
        if kind == "short":
            assert os.write(fd, b"abcd") == 2
        else:
            with pytest.raises(OSError, match="injected into write f") as caught:
                os.write(fd, b"abcd")
            assert caught.value.errno == getattr(errno, kind)
        assert os.write(fd, b"!") == 1
        os.close(fd)
    assert [op.fault for op in log] == ["", "", "", kind, "", ""]
    assert (tmp_path / "f").read_bytes() == b"onetwo" + (b"" if kind == "EINTR" else b"ab") + b"!"


def test_other_files_are_unaffected_and_patched_calls_are_restored(tmp_path):
    calls = os.open, os.write, open, io.open
    inside, outside = tmp_path / "inside", tmp_path / "inside-not"
    inside.mkdir()
    with inject(inside, "EIO", 0) as log:
        outside.write_bytes(b"x")
    assert log == []
    assert (os.open, os.write, open, io.open) == calls


def test_text_buffered_and_path_writes_are_recorded(tmp_path):
    with record(tmp_path) as log:
        (tmp_path / "a").write_text("text")
        with open(tmp_path / "b", "w+b") as file:
            file.write(b"12345")
            file.seek(1)
            assert file.read(2) == b"23"
            file.truncate(4)
    writes = {op.path: op.data for op in log if op.name == "write"}
    assert writes == {"a": b"text", "b": b"12345"}
    assert (tmp_path / "b").read_bytes() == b"1234"


def test_calls_by_directory_descriptor_are_refused(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with record(tmp_path), pytest.raises(UsageError, match="dir_fd"):
        os.unlink("x", dir_fd=fd)
    os.close(fd)


def test_fsync_makes_names_and_contents_durable():
    disk = Disk({"f": b"old"})
    steps = [
        Operation("open", "t", handle=0, created=True),
        Operation("write", "t", handle=0, data=b"abcd"),
        Operation("replace", "t", "f"),
    ]
    for step in steps:
        disk.apply(step)
    found = dict(disk.states(seeds=0))
    assert found["everything arrived"] == {"f": b"abcd"}
    assert found["only what was fsynced arrived"] == {"f": b"old"}
    assert found["names arrived, content did not"] == {"f": b""}
    assert found["names arrived, content is torn"] == {"f": b"ab"}
    disk.apply(Operation("fsync", "t", handle=0))
    disk.apply(Operation("open", "", handle=1))
    disk.apply(Operation("fsync", "", handle=1))
    assert all(tree == {"f": b"abcd"} for _, tree in disk.states(seeds=5))
