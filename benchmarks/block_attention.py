"""Attention over the edges of a pattern beside dense attention and FlexAttention, over tokens and densities.

Density is the share of the causal pairs that a pattern allows, so the dense peer, `scaled_dot_product_attention` with
`is_causal`, has density 1. Results and gradients are compared with masked dense attention before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import attention as at
from graphwright.array.cpu import set_num_threads
from graphwright.attention.timing import density_of, random_pattern
from graphwright.autograd import grad, no_grad
from graphwright.models.open import config_from, create

PARTS = ("training", "two_threads", "densities", "windows", "decode", "model_decode", "gpu")
BLOCK, WIDTH = 64, 64
MASKED = 2048
"""Largest number of tokens for which the algorithm "dense" runs, which writes a mask of all pairs."""
DENSITIES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
DENSE = "torch SDPA, dense causal"
Call = Callable[[], Any]
dense_attention = torch.nn.functional.scaled_dot_product_attention


# -- patterns and operands ---------------------------------------------------------------------------------------------
def window_pattern(tokens: int, density: float) -> at.Pattern:
    """Return the sliding window that allows this share of the causal pairs."""
    return at.sliding_window(tokens, max(round(tokens * (1 - (1 - density) ** 0.5)), 1), BLOCK)


class Operands:
    """q, k, v and the gradient g of the result, [1, heads, tokens, 64] float32, for Graphwright and for torch."""

    def __init__(self, tokens: int, heads: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        arrays = [rng.normal(size=(1, heads, tokens, WIDTH)).astype("f4") for _ in range(4)]
        self.own, self.torch = [gw.tensor(x) for x in arrays[:3]], [torch.from_numpy(x) for x in arrays[:3]]
        self.g, self.torch_g = gw.tensor(arrays[3]), torch.from_numpy(arrays[3])
        for x in (*self.own, *self.torch):
            x.requires_grad = True

    def forward(self, pattern: at.Pattern, algorithm: Any = "auto") -> gw.Tensor:
        with no_grad():
            return at.attend(*self.own, pattern, algorithm=algorithm)

    def both(self, pattern: at.Pattern, algorithm: Any = "auto") -> Any:
        y = at.attend(*self.own, pattern, algorithm=algorithm)
        return grad(y, self.own, self.g)

    def dense_forward(self) -> torch.Tensor:
        with torch.no_grad():
            return dense_attention(*self.torch, is_causal=True)

    def dense_both(self) -> Any:
        return torch.autograd.grad(dense_attention(*self.torch, is_causal=True), self.torch, self.torch_g)

    def flex(self, pattern: at.Pattern) -> Call:
        """Return FlexAttention's compiled forward over the same blocks; its masks are computed, not looked up."""
        mask, run = flex_mask(pattern), self.flex_with()
        return lambda: run(mask)

    def flex_with(self) -> Callable[[BlockMask], torch.Tensor]:
        """Return FlexAttention's compiled forward as a function of a block mask."""
        torch.compiler.reset()  # torch keeps 8 compiled forms of a function; a ninth runs uncompiled, and wrong
        run, given = torch.compile(flex_attention, dynamic=False), [x.detach() for x in self.torch]

        def call(mask: BlockMask) -> torch.Tensor:
            with torch.no_grad():
                return run(*given, block_mask=mask)

        return call

    def check(self, pattern: at.Pattern, algorithm: Any = "auto") -> None:
        """Assert that result and gradients of one head are those of masked dense attention in float64."""
        head = self.own[0].shape[1] - 1
        q, k, v = (x.detach()[0, head].double().requires_grad_() for x in self.torch)
        mask = torch.from_numpy(pattern.to_dense()[0])
        y = self.forward(pattern, algorithm).numpy()[0, head]
        found = [x.numpy()[0, head] for x in self.both(pattern, algorithm)]
        for start in range(0, len(q), 1024):  # rows of all pairs: no [T, T] of float64
            rows = slice(start, start + 1024)
            expected = dense_attention(q[None, rows], k[None], v[None], attn_mask=mask[rows])[0]
            np.testing.assert_allclose(y[rows], expected.detach(), rtol=1e-4, atol=1e-5)
            expected.backward(self.torch_g[0, head, rows].double())
        for x, own in zip((q, k, v), found, strict=True):
            assert x.grad is not None
            np.testing.assert_allclose(own, x.grad, rtol=1e-3, atol=1e-4)


