"""The files of a saved run: arrays with checksums, strict JSON, and wall-clock times in a file of their own.

The directory of a run is written atomically. Times are stored in `clock.json` alone, so all other bytes are the same
however often the run was interrupted.
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
from graphwright.files import atomic_directory, blake2b_128, read_json
from graphwright.safetensors import Checkpoint, TensorData, write_tensors

if TYPE_CHECKING:
    from graphwright.files import StrPath

SCHEMA = 2
LIMIT = 1 << 30  # bytes of run.json
CLOCK = ("seconds", "environment")
_TAGS = {"int64": "I64", "int32": "I32", "int8": "I8", "float64": "F64", "float32": "F32"}
_DTYPES = {tag: np.dtype(name) for name, tag in _TAGS.items()}


def write_arrays(folder: Path, stem: str, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write `<stem>.safetensors`; return the checksum of each array."""
    whole = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    items = [TensorData(n, _TAGS[a.dtype.name], a.shape, a) for n, a in whole.items()]
    write_tensors(folder / f"{stem}.safetensors", items)
    return {name: blake2b_128(a) for name, a in whole.items()}


def read_arrays(folder: Path, stem: str, digests: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Read arrays and verify their checksums. Raises: ResumeMismatch, CheckpointError."""
    arrays: dict[str, np.ndarray] = {}
    with Checkpoint(folder, stem=stem) as checkpoint:
        for name, digest in digests.items():
            info = checkpoint.info(name)
            array = np.frombuffer(bytearray(checkpoint.bytes(name)), _DTYPES[info.tag]).reshape(info.shape)
            if blake2b_128(array) != digest:
                raise ResumeMismatch("an array of the saved run is damaged", where=f"{folder}: {name}", expected=digest,
                                     fix=previous_state(folder))  # fmt: skip
            arrays[name] = array
    return arrays


def write_run(folder: Path, run: Any, content: Mapping[str, Any]) -> None:
    """Write `run.json`, the common facts of all runs with the content of this one, and `clock.json`."""
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
    (folder / "run.json").write_text(text, encoding="utf-8")
    (folder / "clock.json").write_text(json.dumps(clock) + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Read `run.json`. Raises: ResumeMismatch for a damaged file or another schema; UnreadableFile if it is missing."""
    try:
        content = read_json(folder / "run.json", LIMIT)
    except ValueError as error:
        raise ResumeMismatch("run.json is damaged", where=folder, got=str(error), fix=previous_state(folder)) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ResumeMismatch("run.json has another schema", where=folder, expected=f"schema {SCHEMA}", got=schema)
    return content


def read_run(folder: Path, run: Any, content: Mapping[str, Any]) -> None:
    """Restore the common facts of all runs, except the log."""
    run.generation, run.gained, run.failures = content["generation"], content["gained"], content["failures"]
    run.counters = type(run.counters)(**content["counters"])
    run.task.test_reads = max(run.task.test_reads, content.get("test_reads", 0))
    clock = folder / "clock.json"
    if clock.is_file():
        for name, value in read_json(clock).items():
            setattr(run.counters, name, float(value))


def _state(directory: StrPath, age: int) -> Path:
    """The directory of the state that was saved `age` times ago."""
    folder = Path(directory)
    return folder.with_name(f"{folder.name}.{age}") if age else folder


def previous_state(directory: StrPath) -> str | None:
    """The advice to use the previous state, if there is one."""
    older = _state(directory, 1)
    return f"resume from the previous state in {older}" if (older / "run.json").is_file() else None


def rotate_states(directory: StrPath, keep: int) -> None:
    """Rename saved states to the next age before a new one is written; unchanged files are linked, not copied."""
    for age in range(keep - 1, 0, -1):
        younger = _state(directory, age - 1)
        if (younger / "run.json").is_file():
            with atomic_directory(_state(directory, age), overwrite=True) as folder:
                shutil.copytree(younger, folder, copy_function=os.link, dirs_exist_ok=True)


def plain(value: Any) -> Any:
    """Convert a value to strict JSON: tuples become lists, infinities and NaN become text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
