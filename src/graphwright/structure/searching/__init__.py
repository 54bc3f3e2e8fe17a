"""Architecture search among candidates, by gates, growth, random structures or evolution."""

from graphwright.structure.searching.candidates import Candidates, experts, heads, ops, skips, widths
from graphwright.structure.searching.methods import (
    METHODS,
    Collapsed,
    SearchOutcome,
    SearchResult,
    Trials,
    method,
    search,
)

__all__ = [
    "METHODS", "Candidates", "Collapsed", "SearchOutcome", "SearchResult", "Trials", "experts", "heads", "method",
    "ops", "search", "skips", "widths",
]  # fmt: skip