def flex_mask(pattern: at.Pattern) -> BlockMask:
    """Return the same blocks for FlexAttention, with the pattern's base rule as `mask_mod`: no table of masks."""
    made, window = pattern.to_flex(), pattern.base.window or max(pattern.tokens)

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < window)

    lists = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=pattern.block, mask_mod=rule, seq_lengths=pattern.tokens)


def flex_backward(operands: Operands) -> str:
    """Return what FlexAttention says when it is asked for gradients here."""
    try:
        flex_attention(*operands.torch, block_mask=flex_mask(window_pattern(operands.torch[0].shape[2], 0.1)))
    except NotImplementedError as error:
        return f"FlexAttention, asked for gradients: {str(error).partition('.')[0]}"
    return "FlexAttention has a backward pass here: it is missing in this figure"


def about(pattern: at.Pattern) -> str:
    return f"density {100 * density_of(pattern):.1f} %, {len(pattern):,} edges"


# -- forward and backward ----------------------------------------------------------------------------------------------
def training(
    tokens: Sequence[int] = (1024, 4096, 16384), density: float = 0.1, heads: int = 8, threads: int = 1
) -> Figure:
    """Forward, and forward and backward, at one density."""
    set_num_threads(threads)
    torch.set_num_threads(threads)
    figure = Figure(
        f"Attention at a density of {100 * density:.0f} %, {threads} thread{'s' * (threads > 1)}",
        f"1 x {heads} x tokens x {WIDTH}, f32, causal, blocks of {BLOCK}; forward and backward",
    )
    for count in tokens:
        operands, few = Operands(count, heads), count > 8192
        patterns = {"random blocks": random_pattern(count, density), "window": window_pattern(count, density)}
        if count < 4096:  # 64 tokens are coarse: most of the blocks are on the diagonal, half of which is masked
            patterns["random blocks of 32"] = random_pattern(count, density, 32)
        both: dict[str, Call] = {}
        forward: dict[str, Call] = {}
        of: dict[str, at.Pattern] = {}
        for kind, pattern in patterns.items():
            operands.check(pattern)
            own, peer = f"graphwright, {kind}", f"FlexAttention compiled, {kind}"
            both[own] = lambda p=pattern, o=operands: o.both(p)
            forward[own] = lambda p=pattern, o=operands: o.forward(p)
            of |= {own: pattern, peer: pattern}
            if pattern.block == BLOCK:
                forward[peer] = operands.flex(pattern)
                np.testing.assert_allclose(forward[peer](), forward[own]().numpy(), rtol=1e-4, atol=1e-5)
        both[DENSE], forward[DENSE] = operands.dense_both, operands.dense_forward
        if not few:
            forward["torch SDPA, unfused"] = lambda o=operands: unfused(o)
        for way, calls in (("forward and backward", both), ("forward", forward)):
            _add(figure, rounds(calls, n=3 if few else 9, warm=1), DENSE, f"{count:,} tokens, {way}: ", of)
    figure.notes.append(flex_backward(Operands(1024, 1)))
    return figure


def two_threads() -> Figure:
    """The same with two threads."""
    return training(tokens=(1024, 4096, 16384), threads=2)


def unfused(operands: Operands) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return operands.dense_forward()


