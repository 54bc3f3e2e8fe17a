"""Modules of generated code that hold a pattern: block lists, the mask of tokens, the mask of FlexAttention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.models.gemma2 import modeling_gemma2 as gemma2

from block_edges import edges_of
from graphwright import attention as at
from graphwright.models.codegen.patterns import block_lists
from graphwright.models.codegen.templates import CLASSES

HEADS, GROUPS = 4, 2


def patterns() -> dict[str, at.Pattern]:
    """Patterns of 301 tokens, most of them edited: planes of 1, of the key heads and of the heads."""
    rng = np.random.default_rng(0)
    star = at.star(301, global_tokens=5, window=40, block=16)
    star.cut(edges_of(star, (9, 9)))
    window = at.sliding_window(301, 70, block=64, planes=2)
    window.connect(4, 0, plane=1)
    random = at.random_blocks(301, 2, block=32, planes=4) | at.block_local(301, 0, block=32, planes=4)
    random.cut(np.asarray(random.edges())[rng.random(len(random)) < 0.3])
    documents = at.document(301, np.repeat([0, 1, 2], [50, 130, 121]), block=7)
    return {"star": star, "window": window, "random": random, "documents": documents}


def module(pattern: at.Pattern) -> Any:
    """The module of generated code that holds a pattern."""
    names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "BlockMask": BlockMask}
    exec(CLASSES["BlockPattern"], names)
    lists = block_lists(pattern)
    made = names["BlockPattern"](*lists.sizes)
    made.load_state_dict({k.removeprefix("x."): torch.tensor(v) for k, v in lists.arrays("x").items()})
    return made


def run(tokens: int, past: int = 0, seen: Any = None) -> Any:
    return SimpleNamespace(T=tokens, past=past, tokens=seen, attentions=None)


@pytest.mark.parametrize("name", patterns())
def test_the_mask_of_the_module_is_that_of_the_pattern(name):
    pattern = patterns()[name]
    dense = torch.from_numpy(pattern.to_dense()).repeat_interleave(HEADS // pattern.planes, 0)
    made = module(pattern)
    for start, stop, length in ((0, 301, 301), (0, 100, 100), (100, 117, 117), (300, 301, 301), (5, 6, 20)):
        found = made(run(stop - start, start), HEADS, length).expand(1, HEADS, stop - start, length)[0]
        np.testing.assert_array_equal(found, dense[:, start:stop, :length])


def test_left_padding_moves_the_pattern_with_the_text():
    pattern = patterns()["star"]
    dense, made = torch.from_numpy(pattern.to_dense()), module(pattern)
    shown = torch.ones(2, 60, dtype=torch.long)
    shown[1, :9] = 0
    found = made(run(60, 0, shown), HEADS, 60)
    np.testing.assert_array_equal(found[0, 0], dense[0, :60, :60])
    np.testing.assert_array_equal(found[1, 0, 9:, 9:], dense[0, :51, :51])
    assert not found[1, 0, :, :9].any()


def test_a_text_longer_than_the_pattern_is_refused():
    with pytest.raises(ValueError, match="has 301 tokens, the text 302"):
        module(patterns()["star"])(run(2, 300), HEADS, 302)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "tokens"), [("star", 301), ("window", 301), ("window", 200), ("random", 290)])
def test_the_block_mask_computes_what_the_mask_does(name, tokens):
    pattern, rng = patterns()[name], np.random.default_rng(1)
    made = module(pattern)
    q, k, v = (
        torch.from_numpy(rng.normal(size=(2, h, tokens, 16)).astype(np.float32)) for h in (HEADS, GROUPS, GROUPS)
    )
    seen = made(run(tokens), HEADS, tokens)
    wanted = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3, enable_gqa=True)
    wanted = wanted.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    mask = made.block_mask(made.table(), HEADS, tokens)
    found = flex_attention(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert mask.BLOCK_SIZE == (128, 128)
    blocks = torch.zeros(mask.shape[1], 3, 3, dtype=torch.bool)
    whole = F.pad(seen.expand(1, HEADS, -1, -1)[0], (0, 384 - tokens, 0, 384 - tokens))[: mask.shape[1]]
    blocks |= whole.unflatten(2, (3, 128)).unflatten(1, (3, 128)).any(4).any(2)
    assert torch.equal(mask.to_dense()[0].bool(), blocks[:, : mask.to_dense().shape[2], : mask.to_dense().shape[3]])


def test_equal_masks_of_blocks_are_stored_once():
    lists = block_lists(at.sliding_window(4096, 512, block=64))
    assert lists.masks.shape == (3, 64, 8)  # all pairs, the diagonal, the far edge of the window
    assert len(lists.edges) == len(at.sliding_window(4096, 512, block=64))
    assert (lists.masks[0] == 255).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("weights", [False, True])
def test_a_softcap_is_that_of_gemma_2(weights):
    """Of the attention of Gemma 2 in transformers, with the pattern as its mask; FlexAttention agrees."""
    names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "BlockMask": BlockMask}
    exec(CLASSES["PatternAttention"], names)
    names["flex"] = flex_attention  # not compiled
    made, pattern, rng = (
        names["PatternAttention"](HEADS // GROUPS, 0.3, 1.5),
        patterns()["random"],
        np.random.default_rng(2),
    )
    q, k, v = (torch.from_numpy(rng.normal(size=(2, h, 290, 16)).astype(np.float32)) for h in (HEADS, GROUPS, GROUPS))
    blocks = module(pattern)
    seen = blocks(run(290), HEADS, 290)
    state = SimpleNamespace(cache=None, seen={"p": seen}, attentions=[] if weights else None)
    found, _ = made(q, k, v, "p", state)
    rows = seen.any(-1, keepdim=True)
    mask = torch.where(seen, 0.0, -torch.inf).masked_fill(~rows, 0.0)
    shape: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, training=False)
    wanted, own = gemma2.eager_attention_forward(shape, q, k, v, mask, scaling=0.3, softcap=1.5)
    torch.testing.assert_close(found, wanted.transpose(1, 2).masked_fill(~rows, 0.0), atol=1e-5, rtol=1e-5)
    if weights:
        torch.testing.assert_close(state.attentions[0], own.masked_fill(~rows, 0.0), atol=1e-6, rtol=1e-5)
    state.seen["p"] = blocks.block_mask(blocks.table(), HEADS, 290)
    torch.testing.assert_close(made(q, k, v, "p", state)[0], found, atol=1e-5, rtol=1e-5)
