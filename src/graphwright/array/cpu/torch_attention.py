"""Attention by torch itself over numpy arrays: what attention over patterns is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float32]


def dense_causal(q: Array, k: Array, v: Array, g: Array) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return calls of `scaled_dot_product_attention` with `is_causal`: forward, and forward and backward.

    Args:
        q, k, v, g: [N, H, T, d], float32; g is the gradient of the result.
    """
    a, b, c = (torch.from_numpy(x).requires_grad_() for x in (q, k, v))
    slope = torch.from_numpy(g)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True)

    def both() -> Sequence[torch.Tensor]:
        made = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True)
        return torch.autograd.grad(made, (a, b, c), slope)

    return forward, both


def flex_causal(q: Array, k: Array, v: Array, block_mask: Any) -> Callable[[], Array]:
    """Return a call of FlexAttention's forward over the blocks of a causal BlockMask; its first use compiles it.

    Partial blocks allow all pairs but those with a later key. FlexAttention has no backward pass on CPU.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    lists = [getattr(block_mask, f"{part}_{kind}") for part in ("kv", "full_kv") for kind in ("num_blocks", "indices")]
    mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=block_mask.BLOCK_SIZE, mask_mod=lambda b, h, i, j: j <= i, seq_lengths=block_mask.seq_lengths
    )
    run: Any = torch.compile(flex_attention, dynamic=False)
    given = [torch.from_numpy(x) for x in (q, k, v)]

    def forward() -> Array:
        with torch.no_grad():
            return run(*given, block_mask=mask).numpy()

    return forward
