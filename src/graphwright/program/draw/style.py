"""Labels, colours and line styles of program pictures, for SVG and HTML (light and dark, by CSS) and for DOT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import east_asian_width

from graphwright.errors import UsageError, check_type
from graphwright.graph import NodeId
from graphwright.program.draw.shapes import FONT, clean
from graphwright.program.kinds import ASSIGN

if TYPE_CHECKING:
    from graphwright.program.draw.layout import PictureLayout
    from graphwright.program.draw.scene import SceneNode
    from graphwright.program.program import Program

LINE = 15  # pixels between two lines of text

_LONGEST = 34
_WIDTHS = {
    **dict.fromkeys("ijl|'`.,:;!I ", 4),
    **dict.fromkeys('ft()[]{}/\\"-r*', 5),
    **dict.fromkeys("cksvxyzJ_°", 7),
    **dict.fromkeys("mwMW@%", 12),
    **dict.fromkeys("ABCDEFGHKLNOPQRSTUVXYZ&+=<>~", 9),
}
"""Advance in pixels at 12 px, slightly above that of Arial and Liberation Sans; other characters 7, wide ones 13."""


def text_width(text: str) -> int:
    """Estimate the width of a text at 12 px, in pixels."""
    return sum(
        _WIDTHS.get(c, 7) if c < "\u0300" else 13 if c > "\uffff" or east_asian_width(c) in "WF" else 9 for c in text
    )


def short(text: str, most: int = _LONGEST) -> str:
    """Escape invisible characters of a text, and replace its middle by `…` if it is longer than `most` characters."""
    text = clean(text)
    if len(text) <= most:
        return text
    return f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def name_of(path: str) -> str:
    """Return the last segment of a path; if it is only a number or a range, return the last two segments."""
    head, _, last = path.rpartition(".")
    if head and not any(c.isalpha() for c in last):
        return f"{head.rpartition('.')[2]}.{last}"
    return last


def node_lines(node: SceneNode) -> tuple[str, ...]:
    """Return a node's label: name, op with the shapes of its weights, specs, and the outputs that it computes."""
    name = short(name_of(node.path))
    if node.junction:
        return (f"+ {name}", *_results(node.outputs))
    shapes = " ".join(f"[{', '.join(map(str, spec.shape))}]" for _, spec, _ in node.weights if spec.shape)
    what = node.op if node.op != ASSIGN else "write, next step"
    specs = node.note or short(", ".join(map(repr, node.specs[:2])) + (", …" if len(node.specs) > 2 else ""))
    return (name, short(f"{what} {shapes}".rstrip(), 40), *((specs,) if specs else ()), *_results(node.outputs))


def _results(outputs: Sequence[str]) -> tuple[str, ...]:
    return (f"⇒ {short(', '.join(outputs))}",) if outputs else ()


