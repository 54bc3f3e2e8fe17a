"""Architecture search: which candidates a program should have, by gates, growth, chance or evolution."""

from graphwright.structure.searching.candidates import Candidates, experts, heads, ops, skips, widths
from graphwright.structure.searching.methods import METHODS, Collapsed, method
from graphwright.structure.searching.search import SearchResult, search
from graphwright.structure.searching.trial import Found, Trials

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
