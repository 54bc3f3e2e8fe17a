"""A stretch: ops between two values that are an affine map of the features, whatever it was written as.

Factors, rings of cores, gates, heads unfolded into a sum: as a matrix and a bias they are found by running the stretch
on the rows of the identity, in float64.
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
from graphwright.ops import call, get, traits
from graphwright.program import Value
from graphwright.program.kinds import CONST, KINDS, PARAM, STORED

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program


@dataclass(frozen=True)
class Stretch:
    """The ops from `source` (left out) to `end`.

    Attributes:
        p: whose.
        source, end: values with the features on their sized axes and tokens on their named ones.
        nodes: the ops in between, in order.
        biased: whether zero need not stay zero.
    """

    p: Program
    source: Value
    end: Value
    nodes: tuple[NodeId, ...]
    biased: bool

    @property
    def kind(self) -> str:
        """`factor` for products of several matrices, `gate` where one is only scaled."""
        products = sum(traits(self.p.op(n)).contracts in ("out_in", "in_out") for n in self.nodes)
        return "factor" if products > 1 else "gate"

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix: features of the end, features of the source."""
        return features(self.p, self.end), features(self.p, self.source)

    def constants(self) -> set[NodeId]:
        """Weights that the ops read, and what those are computed from."""
        read = [v for n in self.nodes for v in self.p.operands(n) if v.node not in self.nodes and v != self.source]
        fixed = constants(self.p)
        return self.p.reachable(v for v in read if v.node in fixed)

    @cached_property
    def matrix(self) -> np.ndarray:
        """float64 [out, in]."""
        return self._run(np.eye(self.shape[1])).T - self.bias[:, None]

    @cached_property
    def bias(self) -> np.ndarray:
        """float64 [out]."""
        return self._run(np.zeros((1, self.shape[1])))[0]

    def _run(self, rows: np.ndarray) -> np.ndarray:
        """Rows of features [n, in] through the ops: [n, out]. Rows lie where the batch does, one token each."""
        sizes = iter((len(rows), *[1] * 8))
        shape = [d if isinstance(d, int) else next(sizes) for d in self.p.spec(self.source).shape]
        known = {self.source: Tensor(from_numpy(rows.reshape(shape)))}
        for node in self.nodes:
            ins = [known[v] if v in known else Tensor(from_numpy(constant(self.p, v))) for v in self.p.operands(node)]
            known[Value(node)] = _step(self.p, node, ins)
        return known[self.end].numpy().reshape(len(rows), -1)


def features(p: Program, value: Value) -> int:
    """Entries per token."""
    return prod(d for d in p.spec(value).shape if isinstance(d, int))


def constants(p: Program) -> frozenset[NodeId]:
    """Weights, constants, and what is computed from them alone."""
    found: set[NodeId] = set()
    for node in p.order():
        op, operands = p.op(node), p.operands(node)
        computed = op not in KINDS and bool(operands) and not get(op).traits.update
        if op in (PARAM, CONST) or (computed and all(v.node in found for v in operands)):
            found.add(node)
    return frozenset(found)


def constant(p: Program, value: Value) -> np.ndarray:
    """What a constant value is, computed in float64 from the weights as they are stored."""
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
        return ins[0]  # all is float64 here
    return call(op, *ins, **p.attrs(node))


def find_stretch(
    p: Program, fixed: Container[NodeId], end: Value, stop: Callable[[Value], Value | None]
) -> Stretch | None:
    """The longest stretch that ends in a value and has one source; None if there is none.

    Args:
        fixed: the program's `constants`.
        end: where to walk back from.
        stop: gives the value that counts as the source where the walk must not go on, else None.
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
            biased |= _adds(p, value.node, len(varying))
    if len(sources) != 1 or not inside:
        return None
    nodes = tuple(sorted(inside, key=p.order_labels.key))
    return Stretch(p, next(iter(sources)), end, nodes, biased)


def _varying(p: Program, fixed: Container[NodeId], value: Value) -> list[Value] | None:
    """Operands that vary, if the op is affine in them and leaves tokens apart."""
    node, op = value.node, p.op(value.node)
    row = traits(op)
    if not row.jointly_linear and not row.linear_in:
        return None
    operands = p.operands(node)
    varying = [v for v in operands if v.node not in fixed]
    if not varying or (not row.jointly_linear and len(varying) > 1):
        return None
    if not row.jointly_linear and operands.index(varying[0]) not in row.linear_in:
        return None
    wide = p.spec(value).dtype
    if not wide.is_float or wide.is_low or not _apart(p, node, varying[0]):
        return None
    return varying


def _apart(p: Program, node: NodeId, first: Value) -> bool:
    """True if the op mixes no tokens: the axes that it works along have known sizes."""
    shape = p.spec(first).shape
    if mixes := traits(p.op(node)).mixes:
        given = p.attrs(node)[mixes]
        if any(isinstance(shape[axis], str) for axis in (given if isinstance(given, tuple) else (given,))):
            return False
    if traits(p.op(node)).contracts == "in_out":  # rows of the varying side are tokens
        return first == p.operands(node)[0] and not isinstance(shape[-1], str)
    return True


def _adds(p: Program, node: NodeId, varying: int) -> bool:
    operands = len(p.operands(node))
    row = traits(p.op(node))
    return operands > 2 if row.contracts == "out_in" else row.jointly_linear and operands > varying
