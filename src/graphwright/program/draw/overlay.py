"""Numbers as colours: one value per node or module, from the lowest to the highest found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.draw.layout import Layout
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


_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Five stops of viridis (van der Walt and Smith 2015): even to the eye, also without colour vision."""


class Place(NamedTuple):
    """Something to colour: a node by its path, a group by its path and a dot (no node has such a name)."""

    name: str
    members: Sequence[NodeId]


@dataclass(frozen=True, slots=True)
class Overlay:
    """Values of places. `low` and `high` are those of the data; None if no value is finite.

    A closed group has its own value if one was given (its path is in `own` then), else the largest inside. NaN,
    infinite and missing values have no colour, nor, on a logarithmic scale, have those that are not positive.
    """

    values: dict[str, float]
    own: frozenset[str]
    low: float | None
    high: float | None
    logarithmic: bool
    everywhere = True
    """Places without a value are hatched."""

    def colour(self, name: str) -> tuple[str, str] | None:
        """Fill and text colour of a place; None if it has no value."""
        value = self.values.get(name)
        if value is None or self.low is None or self.high is None or not self._has_place(value):
            return None
        return shade(self.share(value))

    def note(self, name: str) -> str:
        """What hovering shows of a place."""
        return f"value {self.values[name]!r}" if name in self.values else ""

    def share(self, value: float) -> float:
        """Place of a value between low (0) and high (1); 0.5 if all are the same."""
        assert self.low is not None, "only values with a place are asked for"
        assert self.high is not None, "it comes with a lowest"
        if self.low == self.high:
            return 0.5
        if self.logarithmic:
            return (log(value) - log(self.low)) / (log(self.high) - log(self.low))
        return value / (self.high - self.low) - self.low / (self.high - self.low)  # no overflow at the ends

    def _has_place(self, value: float) -> bool:
        return isfinite(value) and not (self.logarithmic and value <= 0)


def drawn_places(picture: Layout) -> list[Place]:
    """The boxes and frames of a picture."""
    places = [Place(f"{p}." if b.kind == "group" else p, b.members) for p, b in picture.boxes.items()]
    return places + [Place(f"{p}.", ()) for p in picture.groups]


def overlay_of(
    program: Program, places: Iterable[Place], data: Mapping[Any, float | Remark], scale: str = "linear"
) -> Overlay | Remarks:
    """The overlay of a picture.

    Args:
        program: whose nodes the keys name.
        places: what is coloured.
        data: numbers by handle, value, path of a node, or path of a group; or remarks by node.
        scale: `linear` or `log`.
    Raises: UnknownNode for a key that is neither a node nor a group; UsageError for another scale.
    """
    if scale not in ("linear", "log"):
        raise UsageError("no such scale", expected="linear or log", got=scale)
    places = list(places)
    remarks = {key: r for key, r in data.items() if isinstance(r, Remark)}
    if data and len(remarks) == len(data):
        return remarks_of(program, places, remarks)
    if remarks:
        raise UsageError("numbers and remarks are drawn apart", got=f"{len(remarks)} remarks of {len(data)} values")
    groups = {p.name[:-1] for p in places if p.name.endswith(".")}
    groups.update(above for node in program.nodes() for above in _above(program.path(node)))
    paths = {program.path(node) for node in program.nodes()}
    own: dict[str, float] = {}
    by_node: dict[NodeId, float] = {}
    for key, number in data.items():
        if isinstance(key, str) and key in groups and key not in paths:
            own[key] = float(number)  # pyright: ignore[reportArgumentType]  # no remark is left
        else:
            by_node[program.node(key)] = float(number)  # pyright: ignore[reportArgumentType]
    logarithmic = scale == "log"
    usable = [v for v in (*own.values(), *by_node.values()) if isfinite(v) and not (logarithmic and v <= 0)]
    values: dict[str, float] = {}
    for name, members in places:
        path = name[:-1] if name.endswith(".") else None
        if path in own:
            values[name] = own[path]
            continue
        inside = [by_node[m] for m in members if m in by_node]
        if path is not None:
            inside += [v for p, v in own.items() if p.startswith(name)]
        if inside:
            values[name] = max((v for v in inside if isfinite(v)), default=inside[0])
    return Overlay(values, frozenset(own), min(usable, default=None), max(usable, default=None), logarithmic)


def _above(path: str) -> list[str]:
    found = []
    while path := path.rpartition(".")[0]:
        found.append(path)
    return found


def shade(share: float) -> tuple[str, str]:
    """Fill and readable text colour at a place of the scale, 0 to 1."""
    at = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    k = min(int(at), len(_SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (at - k)) for a, b in zip(_SCALE[k], _SCALE[k + 1], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # ITU-R BT.601 luma
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#000000"
