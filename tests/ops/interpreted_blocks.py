"""Runs the Triton kernels of block-sparse attention in Triton's interpreter and prints their errors as JSON lines.

A process of its own, with TRITON_INTERPRET=1: Triton reads the variable when it defines a kernel.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from block_conformance import CASES, Results, errors, problem

from graphwright.array.triton import launch
from graphwright.array.triton.kernel import table
from graphwright.patterns import table as words


def execute(op: str, operands: Results, attrs: dict[str, Any]) -> Results:
    """Run a kernel on tensors; its results are filled with NaN before."""
    q, v = operands[0], operands[2]
    if op == "block_sdpa":
        outs = [q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3])]
    elif op == "block_mass":
        outs = [torch.empty(attrs["edges"])]
    else:
        outs = [torch.empty_like(t) for t in operands[:3]]
        outs += [torch.empty_like(operands[4])] if "gates" in attrs["optional"] else []
    for out in outs:
        out.fill_(torch.nan)
    calls = getattr(launch, op)(outs, operands, attrs, [])
    for call in calls if isinstance(calls, list) else [calls]:
        call()
    return outs


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


def layouts_taken() -> dict[str, bool]:
    """Return which operands of the backward kernel may be transposed; "" stands for none of them."""
    x, row, ints = torch.zeros(1, 2, 32, 32), torch.zeros(1, 2, 32), torch.zeros(64, dtype=torch.int32)
    ins = {"q": x, "k": x, "v": x, "table": ints, "out": x, "lse": row, "grad": x}
    given = {"": ins, **{name: {**ins, name: ins[name].transpose(2, -1)} for name in ("q", "k", "v", "out", "grad")}}
    takes = table()["block_sdpa_backward"].takes
    return {name: not takes([x] * 3, [*each.values()], {}) for name, each in given.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (name, case) in enumerate(CASES.items()):
        found = errors(problem(case, number), execute, case.get("dtype", torch.float32))
        print(json.dumps([name, found]), flush=True)
    print(json.dumps(["edits", wrong_words(0)]), flush=True)
    print(json.dumps(["layouts", layouts_taken()]), flush=True)
