"""Generators of patterns: each returns a pattern whose edges follow a rule, which `extend` uses for new tokens.

All take `tokens`, `block`, `planes`, and as `options` the other arguments of `Pattern`, and raise UsageError for
arguments of another type or out of range.
"""

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a pattern.
from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np

from ..arguments import checked
from ..errors import ShapeError, UsageError
from ..settings import Size
from . import edits, masks
from .pattern import Pattern
from .rules import BlockLocal, Dilated, Pairs, Position, RandomBlocks, Rule, Star

Tokens = int | tuple[int, int]


@checked
def causal_full(tokens: Tokens, block: int = 64, planes: int = 1, **options: Any) -> Pattern:
    """Return the pattern in which each query sees all keys up to its own position."""
    return _made(Pattern(tokens, block, planes, **options), Position())


@checked
def full(tokens: Tokens, block: int = 64, planes: int = 1, **options: Any) -> Pattern:
    """Return the pattern in which each query sees all keys."""
    return _made(Pattern(tokens, block, planes, causal=False, **options), Position(causal=False))


@checked
def sliding_window(
    tokens: Tokens, window: Size, block: int = 64, planes: int = 1, symmetric: bool = False, **options: Any
) -> Pattern:
    """Return the pattern `i - window < j <= i` for query position i and key position j; or `|i - j| < window`.

    Raises: UsageError for a window below 1.
    """
    pattern = Pattern(tokens, block, planes, causal=not symmetric, window=window, symmetric=symmetric, **options)
    return _made(pattern, pattern.base)


@checked
def block_local(
    tokens: Tokens, previous: int = 1, block: int = 64, planes: int = 1, causal: bool = True, **options: Any
) -> Pattern:
    """Return the pattern in which a query of block b sees blocks b - previous, ..., b. Raises: UsageError."""
    _at_least("previous", previous, 0)
    return _made(Pattern(tokens, block, planes, causal, **options), BlockLocal(previous, causal))


@checked
def star(
    tokens: Tokens, global_tokens: int | None = None, window: Size = 64, block: int = 64, planes: int = 1,
    global_ratio: float | None = None, causal: bool = True, **options: Any,
) -> Pattern:  # fmt: skip
    """Return the pattern of global tokens and a window.

    Args:
        global_tokens: the first tokens see all keys (up to their own position if causal) and are seen by all queries.
        window: the other queries see keys `i - window < j`, and without `causal` `j - i < window` too.
        global_ratio: instead of `global_tokens`, their share of the keys, rounded up.
    Raises: UsageError for a ratio outside [0, 1], a window < 1, or both or none of `global_tokens` and `global_ratio`.
    """
    if (global_tokens is None) == (global_ratio is None):
        raise UsageError("the number of global tokens is not determined", expected="global_tokens or global_ratio",
                         got=f"global_tokens={global_tokens}, global_ratio={global_ratio}")  # fmt: skip
    pattern = Pattern(tokens, block, planes, causal, **options)
    if global_ratio is not None:
        if not 0 <= global_ratio <= 1:
            raise UsageError("global_ratio is out of range", expected="0 to 1", got=global_ratio)
        global_tokens = ceil(global_ratio * pattern.frame.keys)
    assert global_tokens is not None
    _at_least("global_tokens", global_tokens, 0)
    _at_least("window", window, 1)
    return _made(pattern, Star(global_tokens, window, causal))


@checked
def dilated(
    tokens: Tokens, stride: Size, n: int, window: int = 0, block: int = 64, planes: int = 1, causal: bool = True,
    **options: Any,
) -> Pattern:  # fmt: skip
    """Return the pattern in which a query sees keys 0, stride, ..., (n - 1)·stride before it, and those of a window.

    Without `causal` it sees those after it too. Raises: UsageError for a stride < 1, n < 0 or a window < 0.
    """
    _at_least("stride", stride, 1)
    _at_least("n", n, 0)
    _at_least("window", window, 0)
    return _made(Pattern(tokens, block, planes, causal, **options), Dilated(stride, n, window, causal))


@checked
def random_blocks(
    tokens: Tokens, n: int, seed: int = 0, block: int = 64, planes: int = 1, causal: bool = True, **options: Any
) -> Pattern:
    """Return the pattern in which each query block sees n distinct earlier key blocks, drawn by Philox(seed, row).

    Without `causal`, they are drawn from all blocks but its own. Raises: UsageError for n < 0 or a negative seed.
    """
    _at_least("n", n, 0)
    _at_least("seed", seed, 0)
    return _made(Pattern(tokens, block, planes, causal, **options), RandomBlocks(n, seed, causal))


