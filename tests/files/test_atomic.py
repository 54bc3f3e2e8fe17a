import errno
import os
import random
import signal
import socket
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
from graphwright.safetensors import TensorData, write_checkpoint
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


def test_special_files_are_refused_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "socket"):
            with pytest.raises(UnwritableTarget, match="pipe, socket or device") as caught:
                atomic_write(tmp_path / name, b"x")
            assert caught.value.where == tmp_path / name
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert files_in(tmp_path) == {"pipe", "socket"}


def test_a_directory_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnwritableTarget, match="choose a file name"), AtomicFile(tmp_path / "folder"):
        pytest.fail("the file was opened")


HALF = """
    import ctypes, os, signal, sys
    from graphwright.files import AtomicFile, atomic_directory
    if os.getuid() == 0:
        os.setuid(65534)  # the superuser may read all modes
    os.chdir(sys.argv[1])
    os.umask(0o022)
    if sys.argv[2] == "file":
        with AtomicFile("target") as file:
            file.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        with atomic_directory("target", overwrite=True) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "weights").write_bytes(b"half")
            (folder / "sub").chmod(0o555)
            os.kill(os.getpid(), signal.SIGKILL)
"""
WHOLE = HALF.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass")


@pytest.mark.parametrize(("kind", "mode"), [("file", 0o600), ("file", 0o400), ("file", 0o200), ("file", 0),
                                            ("directory", 0o755), ("directory", 0o555)])  # fmt: skip
def test_the_next_save_removes_leftovers_of_any_mode(tmp_path, kind, mode):
    folder = tmp_path / "any"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o111)
    target = folder / "target"
    target.touch() if kind == "file" else target.mkdir()
    target.chmod(mode)
    if os.getuid() == 0:
        os.chown(target, 65534, 65534)
    environment = {**os.environ, "PYTHONPATH": str(Path(graphwright.__file__).parent.parent)}
    for script, code in ((HALF, -signal.SIGKILL), (HALF, -signal.SIGKILL), (WHOLE, 0)):
        command = [sys.executable, "-S", "-c", textwrap.dedent(script), str(folder), kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert len(files_in(folder)) == (2 if code else 1)  # one leftover, not two
    assert stat.S_IMODE(target.stat().st_mode) == mode


def test_without_locks_leftovers_are_removed_after_a_day(tmp_path, monkeypatch):
    def no_locks(fd, flags):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", no_locks)
    old, new = (tmp_path / f".model.{digit * 16}.tmp" for digit in "01")
    for path, age in ((old, 90_000), (new, 80_000)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age, time.time() - age))
    with AtomicFile(tmp_path / "model") as file:
        file.write(b"whole")
        atomic_write(tmp_path / "model", b"another")  # does not remove the open one
    assert files_in(tmp_path) == {"model", new.name}
    assert (tmp_path / "model").read_bytes() == b"whole"


def test_saves_of_another_number_of_shards_sweep_leftovers(tmp_path):
    left = tmp_path / ".model-00001-of-00002.safetensors.0123456789abcdef.tmp"
    foreign = tmp_path / ".state.safetensors.0123456789abcdef.tmp"
    for path in (left, foreign):
        path.write_bytes(b"half")
    write_checkpoint(tmp_path, [TensorData("a", "F32", (1,), lambda: b"\0" * 4)])
    assert files_in(tmp_path) == {"model.safetensors", foreign.name}
