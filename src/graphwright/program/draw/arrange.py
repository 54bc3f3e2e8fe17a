"""The arrangement of one group (module): rows and lanes of its children and routes of its wires, before pixel sizes.

A row is a horizontal band of boxes, a lane a vertical one. Wires run vertically in lanes, or on tracks in the channels
between lanes, and horizontally on tracks in the gutters between rows. An arrangement depends only on the content of
the group, not on which children are open: opening a child moves its neighbours apart and changes no row, lane or
track. Children (nodes and inner groups) are numbered 0..n-1 in order of creation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from itertools import chain as chain_of
from typing import TYPE_CHECKING, NamedTuple

from graphwright.graph.analysis import kahn_order, longest_paths, strong_components
from graphwright.program.draw.groups import OUTSIDE

if TYPE_CHECKING:
    from graphwright.program.draw.groups import Net

IN, OUT, TRACK, LANE = 0, 1, 2, 3
Lists = list[list[int]]


class XPosition(NamedTuple):
    """A horizontal position inside a group: a pin of a child, a track of a channel, or the middle of a lane.

    A pin is the point where a wire meets a box. A lane is a vertical band of boxes. Channel k, with tracks for vertical
    wires, is between lanes k and k + 1.
    """

    kind: int  # IN: a pin on the top of a child; OUT: one on its bottom; TRACK; LANE
    a: int  # number of the child, the channel or the lane
    b: int  # group: number of the entry or exit; node: half pin distances right of the middle; channel: track; lane: 0


@dataclass(slots=True)
class Wire:
    """The route from the source of a net to one target: down at `xs[0]`, across gutter `bends[0]` to `xs[1]`, ...

    A bend is (gutter, track). Gutter g is the gap below row g of boxes, -1 the one above row 0. A gutter has parallel
    horizontal tracks, numbered by `gutter_tracks`; until then all are 0.
    """

    net: int
    target: int
    xs: list[XPosition]
    bends: list[tuple[int, int]]
    back: bool = False  # whether it leads up, because it closes a cycle
    level: bool = False  # whether it arrives from straight above


@dataclass(slots=True)
class Arrangement:
    """The arrangement of one group (module) of a picture: its children in rows and lanes (columns), and its wires."""

    rank: list[int]  # row of each child
    lane: list[int]  # lane of each child
    rows: int  # number of rows
    channels: dict[int, int]  # number of tracks per channel
    gutters: list[int]  # number of tracks per gutter, from the one above row 0 on
    wires: list[Wire]  # in the order of nets and their targets
    ends: tuple[list[XPosition], list[XPosition]]  # where outer sources enter (IN) and inner ones leave (OUT)
    steps: tuple[list[int], list[int]]  # where these pins are on the closed box, in steps right of the middle
    main: tuple[int, int]  # entry and exit in the middle of lane 0, whether the group is open or closed; -1 for none
    pins: list[int]  # per child the largest pin offset on its top, in half steps


def arrange(nets: Sequence[Net], inner: Sequence[Arrangement | None], entries: int, exits: int) -> Arrangement:
    """Arrange the children of one group.

    Args:
        nets: the nets of the group; those that enter from outside come first.
        inner: per child its own arrangement, None for a node.
        entries, exits: number of source nodes outside that are read inside, and inside that are read outside.
    """
    router = _Router(nets, inner, entries, exits)
    wires = router.wires()
    pins = router.assign_pins(wires)
    gutters = gutter_tracks(wires, router.rows, router.position)
    came, left = ([router.position(x) for x in end] for end in router.ends)
    main = router.entry, next((k for k, x in enumerate(router.ends[OUT]) if router.on_axis(x) and left[k] == 0), -1)
    steps = _steps(came, main[IN]), _steps(left, main[OUT])
    channels = dict(sorted(router.sizes.items()))
    return Arrangement(router.rank, router.lane, router.rows, channels, gutters, wires, router.ends, steps, main, pins)


def _steps(positions: list[int], main: int) -> list[int]:
    """Number the pins at these positions from left to right; pin `main` has number 0, or the middle pin if it is -1."""
    order = sorted(range(len(positions)), key=lambda k: (positions[k], k != main, k))
    zero = order.index(main) if main >= 0 else len(order) // 2
    number = {k: index - zero for index, k in enumerate(order)}
    return [number[k] for k in range(len(positions))]


class _Router:
    """Routes every wire of one group: down the lane of its source or of its target, or on a track between lanes."""

    def __init__(self, nets: Sequence[Net], inner: Sequence[Arrangement | None], entries: int, exits: int) -> None:
        self.nets, self.inner, n = nets, inner, len(inner)
        edges = list(dict.fromkeys((net.child, t) for net in nets for t, _ in net.targets if net.child >= 0 and t >= 0))
        arcs = return_arcs(n, edges)
        before: Lists = [[] for _ in range(n)]
        after: Lists = [[] for _ in range(n)]
        for a, b in edges:
            if (a, b) not in arcs:
                after[a].append(b)
                before[b].append(a)
        readers: Lists = [[] for _ in range(entries)]
        for net in nets:
            if net.child == OUTSIDE:
                readers[net.slot] = [t for t, _ in net.targets if t >= 0]
        leaving = [net.child for net in nets if net.child != OUTSIDE and any(t == OUTSIDE for t, _ in net.targets)]
        self.rank, order = ranks(before, after, {t for r in readers for t in r})
        self.rows = max(self.rank, default=0) + 1
        rank = self.rank
        self.arcs = {(a, b) for a, b in arcs if rank[a] >= rank[b]}  # an edge that still points down is no return arc
        self.entry, spine = trunk(rank, order, after, readers, leaving)
        self.first = spine[0] if spine and self.entry >= 0 and spine[0] in readers[self.entry] else None
        self.last = spine[-1] if spine and spine[-1] in leaving else None
        inlet, outlet = self.first is not None, self.last is not None
        self.lane, self.taken, self.links = lanes(rank, before, after, spine, inlet, outlet)
        self.channels: dict[int, Occupancy] = {}
        self.sizes: dict[int, int] = {}  # channel -> number of tracks
        self.ends = [XPosition(LANE, 0, 0)] * entries, [XPosition(LANE, 0, 0)] * exits

    # -- routes --------------------------------------------------------------------------------------------------------
    def wires(self) -> list[Wire]:
        """Route all nets, short ones first, so that long ones run outside; return the wires in order of the nets."""
        routes = {k: self._route(k) for k in sorted(range(len(self.nets)), key=lambda k: (self._reach(k), k))}
        return [wire for k in range(len(self.nets)) for wire in routes[k]]

    def _row(self, child: int) -> int:
        return self.rank[child] if child >= 0 else self.rows

    def _reach(self, number: int) -> int:
        """Return the largest number of rows between the source and a target of net `number`."""
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
            own, source = lane[net.child], XPosition(OUT, net.child, net.slot)
        elif net.slot == self.entry:
            own, source = 0, XPosition(LANE, 0, 0)
        else:
            child, slot = net.targets[order[0]]
            own, source = lane[child], None
            if self.taken.free(own, 0, rank[child] - 1):  # enters right above its first reader
                self.taken.take(own, 0, rank[child] - 1)
                source = self.ends[IN][net.slot] = XPosition(IN, child, slot)
                wires[order[0]].xs, wires[order[0]].level = [source], True
                order = order[1:]
        down = start  # the last row that this net uses in its own lane
        tracked: list[int] = []
        for k in order:
            child, slot = net.targets[k]
            wire, row = wires[k], self._row(child)
            wire.back = (net.child, child) in self.arcs
            pin = XPosition(IN, child, slot) if child >= 0 else None
            end = row if pin is None else row - 1
            if wire.back:
                tracked.append(k)
            elif source is not None and (self._is_reserved(net, child) or self.taken.free(own, down + 1, end)):
                self.taken.take(own, down + 1, row - 1)
                down = max(down, row - 1)
                wire.level = pin is None or lane[child] == own
                wire.xs = [source] if pin is None else [source, pin]
                wire.bends = [] if pin is None else [(row - 1, 0)]
                if pin is None:
                    self.taken.take(own, row, row)
                    self.ends[OUT][slot] = source
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

    def _is_reserved(self, net: Net, child: int) -> bool:
        if net.child >= 0:
            return (net.child, child) in self.links or (child == OUTSIDE and net.child == self.last)
        return net.slot == self.entry and child == self.first

    def _on_track(
        self, net: Net, wires: list[Wire], some: list[int], source: XPosition | None, own: int, start: int, back: bool
    ) -> XPosition:
        """Route the wires with indices `some` on one vertical track; return the position at which the net starts.

        `source`: this position, None if it is on the track; `own`, `start`: its lane and row; `back`: wires lead up.
        """
        targets = [net.targets[k] for k in some]
        rows = [self._row(t) for t, _ in targets]
        first, last = (min(rows), start) if back else (start + 1, max(rows) - 1)
        channel = self._channel(own, [self.lane[t] if t >= 0 else own for t, _ in targets], first, last, back)
        held = self.channels.setdefault(channel, Occupancy())
        number = next(t for t in count() if held.free(t, first, last))
        held.take(number, first, last)
        self.sizes[channel] = max(self.sizes.get(channel, 0), number + 1)
        track = XPosition(TRACK, channel, number)
        for k, (child, slot), row in zip(some, targets, rows, strict=True):
            pin = XPosition(IN, child, slot)
            if source is None:  # enters on the track itself
                wires[k].xs, wires[k].bends = [track, pin], [(row - 1, 0)]
            elif child == OUTSIDE:
                wires[k].xs, wires[k].bends = [source, track], [(start, 0)]
                self.ends[OUT][slot] = track
            else:
                wires[k].xs, wires[k].bends = [source, track, pin], [(start, 0), (row - 1, 0)]
        if source is None:
            self.ends[IN][net.slot] = track
        return track if source is None else source

    def _channel(self, own: int, others: list[int], first: int, last: int, back: bool) -> int:
        """Choose the channel (gap beside a lane) for a vertical track through rows `first` to `last`.

        It is beside lane `own`, on the side of the mean of the lanes `others`. If that mean is `own`, it is beyond the
        used lanes on the nearer side; for wires that lead up (`back`), to the right of all lanes.
        """
        used = set(self.taken.used(first, last))
        if back:
            return max(used | {own, *others})
        side = sum(others) - own * len(others)
        if side:
            return own if side > 0 else own - 1
        left = next(d for d in count() if own - 1 - d not in used)
        right = next(d for d in count() if own + 1 + d not in used)
        return own + right if right <= left else own - 1 - left

    # -- pins --------------------------------------------------------------------------------------------------------
    def position(self, x: XPosition) -> int:
        """Return a number that orders positions from left to right, before pixels are known."""
        if x.kind == LANE:
            return x.a * 1000
        if x.kind == TRACK:
            return x.a * 1000 + 500 + (min(x.b, 40) * 10 if x.a >= 0 else -min(x.b, 40) * 10)
        inner = self.inner[x.a]
        if inner is None:
            return self.lane[x.a] * 1000 + (max(-400, min(400, x.b * 8)) if x.kind == IN else 0)
        return self.lane[x.a] * 1000 + max(-400, min(400, inner.steps[x.kind][x.b] * 16))

    def assign_pins(self, wires: list[Wire]) -> list[int]:
        """Assign pins to the wires that enter each node, in left-to-right order; straighten wires if possible.

        Returns: per child the largest distance of a pin from the middle, in half pin distances.
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
                pin = XPosition(IN, child, slot)
                if len(wire.xs) == 1 and (net := self.nets[wire.net]).child == OUTSIDE:
                    self.ends[IN][net.slot] = pin
                wire.xs[-1] = pin
        for wire in wires:  # wires of an entry start at the pin of the entry
            net = self.nets[wire.net]
            if net.child == OUTSIDE and net.slot != self.entry and len(wire.xs) > 1:
                wire.xs[0] = self.ends[IN][net.slot]
            upright = wire.level and len(wire.xs) == 2 and all(map(self.on_axis, wire.xs))
            if upright and self.position(wire.xs[0]) == self.position(wire.xs[1]):
                wire.xs, wire.bends = wire.xs[:1], []
        return widest

    def on_axis(self, x: XPosition) -> bool:
        """Return True if a position is in the middle of its lane, whether its child is open or closed."""
        if x.kind in (LANE, TRACK):
            return x.kind == LANE
        inner = self.inner[x.a]
        if inner is None:
            return x.kind == OUT or x.b == 0
        return inner.main[x.kind] == x.b


