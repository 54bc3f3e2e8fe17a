"""What a tape keeps alive: the arrays saved for backward, by the operation that saved them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphwright.array import NDArray
from graphwright.autograd.tape import TapeNode
from graphwright.autograd.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What one operation saved.

    Attributes:
        op: its name.
        line: `file:line` at which it ran.
        nbytes: bytes of the blocks that it is the first to hold; leaves, which live anyway, are not counted.
    """

    op: str
    line: str
    nbytes: int


def memory(outputs: Tensor | Sequence[Tensor]) -> list[Kept]:
    """What backward from `outputs` would need, per operation in the order in which they ran.

    >>> sum(k.nbytes for k in memory(loss))
    """
    roots = [outputs] if isinstance(outputs, Tensor) else outputs
    seen: set[int] = set()
    result = []
    for node in sorted(nodes_behind(roots), key=lambda n: n.seq):
        nbytes = 0
        leaves = {id(e.data.storage) for e in node.edges if isinstance(e, Tensor) and isinstance(e.data, NDArray)}
        for _, array, _ in node.saved or ():
            if isinstance(array, NDArray) and id(array.storage) not in seen | leaves:
                seen.add(id(array.storage))
                nbytes += array.storage.nbytes
        result.append(Kept(node.op.name, node.line, nbytes))
    return result


def nodes_behind(roots: Sequence[Tensor]) -> set[TapeNode]:
    """Every operation that the roots depend on."""
    stack = [t.node for t in roots if t.node is not None]
    found = set(stack)
    while stack:
        for edge in stack.pop().edges:
            if isinstance(edge, tuple) and edge[0] not in found:
                found.add(edge[0])
                stack.append(edge[0])
    return found
