"""Opening a model: config, headers, key check, graph. No weight byte is read; weights stay mapped until used."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import BY_TAG, CPU, NDArray, Storage, dtype, empty, from_numpy, random
from graphwright.array import dtype as array_dtype
from graphwright.autograd import Parameter
from graphwright.errors import UsageError
from graphwright.models.architectures.architecture import find
from graphwright.models.architectures.config import Config
from graphwright.models.errors import ModelNotFound, TensorMismatch, UnsupportedDType
from graphwright.models.model import Model
from graphwright.models.saved import is_saved, open_saved
from graphwright.models.tokenizer import AutoTokenizer, ByteTokenizer, Tokenizer, find_tokenizer
from graphwright.program import Builder
from graphwright.safetensors import Checkpoint

if TYPE_CHECKING:
    from graphwright.array import DType
    from graphwright.models.architectures.architecture import Architecture
    from graphwright.program import Program

TIED_HEAD, EMBEDDING = "lm_head.weight", "embed.weight"


def open(
    path: str | os.PathLike[str],
    *,
    dtype: str = "keep",
    compute: str = "float32",
    tokenizer: bool = True,
    arch: Architecture | None = None,
    check: bool = True,
) -> Model:
    """Open a Hugging Face directory (or one .safetensors file beside its config.json) as an editable model.

    Args:
        path: the directory, or the word `bundled` for the small model inside the package.
        dtype: `keep` holds weights as the file does; a dtype name converts them now, which reads them.
        compute: dtype of activations. bfloat16 and float16 weights widen exactly to float32.
        tokenizer: look for one.
        arch: the family; by default found from the config.
        check: False opens a saved model that was left broken, for repair.
    Raises: ModelNotFound, ConfigError, UnsupportedArchitecture, TensorMismatch listing every tensor that does not fit,
        UnsupportedDType, UsageError for a dtype that is not floating, HeaderError and others of
        `graphwright.safetensors`; all before the first payload byte.
    """
    for name, wanted in (("dtype", dtype), ("compute", compute)):
        if not (wanted == "keep" and name == "dtype") and not array_dtype(wanted).is_float:
            raise UsageError("a floating dtype is needed", where=name, expected="float32, bfloat16, ...", got=wanted)
    place = resolve(path)
    directory = place if place.is_dir() else place.parent
    if is_saved(directory):
        return open_saved(directory, tokenizer, check)
    config = Config.read(directory)
    family = find(config) if arch is None else arch
    checkpoint = Checkpoint(place)
    dims = family.read(config)
    keys = match_keys(family, dims, checkpoint, config)
    program = build(family, dims, keys, checkpoint, dtype, compute, directory.name)
    found = find_tokenizer(directory, config, dims.vocab) if tokenizer else None
    return Model(
        program, family, dims, config, checkpoint, directory, keys, found, compute, dtype, _notes(config, dims, found)
    )


def _notes(config: Config, dims: Any, tokenizer: Tokenizer | None) -> list[str]:
    """What is worth saying and no error."""
    notes = []
    if config.get("auto_map"):
        notes.append("config.json names code of its own (auto_map); it is not run")
    if tokenizer is not None and not isinstance(tokenizer, AutoTokenizer) and tokenizer.size < dims.vocab:
        notes.append(f"{dims.vocab - tokenizer.size} rows of the embedding have no token: padding")
    return notes


def resolve(path: str | os.PathLike[str]) -> Path:
    """A path; `bundled` is the model inside the package. Raises: ModelNotFound; UsageError for what is no path."""
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise UsageError("no path to a model", expected="a directory, or 'bundled'", got=path)
    if os.fspath(path) == "bundled":
        from graphwright.models.bundled import bundled

        return bundled()
    place = Path(path)
    if not place.exists():
        raise ModelNotFound("no such directory", where=str(place), fix="nothing is downloaded; give a local path")
    if place.is_file() and place.suffix == ".json":
        raise ModelNotFound("a model is opened by its directory", where=str(place), fix=str(place.parent))
    return place


def match_keys(family: Architecture, dims: Any, checkpoint: Checkpoint, config: Config) -> dict[str, str]:
    """Param path -> key in this file. Raises: TensorMismatch with everything missing, unexpected and misshapen."""
    have = {key for key in checkpoint if not any(re.search(p, key) for p in family.ignored)}
    written = _prefixing(family.prefix, have)
    keys: dict[str, str] = {}
    missing, misshapen = [], []
    for path, key, shape, names in family.weights(dims):
        stored = written(key)
        if stored not in have:
            missing.append(stored)
            continue
        keys[path] = stored
        if tuple(checkpoint.info(stored).shape) != shape:
            fields, found = " x ".join(names), list(checkpoint.info(stored).shape)
            misshapen.append(f"{stored}: config says {list(shape)} ({fields}), the file has {found}")
    unexpected = sorted(have - set(keys.values()))
    if (
        getattr(dims, "tied", False) and written(TIED_HEAD) in unexpected
    ):  # a copy of the embedding that the file carries too
        unexpected.remove(written(TIED_HEAD))
    if missing or unexpected or misshapen:
        lines = [*(f"missing: {k}" for k in missing), *(f"unexpected: {k}" for k in unexpected), *misshapen]
        shown = "\n  ".join(lines[:20]) + (f"\n  ... {len(lines) - 20} more" if len(lines) > 20 else "")
        raise TensorMismatch(
            f"{len(lines)} tensors do not fit {family.name}:\n  {shown}",
            where=str(config.path.parent),
            missing=missing,
            unexpected=unexpected,
            misshapen=misshapen,
            fix="compare config.json with the weights: graphwright inspect DIR --tensors",
        )
    return keys


def _prefixing(prefix: str, have: set[str]) -> Callable[[str], str]:
    """How this file writes a family's keys: alike, without the base model's prefix, or with it once more."""
    if prefix and any(key.startswith(prefix * 2) for key in have):
        return lambda key: prefix + key
    if prefix and not any(key.startswith(prefix) for key in have):
        return lambda key: key.removeprefix(prefix)
    return lambda key: key


def build(
    family: Architecture, dims: Any, keys: dict[str, str], checkpoint: Checkpoint, stored: str, compute: str, name: str
) -> Program:
    """The program of a model over mapped weights."""
    b = Builder(name)
    params, arrays = {}, []
    for path, key in keys.items():
        array = mapped(checkpoint, key)
        arrays.append(array)
        if stored != "keep" and array.dtype is not array_dtype(stored):
            array = empty(array.shape, array_dtype(stored)).copy_from(array)
        params[path] = b.param(path, Parameter(array, True, key), key=key)
    family.build(b, dims, params, array_dtype(compute))
    program = b.build()
    for array in arrays:
        program.weights.refer(array)
    return program


def mapped(checkpoint: Checkpoint, key: str) -> NDArray:
    """A tensor of a file as an array whose bytes are mapped at the first use. Raises: UnsupportedDType."""
    info = checkpoint.info(key)
    kind: DType | None = BY_TAG.get(info.tag)
    if kind is None or not kind.is_float:  # integers are codes of a quantised checkpoint, not weights
        raise UnsupportedDType(
            "tensors of this dtype are carried, not computed with",
            where=key,
            got=info.tag,
            expected=", ".join(t for t, d in BY_TAG.items() if d.is_float),
        )
    file = checkpoint.file_of(key)
    storage = Storage.mapped(lambda: file.bytes(key), info.nbytes, CPU, file.check_mapped)
    return NDArray(storage, kind, tuple(info.shape))


__all__ = ["EMBEDDING", "TIED_HEAD", "Tokenizer", "build", "mapped", "match_keys", "open", "resolve"]


def create(config: Config, *, seed: int = 0, compute: str = "float32") -> Model:
    """A model of a config's family with weights N(0, `initializer_range`²), norms 1 and biases 0, all float32.

    Each weight draws from the Philox stream of its name. A vocabulary of 256 gets the byte tokenizer.
    Raises: ConfigError, UnsupportedArchitecture.
    """
    family = find(config)
    dims = family.read(config)
    std = config.number("initializer_range", 0.02)
    b = Builder(config.path.parent.name)
    params, keys = {}, {}
    for path, key, shape, _ in family.weights(dims):
        params[path] = b.param(path, Parameter(_initial(path, shape, std, seed), True, key), key=key)
        keys[path] = key
    family.build(b, dims, params, dtype(compute))
    tokenizer = ByteTokenizer() if dims.vocab == 256 else None
    return Model(b.build(), family, dims, config, None, config.path.parent, keys, tokenizer, compute)


def _initial(path: str, shape: tuple[int, ...], std: float, seed: int) -> NDArray:
    if path.endswith(".bias"):
        return from_numpy(np.zeros(shape, np.float32))
    if len(shape) == 1:
        return from_numpy(np.ones(shape, np.float32))
    values = random.normal(int(np.prod(shape)), seed=seed, stream=random.stream_of(path)).reshape(shape)
    return from_numpy(values * np.float32(std))


def config_from(fields: dict, path: str | Path = "config.json") -> Config:
    """A config from fields that were not read from a file."""
    return Config(fields, (json.dumps(fields, indent=2) + "\n").encode(), Path(path))
