"""Export level `zero_filled`: the original transformers class and sizes, with zeros for removed units and branches."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphwright.models.export.conform import conform, index_maps, with_eps
from graphwright.models.export.level import ExportLevel, LevelPlan, Reason
from graphwright.models.export.template_match import TRUNK

if TYPE_CHECKING:
    from graphwright.models.architectures.config import Config
    from graphwright.models.export.deviation import Deviation
    from graphwright.models.model import Model


class ZeroFilled(ExportLevel):
    """Carries removed units and branches, gates and factors."""

    number, name, summary = 3, "zero_filled", "same class, zeros for removed units"
    true_size = False

    def plan(self) -> LevelPlan:
        """Possible if every node matches the template and every branch fits into its sizes."""
        case, match = self.case, self.case.match
        if not case.deviations:
            return self._refused()
        why = case.unmatched
        why += [Reason(d.path, f"{d.kind}, {d.detail}")
                for d in case.deviations if d.kind in ("op", "dtype") and not why]  # fmt: skip
        why += [Reason("embed" if i == TRUNK else match.branches[i].name, text) for i, text in self.misfits.items()]
        if isinstance(self.sizes, str):
            why.append(Reason("norm", self.sizes, "channels", match.arch.fields["eps"]))
        if why:
            return self._refused(*why)
        rounded = (Reason(path, f"is computed, and {kind.name} rounds it") for path, kind in case.rounded(match.dims))
        return self._accepted(case.template_bytes(match.dims), inexact=tuple(rounded))

    def carries(self, d: Deviation) -> bool:
        """Everything the template matcher explains and that fits into the original sizes."""
        no_eps = isinstance(self.sizes, str) and d.dimension == "hidden"
        return d.matched and d.kind not in ("op", "dtype") and d.branch not in self.misfits and not no_eps

    def conformed(self) -> Model:
        """The model in the original sizes."""
        assert not isinstance(self.sizes, str)
        return conform(self.case.model, self.case.match, *self.sizes)

    @cached_property
    def sizes(self) -> tuple[Config, Any] | str:
        """Config and dimensions, or why no eps fits all norms."""
        return with_eps(self.case.model.config, self.case.match, self.case.match.dims)

    @cached_property
    def misfits(self) -> dict[int, str]:
        """Branches that are too large for the original sizes, with the reason."""
        match = self.case.match
        maps = {i: index_maps(match, i, match.dims) for i, _ in match.matched()}
        return {i: found for i, found in maps.items() if isinstance(found, str)}