def _add(
    figure: Figure, taken: Mapping[str, list[float]], dense: str, lead: str = "",
    of: Mapping[str, at.Pattern | str] | None = None, unit: str = "ms",
) -> None:  # fmt: skip
    """Add rows; each says how much faster than the dense peer it is and, for one with a pattern, that times density."""
    note: dict[str, str] = {}
    for name, samples in taken.items():
        pattern, faster = (of or {}).get(name, ""), median(taken[dense]) / median(samples)
        parts = [about(pattern) if isinstance(pattern, at.Pattern) else pattern]
        if name not in (dense, "A/A"):
            parts.append(f"{faster:.2f} times the speed of dense")
            if isinstance(pattern, at.Pattern):
                parts[-1] += f" = {faster * density_of(pattern):.2f} / density"
        note[lead + name] = "; ".join(filter(None, parts))
    add_rounds(figure, {lead + name: samples for name, samples in taken.items()}, unit, note)


# -- densities ---------------------------------------------------------------------------------------------------------
def densities(sizes: Sequence[tuple[int, int]] = ((2048, 8), (8192, 2)), threads: int = 1) -> Figure:
    """Forward and backward over the density: edge by edge, with a dense mask, as chosen, and dense causal attention."""
    set_num_threads(threads)
    torch.set_num_threads(threads)
    figure = Figure(
        "Attention over densities", f"1 x heads x tokens x {WIDTH}, f32, forward and backward, {threads} thread"
    )
    for tokens, heads in sizes:
        operands = Operands(tokens, heads)
        ratios: list[tuple[float, float]] = []
        edges: list[tuple[int, float]] = []
        worst = 0.0
        for density in DENSITIES:
            pattern = random_pattern(tokens, density)
            operands.check(pattern)
            names = ("auto", "block", "dense") if tokens <= MASKED else ("auto", "block")
            ways = {f"algorithm {name}": lambda p=pattern, n=name: operands.both(p, n) for name in names}
            taken = rounds({**ways, DENSE: operands.dense_both}, n=5, warm=1)
            lead = f"{tokens:,} tokens, {heads} heads, {100 * density:.0f} %: "
            _add(figure, taken, DENSE, lead, dict.fromkeys(ways, pattern))
            ms = {name: median(samples) for name, samples in taken.items()}
            ratios.append((density_of(pattern), ms[DENSE] / ms["algorithm auto"]))
            edges.append((len(pattern), ms["algorithm block"]))
            worst = max(worst, ms["algorithm auto"] / min(ms[way] for way in ways if way != "algorithm auto"))
        figure.notes += [
            f"{tokens:,} tokens: {crossover(ratios)}",
            f"{tokens:,} tokens: auto takes {worst:.2f} times the best algorithm that was measured, at most",
            f"{tokens:,} tokens: {line(edges)}",
        ]
    return figure


def crossover(ratios: Sequence[tuple[float, float]]) -> str:
    """Return where dense attention becomes faster; `ratios` are (density, time dense / time here) by density."""
    last = ratios[-1]
    for (a, x), (b, y) in pairwise(ratios):
        if x >= 1 > y:
            return f"dense is faster above a density of {100 * (a + (b - a) * (x - 1) / (x - y)):.0f} %"
    if last[1] < 1:
        return "dense is faster at every density"
    return f"dense is never faster: this is {last[1]:.2f} times its speed at {100 * last[0]:.0f} %"


def line(points: Sequence[tuple[int, float]]) -> str:
    """Return the straight line through (edges, seconds), and the largest deviation from it."""
    x, y = np.array(points).T
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    off = np.abs(base + slope * x - y) / y
    return f"block takes {1e3 * base:.2f} ms + {1e6 * slope:.2f} us an edge, within {100 * off.max():.0f} %"


