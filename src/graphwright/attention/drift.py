"""How far the outputs of attention move when edges are cut: exactly, before the cut.

Removing a set R of keys with softmax mass μ from a row changes the output o to o' with o' - o = μ(o' - o_R), where o_R
is the average of v over R with its own weights; hence ‖o' - o‖ <= μ·diam{v} <= 2μ·max‖v‖.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.attention.attend import Setup, Where, attended
from graphwright.autograd import as_tensor, no_grad
from graphwright.graph import EdgeArray
from graphwright.patterns import Pattern
from graphwright.report import Report
from graphwright.settings import Number, Positive


@dataclass(frozen=True, slots=True, repr=False)
class Drift(Report):
    """The change of the outputs if edges are cut.

    Attributes:
        mass: softmax mass μ of the edges in each query, float64 [N, H, Tq].
        moved: ‖o' - o‖ of each query, by the identity above.
        bound: 2μ·max‖v‖ of each query, over the keys of its head and batch element; gates of weights multiply v.
    """

    mass: npt.NDArray[np.float64]
    moved: npt.NDArray[np.float64]
    bound: npt.NDArray[np.float64]
    HIDDEN: ClassVar = ("mass", "moved", "bound")
    FIGURES: ClassVar = ("largest_mass", "largest_move", "mean_move")

    @property
    def largest_mass(self) -> float:
        """The largest mass that a query loses."""
        return float(self.mass.max(initial=0.0))

    @property
    def largest_move(self) -> float:
        """The largest ‖o' - o‖ of a query."""
        return float(self.moved.max(initial=0.0))

    @property
    def mean_move(self) -> float:
        """The mean ‖o' - o‖ over all queries."""
        return float(self.moved.mean()) if self.moved.size else 0.0

    def _text(self) -> str:
        return (f"a query loses at most {self.largest_mass:.3g} of its mass; its output moves by at most "
                f"{self.largest_move:.3g}, by {self.mean_move:.3g} on average")  # fmt: skip


@checked
def drift(
    q: Any, k: Any, v: Any, pattern: Pattern, edges: Any, scale: Number | None = None, softcap: Positive | None = None,
    gates: Any = None, where: Where = "exp",
) -> Drift:  # fmt: skip
    """Return how the outputs would move if `edges` were cut. The pattern is not changed.

    Costs three runs: over all edges, without `edges`, and over `edges` alone.

    Args:
        edges: edges as `pattern.cut` takes them: a mask, handles, or one handle.
        others: as in `attend`.
    Raises: StaleHandle, and the errors of `attend`.
    """
    q, k, v = (as_tensor(x) for x in (q, k, v))
    held = None if gates is None else as_tensor(gates)
    setup = Setup.of(q, k, v, pattern, scale, softcap, held, where)
    rest = pattern.copy()
    rest.cut(edges)
    removed = pattern.copy()
    removed.cut(EdgeArray(np.asarray(rest.edges())))
    with no_grad():
        old, new, own = (attended(Setup(part, setup.attrs), q, k, v, held) for part in (pattern, rest, removed))
    lse, part = old[1].numpy("float64"), own[1].numpy("float64")
    seen = np.isfinite(lse)
    mass = np.exp(np.where(seen, part - np.where(seen, lse, 0.0), -np.inf))
    gap = new[0].numpy("float64") - own[0].numpy("float64")
    length = np.sqrt((v.numpy("float64") ** 2).sum(-1)).max(-1, initial=0.0)  # [N, Hk]
    most = np.repeat(length, q.shape[1] // v.shape[1], 1)[:, :, None]
    if held is not None and where == "weight":  # the averages are of g·v
        most = most * max(1.0, float(np.abs(held.numpy("float64")).max(initial=0.0)))
    return Drift(mass, mass * np.sqrt((gap**2).sum(-1)), 2 * mass * most)
