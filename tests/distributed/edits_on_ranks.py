"""Checks of edits that rank 0 shares, run by each rank; see `test_sync_edits.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright import distributed
from run_ranks import refusal
from seeds import deep


def net(seed: int = 0) -> gw.Program:
    """Return a small program with a junction: x -> h -> y, with a skip."""
    b, rng = gw.Builder("net"), np.random.default_rng(seed)
    x = b.input("x", ("B", 6))
    h = b.tanh(b.linear(x, b.param("w1", rng.normal(size=(12, 6)).astype("f4")), b.param("b1", np.zeros(12, "f4"))))
    y = b.linear(h, b.param("w2", rng.normal(size=(6, 12)).astype("f4")))
    b.output(b.junction(x, y), "y")
    return b.build()


def random_edit(p: gw.Program, rng: np.random.Generator, n: int) -> None:
    """Make one edit, undo or redo."""
    kind = int(rng.integers(8))
    if kind == 0 and p.history.undoable:
        p.undo()
        return
    if kind == 1 and p.history.redoable:
        p.redo()
        return
    with p.edit(f"edit {n}") as e:
        if kind in (2, 3):
            e.set_weight("w1", lambda w: w * np.float32(rng.uniform(0.5, 1.5)))
        elif kind == 4 and next(iter(p.axes().values())).size > 3:
            name = next(name for name, group in p.axes().items() if not group.frozen and group.size > 3)
            e.cut_units(p.axes()[name].units(int(rng.integers(p.axes()[name].size))))
        elif kind == 5:
            edge = list(p.in_edges(p.output("y").node))[-1]
            e.insert(edge, "sin", name=f"sin{n}")
        else:
            source = next(m for m in p.order() if p.op(m) == "tanh")
            width = int(p.spec(source).shape[-1])
            w = e.param(f"extra{n}", rng.normal(size=(6, width)).astype("f4"))
            e.connect(e.add("linear", source, w, name=f"linear{n}"), p.output("y").node)


def random_edits(rounds: int = deep(50, 10), ranks: int = 3) -> dict[str, Any]:
    """Rank 0 makes random edits between steps of training, which all ranks have after each call."""
    p, rng, batches = net(), np.random.default_rng(5), np.random.default_rng(6)
    optimizer = gw.optim.Adam(p.parameters(), lr=1e-2)
    here, share = distributed.rank(), 6 // distributed.ranks()
    inputs = {"x": (share, 6), "t": np.zeros((share, 6), "f4")}
    step = gw.compile_step(p, lambda y, t: ((y - t) ** 2).mean(), optimizer, inputs)
    distributed.data_parallel(step)
    structures, weights, counts, losses = [], [], [], []
    for n in range(rounds):
        if distributed.is_main():
            for k in range(int(rng.integers(3))):
                random_edit(p, rng, 10 * n + k)
        counts.append(len(distributed.sync_edits(p)))
        x, t = batches.normal(size=(2, 6, 6)).astype("f4")
        own = slice(here * share, (here + 1) * share)
        losses.append(step(x=x[own], t=t[own]).item())
        structures.append(p.structure_hash())
        weights.append(p.hash())
    return {"structures": structures, "weights": weights, "counts": counts, "losses": losses}


def refused() -> dict[str, Any]:
    """A rank that cannot apply an edit, and a rank that edited by itself."""
    found: dict[str, Any] = {}
    p, rows = net(), np.ones((2, 6), np.float32)
    optimizer = gw.optim.SGD(p.parameters(), lr=0.0)
    step = distributed.data_parallel(gw.compile_step(p, lambda y: (y * y).mean(), optimizer, {"x": rows}))
    first = float(step(x=rows))
    distributed.sync_edits(p)
    before = p.hash()
    if distributed.rank() == 1:  # a name that the edit of rank 0 will use: outside of the journal's sight
        p.readonly = True
    if distributed.is_main():
        with p.edit("one") as e:
            e.set_weight("w1", lambda w: w * 2)
        with p.edit("two") as e:
            e.set_weight("w2", lambda w: w * 2)
    found["refused"] = refusal(lambda: distributed.sync_edits(p))
    found["same"] = p.hash() == before
    p.readonly = False
    found["step"] = float(step(x=rows)) - first
    if distributed.is_main():
        with p.edit("three") as e:
            e.set_weight("w1", lambda w: w * 3)
    distributed.sync_edits(p)
    found["third"] = p.hash()
    if distributed.rank() == 1:
        with p.edit("alone") as e:
            e.set_weight("w1", lambda w: w * 4)
    found["local"] = refusal(lambda: distributed.sync_edits(p))
    q = net(1)
    if distributed.rank() == 1:
        with q.edit("before the first call") as e:
            e.set_weight("w1", lambda w: w * 4)
    found["first"] = refusal(lambda: distributed.sync_edits(q))
    return found


def of_a_file() -> dict[str, Any]:
    """Edit a model whose weights are in a file, some of equal shapes, and train it for a step."""
    p, here = gw.open("bundled", tokenizer=False).program, distributed.rank()
    ids = np.random.default_rng(3).integers(0, 200, (distributed.ranks(), 6))
    given = {"ids": ids[here : here + 1], "positions": np.arange(6)[None]}

    def loss(logits: Any, ids: Any) -> Any:
        return gw.nn.functional.cross_entropy(logits[:, :-1], ids[:, 1:], dim=-1)

    step = gw.compile_step(p, loss, gw.optim.SGD(p.parameters(), lr=0.1), given)
    distributed.data_parallel(step)
    if distributed.is_main():
        with p.edit("one more layer") as e:
            e.duplicate("layers.1")
        with p.edit("another order") as e:
            e.insert(next(iter(p.out_edges("layers.0.attn.k"))), "tanh")
    count = len(distributed.sync_edits(p))
    step(given)
    return {"count": count, "order": [p.path(n) for n in p.order()], "hash": p.hash()}


def everything() -> dict[str, Any]:
    return {"random": random_edits(), "refused": refused(), "of a file": of_a_file()}
