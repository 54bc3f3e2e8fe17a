"""Architecture search among candidates, by gates, growth, random structures or evolution."""

from graphwright.structure.searching.candidates import Candidates, experts, heads, ops, skips, widths
from graphwright.structure.searching.methods import METHODS, Collapsed, method
from graphwright.structure.searching.search import SearchResult, search
from graphwright.structure.searching.trial import SearchOutcome, Trials

__all__ = [
    "METHODS",
    "Candidates",
    "Collapsed",
    "SearchOutcome",
    "SearchResult",
    "Trials",
    "experts",
    "heads",
    "method",
    "ops",
    "search",
    "skips",
    "widths",
]
