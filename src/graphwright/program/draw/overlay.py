"""Numbers and notes on the boxes of a picture, as colours: one value per node or module, or notes by severity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.draw.layout import PictureLayout
    from graphwright.program.program import Program

LEVELS = (
    ("info", "#a9d1f7", "#000000"),
    ("warning", "#f6d155", "#000000"),
    ("error", "#ef8354", "#000000"),
    ("critical", "#b3142d", "#ffffff"),
)
"""Word, fill and text colour per level; the fills differ in lightness too."""
_MOST_LINES = 12


class NodeNote(NamedTuple):
    """A note on a node.

    Attributes:
        level: 0 info, 1 warning, 2 error, 3 critical.
        text: shown while the pointer is over the node.
    """

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class NodeNotes:
    """Notes by target: a node has its own, a group the worst level and all texts of the nodes inside."""

    found: dict[str, NodeNote]
    own: frozenset[str] = frozenset()
    everywhere = False
    """Targets without a note keep their colour."""

    def colour(self, name: str) -> tuple[str, str] | None:
        """Fill and text colour of a target; None without a note."""
        return LEVELS[self.found[name].level][1:] if name in self.found else None

    def note(self, name: str) -> str:
        """The text shown while the pointer is over a target."""
        return self.found[name].text if name in self.found else ""

    @property
    def levels(self) -> list[int]:
        """The levels that occur, the worst first."""
        return sorted({note.level for note in self.found.values()}, reverse=True)


def _notes_of(program: Program, targets: Iterable[ColourTarget], data: Mapping[Any, NodeNote]) -> NodeNotes:
    by_node: dict[NodeId, NodeNote] = {program.node(key): note for key, note in data.items()}
    found = {}
    for name, members in targets:
        inside = [(m, by_node[m]) for m in members if m in by_node]
        if len(inside) == 1 and not name.endswith("."):
            found[name] = inside[0][1]
        elif inside:
            lines = [f"{program.path(m)}: {line}" for m, r in inside for line in r.text.split("\n")]
            more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
            found[name] = NodeNote(max(r.level for _, r in inside), "\n".join(lines[:_MOST_LINES] + more))
    return NodeNotes(found)


_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Five stops of viridis (van der Walt and Smith 2015), perceptually uniform and readable without colour vision."""


class ColourTarget(NamedTuple):
    """Something to colour: a node by its path, a group by its path and a final dot (no node has such a name)."""

    name: str
    members: Sequence[NodeId]


@dataclass(frozen=True, slots=True)
class Overlay:
    """Values by target. `low` and `high` are the ends of the data; None if no value is finite.

    A closed group has its own value if one was given (its path is in `own` then), else the largest value inside. NaN,
    infinite and missing values have no colour; on a logarithmic scale neither have values <= 0.
    """

    values: dict[str, float]
    own: frozenset[str]
    low: float | None
    high: float | None
    logarithmic: bool
    everywhere = True
    """Targets without a value are hatched."""

    def colour(self, name: str) -> tuple[str, str] | None:
        """Fill and text colour of a target; None without a value on the scale."""
        value = self.values.get(name)
        if value is None or self.low is None or self.high is None or not _on_scale(value, self.logarithmic):
            return None
        return shade(_share(value, self.low, self.high, self.logarithmic))

    def note(self, name: str) -> str:
        """The text shown while the pointer is over a target."""
        return f"value {self.values[name]!r}" if name in self.values else ""


def _on_scale(value: float, logarithmic: bool) -> bool:
    return isfinite(value) and not (logarithmic and value <= 0)


def _share(value: float, low: float, high: float, logarithmic: bool) -> float:
    """The position of a value between low (0) and high (1); 0.5 if both are equal."""
    if low == high:
        return 0.5
    if logarithmic:
        return (log(value) - log(low)) / (log(high) - log(low))
    return value / (high - low) - low / (high - low)  # no overflow at the ends


def drawn_targets(picture: PictureLayout) -> list[ColourTarget]:
    """The boxes and frames of a picture."""
    targets = [ColourTarget(f"{p}." if b.kind == "group" else p, b.members) for p, b in picture.boxes.items()]
    return targets + [ColourTarget(f"{p}.", ()) for p in picture.groups]


def overlay_of(
    program: Program, targets: Iterable[ColourTarget], data: Mapping[Any, float | NodeNote], scale: str = "linear"
) -> Overlay | NodeNotes:
    """Make the overlay of a picture.

    Args:
        program: the program that the keys refer to.
        targets: the boxes and frames to colour.
        data: numbers by handle, value, path of a node, or path of a group; or notes by node.
        scale: `linear` or `log`.
    Raises: UnknownNode for a key that is neither a node nor a group; UsageError for another scale.
    """
    if scale not in ("linear", "log"):
        raise UsageError("no such scale of an overlay", expected="linear or log", got=scale)
    targets = list(targets)
    notes = {key: note for key, note in data.items() if isinstance(note, NodeNote)}
    if data and len(notes) == len(data):
        return _notes_of(program, targets, notes)
    if notes:
        raise UsageError("an overlay mixes numbers and notes", got=f"{len(notes)} notes among {len(data)} values",
                         fix="draw them in two pictures")  # fmt: skip
    groups = {t.name[:-1] for t in targets if t.name.endswith(".")}
    groups.update(above for node in program.nodes() for above in _above(program.path(node)))
    paths = {program.path(node) for node in program.nodes()}
    own: dict[str, float] = {}
    by_node: dict[NodeId, float] = {}
    for key, number in data.items():
        if isinstance(key, str) and key in groups and key not in paths:
            own[key] = float(number)  # pyright: ignore[reportArgumentType]  # no note remains
        else:
            by_node[program.node(key)] = float(number)  # pyright: ignore[reportArgumentType]
    logarithmic = scale == "log"
    usable = [v for v in (*own.values(), *by_node.values()) if _on_scale(v, logarithmic)]
    values: dict[str, float] = {}
    for name, members in targets:
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
    """Fill and readable text colour at a position of the scale, 0 to 1."""
    at = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    k = min(int(at), len(_SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (at - k)) for a, b in zip(_SCALE[k], _SCALE[k + 1], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # ITU-R BT.601 luma
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#000000"
