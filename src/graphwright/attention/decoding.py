"""Native sparse attention one token at a time: summaries are appended to a state as their windows complete."""

from __future__ import annotations

import numpy as np

from graphwright.array import DType, float32, from_numpy, int64
from graphwright.attention.native_sparse import NativeSparse, SparseAttention
from graphwright.autograd import Tensor, arange, cat, no_grad, ones, zeros
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.functional import attention
from graphwright.nn.module import Buffer, Module
from graphwright.ops import call


def _state(shape: tuple[int, ...], value: float, dtype: DType = float32) -> Buffer:
    return Buffer(from_numpy(np.full(shape, value, dtype.numpy)), persistent=False)


class NativeSparseDecoder(Module):
    """States of `NativeSparse` for decoding: it chooses the blocks that a forward pass over all tokens chooses.

    The caches of keys and values hold `capacity` tokens, those of summaries one entry per window. A forward pass takes
    one token of each sequence, with the same ops for each position, so a trace of it is a program with states.

    Args:
        attention: the module whose parameters are used.
        batch: number of sequences, all of the same length.
        capacity: the most tokens of a sequence.

    Attributes:
        length: number of tokens so far, int64.
    Raises: UsageError for sizes below 1.
    """

    def __init__(self, attention: NativeSparse, batch: int, capacity: int) -> None:
        if batch < 1 or capacity < 1:
            raise UsageError("invalid sizes of a decoder", expected="batch and capacity >= 1",
                             got=f"batch {batch}, capacity {capacity}")  # fmt: skip
        self.attention, self.batch, self.capacity = attention, batch, capacity
        self.blocks = -(-capacity // attention.block)
        lead, width = (batch, attention.kv_heads), attention.head_dim
        windows = max((capacity - attention.summary) // attention.stride + 1, 1)

        def state(count: int) -> Buffer:
            return _state((*lead, count, width), 0.0, attention.q.weight.dtype)

        caches = 1 if attention.shared_kv else 2
        self.length = _state((), 0, int64)
        self.keys, self.values = ([state(capacity) for _ in range(caches)] for _ in range(2))
        self.recent = [state(attention.summary) for _ in range(2)]
        self.summaries = [state(windows) for _ in range(2)]
        self.pending = self.pending_mod = None
        if attention.granularity == "tile":
            self.pending = _state((*lead, 1, self.blocks), 0.0)
            self.pending_mod = _state((batch, 1, 1, 1), 1.0)

    def reset(self) -> None:
        """Begin new sequences."""
        self.length.assign(zeros((), dtype="int64"))
        if self.pending is not None and self.pending_mod is not None:
            self.pending.assign(zeros(*self.pending.shape, dtype=self.pending.dtype))
            self.pending_mod.assign(ones(*self.pending_mod.shape, dtype=self.pending_mod.dtype))

    def forward(self, x: Tensor, mod: Tensor | None = None) -> Tensor:
        """Attend from the next token x [B, 1, dim] of each sequence; the shape is kept. For `mod` see `attend`."""
        return self.attend(x, mod).out

    def attend(self, x: Tensor, mod: Tensor | None = None) -> SparseAttention:
        """Attend from the next token x [B, 1, dim], and return the choice and the branches too; `mod` is [B, 1].

        Raises: ShapeError; IndexError once `capacity` tokens are stored.
        """
        if x.shape[:2] != (self.batch, 1) or (mod is not None and mod.shape != x.shape[:2]):
            got = f"x {x.shape}" + ("" if mod is None else f", mod {mod.shape}")
            raise ShapeError("invalid operands of a decoder", expected=f"x [{self.batch}, 1, dim], mod [B, 1]", got=got)
        with no_grad():
            return self._attend(x, mod)

    def prefill(self, x: Tensor, mod: Tensor | None = None) -> Tensor:
        """Attend within prompts x [B, T, dim], from the first token on, in one pass, and store their states.

        Raises: ShapeError unless 1 <= T <= capacity.
        """
        a, time = self.attention, x.shape[1] if len(x.shape) == 3 else 0
        if x.shape[0] != self.batch or not 1 <= time <= self.capacity:
            expected = f"x [{self.batch}, 1 to {self.capacity}, dim]"
            raise ShapeError("invalid prompt of a decoder", expected=expected, got=f"x {x.shape}")
        self.reset()
        with no_grad():
            made = a.attend(x, mod)
            q, keys, values = a._projected(x)
            cos, sin = a.rope(arange(time)[None])
            q, rotated = a.rope.rotate(q, cos, sin), [a.rope.rotate(k, cos, sin) for k in keys]
            start, summaries = zeros((), dtype="int64"), a._summaries(keys[0], values[0])
            for states, new in ((self.keys, rotated), (self.values, values)):
                for state, i in zip(states, (0,) if a.shared_kv else (1, 2), strict=True):
                    state.assign(call("kv_append", state, new[i], start))
            for state, new in zip(self.recent, (keys[0], values[0]), strict=True):
                missing = max(a.summary - time, 0)
                last = call("slice", new, axis=2, start=max(time - a.summary, 0), size=a.summary - missing)
                state.assign(call("pad", last, widths=((missing, 0), (0, 0))))
            for state, new in zip(self.summaries, summaries, strict=True):
                state.assign(call("kv_append", state, new, start))
            at = time // a.block * a.block - 1
            if self.pending is not None and self.pending_mod is not None and at >= 0:
                query = call("slice", q, axis=2, start=at, size=1)
                _, shares = a._compressed(query, summaries, arange(at, at + 1))
                count = self.summaries[0].shape[2]
                shares = call("pad", shares, widths=((0, count - shares.shape[3]),))
                self.pending.assign(a._importance(shares, self.blocks).to(self.pending.dtype))
                if mod is not None:
                    self.pending_mod.assign(mod[:, at].reshape(self.batch, 1, 1, 1).to(self.pending_mod.dtype))
            self.length.assign(start + time)
        return made.out

    def _attend(self, x: Tensor, mod: Tensor | None) -> SparseAttention:
        a, start = self.attention, self.length
        position = start.reshape(1)
        q, keys, values = a._projected(x)
        cos, sin = a.rope(position[None])
        q, rotated = a.rope.rotate(q, cos, sin), [a.rope.rotate(k, cos, sin) for k in keys]
        used = (0,) if a.shared_kv else (1, 2)
        keys_now, values_now = (
            [call("kv_append", cache, new[i], start) for cache, i in zip(caches, used, strict=True)]
            for caches, new in ((self.keys, rotated), (self.values, values))
        )
        recent = [cat([old[:, :, 1:], new[0]], 2) for old, new in zip(self.recent, (keys, values), strict=True)]
        summaries = self._appended(recent, position)
        compressed, shares = a._compressed(q, summaries, position)
        importance = a._importance(shares, self.blocks)
        factor = None if mod is None else mod[:, None, :, None]
        chosen, pending = importance, None
        if self.pending is not None and self.pending_mod is not None:
            ends = call("eq", call("remainder", start + 1, a.block), 0)
            chosen = self.pending.to(importance.dtype)
            kinds = self.pending.dtype, self.pending_mod.dtype
            latest = importance.to(kinds[0]), ones(self.batch, 1, 1, 1) if factor is None else factor.to(kinds[1])
            factor = None if mod is None else self.pending_mod
            pending = [call("where", ends, new, old) for new, old in
                       zip(latest, (self.pending, self.pending_mod), strict=True)]  # fmt: skip
        choice = a._choose(chosen, position // a.block, factor)
        selected = a._selected(q, keys_now[0], values_now[0], choice, start)
        sliding = attention(q, keys_now[-1], values_now[-1], causal=True, window=a.window, q_start=start)
        made = a._mixed(x, (compressed, selected, sliding), choice)
        if pending is not None and self.pending is not None and self.pending_mod is not None:
            self.pending.assign(pending[0])
            self.pending_mod.assign(pending[1])
        for states, new in ((self.keys, keys_now), (self.values, values_now), (self.recent, recent),
                            (self.summaries, summaries)):  # fmt: skip
            for state, value in zip(states, new, strict=True):
                state.assign(value)
        self.length.assign(start + 1)
        return made

    def _appended(self, recent: list[Tensor], position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summaries, with that of the last tokens where its window ends at the position [1]."""
        a, (keys, values) = self.attention, self.summaries
        key = a._rotated_at(a.compress_k(a._windows(recent[0], 1)), position * 2 - (a.summary - 1))
        value = a.compress_v(a._windows(recent[1], 1))
        ends = arange(keys.shape[2]) * a.stride + (a.summary - 1)
        here = call("eq", ends, position)[None, None, :, None]
        return call("where", here, key, keys), call("where", here, value, values)
