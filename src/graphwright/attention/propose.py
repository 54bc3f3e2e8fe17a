"""Absent edges ranked by how much the loss would fall: the exact gradient of their gate at 0, without inserting any.

dL/dg of an absent edge is Σ over its pairs of e^(s - LSE)·(dO·v - dO·o): it needs only q, k, v, the forward's results
and the gradient dO of the output, and costs O(candidates · block² · d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.array import from_numpy
from graphwright.attention.attend import Setup, Where, attended
from graphwright.autograd import Tensor, as_tensor, no_grad
from graphwright.errors import ShapeError, UsageError
from graphwright.graph import EdgeArray
from graphwright.ops import call
from graphwright.patterns import BlockRange, Pattern, masks
from graphwright.patterns import table as words
from graphwright.patterns.rules import Pairs, Position
from graphwright.report import Report
from graphwright.settings import AtLeastOne, Number, Positive

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, repr=False)
class Candidates(Report):
    """Absent edges, the most useful first.

    Attributes:
        pairs: int32 [n, 3]: plane, query block and key block.
        gradients: d loss / d gate of each at gate 0, float64 [n], ascending; negative: the edge lowers the loss.
        considered: number of absent edges that were ranked.
    """

    pairs: npt.NDArray[np.int32]
    gradients: npt.NDArray[np.float64]
    considered: int
    HIDDEN: ClassVar = ("pairs", "gradients")

    def __len__(self) -> int:
        return len(self.pairs)

    def apply(self, pattern: Pattern) -> EdgeArray:
        """Connect the edges in one entry of the journal; return them. `pattern.apply(candidates)` calls it.

        Raises: EdgeExists if one was connected meanwhile; then nothing changes.
        """
        with pattern.transaction(f"connect {len(self)} proposed edges", "gate"):
            plane, query, key = self.pairs.T
            return pattern.connect_many(query, key, plane)

    def _text(self) -> str:
        if not len(self):
            return f"no edge proposed, {self.considered} considered"
        (plane, query, key), best = self.pairs[0], self.gradients[0]
        return (f"{len(self)} of {self.considered} absent edges; the first is {query} <- {key} in plane {plane}, "
                f"gradient {best:.3g}")  # fmt: skip


@checked
def propose(
    pattern: Pattern, q: Any, k: Any, v: Any, grad_out: Any, candidates: Any = "all",
    n: AtLeastOne = 64, *, scale: Number | None = None, softcap: Positive | None = None, gates: Any = None,
    where: Where = "exp",
) -> Candidates:  # fmt: skip
    """Rank absent edges by the exact gradient of the loss with respect to their gate at 0. Nothing is inserted.

    Args:
        q, k, v: as in `attend`.
        grad_out: gradient of the loss with respect to the result of `attend`, [N, H, Tq, dv].
        candidates: "all": all that `connect` accepts; "window": those with pairs that the pattern's base rule allows;
            or integers [m, 3] (plane, query block, key block), of which those already connected are left out.
        n: the largest number of edges to return.
        others: as in `attend`.
    Returns: the edges with the smallest gradients; ties by plane, query block and key block.
    Raises: the errors of `attend`; BlockRange and ShapeError for invalid candidates.
    """
    q, k, v, slope = (as_tensor(x) for x in (q, k, v, grad_out))
    held = None if gates is None else as_tensor(gates)
    setup = Setup.of(q, k, v, pattern, scale, softcap, held, where)
    if slope.shape != (*q.shape[:3], v.shape[3]):
        raise ShapeError("grad_out is not the gradient of the output", expected=(*q.shape[:3], v.shape[3]),
                         got=slope.shape)  # fmt: skip
    with no_grad():
        out, lse = attended(setup, q, k, v, held)
    return ranked(setup, (q, k, v, out, lse, slope.to(q.dtype)), held, candidates, n)


def ranked(
    setup: Setup, operands: tuple[Tensor, ...], gates: Tensor | None, candidates: Any, n: int,
    banned: npt.NDArray[np.int32] | None = None,
) -> Candidates:  # fmt: skip
    """Rank candidates, given q, k, v, out, lse and the gradient of out; those in `banned` [m, 3] are left out."""
    pattern = setup.pattern
    with pattern.reading(), no_grad():
        pairs = _absent(pattern, candidates)
        if banned is not None and len(banned):
            pairs = pairs[~np.isin(_keys(pattern, pairs), _keys(pattern, banned))]
        slopes = np.empty(len(pairs))
        ruled, table = _ruled(pattern, pairs), pattern.table
        for chosen, numbers in ((ruled, table), (~ruled, _causal(table))):
            if chosen.any():
                given = (*operands, from_numpy(pairs[chosen]), as_tensor(numbers))
                found = call("block_gate_gradient", *given, *setup.extra(gates), **setup.attrs)
                slopes[chosen] = found.numpy("float64")
    first = np.lexsort((*pairs.T[::-1], slopes))[:n]
    return Candidates(pairs[first], slopes[first], len(pairs))


def _ruled(pattern: Pattern, pairs: Array) -> npt.NDArray[np.bool_]:
    """Return in which pairs of blocks the base rule allows a pair of tokens; elsewhere an edge has all causal ones."""
    q, k = pairs[:, 1].astype(np.int64), pairs[:, 2].astype(np.int64)
    there = masks.of_rule(pattern.base, pattern.base, pattern.frame, Pairs(q, k))
    width = pattern.blocks[1]
    return np.isin(q * width + k, there.q * width + there.k)


def _causal(table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the words of the same pattern without window and segments, whose rule is causality alone."""
    found = table.copy()
    found[[words.WINDOW, words.SYMMETRIC, words.SEG_Q, words.SEG_K]] = 0
    return found


