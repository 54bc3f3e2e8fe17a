"""The table of rules in the order in which `diagnose` runs them. Only the first rule that finds a defect reports it.

A rule is a function from a `Diagnosis` to findings. User rules are registered with `@finding("name")`, or come as entry
points of the group `graphwright.findings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import UsageError, check_type
from graphwright.plugins import load_plugins
from graphwright.program.op_graph import OpGraph
from graphwright.progress import ProgressCallback
from graphwright.surgery.calibration import chunked
from graphwright.surgery.findings import (
    connectivity,
    effects,
    gradients,
    heads,
    interface,
    residuals,
    siblings,
    sparse,
    tensors,
)
from graphwright.surgery.findings.diagnosis import Diagnosis, DiagnosisCancelled, Probe, stepped, stepper
from graphwright.surgery.findings.effects import TARGETS
from graphwright.surgery.findings.finding import Finding, Findings, Limits
from graphwright.surgery.measure import scores_tokens

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.program import Program


Rule = Callable[[Diagnosis], Iterable[Finding]]
READS = ("structure", "weights", "probe")


@dataclass(frozen=True, slots=True)
class FindingRule:
    """A registered rule: a function that returns findings, and a name, which is the `kind` of these findings.

    Attributes:
        reads: what the rule reads: `structure`; `weights` for values of weights; `probe` for a run on a batch.
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
        FindingRule("head_order", effects.head_order, "weights"),
        FindingRule("dead_head", sparse.dead_head),
        FindingRule("blind_queries", sparse.blind_queries),
        FindingRule("unreachable_pairs", sparse.unreachable_pairs),
        FindingRule("unlike_siblings", siblings.unlike_siblings, "weights"),
        FindingRule("bottleneck", tensors.bottleneck),
        FindingRule("redundant", residuals.redundant, "probe"),
        FindingRule("harmful_block", effects.harmful_block, "probe"),
        FindingRule("gain", gradients.gain, "weights"),
        FindingRule("double_softmax", gradients.double_softmax),
    )
}


