"""Which groups are drawn open: what was asked for, else what reads well, and never more than the budget."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from graphwright.errors import UsageError
from graphwright.program.draw.fold import bundled, folded, runs
from graphwright.program.draw.labels import node_lines
from graphwright.program.draw.scene import Scene
from graphwright.program.draw.tree import ROOT, Tree, digest, grow, wire

SMALL = 24
"""Up to this many nodes are drawn without closing any group; found by looking at pictures."""

FLAT = 200
"""More nodes side by side than this, without any module, are put into bundles by default: half as many at most."""

LONG = 64
"""Runs of more equal groups than this are drawn once by default: steps of a loop, not the layers of a decoder."""

ROOMY = 60
"""Boxes that groups without repeated children may be opened to by default."""


@dataclass(slots=True)
class View:
    """A scene, its tree, and which modules of it are open. `closed` are the paths that the budget closed or bundled."""

    scene: Scene
    tree: Tree
    labels: list[tuple[str, ...]]
    open: set[int]
    closed: tuple[str, ...] = ()

    def shown_as(self) -> list[int]:
        """Per module, the closed module that hides it (itself, if it is drawn as a box), or -1 if it is open."""
        top = [-1]
        for at, module in enumerate(self.tree.modules[1:], start=1):
            above = top[module.parent]
            top.append(above if above >= 0 else -1 if at in self.open else at)
        return top

    def visible(self) -> list[int]:
        """Per node, what stands for it in the picture: itself, or ~module."""
        top = self.shown_as()
        return [i if top[home] < 0 else ~top[home] for i, home in enumerate(self.tree.home)]

    def elements(self) -> int:
        """Boxes, frames and edges that would be drawn."""
        seen = self.visible()
        top = self.shown_as()
        joined = {(seen[e.src], seen[e.dst]) for e in self.scene.edges}
        return len(set(seen)) + top[1:].count(-1) + sum(a != b for a, b in joined)


def view(scene: Scene, expanded: Set[str] | None, level: int | None, fold: bool, budget: int) -> View:
    """Choose the open groups.

    Args:
        scene: what to draw.
        expanded: paths of groups to open; a group opens only if those around it are open. None chooses.
        level: instead of `expanded`: open every group above this depth.
        fold: draw runs of equal groups once; long ones are anyway where nothing else is asked for.
        budget: most boxes, frames and edges.
    Raises: UsageError for a budget below 16, or for both `expanded` and `level`.
    """
    if budget < 16:
        raise UsageError("a picture needs a budget of at least 16 elements", got=budget)
    if expanded is not None and level is not None:
        raise UsageError("`expanded` and `level` say the same thing twice", fix="give one of them")
    found = _prepared(scene)
    if expanded is None and level is None:
        fold = fold or any(len(run) > LONG for series in runs(found.tree).values() for run in series)
    if fold:
        found = _prepared(folded(found.scene, found.tree))
    found.open = _wanted(found, expanded, level)
    if expanded is None and level is None and len(found.tree.modules[ROOT].children) > FLAT:
        found = _bundled(found, -(-len(found.tree.modules[ROOT].children) // (FLAT // 2)))
    return _within(found, expanded, level, fold, budget)


def _bundled(found: View, size: int) -> View:
    """The root's children in groups of `size`, all closed, and said to be."""
    made = _prepared(bundled(found.scene, found.tree, size))
    made.open = {ROOT}
    made.closed = tuple(m.path for m in made.tree.modules[1:] if m.depth == 1)
    return made


def _prepared(scene: Scene) -> View:
    tree = grow(scene)
    wire(scene, tree)
    labels = [node_lines(node) for node in scene.nodes]
    digest(scene, tree, labels)
    return View(scene, tree, labels, set())


def _wanted(found: View, expanded: Set[str] | None, level: int | None) -> set[int]:
    modules = found.tree.modules
    if level is not None:
        return {at for at, m in enumerate(modules) if m.depth < level} | {ROOT}
    if expanded is None:
        return _readable(found) | _marked(found)
    chosen = {ROOT}
    for at, module in enumerate(modules[1:], start=1):
        if module.parent in chosen and (module.path in expanded or _is_one_node(found, at)):
            chosen.add(at)
    return chosen


def _is_one_node(found: View, at: int) -> bool:
    """True for a group that is little more than the node of the same path: `mid` and the `mid.tanh` put before it."""
    module = found.tree.modules[at]
    nodes = found.scene.nodes
    return (
        len(module.children) <= 3
        and all(c >= 0 for c in module.children)
        and any(nodes[c].path == module.path for c in module.children)
    )


def _marked(found: View) -> set[int]:
    """Groups that a difference of two programs touches."""
    scene, tree = found.scene, found.tree
    chosen = {at for i, node in enumerate(scene.nodes) if node.mark for at in tree.chain(i)}
    for edge in scene.edges:
        if edge.mark:
            chosen.update(tree.chain(edge.src), tree.chain(edge.dst))
    return chosen


def _readable(found: View) -> set[int]:
    """All of a small program; else down to where modules repeat (the blocks of a decoder); else while there is room."""
    modules = found.tree.modules
    if len(found.scene.nodes) <= SMALL:
        return set(range(len(modules)))
    chosen = {ROOT}
    series = _numbered_parents(found)
    for at in series:
        up = modules[at].parent
        while up != ROOT and up not in series:
            up = modules[up].parent
        if up == ROOT and (ROOT not in series or at == ROOT):
            while at not in chosen:
                chosen.add(at)
                at = modules[at].parent
    if series:
        return chosen
    boxes = len(modules[ROOT].children)
    for at, module in enumerate(modules[1:], start=1):  # parents come first
        if module.parent in chosen and boxes + len(module.children) <= ROOMY:
            chosen.add(at)
            boxes += len(module.children)
    return chosen


def _numbered_parents(found: View) -> set[int]:
    """Groups with two or more child groups whose names end in a number: layers, blocks, experts."""
    counts: dict[int, int] = {}
    for module in found.tree.modules[1:]:
        if module.segment[-1:].isdigit() or module.path in found.scene.repeats:
            counts[module.parent] = counts.get(module.parent, 0) + 1 + (module.path in found.scene.repeats)
    return {at for at, n in counts.items() if n > 1}


def _within(found: View, expanded: Set[str] | None, level: int | None, fold: bool, budget: int) -> View:
    """Close the deepest groups until the budget holds; before a run of equal groups is hidden, it is folded."""
    closed: list[str] = []
    while found.elements() > budget:
        modules = found.tree.modules
        top = found.shown_as()
        deepest = max((modules[at].depth for at in found.open if at != ROOT and top[at] < 0), default=0)
        series = runs(found.tree) if not fold else {}
        if any(at in series and (at == ROOT or top[at] < 0) and modules[at].depth == deepest for at in found.open):
            fold = True
            closed.extend(
                f"{modules[run[0]].path} … {modules[run[-1]].path}"
                for at in sorted(series)
                for run in series[at]
                if top[run[0]] in (-1, run[0])
            )
            found = _prepared(folded(found.scene, found.tree))
            found.open = _wanted(found, expanded, level)
            continue
        if deepest:
            going = sorted(at for at in found.open if modules[at].depth == deepest)
            closed.extend(modules[at].path for at in going if top[at] < 0)
            found.open.difference_update(going)
            continue
        size, most, whole = 2, len(modules[ROOT].children), found
        while found.elements() > budget and size < 2 * most:
            size = max(size * 2, 4 * most // budget)
            found = _bundled(whole, size)
        break
    found.closed = (*closed, *found.closed)
    return found
