"""Checks of divided programs, run by each rank; see `test_tensor_parallel.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright import distributed


def feeds(p: gw.Program, batch: int = 2, length: int = 9) -> dict[str, np.ndarray]:
    """Return token ids and positions."""
    ids = np.random.default_rng(3).integers(0, 200, (batch, length))
    return {"ids": ids, "positions": np.broadcast_to(np.arange(length), ids.shape).copy()}


def bundled(selection: str = "layers.*") -> dict[str, Any]:
    """Divide the bundled model; return what is left of it here, distances of logits, and hashes before and after."""
    p = gw.open("bundled").program
    given, before = feeds(p), p.hash()
    wanted = p.run(given)["logits"].to_numpy()
    sizes = {key: v.shape for key, v in p.weights.items()}
    with p.edit("divide") as e:
        division = distributed.tensor_parallel(e, p.select(selection))
    own = {key: v.shape for key, v in p.weights.items()}
    found = p.run(given)["logits"].to_numpy()
    planned = p.compile(ids=given["ids"].shape, positions=given["positions"].shape)(given)["logits"].to_numpy()
    divided = p.hash()
    p.undo()
    undone, again = p.hash(), p.run(given)["logits"].to_numpy()
    p.redo()
    redone = p.hash()
    with distributed.gathered(p):
        inside = p.hash()
    return {
        "axes": {name: list(units) for name, units in division.axes.items()}, "sums": list(division.sums),
        "far": float(np.abs(found - wanted).max()), "planned": float(np.abs(planned - wanted).max()),
        "same": bool(np.array_equal(again, wanted)), "hashes": [before, undone, inside],
        "divided": [divided, redone, p.hash()], "share": sum(map(np.prod, own.values())) / sum(map(np.prod, sizes.values())),
        "keys": sorted(own) == sorted(sizes),
    }  # fmt: skip
