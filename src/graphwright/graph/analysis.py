"""Orders, components, reachability and paths of a graph: pure functions, iterative, never recursive.

Live nodes are first numbered 0..n-1 without gaps; the neighbours of a node are visited in the order of edge slots.
Functions of a graph return handles, and raise StaleHandle for a stale argument.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from graphwright.graph.graph import Graph
from graphwright.graph.state import Compressed

from ..errors import CycleError, UsageError
from .handles import EdgeId, NodeId
from .views import packed

# pyright: reportPrivateUsage=false
# The files of this folder share private attributes of a graph.

Lists = Sequence[Sequence[int]]  # the successors (or predecessors) of each of 0..n-1
ENTER, SEEN, LEAVE = range(3)


class Dense:
    """The live nodes numbered 0..n-1; `next[i]` lists the successors (or predecessors) of node i."""

    def __init__(self, rows: Compressed) -> None:
        self.nodes: list[NodeId] = rows.nodes.tolist()
        self._of = {node: i for i, node in enumerate(self.nodes)}
        bounds, ends = rows.indptr.tolist(), rows.indices.tolist()
        self.next: list[list[int]] = [ends[a:b] for a, b in pairwise(bounds)]

    def of(self, nodes: NodeId | Iterable[NodeId], graph: Graph) -> list[int]:
        """Return the number in 0..n-1 of each of the given nodes. Raises: StaleHandle."""
        ids = np.atleast_1d(packed(nodes)).tolist()
        for node in ids:
            if node not in self._of:
                raise graph._node_table.stale(node)
        return [self._of[node] for node in ids]

    def handles(self, at: Iterable[int]) -> tuple[NodeId, ...]:
        """Return the handles of the nodes with these numbers."""
        return tuple(self.nodes[i] for i in at)


def topological_sort(g: Graph, key: Callable[[NodeId], Any] | None = None) -> list[NodeId]:
    """Return all nodes in topological order; ties go to the least `key`, then to the lowest slot.

    O((V + E) log V), Kahn's algorithm with a heap. Raises CycleError with the path of a cycle.
    """
    forward = Dense(g.csr())
    keys = [key(n) for n in forward.nodes] if key else [0] * len(forward.nodes)
    waiting = _in_degrees(forward.next)
    ready = [(keys[i], i) for i in range(len(forward.nodes)) if not waiting[i]]
    heapq.heapify(ready)
    order: list[NodeId] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(forward.nodes[i])
        for j in forward.next[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (keys[j], j))
    if len(order) < len(forward.nodes):
        path = _cycle(forward.next, waiting)
        nodes = forward.handles(path)
        shown = " -> ".join(map(repr, nodes[:6])) + (" -> ..." if len(nodes) > 6 else "")
        raise CycleError(f"the graph has a cycle of {len(path)} nodes", where=shown, path=nodes)
    return order


def levels(g: Graph) -> dict[NodeId, int]:
    """Map each node to the number of edges on the longest path that ends at it. O(V + E). Raises CycleError."""
    forward = Dense(g.csr())
    level = longest_paths(forward.next, forward.of(topological_sort(g), g))
    return dict(zip(forward.nodes, level, strict=True))


def strongly_connected_components(g: Graph) -> list[tuple[NodeId, ...]]:
    """Return the strongly connected components, each after the components that it reaches. O(V + E)."""
    forward = Dense(g.csr())
    return [forward.handles(part) for part in strong_components(forward.next)]


def connected_components(g: Graph) -> list[tuple[NodeId, ...]]:
    """Return the weakly connected components, each in slot order. O(V + E)."""
    forward, backward = Dense(g.csr()), Dense(g.csc())
    either = [a + b for a, b in zip(forward.next, backward.next, strict=True)]
    seen: set[int] = set()
    found: list[tuple[NodeId, ...]] = []
    for root in range(len(forward.nodes)):
        if root not in seen:
            members = _flood(either, [root])
            seen.update(members)
            found.append(forward.handles(sorted(members)))
    return found


def bfs_order(g: Graph, start: NodeId) -> list[NodeId]:
    """Return nodes by distance from `start` along out-edges (breadth first). O(V + E)."""
    forward = Dense(g.csr())
    return list(forward.handles(_flood(forward.next, forward.of(start, g))))


def dfs_order(g: Graph, start: NodeId) -> list[NodeId]:
    """Return nodes in depth-first preorder from `start`. O(V + E)."""
    forward = Dense(g.csr())
    walk = depth_first(forward.next, forward.of(start, g), [-1] * len(forward.nodes))
    return list(forward.handles(i for step, _, i in walk if step == ENTER))


def reachable(g: Graph, start: NodeId | Iterable[NodeId]) -> set[NodeId]:
    """Return all nodes reachable from `start`, `start` included. O(V + E)."""
    forward = Dense(g.csr())
    return set(forward.handles(_flood(forward.next, forward.of(start, g))))


def reaching(g: Graph, goal: NodeId | Iterable[NodeId]) -> set[NodeId]:
    """Return all nodes that reach `goal`, `goal` included. O(V + E)."""
    backward = Dense(g.csc())
    return set(backward.handles(_flood(backward.next, backward.of(goal, g))))


def all_paths(g: Graph, a: NodeId, b: NodeId, limit: int = 1000) -> list[tuple[NodeId, ...]]:
    """Return simple paths from `a` to `b` as node sequences, at most `limit`; parallel edges give one path.

    Only nodes that reach `b` are visited. Raises: UsageError if `limit` is not positive.
    """
    if limit < 1:
        raise UsageError("the maximum number of paths is less than 1", expected="limit >= 1", got=limit)
    forward, backward = Dense(g.csr()), Dense(g.csc())
    (start,), (goal,) = forward.of(a, g), forward.of(b, g)
    useful = set(_flood(backward.next, [goal]))
    if start not in useful:
        return []
    if start == goal:
        return [(a,)]
    found: list[tuple[NodeId, ...]] = []
    path, on_path = [start], {start}
    calls = [iter(dict.fromkeys(forward.next[start]))]
    while calls and len(found) < limit:
        for j in calls[-1]:
            if j == goal:
                found.append(forward.handles([*path, goal]))
                break
            if j in useful and j not in on_path:
                path.append(j)
                on_path.add(j)
                calls.append(iter(dict.fromkeys(forward.next[j])))
                break
        else:
            calls.pop()
            on_path.discard(path.pop())
    return found


def dominators(g: Graph, roots: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    """Map each node reachable from `roots` to its immediate dominator, or to None if no other node dominates it.

    O(E · depth), nearly linear in practice.
    Source: Cooper, Harvey and Kennedy 2001, "A Simple, Fast Dominance Algorithm".
    """
    return _dominators(Dense(g.csr()), g, roots)


def post_dominators(g: Graph, exits: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    """Map each node that reaches `exits` to its immediate post-dominator, or to None if it has none."""
    return _dominators(Dense(g.csc()), g, exits)


def articulation_nodes(g: Graph) -> list[NodeId]:
    """Return the nodes whose removal splits their weakly connected component, in slot order. O(V + E)."""
    return _cuts(g)[0]


def bridges(g: Graph) -> list[EdgeId]:
    """Return the edges whose removal splits their weakly connected component, in slot order. O(V + E)."""
    return _cuts(g)[1]


def critical_path(g: Graph, cost: Callable[[NodeId], float]) -> tuple[float, tuple[NodeId, ...]]:
    """Return the largest sum of node costs on a path, and the path. O((V + E) log V). Raises CycleError."""
    backward = Dense(g.csc())
    order = backward.of(topological_sort(g), g)
    total: dict[int, float] = {}
    before: dict[int, int | None] = {}
    for i in order:
        best = max(backward.next[i], key=total.__getitem__, default=None)
        if best is not None and total[best] <= 0:
            best = None  # a path may start anywhere
        before[i] = best
        total[i] = cost(backward.nodes[i]) + (total[best] if best is not None else 0)
    at = end = max(order, key=total.__getitem__, default=None)
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = before[at]
    return (0.0 if end is None else total[end]), backward.handles(reversed(path))


# -- on lists of neighbours ----------------------------------------------------------------------------------------
def kahn_order(after: Lists) -> list[int]:
    """Return the nodes 0..n-1 in topological order, without those on or after a cycle; `after[i]`: successors of i."""
    waiting = _in_degrees(after)
    order = [i for i, count in enumerate(waiting) if not count]
    for i in order:  # order grows during the loop
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
    return order


def longest_paths(after: Lists, order: Iterable[int]) -> list[int]:
    """Return the length of the longest path to each node; `order` is topological, `after[i]`: successors of i."""
    length = [0] * len(after)
    for i in order:
        for j in after[i]:
            length[j] = max(length[j], length[i] + 1)
    return length


def depth_first(after: Lists, roots: Iterable[int], number: list[int]) -> Iterator[tuple[int, int, int]]:
    """Walk depth first from each unvisited root; write preorder numbers to `number`, in which -1 marks unvisited nodes.

    `after[i]` are the successors of node i. Yields (ENTER, parent, node), (SEEN, node, successor that was visited
    before) and (LEAVE, parent, node); the parent of a root is -1.
    """
    clock = 0
    for root in roots:
        if number[root] >= 0:
            continue
        calls = [(-1, iter((root,)))]
        while calls:
            i, rest = calls[-1]
            for j in rest:
                if number[j] < 0:
                    number[j] = clock
                    clock += 1
                    calls.append((j, iter(after[j])))
                    yield ENTER, i, j
                    break
                yield SEEN, i, j
            else:
                calls.pop()
                if calls:
                    yield LEAVE, calls[-1][0], i


def strong_components(after: Lists) -> list[list[int]]:
    """Return the strongly connected components, each sorted and after those it reaches; `after[i]`: successors of i.

    Source: Tarjan 1972, "Depth-First Search and Linear Graph Algorithms".
    """
    number, low, on_stack = [-1] * len(after), [0] * len(after), [False] * len(after)
    stack: list[int] = []
    found: list[list[int]] = []
    for step, i, j in depth_first(after, range(len(after)), number):
        if step == ENTER:
            low[j], on_stack[j] = number[j], True
            stack.append(j)
        elif step == SEEN:
            if on_stack[j]:
                low[i] = min(low[i], number[j])
        else:
            if i >= 0:
                low[i] = min(low[i], low[j])
            if low[j] == number[j]:
                part = [stack.pop()]
                while part[-1] != j:
                    part.append(stack.pop())
                for k in part:
                    on_stack[k] = False
                found.append(sorted(part))
    return found


def _in_degrees(after: Lists) -> list[int]:
    counts = Counter(chain.from_iterable(after))
    return [counts[i] for i in range(len(after))]


def _flood(after: Lists, start: Iterable[int]) -> list[int]:
    order = list(dict.fromkeys(start))
    seen = set(order)
    for i in order:  # order grows during the loop
        for j in after[i]:
            if j not in seen:
                seen.add(j)
                order.append(j)
    return order


def _cycle(after: Lists, waiting: list[int]) -> list[int]:
    """Return a cycle among the nodes with `waiting` > 0 unordered predecessors, at which Kahn's algorithm stopped."""
    before = {j: i for i, ends in enumerate(after) if waiting[i] for j in ends if waiting[j]}
    i = next(iter(before))
    seen: dict[int, None] = {}
    while i not in seen:
        seen[i] = None
        i = before[i]
    path = list(seen)
    return path[path.index(i) :][::-1]


