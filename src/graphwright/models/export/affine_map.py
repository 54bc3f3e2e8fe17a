"""Affine maps: spans of ops that together compute matrix · x + bias.

Examples are factors, tensor rings, gates, and heads unfolded into a sum. To get the bias, the ops run in float64 on
zeros; to get the matrix, they run on the rows of the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.graph import NodeId
from graphwright.ops import call, get, traits
from graphwright.program.kinds import CONST, KINDS, PARAM, STORED
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program


@dataclass(frozen=True)
class AffineMap:
    """Ops, in order, that compute `end` as an affine function of `source`; `biased` is True if they may add a bias.

    In `source` and `end`, axes of known size are features, and axes with a named size are tokens.
    """

    p: Program
    source: Value
    end: Value
    nodes: tuple[NodeId, ...]
    biased: bool

    @property
    def kind(self) -> str:
        """`factor` if the ops multiply by several matrices in turn, else `gate`: at most one matrix, with scaling."""
        products = sum(traits(self.p.op(n)).contracts in ("out_in", "in_out") for n in self.nodes)
        return "factor" if products > 1 else "gate"

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix: (features of `end`, features of `source`)."""
        return features(self.p, self.end), features(self.p, self.source)

    def constants(self) -> set[NodeId]:
        """Return the nodes of the constant operands of the ops, and all nodes from which these are computed."""
        read = [v for n in self.nodes for v in self.p.operands(n) if v.node not in self.nodes and v != self.source]
        fixed = constants(self.p)
        return self.p.reachable(v for v in read if v.node in fixed)

    @cached_property
    def matrix(self) -> np.ndarray:
        """The matrix, float64 [out, in]."""
        return self._run(np.eye(self.shape[1])).T - self.bias[:, None]

    @cached_property
    def bias(self) -> np.ndarray:
        """The bias, float64 [out]."""
        return self._run(np.zeros((1, self.shape[1])))[0]

    def _run(self, rows: np.ndarray) -> np.ndarray:
        """Run the ops on rows of features [n, in] and return [n, out]; each row is one sequence of one token."""
        sizes = iter((len(rows), *[1] * 8))
        shape = [d if isinstance(d, int) else next(sizes) for d in self.p.spec(self.source).shape]
        known = {self.source: Tensor(from_numpy(rows.reshape(shape)))}
        for node in self.nodes:
            ins = [known[v] if v in known else Tensor(from_numpy(constant(self.p, v))) for v in self.p.operands(node)]
            known[Value(node)] = _step(self.p, node, ins)
        return known[self.end].numpy().reshape(len(rows), -1)


def features(p: Program, value: Value) -> int:
    """Return the number of entries of a value per token: the product of its axes of known size."""
    return prod(d for d in p.spec(value).shape if isinstance(d, int))


def constants(p: Program) -> frozenset[NodeId]:
    """Return the nodes that are weights or constants, or are computed only from them."""
    found: set[NodeId] = set()
    for node in p.order():
        op, operands = p.op(node), p.operands(node)
        computed = op not in KINDS and bool(operands) and not get(op).traits.update
        if op in (PARAM, CONST) or (computed and all(v.node in found for v in operands)):
            found.add(node)
    return frozenset(found)


def constant(p: Program, value: Value) -> np.ndarray:
    """Compute a constant value in float64 from the stored weights."""
    if p.op(value.node) in STORED:
        array = p.weights.array(p.key(value.node))
        return array.to_numpy("float64" if array.dtype.is_float else None)
    known: dict[Value, Tensor] = {}
    needed = p.reachable([value])
    for node in p.order():
        if node not in needed:
            continue
        if p.op(node) in STORED:
            known[Value(node)] = Tensor(from_numpy(constant(p, Value(node))))
            continue
        made = _step(p, node, [known[v] for v in p.operands(node)])
        known |= {Value(node, i): t for i, t in enumerate(made if isinstance(made, tuple) else (made,))}
    return known[value].numpy()


def _step(p: Program, node: NodeId, ins: list[Any]) -> Any:
    op = p.op(node)
    if traits(op).casts and p.spec(node).dtype.is_float and ins[0].dtype.is_float:
        return ins[0]  # everything is float64 here
    return call(op, *ins, **p.attrs(node))


def find_affine_map(
    p: Program, fixed: Container[NodeId], end: Value, stop: Callable[[Value], Value | None]
) -> AffineMap | None:
    """Return the longest affine map that computes `end` from a single source; None if no such map exists.

    `fixed` is the result of `constants(p)`. The search goes upstream and ends where `stop(value)` returns a value
    instead of None: the returned value is then the source.
    """
    inside: dict[NodeId, None] = {}
    sources: dict[Value, None] = {}
    biased = False
    stack = [end]
    while stack:
        value = stack.pop()
        here = stop(value)
        varying = None if here is not None else _varying(p, fixed, value)
        if varying is None:
            sources[here or value] = None
        elif value.node not in inside:
            inside[value.node] = None
            stack += varying
            row, operands = traits(p.op(value.node)), len(p.operands(value.node))  # does the op add a constant?
            biased |= operands > 2 if row.contracts == "out_in" else row.jointly_linear and operands > len(varying)
    if len(sources) != 1 or not inside:
        return None
    nodes = tuple(sorted(inside, key=p.order_labels.key))
    return AffineMap(p, next(iter(sources)), end, nodes, biased)


def _varying(p: Program, fixed: Container[NodeId], value: Value) -> list[Value] | None:
    """Return the operands of a value's op that are not in `fixed`, the nodes computed from weights and constants only.

    None if there are none, or if the op is not affine in them, mixes tokens, or computes in less than 32 bits.
    """
    node, row = value.node, traits(p.op(value.node))
    if not row.jointly_linear and not row.linear_in:
        return None
    operands = p.operands(node)
    varying = [v for v in operands if v.node not in fixed]
    if not varying or (not row.jointly_linear and len(varying) > 1):
        return None
    if not row.jointly_linear and operands.index(varying[0]) not in row.linear_in:
        return None
    wide = p.spec(value).dtype
    if not wide.is_float or wide.is_low or not _keeps_tokens_apart(p, node, varying[0]):
        return None
    return varying


def _keeps_tokens_apart(p: Program, node: NodeId, first: Value) -> bool:
    """Return True if the op mixes no token axis of `first`, its first non-constant operand, e.g. by a sum."""
    shape, row = p.spec(first).shape, traits(p.op(node))
    if row.mixes:
        given = p.attrs(node)[row.mixes]
        if any(isinstance(shape[axis], str) for axis in (given if isinstance(given, tuple) else (given,))):
            return False
    if row.contracts == "in_out":  # rows of the varying side are tokens
        return first == p.operands(node)[0] and not isinstance(shape[-1], str)
    return True
