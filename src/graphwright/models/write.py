"""Writing a model directory: every tensor under its checkpoint key, untouched ones as the bytes they are."""

from __future__ import annotations

import shutil
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import DType, NDArray, bfloat16, empty, float16
from graphwright.array import dtype as named
from graphwright.files import atomic_write
from graphwright.models.errors import ExportError
from graphwright.models.tokenizer import byte_tokenizer_json
from graphwright.program.kinds import PARAM
from graphwright.safetensors import TensorData, write_checkpoint

if TYPE_CHECKING:
    from graphwright.models.model import Model

_COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "generation_config.json", "preprocessor_config.json", "*.model", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files that belong to a model and are copied as they are."""


def tensor_items(model: Model, dtype: str = "keep", only: Container[str] | None = None) -> Iterator[TensorData]:
    """The tensors of a model in the order of its file; those that still map it unchanged as references into it.

    Args:
        dtype: `keep` stores each tensor in the dtype that its file has, else a dtype name.
        only: keys to write; by default all that the graph reads, and what the file carries besides.
    Raises: ExportError for a value that the dtype cannot hold.
    """
    p, source = model.program, model.checkpoint
    arrays = {p.key(n): p.weights.array(p.key(n)) for n in p.params()}
    order = list(source.keys()) if source is not None else []
    every = [*[k for k in order if k in arrays or _passed_on(model, k)], *[k for k in arrays if k not in order]]
    for key in every if only is None else [k for k in every if k in only]:
        array = arrays.get(key)
        stored = source is not None and key in source and source.info(key).tag
        wanted = named(dtype) if dtype != "keep" else None
        untouched = array is None or (array.storage.readonly and (wanted is None or wanted is array.dtype))
        if untouched and source is not None and key in source:
            yield TensorData.stored(source, key)
            continue
        assert array is not None
        target = wanted or _by_tag(stored) or array.dtype
        yield TensorData(key, target.safetensors, array.shape, _Bytes(key, array, target))


def _by_tag(tag: str | bool) -> DType | None:
    from graphwright.array import BY_TAG

    return BY_TAG.get(tag) if isinstance(tag, str) else None


def _passed_on(model: Model, key: str) -> bool:
    """True for a tensor of the file that the graph does not read: a copy of the tied head, derived tables."""
    assert model.checkpoint is not None
    return key not in set(model.keys.values())


class _Bytes:
    """Row-major bytes of an array in a dtype, made when their turn to be written has come."""

    def __init__(self, key: str, array: NDArray, target: DType) -> None:
        self.key, self.array, self.target = key, array, target

    def __call__(self) -> np.ndarray:
        array = self.array
        if array.dtype is not self.target:
            array = rounded(self.key, array, self.target)
        return np.ascontiguousarray(array.to_numpy(bits=True))


def rounded(key: str, array: NDArray, target: DType) -> NDArray:
    """An array in another dtype, rounded to nearest even. Raises: ExportError if a finite value overflows."""
    result = empty(array.shape, target).copy_from(array)
    if target in (bfloat16, float16) and array.dtype.is_float:
        before, after = array.to_numpy("float32"), result.to_numpy("float32")
        lost = np.isfinite(before) & ~np.isfinite(after)
        if lost.any():
            raise ExportError(f"a value does not fit {target.name}", where=key, got=float(before[lost][0]),
                              fix="another dtype, or scale the weight down")  # fmt: skip
    return result


def write_model(model: Model, directory: Path, *, dtype: str = "keep", max_shard_size: int | str = "5GB",
                config: bytes | None = None, only: Container[str] | None = None) -> None:  # fmt: skip
    """Write config, weights, tokenizer and companions into an existing directory.

    Args:
        config: bytes of config.json; those that were read by default.
        only: keys of the tensors to write.
    """
    atomic_write(directory / "config.json", model.config.raw if config is None else config)
    write_checkpoint(directory, tensor_items(model, dtype, only), max_shard_size, plan=model.checkpoint)
    copied = companion_files(model.directory)
    for file in copied:
        shutil.copyfile(file, directory / file.name)
    if not copied and model.tokenizer is not None and model.tokenizer.size == 256:
        atomic_write(directory / "tokenizer.json", byte_tokenizer_json().encode())


def companion_files(directory: Path) -> list[Path]:
    """Files of a model directory that travel with it unchanged: tokenizer, generation config, licence."""
    found = {f for pattern in _COMPANIONS for f in directory.glob(pattern) if f.is_file() and f.suffix != ".safetensors"}
    return sorted(found)


def unread_params(model: Model) -> list[str]:
    """Keys of the source that no param node holds any more."""
    p = model.program
    return sorted(set(model.keys.values()) - {p.key(n) for n in p.of_kind(PARAM)})
