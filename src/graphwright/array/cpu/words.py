"""Random words by calls of torch, for devices on which compiled loops of the CPU do not run. The words are the same.

torch has no unsigned 64-bit products; those of int64 wrap, so that the bits are right.
"""

from __future__ import annotations

from typing import Any

import torch

from graphwright.array.formulas import philox, specialise

LOW = 0xFFFFFFFF


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    wide = x * factor
    return (wide >> 32) & LOW, wide & LOW


_numbers = {name: tuple(map(int, getattr(philox, name))) for name in ("MULTIPLIERS", "WEYL")}
_formulas: Any = specialise(philox, {"LOW": LOW, "product": _product, **_numbers})


def words_by_torch(c0: Any, c1: Any, c2: Any, c3: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
    """Return the four random words of counters under the key `seed`, int64; arguments are int64 or Python's ints."""
    return _formulas.philox(c0, c1, c2, c3, seed & LOW, (seed >> 32) & LOW)


def fill_words_by_torch(out: torch.Tensor, key: torch.Tensor, stream: int | torch.Tensor, shift: int) -> None:
    """Fill the last axis of `out`, int32 or int64, as `loops.fill_words` does with one row.

    Args:
        out: [..., n].
        key: int64 [..., 2]: the bits of the seed, and the step.
        stream: the random stream; int64 [...] for one a row.
    """
    n = out.shape[-1]
    blocks = torch.arange((n + 3) // 4, device=out.device)
    seed, step = key[..., 0:1], key[..., 1:2] & LOW
    own = stream.unsqueeze(-1) & LOW if isinstance(stream, torch.Tensor) else stream & LOW
    words = words_by_torch(blocks & LOW, blocks >> 32, own, step, seed)
    shape = (*out.shape[:-1], len(blocks))
    drawn = torch.stack([w.expand(shape) for w in words], -1).flatten(-2)[..., :n]
    out.copy_(drawn >> shift)
