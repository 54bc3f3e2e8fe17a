"""Cases of block-sparse attention, their results by dense masked attention in float64, and errors of an executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from block_patterns import Blocks, random_blocks
from test_block_attention import dense

from graphwright.patterns import table as words

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window of each head": {"batch": 2, "heads": (4, 2), "planes": 4, "rule": {"window": 20}},
    "symmetric window": {"rule": {"causal": False, "window": 9, "symmetric": True}},
    "segments": {"heads": (4, 2), "planes": 2, "rule": {"segments": True}},
    "own masks": {"masks": 1.0},
    "no edges": {"density": 0.0},
    "softcap": {"softcap": 1.5, "widths": (20, 7)},
    "gates inside": {"gates": 3, "planes": 2, "density": 1.0, "tokens": (37, 41), "heads": (2, 2)},
    "gates of weights": {"gates": 3, "where": "weight"},
    "log-sum-exp has a gradient": {"lse_grad": True},
    "later queries": {"shift": 9},
    "half precision": {"dtype": torch.bfloat16},
    "blocks of 64 in parts": {"block": 64, "tokens": (150, 170), "masks": 0.4, "heads": (2, 1), "gates": 3, "planes": 2,
                              "density": 0.9, "softcap": 1.5, "shift": 70, "rule": {"window": 90}},
    "blocks of 128": {"block": 128, "tokens": (150, 170), "masks": 0.7, "heads": (1, 1),
                      "dtype": torch.float16},
}  # fmt: skip
NAMES = ("out", "lse", "dq", "dk", "dv", "dgates")
Results = list[torch.Tensor]
Executor = Callable[[str, Results, dict[str, Any]], Results]
"""A function from the name of an op, its operands and attributes to its results."""


@dataclass(frozen=True)
class Problem:
    """Operands of one case in float64, rounded to its dtype, and the results by dense masked attention.

    Attributes:
        extra: gates, q_start, as far as there are any.
        g, g_lse: gradients of the result and of the log-sum-exp.
        wanted: results and gradients, in the order of NAMES.
    """

    pattern: Blocks
    ins: Results
    extra: dict[str, torch.Tensor]
    g: torch.Tensor
    g_lse: torch.Tensor | None
    attrs: dict[str, Any]
    wanted: Results


def problem(case: dict[str, Any], seed: int) -> Problem:
    """Draw the operands of a case."""
    rng = np.random.default_rng(seed)
    (queries, keys), block = case.get("tokens", (21, 25)), case.get("block", 16)
    heads, groups = case.get("heads", (2, 1))
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
    grads = torch.autograd.grad(loss, [q, k, v, *([] if gates is None else [gates])], allow_unused=True,
                                materialize_grads=True)  # fmt: skip
    extra = {} if gates is None else {"gates": gates.detach()}
    if first:
        extra["q_start"] = torch.tensor(pattern.start + first)
    attrs = {**shown, "planes": pattern.planes, "optional": tuple(extra)}
    wanted = [t.detach() for t in (out, lse, grads[0][:, :, first:], *grads[1:])]
    ins = [t.detach() for t in (q[:, :, first:], k, v)]
    return Problem(pattern, ins, extra, g, g_lse if case.get("lse_grad") else None, attrs, wanted)


def errors(made: Problem, execute: Executor, dtype: torch.dtype, algorithm: str = "auto") -> dict[str, float]:
    """Return the largest error of each result of an executor in a dtype, over the largest value (at least 1)."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    table, attrs = torch.from_numpy(made.pattern.words()), {**made.attrs, "algorithm": algorithm}
    optional = {name: t.to(wide) if t.dtype.is_floating_point else t for name, t in made.extra.items()}
    q, k, v, g = (t.to(dtype).clone() for t in (*made.ins, made.g))
    out, lse = execute("block_sdpa", [q, k, v, table, *optional.values()], attrs)
    extra = optional if made.g_lse is None else {**optional, "lse_grad": made.g_lse.to(wide)}
    saved, backward = [out.to(dtype), lse.to(wide)], {**attrs, "optional": tuple(extra)}
    grads = execute("block_sdpa_backward", [q, k, v, table, *extra.values(), *saved, g], backward)
    found = {name: error(x, y) for name, x, y in zip(NAMES, [out, lse, *grads], made.wanted, strict=False)}
    assert len(found) == len(made.wanted)
    del attrs["algorithm"]
    for reduce in ("sum", "max"):
        given = {**attrs, "edges": int(table[words.EDGE_SLOTS]), "reduce": reduce}
        operands = [q, k, table, saved[1], *optional.values()]
        (mass,) = execute("block_mass", operands, given)
        found[f"mass {reduce}"] = error(mass, masses(made, operands, given))
    return found


def masses(made: Problem, operands: Results, attrs: dict[str, Any]) -> torch.Tensor:
    """Return the mass of each edge slot by the softmax weights of all pairs, in float64."""
    q, k, _, lse = (t.double() for t in operands[:4])
    s = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * attrs["scale"]
    if attrs["softcap"] is not None:
        s = attrs["softcap"] * torch.tanh(s / attrs["softcap"])
    weights, first = (s - lse[..., None]).exp(), made.pattern.tokens[0] - q.shape[2]
    found, b = torch.zeros(attrs["edges"], dtype=torch.float64), made.pattern.block
    share = q.shape[1] // made.pattern.planes
    for plane, i, j, pairs, gate, edge in made.pattern.edges:
        seen = torch.from_numpy(np.array(pairs))[max(first - i * b, 0) :]
        rows = slice(max(i * b - first, 0), max((i + 1) * b - first, 0))
        heads = slice(plane * share, (plane + 1) * share)
        own = weights[:, heads, rows, j * b : (j + 1) * b].masked_fill(~seen, 0.0)
        factor = made.extra["gates"][gate] if gate >= 0 and attrs["where"] == "exp" and "gates" in made.extra else 1.0
        own = (own * factor).sum(-1)
        count = int((lse[:, heads, rows] > -torch.inf).sum())
        if own.numel():
            found[made.pattern.slot(edge)] = own.max() if attrs["reduce"] == "max" else own.sum() / max(count, 1)
    return found


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest difference over the largest value; infinity where only one is -inf."""
    low = y == -torch.inf
    if not torch.equal(x == -torch.inf, low):
        return torch.inf
    away = (x.double() - y).masked_fill(low, 0.0).abs()
    if not away.numel():
        return 0.0
    return float(away.nan_to_num(torch.inf).max() / max(1.0, float(y.masked_fill(low, 0.0).abs().max())))