def return_arcs(n: int, edges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the edges that close cycles.

    In each strongly connected component, these are the edges from a child to itself or to a child with a lower number.
    Two modules that read each other form a cycle, although the nodes of the program do not.
    """
    after: Lists = [[] for _ in range(n)]
    for a, b in edges:
        after[a].append(b)
    part = {i: k for k, members in enumerate(strong_components(after)) for i in members}
    return {(a, b) for a, b in edges if part[a] == part[b] and a >= b}


def ranks(before: Lists, after: Lists, fed: set[int]) -> tuple[list[int], list[int]]:
    """Compute the row of each child, which is the length of the longest path to it; also return a topological order.

    `before`, `after`: sources and readers of each child. A child without sources moves down to the row above its first
    reader, unless it is in `fed`, the children that read a value from outside the group.
    """
    order = kahn_order(after)
    rank = longest_paths(after, order)
    for i in range(len(rank)):
        if not before[i] and after[i] and i not in fed:
            rank[i] = min(rank[j] for j in after[i]) - 1
    return rank, order


def trunk(rank: list[int], order: list[int], after: Lists, entries: Lists, exits: list[int]) -> tuple[int, list[int]]:
    """Find the main entry (-1 if there is no entry) and the trunk: the children on every path from it to the main exit.

    The main exit is the lowest child that is read outside the group, or the lowest of all children. The main entry is
    the start of the longest path to it. In a residual network the trunk consists of the junctions.

    Args:
        rank, order, after: row of each child; topological order; readers of each child.
        entries: per source outside that is read inside (an entry), the children that read it.
        exits: the children that are read outside the group.
    """
    if not order:
        return (0 if entries else -1), []
    last = max(exits or range(len(rank)), key=lambda i: (rank[i], -i))
    far = {last: 0}  # edges on the longest path to `last`
    for i in reversed(order):
        best = max((far[j] for j in after[i] if j in far), default=-1)
        if best >= 0:
            far[i] = best + 1
    entry_far = [max((far[j] for j in readers if j in far), default=-1) for readers in entries]
    entry = max(range(len(entries)), key=lambda e: (entry_far[e], -e), default=-1)
    if entry >= 0 and entry_far[entry] >= 0:
        start = [j for j in entries[entry] if j in far]
    else:
        read = {j for i in order for j in after[i]}
        start = [max((i for i in far if i not in read), key=lambda i: (far[i], -i))]
    return entry, _on_every_path(order, after, start, far)


def _on_every_path(order: list[int], after: Lists, start: list[int], useful: dict[int, int]) -> list[int]:
    """Return the children on every path from `start` to the exit; `after`: readers; `useful`: those that reach it."""
    reached = set(start)
    for i in order:
        if i in reached:
            reached.update(j for j in after[i] if j in useful)
    line = [i for i in order if i in reached]
    position = {i: k for k, i in enumerate(line)}
    furthest = max(position[i] for i in start)
    found = []
    for k, i in enumerate(line):
        if furthest <= k:
            found.append(i)
        furthest = max(furthest, max((position[j] for j in after[i] if j in position), default=0))
    return found


class Occupancy:
    """The rows in use of each lane: one integer per lane, one bit per row. Row -1 is the top edge of the group."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {0: 0}

    def free(self, lane: int, first: int, last: int) -> bool:
        """Return True if no row of a lane from `first` to `last` is in use."""
        return last < first or not self._rows.get(lane, 0) & _span(first, last)

    def take(self, lane: int, first: int, last: int) -> None:
        """Mark rows `first` to `last` of a lane as used."""
        if last >= first:
            self._rows[lane] = self._rows.get(lane, 0) | _span(first, last)

    def used(self, first: int, last: int) -> list[int]:
        """Return the lanes with a used row between `first` and `last`, ascending."""
        return [lane for lane in sorted(self._rows) if not self.free(lane, first, last)]


def _span(first: int, last: int) -> int:
    return ((1 << (last - first + 1)) - 1) << (first + 1)


def lanes(
    rank: list[int], before: Lists, after: Lists, spine: list[int], inlet: bool, outlet: bool
) -> tuple[list[int], Occupancy, set[tuple[int, int]]]:
    """Assign a lane (column) to each child; also return the used rows per lane and the edges straight down a lane.

    `before`, `after`: sources and readers of each child. `spine`: the children of the trunk; `inlet`: whether the first
    of them reads the main entry; `outlet`: whether the last of them is read outside the group.
    """
    lane = [0] * len(rank)
    taken = Occupancy()
    links: set[tuple[int, int]] = set()
    for i in spine:
        taken.take(0, rank[i], rank[i])
    for a, b in pairwise(spine):
        if b in after[a]:
            taken.take(0, rank[a], rank[b])
            links.add((a, b))
    if spine and inlet:
        taken.take(0, -1, rank[spine[0]])
    if spine and outlet:
        taken.take(0, rank[spine[-1]], max(rank) + 1)
    sections: dict[int, Lists] = {}
    crossing: Lists = []
    rows = [rank[i] for i in spine]
    for chain in _chains(rank, before, after, set(spine)):
        links.update(pairwise(chain))
        first, last = rank[chain[0]], rank[chain[-1]]
        section = bisect_left(rows, first)
        if section == len(rows) or last < rows[section]:
            sections.setdefault(section, []).append(chain)
        else:
            crossing.append(chain)
    for section in sorted(sections):
        _assign_lanes(sections[section], rank, lane, taken)
    for chain in crossing:
        _assign_lanes([chain], rank, lane, taken)
    return lane, taken, links


def _chains(rank: list[int], before: Lists, after: Lists, spine: set[int]) -> Lists:
    """Split the children outside the trunk into chains, each drawn in one lane; sorted by their first child.

    A chain continues with the reader that has the longest path below it, if no other source of this reader is in a
    lower row. Then a chain is appended to the chain that ends in the lowest source of its first child, if there is one.
    """
    n = len(rank)
    height = [0] * n
    for i in sorted(range(n), key=rank.__getitem__, reverse=True):
        height[i] = max((height[j] + 1 for j in after[i]), default=0)
    follower: dict[int, int] = {}
    leader: dict[int, int] = {}
    branch = [i for i in sorted(range(n), key=lambda i: (rank[i], i)) if i not in spine]

    def lowest(sources: list[int]) -> int:
        return min((i for i in sources if i not in spine), key=lambda i: (-rank[i], i), default=-1)

    choice = {j: lowest(before[j]) for j in branch}
    for i in branch:
        best = min((j for j in after[i] if j not in spine), key=lambda j: (-height[j], j), default=-1)
        if best >= 0 and choice[best] == i:
            follower[i], leader[best] = best, i
    for j in branch:
        if j not in leader:
            i = lowest([i for i in before[j] if i not in follower])
            if i >= 0:
                follower[i], leader[j] = j, i
    found = []
    for i in branch:
        if i not in leader:
            chain = [i]
            while chain[-1] in follower:
                chain.append(follower[chain[-1]])
            found.append(chain)
    return sorted(found, key=lambda c: c[0])


def _assign_lanes(chains: Lists, rank: list[int], lane: list[int], taken: Occupancy) -> None:
    """Set `lane` of the children of chains beside one section of the trunk; lane 0 is used if it is free."""
    first, last = min(rank[c[0]] for c in chains), max(rank[c[-1]] for c in chains)
    steps = sorted(s for c in chains for s in ((rank[c[0]], 1), (rank[c[-1]] + 1, -1)))
    width = max(accumulate(step for _, step in steps))  # the most chains that share a row
    if taken.free(0, first, last):
        allowed = list(range(-((width - 1) // 2), width // 2 + 1))
    else:
        allowed = sorted([k // 2 + 1 if k % 2 == 0 else -(k // 2 + 1) for k in range(width)])
    for chain in chains:
        a, b = rank[chain[0]], rank[chain[-1]]
        outward = (k for d in count(1) for k in (allowed[-1] + d, allowed[0] - d))
        found = next(k for k in chain_of(allowed, outward) if taken.free(k, a, b))
        taken.take(found, a, b)
        for i in chain:
            lane[i] = found


def gutter_tracks(wires: Sequence[Wire], rows: int, position: Callable[[XPosition], int]) -> list[int]:
    """Assign a track, a line in the gap (gutter) between two rows, to every bend; the wires of one net share a track.

    Two nets share a track of a gutter if their horizontal segments do not touch. If net A enters the gutter at the
    horizontal position at which net B leaves it, A gets a track above that of B, so that their vertical segments do not
    overlap. Cycles of such constraints are broken.
    Returns: the number of tracks of each gutter, starting with the gutter above row 0.
    """
    ends: list[dict[int, tuple[set[int], set[int]]]] = [{} for _ in range(rows + 1)]  # net -> above and below a gutter
    for wire in wires:
        for k, (gutter, _) in enumerate(wire.bends):
            above, below = ends[gutter + 1].setdefault(wire.net, (set(), set()))
            above.add(position(wire.xs[k]))
            below.add(position(wire.xs[k + 1]))
    tracks = [_assign(nets) for nets in ends]
    for wire in wires:
        wire.bends = [(gutter, tracks[gutter + 1][wire.net]) for gutter, _ in wire.bends]
    return [max(found.values(), default=-1) + 1 for found in tracks]


def _assign(nets: dict[int, tuple[set[int], set[int]]]) -> dict[int, int]:
    """Return {net: track} for one gutter (gap between rows); `nets`: net -> positions of wires (above, below)."""
    span = {net: (min(above | below), max(above | below)) for net, (above, below) in nets.items()}
    leaving: dict[int, list[int]] = {}
    for net, (_, below) in nets.items():
        for x in below:
            leaving.setdefault(x, []).append(net)
    under = {net: [n for x in sorted(ends[0]) for n in leaving.get(x, ()) if n != net] for net, ends in nets.items()}
    waiting = Counter(chain_of.from_iterable(under.values()))
    lines: list[list[tuple[int, int]]] = []
    floor, track = dict.fromkeys(nets, 0), dict[int, int]()
    left = sorted(nets, key=lambda net: (span[net], net))
    while left:
        for net in [n for n in left if not waiting[n]] or left[:1]:  # a cycle is cut at its leftmost segment
            low, high = span[net]
            t = floor[net]
            while t < len(lines) and any(a <= high and low <= b for a, b in lines[t]):
                t += 1
            lines += [[] for _ in range(t + 1 - len(lines))]
            lines[t].append((low, high))
            track[net] = t
            for other in under[net]:
                waiting[other] -= 1
                floor[other] = max(floor[other], t + 1)
        left = [net for net in left if net not in track]
    return track
