"""What saved runs have in common: arrays with checksums, strict JSON, and times apart.

A run is a directory that appears whole or not at all. Wall-clock times lie in `clock.json`: all other bytes are the
same however often the run was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.evolve.errors import ResumeMismatch
from graphwright.files import blake2b_128
from graphwright.safetensors import Checkpoint, TensorData, write_tensors

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
                raise ResumeMismatch("the bytes of an array are damaged", where=f"{folder}: {name}", expected=digest)
            arrays[name] = array
    return arrays


def write_clock(place: Path, counters: Any) -> None:
    """The times."""
    clock = {name: getattr(counters, name) for name in CLOCK}
    (place / "clock.json").write_text(json.dumps(clock) + "\n", encoding="utf-8")


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
