"""Where pictures go: into a notebook's cell, or into a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.files import atomic_write
from graphwright.program.draw.style import text
from graphwright.program.draw.svg import to_svg

if TYPE_CHECKING:
    from graphwright.files import StrPath
    from graphwright.program.program import Program

CELL = 240
"""Elements drawn in a notebook's cell: below 200 kB, and no longer than a few screens."""


def notebook(program: Program) -> str:
    """What a notebook shows: one line of text and the picture, kept inside its cell."""
    return (
        f"<div><p><code>{text(repr(program))}</code></p>"
        f'<div style="max-height:600px;overflow:auto">{to_svg(program, budget=CELL)}</div></div>'
    )


def written(picture: str, path: StrPath | None) -> str:
    """The picture itself; put whole into the file at `path` if one is given. Raises: UnwritableTarget."""
    if path is not None:
        atomic_write(path, picture.encode())
    return picture
