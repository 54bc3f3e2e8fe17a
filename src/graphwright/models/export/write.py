"""Writing a model directory: every tensor under its checkpoint key, untouched ones as the bytes they are."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import BY_TAG, NDArray, bfloat16, empty
from graphwright.array import dtype as named
from graphwright.files import atomic_write, sha256_file
from graphwright.models.errors import ExportError
from graphwright.models.generation.sampling import NonFinite
from graphwright.models.tokenizer import byte_tokenizer_json
from graphwright.program.cost import flops
from graphwright.program.weights import SOURCE
from graphwright.safetensors import Checkpoint, TensorData, write_checkpoint

if TYPE_CHECKING:
    from graphwright.array import DType
    from graphwright.autograd import Variable
    from graphwright.models.model import Model
    from graphwright.program import Program
    from graphwright.program.editing.journal import Entry

EMBEDDING, TIED_HEAD = "embed.weight", "lm_head.weight"
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
    "*.model",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Files that belong to a model and are copied as they are."""


def tensor_items(model: Model, dtype: str = "keep", only: Container[str] | None = None) -> Iterator[TensorData]:
    """The tensors of a model in the order of its file; those that still map it unchanged as references into it.

    Args:
        model: what to write.
        dtype: `keep` stores each tensor in the dtype that its file has, else a dtype name for all floating ones.
        only: keys to write; by default all that the graph reads, and what the file carries besides.
    Raises: ExportError for a value that the dtype cannot hold.
    """
    p, source = model.program, model.checkpoint
    values = {p.key(n): p.weights[p.key(n)] for n in p.params()}
    order = list(source.keys()) if source is not None else []
    besides = _passed_on(model, values, dtype)
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
        origin = variable.name  # its key in the file, whatever it was renamed to
        if source is not None and origin in source and _untouched(p, variable) and wanted in (None, array.dtype):
            yield TensorData.stored(source, origin, key)
            continue
        stored = BY_TAG.get(source.info(key).tag) if source is not None and key in source else None
        target = wanted or stored or array.dtype
        yield TensorData(key, target.safetensors, array.shape, _Bytes(key, array, target))


def _passed_on(model: Model, values: Mapping[str, Variable], dtype: str) -> dict[str, Variable | None]:
    """Keys of the file that no node holds: with the embedding for a copy of the tied head, else with None."""
    source = model.checkpoint
    if source is None:
        return {}
    known = set(model.keys.values())
    found: dict[str, Variable | None] = {key: None for key in source if key not in known and key not in values}
    embedding = values.get(model.keys.get(EMBEDDING, ""))
    if embedding is not None and not (dtype == "keep" and _untouched(model.program, embedding)):
        heads = [k for k in found if k.endswith(TIED_HEAD) and tuple(source.info(k).shape) == embedding.shape]
        found.update(dict.fromkeys(heads, embedding))
    return found


def _untouched(p: Program, variable: Variable) -> bool:
    return isinstance(variable.data, NDArray) and p.weights.reference_of(variable.data) == SOURCE


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
    if target.is_float and array.dtype.is_float:
        before, after = (a.to_numpy("float32" if a.dtype is bfloat16 else None) for a in (array, result))
        lost = np.isfinite(before) & ~np.isfinite(after)
        if lost.any():
            raise ExportError(
                f"a value does not fit {target.name}",
                where=key,
                got=float(before[lost][0]),
                fix="another dtype, or scale the weight down",
            )
    return result


def write_model(
    model: Model,
    directory: Path,
    *,
    dtype: str = "keep",
    max_shard_size: int | str | None = None,
    config: bytes | None = None,
    only: Container[str] | None = None,
) -> None:
    """Write config, weights, tokenizer and companions into an existing directory.

    Args:
        model: what to write.
        directory: exists, and holds no checkpoint.
        dtype, max_shard_size: see `export`.
        config: bytes of config.json; those that were read by default.
        only: keys of the tensors to write.
    """
    atomic_write(directory / "config.json", model.config.raw if config is None else config)
    items, source = tensor_items(model, dtype, only), model.checkpoint
    if max_shard_size is None:
        write_checkpoint(directory, items, plan=source)
    else:
        write_checkpoint(directory, items, max_shard_size, source.files[0].metadata if source is not None else None)
    copied = companion_files(model.directory) if model.opened else []  # a config alone may lie anywhere
    for file in copied:
        shutil.copyfile(file, directory / file.name)
    if not copied and model.tokenizer is not None and model.tokenizer.size == 256:
        atomic_write(directory / "tokenizer.json", byte_tokenizer_json().encode())


def companion_files(directory: Path) -> list[Path]:
    """Files of a model directory that travel with it unchanged: tokenizer, generation config, licence."""
    found = {f for pattern in _COMPANIONS for f in directory.glob(pattern) if f.is_file()}
    return sorted(f for f in found if f.suffix != ".safetensors")


