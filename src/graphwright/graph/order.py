"""A topological order kept while edges are added: int64 labels with gaps, repaired only where an edge goes backwards.

Pearce and Kelly 2007, "A Dynamic Topological Sort Algorithm for Directed Acyclic Graphs". An edge that goes forwards
costs O(1); one that goes backwards a search between its two labels. Invariant: key(u) < key(v) for every edge u -> v,
where a key is (label, creation number); an insertion that is refused changes no label.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..errors import CycleError, UsageError

GAP = 1 << 20
LIMIT = 1 << 62
"""Labels beyond this are spaced anew, so that they always fit int64."""

N = TypeVar("N", bound=Hashable)


class Neighbours(Protocol[N]):
    """What the order asks of a graph; edges that cut cycles (delays) are simply not reported."""

    def successors(self, n: N, /) -> Iterable[N]:
        """Nodes that must come after `n`."""
        ...

    def predecessors(self, n: N, /) -> Iterable[N]:
        """Nodes that must come before `n`."""
        ...


class Relabelled(NamedTuple, Generic[N]):
    """Labels before a change: (node, label, creation number), label None for a node that was not there."""

    before: tuple[tuple[N, int | None, int], ...]

    def __bool__(self) -> bool:
        return bool(self.before)


class OnlineOrder(Generic[N]):
    """The order of the nodes of a graph, whose edges it reads through `graph` and never changes.

    Args:
        graph: successors and predecessors of a node; a new edge may be in it already or not.
        gap: distance between the labels of nodes inserted at the end.
    """

    def __init__(self, graph: Neighbours[N], gap: int = GAP) -> None:
        if gap < 2:
            raise UsageError("a gap has room for a label in between", expected=">= 2", got=gap)
        self._graph, self._gap = graph, gap
        self._labels: dict[N, int] = {}
        self._created: dict[N, int] = {}
        self._sorted: list[int] = []  # all labels, ascending, with repeats
        self._next = 0
        self.visited = 0  # nodes looked at by searches since the start, for tests of locality

    @classmethod
    def from_labels(cls, graph: Neighbours[N], labels: Mapping[N, tuple[int, int]], gap: int = GAP) -> OnlineOrder[N]:
        """An order with saved keys: node -> (label, creation number). Raises UsageError if an edge goes backwards."""
        order = cls(graph, gap)
        for node, (label, created) in labels.items():
            if not -LIMIT <= label <= LIMIT:
                raise UsageError("a label out of range", where=node, got=label)
            order._put(node, label, created)
        for node in labels:
            for after in graph.successors(node):
                if order.key(after) <= order.key(node):
                    raise UsageError("saved labels contradict the edges", where=f"{node!r} -> {after!r}")
        return order

    def insert(
        self, node: N, after: N | None = None, before: N | None = None, created: int | None = None
    ) -> Relabelled[N]:
        """Give a new node a label: between two nodes, next to one, or at the end. O(log n), spacing anew amortised.

        `after` and `before` are only hints where the node will end up when its edges come; if they contradict each
        other the node is put after `after`.

        Args:
            node: not in the order yet.
            after: a node to come after.
            before: a node to come before.
            created: creation number, if the caller keeps them; else counted here.
        Raises: UsageError if the node is there already, KeyError if a hint is not.
        """
        if node in self._labels:
            raise UsageError("the node has a label already", where=repr(node))
        changed: dict[N, tuple[N, int | None, int]] = {}
        label = self._free_label(after, before)
        if label is None:
            changed = {entry[0]: entry for entry in self._respace(list(self))}
            label = self._free_label(after, before)
            assert label is not None  # gaps are at least 2 wide now
        created = self._next if created is None else created
        self._put(node, label, created)
        return Relabelled((*changed.values(), (node, None, created)))

    def add_edge(self, u: N, v: N) -> Relabelled[N]:
        """Make room for an edge u -> v; returns the labels that changed, none if it goes forwards.

        Raises: CycleError whose `path` runs from `v` to `u`; no label has changed then. KeyError for unknown nodes.
        """
        low, high = self.key(v), self.key(u)
        if u == v:
            raise CycleError(f"an edge from {u!r} to itself", path=(u,))
        if high < low:
            return Relabelled(())
        ahead = self._search(v, u, high)
        behind = self._behind(u, low)
        # Pearce and Kelly: what leads to u, then what v leads to, share out the labels they had together
        window = sorted(behind, key=self.key) + sorted(ahead, key=self.key)
        pool = sorted(self.key(n) for n in window)
        if self._ties(label for label, _ in pool):
            return Relabelled(tuple(self._respace(self._sorted_with(dict(zip(window, pool, strict=True))))))
        record = [(n, self._labels[n], self._created[n]) for n in window]
        for node, (label, _) in zip(window, pool, strict=True):
            self._labels[node] = label
        return Relabelled(tuple(entry for entry in record if self._labels[entry[0]] != entry[1]))

    def remove(self, node: N) -> Relabelled[N]:
        """Forget a node. Raises KeyError."""
        record = Relabelled(((node, self._labels[node], self._created[node]),))
        self._drop(node)
        return record

    def restore(self, record: Relabelled[N]) -> Relabelled[N]:
        """Undo a change, later ones first; returns the record that redoes it. O(changed · log n)."""
        inverse: list[tuple[N, int | None, int]] = []
        for node, label, created in record.before:
            inverse.append((node, self._labels.get(node), created))
            if node in self._labels:
                self._drop(node)
            if label is not None:
                self._put(node, label, created)
        return Relabelled(tuple(inverse))

    def label(self, node: N) -> int:
        """The label of a node. Raises KeyError."""
        return self._labels[node]

    def key(self, node: N) -> tuple[int, int]:
        """What nodes are sorted by: (label, creation number). Raises KeyError."""
        return self._labels[node], self._created[node]

    def sorted(self, nodes: Iterable[N]) -> list[N]:
        """The given nodes in order."""
        return sorted(nodes, key=self.key)

    def labels(self) -> dict[N, tuple[int, int]]:
        """All keys, for `from_labels`."""
        return {node: (label, self._created[node]) for node, label in self._labels.items()}

    def __contains__(self, node: object) -> bool:
        return node in self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[N]:
        return iter(sorted(self._labels, key=self.key))

    # -- labels ------------------------------------------------------------------------------------------------------
    def _free_label(self, after: N | None, before: N | None) -> int | None:
        labels, gap = self._sorted, self._gap
        if after is None and before is None:
            label = labels[-1] + gap if labels else 0
        elif after is None:
            assert before is not None
            high = self._labels[before]
            at = bisect_left(labels, high)
            label = (labels[at - 1] + high) // 2 if at else high - gap
        else:
            low = self._labels[after]
            at = bisect_right(labels, low)
            high = labels[at] if at < len(labels) else low + 2 * gap
            if before is not None and self._labels[before] > low:
                high = self._labels[before]
            label = (low + high) // 2
        at = bisect_left(labels, label)
        taken = at < len(labels) and labels[at] == label
        if taken and after is not None and before is not None:  # the middle of a wide interval may be somebody's label
            low = labels[at]
            high = labels[at + 1] if at + 1 < len(labels) else low + 2 * gap
            label, taken = (low + high) // 2, high - low < 2
        return None if taken or not -LIMIT < label < LIMIT else label

    def _put(self, node: N, label: int, created: int) -> None:
        self._labels[node], self._created[node] = label, created
        self._next = max(self._next, created + 1)
        insort(self._sorted, label)

    def _drop(self, node: N) -> None:
        self._sorted.pop(bisect_left(self._sorted, self._labels.pop(node)))
        del self._created[node]

    def _respace(self, nodes: list[N]) -> list[tuple[N, int | None, int]]:
        record = [(n, self._labels[n], self._created[n]) for n in nodes]
        for i, node in enumerate(nodes):
            self._labels[node] = i * self._gap
        self._sorted = [i * self._gap for i in range(len(nodes))]
        return [(n, label, created) for n, label, created in record if self._labels[n] != label]

    def _ties(self, pool: Iterable[int]) -> bool:
        return any(bisect_right(self._sorted, label) - bisect_left(self._sorted, label) > 1 for label in pool)

    def _sorted_with(self, keys: Mapping[N, tuple[int, int]]) -> list[N]:
        return sorted(self._labels, key=lambda n: keys[n] if n in keys else self.key(n))

    # -- searches ----------------------------------------------------------------------------------------------------
    def _search(self, start: N, goal: N, high: tuple[int, int]) -> list[N]:
        """Nodes that `start` reaches up to the key `high`; meeting `goal` there is a cycle."""
        parent: dict[N, N | None] = {start: None}
        pending = [start]
        while pending:
            node = pending.pop()
            self.visited += 1
            for after in self._graph.successors(node):
                if after in parent or self.key(after) > high:
                    continue
                parent[after] = node
                if after == goal:
                    raise CycleError(
                        f"an edge from {goal!r} to {start!r} closes a cycle",
                        path=tuple(_path(parent, goal)),
                        fix="cut one of the edges on the path, or make one a delayed edge",
                    )
                pending.append(after)
        return list(parent)

    def _behind(self, start: N, low: tuple[int, int]) -> list[N]:
        seen = {start}
        pending = [start]
        while pending:
            self.visited += 1
            for node in self._graph.predecessors(pending.pop()):
                if node not in seen and self.key(node) > low:
                    seen.add(node)
                    pending.append(node)
        return list(seen)


def _path(parent: Mapping[N, N | None], end: N) -> list[N]:
    path: list[N] = []
    node: N | None = end
    while node is not None:
        path.append(node)
        node = parent[node]
    return path[::-1]
