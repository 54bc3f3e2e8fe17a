"""What an export measures: files and tensors with their digests, drift from the source, costs before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import BY_TAG
from graphwright.files import sha256_file
from graphwright.models.generation.sampling import NonFinite
from graphwright.program.cost import flops
from graphwright.safetensors import Checkpoint

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.editing.journal import Entry

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
    from graphwright.array.vm.running.team import get_num_threads

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
