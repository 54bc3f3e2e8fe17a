"""Gradient checkpoints of routed models: equal bits, and nothing that routes is computed twice."""

from __future__ import annotations

import numpy as np
import pytest
from moe import ids, program

import graphwright as gw
from graphwright import experts as ex
from graphwright.nn import functional
from graphwright.optim import SGD
from graphwright.program.program import Program


def trained(p: Program) -> tuple[dict[str, bytes], gw.optim.CompiledStep]:
    def loss(logits, targets):
        return functional.cross_entropy(logits, targets, dim=-1)

    step = gw.compile_step(p, loss, SGD(p, lr=0.1), {"ids": ids(), "targets": ids(seed=1)}, deterministic=True)
    for seed in range(3):
        step(ids=ids(seed=seed), targets=ids(seed=seed + 1))
    return {key: p.weights[key].data.tobytes() for key in p.weights}, step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_marked_model_trains_to_equal_bits_and_routes_once(dtype):
    plain, marked = program(dtype), program(dtype)
    assert ex.checkpoint(marked) == 2
    before, _ = trained(plain)
    after, step = trained(marked)
    assert after == before
    p = step.program
    again = [p.op(n) for n in p.nodes() if "recompute" in p.path(n)]
    assert "expert_mlp" in again or "linear" in again
    assert not {"topk", "dispatch"} & set(again)
    assert len([n for n in p.nodes() if p.op(n) == "dispatch"]) == 2
    assert len([n for n in p.nodes() if p.op(n) == "topk"]) == 2


def test_blocks_by_name_and_programs_without_experts():
    p = program()
    assert ex.checkpoint(p, ["layers.1"]) == 1
    with pytest.raises(ex.NotAMixture):
        ex.checkpoint(gw.trace(gw.nn.Linear(3, 4), np.zeros((2, 3), np.float32)))
