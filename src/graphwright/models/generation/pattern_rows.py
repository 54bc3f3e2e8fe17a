"""Which rows of attention patterns computed the entries of a cache, and patterns that grow with the text.

The keys and values of a layer depend on the patterns of the layers below it: on the rows of the tokens that are cached,
and on no other rows. So an edge of a later row can be added between two tokens, and a pattern can grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.models.generation.entries import attentions, sources
from graphwright.program.kinds import PATTERN
from graphwright.program.patterns import PatternVariable, patterns

if TYPE_CHECKING:
    from graphwright.program.program import Program

_BLOCKS = 8  # a pattern grows to a multiple of this number of blocks


def pattern_variables(p: Program) -> dict[str, PatternVariable]:
    """Return the variables of the patterns that nodes of a program read, by key."""
    found = {p.key(n): p.weights.at_key(p.key(n)) for n in p.of_kind(PATTERN)}
    return {key: v for key, v in found.items() if isinstance(v, PatternVariable)}


def pattern_versions(p: Program) -> tuple[int, ...]:
    """Return a number per pattern that increases with each of its edits."""
    return tuple([v.data.storage.version for v in pattern_variables(p).values()])


def patterns_above(p: Program) -> dict[str, set[str]]:
    """Map the path of each attention to the keys of the patterns that its keys and values depend on."""
    found: dict[str, set[str]] = {}
    for node in attentions(p):
        before = p.reachable(sources(p, node))
        found[p.path(node)] = {p.key(n) for n in p.of_kind(PATTERN) if n in before}
    return found


def extend_patterns(p: Program, tokens: int) -> None:
    """Extend the patterns of a program that have fewer tokens, by their rules, as edits. Raises: NoGenerator."""
    for pattern in patterns(p).values():
        if max(tokens - pattern.tokens[0], tokens - pattern.tokens[1]) > 0:
            step = _BLOCKS * pattern.block
            pattern.extend(-(-tokens // step) * step)


class PatternRows:
    """Hashes of the rows of patterns with which the entries of a cache were computed."""

    def __init__(self) -> None:
        self._rows: dict[str, np.ndarray] = {}
        self._seen: dict[str, tuple[PatternVariable, int]] = {}

    def copy(self) -> PatternRows:
        """Return a copy, for a fork of a sequence."""
        twin = PatternRows()
        twin._rows, twin._seen = dict(self._rows), dict(self._seen)
        return twin

    def record(self, p: Program, start: int, length: int) -> None:
        """Note the rows of the entries `start` to `length` - 1, which were computed now."""
        for key, variable in pattern_variables(p).items():
            block = variable.pattern.block
            known, end = self._rows.get(key, np.zeros(0, np.uint64)), -(-length // block)
            if len(known) < end or start // block < len(known) - 1:
                now = variable.hashes.rows[:end]
                self._rows[key] = np.concatenate([known[: start // block], now[len(known[: start // block]) :]])

    def changed(self, p: Program, length: int) -> set[str]:
        """Return the keys of the patterns of which a row of the first `length` entries was edited since."""
        found: set[str] = set()
        for key, variable in pattern_variables(p).items():
            version = variable.data.storage.version
            if self._is_seen(key, variable, version):
                continue
            end = -(-length // variable.pattern.block)
            if np.array_equal(self._rows.get(key, np.zeros(0, np.uint64))[:end], variable.hashes.rows[:end]):
                self._seen[key] = variable, version
            else:
                found.add(key)
        return found

    def _is_seen(self, key: str, variable: PatternVariable, version: int) -> bool:
        known = self._seen.get(key)
        return known is not None and known[0] is variable and known[1] == version