def _keys(pattern: Pattern, pairs: Array) -> npt.NDArray[np.int64]:
    rows, columns = pattern.blocks
    plane, query, key = pairs.astype(np.int64).T
    return (plane * rows + query) * columns + key


def _absent(pattern: Pattern, candidates: Any) -> npt.NDArray[np.int32]:
    """Return the unconnected candidates, sorted, int32 [m, 3]. Raises: BlockRange, ShapeError, UsageError."""
    (rows, columns), planes = pattern.blocks, pattern.planes
    if isinstance(candidates, str):
        if candidates not in ("all", "window"):
            raise UsageError("unknown candidates", expected='"all", "window" or integers [m, 3]', got=candidates)
        rule = pattern.base if candidates == "window" else Position(pattern.causal)
        found = masks.of_rule(rule, pattern.base, pattern.frame, masks.candidates(rule, pattern.frame, np.arange(rows)))
        keys = (np.arange(planes)[:, None] * (rows * columns) + found.q * columns + found.k).reshape(-1)
    else:
        keys = _keys(pattern, _checked(candidates, (planes, rows, columns)))
    keys = np.setdiff1d(keys, _keys(pattern, pattern.pairs()))
    return np.stack([keys // (rows * columns), keys // columns % rows, keys % columns], axis=1).astype(np.int32)


def _checked(candidates: Any, limits: tuple[int, int, int]) -> Array:
    pairs = np.asarray(candidates)
    if pairs.ndim != 2 or pairs.shape[1] != 3 or (pairs.size and pairs.dtype.kind not in "iu"):
        raise ShapeError("the candidates are not pairs of blocks", expected="integers [m, 3]: plane, query, key",
                         got=f"{pairs.dtype} {pairs.shape}")  # fmt: skip
    for side, values, limit in zip(("plane", "query", "key"), pairs.T, limits, strict=True):
        if ((values < 0) | (values >= limit)).any():
            raise BlockRange(side, int(values[(values < 0) | (values >= limit)][0]), limit)
    return pairs
