"""Diagnosis: run all rules on a network and report each defect once, with a witness and fixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.models import Model
from graphwright.progress import Progress
from graphwright.surgery.findings.diagnosis import Diagnosis, DiagnosisCancelled, Probe
from graphwright.surgery.findings.finding import Limits
from graphwright.surgery.findings.kinds import chosen
from graphwright.surgery.findings.report import Findings

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.progress import Report
    from graphwright.surgery.findings.finding import Finding
    from graphwright.surgery.findings.kinds import FindingRule

TARGETS = "diagnose.targets"
"""Name of the input of target tokens, on the fork that runs a text."""


def diagnose(
    program: Program | Model,
    inputs: Mapping[str, Any] | None = None,
    loss: str | Callable[[Program], str] | None = None,
    kinds: Sequence[str] | None = None,
    limits: Limits | Mapping[str, Any] | None = None,
    *,
    report: Report | None = None,
    cancel: Callable[[], bool] | None = None,
) -> Findings:
    """Find the defects of a network; the program is only read.

    Rules run in a fixed order. The findings of one rule are fixed on a fork before the next rule runs, so that the
    consequences of a defect are not reported too.

    Args:
        program: may be broken, from `edit(check=False)` or `load(check=False)`; a model adds checks against its config.
        inputs: a batch by input name, for rules that run the program.
        loss: for gradients: name of the output or node whose sum is the loss, or a function that adds a loss to a fork
            and returns its name.
        kinds: names of rules; by default all, those that need a batch only with `inputs`.
        limits: thresholds; a mapping changes some of them.
        report, cancel: progress of long rules, and whether to stop; findings so far are returned.
    Raises: UsageError while an edit is open, for unknown kinds or limits; FeedError for inputs that do not fit.
    """
    model, p = (program, program.program) if isinstance(program, Model) else (None, program)
    if p.history.open is not None:
        raise UsageError("the program has an open edit", where=p.name, fix="leave the with-block first")
    probe = None if inputs is None else Probe(inputs, loss, report, cancel)
    asked = [k for k in chosen(kinds) if k.reads != "probe" or probe is not None]
    d = Diagnosis(p, model, _limits(limits), probe)
    found, complete = _ask(d, asked, report, cancel)
    found.sort(key=lambda f: -f.severity)
    return Findings(p, p.version, tuple(found), tuple(k.name for k in asked), complete)


def _ask(
    d: Diagnosis, asked: Sequence[FindingRule], report: Report | None, cancel: Callable[[], bool] | None
) -> tuple[list[Finding], bool]:
    found: dict[tuple[str, str], Finding] = {}
    try:
        for at, kind in enumerate(asked):
            if report is not None:
                report(Progress("diagnosing", at, len(asked)))
            if cancel is not None and cancel():
                return list(found.values()), False
            while fresh := [f for f in kind.rule(d) if f.identity not in found]:
                for f in fresh:
                    found.setdefault(f.identity, f)
                before = d.program.version
                for f in fresh:
                    d.mend(f)
                if d.program.version == before:
                    break
    except DiagnosisCancelled:
        return list(found.values()), False
    return list(found.values()), True


def _limits(limits: Limits | Mapping[str, Any] | None) -> Limits:
    if limits is None or isinstance(limits, Limits):
        return limits or Limits()
    known = [f.name for f in fields(Limits)]
    if unknown := [name for name in limits if name not in known]:
        raise UsageError("unknown limit", got=", ".join(unknown), expected=", ".join(known))
    return Limits(**limits)


def diagnose_model(
    model: Model,
    text: str | None = None,
    kinds: Sequence[str] | None = None,
    limits: Limits | Mapping[str, Any] | None = None,
    *,
    report: Report | None = None,
    cancel: Callable[[], bool] | None = None,
) -> Findings:
    """Find the defects of a model: of its program, its weights, and contradictions to its config.

    Args:
        model: it is only read.
        text: at least two tokens; run as a probe in windows of 64, with the cross-entropy of the next token as loss.
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
    targets = np.ascontiguousarray(rows[:, 1:])

    def next_token_loss(twin: Program) -> str:
        with twin.edit("a loss") as e:
            wanted = e.input(TARGETS, twin.spec("ids").shape, "int64")
            nats = e.add("cross_entropy", twin.output("logits"), wanted, name=twin.free_name("diagnose.nats"))
            return twin.path(e.add("mean", nats, name=twin.free_name("diagnose.loss"), axes=None, keepdims=False))

    feeds = {**_feeds(model.program, np.ascontiguousarray(rows[:, :-1])), TARGETS: targets}
    return diagnose(model, feeds, next_token_loss, kinds, limits, report=report, cancel=cancel)


def _feeds(p: Program, ids: np.ndarray) -> dict[str, np.ndarray]:
    given = {"ids": ids, "positions": np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))}
    return {name: given[name] for name in p.input_names() if name in given}
