"""Convolutions: how far they look, and how far they step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.mutations.registry import mutation

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program, Transaction


def convolutions(p: Program) -> list[NodeId]:
    """Convolutions without dilation whose weight nobody else reads."""
    found = [n for n in p.of_kind("conv") if set(_pair(p, n, "dilation")) == {1}]
    return [n for n in found if len(p.consumers(p.operands(n)[1].node)) == 1]


@mutation("kernel", sites=convolutions, weight=0.10, refine=0.06)
def kernel(e: Transaction, site: Any, rng: np.random.Generator, size: int | None = None) -> None:
    """A larger or smaller window, its result as large as before.

    A larger one gets zeros around it and computes the same; of a smaller one the rim is lost.
    """
    p = e.program
    node = p.node(site)
    weight = p.operands(node)[1].node
    old = p.weights.array(p.key(weight)).to_numpy()
    sizes = old.shape[2:]
    wanted = size or int(rng.choice([s for s in (1, 3, 5, 7) if s != sizes[0]]))
    grown = [wanted - s for s in sizes]
    padding = [a + g // 2 for a, g in zip(_pair(p, node, "padding"), grown, strict=True)]
    if any(g % 2 for g in grown) or min(padding) < 0:
        raise UsageError("a window of this size gives another result size", where=p.path(node),
                         expected=f"{sizes} and an even number", got=wanted)  # fmt: skip
    around = [(0, 0), (0, 0), *((max(g, 0) // 2,) * 2 for g in grown)]
    inside = (slice(None), slice(None), *(slice(-g // 2, g // 2) if g < 0 else slice(None) for g in grown))
    e.set_weight(weight, np.ascontiguousarray(np.pad(old, around)[inside]))
    e.set_attr(node, padding=tuple(padding))


@mutation("stride", sites=convolutions, weight=0.10, refine=0.06)
def stride(e: Transaction, site: Any, rng: np.random.Generator, step: int | None = None) -> None:
    """Another step of the window, where what reads the result takes any size (behind a global pooling)."""
    p = e.program
    node = p.node(site)
    now = _pair(p, node, "stride")[0]
    wanted = step or int(rng.choice([s for s in (1, 2, 3) if s != now]))
    e.set_attr(node, stride=wanted)


def _pair(p: Program, node: NodeId, name: str) -> tuple[int, ...]:
    value = p.attrs(node)[name]
    rank = len(p.spec(p.operands(node)[1].node).shape) - 2
    return tuple(value) if isinstance(value, tuple | list) else (value,) * rank
