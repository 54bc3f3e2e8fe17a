"""The operations of attention over a pattern are those of its edges, wherever they are reported."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import attention as at
from graphwright.program.cost import flops

TOKENS, BLOCK, WINDOW = 96, 8, 16


def test_reports_count_the_edges_of_a_pattern():
    model = gw.open("bundled")
    sizes = {"B": 2, "T": TOKENS}
    dense = flops(model.program, sizes)
    share = len(at.sliding_window(TOKENS, WINDOW, block=BLOCK)) / (TOKENS // BLOCK) ** 2
    node = model.program.of_traits(attention=True)[0]
    specs = [model.program.spec(v).bind(sizes) for v in model.program.operands(node)]
    every = 2 * 2 * specs[0].sizes[1] * TOKENS**2 * (specs[0].sizes[3] + specs[2].sizes[3])
    layers = len(model.program.of_traits(attention=True))
    at.sparsify(model, "layers.*.attn", at.sliding_window(TOKENS, WINDOW, block=BLOCK))
    assert flops(model.program, sizes) == pytest.approx(dense + layers * every * (share - 1), rel=1e-6)
    ids = np.zeros((2, TOKENS), np.int64)
    feeds = {"ids": ids, "positions": np.broadcast_to(np.arange(TOKENS), ids.shape).copy()}
    plan = model.program.compile(ids=ids.shape, positions=ids.shape)
    rows = [r for r in plan.profile(feeds, n=1).timings if r.op == "block_sdpa"]
    assert [r.cost.flops for r in rows] == [pytest.approx(every * share, rel=1e-6)] * layers


def test_the_profiler_of_eager_code_counts_edges():
    q, k, v = (gw.randn(1, 2, TOKENS, 16) for _ in range(3))
    pattern = at.sliding_window(TOKENS, WINDOW, block=BLOCK)
    with gw.profile() as prof:
        at.attend(q, k, v, pattern)
    (row,) = [r for r in prof.rows() if r.name == "block_sdpa"]
    share = len(pattern) / (TOKENS // BLOCK) ** 2
    assert row.flops == pytest.approx(2 * 2 * TOKENS**2 * 32 * share, rel=1e-6)
