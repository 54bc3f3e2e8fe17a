"""Runs the Triton kernels of block-sparse attention in Triton's interpreter and prints their errors as JSON lines.

A process of its own, with TRITON_INTERPRET=1: Triton reads the variable when it defines a kernel.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from block_patterns import Blocks, random_blocks
from test_block_attention import dense

from graphwright.array.triton import launch
from graphwright.patterns import table as words

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window of each head": {"batch": 2, "planes": 4, "rule": {"window": 20}},
    "symmetric window": {"rule": {"causal": False, "window": 9, "symmetric": True}},
    "segments": {"planes": 2, "rule": {"segments": True}},
    "own masks": {"masks": 1.0},
    "no edges": {"density": 0.0},
    "softcap": {"softcap": 1.5, "widths": (20, 7)},
    "gates inside": {"gates": 3, "planes": 2, "density": 1.0},
    "gates of weights": {"gates": 3, "where": "weight"},
    "log-sum-exp has a gradient": {"lse_grad": True},
    "later queries": {"shift": 9},
    "half precision": {"dtype": torch.bfloat16},
    "blocks of 128": {"block": 128, "tokens": (150, 170), "masks": 0.7, "heads": (1, 1),
                      "dtype": torch.float16},
}  # fmt: skip


def run(case: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the largest error of each result beside dense masked attention in float64, over the largest value."""
    rng = np.random.default_rng(seed)
    (queries, keys), block = case.get("tokens", (37, 41)), case.get("block", 16)
    heads, groups = case.get("heads", (4, 2))
    rule, dtype = dict(case.get("rule", {})), case.get("dtype", torch.float32)
    if rule.get("segments"):
        rule["segments"] = np.sort(rng.integers(0, 3, keys))[-queries:], np.sort(rng.integers(0, 3, keys))
    count = case.get("gates", 0)
    pattern = random_blocks(rng, queries, keys, block, case.get("planes", 1), gates=count,
                            density=case.get("density", 0.7), masks=case.get("masks", 0.2), **rule)  # fmt: skip
    d, dv = case.get("widths", (16, 8))
    made = [rng.normal(size=(case.get("batch", 1), h, t, n)) for h, t, n in (
        (heads, queries, d), (groups, keys, d), (groups, keys, dv))]  # fmt: skip
    q, k, v = (torch.tensor(x).to(dtype).double().requires_grad_() for x in made)
    gates = torch.tensor([0.5, 0.0, 1.7][:count], dtype=torch.float64, requires_grad=True) if count else None
    shown = {"scale": 0.4, "softcap": case.get("softcap"), "where": case.get("where", "exp")}
    first = case.get("shift", 0)
    full, sums = dense(q, k, v, pattern, gates, **shown)
    out, lse = full[:, :, first:], sums[:, :, first:]
    g, g_lse = torch.tensor(rng.normal(size=out.shape)).to(dtype).double(), torch.tensor(rng.normal(size=lse.shape))
    loss = (out * g).sum()
    if case.get("lse_grad"):
        loss = loss + (g_lse * lse.masked_fill(lse == -torch.inf, 0.0)).sum()
    wanted = torch.autograd.grad(loss, [q, k, v, *([] if gates is None else [gates])], allow_unused=True,
                                 materialize_grads=True)  # fmt: skip
    return _compare(pattern, [q[:, :, first:], k, v], gates, g, g_lse if case.get("lse_grad") else None, first, shown,
                    dtype, [out, lse, wanted[0][:, :, first:], *wanted[1:]])  # fmt: skip