CONTEXT, ROUNDS, WARM_UP = 128, 10, 2


def file_rows(directory: Path) -> list[dict[str, Any]]:
    """Name, bytes and sha256 of every file but the receipt and its card."""
    return [
        {"name": f.name, "bytes": f.stat().st_size, "sha256": sha256_file(f)}
        for f in sorted(directory.iterdir())
        if f.is_file() and f.name not in ("receipt.json", "README.md")
    ]


def tensor_digests(directory: Path) -> dict[str, str]:
    """BLAKE2b-128 of each tensor's bytes, by key, so that damage can be told by tensor."""
    with Checkpoint(directory) as checkpoint:
        return {key: blake2b(checkpoint.bytes(key), digest_size=16).hexdigest() for key in checkpoint}


def weight_counts(directory: Path) -> dict[str, int]:
    """Parameters, those that are not 0, and bytes of the weights in a directory."""
    with Checkpoint(directory) as checkpoint:
        nonzero = sum(_nonzero(checkpoint, key) for key in checkpoint)
        sizes = {"parameters": sum(prod(i.shape) for i in checkpoint.infos()), "bytes": checkpoint.nbytes}
        return {"parameters": sizes["parameters"], "nonzero_parameters": nonzero, "bytes": sizes["bytes"]}


def _nonzero(checkpoint: Checkpoint, key: str) -> int:
    """Entries of a tensor that are neither 0 nor -0; all of one whose dtype is not computed with."""
    info = checkpoint.info(key)
    kind = BY_TAG.get(info.tag)
    if kind is None or not kind.is_float or kind.itemsize not in (2, 4, 8):
        return prod(info.shape)
    bits = np.frombuffer(checkpoint.bytes(key), f"<u{kind.itemsize}")
    return int(np.count_nonzero(bits & ((1 << (8 * kind.itemsize - 1)) - 1)))


def live_edits(model: Model) -> list[Entry]:
    """Journal entries that are in force: made, and not undone."""
    return list(model.program.history.undoable)


def edit_rows(model: Model) -> list[dict[str, str]]:
    """Edits in force, in order: why, author, summary."""
    return [{"why": e.why, "author": e.author, "summary": summary(e)} for e in live_edits(model)]


def summary(entry: Entry) -> str:
    """How many primitive edits of which kind."""
    return ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(e["edit"] for e in entry.edits).items()))


def cost(model: Model) -> dict[str, Any]:
    """Parameters, bytes, FLOPs and cache bytes per token, and the time to read 128 tokens and to decode one."""
    p = model.program
    facts = model.inspect()
    ids = np.zeros((1, 1), np.int64)
    found: dict[str, Any] = {
        "parameters": facts.parameters,
        "bytes": facts.nbytes,
        "flops_per_token": flops(p, {"B": 1, "T": 1}),
        "kv_bytes_per_token": facts.kv_bytes_per_token,
    }
    prompt, room = np.zeros((1, CONTEXT), np.int64), CONTEXT + ROUNDS + WARM_UP
    times = []
    try:
        model.new_cache(room, kind="static").step(prompt)  # plans
        cache = model.new_cache(room, kind="static")
        started = perf_counter()
        cache.step(prompt)
        prefill = (perf_counter() - started) * 1e3
        for _ in range(ROUNDS + WARM_UP):
            started = perf_counter()
            cache.step(ids)
            times.append((perf_counter() - started) * 1e3)
    except NonFinite:  # weights of the source hold NaN: nothing to time
        return found
    times = sorted(times[WARM_UP:])
    decode = {"median": round(median(times), 3), "low": round(times[0], 3), "high": round(times[-1], 3)}
    from graphwright.array.vm.running.call import get_num_threads

    latency = {"runtime": "graphwright", "context": CONTEXT, f"prefill_{CONTEXT}": round(prefill, 3), "decode": decode}
    return found | {"latency_ms": {**latency, "rounds": len(times), "threads": get_num_threads()}}


def drift(source: Sequence[np.ndarray], now: Sequence[np.ndarray]) -> dict[str, Any]:
    """How far logits [T, V] per prompt moved: largest difference, mean KL in nats, share of equal top tokens."""
    a, b = np.concatenate(source).astype(np.float64), np.concatenate(now).astype(np.float64)
    if a.shape != b.shape:
        return {}
    la, lb = (x - x.max(-1, keepdims=True) for x in (a, b))
    la, lb = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (la, lb))
    divergence = float((np.exp(la) * (la - lb)).sum(-1).mean())
    return {
        "max_abs_dlogits": float(np.abs(a - b).max()),
        "mean_kl_nats": max(divergence, 0.0),
        "top1_agreement": float((a.argmax(-1) == b.argmax(-1)).mean()),
    }
