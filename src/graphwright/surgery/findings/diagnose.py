"""The table of rules, in the order in which `diagnose` runs them: a defect is reported by the first rule that finds it.

A rule is a function from a `Diagnosis` to findings. User rules are registered with `@finding("name")`, or come as entry
points of the group `graphwright.findings`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.program.op_graph import OpGraph
from graphwright.progress import Report
from graphwright.surgery.calibration import chunked
from graphwright.surgery.findings import connectivity, gradients, heads, interface, residuals, tensors
from graphwright.surgery.findings.diagnosis import Diagnosis, DiagnosisCancelled, Probe, stepper
from graphwright.surgery.findings.finding import Finding, Findings, Limits

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program


Rule = Callable[[Diagnosis], Iterable[Finding]]
READS = ("structure", "weights", "probe")


@dataclass(frozen=True, slots=True)
class FindingRule:
    """A registered rule: its function, and its name, which is also the kind of its findings.

    Attributes:
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
        name: name of the rule and kind of its findings.
        reads: see `FindingRule`; a `probe` rule runs only if there is a batch.
    Raises: UsageError for a name that is taken, or an unknown `reads`.
    """
    if reads not in READS:
        raise UsageError("unknown value of reads", where=name, expected=", ".join(READS), got=reads)

    def enter(rule: Rule) -> Rule:
        if name in _rules:
            raise UsageError("a rule with this name is already registered", where=name)
        _rules[name] = FindingRule(name, rule, reads)
        return rule

    return enter


def rules() -> dict[str, FindingRule]:
    """Return all rules by name, in the order in which they run; plugins are loaded at the first call."""
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
    """Return the named rules (all for None) in the order in which they run. Raises: UsageError for an unknown name."""
    known = rules()
    wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
    if unknown := [n for n in wanted if n not in known]:
        raise UsageError("unknown kind of finding", got=", ".join(map(str, unknown)), expected=", ".join(known))
    return [rule for name, rule in known.items() if name in wanted]


TARGETS = "diagnose.targets"
"""Name of the input of target tokens, on the fork that runs a text."""


def diagnose(
    program: Program | Model, inputs: Mapping[str, Any] | None = None,
    loss: str | Callable[[Program], str] | None = None, kinds: Sequence[str] | None = None,
    limits: Limits | Mapping[str, Any] | None = None, *, report: Report | None = None,
    cancel: Callable[[], bool] | None = None,
) -> Findings:  # fmt: skip
    """Find the defects of a network; the program is only read.

    Rules run in a fixed order. The findings of one rule are fixed on a fork before the next rule runs, so that the
    consequences of a defect are not reported too.

    Args:
        program: may be broken, from `edit(check=False)` or `load(check=False)`; a model adds checks against its config.
        inputs: a batch by input name, for rules that run the program.
        loss: for gradients: name of the output or node whose sum is the loss, or a function that adds a loss to a fork
            and returns its name.
        kinds: names of rules, by default all; rules that need a batch run only with `inputs`.
        limits: thresholds; a mapping replaces the defaults of the thresholds that it names.
        report: called with `Progress`.
        cancel: returns True to stop; the findings so far are then returned.
    Raises: UsageError while an edit is open, for unknown kinds or limits; FeedError for inputs that do not fit.
    """
    model, p = (None, program) if isinstance(program, OpGraph) else (program, program.program)
    if p.history.open is not None:
        raise UsageError("the program has an open edit", where=p.name, fix="leave the with-block first")
    step = stepper(report, cancel)
    probe = None if inputs is None else Probe(inputs, loss, step)
    asked = [k for k in chosen(kinds) if k.reads != "probe" or probe is not None]
    if isinstance(limits, Mapping):
        known = [f.name for f in fields(Limits)]
        if unknown := [name for name in limits if name not in known]:
            raise UsageError("unknown limit", got=", ".join(unknown), expected=", ".join(known))
        limits = Limits(**limits)
    d = Diagnosis(p, model, limits, probe)
    found: dict[tuple[str, str], Finding] = {}
    complete = False
    with suppress(DiagnosisCancelled):
        for at, rule in enumerate(asked):
            step("diagnosing", at, len(asked))
            _ask(d, rule, found)
        complete = True
    ordered = sorted(found.values(), key=lambda f: -f.severity)
    return Findings(p, p.version, tuple(ordered), tuple(k.name for k in asked), complete)


def _ask(d: Diagnosis, rule: FindingRule, found: dict[tuple[str, str], Finding]) -> None:
    """Run a rule and fix its new findings on the fork, again until it finds nothing new or no fix changes the fork."""
    before = -1
    while before != d.program.version and (fresh := [f for f in rule.rule(d) if f.identity not in found]):
        before = d.program.version
        for f in fresh:
            found.setdefault(f.identity, f)
            d.mend(f)


def diagnose_model(
    model: Model, text: str | None = None, kinds: Sequence[str] | None = None,
    limits: Limits | Mapping[str, Any] | None = None, *, report: Report | None = None,
    cancel: Callable[[], bool] | None = None,
) -> Findings:  # fmt: skip
    """Find the defects of a model: of its program, its weights, and contradictions to its config.

    Args:
        model: it is only read.
        text: at least two tokens; windows of 64 are the batch, and the cross-entropy of the next token is the loss.
        kinds, limits, report, cancel: see `diagnose`.
    """
    if text is None:
        return diagnose(model, None, None, kinds, limits, report=report, cancel=cancel)
    from graphwright.models.tokenizer import need_tokenizer

    ids = np.asarray(need_tokenizer(model).encode(text), np.int64)
    width = min(64, len(ids) - 1)
    if width < 1:
        raise UsageError("the text is too short to predict a token", expected="at least two tokens", got=len(ids))
    rows = np.stack([ids[s : s + width + 1] for s in range(0, len(ids) - width, width)][:8])

    def next_token_loss(twin: Program) -> str:
        with twin.edit("a loss") as e:
            wanted = e.input(TARGETS, twin.spec("ids").shape, "int64")
            nats = e.add("cross_entropy", twin.output("logits"), wanted, name=twin.free_name("diagnose.nats"))
            return twin.path(e.add("mean", nats, name=twin.free_name("diagnose.loss"), axes=None, keepdims=False))

    (feeds,) = chunked(model.program, {"ids": rows[:, :-1], TARGETS: rows[:, 1:]}, len(rows))
    return diagnose(model, feeds, next_token_loss, kinds, limits, report=report, cancel=cancel)
