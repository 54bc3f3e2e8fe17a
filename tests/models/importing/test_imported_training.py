"""Modules opened from transformers train as torch trains them, step by step, and keep what torch keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import graphwright as gw
from graphwright import nn, optim

STEPS = 50
OFF: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 64, **OFF}  # fmt: skip


def made(name: str) -> tuple[Any, dict[str, Any], int, tuple[int, ...]]:
    """A module, and rows of its inputs."""
    torch.manual_seed(3)
    rng = np.random.default_rng(0)
    if name == "vit":
        options = {**SMALL, "image_size": 16, "patch_size": 4, "num_labels": 5}
        config = tf.ViTConfig(**options)
        pixels = rng.normal(size=(6, 3, 16, 16)).astype("f4")
        return tf.ViTForImageClassification(config), {"pixel_values": pixels}, 5, (6,)
    config = tf.BertConfig(**SMALL, vocab_size=40, max_position_embeddings=32)
    return tf.BertForMaskedLM(config), {"input_ids": rng.integers(0, 40, (4, 9))}, 40, (4, 9)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_50_steps_of_adamw_are_those_of_torch(name):
    module, example, classes, shape = made(name)
    given = {n: torch.from_numpy(a) for n, a in example.items()}
    p = gw.from_torch(module, (), given, train=True, share=False)
    targets = np.random.default_rng(1).integers(0, classes, shape)
    step = optim.compile_step(
        p, lambda logits, targets: nn.functional.cross_entropy(logits, targets, dim=-1),
        optim.AdamW([p.weights[p.key(n)] for n in p.params()], 1e-3, weight_decay=0.01),
        {**example, "targets": targets},
    )  # fmt: skip
    ours = [step(**example, targets=targets).item() for _ in range(STEPS)]

    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, weight_decay=0.01)
    theirs = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = module(**given).logits.flatten(0, -2)
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets).flatten())
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert theirs[-1] < 0.7 * theirs[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_language_model_of_transformers_is_captured_without_its_cache():
    config = tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=40)
    module, ids = tf.GPT2LMHeadModel(config).eval(), torch.arange(8)[None]
    p = gw.from_torch(module, (), {"input_ids": ids}, sizes={"input_ids": ("B", "T")})
    assert module.config.use_cache
    longer = torch.arange(11).repeat(2, 1)
    with torch.no_grad():
        np.testing.assert_allclose(p(input_ids=longer.numpy())["logits"].numpy(), module(longer).logits, atol=1e-5)
