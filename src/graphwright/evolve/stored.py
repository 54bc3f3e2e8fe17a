"""What saved runs have in common: arrays with checksums, strict JSON, and times apart.

A run is a directory that appears whole or not at all. Wall-clock times lie in `clock.json`: all other bytes are the
same however often the run was interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.evolve.errors import ResumeMismatch
from graphwright.evolve.evolution import Counters
from graphwright.files import atomic_directory, blake2b_128, read_json
from graphwright.safetensors import Checkpoint, TensorData, write_tensors

if TYPE_CHECKING:
    from graphwright.files import StrPath

SCHEMA = 1
LIMIT = 1 << 30  # bytes of run.json
CLOCK = ("seconds", "environment")
_TAGS = {"int64": "I64", "int32": "I32", "int8": "I8", "float64": "F64", "float32": "F32"}
_KINDS = {tag: np.dtype(name) for name, tag in _TAGS.items()}


def write_arrays(place: Path, stem: str, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write `<stem>.safetensors`; the checksum of each array."""
    whole = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    items = [TensorData(n, _TAGS[a.dtype.name], a.shape, a) for n, a in whole.items()]
    write_tensors(place / f"{stem}.safetensors", items)
    return {name: blake2b_128(a) for name, a in whole.items()}


def read_arrays(folder: Path, stem: str, digests: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The arrays, each checked. Raises: ResumeMismatch, CheckpointError."""
    arrays: dict[str, np.ndarray] = {}
    with Checkpoint(folder, stem=stem) as checkpoint:
        for name, digest in digests.items():
            info = checkpoint.info(name)
            array = np.frombuffer(bytearray(checkpoint.bytes(name)), _KINDS[info.tag]).reshape(info.shape)
            if blake2b_128(array) != digest:
                raise ResumeMismatch("the bytes of an array are damaged", where=f"{folder}: {name}", expected=digest,
                                     fix=before(folder))  # fmt: skip
            arrays[name] = array
    return arrays


def write_run(place: Path, run: Any, content: Mapping[str, Any]) -> None:
    """Write `run.json`: what runs of all kinds have, and the content of this one; and the times beside it."""
    counters = asdict(run.counters)
    clock = {name: counters.pop(name) for name in CLOCK}
    common = {
        "schema": SCHEMA,
        "task": run.task.name,
        "task_hash": run.task.hash(),
        "settings": run.settings.to_json(),
        "seed": run.seed,
        "generation": run.generation,
        "gained": run.gained,
        "counters": counters,
        "test_reads": run.task.test_reads,
        "failures": run.failures,
        "log": [asdict(line) for line in run.log],
    }
    text = json.dumps(plain(common | dict(content)), indent=1) + "\n"
    (place / "run.json").write_text(text, encoding="utf-8")
    (place / "clock.json").write_text(json.dumps(clock) + "\n", encoding="utf-8")


def read_run(folder: Path, run: Any, content: Mapping[str, Any]) -> None:
    """Give a run what runs of all kinds have, but for the log."""
    run.generation, run.gained = content["generation"], content["gained"]
    run.counters, run.failures = Counters(**content["counters"]), content["failures"]
    run.task.test_reads = max(run.task.test_reads, content.get("test_reads", 0))
    clock = folder / "clock.json"
    if clock.is_file():
        for name, value in read_json(clock).items():
            setattr(run.counters, name, float(value))


def former(directory: StrPath, age: int) -> Path:
    """Where the state lies that was saved `age` times before."""
    place = Path(directory)
    return place.with_name(f"{place.name}.{age}") if age else place


def before(directory: StrPath) -> str | None:
    """What helps where a state is damaged: the one before, if it is there."""
    older = former(directory, 1)
    return f"the state before it is in {older}" if (older / "run.json").is_file() else None


def keep_former(directory: StrPath, keep: int) -> None:
    """Before a state is written, those before it move on by one; a file that did not change is not copied."""
    for age in range(keep - 1, 0, -1):
        younger = former(directory, age - 1)
        if (younger / "run.json").is_file():
            with atomic_directory(former(directory, age), overwrite=True) as place:
                shutil.copytree(younger, place, copy_function=os.link, dirs_exist_ok=True)


def plain(value: Any) -> Any:
    """As strict JSON has it: infinities as text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def number(value: Any) -> float:
    """A number that may stand as text."""
    return float(value)
