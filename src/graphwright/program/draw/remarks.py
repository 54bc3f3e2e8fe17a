"""Remarks on nodes: how bad, and a text that shows on hovering; a picture colours what they are about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.graph import NodeId

if TYPE_CHECKING:
    from graphwright.program.draw.overlay import Place
    from graphwright.program.program import Program

LEVELS = (
    ("info", "#a9d1f7", "#000000"),
    ("warning", "#f6d155", "#000000"),
    ("error", "#ef8354", "#000000"),
    ("critical", "#b3142d", "#ffffff"),
)
"""Word, fill and text colour per level; told apart by lightness too."""
_MOST = 12


class Remark(NamedTuple):
    """What is said of a node.

    Attributes:
        level: 0 info, 1 warning, 2 error, 3 critical.
        text: shown on hovering.
    """

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Remarks:
    """Remarks by place: of a node its own, of a group the worst level inside and all texts."""

    found: dict[str, Remark]
    own: frozenset[str] = frozenset()
    everywhere = False
    """Places without one keep their colour."""

    def colour(self, name: str) -> tuple[str, str] | None:
        """Fill and text colour of a place; None if nothing is said of it."""
        return LEVELS[self.found[name].level][1:] if name in self.found else None

    def note(self, name: str) -> str:
        """What hovering shows of a place."""
        return self.found[name].text if name in self.found else ""

    @property
    def levels(self) -> list[int]:
        """Levels there are, the worst first."""
        return sorted({remark.level for remark in self.found.values()}, reverse=True)


def remarks_of(program: Program, places: Iterable[Place], data: Mapping[Any, Remark]) -> Remarks:
    """The remarks of a picture. Raises: UnknownNode."""
    by_node: dict[NodeId, Remark] = {program.node(key): remark for key, remark in data.items()}
    found = {}
    for place in places:
        inside = [(m, by_node[m]) for m in place.members if m in by_node]
        if len(inside) == 1 and not place.name.endswith("."):
            found[place.name] = inside[0][1]
        elif inside:
            lines = [f"{program.path(m)}: {line}" for m, r in inside for line in r.text.split("\n")]
            more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
            found[place.name] = Remark(max(r.level for _, r in inside), "\n".join(lines[:_MOST] + more))
    return Remarks(found)
