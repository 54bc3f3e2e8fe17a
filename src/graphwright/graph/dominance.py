"""What every path must pass: dominators, post-dominators, articulation nodes, bridges; and the critical path.

Pure and iterative like `analysis.py`, over live nodes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .analysis import Dense, topological_sort
from .graph import Graph
from .handles import EdgeId, NodeId


def dominators(g: Graph, roots: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    """Immediate dominator of each node that `roots` reach; None where only the start itself dominates.

    O(E · depth), nearly linear in practice.
    Source: Cooper, Harvey and Kennedy 2001, "A Simple, Fast Dominance Algorithm".
    """
    return _dominators(Dense(g.csr()), g, roots)


def post_dominators(g: Graph, exits: NodeId | Iterable[NodeId]) -> dict[NodeId, NodeId | None]:
    """Immediate post-dominator of each node that reaches `exits`: what every path from it to an exit must pass."""
    return _dominators(Dense(g.csc()), g, exits)


def articulation_nodes(g: Graph) -> list[NodeId]:
    """Nodes whose removal splits their weak component, in slot order. O(V + E)."""
    return _cuts(g)[0]


def bridges(g: Graph) -> list[EdgeId]:
    """Edges whose removal splits their weak component, in slot order; an edge with a parallel is none. O(V + E)."""
    return _cuts(g)[1]


def critical_path(g: Graph, cost: Callable[[NodeId], float]) -> tuple[float, tuple[NodeId, ...]]:
    """The path with the largest sum of node costs, and that sum. O((V + E) log V). Raises CycleError."""
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
