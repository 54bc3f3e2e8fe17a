"""The ladder: all export levels of a model, their plans, and the choice of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from graphwright.errors import UsageError
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.errors import ExportLevelImpossible
from graphwright.models.export.generated_code import GeneratedCode
from graphwright.models.export.levels import ExportLevel, LevelPlan, SameClass
from graphwright.models.export.other_classes import ClassCase, ClassResized, ClassZeros
from graphwright.models.export.template_levels import HostClass, ResizedConfig, TemplateCase, ZeroFilled
from graphwright.models.export.template_match import (
    Deviation,
)
from graphwright.report import Report, listed

if TYPE_CHECKING:
    from graphwright.models.model import Model


LEVELS: dict[int, type[ExportLevel]] = {
    level.number: level for level in (SameClass, ResizedConfig, ZeroFilled, HostClass, GeneratedCode)
}
"""Levels of decoders with a template."""
CLASS_LEVELS: dict[int, type[ExportLevel]] = {
    level.number: level for level in (SameClass, ClassResized, ClassZeros, GeneratedCode)
}
"""Levels of all other classes."""

Prefer = Literal["class", "size"]
PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
"""Whether `auto` prefers the original class of transformers, or weights without zeros."""


@dataclass(frozen=True, slots=True, repr=False)
class ExportPlan(Report):
    """Plans of all export levels for a model, and its deviations from the family's template.

    Attributes:
        level: number of the level that `auto` takes, the lowest that is exact; None if no level is.
        prefer: `class`, or `size`, which skips levels that store zeros for removed units.
    """

    FIGURES = ("possible", "bytes", "not_better")
    level: int | None
    prefer: str
    levels: tuple[LevelPlan, ...]
    deviations: tuple[Deviation, ...]

    def at(self, level: int | str) -> LevelPlan:
        """Return the plan of a level, by number or name. Raises: UsageError if it is unknown."""
        for row in self.levels:
            if str(level) in (str(row.level), row.name):
                return row
        known = ", ".join(f"{row.level} ({row.name})" for row in self.levels)
        raise UsageError("unknown export level", expected=f"auto, {known}", got=level)

    @property
    def possible(self) -> tuple[int, ...]:
        """Numbers of the levels whose plan is possible."""
        return tuple(row.level for row in self.levels if row.possible)

    @property
    def bytes(self) -> int:
        """Bytes of the weights that `auto` would write."""
        return (self.levels[-1] if self.level is None else self.at(self.level)).bytes

    @property
    def not_better(self) -> tuple[dict[str, Any], ...]:
        """Why each level below `level` was not taken: dicts with the keys level, name, reason and path."""
        return self.why_not(self.level)

    def why_not(self, level: int | None) -> tuple[dict[str, Any], ...]:
        """Return why each level below `level` (None: any) was not taken: dicts with level, name, reason and path."""
        rows = []
        for row in self.levels:
            path, reason = "", f"possible, but level {level} was requested"
            if row.reasons:
                first, *rest = row.reasons
                path, reason = first.path, f"{first}{f', and {len(rest)} more' if rest else ''}"
            elif self.prefer == "size" and not LEVELS[row.level].true_size:
                reason = "prefer='size' skips zeros"
            if (level is None or row.level < level) and (row.reasons or row.possible):
                rows.append({"level": row.level, "name": row.name, "reason": reason, "path": path})
        return tuple(rows)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {**Report.to_json(self), "name": None if self.level is None else self.at(self.level).name}

    def _text(self) -> str:
        none = f"is exact with prefer={self.prefer!r}" if self.possible else "can carry this structure"
        lines = [f"no export level {none}"]
        if self.level is not None:
            lines = [f"export level {self.level} ({self.at(self.level).name}): {LEVELS[self.level].summary}"]
        reasons: dict[str, list[str]] = {}
        for n in self.not_better:
            reasons.setdefault(n["reason"], []).append(str(n["level"]))
        lines += [f"  not level {', '.join(levels)}: {reason}" for reason, levels in reasons.items()]
        lines += [f"  level {r.level} {'exactly' if r.exact else 'inexactly'}: {r.bytes / 2**20:.2f} MiB"
                  for r in self.levels if r.possible and r.level != self.level]  # fmt: skip
        lines += listed([f"  {d.path}: {d.kind}, {d.detail}" for d in self.deviations], most=20)
        return "\n".join([*lines, f"{self.bytes / 2**20:.2f} MiB of weights"])


class Ladder:
    """All export levels of a model; of a decoder with a template, weights are only read when files are written."""

    def __init__(self, model: Model) -> None:
        decoder = model.arch.imported is None and model.task == LANGUAGE_MODEL
        case, levels = (TemplateCase(model), LEVELS) if decoder else (ClassCase(model), CLASS_LEVELS)
        self.levels = tuple(level(case) for level in levels.values())
        numbers = [tuple(level.number for level in self.levels if level.carries(d)) for d in case.deviations]
        self.deviations = tuple(replace(d, levels=n) for d, n in zip(case.deviations, numbers, strict=True))

    def plan(self, prefer: str = "class") -> ExportPlan:
        """Plan all levels, and choose one. Raises: UsageError for an unknown preference."""
        if prefer not in PREFERENCES:
            raise UsageError("unknown preference", where="prefer", expected=" or ".join(PREFERENCES), got=prefer)
        rows = tuple(level.plan() for level in self.levels)
        pairs = zip(self.levels, rows, strict=True)
        taken = (row.level for level, row in pairs if row.exact and (level.true_size or prefer != "size"))
        return ExportPlan(next(taken, None), prefer, rows, self.deviations)

    def choose(self, plan: ExportPlan, level: int | str = "auto") -> ExportLevel:
        """Return the level that `auto`, a number or a name stands for. Raises: UsageError, ExportLevelImpossible."""
        row = plan.at(level) if level != "auto" else None if plan.level is None else plan.at(plan.level)
        if row is not None and row.possible:
            return self.levels[plan.levels.index(row)]
        reasons = (row or plan.levels[-1]).reasons
        problem = "cannot carry this structure" if reasons else "is not needed, because a lower level is exact"
        none = f"is exact with prefer={plan.prefer!r}" if plan.possible else "can carry this structure"
        what = f"no export level {none}" if row is None or not plan.possible else f"export level {level} {problem}"
        where, got = (reasons[0].path or None, reasons[0].reason) if reasons else (None, None)
        expected = f"level {' or '.join(map(str, plan.possible))}" if plan.possible else None
        fix = f"level='auto' takes level {plan.level}" if plan.level else "model.save(DIR) keeps any structure"
        raise ExportLevelImpossible(what, where=where, got=got, expected=expected, fix=fix)