def _compare(
    pattern: Blocks, ins: list[torch.Tensor], gates: Any, g: Any, g_lse: Any, first: int, attrs: dict[str, Any],
    dtype: torch.dtype, wanted: list[torch.Tensor],
) -> dict[str, float]:  # fmt: skip
    table = torch.from_numpy(pattern.words())
    optional = {} if gates is None else {"gates": gates.detach().float()}
    if first:
        optional["q_start"] = torch.tensor(pattern.start + first)
    attrs = {**attrs, "planes": pattern.planes, "optional": tuple(optional)}
    q, k, v = (t.detach().to(dtype).clone() for t in ins)
    out, lse = torch.full(wanted[0].shape, torch.nan, dtype=dtype), torch.full(wanted[1].shape, torch.nan)
    launch.block_sdpa([out, lse], [q, k, v, table, *optional.values()], attrs)()
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v, *([] if gates is None else [optional["gates"]]))]
    extra = {**optional} if g_lse is None else {**optional, "lse_grad": g_lse.float()}
    backward = {**attrs, "optional": tuple(extra)}
    launch.block_sdpa_backward(grads, [q, k, v, table, *extra.values(), out, lse, g.to(dtype)], backward)()
    names = ("out", "lse", "dq", "dk", "dv", "dgates")
    found = {name: _error(x, y) for name, x, y in zip(names, [out, lse, *grads], wanted, strict=False)}
    for reduce in ("sum", "max"):
        found[f"mass {reduce}"] = _mass_error(pattern, q, k, table, lse, optional, attrs, reduce)
    return found


def _mass_error(pattern: Blocks, q: Any, k: Any, table: Any, lse: Any, optional: Any, attrs: Any, reduce: str) -> float:
    from graphwright.array import from_numpy
    from graphwright.ops import call

    slots = int(table[words.EDGE_SLOTS])
    given = {**attrs, "edges": slots, "reduce": reduce}
    mass = torch.full((slots,), torch.nan)
    launch.block_mass([mass], [q, k, table, lse, *optional.values()], given)()
    wide = [t.double() if t.dtype.is_floating_point else t for t in (q, k, table, lse, *optional.values())]
    wanted = call("block_mass", *(from_numpy(t.numpy()) for t in wide), **given)
    return _error(mass, torch.from_numpy(wanted.to_numpy()))


def wrong_words(seed: int) -> dict[str, float]:
    """Return how many cells differ after the kernel of edits has applied more words than it takes at once."""
    rng = np.random.default_rng(seed)
    arrays = {words.SRC: np.zeros(900, np.int32), words.KIND: np.zeros(900, np.uint8), 0: np.zeros(40, np.int64)}
    wanted = {word: a.copy() for word, a in arrays.items()}
    for word in (words.SRC, words.KIND):
        arrays[0][word] = wanted[0][word] = arrays[word].ctypes.data
    cells = [(words.SRC, int(i)) for i in rng.permutation(900)[:300]]
    cells += [(words.KIND, int(i)) for i in rng.permutation(900)[:200]] + [(0, words.EDGES), (0, words.TQ)]
    message = [len(cells)]
    for word, index in cells:
        value = int(rng.integers(256) if word == words.KIND else rng.integers(-(2**31), 2**31))
        wanted[word][index] = value
        message += [word, index, value]
    queue = torch.tensor([*message, 0, 0, 77], dtype=torch.int32)  # the last word is none
    launch.word_kernel(torch.from_numpy(arrays[0]), queue)()
    differ = sum(int((arrays[word] != wanted[word]).sum()) for word in arrays)
    return {"cells": float(differ), "words left": float(queue[0])}


def _error(x: torch.Tensor, y: torch.Tensor) -> float:
    low = y == -torch.inf
    if not torch.equal(x == -torch.inf, low):
        return torch.inf
    away = (x.double() - y).masked_fill(low, 0.0).abs()
    if not away.numel():
        return 0.0
    return float(away.nan_to_num(torch.inf).max() / max(1.0, float(y.masked_fill(low, 0.0).abs().max())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (name, case) in enumerate(CASES.items()):
        print(json.dumps([name, run(case, number)]), flush=True)
    print(json.dumps(["edits", wrong_words(0)]), flush=True)
