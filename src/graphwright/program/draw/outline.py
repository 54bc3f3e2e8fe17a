"""The modules and nodes of a picture as a tree of text, for reading, searching and screen readers."""

from __future__ import annotations

from graphwright.program.draw.compose import Composition
from graphwright.program.draw.style import text
from graphwright.program.draw.tree import ROOT


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
