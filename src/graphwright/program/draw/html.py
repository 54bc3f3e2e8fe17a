"""A program as one offline HTML page: groups open and close, and a text outline stands beside the picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from graphwright.program.draw.groups import ROOT
from graphwright.program.draw.layout import GAP, PAD, PIN, STEP, TITLE, common, compose
from graphwright.program.draw.page import html_page
from graphwright.program.draw.pattern_map import pattern_map
from graphwright.program.draw.scene import CHANGED, MIXED, statistics
from graphwright.program.draw.shapes import clean, escaped
from graphwright.program.draw.style import FONT, LINE, ColourTarget, drawn_targets, overlay_of, text_width
from graphwright.program.draw.svg import ROUND, legend, render, written
from graphwright.signatures import keywords

if TYPE_CHECKING:
    from graphwright.files import StrPath
    from graphwright.program.draw.arrange import Arrangement
    from graphwright.program.draw.groups import Net
    from graphwright.program.draw.layout import Box, Composition, PictureKeywords
    from graphwright.program.draw.style import NodeNote, Overlay
    from graphwright.program.program import Program


def outline(made: Composition) -> str:
    """Write the text outline of a picture: nested `<details>`, one per group, and a line per node."""
    tree, scene = made.view.tree, made.view.scene
    out: list[str] = []
    opened = {at for at, top in enumerate(made.view.shown_as()) if top < 0}
    stack = [(child, False) for child in reversed(tree.modules[ROOT].children)]
    while stack:
        child, leaving = stack.pop()
        if leaving:
            out.append("</details>")
        elif child >= 0:
            node = scene.nodes[child]
            words = " ".join((node.op, *(repr(s) for s in node.specs), *((node.mark,) if node.mark else ())))
            name = node.path.rpartition(".")[2]
            out.append(f'<p title="{escaped(node.path)}">{escaped(name)} <small>{escaped(words)}</small></p>')
        else:
            group = tree.modules[~child]
            show = " open" if ~child in opened else ""
            inside = " · ".join(group.lines[1:])
            out.append(f"<details{show}><summary>{escaped(group.title)} <small>{escaped(inside)}</small></summary>")
            stack.append((child, True))
            stack += [(c, False) for c in reversed(group.children)]
    return "\n".join(out)


_STYLE = f"""
:root{{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--line:#d5dae0}}
@media(prefers-color-scheme:dark){{:root{{--paper:#0f1318;--ink:#e6e9ed;--line:#343b44}}}}
body{{margin:0;font:14px {FONT};background:var(--paper);color:var(--ink);display:grid;height:100vh;
grid-template:auto 1fr/minmax(220px,24%) 1fr minmax(220px,22%)}}
header{{grid-column:1/4;padding:8px 16px;border-bottom:1px solid var(--line);display:flex;gap:12px;align-items:center}}
h1{{font-size:16px;margin:0}}
nav,main,aside{{overflow:auto;padding:12px}}
nav{{border-right:1px solid var(--line)}}
aside{{border-left:1px solid var(--line)}}
nav details,nav p{{margin:2px 0 2px 14px}}
nav p{{white-space:nowrap}}
nav small{{opacity:.7}}
svg{{display:block;margin:auto}}
.gw-group-box,.gw-f,.gw-h{{cursor:pointer}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere;font:13px ui-monospace,monospace;margin:0}}
@media(max-width:900px){{body{{display:block;height:auto}}}}
"""


@keywords(compose)
def to_html(
    program: Program, path: StrPath | None = None, *, overlay: Mapping[Any, float | NodeNote] | None = None,
    scale: str = "linear", **options: Unpack[PictureKeywords],
) -> str:  # fmt: skip
    """Draw a program as one HTML page whose groups open and close; see `to_svg` for the arguments."""
    made = compose(program, **options)
    diff = options.get("diff") is not None
    drawn = made.layout()
    colours = overlay_of(program, drawn_targets(drawn), overlay, scale)
    nodes = made.view.scene.nodes
    targets = [ColourTarget(node.path, node.members) for node in nodes]
    for group in made.view.tree.modules:  # hidden ones too
        targets.append(ColourTarget(f"{group.path}.", [n for i in group.members for n in nodes[i].members]))
    every = overlay_of(program, targets, overlay, scale)
    entries, blame = _blame(program)
    maps = {key: pattern_map(pattern) for key, pattern in program.patterns.items()}
    below = legend(drawn, colours, diff, set(made.kinds))
    data = {
        "sizes": {"PAD": PAD, "TITLE": TITLE, "GAP": GAP, "STEP": STEP, "PIN": PIN, "LINE": LINE, "ROUND": ROUND},
        "open": [at for at, top in enumerate(made.view.shown_as()) if top < 0],
        "overlay": every.levels is None,
        "legend": [below.width, below.height],
        "entries": entries,
        **_content(made, every, blame, statistics(program), maps),
    }
    picture = render(drawn, below, colours, diff)
    packed = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    script = Path(__file__).with_name("page.js").read_text("utf-8")
    name = escaped(program.name)
    body = (
        f"<header><h1>{name}</h1><span>{escaped(repr(program))}</span>"
        '<button id="gw-reset">reset</button><button id="gw-open">open all</button>'
        '<button id="gw-close">close all</button></header>'
        f'<nav aria-label="Nodes as text">{outline(made)}</nav><main id="gw-picture">{picture}</main>'
        '<aside><pre id="gw-details">Point at a box for its details. Click a closed group to open it, '
        "the frame of an open one to close it.</pre></aside>"
        f'<script type="application/json" id="gw-data">{packed}</script>'
    )
    return written(html_page(program.name, _STYLE, body, script), path)


def _content(
    made: Composition, overlay: Overlay, blame: dict[str, list[int]], values: Mapping[str, str],
    maps: Mapping[str, list[str]],
) -> dict[str, Any]:  # fmt: skip
    """Return nodes, groups and arrangements for `page.js`.

    `blame`, `values` and `maps` have edits, statistics and maps of patterns by path or key.
    """
    scene, tree = made.view.scene, made.view.tree
    pins = {c: m.arrangement.pins[k] for m in tree.modules for k, c in enumerate(m.children)}
    nodes = []
    for i, node in enumerate(scene.nodes):
        names = (node.path, *(key for *_, key in node.weights))
        edits = sorted({e for name in names for e in blame.get(name, ())})
        weights = [*((name, key) for name, _, key in node.weights), ("values", node.attrs.get("key"))]
        lines = [clean(f"{name}: {values[key]}") for name, key in weights if key in values]
        lines += maps.get(node.attrs.get("key", ""), ())
        nodes.append(_box(made.node_box(i, pins=pins[i]), overlay, edits, lines))
    shared: dict[int, int] = {}
    arrangements, modules = [], []
    for at, module in enumerate(tree.modules):
        arrangement = module.arrangement
        if shared.setdefault(id(arrangement), len(arrangements)) == len(arrangements):
            arrangements.append(_plain(arrangement, module.nets))
        wires = []
        for wire in arrangement.wires:
            edges = module.nets[wire.net].edges[wire.target]
            mark = common([scene.edges[e].mark for e in edges], CHANGED)
            wires.append([common([made.kinds[e] for e in edges], MIXED), len(edges), mark])
        title = module.title if at != ROOT else ""
        tint = {"tint": True} if module.path in overlay.own else {}
        shown = {
            "parent": module.parent,
            "children": module.children,
            "title": title,
            "wires": wires,
            "arrangement": shared[id(arrangement)],
            "titleWidth": text_width(title),
            "repeat": module.repeat,
        }
        modules.append(_box(made.group_box(module), overlay, blame.get(module.path, [])) | tint | shown)
    return {"nodes": nodes, "modules": modules, "arrangements": arrangements}


def _box(box: Box, overlay: Overlay, blame: list[int], lines: Sequence[str] = ()) -> dict[str, Any]:
    """Return a box as JSON for `page.js`; `blame` are indices of journal entries, `lines` more lines of the tooltip."""
    note = overlay.notes.get(box.target)
    found = {
        "path": clean(box.path),
        "kind": box.kind,
        "family": box.family,
        "lines": box.lines,
        "tip": "\n".join((box.tip, *lines, *(map(clean, note.split("\n")) if note else ()))),
        "half": -box.x,
        "height": box.h,
    }
    more = {"mark": box.mark, "colour": overlay.colours.get(box.target), "blame": blame}
    return found | {name: value for name, value in more.items() if value}


def _plain(a: Arrangement, nets: Sequence[Net]) -> dict[str, Any]:
    wires = [[nets[w.net].child, nets[w.net].targets[w.target][0], w.xs, w.bends] for w in a.wires]
    names = ("rank", "lane", "rows", "channels", "gutters", "ends", "steps")
    return {name: getattr(a, name) for name in names} | {"wires": wires}


def _blame(program: Program) -> tuple[list[str], dict[str, list[int]]]:
    """Return the journal entries as text, and {path or checkpoint key: indices of the entries that name it}."""
    entries: list[str] = []
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(program.journal):
        line = f", {entry.line}" if entry.line else ""
        entries.append(clean(f"{entry.seq} {entry.time[:19]} {entry.author}: {entry.why}{line}"))
        named: set[str] = set()
        stack: list[Any] = list(entry.edits)
        while stack:
            record = stack.pop()
            if isinstance(record, dict):
                named.update(v for k in ("path", "dst", "key", "name") if isinstance(v := record.get(k), str))
                stack.extend(record.values())
            elif isinstance(record, list):
                stack.extend(record)
        for name in named:
            found.setdefault(name, []).append(number)
    return entries, found