def _dominators(dense: Dense, g: Graph, roots: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    starts = list(dict.fromkeys(dense.of(roots, g)))
    root = len(dense.nodes)  # one virtual root over all starts
    after = [*dense.next, starts]
    order = [i for step, _, i in depth_first(after, [root], [-1] * len(after)) if step == LEAVE]
    number = {i: k for k, i in enumerate(order)}
    before: dict[int, list[int]] = {i: [] for i in order}
    for i in order:
        for j in after[i]:
            before[j].append(i)
    above: dict[int, int] = {root: root}
    changed = True
    while changed:
        changed = False
        for i in reversed(order[:-1]):
            meet = -1
            for j in before[i]:
                if j in above:
                    meet = j if meet < 0 else _meet(j, meet, above, number)
            if above.get(i) != meet:
                above[i] = meet
                changed = True
    return {dense.nodes[i]: None if above[i] == root else dense.nodes[above[i]] for i in order[:-1]}


def _meet(a: int, b: int, above: dict[int, int], number: dict[int, int]) -> int:
    while a != b:
        while number[a] < number[b]:
            a = above[a]
        while number[b] < number[a]:
            b = above[b]
    return a


def _cuts(g: Graph) -> tuple[list[NodeId], list[EdgeId]]:
    """Return (articulation nodes, bridges) of the undirected multigraph (Hopcroft and Tarjan 1973)."""
    rows = g.csr()
    nodes, edges = rows.nodes.tolist(), rows.edges.tolist()
    sides: list[list[int]] = [[] for _ in nodes]
    edge_of: dict[tuple[int, int], EdgeId] = {}
    sources: list[int] = np.repeat(np.arange(len(nodes)), np.diff(rows.indptr)).tolist()
    targets: list[int] = rows.indices.tolist()
    for i, j, edge in zip(sources, targets, edges, strict=True):
        sides[i].append(j)
        sides[j].append(i)
        edge_of[i, j] = edge_of[j, i] = edge
    number, low, parent, children = [-1] * len(nodes), [0] * len(nodes), [-1] * len(nodes), [0] * len(nodes)
    came_back: set[int] = set()
    cut_nodes: set[int] = set()
    cut_edges: list[EdgeId] = []
    for step, i, j in depth_first(sides, range(len(nodes)), number):
        if step == ENTER:
            low[j], parent[j] = number[j], i
        elif step == SEEN:
            if j == parent[i] and i not in came_back:  # the edge by which the walk entered; a parallel one counts
                came_back.add(i)
            else:
                low[i] = min(low[i], number[j])
        elif i >= 0:
            low[i] = min(low[i], low[j])
            children[i] += 1
            if low[j] > number[i]:
                cut_edges.append(edge_of[i, j])
            if low[j] >= number[i] and (parent[i] >= 0 or children[i] > 1):
                cut_nodes.add(i)
    return [nodes[i] for i in sorted(cut_nodes)], sorted(cut_edges, key=lambda e: e.index)
