"""Pictures of a program as DOT, SVG and HTML: plain Python, no external program, the same bytes on every machine.

A program is read into a scene (`scene`), split into groups of modules (`groups`), arranged in rows and lanes
(`arrange`), laid out in pixels (`layout`), and written as SVG, HTML or DOT text.
"""

from __future__ import annotations

from graphwright.program.draw.dot import to_dot
from graphwright.program.draw.html import to_html
from graphwright.program.draw.layout import Box, DrawnEdge, Group, PictureLayout, layout
from graphwright.program.draw.style import NodeNote
from graphwright.program.draw.svg import notebook, to_svg, written

__all__ = ["Box", "DrawnEdge", "Group", "NodeNote", "PictureLayout", "layout", "notebook", "to_dot",
           "to_html", "to_svg", "written"]  # fmt: skip
