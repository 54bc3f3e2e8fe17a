"""A topological order maintained under edge insertions: int64 labels with gaps, repaired only for a backward edge.

Pearce and Kelly 2007, "A Dynamic Topological Sort Algorithm for Directed Acyclic Graphs". A forward edge costs O(1), a
backward edge a search between its two labels. Invariant: key(u) < key(v) for every edge u -> v, where a key is
(label, creation number); a refused insertion changes no label.

If a gap is used up, the labels around it are spread (Dietz and Sleator 1987, "Two Algorithms for Maintaining Order
in a List") over the smallest window of j nodes whose labels span more than j². Any n insertions, even all into one
gap, move O(n log n) labels.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..errors import CycleError, UsageError

GAP = 1 << 20
LIMIT = 1 << 62  # labels beyond this are renumbered, so that they always fit int64
_ONCE = 16
"""If more than one node in this many is added or removed, rebuilding the list is cheaper than moving one by one."""

N = TypeVar("N", bound=Hashable)


class Neighbours(Protocol[N]):
    """The part of a graph that an order reads: neighbours of each node, without back edges, which the order ignores."""

    def successors(self, n: N, /) -> Iterable[N]:
        """Return the nodes that must come after `n`."""
        ...

    def predecessors(self, n: N, /) -> Iterable[N]:
        """Return the nodes that must come before `n`."""
        ...


class Relabelled(NamedTuple, Generic[N]):
    """Undo record: (node, old label, creation number) of each changed node; the label is None for an added node."""

    before: tuple[tuple[N, int | None, int], ...]

    def __bool__(self) -> bool:
        return bool(self.before)


class OnlineOrder(Generic[N]):
    """A topological order of the nodes of a graph; reads edges through `graph` and never changes them.

    Args:
        graph: gives the neighbours of a node. When `add_edge` is called, the edge may be in it already, or not yet.
        gap: distance between the labels of nodes inserted at the end.
    """

    def __init__(self, graph: Neighbours[N], gap: int = GAP) -> None:
        if gap < 2:
            raise UsageError("the gap between labels is too small", expected="gap >= 2", got=gap)
        self._graph, self._gap = graph, gap
        self._labels: dict[N, int] = {}
        self._created: dict[N, int] = {}
        self._sorted: list[N] = []  # all nodes by key
        self._next = 0
        self.visited = 0  # nodes visited by searches, for tests of locality

    @classmethod
    def from_labels(cls, graph: Neighbours[N], labels: Mapping[N, tuple[int, int]], gap: int = GAP) -> OnlineOrder[N]:
        """Make an order from saved keys: node -> (label, creation number). Raises UsageError for a backward edge."""
        order = cls(graph, gap)
        for node, (label, created) in labels.items():
            if not -LIMIT <= label <= LIMIT:
                raise UsageError("a saved label is out of range", where=node, expected=f"within ±{LIMIT}", got=label)
            order._put(node, label, created, listed=False)
        order._sort()
        for node in labels:
            for after in graph.successors(node):
                if order.key(after) <= order.key(node):
                    where, got = f"{node!r} -> {after!r}", f"{order.key(node)} and {order.key(after)}"
                    raise UsageError("the saved topological order contradicts this edge", where=where,
                                     expected="a lower key at the source than at the target", got=got)  # fmt: skip
        return order

    def insert(
        self, node: N, after: N | None = None, before: N | None = None, created: int | None = None
    ) -> Relabelled[N]:
        """Insert a node between two nodes, next to a node, or at the end; amortised, O(log n) labels change.

        The node is put after `after` and before `before`, or just after `after` if `before` precedes it. `created` is
        its creation number, by default the next free number.
        Raises: UsageError if the node is in the order already, KeyError if `after` or `before` is not.
        """
        if node in self._labels:
            raise UsageError("the node is in the order already", where=repr(node))
        at, label = self._position(after, before)
        moved: list[tuple[N, int | None, int]] = []
        if label is None:
            moved = self._spread(at)
            low, high = self._around(at)
            label = (low + high) // 2
            assert low < label < high
        created = self._next if created is None else created
        self._labels[node], self._created[node] = label, created
        self._next = max(self._next, created + 1)
        self._sorted.insert(at, node)
        return Relabelled((*moved, (node, None, created)))

    def add_edge(self, u: N, v: N) -> Relabelled[N]:
        """Reorder nodes for a new edge u -> v; return an undo record, which is empty if u is before v already.

        Raises: CycleError whose `path` runs from `v` to `u`; then no label has changed. KeyError for unknown nodes.
        """
        low, high = self.key(v), self.key(u)
        if u == v:
            raise CycleError(f"an edge from {u!r} to itself is a cycle", path=(u,))
        if high < low:
            return Relabelled(())
        ahead = self._reach(v, self._graph.successors, low, high)
        if u in ahead:
            path = [u]
            while (before := ahead[path[-1]]) is not None:
                path.append(before)
            path.reverse()
            shown = " -> ".join(map(repr, path[:6])) + (" -> ..." if len(path) > 6 else "")
            raise CycleError(f"an edge from {u!r} to {v!r} closes a cycle", got=f"the path {shown}", path=tuple(path),
                             fix="cut an edge of the path, or add the edge with a delay")  # fmt: skip
        ancestors = self._reach(u, self._graph.predecessors, low, high)
        # Pearce and Kelly: the ancestors of u, then the descendants of v, share out the labels that they had together
        window = self.sorted(ancestors) + self.sorted(ahead)
        positions = [self._position_of(n) for n in self.sorted(window)]
        labels = [self._labels[self._sorted[at]] for at in positions]
        record = [(n, self._labels[n], self._created[n]) for n in window]
        tied = any(self._tied(at) for at in positions)
        for node, at, label in zip(window, positions, labels, strict=True):
            self._sorted[at], self._labels[node] = node, label
        if tied:  # nodes with equal labels are ordered by creation number, so they cannot exchange labels
            kept = {n: label for n, label, _ in record}
            record = [(n, kept.get(n, label), created) for n, label, created in self._space_all()]
        return Relabelled(tuple(entry for entry in record if self._labels[entry[0]] != entry[1]))

    def remove(self, *nodes: N) -> Relabelled[N]:
        """Remove nodes from the order. O(removed · log n). Raises KeyError for unknown nodes; then none is removed."""
        record = Relabelled(tuple((n, self._labels[n], self._created[n]) for n in nodes))
        many = len(nodes) * _ONCE > len(self)
        for node in nodes:
            self._drop(node, listed=not many)
        if many:
            self._sorted = [n for n in self._sorted if n in self._labels]
        return record

    def restore(self, record: Relabelled[N]) -> Relabelled[N]:
        """Undo a change after all later changes were undone; return the record that redoes it. O(changed · log n)."""
        inverse = [(n, self._labels.get(n), self._created.get(n, created)) for n, _, created in record.before]
        many = len(inverse) * _ONCE > len(self)
        for node, label, created in record.before:
            if node in self._labels:
                self._drop(node, listed=not many)
            if label is not None:
                self._put(node, label, created, listed=not many)
        if many:
            self._sort()
        return Relabelled(tuple(inverse))

    def label(self, node: N) -> int:
        """Return a node's integer label, which never decreases along an edge. Raises: KeyError for an unknown node."""
        return self._labels[node]

    def key(self, node: N) -> tuple[int, int]:
        """Return a node's sort key, (label, creation number). Raises: KeyError for an unknown node."""
        return self._labels[node], self._created[node]

    def sorted(self, nodes: Iterable[N]) -> list[N]:
        """Return the given nodes in topological order."""
        return sorted(nodes, key=self.key)

    def labels(self) -> dict[N, tuple[int, int]]:
        """Map each node to its sort key, as `from_labels` takes it."""
        return {node: (label, self._created[node]) for node, label in self._labels.items()}

    def __contains__(self, node: object) -> bool:
        return node in self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[N]:
        return iter(tuple(self._sorted))

    # -- labels ------------------------------------------------------------------------------------------------------
    def _position(self, after: N | None, before: N | None) -> tuple[int, int | None]:
        """Return (index, label) for a new node between `after` and `before`; label None if none is free there."""
        if after is not None and before is not None and self._labels[after] < self._labels[before]:
            label = (self._labels[after] + self._labels[before]) // 2
            at = bisect_left(self._sorted, label, key=self._labels.__getitem__)
            if self._labels[self._sorted[at]] != label:
                return at, label
            after = self._sorted[at]  # the middle of a wide interval may be another node's label
        if after is not None:
            at = bisect_right(self._sorted, self._labels[after], key=self._labels.__getitem__)
        elif before is not None:
            at = bisect_left(self._sorted, self._labels[before], key=self._labels.__getitem__)
        else:
            at = len(self._sorted)
        low, high = self._around(at)
        label = (low + high) // 2
        return at, label if low < label < high and -LIMIT < label < LIMIT else None

    def _around(self, at: int) -> tuple[int, int]:
        """Return the labels of nodes `at - 1` and `at` in the order; beyond its ends, numbers two gaps away."""
        nodes, labels, gap = self._sorted, self._labels, self._gap
        if not nodes:
            return -gap, gap
        low = labels[nodes[at - 1]] if at else labels[nodes[0]] - 2 * gap
        return low, labels[nodes[at]] if at < len(nodes) else low + 2 * gap

    def _spread(self, at: int) -> list[tuple[N, int | None, int]]:
        """Spread the labels around index `at` so that one is free there; return (node, *old key) of each moved node."""
        nodes, labels, reach = self._sorted, self._labels, 4
        while True:
            low, high = max(at - reach, 0), min(at + reach, len(nodes))
            floor = labels[nodes[low - 1]] if low else labels[nodes[0]] - reach * self._gap
            ceiling = labels[nodes[high]] if high < len(nodes) else labels[nodes[-1]] + reach * self._gap
            if ceiling - floor > (high - low + 2) ** 2 and floor > -LIMIT and ceiling < LIMIT:
                return self._space(low, high, floor, ceiling)
            if high - low == len(nodes):
                return self._space_all()
            reach *= 2

    def _space(self, low: int, high: int, floor: int, ceiling: int) -> list[tuple[N, int | None, int]]:
        """Space the labels at indices low..high-1 evenly from `floor` to `ceiling`; return (node, *old key) of each."""
        step = (ceiling - floor) // (high - low + 1)
        moved: list[tuple[N, int | None, int]] = []
        for i, node in enumerate(self._sorted[low:high], 1):
            moved.append((node, self._labels[node], self._created[node]))
            self._labels[node] = floor + i * step
        return moved

    def _space_all(self) -> list[tuple[N, int | None, int]]:
        half = min(self._gap * (len(self) + 1), LIMIT) // 2
        return self._space(0, len(self), -half, half)

    def _position_of(self, node: N) -> int:
        at = bisect_left(self._sorted, self._labels[node], key=self._labels.__getitem__)
        while self._sorted[at] != node:  # another node with the same label
            at += 1
        return at

    def _tied(self, at: int) -> bool:
        label = self._labels[self._sorted[at]]
        return any(0 <= i < len(self._sorted) and self._labels[self._sorted[i]] == label for i in (at - 1, at + 1))

    def _sort(self) -> None:
        self._sorted = sorted(self._labels, key=self.key)

    def _put(self, node: N, label: int, created: int, listed: bool = True) -> None:
        self._labels[node], self._created[node] = label, created
        self._next = max(self._next, created + 1)
        if listed:
            self._sorted.insert(bisect_left(self._sorted, (label, created), key=self.key), node)

    def _drop(self, node: N, listed: bool = True) -> None:
        if listed:
            del self._sorted[self._position_of(node)]
        del self._labels[node], self._created[node]

    def _reach(
        self, start: N, neighbours: Callable[[N], Iterable[N]], low: tuple[int, int], high: tuple[int, int]
    ) -> dict[N, N | None]:
        """Search from `start` through nodes with keys in (low, high]; map each node reached to its search parent."""
        parent: dict[N, N | None] = {start: None}
        pending = [start]
        while pending:
            node = pending.pop()
            self.visited += 1
            for other in neighbours(node):
                if other not in parent and low < self.key(other) <= high:
                    parent[other] = node
                    pending.append(other)
        return parent
