"""Architecture search: which candidates a program should have, by gates, growth, chance or evolution."""

from graphwright.structure.search.candidates import Candidates, experts, heads, ops, skips, widths
from graphwright.structure.search.methods import METHODS, Collapsed, method
from graphwright.structure.search.search import SearchResult, search
from graphwright.structure.search.trial import Found, Trials

__all__ = [
    "METHODS",
    "Candidates",
    "Collapsed",
    "Found",
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
