"""What an import found: operators, recovered meaning, what stayed plain, and sizes that are fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphwright.report import Report

if TYPE_CHECKING:
    from graphwright.models.importing.recover import Recovered


@dataclass(frozen=True, slots=True, repr=False)
class Imported(Report):
    """How a program was imported: `program.imported`.

    Attributes:
        source: what was imported, such as a class of torch.
        operators: operator of the source -> how often it occurs.
        recovered: kind of op -> paths of the nodes that stand for several operators of the source.
        plain: kind of op -> path of a region that stayed plain operators -> why.
        fixed: named sizes that are fixed or limited by the source's code -> how.
    """

    source: str
    operators: Mapping[str, int]
    recovered: Mapping[str, list[str]] = field(default_factory=dict)
    plain: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, source: str, operators: Mapping[str, int], found: Recovered | None, fixed: Mapping[str, str]
    ) -> Imported:
        """Return the report of an import; `found` is the result of its recovery, if there was one."""
        recovered, plain = ({}, {}) if found is None else (found.found, found.left)
        return cls(source, dict(operators), dict(recovered), dict(plain), dict(fixed))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Imported:
        """Return a report from its JSON form."""
        return cls(**fields)

    def _text(self) -> str:
        count = sum(self.operators.values())
        lines = [f"{self.source}: {count} operators of {len(self.operators)} kinds"]
        lines += [f"recovered  {kind}: {len(paths)}" for kind, paths in sorted(self.recovered.items())]
        lines += [
            f"plain      {kind}: {path}: {why}" for kind, at in sorted(self.plain.items()) for path, why in at.items()
        ]
        lines += [f"fixed      {name}: {how}" for name, how in self.fixed.items()]
        return "\n".join(lines)
