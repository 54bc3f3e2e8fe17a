"""The register of rules: each is a function from a diagnosis to findings, under the name of their kind.

A rule of your own is registered with `@finding("name")`, or comes as an entry point of `graphwright.findings`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points

from graphwright.errors import UsageError
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding

Rule = Callable[[Diagnosis], Iterable[Finding]]

ORDER = (
    "interface",
    "tensor",
    "cycle",
    "isolated",
    "dead_end",
    "orphan_source",
    "components",
    "unreachable",
    "blocked_gradient",
    "missing_residual",
    "unbalanced_heads",
    "bottleneck",
    "redundant",
    "gain",
    "double_softmax",
)
"""Kinds in the order in which they are asked: a defect is reported once, under the first kind that explains it."""

_FILES = (*("interface", "tensors", "connectivity", "gradients", "residuals", "heads"),)


@dataclass(frozen=True, slots=True)
class Kind:
    """A registered rule. `reads` says what it needs: `structure`, `weights` or `probe`."""

    name: str
    rule: Rule
    reads: str


_kinds: dict[str, Kind] = {}
_loaded = False


def finding(name: str, *, reads: str = "structure") -> Callable[[Rule], Rule]:
    """Register the function below as the rule of a kind of finding.

    Args:
        name: of the kind.
        reads: `structure`; `weights` for a rule that reads their values; `probe` for one that runs a batch, which is
            asked only if there is one.
    Raises: UsageError for a name that is taken, or another `reads`.
    """
    if reads not in ("structure", "weights", "probe"):
        raise UsageError("a rule reads something else", where=name, expected="structure, weights or probe", got=reads)

    def enter(rule: Rule) -> Rule:
        if name in _kinds:
            raise UsageError("a rule of this name is registered", where=name)
        _kinds[name] = Kind(name, rule, reads)
        return rule

    return enter


def kinds() -> dict[str, Kind]:
    """All rules by name, the built-in ones first and in their order."""
    global _loaded
    if not _loaded:
        _loaded = True
        for file in _FILES:
            import_module(f"graphwright.surgery.findings.{file}")
        for point in entry_points(group="graphwright.findings"):
            try:
                point.load()
            except Exception as error:  # a broken plugin must not break the others; it is named
                logging.getLogger("graphwright.surgery").warning("plugin %r was skipped: %s", point.name, error)
    rank = {name: i for i, name in enumerate(ORDER)}
    return dict(sorted(_kinds.items(), key=lambda item: rank.get(item[0], len(rank))))


def chosen(names: Sequence[str] | None) -> list[Kind]:
    """Rules by name, in their order; all of them for None. Raises: UsageError naming those there are."""
    known = kinds()
    wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
    if unknown := [n for n in wanted if n not in known]:
        raise UsageError("no such kind of finding", got=", ".join(map(str, unknown)), expected=", ".join(known))
    return [kind for name, kind in known.items() if name in wanted]
