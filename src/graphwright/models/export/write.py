"""Write a model directory, for transformers or as a saved model; unchanged tensors keep their bytes."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphwright.arguments import checked
from graphwright.array import BY_TAG, DType, NDArray, empty
from graphwright.array import dtype as named
from graphwright.autograd import Variable
from graphwright.files import StrPath, atomic_write, read_file
from graphwright.models.errors import ExportError
from graphwright.models.stacks import join, split
from graphwright.models.tokenizer import AutoTokenizer, ByteTokenizer, TrainedTokenizer, byte_tokenizer_json
from graphwright.program.weights import SOURCE
from graphwright.safetensors import Checkpoint, DividedCheckpoint, JoinedCheckpoint, TensorData, write_checkpoint

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.files.save import HistoryMode
    from graphwright.program.program import Program

_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    "*.model",
)
_COMPANIONS = (
    *("generation_config.json", "preprocessor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*"),
    *_TOKENIZER,
)
"""Files of a model that are copied unchanged."""


def tensor_items(model: Model, dtype: str = "keep", only: Container[str] | None = None) -> Iterator[TensorData]:
    """Yield the tensors of a model in the order of its file; unchanged tensors as references into the file.

    `dtype` "keep" stores each tensor in its dtype in the file; a dtype name converts floating tensors. `only` are the
    keys to write; by default all weights, and the file's other tensors. Raises: ExportError if a value overflows.
    """
    p, source = model.program, model.checkpoint
    values = {p.key(n): p.weights[p.key(n)] for n in p.params()}
    values |= {model.keys[path]: p.weights[path] for path in model.arch.buffers if path in p.weights}
    order = list(source.keys()) if source is not None else []
    besides = _other_tensors(model, values, dtype)
    every = [*[k for k in order if k in values or k in besides], *[k for k in values if k not in order]]
    for key in every if only is None else [k for k in every if k in only]:
        variable = values[key] if key in values else besides[key]
        if variable is None:  # the graph does not read it
            assert source is not None
            yield TensorData.stored(source, key)
            continue
        array = variable.data
        assert isinstance(array, NDArray)
        wanted = named(dtype) if dtype != "keep" and array.dtype.is_float else None
        origin = variable.name  # key in the file, before any renaming
        if source is not None and origin in source and _untouched(p, variable) and wanted in (None, array.dtype):
            yield TensorData.stored(source, origin, key)
            continue
        stored = BY_TAG.get(source.info(key).tag) if source is not None and key in source else None
        target = wanted or stored or array.dtype
        yield TensorData(key, target.safetensors, array.shape, partial(_bytes_of, key, array, target))


def file_items(
    model: Model, dtype: str = "keep", only: Container[str] | None = None, joined: bool = True
) -> tuple[Iterator[TensorData], Checkpoint | None]:
    """Return the tensors of a model's files, and the checkpoint whose layout they keep; see `write_model`."""
    items, source = tensor_items(model, dtype, only), model.checkpoint
    plan = source
    divided = source if isinstance(source, DividedCheckpoint) else None
    if divided is not None or any(stack.own for stack in model.arch.stacks):
        plan = divided.whole if joined and divided is not None else None
        items = join(items, model.arch, divided) if joined else items
    if isinstance(inner := source if divided is None else divided.whole, JoinedCheckpoint):
        plan = inner.whole if joined else None
        items = split(items, model.arch.joins, inner) if joined else items
    return items, plan


def _other_tensors(model: Model, values: Mapping[str, Variable], dtype: str) -> dict[str, Variable | None]:
    """Map the key of each tensor of the source file that no node reads to the value to write, or None if unchanged.

    Only a stored copy of a tied weight can change: it gets that weight, if it was edited or is converted.
    """
    source = model.checkpoint
    if source is None:
        return {}
    known = set(model.keys.values())
    found: dict[str, Variable | None] = {key: None for key in source if key not in known and key not in values}
    for ending, path in model.arch.copies.items():
        weight = values.get(key := model.keys.get(path, ""))
        if weight is not None and key in source and not (dtype == "keep" and _untouched(model.program, weight)):
            shape = source.info(key).shape
            copies = [k for k in found if k.endswith(ending) and source.info(k).shape == shape]
            found.update(dict.fromkeys(copies, weight))
    return found


def _integers(key: str, array: np.ndarray) -> TensorData:
    return TensorData(key, named(array.dtype.name).safetensors, array.shape, lambda: np.ascontiguousarray(array))


def _untouched(p: Program, variable: Variable) -> bool:
    return isinstance(variable.data, NDArray) and p.weights.reference_of(variable.data) == SOURCE


def _bytes_of(key: str, array: NDArray, target: DType) -> np.ndarray:
    array = array if array.dtype is target else rounded(key, array, target)
    return np.ascontiguousarray(array.to_numpy(bits=True))


