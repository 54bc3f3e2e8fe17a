"""What an edit of a pattern costs, over the number of tokens, beside rebuilding the block masks of FlexAttention.

A pattern's edit changes both adjacency lists, forward and transposed. FlexAttention's peer that does the same is
`BlockMask.from_kv_blocks` with `compute_q_blocks`, which takes lists too and transposes them by sorting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import graphwright as gw
from benchmarks.block_attention import BLOCK, WIDTH, Operands, dense_attention, flex_mask
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import attention as at
from graphwright.array.cpu import set_num_threads

PARTS = ("single", "steps")
WINDOW = 512
EAGER, COMPILED, LISTS = 4096, 65536, 262144
"""Largest number of tokens for which each way to make a block mask runs: the first makes a dense mask of all pairs."""
SINGLE = "with a journal entry each"
Call = Callable[[], Any]


# -- one edit ----------------------------------------------------------------------------------------------------------
def single(tokens: Sequence[int] = (4096, 65536, 262144, 1048576)) -> Figure:
    """One block connected and cut again: the edit alone, with its journal entry, in a program; rebuilt block masks."""
    _one_thread()
    figure = Figure(
        "One edit of a block",
        f"window {WINDOW}, blocks of {BLOCK}, 1 thread; an edit is half of connecting a pair and cutting it",
    )
    flat: dict[str, list[float]] = {}
    for length in tokens:
        pattern = at.sliding_window(length, WINDOW, BLOCK)
        owned, program = _owned(length)
        calls: dict[str, tuple[Call, int]] = {
            SINGLE: (_toggle(pattern, 100), 200),
            "in a transaction of 2,000": (_toggle_in_one(pattern, 1000), 2000),
            "with an entry in the program's journal each": (_toggle(owned, 10), 20),
        }
        peers: dict[str, Call] = {}
        if length <= LISTS:
            peers["BlockMask.from_kv_blocks, compute_q_blocks"] = _from_lists(pattern)
        if length <= EAGER:
            peers["create_block_mask, eager"] = _created(length, compiled=False)
        if length <= COMPILED:
            peers["create_block_mask, compiled"] = _created(length, compiled=True)
        before = pattern.hash()
        runs = rounds({name: call for name, (call, _) in calls.items()}, n=15)
        counts = {name: n for name, (_, n) in calls.items()} | {"A/A": 200}
        taken = {name: [s / counts[name] for s in samples] for name, samples in runs.items()}
        assert pattern.hash() == owned.hash() == before
        assert program.version > 0
        lead = f"{length:,} tokens, graphwright: "
        add_rounds(figure, {lead + name: samples for name, samples in taken.items()}, "us")
        for name in calls:
            flat.setdefault(name, []).append(median(taken[name]))
        for name, call in peers.items():
            slow = rounds({name: call}, n=3, warm=1)[name]
            times = median(slow) / median(taken[SINGLE])
            row = f"{length:,} tokens: {name}"
            add_rounds(figure, {row: slow}, "ms", {row: f"{times:,.0f} times an edit with a journal entry"})
    if len(tokens) > 1:
        slopes = {name: np.polyfit(np.log(tokens), np.log(values), 1)[0] for name, values in flat.items()}
        figure.notes += [f"{name}: slope {slope:+.3f} of log time over log tokens" for name, slope in slopes.items()]
    figure.notes.append(
        f"not run: eager above {EAGER:,} tokens, compiled above {COMPILED:,}; from_kv_blocks, whose lists are dense "
        f"tables of blocks, above {LISTS:,}"
    )
    return figure


def _one_thread() -> None:
    set_num_threads(1)
    torch.set_num_threads(1)


def _far(pattern: at.Pattern) -> tuple[int, int]:
    """Return a pair of blocks outside the window, in the middle of the pattern."""
    row = pattern.blocks[0] // 2
    return row, row // 2


def _toggle(pattern: at.Pattern, n: int) -> Call:
    q, k = _far(pattern)

    def call() -> None:
        for _ in range(n):
            pattern.cut(pattern.connect(q, k))

    return call


def _toggle_in_one(pattern: at.Pattern, n: int) -> Call:
    q, k = _far(pattern)

    def call() -> None:
        with pattern.edit("toggle") as e:
            for _ in range(n):
                e.cut(e.connect(q, k))

    return call


def _owned(tokens: int) -> tuple[at.Pattern, gw.Program]:
    """Return a pattern that belongs to a program, and the program."""
    pattern = at.sliding_window(tokens, WINDOW, BLOCK)
    b = gw.Builder("edited")
    q = b.input("q", (1, 1, tokens, WIDTH), "float32")
    out = b.block_sdpa(q, q, q, b.pattern("pattern", pattern), scale=WIDTH**-0.5, planes=1)
    b.output(out[0], "out")
    return pattern, b.build()


def _from_lists(pattern: at.Pattern) -> Call:
    """Return a call that makes a block mask from lists of key blocks that have changed, transposed lists included."""
    made = flex_mask(pattern)
    assert made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum() == len(pattern)
    lists = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
    how = {"BLOCK_SIZE": BLOCK, "mask_mod": made.mask_mod, "seq_lengths": pattern.tokens}
    return lambda: BlockMask.from_kv_blocks(*lists, compute_q_blocks=True, **how)


def _created(tokens: int, compiled: bool) -> Call:
    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < WINDOW)

    return lambda: create_block_mask(rule, 1, 1, tokens, tokens, device="cpu", BLOCK_SIZE=BLOCK, _compile=compiled)


# -- edits and steps ---------------------------------------------------------------------------------------------------
def steps(tokens: int = 4096, heads: int = 2, edits: Sequence[int] = (1, 10, 100, 1000)) -> Figure:
    """Edits and then attention over the edited pattern: forward, and backward where the peer has one."""
    _one_thread()
    figure = Figure(
        "Edits before each step",
        f"1 x {heads} x {tokens:,} x {WIDTH}, f32, window {WINDOW}, 1 thread; edits connect or cut a pair",
    )
    operands, pattern = Operands(tokens, heads), at.sliding_window(tokens, WINDOW, BLOCK)
    operands.check(pattern)
    q, k = (x[np.random.default_rng(0).permutation(len(x))] for x in _absent(pattern))
    edit: dict[int, float] = {}
    arrays: dict[int, float] = {}
    rebuild: dict[int, float] = {}
    for n in edits:
        pairs = np.stack([q[:n], k[:n]])
        toggled = _Toggled(pattern.copy(), pairs)
        flex, masked = _Rebuilt(pattern.copy(), pairs, operands), _Masked(pattern, pairs, operands)
        toggled()
        operands.check(toggled.pattern)
        np.testing.assert_allclose(flex(), operands.forward(toggled.pattern).numpy(), rtol=1e-4, atol=1e-5)
        toggled()
        flex()
        calls: dict[str, Call] = {
            "graphwright, edits alone, one by one": toggled,
            "graphwright, edits alone, as arrays": _Toggled(pattern.copy(), pairs, bulk=True),
            "FlexAttention, block mask alone": flex.rebuild,
            "graphwright, edits, forward and backward": lambda t=toggled: (t(), operands.both(t.pattern)),
            "FlexAttention, block mask and forward": flex,
            "torch SDPA with a mask tensor, edits, forward and backward": masked,
            "torch SDPA dense causal, forward and backward": operands.dense_both,
        }
        taken = rounds(calls, n=7, warm=2)
        add_rounds(figure, {f"{n:,} edits: {name}": samples for name, samples in taken.items()})
        edit[n] = median(taken["graphwright, edits alone, one by one"])
        arrays[n] = median(taken["graphwright, edits alone, as arrays"])
        rebuild[n] = median(taken["FlexAttention, block mask alone"])
    most, new = max(edit), median(rebuild.values())
    one, bulk = edit[most] / most, arrays[most]
    figure.notes.append(
        f"an edit takes {1e6 * one:.2f} us, a new block mask {1e3 * new:.2f} ms: rebuilding wins over single "
        f"edits from {new / one:,.0f} edits a step on; {most:,} edits as arrays take {1e3 * bulk:.2f} ms"
    )
    figure.notes.append("FlexAttention has no backward pass on CPU; its lists are updated outside of the measurement")
    return figure


def _absent(pattern: at.Pattern) -> tuple[np.ndarray, np.ndarray]:
    """Return the causal pairs of blocks without an edge."""
    known = np.zeros(pattern.blocks, bool)
    _, q, k = pattern.pairs().T
    known[q, k] = True
    q, k = np.nonzero(np.tril(~known, -1))
    return q, k


class _Toggled:
    """Connects pairs of a pattern, and cuts them in the next call."""

    def __init__(self, pattern: at.Pattern, pairs: np.ndarray, bulk: bool = False) -> None:
        self.pattern, self.pairs, self.bulk = pattern, pairs, bulk
        self.listed, self.edges = pairs.T.tolist(), None

    def __call__(self) -> None:
        with self.pattern.edit("toggle") as e:
            if self.edges is None:
                self.edges = e.connect_many(*self.pairs) if self.bulk else [e.connect(q, k) for q, k in self.listed]
                return
            if self.bulk:
                e.cut(self.edges)
            else:
                for edge in self.edges:
                    e.cut(edge)
            self.edges = None


class _Rebuilt:
    """Makes a block mask with or without the pairs, and runs FlexAttention's compiled forward."""

    def __init__(self, pattern: at.Pattern, pairs: np.ndarray, operands: Operands) -> None:
        without = flex_mask(pattern)
        pattern.connect_many(*pairs)
        self.masks, self.turn = (flex_mask(pattern), without), count()
        self.compiled, self.tokens = operands.flex_with(), pattern.tokens

    def rebuild(self) -> BlockMask:
        made = self.masks[next(self.turn) % 2]
        lists = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
        return BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=BLOCK, mask_mod=made.mask_mod, seq_lengths=self.tokens, compute_q_blocks=True
        )

    def __call__(self) -> torch.Tensor:
        return self.compiled(self.rebuild())


class _Masked:
    """Writes blocks of a dense mask, and runs torch's attention with it, forward and backward."""

    def __init__(self, pattern: at.Pattern, pairs: np.ndarray, operands: Operands) -> None:
        self.mask, self.operands = torch.from_numpy(pattern.to_dense()[0]), operands
        self.pairs, self.turn = (BLOCK * pairs).T.tolist(), count()

    def __call__(self) -> Any:
        seen = next(self.turn) % 2 == 0
        for q, k in self.pairs:
            self.mask[q : q + BLOCK, k : k + BLOCK] = seen
        given = self.operands.torch
        return torch.autograd.grad(dense_attention(*given, attn_mask=self.mask), given, self.operands.torch_g)
