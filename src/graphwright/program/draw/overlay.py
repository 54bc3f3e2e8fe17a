"""Numbers and notes on the boxes of a picture, as colours: one value per node or module, or notes by severity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.errors import UsageError
from graphwright.graph import NodeId

if TYPE_CHECKING:
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
    """A note on a node."""

    level: int  # 0 info, 1 warning, 2 error, 3 critical
    text: str  # shown while the pointer is over the node


_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Five stops of viridis (van der Walt and Smith 2015), perceptually uniform and readable without colour vision."""


class ColourTarget(NamedTuple):
    """Something to colour: a node by its path, a group by its path and a final dot (no node has such a name)."""

    name: str
    members: Sequence[NodeId]


@dataclass(frozen=True, slots=True)
class Overlay:
    """Colours and notes by target.

    A closed group has its own number if one was given, else the largest one inside. NaN, infinite and missing numbers
    have no colour; on a logarithmic scale neither have numbers <= 0. A group has the worst level and all notes of the
    nodes inside.
    """

    colours: dict[str, tuple[str, str]]  # fill and text colour
    notes: dict[str, str]  # text shown while the pointer is over the target
    levels: tuple[int, ...] | None = ()  # of the notes, the worst first; None for numbers: targets without are hatched
    own: frozenset[str] = frozenset()  # paths of groups that were given a number
    low: float | None = None  # least number, if one is finite
    high: float | None = None  # greatest number
    logarithmic: bool = False  # whether the scale is


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
    program: Program, targets: Iterable[ColourTarget], data: Mapping[Any, float | NodeNote] | None, scale: str
) -> Overlay:
    """Make the overlay of a picture.

    Args:
        program: the program that the keys refer to.
        targets: the boxes and frames to colour.
        data: numbers by handle, value, path of a node, or path of a group; or notes by node; or None.
        scale: `linear` or `log`.
    Raises: UnknownNode for a key that is neither a node nor a group; UsageError for another scale.
    """
    if data is None:
        return Overlay({}, {})
    if scale not in ("linear", "log"):
        raise UsageError("no such scale of an overlay", expected="linear or log", got=scale)
    notes = {key: note for key, note in data.items() if isinstance(note, NodeNote)}
    numbers = {key: float(number) for key, number in data.items() if not isinstance(number, NodeNote)}
    if notes and numbers:
        raise UsageError("an overlay mixes numbers and notes", got=f"{len(notes)} notes among {len(data)} values",
                         fix="draw them in two pictures")  # fmt: skip
    return _notes_of(program, targets, notes) if notes else _numbers_of(program, [*targets], numbers, scale == "log")


def _notes_of(program: Program, targets: Iterable[ColourTarget], data: Mapping[Any, NodeNote]) -> Overlay:
    by_node = {program.node(key): note for key, note in data.items()}
    found: dict[str, NodeNote] = {}
    for name, members in targets:
        inside = [(m, by_node[m]) for m in members if m in by_node]
        if len(inside) == 1 and not name.endswith("."):
            found[name] = inside[0][1]
        elif inside:
            lines = [f"{program.path(m)}: {line}" for m, r in inside for line in r.text.split("\n")]
            more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
            found[name] = NodeNote(max(r.level for _, r in inside), "\n".join(lines[:_MOST_LINES] + more))
    colours = {name: LEVELS[note.level][1:] for name, note in found.items()}
    levels = tuple(sorted({note.level for note in found.values()}, reverse=True))
    return Overlay(colours, {name: note.text for name, note in found.items()}, levels)


def _numbers_of(
    program: Program, targets: Sequence[ColourTarget], data: Mapping[Any, float], logarithmic: bool
) -> Overlay:
    paths = {program.path(node) for node in program.nodes()}
    groups = {t.name[:-1] for t in targets if t.name.endswith(".")}.union(*map(_above, paths)) - paths
    own = {key: number for key, number in data.items() if isinstance(key, str) and key in groups}
    by_node = {program.node(key): number for key, number in data.items() if key not in own}
    values: dict[str, float] = {}
    for name, members in targets:
        inside = [by_node[m] for m in members if m in by_node]
        if name.endswith("."):
            inside += [v for p, v in own.items() if p.startswith(name)]
        if name.endswith(".") and name[:-1] in own:
            values[name] = own[name[:-1]]
        elif inside:
            values[name] = max((v for v in inside if isfinite(v)), default=inside[0])
    usable = [v for v in data.values() if _on_scale(v, logarithmic)]
    low, high = min(usable, default=0.0), max(usable, default=0.0)
    shares = {name: _share(v, low, high, logarithmic) for name, v in values.items() if _on_scale(v, logarithmic)}
    colours = {name: shade(share) for name, share in shares.items()}
    notes = {name: f"value {v!r}" for name, v in values.items()}
    ends = (low, high) if usable else (None, None)
    return Overlay(colours, notes, None, frozenset(own), *ends, logarithmic)


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