def rounded(key: str, array: NDArray, target: DType) -> NDArray:
    """Convert an array to another dtype, rounding to nearest even. Raises: ExportError if a finite value overflows."""
    result = empty(array.shape, target).copy_from(array)
    if target.is_float and array.dtype.is_float:
        before, after = (a.to_numpy() for a in (array, result))
        overflow = np.isfinite(before) & ~np.isfinite(after)
        if overflow.any():
            raise ExportError(f"a weight has a value outside the range of {target.name}", where=key,
                              got=float(before[overflow][0]),
                              fix="choose a wider dtype, or scale the weight down")  # fmt: skip
    return result


def write_model(
    model: Model, directory: Path, *, dtype: str = "keep", max_shard_size: int | str | None = None,
    config: bytes | None = None, only: Container[str] | None = None, joined: bool = True,
    besides: Mapping[str, np.ndarray] | None = None,
) -> None:  # fmt: skip
    """Write config (by default the bytes that were read), weights, tokenizer and other files into a directory.

    `only` has the keys of the tensors to write, by default all. `dtype` is `keep`, or converts floating weights. A file
    has at most `max_shard_size` bytes of weights; by default the weights are divided as in the source's files. With
    `joined`, matrices that the family's class or the source has in one tensor are written as one. `besides` has arrays
    of integers to write after the weights, by key.
    """
    tables = (_integers(key, array) for key, array in (besides or {}).items())
    found, plan = file_items(model, dtype, only, joined)
    items, source = chain(found, tables), model.checkpoint
    if max_shard_size is None and plan is not None:
        write_checkpoint(directory, items, plan=plan)
    else:
        metadata = source.files[0].metadata if source is not None else None
        write_checkpoint(directory, items, max_shard_size or "5GB", metadata)
    write_companions(model, directory, config)


def write_companions(model: Model, directory: Path, config: bytes | None = None) -> None:
    """Write the files of a model besides its weights: config, by default the bytes that were read, and tokenizer."""
    atomic_write(directory / "config.json", model.config.raw if config is None else config)
    copied = exported_companions(model)
    for file in copied:
        atomic_write(directory / file.name, read_file(file))
    for name, content in _tokenizer_files(model, bool(copied)).items():
        atomic_write(directory / name, content)


@checked
def save_model(
    model: Model, directory: StrPath, *, history: HistoryMode = "full", overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Path:  # fmt: skip
    """Save a model so that `gw.open` can continue it: structure, weights, journal and undo, config, tokenizer.

    Options and errors are as for `Program.save`; an error changes no file.
    """
    files = {"config.json": model.config.raw}
    facts = {"schema": 1, "keys": model.keys, "compute": model.compute, "source": model.directory.name}
    files["model.json"] = (json.dumps(facts, indent=1) + "\n").encode()
    for file in companion_files(model.directory):
        files.setdefault(file.name, read_file(file))
    files |= _tokenizer_files(model, "tokenizer.json" in files)
    return model.program.save(directory, history=history, overwrite=overwrite, max_shard_size=max_shard_size,
                              companions=files)  # fmt: skip


def _tokenizer_files(model: Model, copied: bool) -> dict[str, bytes]:
    """Return the files of a trained tokenizer, and of the byte table unless the model's files were `copied`.

    There are none if ids of the tokenizer have no row.
    """
    if lacks_rows(model):
        return {}
    if isinstance(model.tokenizer, TrainedTokenizer):
        return model.tokenizer.files()
    own = not copied and isinstance(model.tokenizer, ByteTokenizer)
    return {"tokenizer.json": byte_tokenizer_json().encode()} if own else {}


def exported_companions(model: Model) -> list[Path]:
    """Return the companion files of an export; tokenizer files are left out if ids of the tokenizer have no row."""
    if not model.opened:  # a config file alone may be in any directory
        return []
    omitted = set(companion_files(model.directory, _TOKENIZER)) if lacks_rows(model) else set()
    return [f for f in companion_files(model.directory) if f not in omitted]


def lacks_rows(model: Model) -> bool:
    """Return True if the tokenizer has ids for which the embedding, made smaller by an edit, has no row."""
    tokenizer, rows = model.tokenizer, model.vocab
    if tokenizer is None or (isinstance(tokenizer, AutoTokenizer) and rows >= tokenizer.tokens):  # not loaded for this
        return False
    return tokenizer.size > rows


def companion_files(directory: Path, patterns: tuple[str, ...] = _COMPANIONS) -> list[Path]:
    """Return the files of a model directory that are copied unchanged: tokenizer, generation config, licence."""
    found = {f for pattern in patterns for f in directory.glob(pattern) if f.is_file()}
    return sorted(f for f in found if f.suffix != ".safetensors")
