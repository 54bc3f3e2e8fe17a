import errno
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import graphwright
from graphwright.errors import UsageError
from graphwright.files import AtomicFile, UnwritableTarget, atomic_write
from graphwright.testing.faults import check_atomic, inject, record

CHUNKS = [b"header", b"", bytes(range(256)) * 9, np.arange(7, dtype=np.int16)]
CONTENT = b"".join(map(bytes, CHUNKS))


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("old", [b"old", None], ids=["replacing a file", "making a file"])
def test_the_old_or_new_file_is_complete_after_every_fault_and_power_loss(tmp_path, old):
    def before(folder: Path) -> None:
        (folder / "other").write_bytes(b"not mine")
        if old is not None:
            (folder / "model").write_bytes(old)

    survived = check_atomic(tmp_path, before, lambda folder: atomic_write(folder / "model", CHUNKS), seeds=4)
    assert survived.faults > 20
    assert survived.crashes > 6


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_a_failed_save_leaves_no_files_and_names_the_system_error(tmp_path, kind):
    (tmp_path / "model").write_bytes(b"old")
    hits = 0
    for at in range(99):
        error = None
        with inject(tmp_path, kind, at) as log:
            try:
                atomic_write(tmp_path / "model", CHUNKS)
            except UnwritableTarget as raised:
                error = raised
        assert files_in(tmp_path) == {"model"}
        if error is not None:
            assert (error.errno, error.where) == (getattr(errno, kind), tmp_path / "model")
            hits += 1
        elif not any(op.fault for op in log):
            break
    assert hits > 4


def test_interrupted_calls_and_short_writes_are_retried(tmp_path):
    for kind in ("EINTR", "short"):
        for at in range(6):
            with inject(tmp_path, kind, at):
                atomic_write(tmp_path / "model", CHUNKS)
            assert (tmp_path / "model").read_bytes() == CONTENT


def test_the_directory_is_fsynced_after_the_rename_and_the_file_before(tmp_path):
    with record(tmp_path) as log:
        atomic_write(tmp_path / "model", CHUNKS)
    names = [op.name for op in log]
    moved = names.index("replace")
    assert names[moved - 1] == "fsync"
    assert log[moved - 1].path == log[moved].path
    assert [op.path for op in log[moved + 1 :] if op.name == "fsync"] == [""]


def test_an_exception_in_the_block_keeps_the_old_file_and_passes_through(tmp_path):
    (tmp_path / "model").write_bytes(b"old")

    def chunks():
        yield b"half"
        assert (tmp_path / "model").read_bytes() == b"old"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        atomic_write(tmp_path / "model", chunks())
    assert files_in(tmp_path) == {"model"}
    assert (tmp_path / "model").read_bytes() == b"old"


def test_a_write_error_that_the_caller_swallows_still_fails_the_save(tmp_path):
    (tmp_path / "model").write_bytes(b"old")

    def save():
        with AtomicFile(tmp_path / "model") as file:
            with suppress(UnwritableTarget):
                file.write(b"a" * 100)
            file.write(b"b")

    with inject(tmp_path, "ENOSPC", 1), pytest.raises(UnwritableTarget, match="ignored"):
        save()
    assert (tmp_path / "model").read_bytes() == b"old"


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_a_new_file_gets_0666_minus_the_umask_and_an_old_one_keeps_its_mode(tmp_path, umask):
    atomic_write(tmp_path / "new", b"")
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o604)
    atomic_write(tmp_path / "old", b"x")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o604


def test_a_link_is_replaced_and_its_target_is_not_written(tmp_path):
    (tmp_path / "blob").write_bytes(b"shared")
    (tmp_path / "model").symlink_to("blob")
    atomic_write(tmp_path / "model", b"mine")
    assert (tmp_path / "blob").read_bytes() == b"shared"
    assert not (tmp_path / "model").is_symlink()


def test_leftovers_of_killed_processes_are_removed_but_not_files_of_running_ones(tmp_path):
    dead = tmp_path / ".model.0123456789abcdef.tmp"
    dead.write_bytes(b"half")
    foreign = tmp_path / ".model.backup.tmp"
    foreign.write_bytes(b"keep")
    with AtomicFile(tmp_path / "model") as outer:
        outer.write(b"outer")
        atomic_write(tmp_path / "model", b"inner")
        assert (tmp_path / "model").read_bytes() == b"inner"
    assert (tmp_path / "model").read_bytes() == b"outer"
    assert files_in(tmp_path) == {"model", foreign.name}


@pytest.mark.parametrize("target", ["folder", "missing/model"])
def test_unwritable_directory_raises_a_typed_error(tmp_path, target):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnwritableTarget) as caught:
        atomic_write(tmp_path / target, b"x")
    assert caught.value.errno in (errno.EISDIR, errno.ENOENT)
    assert files_in(tmp_path) == {"folder"}


def test_transposed_arrays_are_refused(tmp_path):
    with pytest.raises(UsageError, match="C-contiguous"), AtomicFile(tmp_path / "model") as file:
        file.write(np.arange(6).reshape(2, 3).T)
    assert files_in(tmp_path) == set()


def test_names_of_the_maximum_length_can_be_saved(tmp_path):
    atomic_write(tmp_path / ("é" * 127), b"x")
    assert files_in(tmp_path) == {"é" * 127}


SAVER = """
    import sys
    from graphwright.files import atomic_write
    n = 0
    while True:
        atomic_write(sys.argv[1], [bytes([n % 256])] * 4000)
        n += 1
        if n == 1:
            print("saving", flush=True)
"""


def test_a_process_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    target = tmp_path / "model"
    environment = {**os.environ, "PYTHONPATH": str(Path(graphwright.__file__).parent.parent)}
    chance = random.Random(0)
    leftovers = 0
    for _ in range(25):
        command = [sys.executable, "-S", "-c", textwrap.dedent(SAVER), str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == b"saving\n"
            time.sleep(chance.uniform(0, 0.01))
            saver.send_signal(signal.SIGKILL)
        content = target.read_bytes()
        assert len(content) == 4000
        assert len(set(content)) == 1
        leftovers += len(files_in(tmp_path)) - 1
    assert leftovers > 0  # some were hit in the middle of a save
    atomic_write(target, b"last")
    assert files_in(tmp_path) == {"model"}
