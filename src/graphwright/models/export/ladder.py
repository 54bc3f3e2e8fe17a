"""The export ladder: all levels, the lowest that carries a model exactly, and why no lower one does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.models.errors import ExportLevelImpossible
from graphwright.models.export.levels import LEVELS, ExportCase, ExportLevel, LevelPlan
from graphwright.models.export.template_match import Deviation
from graphwright.report import ReportBase, plain

if TYPE_CHECKING:
    from graphwright.models.model import Model

PREFER = ("original", "size")


@dataclass(frozen=True, slots=True, repr=False)
class ExportPlan(ReportBase):
    """Which export levels can carry a model.

    Attributes:
        level: number of the level that `auto` takes, the lowest that is exact; None if no level is.
        prefer: `original`, or `size`, which skips levels that store zeros for removed units.
        levels: one plan per level.
        deviations: differences from the family's template.
    """

    FIGURES = ("possible", "bytes", "not_better")
    level: int | None
    prefer: str
    levels: tuple[LevelPlan, ...]
    deviations: tuple[Deviation, ...]

    def at(self, level: int | str) -> LevelPlan:
        """The plan of a level, by number or name. Raises: UsageError."""
        for row in self.levels:
            if str(level) in (str(row.level), row.name):
                return row
        known = ", ".join(f"{row.level} ({row.name})" for row in self.levels)
        raise UsageError("unknown export level", expected=f"auto, {known}", got=level)

    @property
    def possible(self) -> tuple[int, ...]:
        """Numbers of the levels that can be requested."""
        return tuple(row.level for row in self.levels if row.possible)

    @property
    def bytes(self) -> int:
        """Bytes of the weights that `auto` would write."""
        return (self.levels[-1] if self.level is None else self.at(self.level)).bytes

    @property
    def not_better(self) -> tuple[dict[str, Any], ...]:
        """Why no lower level than `level`: {level, name, reason, path}."""
        return self.why_not(self.level)

    def why_not(self, level: int | None) -> tuple[dict[str, Any], ...]:
        """For each level below the given one: its first reason, or the option that excludes it."""
        rows = []
        for row, kind in zip(self.levels, LEVELS, strict=True):
            path, reason = "", f"possible, but level {level} was requested"
            if row.reasons:
                first, *rest = row.reasons
                path, reason = first.path, f"{first}{f', and {len(rest)} more' if rest else ''}"
            elif self.prefer == "size" and not kind.true_size:
                reason = "prefer='size' skips zeros"
            if (level is None or row.level < level) and (row.reasons or row.possible):
                rows.append({"level": row.level, "name": row.name, "reason": reason, "path": path})
        return tuple(rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        shown = ("path", "kind", "detail", "levels", "axis", "field")
        name = None if self.level is None else self.at(self.level).name
        deviations = [{k: v for k, v in plain(d).items() if k in shown} for d in self.deviations]
        return {**ReportBase.to_json(self), "name": name, "deviations": deviations}

    def __str__(self) -> str:
        lines = ["no export level can carry this structure"]
        if self.level is not None:
            summary = next(level.summary for level in LEVELS if level.number == self.level)
            lines = [f"export level {self.level} ({self.at(self.level).name}): {summary}"]
        reasons: dict[str, list[str]] = {}
        for n in self.not_better:
            reasons.setdefault(n["reason"], []).append(str(n["level"]))
        lines += [f"  not level {', '.join(levels)}: {reason}" for reason, levels in reasons.items()]
        lines += [f"  level {r.level} {'exactly' if r.exact else 'inexactly'}: {r.bytes / 2**20:.2f} MiB"
                  for r in self.levels if r.possible and r.level != self.level]  # fmt: skip
        lines += [f"  {d.path}: {d.kind}, {d.detail}" for d in self.deviations[:20]]
        lines += [f"  ... {len(self.deviations) - 20} more"] if len(self.deviations) > 20 else []
        return "\n".join([*lines, f"{self.bytes / 2**20:.2f} MiB of weights"])


class Ladder:
    """All export levels of one model; reads no payload before one of them writes."""

    def __init__(self, model: Model) -> None:
        case = ExportCase(model)
        self.levels = tuple(level(case) for level in LEVELS)
        self.deviations = tuple(
            replace(d, levels=tuple(level.number for level in self.levels if level.carries(d))) for d in case.deviations
        )

    def plan(self, prefer: str = "original") -> ExportPlan:
        """Plan all levels, and choose one. Raises: UsageError for another preference."""
        if prefer not in PREFER:
            raise UsageError("unknown preference", where="prefer", expected=" or ".join(PREFER), got=prefer)
        rows = tuple(level.plan() for level in self.levels)
        pairs = zip(self.levels, rows, strict=True)
        taken = (row.level for level, row in pairs if row.exact and (level.true_size or prefer != "size"))
        return ExportPlan(next(taken, None), prefer, rows, self.deviations)

    def choose(self, plan: ExportPlan, level: int | str = "auto") -> ExportLevel:
        """The level to export at: `auto`, a number or a name. Raises: UsageError, ExportLevelImpossible."""
        row = plan.at(level) if level != "auto" else None if plan.level is None else plan.at(plan.level)
        if row is not None and row.possible:
            return self.levels[plan.levels.index(row)]
        reasons = (row or plan.levels[-1]).reasons
        what = "no export level can carry this structure" if plan.level is None else f"level {level} cannot carry this"
        raise ExportLevelImpossible(
            what,
            where=reasons[0].path or None if reasons else None,
            got=reasons[0].reason if reasons else "a lower level carries this",
            expected=f"level {' or '.join(map(str, plan.possible))}" if plan.possible else None,
            fix=f"level='auto' takes level {plan.level}" if plan.level else "model.save(DIR) keeps any structure",
        )