# -- long windows ------------------------------------------------------------------------------------------------------
def windows(tokens: Sequence[int] = (1024, 4096, 16384, 65536), window: int = 512, longest: int = 16384) -> Figure:
    """Forward and backward of a sliding window over the number of tokens; dense up to `longest`."""
    set_num_threads(1)
    torch.set_num_threads(1)
    figure = Figure("Attention in a sliding window", f"window {window}, 1 x 2 x tokens x {WIDTH}, f32, 1 thread")
    each = []
    for count in tokens:
        operands, pattern = Operands(count, 2), at.sliding_window(count, window, BLOCK)
        if count <= longest:
            operands.check(pattern)
        calls: dict[str, Call] = {"graphwright": lambda o=operands, p=pattern: o.both(p)}
        if count <= longest:
            calls[DENSE] = operands.dense_both
        taken, lead = rounds(calls, n=5, warm=1), f"{count:,} tokens, forward and backward: "
        each.append(median(taken["graphwright"]) / count)
        if count <= longest:
            _add(figure, taken, DENSE, lead, {"graphwright": pattern})
        else:
            add_rounds(figure, {lead + n: t for n, t in taken.items()}, note={lead + "graphwright": about(pattern)})
    times = ", ".join(f"{1e6 * t:.2f}" for t in each)
    longer = [t for t, count in zip(each, tokens, strict=True) if count > 2 * window]
    figure.notes.append(f"us per token: {times}; from {2 * window:,} tokens on within {_within(longer):.0f} %")
    figure.notes.append(f"above {longest:,} tokens the dense peer and the check with dense masks do not run")
    return figure


def _within(values: Sequence[float]) -> float:
    return 100 * (max(values) / min(values) - 1)


# -- decoding ----------------------------------------------------------------------------------------------------------
def decode(tokens: int = 16384, heads: int = 8, window: int = 512, star: int = 64) -> Figure:
    """One query over a cache: a window and global tokens beside all keys."""
    set_num_threads(1)
    torch.set_num_threads(1)
    pattern = at.sliding_window(tokens, window, BLOCK) | at.star(tokens, star, window=1, block=BLOCK)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, heads, n, WIDTH)).astype("f4") for n in (1, tokens, tokens))
    seen = pattern.to_dense()[0, -1]
    given = [torch.from_numpy(x) for x in (q, k, v)]
    own = _decoder(q, k, v, pattern)
    np.testing.assert_allclose(
        own(), dense_attention(*given, attn_mask=torch.from_numpy(seen[None])), rtol=1e-4, atol=1e-5
    )
    dense, causal = _decoder(q, k, v, at.causal_full(tokens, BLOCK)), dense_attention(*given)
    np.testing.assert_allclose(dense(), causal, rtol=1e-4, atol=1e-5)
    calls: dict[str, Call] = {
        "graphwright, window and star": own,
        "graphwright, all keys as edges": dense,
        "graphwright, sdpa over all keys": _sdpa(q, k, v),
        "torch SDPA, all keys": lambda: dense_attention(*given),
        "torch SDPA, window and star gathered": _gathered(given, seen),
    }
    figure = Figure(
        f"One token over {tokens:,} keys", f"window {window} and {star} global tokens, 1 x {heads} x 1 x {WIDTH}, f32"
    )
    share = f"{seen.sum():,} of {tokens:,} keys"
    of = {name: share for name in calls if "window" in name}
    _add(figure, rounds(calls, n=15, inner=10), "torch SDPA, all keys", of=of, unit="us")
    figure.notes.append("the few keys of window and star stay in the processor's cache from call to call")
    return figure


def _decoder(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: at.Pattern) -> Call:
    """Return a compiled call of the last query of a pattern."""
    b = gw.Builder("decode")
    inputs = [b.input(name, x.shape, "float32") for name, x in zip("qkv", (q, k, v), strict=True)]
    start, table = b.input("start", (), "int64"), b.pattern("pattern", pattern)
    attrs = {"scale": WIDTH**-0.5, "planes": 1, "optional": ("q_start",)}
    b.output(b.block_sdpa(*inputs, table, start, **attrs)[0], "out")
    feeds = {"q": q, "k": k, "v": v, "start": np.int64(k.shape[2] - 1)}
    return _bound(b.build(), feeds)


