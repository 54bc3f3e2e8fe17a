"""What pruning did and what it cost, in numbers that can be recomputed from the program before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphwright.surgery.pruning.plan import Step

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