def finding(name: str, *, reads: str = "structure") -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as a rule. The function gets a `Diagnosis` and returns findings.

    Args:
        name: name of the rule and kind of its findings; the rule runs after the existing rules.
        reads: see `FindingRule`; a `probe` rule runs only if a batch is given.
    Raises: UsageError if the name is taken, or `reads` is unknown.
    """
    if reads not in READS:
        raise UsageError("unknown value of reads", where=name, expected=", ".join(READS), got=reads)

    def enter(rule: Rule) -> Rule:
        if name in _rules:
            raise UsageError(f"a rule is already registered as {name!r}", fix="choose another name")
        _rules[name] = FindingRule(name, rule, reads)
        return rule

    return enter


def rules() -> dict[str, FindingRule]:
    """Return a dict of all rules by name, in the order in which they run; the first call loads plugins."""
    load_plugins("graphwright.findings")
    return dict(_rules)


def chosen(names: Sequence[str] | None) -> list[FindingRule]:
    """Return the named rules, or all for None, in running order. Raises: UsageError for an unknown name."""
    known = rules()
    wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
    if unknown := [n for n in wanted if n not in known]:
        raise UsageError("unknown kind of finding", got=", ".join(map(str, unknown)), expected=", ".join(known))
    return [rule for name, rule in known.items() if name in wanted]


@checked
def diagnose(
    target: Program | Model, *, text: str | None = None, inputs: Mapping[str, Any] | None = None,
    loss: str | Callable[[Program], str] | None = None, kinds: Sequence[str] | None = None,
    limits: Limits | Mapping[str, Any] | None = None, progress: ProgressCallback | None = None,
    cancel: Callable[[], bool] | None = None,
) -> Findings:  # fmt: skip
    """Find the defects of a network, without changing it.

    Rules run in a fixed order. The findings of each rule are fixed on a fork before the next rule runs, so that the
    consequences of a defect are not reported as well.

    Args:
        target: program or model; it may be invalid, from `edit(check=False)` or `load(check=False)`. A model is also
            checked against its config.
        text: for a model, at least two tokens of text in place of `inputs` and `loss`: windows of 64 tokens are the
            batch, and the cross-entropy of the next token is the loss.
        inputs: a batch by input name, for rules that run the program.
        loss: name of the output or node whose sum is the loss for gradients, or a function that adds a loss to a fork
            and returns the name of the loss.
        kinds: names of rules, by default all; rules that need a batch run only with `inputs` or `text`.
        limits: thresholds of the rules; a mapping replaces the defaults that it names.
        progress: called with `Progress`.
        cancel: polled; once it returns True, `diagnose` stops and returns the findings so far.
    Raises: UsageError while an edit is open, for unknown kinds or limits, or for a text that is too short, given to a
        program, or given with inputs; FeedError for inputs that do not fit.
    """
    model, p = (None, target) if isinstance(target, OpGraph) else (target, target.program)
    if p.history.open is not None:
        raise UsageError("the program has an open edit", where=p.name, fix="leave its with-block first")
    check_type("limits", limits, (Limits, Mapping, type(None)), "Limits, or a dict of some of its fields")
    check_type("kinds", kinds, (Iterable, type(None)), "a list of names of rules")
    check_type("inputs", inputs, (Mapping, type(None)), "a dict from inputs to arrays")
    if text is not None:
        check_type("text", text, str, "a text")
        if model is None:
            raise UsageError("a program without a model has no tokenizer for a text", where=p.name, expected="a Model",
                             fix="diagnose(program, inputs=batch, loss=name)")  # fmt: skip
        if inputs is not None or loss is not None:
            raise UsageError("a text was given together with inputs or a loss, which it replaces", fix="drop the text")
        inputs, loss = _windows(model, text), _next_token_loss
    step = stepper(progress, cancel)
    probe = None if inputs is None else Probe(inputs, loss, step)
    asked = [k for k in chosen(kinds) if k.reads != "probe" or probe is not None]
    if isinstance(limits, Mapping):
        known = [f.name for f in fields(Limits)]
        if unknown := [name for name in limits if name not in known]:
            raise UsageError("unknown threshold in limits", got=", ".join(unknown), expected=", ".join(known))
        limits = Limits(**limits)
    d = Diagnosis(p, model, limits, probe)
    found: dict[tuple[str, str], Finding] = {}
    complete = False
    with suppress(DiagnosisCancelled):
        for rule in stepped(step, "diagnosing", asked):
            _ask(d, rule, found)
        complete = True
    ordered = sorted(found.values(), key=lambda f: -f.severity)
    return Findings(p, p.version, tuple(ordered), tuple(k.name for k in asked), complete)


def _ask(d: Diagnosis, rule: FindingRule, found: dict[tuple[str, str], Finding]) -> None:
    """Run a rule, collect and fix its findings on the fork; repeat until none is new or no fix changes the fork."""
    before = -1
    while before != d.program.version and (fresh := [f for f in rule.rule(d) if f.identity not in found]):
        before = d.program.version
        for f in fresh:
            found.setdefault(f.identity, f)
            d.apply_fix(f)


def _windows(model: Model, text: str) -> dict[str, Any]:
    """Return a batch of up to 16 windows of a text with their targets. Raises: UsageError for less than two tokens."""
    from graphwright.models.tokenizer import need_tokenizer

    if not isinstance(text, str):
        raise UsageError("not a text", where="text", expected="str", got=type(text).__name__)
    if not scores_tokens(model.program):
        raise UsageError("a text has no loss for a model that does not predict the next token", got=model.task,
                         where=model.program.name, fix="diagnose(inputs=batch, loss=name of an output)")  # fmt: skip
    ids = np.asarray(need_tokenizer(model).encode(text), np.int64)
    width = min(64, len(ids) - 1)
    if width < 1:
        raise UsageError("the text is too short", where="text", expected="two tokens or more", got=f"{len(ids)} tokens")
    rows = np.stack([ids[s : s + width + 1] for s in range(0, len(ids) - width, width)][:16])
    (feeds,) = chunked(model.program, {"ids": rows[:, :-1], TARGETS: rows[:, 1:]}, len(rows))
    return feeds


def _next_token_loss(p: Program) -> str:
    """Add the mean cross-entropy of the targets to a fork; return its name."""
    with p.edit("a loss") as e:
        wanted = e.input(TARGETS, p.spec("ids").shape, "int64")
        nats = e.add("cross_entropy", p.output("logits"), wanted, name=p.free_name("diagnose.nats"))
        return p.path(e.add("mean", nats, name=p.free_name("diagnose.loss"), axes=None, keepdims=False))
