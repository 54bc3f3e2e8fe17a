"""A reader beside a writer that replaces the directory gets one version whole; damage is still found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

import graphwright as gw
from graphwright.files import UnreadableFile, read_whole
from graphwright.models.model import Model
from graphwright.program import ProgramFileError


def set_to(model: Model, value: float) -> None:
    with model.program.edit("set") as e:
        for node in model.program.params():
            if model.program.path(node).endswith("norm.weight"):
                e.set_weight(model.program.key(node), lambda w: 0 * w + value)


def versions(program: gw.Program) -> set[float]:
    norms = [v for key, v in program.weights.items() if key.endswith("norm.weight")]
    return {float(x) for v in norms for x in v.data.to_numpy("float32").ravel()}


WRITERS: dict[str, tuple[Callable[[Model, Path], object], Callable[[Path], gw.Program]]] = {
    "model.save": (lambda m, at: m.save(at, overwrite=True), lambda at: gw.open(at).program),
    "program.save": (lambda m, at: m.program.save(at, overwrite=True), lambda at: gw.load(at)),
    "export": (lambda m, at: m.export(at, check="none", timed=False, overwrite=True), lambda at: gw.open(at).program),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_reader_beside_a_replacing_writer_gets_one_version_whole(tmp_path: Path, kind: str) -> None:
    write, read = WRITERS[kind]
    model, at = gw.open("bundled"), tmp_path / "out"
    set_to(model, 1.0)
    write(model, at)
    stop = threading.Event()
    failed: list[BaseException] = []

    def replace() -> None:
        try:
            for value in range(2, 1000):
                if stop.is_set():
                    return
                set_to(model, float(value))
                write(model, at)
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        seen, end = [versions(read(at))], monotonic() + 10
        while (len(seen) < 10 or len(set.union(*seen)) < 2) and monotonic() < end:
            seen.append(versions(read(at)))
    finally:
        stop.set()
        writer.join()
    assert not failed
    assert all(len(found) == 1 for found in seen)
    assert len(set.union(*seen)) > 1


def test_weights_of_a_replaced_directory_are_those_that_were_opened(tmp_path: Path) -> None:
    model, at = gw.open("bundled"), tmp_path / "out"
    set_to(model, 1.0)
    model.save(at)
    opened = gw.open(at)
    set_to(model, 2.0)
    model.save(at, overwrite=True)
    assert versions(opened.program) == {1.0}
    assert versions(gw.open(at).program) == {2.0}
    opened.save(tmp_path / "copy")
    assert versions(gw.open(tmp_path / "copy").program) == {1.0}


def test_a_damaged_file_is_still_found(tmp_path: Path) -> None:
    folder = gw.open("bundled").program.save(tmp_path / "out")
    (folder / "program.json").write_bytes(b"{}")
    with pytest.raises(ProgramFileError, match="damaged"):
        gw.load(folder)


def test_reading_again_ends(tmp_path: Path) -> None:
    at, count = tmp_path / "out", 0
    at.mkdir()

    def replace() -> int:
        nonlocal count
        count += 1
        at.rename(tmp_path / f"old{count}")
        at.mkdir()
        return count

    with pytest.raises(UnreadableFile, match="replaced during each"):
        read_whole(at, replace)
    at.rename(tmp_path / "aside")
    assert read_whole(at, lambda: np.pi) == np.pi
