"""The kernel that updates the KV cache. In place when the output is the operand itself."""

from __future__ import annotations

from functools import partial

import torch

from graphwright.array.backend import Attrs, Call
from graphwright.array.cpu.kernel import Tensors, carry, kernel
from graphwright.array.dtype import int64
from graphwright.array.spec import Spec


@kernel("kv_append", work=lambda o, i, a: [Spec((i[1].shape[2],), int64)] * 2)
def kv_append(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Call]:
    """The cache [B, G, M, D] with new rows [B, G, T, D] from `start` on. Raises IndexError past the end."""
    cache, rows, start = ins
    places, room = torch.arange(rows.shape[2]), torch.arange(cache.shape[2])
    return [
        partial(torch.add, places, start, out=work[0]),
        partial(torch.index_select, room, 0, work[0], out=work[1]),  # raises before anything is written
        *carry(outs, [cache]),
        partial(outs[0].index_copy_, 2, work[0], rows),
    ]
