"""Pictures of a program: layout, DOT, SVG and HTML. Plain Python, no external program, the same bytes everywhere."""

from __future__ import annotations

from graphwright.program.draw.dot import to_dot
from graphwright.program.draw.html import to_html
from graphwright.program.draw.layout import Box, Edge, Group, Layout, layout
from graphwright.program.draw.notebook import notebook, written
from graphwright.program.draw.svg import to_svg

__all__ = ["Box", "Edge", "Group", "Layout", "layout", "notebook", "to_dot", "to_html", "to_svg", "written"]
