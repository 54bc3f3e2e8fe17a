"""Copying the token 100 before: at chance with a window, exact once the missing edges are connected."""

from __future__ import annotations

import numpy as np
from dense_attention import dense

import graphwright as gw
from graphwright import attention as at

TOKENS, VALUES, DISTANCE, BLOCK, BATCH = 256, 16, 100, 4, 8


def test_a_copy_task_of_distance_100_is_solved_by_connecting_edges() -> None:
    rng = np.random.default_rng(0)
    codes = np.linalg.qr(rng.normal(size=(TOKENS, TOKENS)))[0]  # of positions, orthonormal
    keys = np.broadcast_to(codes, (BATCH, 1, TOKENS, TOKENS)).astype("f4")
    queries = 40 * np.roll(keys, DISTANCE, axis=2)  # a query has the code of the position to copy
    tokens = rng.integers(VALUES, size=(BATCH, TOKENS))
    values = np.eye(VALUES, dtype="f4")[tokens][:, None]
    ins = q, k, v = queries, keys, values
    pattern = at.sliding_window(TOKENS, window=16, block=BLOCK)
    p = gw.trace(lambda q, k, v: at.attend(q, k, v, pattern, scale=1.0), *map(gw.tensor, ins))
    feeds = dict(zip(p.input_names(), ins, strict=True))
    plan = p.compile({name: x.shape for name, x in feeds.items()})

    def run() -> tuple[np.ndarray, float]:
        (out,) = (np.asarray(x) for x in plan(feeds).values())
        wanted, _ = dense(q.astype("f8"), k.astype("f8"), v.astype("f8"), pattern.to_dense(), scale=1.0)
        np.testing.assert_allclose(out, wanted.numpy(), atol=1e-5)
        found = out[:, 0, DISTANCE:].argmax(-1)
        return out, float((found == tokens[:, :-DISTANCE]).mean())

    before, chance = run()
    assert abs(chance - 1 / VALUES) < 0.03
    rows = np.arange(DISTANCE // BLOCK, TOKENS // BLOCK)
    with pattern.edit("edges of distance 100") as e:
        e.connect_many(rows, rows - DISTANCE // BLOCK)
    after, right = run()  # the same plan
    assert right == 1.0
    assert plan.fresh
    p.undo()
    assert run()[0].tobytes() == before.tobytes() != after.tobytes()
