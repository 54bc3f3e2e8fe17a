import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from graphwright.files import DestinationExists, UnwritableTarget, atomic, atomic_directory, atomic_write
from graphwright.testing.faults import check_atomic, inject, snapshot

OLD = {"out": None, "out/config.json": b"{}", "out/sub": None, "out/sub/a": b"1"}
NEW = {"out": None, "out/weights": b"w" * 100, "out/deep": None, "out/deep/er": None, "out/deep/er/b": b"2"}


def make_old(folder: Path) -> None:
    (folder / "out/sub").mkdir(parents=True)
    (folder / "out/config.json").write_bytes(b"{}")
    (folder / "out/sub/a").write_bytes(b"1")


def fill(folder: Path) -> None:
    (folder / "deep/er").mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 100)
    (folder / "deep/er/b").write_bytes(b"2")


def replace(folder: Path) -> None:
    with atomic_directory(folder / "out", overwrite=True) as fresh:
        fill(fresh)


@pytest.fixture
def no_exchange(monkeypatch):
    monkeypatch.setattr(atomic, "exchange", lambda first, second: False)


def test_replacing_leaves_a_complete_old_or_new_directory_after_every_fault_and_power_loss(tmp_path):
    survived = check_atomic(tmp_path, make_old, replace)
    assert survived.faults > 50
    assert survived.crashes > 15


def test_creating_a_directory_is_complete_or_leaves_nothing(tmp_path):
    def make(folder: Path) -> None:
        if not (folder / "out").exists():
            with atomic_directory(folder / "out") as fresh:
                fill(fresh)

    assert check_atomic(tmp_path, lambda folder: None, make).crashes > 10


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_without_an_exchange_call_every_fault_still_leaves_old_or_new(tmp_path, no_exchange, kind):
    at = 0
    for at in range(99):
        folder = tmp_path / str(at)
        folder.mkdir()
        make_old(folder)
        with inject(folder, kind, at) as log, suppress(OSError):
            replace(folder)
        found = {path: content for path, content in snapshot(folder).items() if not path.startswith(".")}
        assert found in (OLD, NEW)
        replace(folder)
        assert snapshot(folder) == NEW
        if not any(op.fault for op in log):
            break
    assert at > 15


def test_without_an_exchange_call_the_next_save_recovers_from_a_crash_between_renames(tmp_path):
    make_old(tmp_path)
    (tmp_path / "out").rename(tmp_path / ".out.0123456789abcdef.old")
    (tmp_path / ".out.fedcba9876543210.tmp").mkdir()
    with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "out", overwrite=True):
        raise ZeroDivisionError
    assert snapshot(tmp_path) == OLD


