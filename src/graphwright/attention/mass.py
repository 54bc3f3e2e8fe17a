"""The attention mass of edges: how much of the softmax weights of a query block each of its key blocks receives.

`score` of an edge is an exponential moving average of its mass. It is a measurement, not structure: it is neither in
the journal nor in the hash of a pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.attention.attend import Reduce, Setup
from graphwright.autograd import Tensor, no_grad
from graphwright.errors import UsageError
from graphwright.graph import EdgeArray
from graphwright.models.generation.text import feeds_of
from graphwright.ops import call, traits
from graphwright.patterns import Pattern
from graphwright.patterns import table as words
from graphwright.program.op_graph import Value
from graphwright.program.patterns import reading
from graphwright.program.run import check_feeds, tensors
from graphwright.surgery.matrices import program_of

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.models.model import Model
    from graphwright.program.program import Program

Array = npt.NDArray[Any]
MEMORY = 0.9
"""Weight of the earlier average in a `score`."""


def masses(
    setup: Setup, q: Tensor, k: Tensor, lse: Tensor, gates: Tensor | None = None, reduce: Reduce = "mass"
) -> tuple[EdgeArray, npt.NDArray[np.float32]]:
    """Return all edges of the pattern, and the attention mass of each.

    Args:
        lse: [N, H, Tq], the second result of `attended` for the same operands.
        reduce: "mass": mean over batch, heads of the plane and the queries of the row that see a key, so that the
            masses of a row's edges add up to 1; "max": the largest over these.
    """
    pattern = setup.pattern
    with pattern.reading():
        return _measured(pattern, (q, k, setup.table, lse, *setup.extra(gates)), setup.attrs, reduce)


def _measured(
    pattern: Pattern, operands: Iterable[Tensor], attrs: Mapping[str, Any], reduce: Reduce
) -> tuple[EdgeArray, npt.NDArray[np.float32]]:
    slots, how = int(pattern.table[words.EDGE_SLOTS]), "sum" if reduce == "mass" else "max"
    with no_grad():
        found = call("block_mass", *operands, **attrs, edges=slots, reduce=how)
    edges = pattern.edges()
    return edges, found.numpy()[edges.index]


def collect_mass(
    setup: Setup, q: Tensor, k: Tensor, lse: Tensor, gates: Tensor | None = None, reduce: Reduce = "mass"
) -> None:
    """Measure the masses of all edges and write them into `score`, see `remember`."""
    remember(setup.pattern, *masses(setup, q, k, lse, gates, reduce))


def remember(pattern: Pattern, edges: EdgeArray, found: Array) -> None:
    """Average masses into `score`: 0.9 of it and 0.1 of the mass; the first mass of an edge is its score.

    Edges that another thread cut after the measurement are left out.
    """
    with pattern.writing():
        there = np.isin(np.asarray(edges), np.asarray(pattern.edges()))
        edges, found = EdgeArray(np.asarray(edges)[there]), np.asarray(found)[there]
        column = pattern.graph.edges["score"]  # of the graph: a score is no edit, so the pattern's version stays
        score = column[edges]
        column[edges] = np.where(score == 0, found, MEMORY * score + (1 - MEMORY) * found)


@checked
def collect(
    model: Model | Program, inputs: Mapping[str, Any] | Iterable[Mapping[str, Any]], reduce: Reduce = "mass"
) -> dict[str, Pattern]:
    """Run a model on inputs and write the attention mass of each edge of its patterns into `score`, see `remember`.

    An edge of a pattern that several attentions read gets the mean of their masses.

    Args:
        model: a model or program with attention over patterns, such as `sparsify` makes.
        inputs: arrays by input name, for one run or for several; positions count from 0 in each row, unless given.
        reduce: as in `masses`.
    Returns: the patterns by key. Raises: UsageError if the model has no pattern; FeedError.
    """
    p = program_of(model)
    nodes = [n for n in p.order() if traits(p.op(n)).attention and traits(p.op(n)).table is not None]
    if not nodes:
        raise UsageError("the program has no attention over a pattern", where=p.name,
                         fix='attention.sparsify(model, "layers.*.attn", pattern)')  # fmt: skip
    runs: Any = [inputs] if isinstance(inputs, Mapping) else inputs
    for feeds in runs:
        if np.ndim(feeds.get("ids")) == 2 and "positions" not in feeds:
            feeds = feeds_of(p, **{name: np.asarray(array) for name, array in feeds.items()})
        _collect(p, nodes, feeds, reduce)
    return p.patterns


def _collect(p: Program, nodes: list[NodeId], feeds: Mapping[str, Any], reduce: Reduce) -> None:
    given, dims = check_feeds(p, feeds)
    wanted = [v for n in nodes for v in (*p.operands(n), Value(n, 1))]
    found: dict[str, list[Array]] = {}
    edges: dict[str, EdgeArray] = {}
    with reading(p.patterns.values()):
        with no_grad():
            values = tensors(p, given, dims, list(dict.fromkeys(wanted)))
        for node in nodes:
            operands = p.operands(node)
            q, k, _, table, *extra = (values[v] for v in operands)
            key = p.key(operands[3].node)
            lse = values[Value(node, 1)]
            edges[key], mass = _measured(p.patterns[key], (q, k, table, lse, *extra), p.attrs(node), reduce)
            found.setdefault(key, []).append(mass)
    for key, each in found.items():
        remember(p.patterns[key], edges[key], np.mean(each, axis=0))