def _sdpa(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Call:
    """Return a compiled call of the dense op."""
    b = gw.Builder("dense")
    inputs = [b.input(name, x.shape, "float32") for name, x in zip("qkv", (q, k, v), strict=True)]
    b.output(b.sdpa(*inputs, scale=WIDTH**-0.5, causal=True), "out")
    return _bound(b.build(), {"q": q, "k": k, "v": v})


def _bound(program: gw.Program, feeds: dict[str, Any]) -> Call:
    """Return a call whose operands are written once: a cache is not copied for each token."""
    run = program.compile({name: np.shape(x) for name, x in feeds.items()}).bind()
    for name, x in feeds.items():
        np.copyto(run.inputs[name], x)

    def call() -> np.ndarray:
        run()
        return run.outputs["out"]

    return call


def _gathered(given: Sequence[torch.Tensor], seen: np.ndarray) -> Call:
    """Return torch's attention over a copy of the allowed keys: the best that it can do with the same pairs."""
    at_keys = torch.from_numpy(np.flatnonzero(seen))
    return lambda: dense_attention(given[0], given[1][:, :, at_keys], given[2][:, :, at_keys])


def model_decode(tokens: int = 16384, window: int = 512, star: int = 64) -> Figure:
    """A step of a whole model after a long text, and the prefill of that text."""
    set_num_threads(1)
    torch.set_num_threads(1)
    fields = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "vocab_size": 512},
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": WIDTH},
        **{"intermediate_size": 512, "max_position_embeddings": tokens + 128},
    }
    dense, sparse = (create(config_from(fields)) for _ in range(2))
    for key, weight in dense.program.weights.items():
        np.testing.assert_array_equal(weight.numpy(), sparse.program.weights[key].numpy())
    pattern = at.sliding_window(tokens + 128, window, BLOCK) | at.star(tokens + 128, star, window=1, block=BLOCK)
    at.sparsify(sparse, "layers.*.attn", pattern)
    ids = np.random.default_rng(0).integers(0, 512, (1, tokens))
    np.testing.assert_allclose(sparse.logits(ids[:, :window]), dense.logits(ids[:, :window]), rtol=1e-3, atol=1e-4)
    figure = Figure(
        f"A token after {tokens:,}, whole model",
        f"4 layers of 256, 8 query and 2 key heads of {WIDTH}, f32, 1 thread; window {window}, {star} global tokens",
    )
    calls: dict[str, Call] = {}
    first: dict[str, float] = {}
    for name, model in (("graphwright, window and star", sparse), ("graphwright, dense", dense)):
        cache = model.new_cache(tokens + 64, kind="static")
        started = perf_counter()
        cache.prefill(ids)
        first[name] = perf_counter() - started
        calls[name] = lambda cache=cache: (cache.step(np.array([[3]])), cache.truncate(tokens))
    peer: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    held, entries = transformers.DynamicCache(), torch.randn(2, 1, 2, tokens, WIDTH)
    for layer in range(4):
        held.update(*entries, layer)

    @torch.no_grad()
    def theirs() -> None:
        peer(torch.tensor([[3]]), past_key_values=held)
        held.crop(-1)

    calls["transformers eager, dense"] = theirs
    seen = int(pattern.to_dense()[0, tokens].sum())
    of = {"graphwright, window and star": f"{seen:,} of {tokens:,} keys"}
    _add(figure, rounds(calls, n=15), "graphwright, dense", of=of)
    for name, seconds in first.items():
        figure.add(f"{name}: prefill of {tokens:,} tokens", seconds, "s", "once")
    return figure


# -- GPU ---------------------------------------------------------------------------------------------------------------
def gpu() -> Figure:
    """Say that there are no rows for a GPU."""
    figure = Figure("Attention on a GPU", "SDPA (flash, cuDNN), FlexAttention")
    where = "a GPU is here, but its rows were never measured" if torch.cuda.is_available() else "no GPU here"
    figure.notes.append(f"{where}: the kernels for CUDA have no figures yet")
    return figure
