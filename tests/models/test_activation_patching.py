"""Activation patching on a llama beside torch's forward hooks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import relative, some_ids

import graphwright as gw
from graphwright.testing.oracle import assert_bits

HOOKED = {"layers.1.mlp.down": "model.layers.1.mlp", "layers.1.attn.o": "model.layers.1.self_attn.o_proj"}


@pytest.mark.parametrize("path", HOOKED)
def test_patching_an_activation_matches_a_torch_forward_hook(made, path: str) -> None:
    checkpoint = made("llama")
    module = checkpoint.model.get_submodule(HOOKED[path])
    ids, other = some_ids((1, 7)), some_ids((1, 7), seed=2)
    taken = []
    with torch.no_grad(), module.register_forward_hook(lambda m, a, out: taken.append(out)):
        checkpoint.model(torch.tensor(other))
    with torch.no_grad(), module.register_forward_hook(lambda m, a, out: taken[0]):
        truth = checkpoint.model(torch.tensor(ids)).logits.numpy()

    p = gw.open(checkpoint.path).program
    feeds = {"positions": np.arange(7)[None]}
    captured = p.run({"ids": other, **feeds}, keep="outputs", capture=[path]).value(path)
    run = p.run({"ids": ids, **feeds}, patch={path: captured})["logits"]
    plan = p.compile({"ids": (1, 7), "positions": (1, 7)}, patch=[path], deterministic=True)
    assert_bits(plan({"ids": ids, **feeds, f"patch.{path}": captured})["logits"], run)
    assert relative(run.to_numpy(), truth) < 1e-5
    plain = p.run({"ids": ids, **feeds})
    assert relative(plain["logits"].to_numpy(), truth) > 1e-2
    itself = plan({"ids": ids, **feeds, f"patch.{path}": plain.value(path)})["logits"]
    assert_bits(itself, plain["logits"])