@checked
def document(
    tokens: Tokens, segments: Any, block: int = 64, planes: int = 1, causal: bool = True, **options: Any
) -> Pattern:
    """Return the pattern in which a query sees the keys of its own document.

    Args:
        segments: document ids of the keys, or (ids of the queries, ids of the keys).
    Raises: PatternShape for a wrong number of ids.
    """
    if segments is None:
        raise UsageError("document ids are missing", where="segments", expected="an integer per token", got=None)
    pattern = Pattern(tokens, block, planes, causal, segments=segments, **options)
    return _made(pattern, pattern.base)


@checked
def topk(
    q: Any, k: Any, n: int, causal: bool = True, keep_own: bool = True, block: int = 64, **options: Any
) -> Pattern:
    """Return the pattern of the n key blocks with the largest product mean(q)·mean(k) for each query block.

    Args:
        q, k: [planes, Tq, d] and [planes, Tk, d], or [Tq, d] and [Tk, d]: one plane.
        n: key blocks per query block; ties go to the lower block. With block=1, the exact top-n keys.
        keep_own: the query's own block is always one of them.
    Raises: ShapeError; UsageError for n < 1, and values that are not finite.
    The pattern has no generator: its edges depend on values.
    """
    try:
        queries, keys = (np.asarray(x, np.float64) for x in (q, k))
    except (TypeError, ValueError) as error:
        raise UsageError("q and k are not arrays of numbers", got=str(error)) from error
    if not (np.isfinite(queries).all() and np.isfinite(keys).all()):
        raise UsageError("q or k has a value that is not finite", expected="finite numbers")
    queries, keys = (x[None] if x.ndim == 2 else x for x in (queries, keys))
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[::2] != keys.shape[::2]:
        raise ShapeError("q and k do not fit", expected="[planes, Tq, d] and [planes, Tk, d]",
                         got=f"{np.shape(q)} and {np.shape(k)}")  # fmt: skip
    _at_least("n", n, 1)
    planes = len(queries)
    pattern = Pattern((queries.shape[1], keys.shape[1]), block, planes, causal, **options)
    frame = pattern.frame
    q_mean, k_mean = (_means(x, block) for x in (queries, keys))
    _, i1 = frame.query_span(np.arange(frame.rows))
    seen = frame.key_span(np.arange(frame.columns))[0] <= i1[:, None] if causal else None
    for plane in range(planes):
        scores = q_mean[plane] @ k_mean[plane].T
        if seen is not None:
            scores = np.where(seen, scores, -np.inf)
        if keep_own:
            own = np.minimum(i1 // block, frame.columns - 1)
            scores[np.arange(frame.rows), own] = np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, : min(n, frame.columns)]
        chosen = np.take_along_axis(scores, best, 1) > -np.inf
        rows, columns = (
            np.repeat(np.arange(frame.rows), chosen.sum(1)),
            np.concatenate([np.sort(row[ok]) for row, ok in zip(best, chosen, strict=True)]),
        )
        _add(pattern, plane, masks.of_rule(pattern.base, pattern.base, frame, Pairs(rows, columns)))
    return pattern


def _means(x: np.ndarray[Any, Any], block: int) -> np.ndarray[Any, Any]:
    starts = np.arange(0, x.shape[1], block)
    sums = np.add.reduceat(x, starts, axis=1)
    return sums / np.diff([*starts, x.shape[1]])[:, None]


def _made(pattern: Pattern, rule: Rule) -> Pattern:
    """Add the edges of a rule to an empty pattern, in every plane, and make it the pattern's generator."""
    frame = pattern.frame
    pairs = masks.candidates(rule, frame, np.arange(frame.rows))
    blocks = masks.of_rule(rule, pattern.base, frame, pairs)
    for plane in range(pattern.planes):
        _add(pattern, plane, blocks)
    pattern.rule = rule
    return pattern


def _add(pattern: Pattern, plane: int, blocks: masks.Blocks) -> None:
    source = pattern.key_nodes[plane, blocks.k].astype(np.int64)
    target = pattern.query_nodes[plane, blocks.q].astype(np.int64)
    edits.insert(pattern, source, target, blocks)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError("an argument is out of range", where=name, expected=f">= {least}", got=value)


GENERATORS: dict[str, Callable[..., Pattern]] = {
    each.__name__: each
    for each in (causal_full, full, sliding_window, block_local, star, dilated, random_blocks, document, topk)
}
