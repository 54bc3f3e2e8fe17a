"""`gw.save` and `gw.load`: dicts, lists and numbers with tensors in one safetensors file, and programs in directories.

A dict from text to tensors is an ordinary safetensors file. Any other value has its tree in the metadata, as JSON in
which a tensor is its key, an array. No code is ever run by loading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array import BY_TAG, Device, NDArray, from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.files import JsonError, StrPath, parse_json
from graphwright.program.errors import ProgramFileError
from graphwright.program.files.load import load as load_program
from graphwright.safetensors import CheckpointError, TensorData, TensorFile, write_tensors
from graphwright.safetensors.reader import refuse_by_name

_TREE = "graphwright.value"
_PLAIN = (str, bool, int, type(None))
_DEPTH = 64


def save(obj: Any, f: StrPath) -> None:
    """Write a value to a safetensors file, atomically: dicts, lists, tuples, numbers, texts, None, tensors, arrays.

    State dicts of modules, optimizers, schedules and generators are such values; programs and models have `save`.

    Args:
        f: path; suffixes of pickle files, such as .pt, are refused, because torch would fail to read the file.
    Raises: UsageError for another value, before anything is written; UnsafeFile for such a suffix; FileError.
    """
    refuse_by_name(Path(f))
    tree, tensors = flattened(obj)
    flat = isinstance(obj, Mapping) and len(obj) == len(tensors) and all(n in tensors for n in obj)
    metadata = {} if flat and tensors else {_TREE: json.dumps(tree, allow_nan=False)}
    items = [
        TensorData(key, a.dtype.safetensors, a.shape, lambda a=a: np.ascontiguousarray(a.to_numpy(bits=True)))
        for key, a in tensors.items()
    ]
    write_tensors(f, items, metadata)


def load(
    f: StrPath, check: bool = True, verify: bool = False, *, map_location: Device | str | None = None,
    weights_only: bool = True,
) -> Any:  # fmt: skip
    """Read a value that `save` wrote, a safetensors file as a dict of tensors, or a saved program from its directory.

    Args:
        check, verify: of a program; see `graphwright.program.load`.
        map_location: device of the tensors; the CPU by default.
        weights_only: accepted as in torch, without an effect: files contain no code.
    Raises: ProgramFileError, InvalidProgram; CheckpointError for a damaged file, UnsafeFile for a pickle.
    """
    is_file = False
    with suppress(TypeError, ValueError):  # for an invalid path `load_program` has the error
        is_file = Path(f).is_file()
    device = None if map_location is None else Device.parse(map_location)
    return _read(Path(f), device) if is_file else load_program(f, check, verify)


def _read(path: Path, device: Device | None) -> Any:
    with TensorFile(path) as file:
        tensors: dict[str, Tensor] = {}
        for info in file.infos:
            if info.tag not in BY_TAG:
                raise CheckpointError("unknown dtype of a tensor", where=f"{path}: {info.key}", got=info.tag)
            kind = BY_TAG[info.tag]
            host = np.frombuffer(bytearray(file.bytes(info.key)), kind.numpy).reshape(info.shape)
            made = Tensor(from_numpy(host, bits=kind))
            tensors[info.key] = made if device is None else made.to(device)
        text = file.metadata.get(_TREE)
    if text is None:
        return tensors
    return unflattened(parse_json(text.encode(), nesting=2 * _DEPTH, where=path), tensors, path)


@contextmanager
def _damage(path: object) -> Iterator[None]:
    try:
        yield
    except (JsonError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProgramFileError("the saved value is damaged", where=path, got=str(error)) from error


def flattened(obj: Any) -> tuple[Any, dict[str, NDArray]]:
    """Return the tree of a value, as JSON values, and its tensors by key. Raises: UsageError for another value."""
    tensors: dict[str, NDArray] = {}
    return _written(obj, "", tensors, {}, 0), tensors


def unflattened(tree: Any, tensors: Mapping[str, Any], where: object = None) -> Any:
    """Return the value of a tree that `flattened` returned. Raises: ProgramFileError for a damaged one."""
    with _damage(where):
        return _made(tree, tensors)


# -- the tree: JSON values, in which lists begin with their kind -------------------------------------------------------
def _written(value: Any, path: str, tensors: dict[str, NDArray], known: dict[int, str], depth: int) -> Any:
    """Return a value as JSON, and collect its tensors; `known` maps ids of tensors to their keys."""
    if depth > _DEPTH:
        raise UsageError("the value is nested too deeply, or contains itself", where=path, expected=f"{_DEPTH} levels")
    inner = lambda v, name: _written(v, f"{path}.{name}" if path else str(name), tensors, known, depth + 1)  # noqa: E731
    if isinstance(value, Tensor | NDArray | np.ndarray):
        if id(value) not in known:
            array = value.concrete("save") if isinstance(value, Tensor) else value
            first = path or "value"
            key = next(k for k in chain([first], (f"{first}#{i}" for i in count(2))) if k not in tensors)
            known[id(value)] = key
            tensors[key] = from_numpy(np.array(array)) if isinstance(array, np.ndarray) else array
        return ["tensor", known[id(value)]]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if isfinite(value) else ["number", str(value)]
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return ["dict", *([inner(k, "key"), inner(v, k)] for k, v in value.items())]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *(inner(v, i) for i, v in enumerate(value))]
    fix = "save dicts, lists, numbers, texts and tensors"
    fix = next((f"call obj.{n}" for n in ("save", "state_dict") if hasattr(value, n)), fix)
    raise UsageError("a value of this type cannot be saved", where=path or None, got=type(value).__name__, fix=fix)


def _made(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of a JSON tree."""
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind == "dict":
        return {_made(key, tensors): _made(value, tensors) for key, value in rest}
    if kind in ("list", "tuple"):
        parts = [_made(part, tensors) for part in rest]
        return parts if kind == "list" else tuple(parts)
    return {"tensor": lambda: tensors[rest[0]], "number": lambda: float(rest[0])}[kind]()
