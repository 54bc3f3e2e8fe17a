"""A picture as one HTML page that works offline: groups open and close, details on hover, a text tree beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphwright.program.draw.groups import ROOT
from graphwright.program.draw.layout import BUDGET, GAP, PAD, PIN, STEP, TITLE, compose, joint_mark, tip
from graphwright.program.draw.legend import legend
from graphwright.program.draw.overlay import Place, Remarks, drawn_places, overlay_of
from graphwright.program.draw.scene import MIXED, family, statistics
from graphwright.program.draw.style import FONT, LINE, clean, text, text_width
from graphwright.program.draw.svg import ROUND, render
from graphwright.program.kinds import KINDS

if TYPE_CHECKING:
    from graphwright.program.draw.arrange import Arrangement
    from graphwright.program.draw.layout import Composition
    from graphwright.program.draw.overlay import Overlay, Remark
    from graphwright.program.program import Program


def outline(made: Composition) -> str:
    """Nested `<details>`, one per group, and a line per node."""
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
            out.append(f'<p title="{text(node.path)}">{text(name)} <small>{text(words)}</small></p>')
        else:
            at = ~child
            show = " open" if at in opened else ""
            inside = " · ".join(made.lines[at][1:])
            out.append(f"<details{show}><summary>{text(made.title(at))} <small>{text(inside)}</small></summary>")
            stack.append((child, True))
            stack += [(c, False) for c in reversed(tree.modules[at].children)]
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


def to_html(
    program: Program,
    expanded: Set[str] | None = None,
    diff: Program | None = None,
    overlay: Mapping[Any, float | Remark] | None = None,
    *,
    level: int | None = None,
    fold: bool = False,
    params: bool = False,
    budget: int = BUDGET,
    scale: str = "linear",
) -> str:
    """A program as one HTML page without any outside reference; arguments as in `to_svg`."""
    made = compose(program, expanded, budget, level=level, fold=fold, params=params, diff=diff)
    drawn = made.layout()
    colours = None if overlay is None else overlay_of(program, drawn_places(drawn), overlay, scale)
    every = None if overlay is None else overlay_of(program, _every_place(made), overlay, scale)
    entries, blame = _blame(program)
    below = legend(drawn, colours, diff is not None, set(made.kinds))
    data = {
        "sizes": {"PAD": PAD, "TITLE": TITLE, "GAP": GAP, "STEP": STEP, "PIN": PIN, "LINE": LINE, "ROUND": ROUND},
        "open": [at for at, top in enumerate(made.view.shown_as()) if top < 0],
        "overlay": every is not None and every.everywhere,
        "legend": [below.width, below.height],
        "entries": entries,
        **_content(made, every, blame, statistics(program)),
    }
    picture = render(drawn, below, colours, diff is not None)
    packed = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    script = Path(__file__).with_name("page.js").read_text("utf-8")
    name = text(program.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        f"{_STYLE}</style></head><body><header><h1>{name}</h1><span>{text(repr(program))}</span>"
        '<button id="gw-reset">as at first</button><button id="gw-open">open all</button>'
        '<button id="gw-close">close all</button></header>'
        f'<nav aria-label="Nodes as text">{outline(made)}</nav><main id="gw-picture">{picture}</main>'
        '<aside><pre id="gw-details">Point at a box for its details. Click a closed group to open it, '
        "the frame of an open one to close it.</pre></aside>"
        f'<script type="application/json" id="gw-data">{packed}</script><script>{script}</script></body></html>\n'
    )


def _content(
    made: Composition, overlay: Overlay | Remarks | None, blame: dict[str, list[int]], values: Mapping[str, str]
) -> dict[str, Any]:
    """Nodes, groups and arrangements for `page.js`; equal groups share an arrangement."""
    scene, tree = made.view.scene, made.view.tree
    pins = {c: made.arrangements[at].pins[k] for at, m in enumerate(tree.modules) for k, c in enumerate(m.children)}
    nodes = []
    for i, node in enumerate(scene.nodes):
        size = made.node_size(i, pins[i])
        kind = "junction" if node.junction else node.op if node.op in KINDS else "op"
        names = (node.path, *(key for *_, key in node.weights))
        edits = sorted({e for name in names for e in blame.get(name, ())})
        weights = [*((name, key) for name, _, key in node.weights), ("values", node.attrs.get("key"))]
        told = [clean(f"{name}: {values[key]}") for name, key in weights if key in values]
        nodes.append(
            _box(
                node.path,
                kind,
                family(node),
                made.view.labels[i],
                "\n".join((tip(node), *told)),
                node.mark,
                size.left,
                size.height,
                overlay,
                edits,
            )
        )
    shared: dict[int, int] = {}
    arrangements, modules = [], []
    for at, module in enumerate(tree.modules):
        arrangement = made.arrangements[at]
        if id(arrangement) not in shared:
            shared[id(arrangement)] = len(arrangements)
            arrangements.append(_plain(arrangement, made, at))
        size = made.closed_size(at)
        lines = made.lines[at]
        box = _box(
            module.path,
            "group",
            "group",
            lines,
            "\n".join((clean(module.path), *lines[1:])),
            made.marks[at],
            size.left,
            size.height,
            overlay,
            blame.get(module.path, []),
        )
        wires = []
        for wire in arrangement.wires:
            edges = module.nets[wire.net].edges[wire.target]
            kinds = {made.kinds[e] for e in edges}
            kind = kinds.pop() if len(kinds) == 1 else MIXED
            wires.append([kind, len(edges), joint_mark([scene.edges[e].mark for e in edges])])
        title = made.title(at) if at != ROOT else ""
        tint = {"tint": True} if overlay is not None and module.path in overlay.own else {}
        modules.append(
            {
                **box,
                **tint,
                "parent": module.parent,
                "children": module.children,
                "title": title,
                "wires": wires,
                "arrangement": shared[id(arrangement)],
                "titleWidth": text_width(title),
                "repeat": scene.repeats.get(module.path, 1),
            }
        )
    return {"nodes": nodes, "modules": modules, "arrangements": arrangements}


def _box(
    path: str,
    kind: str,
    group: str,
    lines: tuple[str, ...],
    tip: str,
    mark: str,
    half: int,
    height: int,
    overlay: Overlay | Remarks | None,
    blame: list[int],
) -> dict[str, Any]:
    place = f"{path}." if kind == "group" else path
    note = overlay.note(place) if isinstance(overlay, Remarks) else ""
    found = {
        "path": clean(path),
        "kind": kind,
        "family": group,
        "lines": lines,
        "tip": "\n".join((tip, *map(clean, note.split("\n")))) if note else tip,
        "half": half,
        "height": height,
    }
    colour = overlay.colour(place) if overlay is not None else None
    return {
        **found,
        **({"mark": mark} if mark else {}),
        **({"colour": colour} if colour else {}),
        **({"blame": blame} if blame else {}),
    }


def _every_place(made: Composition) -> list[Place]:
    """All nodes and groups, also those that are hidden now."""
    nodes = made.view.scene.nodes
    places = [Place(node.path, node.members) for node in nodes]
    for at, module in enumerate(made.view.tree.modules):
        places.append(Place(f"{module.path}.", [m for i in made.members[at] for m in nodes[i].members]))
    return places


def _plain(a: Arrangement, made: Composition, at: int) -> dict[str, Any]:
    nets = made.view.tree.modules[at].nets
    return {
        "rank": a.rank,
        "lane": a.lane,
        "rows": a.rows,
        "channels": a.channels,
        "gutters": a.gutters,
        "entries": a.entries,
        "exits": a.exits,
        "entrySteps": a.entry_steps,
        "exitSteps": a.exit_steps,
        "wires": [[nets[w.net].child, nets[w.net].targets[w.target][0], w.xs, w.bends] for w in a.wires],
    }


def _blame(program: Program) -> tuple[list[str], dict[str, list[int]]]:
    """Journal entries as text, and for each path or checkpoint key the entries whose edits name it, in one pass."""
    entries, found = [], {}
    for entry in program.journal:
        line = f", {entry.line}" if entry.line else ""
        entries.append(clean(f"{entry.seq} {entry.time[:19]} {entry.author}: {entry.why}{line}"))
        named: dict[str, None] = {}
        stack: list[Any] = list(entry.edits)
        while stack:
            record = stack.pop()
            if isinstance(record, dict):
                named.update(
                    (v, None) for k, v in record.items() if k in ("path", "dst", "key", "name") and isinstance(v, str)
                )
                stack.extend(record.values())
            elif isinstance(record, list):
                stack.extend(record)
        for name in named:
            found.setdefault(name, []).append(len(entries) - 1)
    return entries, found
