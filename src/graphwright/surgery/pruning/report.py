"""What pruning did and what it cost, in numbers that can be recomputed from the program before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.program.axes.resize import ResizeAxis
from graphwright.program.editing.edits import RemoveEdge, RemoveNode, SetWeight
from graphwright.program.errors import NotUndoable
from graphwright.surgery.calibration import Stream
from graphwright.surgery.measure import facts, loss, speaks
from graphwright.surgery.pruning.plan import TOOL, Step
from graphwright.surgery.pruning.prunable import of_group
from graphwright.surgery.pruning.restore import Change
from graphwright.surgery.pruning.statistics import grams

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.program.editing.journal import Entry
    from graphwright.surgery.calibration import Calibration

SCHEMA = 1


@dataclass(slots=True, repr=False)
class PruneReport:
    """Of one pruning, made or planned.

    Attributes:
        target, reached: the budget as text; what is left, of what it counts: {of, before, after, asked}.
        steps: what was done; see `Step`.
        before, after: {parameters, bytes, flops, nats, perplexity, bits_per_byte, ms_per_token, tokens_per_s}, on
            held-out windows; measured times where they were asked for; of other programs {drift, ms_per_run}.
        rung: of export, before and after; None without a model.
        calibration: sizes, seed and hashes of the windows on both sides.
        settings: method, scope and the like.
        attempts: shares of attention that were tried, with their losses on the calibration data.
        warnings: what the user should know.
        journal: hash of the journal; None for a plan.
        seconds: of the whole call.
    """

    target: str
    reached: dict[str, Any]
    steps: tuple[Step, ...]
    before: dict[str, Any]
    after: dict[str, Any]
    rung: tuple[int | None, int | None] | None
    calibration: dict[str, Any]
    settings: dict[str, Any]
    attempts: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    journal: str | None = None
    seconds: float = 0.0

    @property
    def empty(self) -> bool:
        """True if there was nothing to do."""
        return not self.steps

    def figures(self) -> dict[str, Any]:
        """What `optimise_report` makes again from the journal: everything but times, settings, and what was tried."""
        times = ("ms_per_token", "tokens_per_s", "ms_per_run")
        sides = {side: {k: v for k, v in getattr(self, side).items() if k not in times} for side in ("before", "after")}
        rows = [{k: v for k, v in s.to_json().items() if k not in ("ridge", "quantiles")} for s in self.steps]
        return {**sides, "layers": rows, "calibration": self.calibration, "journal": self.journal}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name != "steps"}
        facts["rung"] = None if self.rung is None else list(self.rung)
        return {"schema": SCHEMA, **facts, "layers": [s.to_json() for s in self.steps]}

    def __repr__(self) -> str:
        lines = [f"prune {self.target}: {self.reached['of']} {_number(self.reached['before'])} => "
                 f"{_number(self.reached['after'])}{'' if self.steps else ', nothing to do'}"]  # fmt: skip
        for step in self.steps:
            held = "" if step.held_out is None else f" (held out {step.held_out:.3e}, unrestored {step.plain:.3e})"
            lines.append(f"  {step}{held}")
        lines += [f"  {name:<14}{line}" for name, line in _table(self.before, self.after)]
        if self.rung is not None:
            lines.append(f"  {'export rung':<14}{self.rung[0]} => {self.rung[1]}")
        tried = [f"{a['share']:g}: {a['given_up'] or format(a['calibration_loss'], '.4f')}" for a in self.attempts]
        lines += [f"  {'tried':<14}{'; '.join(tried)}"] if len(tried) > 1 else []
        lines += [f"  {'warning':<14}{w}" for w in self.warnings]
        data, journal = self.calibration, f"; journal {self.journal[:12]}" if self.journal else ""
        lines.append(
            f"  {data['tokens']} tokens learned from, {data['held_out_tokens']} held out; {self.seconds:.1f} s{journal}"
        )
        return "\n".join(lines)


NAMES = {
    "parameters": "parameters", "bytes": "bytes", "flops": "FLOP/token", "perplexity": "perplexity",
    "bits_per_byte": "bits per byte", "nats": "nats/token", "drift": "drift", "ms_per_token": "ms per token",
    "tokens_per_s": "tokens/s", "ms_per_run": "ms per run",
}  # fmt: skip


def _table(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, label in NAMES.items():
        if name in after:
            a, b = before.get(name), after[name]
            share = f"  ({100 * (b / a - 1):+.1f} %)" if a and name != "drift" else ""
            rows.append((label, f"{_number(a)} => {_number(b)}{share}"))
    return rows


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.5g}"


def optimise_report(
    program: Program, calibration: Calibration, seq: int | None = None, *, tokenizer: Any = None
) -> dict[str, Any]:
    """What `PruneReport.figures()` gave when the entry was made.

    Args:
        program: with the entry in its journal, and its undo kept.
        calibration: the same data.
        seq: of the entry; by default the last pruning in force.
        tokenizer: as it was given then: that of the model.
    Returns: {before, after, layers, calibration, journal}; a layer's errors are on what the pruned ones before it give.
    Raises: UsageError if there is no such entry; NotUndoable if what would undo it was not kept.
    """
    made = [e for e in program.history.undoable if e.tool == TOOL and (seq is None or e.seq == seq)]
    if not made:
        raise UsageError("no pruning is in force", where=program.name, got=None if seq is None else f"entry {seq}")
    entry = made[-1]
    before, after = program.at(entry.seq - 1), program.at(entry.seq)
    return {
        "before": facts(before, calibration, before, tokenizer),
        "after": facts(after, calibration, before, tokenizer),
        "layers": _layers(before.fork(), _steps(before.fork(), entry), calibration),
        "calibration": calibration.to_json(),
        "journal": entry.hash,
    }


def _steps(p: Program, entry: Entry) -> list[Step]:
    """What was cut, in order, and the weights that were set after each cut."""
    if entry.undo is None:
        raise NotUndoable("what would undo this entry was not kept", where=f"entry {entry.seq}")
    found: list[dict[str, Any]] = []
    for edit in entry.undo.forward:
        if isinstance(edit, ResizeAxis):
            (axis,) = edit.axes
            gone = tuple(map(int, np.delete(np.arange(axis.of), axis.old)))
            found.append({"what": "units", "name": axis.axis, "units": gone, "size": axis.of, "weights": {}})
        elif isinstance(edit, SetWeight):
            found[-1]["weights"][edit.key] = edit.array
        elif isinstance(edit, RemoveEdge) and not (found and found[-1].get("open")):
            found.append({"what": "module", "name": p.path(edit.edge), "open": True})
        elif not isinstance(edit, RemoveEdge | RemoveNode):
            raise UsageError("heads in unequal number cannot be told from the journal", where=f"entry {entry.seq}")
        if not isinstance(edit, RemoveEdge | RemoveNode) and found:
            found[-1].pop("open", None)
    return [Step(**{k: v for k, v in f.items() if k != "open"}) for f in found]


def _layers(p: Program, steps: list[Step], calibration: Calibration) -> list[dict[str, Any]]:
    """The steps once more, each measured."""
    feeds, held = calibration.feeds(p), calibration.feeds(p, held=True)
    reference = None if speaks(p) else list(Stream(p, feeds).outputs())
    learn, check, rows = Stream(p, feeds), Stream(p, held), []
    for step in steps:
        sizes = {k: v.shape for k, v in p.weights.items()}
        row: dict[str, Any] = {"what": step.what, "name": step.name}
        if step.what == "module":
            plain = loss(Stream(p, feeds), reference)
            step.apply(p)
            row |= {"error": loss(Stream(p, feeds), reference), "plain": plain, "held_out": None}
        else:
            axis = of_group(p.axes()[step.name])
            assert axis is not None
            keep = np.ones(axis.size, bool)
            keep[list(step.units)] = False
            for stream in (learn, check):
                stream.advance(axis.start)
            moments = [grams(p, axis.consumers, stream) for stream in (learn, check)]
            changes = [Change.of(p, c, keep) for c in axis.consumers]
            plain = fmean(c.plain(g) for c, g in zip(changes, moments[0], strict=True))
            step.apply(p)
            inside, outside = (fmean(c.error(p, g) for c, g in zip(changes, side, strict=True)) for side in moments)
            row |= {"error": inside, "plain": plain, "held_out": outside}
        shapes = {k: (s, p.weights.array(k).shape if k in p.weights else ()) for k, s in sizes.items()}
        changed = {k: [list(a), list(b)] for k, (a, b) in shapes.items() if a != b}
        params = sum(prod(a) - (prod(b) if b else 0) for a, b in changed.values())
        rows.append(row | {"units": step.to_json()["units"], "of": step.size, "params": params,
                           "restored": sorted(step.weights), "shapes": changed})  # fmt: skip
    return rows


def activation_memory(program: Program, inputs: Mapping[str, Any]) -> int:
    """Bytes of the arena in which a run of these inputs lays out all that it computes: that of the plan.

    Args:
        program: before or after an operation.
        inputs: arrays by input name, as for a run.
    Raises: as `Program.compile`.
    """
    return program.compile(inputs).arena_bytes
