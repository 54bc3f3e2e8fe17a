"""The table of rules, in the order in which `diagnose` runs them: a defect is reported by the first rule that finds it.

A rule is a function from a `Diagnosis` to findings. User rules are registered with `@finding("name")`, or come as entry
points of the group `graphwright.findings`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from graphwright.errors import UsageError
from graphwright.surgery.findings import connectivity, gradients, heads, interface, residuals, tensors
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding

Rule = Callable[[Diagnosis], Iterable[Finding]]
READS = ("structure", "weights", "probe")


@dataclass(frozen=True, slots=True)
class FindingRule:
    """A registered rule.

    Attributes:
        name: kind of its findings.
        rule: the function.
        reads: `structure`; `weights` if it reads values of weights; `probe` if it needs a batch to run.
    """

    name: str
    rule: Rule
    reads: str = "structure"


_rules = {
    rule.name: rule
    for rule in (
        FindingRule("interface", interface.interface),
        FindingRule("tensor", tensors.tensor, "weights"),
        FindingRule("cycle", connectivity.cycle),
        FindingRule("isolated", connectivity.isolated),
        FindingRule("dead_end", connectivity.dead_end),
        FindingRule("orphan_source", connectivity.orphan_source),
        FindingRule("components", connectivity.components),
        FindingRule("unreachable", connectivity.unreachable),
        FindingRule("blocked_gradient", gradients.blocked_gradient),
        FindingRule("missing_residual", residuals.missing_residual),
        FindingRule("unbalanced_heads", heads.unbalanced_heads, "weights"),
        FindingRule("bottleneck", tensors.bottleneck),
        FindingRule("redundant", residuals.redundant, "probe"),
        FindingRule("gain", gradients.gain, "weights"),
        FindingRule("double_softmax", gradients.double_softmax),
    )
}
_plugins_loaded = False


def finding(name: str, *, reads: str = "structure") -> Callable[[Rule], Rule]:
    """Register the decorated function as a rule, after the existing ones.

    Args:
        name: kind of its findings.
        reads: see `FindingRule`; a `probe` rule runs only if there is a batch.
    Raises: UsageError for a name that is taken, or an unknown `reads`.
    """
    if reads not in READS:
        raise UsageError("unknown value of reads", where=name, expected=", ".join(READS), got=reads)

    def enter(rule: Rule) -> Rule:
        if name in _rules:
            raise UsageError("a rule with this name is registered already", where=name)
        _rules[name] = FindingRule(name, rule, reads)
        return rule

    return enter


def rules() -> dict[str, FindingRule]:
    """All rules by name, in order; entry points are loaded at the first call."""
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for point in entry_points(group="graphwright.findings"):
            try:
                point.load()
            except Exception as error:  # a broken plugin must not break the others; its name is logged
                logging.getLogger("graphwright.surgery").warning("plugin %r was skipped: %s", point.name, error)
    return dict(_rules)


def chosen(names: Sequence[str] | None) -> list[FindingRule]:
    """Rules by name, in order; all of them for None. Raises: UsageError for an unknown name."""
    known = rules()
    wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
    if unknown := [n for n in wanted if n not in known]:
        raise UsageError("unknown kind of finding", got=", ".join(map(str, unknown)), expected=", ".join(known))
    return [rule for name, rule in known.items() if name in wanted]