def test_readers_find_the_old_directory_until_the_block_ends(tmp_path):
    make_old(tmp_path)
    with atomic_directory(tmp_path / "out", overwrite=True) as fresh:
        fill(fresh)
        assert fresh.parent == tmp_path
        assert {p: c for p, c in snapshot(tmp_path).items() if not p.startswith(".")} == OLD
    assert snapshot(tmp_path) == NEW


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_exception_in_the_block_leaves_no_trace(tmp_path, overwrite):
    if overwrite:
        make_old(tmp_path)
    before = snapshot(tmp_path)

    def fail():
        with atomic_directory(tmp_path / "out", overwrite=overwrite) as fresh:
            fill(fresh)
            (fresh / "link").symlink_to(tmp_path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert snapshot(tmp_path) == before


def test_a_directory_with_files_is_replaced_only_on_demand_and_an_empty_one_always(tmp_path):
    make_old(tmp_path)
    with pytest.raises(DestinationExists, match="overwrite=True"), atomic_directory(tmp_path / "out"):
        pytest.fail("the block must not run")
    (tmp_path / "empty").mkdir()
    with atomic_directory(tmp_path / "empty") as fresh:
        fill(fresh)
    assert (tmp_path / "empty/weights").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced_by_a_directory(tmp_path, overwrite):
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(DestinationExists), atomic_directory(tmp_path / "out", overwrite=overwrite):
        pytest.fail("the block must not run")
    assert snapshot(tmp_path) == {"out": b"mine"}


def test_a_target_created_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(DestinationExists, match="appeared"), atomic_directory(tmp_path / "out"):
        make_old(tmp_path)
    assert snapshot(tmp_path) == OLD


def test_a_link_at_the_target_is_followed_and_kept(tmp_path):
    make_old(tmp_path)
    (tmp_path / "link").symlink_to("out")
    with atomic_directory(tmp_path / "link", overwrite=True) as fresh:
        fill(fresh)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out/weights").exists()


def test_the_mode_of_a_replaced_directory_is_kept(tmp_path):
    make_old(tmp_path)
    (tmp_path / "out").chmod(0o750)
    replace(tmp_path)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_concurrent_saves_do_not_remove_each_others_files(tmp_path):
    with atomic_directory(tmp_path / "out", overwrite=True) as outer:
        fill(outer)
        with atomic_directory(tmp_path / "out", overwrite=True) as inner:
            (inner / "other").touch()
    assert snapshot(tmp_path) == NEW


def test_a_missing_parent_is_a_typed_error(tmp_path):
    with pytest.raises(UnwritableTarget), atomic_directory(tmp_path / "no/out"):
        pytest.fail("the block must not run")


def test_exchange_swaps_two_directories_atomically_if_supported(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/x").touch()
    if atomic.exchange(tmp_path / "a", tmp_path / "b"):
        assert os.listdir(tmp_path / "b") == ["x"]
        with pytest.raises(FileNotFoundError):
            atomic.exchange(tmp_path / "a", tmp_path / "missing")
    else:
        assert os.listdir(tmp_path / "a") == ["x"]


def test_a_full_disk_inside_the_block_names_the_target(tmp_path):
    def fill_manually(folder: Path) -> None:
        with atomic_directory(folder / "out") as target:
            (target / "a").write_text("x")
            shutil.copyfile(tmp_path / "source", target / "b")

    (tmp_path / "source").write_text("y" * 100)
    (tmp_path / "work").mkdir()
    failed = 0
    for at in range(60):
        with inject(tmp_path / "work", "ENOSPC", at) as log, suppress(UnwritableTarget):
            fill_manually(tmp_path / "work")
        failed += any(op.fault for op in log)
        if (tmp_path / "work/out").exists():
            shutil.rmtree(tmp_path / "work/out")
        assert not list((tmp_path / "work").iterdir())
    assert failed > 5


def test_a_failed_save_inside_the_block_names_the_target(tmp_path):
    """The name of the folder that it is built in means nothing to anybody."""
    with (
        inject(tmp_path, "ENOSPC", 4),
        pytest.raises(UnwritableTarget) as error,
        atomic_directory(tmp_path / "out") as p,
    ):
        atomic_write(p / "a", b"x" * 100)
    assert error.value.where == tmp_path / "out"
    assert str(error.value.got).startswith("No space left on device")
    with pytest.raises(UnwritableTarget) as error, atomic_directory(tmp_path / "out"):
        atomic_write(tmp_path / "elsewhere" / "a", b"x")
    assert "elsewhere" in str(error.value.where)


def test_other_errors_of_the_block_are_passed_on(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_directory(tmp_path / "out"):
        (tmp_path / "nowhere").read_text()
    assert not (tmp_path / "out").exists()


def test_an_obstructed_target_is_reported_with_a_working_fix(tmp_path):
    (tmp_path / "afile").write_text("x")

    def error_of(target, write):
        with pytest.raises(UnwritableTarget) as caught:
            write(target)
        return caught.value

    def make(target):
        with atomic_directory(target):
            pass

    for write in (make, atomic.check_free, lambda target: atomic_write(target, b"x")):
        for target in (tmp_path / "afile/x", tmp_path / "afile/x/y"):
            error = error_of(target, write)
            assert "is a file" in error.what
            assert "mkdir" not in str(error)
            assert error.expected == f"{tmp_path / 'afile'} to be a directory"
        assert error_of(tmp_path / "no ne/x", write).fix == f"mkdir -p '{tmp_path / 'no ne'}'"


@pytest.mark.linux
def test_a_directory_that_refuses_new_files_is_named():
    for write in (lambda: atomic_write("/proc/x", b"x"), lambda: atomic_directory("/proc/x").__enter__()):
        with pytest.raises(UnwritableTarget) as caught:
            write()
        assert "in /proc" in str(caught.value)
        assert caught.value.got
        assert caught.value.errno
