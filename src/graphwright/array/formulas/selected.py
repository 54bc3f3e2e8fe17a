"""Constants of attention over selected blocks, which ops and kernels share."""

from __future__ import annotations

FORCED = 3
"""Columns of a list for the blocks that every query reads: block 0, the previous block, its own."""
MARGIN = 1e-6
"""How far below a threshold a score still counts as reaching it, so that exactly flat scores take all blocks."""
STEEPEST = 60.0
"""The largest exponent of a block whose gate is 0: its scores may exceed those of the blocks that are read."""
