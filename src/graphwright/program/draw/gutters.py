"""Gutters of one group: which track each sideways piece of a wire takes between two rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphwright.program.draw.arrange import Wire, X


class _Piece:
    """What one net does in one gutter: how far it runs, where it comes from above and goes on below."""

    __slots__ = ("above", "below", "high", "low", "net")

    def __init__(self, net: int) -> None:
        self.net = net
        self.above: set[int] = set()
        self.below: set[int] = set()
        self.low = self.high = 0

    def close(self) -> None:
        """Take the extent from the ends."""
        ends = self.above | self.below
        self.low, self.high = min(ends), max(ends)


def gutter_tracks(wires: Sequence[Wire], rows: int, position: Callable[[X], int]) -> list[int]:
    """Give every bend its track; wires of one net share theirs.

    Two nets share a track if their pieces do not touch. Where one comes down on the place that another leaves from, it
    turns off above the other, so that their upright pieces do not lie on each other; circles are cut.
    Returns: the number of tracks per gutter, from the one above row 0 on.
    """
    pieces: list[dict[int, _Piece]] = [{} for _ in range(rows + 1)]
    for wire in wires:
        for k, (gutter, _) in enumerate(wire.bends):
            piece = pieces[gutter + 1].setdefault(wire.net, _Piece(wire.net))
            piece.above.add(position(wire.xs[k]))
            piece.below.add(position(wire.xs[k + 1]))
    counts, track = [], {}
    for gutter, found in enumerate(pieces):
        counts.append(_assign(list(found.values()), gutter - 1, track))
    for wire in wires:
        wire.bends = [(gutter, track[gutter, wire.net]) for gutter, _ in wire.bends]
    return counts


def _assign(pieces: list[_Piece], gutter: int, track: dict[tuple[int, int], int]) -> int:
    for piece in pieces:
        piece.close()
    leaving: dict[int, list[_Piece]] = {}
    for piece in pieces:
        for x in piece.below:
            leaving.setdefault(x, []).append(piece)
    under: dict[int, list[int]] = {}
    waiting = {piece.net: 0 for piece in pieces}
    for piece in pieces:
        for x in sorted(piece.above):
            for other in leaving.get(x, ()):
                if other is not piece:
                    under.setdefault(piece.net, []).append(other.net)
                    waiting[other.net] += 1
    lines: list[list[tuple[int, int]]] = []
    left = sorted(pieces, key=lambda p: (p.low, p.high, p.net))
    floor = dict.fromkeys(waiting, 0)
    while left:
        ready = [p for p in left if waiting[p.net] <= 0] or left[:1]  # a circle is cut at its leftmost piece
        for piece in ready:
            t = floor[piece.net]
            while t < len(lines) and any(a <= piece.high and piece.low <= b for a, b in lines[t]):
                t += 1
            while t >= len(lines):
                lines.append([])
            lines[t].append((piece.low, piece.high))
            track[gutter, piece.net] = t
            for other in under.get(piece.net, ()):
                waiting[other] -= 1
                floor[other] = max(floor[other], t + 1)
            waiting[piece.net] = -1
        gone = {p.net for p in ready}
        left = [p for p in left if p.net not in gone]
    return len(lines)
