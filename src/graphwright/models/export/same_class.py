"""Export level `same_class`: the original transformers class, config and shapes; only weight values may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.models.export.level import ExportLevel, LevelPlan, Reason

if TYPE_CHECKING:
    from graphwright.models.export.deviation import Deviation


class SameClass(ExportLevel):
    """Carries programs that equal their template."""

    number, name, summary = 1, "same_class", "same class, same shapes"

    def plan(self) -> LevelPlan:
        """Possible without deviations."""
        found = [Reason(d.path, f"{d.kind}, {d.detail}", d.axis, d.field) for d in self.case.deviations]
        if found:
            return self._refused(*found)
        p = self.case.model.program
        return self._accepted(sum(p.spec(n).nbytes for n in p.params()))

    def carries(self, d: Deviation) -> bool:
        """None."""
        return False
