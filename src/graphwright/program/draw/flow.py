"""What an edge carries, for its colour: the path around a branch, queries, keys and values, state, or plain data."""

from __future__ import annotations

from graphwright.ops import OPS
from graphwright.program.draw.scene import Scene, SceneNode
from graphwright.program.kinds import KINDS, STATE, WRITE

DATA, ATTENTION, RESIDUAL, RECURRENT, MIXED = "data", "attention", "residual", "state", "data"

_ATTENDS = frozenset({"sdpa", "sdpa_backward"})
_ADDS = frozenset({"add"})
"""Rows of the picture's own table: ops that attend, and ops that add like a junction but have two ports."""

_FAR = 600
"""Nodes that are looked at to tell a shortcut from a short branch; past them it is taken for a shortcut."""


def kinds(scene: Scene) -> list[str]:
    """Kind of each edge.

    `residual` is an edge into a sum that jumps over a branch: its source is also, further up, a source of another
    operand. `attention` leads into an op that attends, `state` from a state, back into one, or into the write of one.
    """
    nodes, edges = scene.nodes, scene.edges
    into: list[list[int]] = [[] for _ in nodes]
    fan_out = [0] * len(nodes)
    for edge in edges:
        if nodes[edge.dst].op != STATE:  # the step ends there
            into[edge.dst].append(edge.src)
            fan_out[edge.src] += 1
    level = _levels(len(nodes), into)
    found = []
    for edge in edges:
        src, dst = nodes[edge.src], nodes[edge.dst]
        if src.op == STATE or dst.op in (STATE, WRITE):
            found.append(RECURRENT)
        elif dst.op in _ATTENDS:
            found.append(ATTENTION)
        elif (
            (dst.junction or dst.op in _ADDS)
            and fan_out[edge.src] > 1
            and _jumps(edge.src, into[edge.dst], into, level)
        ):
            found.append(RESIDUAL)
        else:
            found.append(DATA)
    return found


def _levels(n: int, into: list[list[int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [len(sources) for sources in into]
    for i, sources in enumerate(into):
        for j in sources:
            after[j].append(i)
    level = [0] * n
    ready = [i for i in range(n) if not waiting[i]]
    for i in ready:  # grows while it is walked
        for j in after[i]:
            level[j] = max(level[j], level[i] + 1)
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    return level


def _jumps(src: int, operands: list[int], into: list[list[int]], level: list[int]) -> bool:
    """True if `src` leads to another of the operands."""
    seen = {i for i in operands if level[i] > level[src]}
    stack = sorted(seen)
    while stack:
        for j in into[stack.pop()]:
            if j == src:
                return True
            if level[j] > level[src] and j not in seen:
                seen.add(j)
                stack.append(j)
        if len(seen) > _FAR:
            return True
    return False


def family(node: SceneNode) -> str:
    """What a box is coloured by: `source`, `state`, `sum`, `attention`, `weight`, `view`, `pointwise` or `op`."""
    if node.op in KINDS:
        return "state" if node.op in (STATE, WRITE) else "source"
    row = OPS.get(node.op)
    if node.junction:
        return "sum"
    if node.op in _ATTENDS:
        return "attention"
    if any(spec.shape for _, spec, _ in node.weights):
        return "weight"
    if row is not None and row.view is not None:
        return "view"
    return "pointwise" if row is not None and row.traits.elementwise else "op"
