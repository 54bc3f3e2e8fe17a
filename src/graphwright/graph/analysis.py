"""Orders, components, reachability and paths of a graph: pure functions, iterative, never recursive.

Live slots are mapped to 0..n-1 first, so gaps left by deletions are not visible; neighbours are in edge slot order.
All functions return handles. Raises: StaleHandle for a stale argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from graphwright.graph.graph import Graph
from graphwright.graph.state import Compressed

from ..errors import CycleError, UsageError
from .bulk import packed
from .handles import EdgeId, NodeId

# pyright: reportPrivateUsage=false
# The files of this folder share what a graph keeps.


class Dense:
    """The live nodes as 0..n-1 with successor or predecessor lists."""

    def __init__(self, rows: Compressed) -> None:
        self.nodes: list[NodeId] = rows.nodes.tolist()
        self._of = {node: i for i, node in enumerate(self.nodes)}
        bounds, ends = rows.indptr.tolist(), rows.indices.tolist()
        self.next: list[list[int]] = [ends[a:b] for a, b in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self.nodes)

    def of(self, nodes: NodeId | Iterable[NodeId], graph: Graph) -> list[int]:
        """Return the positions of handles. Raises: StaleHandle."""
        ids = np.atleast_1d(packed(nodes)).tolist()
        for node in ids:
            if node not in self._of:
                raise graph._node_table.stale(node)
        return [self._of[node] for node in ids]

    def handles(self, at: Iterable[int]) -> tuple[NodeId, ...]:
        """Return the handles at positions."""
        return tuple(self.nodes[i] for i in at)


def topological_sort(g: Graph, key: Callable[[NodeId], Any] | None = None) -> list[NodeId]:
    """Return every node after its predecessors; ties go to the least `key`, then to the lowest slot.

    O((V + E) log V), Kahn's algorithm with a heap. Raises CycleError with the path of a cycle.
    """
    forward = Dense(g.csr())
    keys = [key(n) for n in forward.nodes] if key else [0] * len(forward)
    waiting = _in_degrees(forward)
    ready = [(keys[i], i) for i in range(len(forward)) if not waiting[i]]
    heapq.heapify(ready)
    order: list[NodeId] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(forward.nodes[i])
        for j in forward.next[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (keys[j], j))
    if len(order) < len(forward):
        path = _cycle(forward, waiting)
        raise CycleError(f"a cycle over {len(path)} nodes", path=forward.handles(path))
    return order


def levels(g: Graph) -> dict[NodeId, int]:
    """Return the number of edges on the longest path from a source to each node. O(V + E). Raises CycleError."""
    forward = Dense(g.csr())
    order = forward.of(topological_sort(g), g)
    level = [0] * len(forward)
    for i in order:
        for j in forward.next[i]:
            level[j] = max(level[j], level[i] + 1)
    return dict(zip(forward.nodes, level, strict=True))


def strongly_connected_components(g: Graph) -> list[tuple[NodeId, ...]]:
    """Return the strongly connected components, each after the components that it reaches. O(V + E).

    Source: Tarjan 1972, "Depth-First Search and Linear Graph Algorithms", with an explicit stack.
    """
    forward = Dense(g.csr())
    count = len(forward)
    number, low, on_stack = [-1] * count, [0] * count, [False] * count
    stack: list[int] = []
    found: list[tuple[NodeId, ...]] = []
    clock = 0
    for root in range(count):
        if number[root] >= 0:
            continue
        calls = [(root, iter(forward.next[root]))]
        number[root] = low[root] = clock
        clock += 1
        stack.append(root)
        on_stack[root] = True
        while calls:
            i, rest = calls[-1]
            for j in rest:
                if number[j] < 0:
                    number[j] = low[j] = clock
                    clock += 1
                    stack.append(j)
                    on_stack[j] = True
                    calls.append((j, iter(forward.next[j])))
                    break
                if on_stack[j]:
                    low[i] = min(low[i], number[j])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[i])
                if low[i] == number[i]:
                    cut = _rindex(stack, i)
                    for j in stack[cut:]:
                        on_stack[j] = False
                    found.append(forward.handles(sorted(stack[cut:])))
                    del stack[cut:]
    return found


def connected_components(g: Graph) -> list[tuple[NodeId, ...]]:
    """Return the weakly connected components, each in slot order. O(V + E)."""
    forward, backward = Dense(g.csr()), Dense(g.csc())
    seen = [False] * len(forward)
    found: list[tuple[NodeId, ...]] = []
    for root in range(len(forward)):
        if seen[root]:
            continue
        seen[root] = True
        members = [root]
        for i in members:  # members grows during the loop
            for j in forward.next[i] + backward.next[i]:
                if not seen[j]:
                    seen[j] = True
                    members.append(j)
        found.append(forward.handles(sorted(members)))
    return found


def bfs_order(g: Graph, start: NodeId) -> list[NodeId]:
    """Return nodes by distance from `start` along out-edges (breadth first). O(V + E)."""
    forward = Dense(g.csr())
    return list(forward.handles(_flood(forward, forward.of(start, g))))


def dfs_order(g: Graph, start: NodeId) -> list[NodeId]:
    """Return nodes in depth-first preorder from `start`. O(V + E)."""
    forward = Dense(g.csr())
    (root,) = forward.of(start, g)
    seen, order = {root}, [root]
    calls = [iter(forward.next[root])]
    while calls:
        for j in calls[-1]:
            if j not in seen:
                seen.add(j)
                order.append(j)
                calls.append(iter(forward.next[j]))
                break
        else:
            calls.pop()
    return list(forward.handles(order))


def reachable(g: Graph, start: NodeId | Iterable[NodeId]) -> set[NodeId]:
    """Return all nodes reachable from `start`, `start` included. O(V + E)."""
    forward = Dense(g.csr())
    return set(forward.handles(_flood(forward, forward.of(start, g))))


def reaching(g: Graph, goal: NodeId | Iterable[NodeId]) -> set[NodeId]:
    """Return all nodes that reach `goal`, `goal` included. O(V + E)."""
    backward = Dense(g.csc())
    return set(backward.handles(_flood(backward, backward.of(goal, g))))


def all_paths(g: Graph, a: NodeId, b: NodeId, limit: int = 1000) -> list[tuple[NodeId, ...]]:
    """Return simple paths from `a` to `b` as node sequences, at most `limit`; parallel edges give one path.

    Only nodes that reach `b` are visited. Raises: UsageError if `limit` is not positive.
    """
    if limit < 1:
        raise UsageError("limit must be at least 1", got=limit)
    forward, backward = Dense(g.csr()), Dense(g.csc())
    (start,), (goal,) = forward.of(a, g), forward.of(b, g)
    useful = set(_flood(backward, [goal]))
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


def _in_degrees(forward: Dense) -> list[int]:
    counts = [0] * len(forward)
    for ends in forward.next:
        for j in ends:
            counts[j] += 1
    return counts


def _flood(dense: Dense, start: Iterable[int]) -> list[int]:
    order = list(dict.fromkeys(start))
    seen = set(order)
    for i in order:  # order grows during the loop
        for j in dense.next[i]:
            if j not in seen:
                seen.add(j)
                order.append(j)
    return order


def _cycle(forward: Dense, waiting: list[int]) -> list[int]:
    """Return a cycle among the nodes that Kahn's algorithm could not order, found by walking backwards."""
    before: dict[int, int] = {}
    for i, ends in enumerate(forward.next):
        if waiting[i]:
            for j in ends:
                if waiting[j]:
                    before[j] = i
    i = next(iter(before))
    seen: dict[int, None] = {}
    while i not in seen:
        seen[i] = None
        i = before[i]
    path = list(seen)
    return path[path.index(i) :][::-1]


