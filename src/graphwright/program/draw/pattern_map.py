"""The block map of an attention pattern as lines of text, for the details of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphwright.patterns import Pattern

_SHADES = "·░▒▓█"
_WIDE, _PLANES = 32, 4
"""Cells of the largest map per side, and the largest number of planes that are shown."""


def pattern_map(pattern: Pattern) -> list[str]:
    """Return a map per plane: a line per query block, a character per key block, darker for more edges.

    A cell of a large pattern stands for several blocks. `·` is a cell without an edge.
    """
    rows, columns = pattern.blocks
    each = max(-(-max(rows, columns) // _WIDE), 1)
    high, wide = -(-rows // each), -(-columns // each)
    plane, query, key = pattern.pairs().T
    found = np.zeros((pattern.planes, high, wide))
    np.add.at(found, (plane, query // each, key // each), 1)
    sizes = np.multiply.outer(*(np.minimum(each, n - np.arange(0, n, each)) for n in (rows, columns)))
    level = np.ceil(found / sizes * (len(_SHADES) - 1)).astype(int)
    cells = f"{each} x {each} blocks" if each > 1 else "a block"
    lines = [f"rows are query blocks, columns key blocks; a cell is {cells} of {pattern.block} tokens"]
    for number, cells_of in enumerate(level[:_PLANES]):
        lines += [f"plane {number}"] if pattern.planes > 1 else []
        lines += ["".join(_SHADES[k] for k in row) for row in cells_of.tolist()]
    if pattern.planes > _PLANES:
        lines.append(f"and {pattern.planes - _PLANES} more planes")
    return lines
