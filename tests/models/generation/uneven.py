"""A small decoder whose layers differ: what pruning leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw


def uneven() -> gw.Program:
    """Three blocks: (kv 4, d 16, 16), (kv 1, d 8, 16), no attention."""
    b, rng = gw.Builder("uneven"), np.random.default_rng(0)

    def matrix(name: str, *shape: int) -> Any:
        return b.param(name, rng.normal(size=shape).astype("f4") / np.float32(np.sqrt(shape[-1])))

    ids = b.input("ids", ("B", "T"), "int64")
    x = b.embedding(matrix("table", 30, 24), ids)
    for i, (kv, dk, dv) in enumerate([(4, 16, 16), (1, 8, 16)]):
        q, k, v = (
            b.permute(b.unflatten(b.linear(x, matrix(f"{n}{i}", h * d, 24)), axis=2, sizes=(h, d)), axes=(0, 2, 1, 3))
            for n, h, d in (("q", 4, dk), ("k", kv, dk), ("v", kv, dv))
        )
        rows = b.permute(b.sdpa(q, k, v, scale=0.3, name=f"attn{i}"), axes=(0, 2, 1, 3))
        x = b.junction(x, b.linear(b.flatten(rows, start=2, end=3), matrix(f"o{i}", 24, 4 * dv)))
    x = b.junction(x, b.silu(b.linear(x, matrix("m", 24, 24))))
    b.output(b.linear(x, matrix("head", 30, 24), name="scores"), "logits")
    return b.build()