def _rindex(stack: list[int], value: int) -> int:
    at = len(stack) - 1
    while stack[at] != value:
        at -= 1
    return at


def dominators(g: Graph, roots: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    """Return the immediate dominator of each node reachable from `roots`; None if only a virtual root dominates it.

    O(E · depth), nearly linear in practice.
    Source: Cooper, Harvey and Kennedy 2001, "A Simple, Fast Dominance Algorithm".
    """
    return _dominators(Dense(g.csr()), g, roots)


def post_dominators(g: Graph, exits: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    """Return the immediate post-dominator of each node that reaches `exits`."""
    return _dominators(Dense(g.csc()), g, exits)


def articulation_nodes(g: Graph) -> list[NodeId]:
    """Return the articulation nodes: removing one splits its weak component. In slot order, O(V + E)."""
    return _cuts(g)[0]


def bridges(g: Graph) -> list[EdgeId]:
    """Return the bridges: removing one splits its weak component. In slot order, O(V + E)."""
    return _cuts(g)[1]


def critical_path(g: Graph, cost: Callable[[NodeId], float]) -> tuple[float, tuple[NodeId, ...]]:
    """Return the path with the largest sum of node costs, and that sum. O((V + E) log V). Raises CycleError."""
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
    end = max(order, key=total.__getitem__, default=None)
    if end is None:
        return 0.0, ()
    path: list[int] = []
    at: int | None = end
    while at is not None:
        path.append(at)
        at = before[at]
    return total[end], backward.handles(reversed(path))


def _dominators(dense: Dense, g: Graph, roots: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    starts = list(dict.fromkeys(dense.of(roots, g)))
    root = len(dense)  # one virtual root over all starts
    after = [*dense.next, starts]
    order = _postorder(after, root)
    number = {i: k for k, i in enumerate(order)}
    before: dict[int, list[int]] = {i: [] for i in order}
    for i in order:
        for j in after[i]:
            before[j].append(i)
    above: dict[int, int] = {root: root}
    changed = True
    while changed:
        changed = False
        for i in reversed(order):
            if i == root:
                continue
            meet = -1
            for j in before[i]:
                if j in above:
                    meet = j if meet < 0 else _meet(j, meet, above, number)
            if above.get(i) != meet:
                above[i] = meet
                changed = True
    return {dense.nodes[i]: None if above[i] == root else dense.nodes[above[i]] for i in order if i != root}


def _meet(a: int, b: int, above: dict[int, int], number: dict[int, int]) -> int:
    while a != b:
        while number[a] < number[b]:
            a = above[a]
        while number[b] < number[a]:
            b = above[b]
    return a


def _postorder(after: list[list[int]], root: int) -> list[int]:
    seen, order = {root}, list[int]()
    calls = [(root, iter(after[root]))]
    while calls:
        i, rest = calls[-1]
        for j in rest:
            if j not in seen:
                seen.add(j)
                calls.append((j, iter(after[j])))
                break
        else:
            calls.pop()
            order.append(i)
    return order


def _cuts(g: Graph) -> tuple[list[NodeId], list[EdgeId]]:
    """Hopcroft and Tarjan 1973 over the undirected multigraph, with an explicit stack."""
    rows = g.csr()
    nodes, edges = rows.nodes.tolist(), rows.edges.tolist()
    sides: list[list[tuple[int, int]]] = [[] for _ in nodes]
    for i in range(len(nodes)):
        for k in range(int(rows.indptr[i]), int(rows.indptr[i + 1])):
            j = int(rows.indices[k])
            sides[i].append((j, k))
            sides[j].append((i, k))
    number, low = [-1] * len(nodes), [0] * len(nodes)
    cut_nodes: set[int] = set()
    cut_edges: list[int] = []
    clock = 0
    for root in range(len(nodes)):
        if number[root] >= 0:
            continue
        number[root] = low[root] = clock
        clock += 1
        children = 0
        calls = [(root, -1, iter(sides[root]))]
        while calls:
            i, came_by, rest = calls[-1]
            for j, k in rest:
                if k == came_by:
                    continue
                if number[j] >= 0:
                    low[i] = min(low[i], number[j])
                    continue
                number[j] = low[j] = clock
                clock += 1
                calls.append((j, k, iter(sides[j])))
                break
            else:
                calls.pop()
                if not calls:
                    continue
                parent = calls[-1][0]
                low[parent] = min(low[parent], low[i])
                if low[i] > number[parent]:
                    cut_edges.append(came_by)
                if parent == root:
                    children += 1
                elif low[i] >= number[parent]:
                    cut_nodes.add(parent)
        if children > 1:
            cut_nodes.add(root)
    by_slot = sorted((edges[k] for k in cut_edges), key=lambda e: e.index)
    return [nodes[i] for i in sorted(cut_nodes)], by_slot
