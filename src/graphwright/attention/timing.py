"""Time of attention over a pattern of a given density, beside dense causal attention on the same operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.array import get_num_threads
from graphwright.attention.attend import attend
from graphwright.autograd import as_tensor, grad, no_grad
from graphwright.errors import GraphwrightError
from graphwright.patterns import Pattern, block_local, causal_full
from graphwright.report import Report
from graphwright.settings import Count, Share

Array = npt.NDArray[Any]
ROWS = 32
"""Number of queries whose result and gradient are computed again in float64."""
_TOLERANCE = 1e-3


class WrongOutput(GraphwrightError):
    """Results that were to be timed differ from those of dense attention with a mask."""


@dataclass(frozen=True, slots=True, repr=False)
class AttentionTimes(Report):
    """Median times of attention over a pattern and of dense causal attention, in ms.

    Attributes:
        tokens, heads, width, block, threads: the setting; operands are [1, heads, tokens, width], float32.
        edges: number of edges of the pattern, the own block of each query and random earlier ones.
        density: share of the causal pairs that the pattern allows.
        forward, both: forward; forward and backward.
        again: `both`, measured a second time: the noise.
        dense_forward, dense_both: the same of torch's `scaled_dot_product_attention`, causal, without the pattern.
        flex_forward: forward of FlexAttention, compiled, over the same blocks; None if it was not asked for.
        error: largest difference from masked dense attention in float64, relative to the largest value: results and
            gradients of some queries, and sums over all gradients of keys and values.
    """

    tokens: int
    heads: int
    width: int
    block: int
    threads: int
    edges: int
    density: float
    forward: float
    both: float
    again: float
    dense_forward: float
    dense_both: float
    flex_forward: float | None
    error: float
    FIGURES: ClassVar = ("faster_forward", "faster_both")

    @property
    def faster_forward(self) -> float:
        """Time of dense attention over that of the pattern, forward."""
        return self.dense_forward / self.forward

    @property
    def faster_both(self) -> float:
        """Time of dense attention over that of the pattern, forward and backward."""
        return self.dense_both / self.both

    def _text(self) -> str:
        flex = "" if self.flex_forward is None else f"\nFlexAttention, compiled    {self.flex_forward:10.2f}"
        return (
            f"1 x {self.heads} x {self.tokens} x {self.width}, float32, blocks of {self.block}, "
            f"density {self.density:.1%} ({self.edges} edges), {self.threads} threads\n"
            f"ms                            forward   with backward\n"
            f"pattern                    {self.forward:10.2f}      {self.both:10.2f}\n"
            f"pattern, a second time                     {self.again:10.2f}\n"
            f"dense causal, torch SDPA   {self.dense_forward:10.2f}      {self.dense_both:10.2f}{flex}\n"
            f"{self.faster_forward:.2f} and {self.faster_both:.2f} times the speed of dense; error {self.error:.1g}"
        )


def random_pattern(tokens: int, density: float, block: int = 64, seed: int = 0) -> Pattern:
    """Return a causal pattern of each query block's own block and random earlier blocks.

    Args:
        density: share of the causal pairs, in [0, 1]; it is at least that of the own blocks.
    """
    if density == 1:
        return causal_full(tokens, block)
    pattern = block_local(tokens, 0, block)
    q, k = np.tril_indices(pattern.blocks[0], -1)
    more = round((density * tokens * (tokens + 1) / 2 - pattern.summary().pairs) / block**2)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(q))[: max(more, 0)])
    pattern.connect_many(q[chosen], k[chosen])
    return pattern


def density_of(pattern: Pattern) -> float:
    """Return the share of the causal pairs that a causal pattern allows."""
    queries, keys = pattern.tokens
    return pattern.summary().pairs / (pattern.planes * (queries * keys - queries * (queries - 1) / 2))


@checked
def measure(
    tokens: Count, density: Share, heads: Count = 1, width: Count = 64, block: Count = 64, *,
    rounds: Count = 3, flex: bool = False, seed: int = 0,
) -> AttentionTimes:  # fmt: skip
    """Measure attention over a random pattern beside dense attention, in alternating rounds.

    Results are compared with masked dense attention before anything is timed. Dense attention takes most of the time.

    Args:
        tokens, density, block: as in `random_pattern`.
        rounds: number of measurements of each call; the median counts.
        flex: also measure FlexAttention's forward, which compiles for a minute.
    Raises: WrongOutput if results are wrong, so that no time is reported.
    """
    from graphwright.array.cpu.torch_attention import dense_causal, flex_causal

    pattern, rng = random_pattern(tokens, density, block, seed), np.random.default_rng(seed)
    arrays = [rng.normal(size=(1, heads, tokens, width)).astype(np.float32) for _ in range(4)]
    q, k, v, g = (as_tensor(x) for x in arrays)
    for x in (q, k, v):
        x.requires_grad = True

    def forward() -> Any:
        with no_grad():
            return attend(q, k, v, pattern)

    def both() -> Sequence[Any]:
        return grad(attend(q, k, v, pattern), (q, k, v), g)

    made = forward().numpy()
    error = wrong_by(pattern, arrays, made, [x.numpy() for x in both()], seed)
    calls: dict[str, Callable[[], Any]] = {"forward": forward, "both": both, "again": both}
    calls["dense_forward"], calls["dense_both"] = dense_causal(*arrays)
    dense_causal(*(x[:, :, :1] for x in arrays))[1]()  # torch's first backward pass starts its threads
    if flex:
        calls["flex_forward"] = flex_causal(arrays[0], arrays[1], arrays[2], pattern.to_flex())
        error = max(error, _relative(calls["flex_forward"](), made))
    if not error < _TOLERANCE:
        raise WrongOutput("attention over the pattern differs from dense attention, so its time means nothing",
                          expected=f"a relative difference below {_TOLERANCE}", got=error)  # fmt: skip
    times = _medians(calls, rounds)
    return AttentionTimes(
        tokens, heads, width, block, get_num_threads(), len(pattern), density_of(pattern), times["forward"],
        times["both"], times["again"], times["dense_forward"], times["dense_both"], times.get("flex_forward"), error,
    )  # fmt: skip


def _medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median ms of each call; every other round runs in the opposite order."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in calls if turn % 2 == 0 else reversed(calls):
            started = perf_counter()
            calls[name]()
            taken[name].append(1e3 * (perf_counter() - started))
    return {name: median(samples) for name, samples in taken.items()}


def wrong_by(pattern: Pattern, operands: Sequence[Array], out: Array, grads: Sequence[Array], seed: int = 0) -> float:
    """Return the largest relative difference of results and gradients from those of masked dense attention.

    Results and gradients of `ROWS` random queries are computed in float64 from their allowed keys. The gradients of
    keys and values are checked by sums that hold for a softmax whose queries all see a key, for each head: Σ dv = Σ g
    and kᵀ·dk = dqᵀ·q, both over tokens.

    Args:
        pattern: causal, of one plane, in which the causal rule holds for every edge.
        operands: q, k, v and the gradient g of the result, [1, H, T, d].
        out, grads: the result; the gradients of q, k and v.
    """
    q, k, v, g = (x[0].astype(np.float64) for x in operands)
    _, rows, columns = pattern.pairs().T
    found = [np.abs(grads[2][0].sum(1, dtype=np.float64) - g.sum(1)).max() / np.abs(g.sum(1)).max()]
    dq, dk = (x[0].astype(np.float64) for x in grads[:2])
    found.append(_relative(k.swapaxes(1, 2) @ dk, dq.swapaxes(1, 2) @ q))
    for t in np.random.default_rng(seed).integers(0, len(q[0]), ROWS):
        blocks = columns[rows == t // pattern.block]
        keys = (blocks[:, None] * pattern.block + np.arange(pattern.block)).ravel()
        keys = keys[keys <= t]
        s = np.einsum("hd,hjd->hj", q[:, t], k[:, keys]) * q.shape[-1] ** -0.5
        a = np.exp(s - s.max(1, keepdims=True))
        a /= a.sum(1, keepdims=True)
        y = np.einsum("hj,hjd->hd", a, v[:, keys])
        ds = a * (np.einsum("hd,hjd->hj", g[:, t], v[:, keys]) - (g[:, t] * y).sum(1, keepdims=True))
        found += [_relative(out[0, :, t], y)]
        slope = np.einsum("hj,hjd->hd", ds, k[:, keys]) * q.shape[-1] ** -0.5
        found.append(np.abs(grads[0][0, :, t] - slope).max() / max(np.abs(slope).max(), 0.01))  # 0 if one key is seen
    return float(max(found))


def _relative(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())
