"""Labels, colours and line styles of program pictures, for SVG and HTML (light and dark, by CSS) and for DOT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from graphwright.program.draw.shapes import clean
from graphwright.program.kinds import ASSIGN

if TYPE_CHECKING:
    from graphwright.program.draw.scene import SceneNode

LINE = 15
"""Pixels between two lines of text."""

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
    """Clean a text, and elide its middle if it is long."""
    text = clean(text)
    if len(text) <= most:
        return text
    return f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def name_of(path: str) -> str:
    """The last segment of a path; with the one before if it is only a number or a range."""
    head, _, last = path.rpartition(".")
    if head and not any(c.isalpha() for c in last):
        return f"{head.rpartition('.')[2]}.{last}"
    return last


def node_lines(node: SceneNode) -> tuple[str, ...]:
    """The label of a node: name, op with the shapes of its weights, spec, and the results of the program that it is."""
    name = short(name_of(node.path))
    if node.junction:
        return (f"+ {name}", *_results(node))
    shapes = " ".join(f"[{', '.join(map(str, spec.shape))}]" for _, spec, _ in node.weights if spec.shape)
    what = node.op if node.op != ASSIGN else "write, next step"
    specs = short(", ".join(map(repr, node.specs[:2])) + (", …" if len(node.specs) > 2 else ""))
    return (name, short(f"{what} {shapes}".rstrip(), 40), *((specs,) if specs else ()), *_results(node))


def _results(node: SceneNode) -> tuple[str, ...]:
    return (f"⇒ {short(', '.join(node.outputs))}",) if node.outputs else ()


def group_lines(title: str, ops: int, numbers: int, specs: Sequence[str]) -> tuple[str, ...]:
    """The label of a closed group: title, number of ops and parameters, results."""
    inside = f"{ops} op{'s' * (ops != 1)}" + (f" · {count(numbers)} params" if numbers else "")
    return (title, inside, *((short(", ".join(specs[:2])),) if specs else ()))


def count(number: int) -> str:
    """Write a number in three digits with a unit letter: 950, 1.20k, 7.24B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def box_size(lines: Sequence[str], junction: bool) -> tuple[int, int]:
    """Compute width and height of a box around lines of text; both even, so that its middle is a whole pixel."""
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

FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"


def css() -> str:
    """The style sheet of the SVG. Classes start with `gw-`, so a page may hold several pictures and its own styles."""
    light, dark = _theme(0), _theme(1)
    dashes = "".join(f".gw-{k} path{{stroke-dasharray:{d}}}" for k, (_, _, d) in (EDGES | MARKS).items() if d)
    return (
        f".gw text{{font:12px {FONT};fill:var(--gw-ink);user-select:text;unicode-bidi:plaintext;white-space:pre}}"
        ".gw .gw-n{font-size:13px;font-weight:bold}.gw .gw-s{fill:var(--gw-soft)}.gw .gw-c{font-size:11px}"
        ".gw-b rect{stroke-width:1.2}.gw-e path{fill:none;stroke-width:1.5}"
        ".gw-f rect{fill:var(--gw-frame);stroke:var(--gw-line);stroke-width:1}"
        ".gw .gw-h,.gw-e text{paint-order:stroke;stroke:var(--gw-paper);stroke-width:3px}"
        ".gw-e:hover path{stroke-width:3}.gw-b:hover rect{stroke-width:2.4}"
        ".gw .gw-paper{fill:var(--gw-paper)}"
        ".gw-diff .gw-b:not(.gw-added):not(.gw-changed):not(.gw-removed){opacity:.6}"
        ".gw-diff .gw-all .gw-e:not(.gw-added):not(.gw-changed):not(.gw-removed){opacity:.45}"
        ".gw-b.gw-added rect,.gw-b.gw-changed rect{stroke-width:3}"
        ".gw-b.gw-removed rect{stroke-dasharray:2 4;fill:none;stroke-width:2}.gw-e.gw-added path{stroke-width:3}"
        f".gw .gw-none rect{{fill:url(#gw-hatch)}}{dashes}"
        f".gw{{{light}}}@media(prefers-color-scheme:dark){{.gw{{{dark}}}}}{_rules()}"
    )


def _theme(dark: int) -> str:
    paper, ink, soft, line, frame = (
        ("#0f1318", "#e6e9ed", "#a4adb8", "#4b535d", "rgba(150,160,175,.07)")
        if dark
        else ("#ffffff", "#1b1f24", "#56606b", "#b9c0c8", "rgba(110,118,129,.06)")
    )
    parts = [f"--gw-paper:{paper};--gw-ink:{ink};--gw-soft:{soft};--gw-line:{line};--gw-frame:{frame}"]
    parts += [f"--gw-{k}:{c[dark]}" for k, c in (EDGES | MARKS).items()]
    parts += [f"--gw-fill-{k}:{c[dark]};--gw-edge-{k}:{c[2 + dark]}" for k, c in FAMILIES.items()]
    return ";".join(parts)


def _rules() -> str:
    boxes = "".join(f".gw-{k}-box rect{{fill:var(--gw-fill-{k});stroke:var(--gw-edge-{k})}}" for k in FAMILIES)
    lines = "".join(f".gw-{k} path{{stroke:var(--gw-{k})}}.gw-tip-{k}{{fill:var(--gw-{k})}}" for k in (EDGES | MARKS))
    marked = "".join(f".gw-b.gw-{k} rect{{stroke:var(--gw-{k})}}" for k in MARKS)
    return boxes + lines + marked


def tips() -> str:
    """Arrow heads, one per kind of edge, and the hatch for missing values."""
    heads = "".join(
        f'<marker id="gw-tip-{k}" class="gw-tip-{k}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 .8L8 4L0 7.2z" stroke="none" '
        'style="stroke:none"/></marker>'
        for k in (EDGES | MARKS)
    )
    return (
        f'<defs>{heads}<pattern id="gw-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#8b949e" stroke-opacity=".45" stroke-width="1.5"/>'
        "</pattern></defs>"
    )
