"""The arrangement of one group: rows and lanes of its children and the routes of its wires, before sizes are known.

An arrangement depends only on the content of the group, not on which children are open. Opening a child moves its
neighbours apart and changes no row, lane or track.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from graphwright.program.draw.groups import OUTSIDE
from graphwright.program.draw.ranking import Occupancy, gutter_tracks, lanes, ranks, return_arcs, trunk

if TYPE_CHECKING:
    from graphwright.program.draw.groups import Net

IN, OUT, TRACK, LANE = 0, 1, 2, 3


class X(NamedTuple):
    """A horizontal position: pin `b` of child `a` (IN, OUT), track `b` of channel `a` (TRACK), or lane `a` (LANE).

    The pins of a group are numbered by entry or exit; a pin on top of a node is an offset from the middle in half
    steps. Channel k is between lanes k and k + 1.
    """

    kind: int
    a: int
    b: int


@dataclass(slots=True)
class Wire:
    """The route from the source of a net to one target: down at `xs[0]`, across gutter `bends[0]` to `xs[1]`, ...

    Gutter g is below row g, gutter -1 at the top. After `gutter_tracks` a bend is (gutter, track).
    """

    net: int
    target: int
    xs: list[X]
    bends: list[tuple[int, int]]
    back: bool = False
    level: bool = False  # arrives from straight above


@dataclass(slots=True)
class Arrangement:
    """Rows, lanes and wires of one group.

    Attributes:
        rank, lane: row and lane of each child.
        rows: number of rows.
        channels: number of tracks per channel.
        gutters: number of tracks per gutter, from the one above row 0 on.
        wires: in the order of nets and their targets.
        entries, exits: positions at which outer sources enter and inner sources leave.
        entry_steps, exit_steps: positions of these pins on the closed box, in steps right of the middle.
        main: entry and exit in the middle of lane 0, whether the group is open or closed; -1 for none.
        pins: per child the largest pin offset on its top, in half steps.
    """

    rank: list[int]
    lane: list[int]
    rows: int
    channels: dict[int, int]
    gutters: list[int]
    wires: list[Wire]
    entries: list[X]
    exits: list[X]
    entry_steps: list[int]
    exit_steps: list[int]
    main: tuple[int, int]
    pins: list[int]


class GroupPins(NamedTuple):
    """The pins of a child that is a group, as the arrangement of its parent needs them."""

    entry_steps: Sequence[int]
    exit_steps: Sequence[int]
    main: tuple[int, int]


def arrange(nets: Sequence[Net], inner: Sequence[GroupPins | None], entries: int, exits: int) -> Arrangement:
    """Arrange the children of one group.

    Args:
        nets: the nets of the group, entries first.
        inner: per child, its pins if it is a group.
        entries, exits: number of sources that enter and leave.
    """
    n = len(inner)
    edges = list(dict.fromkeys((net.child, t) for net in nets for t, _ in net.targets if net.child >= 0 and t >= 0))
    arcs = return_arcs(n, edges)
    before: list[list[int]] = [[] for _ in range(n)]
    after: list[list[int]] = [[] for _ in range(n)]
    for a, b in edges:
        if (a, b) not in arcs:
            after[a].append(b)
            before[b].append(a)
    readers: list[list[int]] = [[] for _ in range(entries)]
    leaving: list[int] = []
    for net in nets:
        if net.child == OUTSIDE:
            readers[net.slot] = [t for t, _ in net.targets if t >= 0]
        elif any(t == OUTSIDE for t, _ in net.targets):
            leaving.append(net.child)
    rank, order = ranks(n, before, after, {t for r in readers for t in r})
    arcs = {(a, b) for a, b in arcs if rank[a] >= rank[b]}  # an edge that still points down is routed as any other
    entry, spine = trunk(rank, order, after, readers, leaving)
    inlet = entry >= 0 and bool(spine) and spine[0] in readers[entry]
    outlet = bool(spine) and spine[-1] in leaving
    lane, taken, links = lanes(rank, before, after, spine, inlet, outlet)
    rows = max(rank, default=0) + 1
    router = _Router(nets, inner, rank, lane, rows, taken, links, arcs, entry, spine, inlet, outlet)
    wires, entry_at, exit_at = router.run(entries, exits)
    pins = router.assign_pins(wires)
    gutters = gutter_tracks(wires, rows, router.position)
    steps = _steps([router.position(x) for x in entry_at], entry)
    main_exit = next((k for k, x in enumerate(exit_at) if router.on_axis(x) and router.position(x) == 0), -1)
    exit_steps = _steps([router.position(x) for x in exit_at], main_exit)
    return Arrangement(
        rank,
        lane,
        rows,
        router.channel_sizes(),
        gutters,
        wires,
        entry_at,
        exit_at,
        steps,
        exit_steps,
        (entry, main_exit),
        pins,
    )


def _steps(positions: list[int], main: int) -> list[int]:
    """Number pins from left to right, 0 for the main pin (else for the middle one)."""
    order = sorted(range(len(positions)), key=lambda k: (positions[k], k != main, k))
    zero = order.index(main) if main >= 0 else len(order) // 2
    steps = [0] * len(positions)
    for position, k in enumerate(order):
        steps[k] = position - zero
    return steps


class _Router:
    """Routes every wire of one group: down its own lane, down that of its target, or on a track between lanes."""

    def __init__(
        self,
        nets: Sequence[Net],
        inner: Sequence[GroupPins | None],
        rank: list[int],
        lane: list[int],
        rows: int,
        taken: Occupancy,
        links: set[tuple[int, int]],
        arcs: set[tuple[int, int]],
        entry: int,
        spine: list[int],
        inlet: bool,
        outlet: bool,
    ) -> None:
        self.nets, self.inner, self.rank, self.lane, self.rows = nets, inner, rank, lane, rows
        self.taken, self.links, self.arcs, self.entry = taken, links, arcs, entry
        self.first = spine[0] if inlet else None
        self.last = spine[-1] if outlet else None
        self.channels: dict[int, Occupancy] = {}
        self.sizes: dict[int, int] = {}

    # -- routes --------------------------------------------------------------------------------------------------------
    def run(self, entries: int, exits: int) -> tuple[list[Wire], list[X], list[X]]:
        """Route all wires; also return the positions of entries and exits."""
        routes: dict[int, list[Wire]] = {}
        self.entry_at = [X(LANE, 0, 0)] * entries
        self.exit_at = [X(LANE, 0, 0)] * exits
        for number in sorted(range(len(self.nets)), key=lambda k: (self._reach(k), k)):
            routes[number] = self._route(number)
        return [w for number in range(len(self.nets)) for w in routes[number]], self.entry_at, self.exit_at

    def _row(self, child: int) -> int:
        return self.rank[child] if child >= 0 else self.rows

    def _reach(self, number: int) -> int:
        """Count the rows that the longest wire of a net spans; short nets are routed first and so stay inside."""
        net = self.nets[number]
        start = self.rank[net.child] if net.child >= 0 else -1
        return max(abs(self._row(t) - start) for t, _ in net.targets)

    def _route(self, number: int) -> list[Wire]:
        net = self.nets[number]
        rank, lane = self.rank, self.lane
        wires: list[Wire] = [Wire(number, k, [], []) for k in range(len(net.targets))]
        order = sorted(range(len(wires)), key=lambda k: (self._row(net.targets[k][0]), k))
        start = rank[net.child] if net.child >= 0 else -1
        if net.child >= 0:
            own, source = lane[net.child], X(OUT, net.child, net.slot)
        elif net.slot == self.entry:
            own, source = 0, X(LANE, 0, 0)
        else:
            own, source = self._come_in(net, wires[order[0]], net.targets[order[0]][0])
            order = order[1:] if source is not None and wires[order[0]].xs else order
        down = start  # the last row that this net uses in its own lane
        tracked: list[int] = []
        for k in order:
            child, slot = net.targets[k]
            wire, row = wires[k], self._row(child)
            wire.back = (net.child, child) in self.arcs
            pin = X(IN, child, slot) if child >= 0 else None
            if wire.back:
                tracked.append(k)
            elif source is not None and (
                self._is_reserved(net, child) or self._is_free(own, down + 1, row, pin is None)
            ):
                self.taken.take(own, down + 1, row - 1)
                down = max(down, row - 1)
                wire.level = pin is None or lane[child] == own
                wire.xs = [source] if pin is None else [source, pin]
                wire.bends = [] if pin is None else [(row - 1, 0)]
                if pin is None:
                    self.taken.take(own, row, row)
                    self.exit_at[slot] = source
            elif pin is not None and source is not None and self.taken.free(lane[child], start + 1, row - 1):
                self.taken.take(lane[child], start + 1, row - 1)
                wire.xs, wire.bends, wire.level = [source, pin], [(start, 0)], True
            else:
                tracked.append(k)
        for back in (False, True):
            some = [k for k in tracked if wires[k].back is back]
            if some:
                source = self._on_track(net, wires, some, source, own, start, back)
        return wires

    def _is_free(self, own: int, first: int, row: int, out: bool) -> bool:
        """Whether a lane is free from row `first` to the one above `row`; for an exit including `row`."""
        return self.taken.free(own, first, row if out else row - 1)

    def _is_reserved(self, net: Net, child: int) -> bool:
        if net.child >= 0:
            return (net.child, child) in self.links or (child == OUTSIDE and net.child == self.last)
        return net.slot == self.entry and child == self.first

    def _come_in(self, net: Net, wire: Wire, child: int) -> tuple[int, X | None]:
        """Put an entry right above its first reader, if the lane there is free."""
        own = self.lane[child]
        if not self.taken.free(own, 0, self.rank[child] - 1):
            return own, None
        self.taken.take(own, 0, self.rank[child] - 1)
        pin = X(IN, child, net.targets[wire.target][1])
        wire.xs, wire.level = [pin], True
        self.entry_at[net.slot] = pin
        return own, pin

    def _on_track(
        self, net: Net, wires: list[Wire], some: list[int], source: X | None, own: int, start: int, back: bool
    ) -> X:
        """Route wires of one net on one track."""
        targets = [net.targets[k] for k in some]
        rows = [self._row(t) for t, _ in targets]
        first, last = (min(rows), start) if back else (start + 1, max(rows) - 1)
        channel = self._channel(own, [self.lane[t] if t >= 0 else own for t, _ in targets], first, last, back)
        track = self._track(channel, first, last)
        for k, (child, slot), row in zip(some, targets, rows, strict=True):
            pin = X(IN, child, slot)
            if source is None:  # enters on the track itself
                wires[k].xs, wires[k].bends = [track, pin], [(row - 1, 0)]
            elif child == OUTSIDE:
                wires[k].xs, wires[k].bends = [source, track], [(start, 0)]
                self.exit_at[slot] = track
            else:
                wires[k].xs, wires[k].bends = [source, track, pin], [(start, 0), (row - 1, 0)]
        if source is None:
            self.entry_at[net.slot] = track
        return track if source is None else source

    def _channel(self, own: int, others: list[int], first: int, last: int, back: bool) -> int:
        """Choose the channel beside the source's lane on the side of the targets, beyond obstacles straight below."""
        used = set(self.taken.used(first, last))
        if back:
            return max(used | {own, *others})
        side = sum(others) - own * len(others)
        if side:
            return own if side > 0 else own - 1
        left = right = 0
        while own - 1 - left in used:
            left += 1
        while own + 1 + right in used:
            right += 1
        return own + right if right <= left else own - 1 - left

    def _track(self, channel: int, first: int, last: int) -> X:
        held = self.channels.setdefault(channel, Occupancy())
        track = 0
        while not held.free(track, first, last):
            track += 1
        held.take(track, first, last)
        self.sizes[channel] = max(self.sizes.get(channel, 0), track + 1)
        return X(TRACK, channel, track)

    def channel_sizes(self) -> dict[int, int]:
        """The number of tracks per channel."""
        return dict(sorted(self.sizes.items()))

    # -- pins --------------------------------------------------------------------------------------------------------
    def position(self, x: X) -> int:
        """A number that grows from left to right and is known before pixels are."""
        if x.kind == LANE:
            return x.a * 1000
        if x.kind == TRACK:
            return x.a * 1000 + 500 + (min(x.b, 40) * 10 if x.a >= 0 else -min(x.b, 40) * 10)
        inner = self.inner[x.a]
        if inner is None:
            return self.lane[x.a] * 1000 + (max(-400, min(400, x.b * 8)) if x.kind == IN else 0)
        steps = (inner.entry_steps if x.kind == IN else inner.exit_steps)[x.b]
        return self.lane[x.a] * 1000 + max(-400, min(400, steps * 16))

    def assign_pins(self, wires: list[Wire]) -> list[int]:
        """Assign each wire into a node its pin, sorted by the side it comes from, and straighten wires where possible.

        Returns: per child the largest offset in use.
        """
        arriving: dict[int, list[Wire]] = {}
        for wire in wires:
            child = self.nets[wire.net].targets[wire.target][0]
            if child >= 0 and self.inner[child] is None:
                arriving.setdefault(child, []).append(wire)

        widest = [0] * len(self.inner)
        for child, some in arriving.items():
            centre = self.lane[child] * 1000
            some.sort(key=lambda w: (centre if w.level else self.position(w.xs[-2]), not w.level, w.net))
            zero = next((i for i, w in enumerate(some) if w.level), None)
            for i, wire in enumerate(some):
                slot = 2 * (i - zero) if zero is not None else 2 * i - (len(some) - 1)
                widest[child] = max(widest[child], abs(slot))
                pin = X(IN, child, slot)
                if len(wire.xs) == 1 and (net := self.nets[wire.net]).child == OUTSIDE:
                    self.entry_at[net.slot] = pin
                wire.xs[-1] = pin
        for wire in wires:  # wires of an entry start at the pin of the entry
            net = self.nets[wire.net]
            if net.child == OUTSIDE and net.slot != self.entry and len(wire.xs) > 1:
                wire.xs[0] = self.entry_at[net.slot]
            if wire.level and len(wire.xs) == 2 and self._is_straight(*wire.xs):
                wire.xs, wire.bends = wire.xs[:1], []
        return widest

    def _is_straight(self, above: X, below: X) -> bool:
        return self.on_axis(above) and self.on_axis(below) and self.position(above) == self.position(below)

    def on_axis(self, x: X) -> bool:
        """Whether a position is the middle of its lane, whether its child is open or closed."""
        if x.kind in (LANE, TRACK):
            return x.kind == LANE
        inner = self.inner[x.a]
        if inner is None:
            return x.kind == OUT or x.b == 0
        return inner.main[x.kind] == x.b
