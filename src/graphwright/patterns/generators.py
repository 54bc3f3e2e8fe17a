"""Generators of patterns: each returns a pattern whose edges follow a rule, which `extend` uses for new tokens."""

from __future__ import annotations

from typing import Any

from .pattern import Pattern, of_rule
from .rules import Position

Tokens = int | tuple[int, int]


def causal_full(tokens: Tokens, block: int = 64, planes: int = 1, **options: Any) -> Pattern:
    """Return the pattern in which each query sees all keys up to its own position."""
    return of_rule(Pattern(tokens, block, planes, **options), Position())


def full(tokens: Tokens, block: int = 64, planes: int = 1, **options: Any) -> Pattern:
    """Return the pattern in which each query sees all keys."""
    return of_rule(Pattern(tokens, block, planes, causal=False, **options), Position(causal=False))


def sliding_window(
    tokens: Tokens, window: int, block: int = 64, planes: int = 1, symmetric: bool = False, **options: Any
) -> Pattern:
    """Return the pattern `i - window < j <= i` for query position i and key position j; or `|i - j| < window`.

    Raises: UsageError for a window below 1.
    """
    pattern = Pattern(tokens, block, planes, causal=not symmetric, window=window, symmetric=symmetric, **options)
    return of_rule(pattern, pattern.base)