def group_lines(title: str, ops: int, numbers: int, specs: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the label of a closed group: title, number of ops and of parameters, specs of its results, outputs."""
    inside = f"{ops} op{'s' * (ops != 1)}" + (f" · {count(numbers)} params" if numbers else "")
    return (title, inside, *((short(", ".join(specs[:2])),) if specs else ()), *_results(outputs))


def count(number: int) -> str:
    """Write a number with three significant digits and a unit letter: 950, 1.2k, 7.24B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 0.9995 * size and number >= 1000:  # 999,500 is written as 1M
            return f"{number / size:.3g}{unit}"
    return str(number)


def box_size(lines: Sequence[str], junction: bool) -> tuple[int, int]:
    """Return width and height of a box around lines of text; both are even, so that its middle is a whole pixel."""
    wide = max(text_width(lines[0]) * 13 // 12, *(text_width(line) for line in lines[1:]), 0)
    if junction:
        return max(44, (wide + 20) // 2 * 2), 8 + LINE * len(lines) // 2 * 2
    return max(72, (wide + 24) // 2 * 2), 12 + LINE * len(lines) // 2 * 2


EDGES = {
    "data": ("#1f8a4c", "#4cc38a", ""),
    "attention": ("#2459d3", "#7aa2ff", ""),
    "residual": ("#d1332e", "#ff7b72", "6 4"),
    "state": ("#7b3fb5", "#c59cf0", "2 3"),
}
"""Kind of edge -> stroke in light and dark, dashes."""

FAMILIES = {
    "source": ("#eef1f4", "#2a3038", "#8a94a0", "#79838f"),
    "state": ("#f3ebfb", "#33264a", "#7b3fb5", "#a77bd6"),
    "sum": ("#ffffff", "#15191e", "#d1332e", "#ff7b72"),
    "attention": ("#e3ecff", "#1d2c4d", "#2459d3", "#7aa2ff"),
    "weight": ("#fff3d6", "#3a301a", "#b98900", "#d6ab3f"),
    "view": ("#f6f7f8", "#1d2229", "#b3bac2", "#555e69"),
    "pointwise": ("#e6f5ea", "#1b3325", "#3f9a63", "#4f9d70"),
    "op": ("#e5f3f6", "#18313a", "#34879c", "#56a3b6"),
    "group": ("#f1f0fa", "#26253a", "#6a66a8", "#8a86c8"),
}
"""Family of a box -> fill in light and dark, outline in light and dark."""

MARKS = {
    "added": ("#14914a", "#3ddc84", ""),
    "removed": ("#8b8f94", "#8b949e", "2 4"),
    "changed": ("#c77700", "#f5a524", ""),
}
"""Mark of a difference -> stroke in light and dark, dashes."""


class Theme(NamedTuple):
    """Colours of everything that is not of one kind, family or mark."""

    paper: str
    ink: str
    soft: str  # of minor text
    line: str  # around a group
    frame: str  # of the area of a group
    opacity: str  # of that area


THEMES = (
    Theme("#ffffff", "#1b1f24", "#56606b", "#b9c0c8", "#6e7681", ".06"),
    Theme("#0f1318", "#e6e9ed", "#a4adb8", "#4b535d", "#96a0af", ".07"),
)
"""Light and dark."""


def css() -> str:
    """Return the style sheet of the SVG; all classes start with `gw-`, to avoid clashes with the page around it.

    It has no variables, which renderers other than browsers do not know; shapes have the light colours as attributes
    too, for renderers without style sheets.
    """
    dashes = "".join(f".gw-{k} path{{stroke-dasharray:{d}}}" for k, (_, _, d) in (EDGES | MARKS).items() if d)
    return (
        f".gw text{{font:12px {FONT};user-select:text;unicode-bidi:plaintext;white-space:pre}}"
        ".gw .gw-n{font-size:13px;font-weight:bold}.gw .gw-c{font-size:11px}"
        ".gw-b rect{stroke-width:1.2}.gw-e path{fill:none;stroke-width:1.5}.gw-f rect{stroke-width:1}"
        ".gw .gw-halo{stroke-width:3px;user-select:none;pointer-events:none}"
        ".gw-e:hover path{stroke-width:3}.gw-b:hover rect{stroke-width:2.4}"
        ".gw-diff .gw-b:not(.gw-added):not(.gw-changed):not(.gw-removed){opacity:.6}"
        ".gw-diff .gw-unchanged{opacity:.45}"
        ".gw-b.gw-added rect,.gw-b.gw-changed rect{stroke-width:3}"
        ".gw-b.gw-removed rect{stroke-dasharray:2 4;fill:none;stroke-width:2}.gw-e.gw-added path{stroke-width:3}"
        f".gw .gw-none rect{{fill:url(#gw-hatch)}}{dashes}{_colours(0)}"
        f"@media(prefers-color-scheme:dark){{{_colours(1)}}}"
    )


def _colours(dark: int) -> str:
    """Return the rules of the light or dark colours."""
    theme = THEMES[dark]
    boxes = "".join(f".gw-{k}-box rect{{fill:{c[dark]};stroke:{c[2 + dark]}}}" for k, c in FAMILIES.items())
    lines = "".join(
        f".gw-{k} path{{stroke:{c[dark]}}}.gw-tip-{k}{{fill:{c[dark]}}}" for k, c in (EDGES | MARKS).items()
    )
    marked = "".join(f".gw-b.gw-{k} rect{{stroke:{c[dark]}}}" for k, c in MARKS.items())
    return (
        f".gw text{{fill:{theme.ink}}}.gw .gw-s{{fill:{theme.soft}}}.gw .gw-paper{{fill:{theme.paper}}}"
        f".gw-f rect{{fill:{theme.frame};fill-opacity:{theme.opacity};stroke:{theme.line}}}"
        f".gw .gw-halo{{fill:{theme.paper};stroke:{theme.paper}}}{boxes}{lines}{marked}"
    )


def box_paint(family: str, mark: str) -> dict[str, str]:
    """Return the light colours of a box as SVG attributes."""
    fill, _, line, _ = FAMILIES[family]
    return {"fill": "none" if mark == "removed" else fill, "stroke": MARKS[mark][0] if mark else line}


def line_paint(kind: str) -> dict[str, str]:
    """Return the light colour and the dashes of an edge, of a kind or mark, as SVG attributes."""
    colour, _, dashes = (EDGES | MARKS)[kind]
    return {"fill": "none", "stroke": colour, **({"stroke_dasharray": dashes} if dashes else {})}


def tips() -> str:
    """Return SVG definitions: an arrow head per kind of edge, and the hatch pattern of boxes without a value."""
    heads = "".join(
        f'<marker id="gw-tip-{k}" class="gw-tip-{k}" fill="{c[0]}" viewBox="0 0 8 8" refX="7.5" refY="4" '
        'markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 .8L8 4L0 7.2z" '
        'stroke="none" style="stroke:none"/></marker>'
        for k, c in (EDGES | MARKS).items()
    )
    return (
        f'<defs>{heads}<pattern id="gw-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#8b949e" stroke-opacity=".45" stroke-width="1.5"/>'
        "</pattern></defs>"
    )


LEVELS = (
    ("info", "#a9d1f7", "#000000"),
    ("warning", "#f6d155", "#000000"),
    ("error", "#ef8354", "#000000"),
    ("critical", "#b3142d", "#ffffff"),
)
"""Word, fill and text colour per level; the fills differ in lightness too."""
_MOST_LINES = 12


class NodeNote(NamedTuple):
    """A note to show on a node, with its severity."""

    level: int  # 0 info, 1 warning, 2 error, 3 critical
    text: str  # shown while the pointer is over the node


_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Five stops of viridis (van der Walt and Smith 2015), perceptually uniform and readable without colour vision."""


class ColourTarget(NamedTuple):
    """A box or frame to colour; `name` is the path of a node, or the path of a group followed by a dot."""

    name: str
    members: Sequence[NodeId]


@dataclass(frozen=True, slots=True)
class Overlay:
    """Colours and notes of boxes and frames, by `ColourTarget.name`.

    With numbers, a closed group is coloured by its own number if one was given, else by the largest number inside; NaN
    and infinite numbers have no colour, nor have numbers <= 0 on a logarithmic scale. With notes, a group shows the
    notes of all nodes inside, coloured by the worst level.
    """

    colours: dict[str, tuple[str, str]]  # fill and text colour
    notes: dict[str, str]  # text shown while the pointer is over the target
    levels: tuple[int, ...] | None = ()  # of the notes, the worst first; None for numbers (boxes without are hatched)
    own: frozenset[str] = frozenset()  # paths of groups that were given a number
    low: float | None = None  # least number, if one is finite
    high: float | None = None  # greatest number
    logarithmic: bool = False  # whether the colour scale is logarithmic


def _on_scale(value: float, logarithmic: bool) -> bool:
    return isfinite(value) and not (logarithmic and value <= 0)


def _share(value: float, low: float, high: float, logarithmic: bool) -> float:
    """Return the position of a value on the colour scale: 0 at `low`, 1 at `high`, and 0.5 if `low` equals `high`."""
    if low == high:
        return 0.5
    if logarithmic:
        return (log(value) - log(low)) / (log(high) - log(low))
    return value / (high - low) - low / (high - low)  # no overflow at the ends


def drawn_targets(picture: PictureLayout) -> list[ColourTarget]:
    """Return the boxes and frames of a picture as targets of an overlay."""
    targets = [ColourTarget(f"{p}." if b.kind == "group" else p, b.members) for p, b in picture.boxes.items()]
    return targets + [ColourTarget(f"{p}.", ()) for p in picture.groups]


def overlay_of(
    program: Program, targets: Iterable[ColourTarget], data: Mapping[Any, float | NodeNote] | None, scale: str
) -> Overlay:
    """Make the overlay of boxes and frames.

    Args:
        data: numbers by node (handle, value or path) or by path of a group; or notes by node.
        scale: of the numbers, `linear` or `log`.
    Raises: UnknownNode for a key that is neither a node nor a group; UsageError for another scale, or for numbers and
        notes together.
    """
    if data is None:
        return Overlay({}, {})
    check_type("overlay", data, Mapping, "a dict from nodes to numbers or notes")
    if scale not in ("linear", "log"):
        raise UsageError("unknown scale of an overlay", expected="linear or log", got=scale)
    notes = {key: note for key, note in data.items() if isinstance(note, NodeNote)}
    numbers = {key: float(number) for key, number in data.items() if not isinstance(number, NodeNote)}
    if notes and numbers:
        raise UsageError("the overlay has both numbers and notes", got=f"{len(notes)} notes among {len(data)} values",
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
    """Return fill and readable text colour at a position of the colour scale, 0 to 1."""
    at = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    k = min(int(at), len(_SCALE) - 2)
    red, green, blue = (round(a + (b - a) * (at - k)) for a, b in zip(_SCALE[k], _SCALE[k + 1], strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # ITU-R BT.601 luma
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#000000"
