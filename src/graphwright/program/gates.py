"""The gates of a program: a view of the node `gates`, its logits and its table, which store all data of the gates.

A gate has a span of the logits, and sites: the nodes that multiply by the gate. An edge gate has one site, a unit gate
one per sum over its axis, a layer gate one per branch. Before a softmax the site is an addition, scores + ln g, which
multiplies a unit's weight by g before normalization. A gate on the edges of an attention pattern has as sites the
attentions that read the pattern; its elements are slots, which the pattern's edges refer to, and some may be free. The
node of its first site is the handle of a gate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from graphwright.array.formulas.gates import COLUMNS, GATE_KINDS, KINDS, MODES, STATES, GateKind
from graphwright.autograd import is_grad_enabled
from graphwright.graph import NodeId
from graphwright.ops import call, get, traits
from graphwright.ops.axes import atoms
from graphwright.program.axes.solve_axes import origin
from graphwright.program.errors import SoftGates, UnknownGate
from graphwright.program.kinds import KINDS as KINDS_OF_NODES
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.autograd import Tensor
    from graphwright.graph import EdgeId
    from graphwright.patterns import Pattern
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.program.op_graph import OpGraph
    from graphwright.program.program import Program

NODE = "gates"
Cost = str | float | Sequence[float]
LOGARITHM = ("clamp", "log")  # by name: the ops by which `gate` takes a logarithm
LEAST = 1e-26
"""Least gate whose logarithm is taken: a softmax weight of it changes no sum, but its gradient is a normal float32."""
LOGITS, TABLE, TEMPERATURE, RUN = (f"{NODE}.{name}" for name in ("logits", "table", "temperature", "run"))
RESERVED = frozenset({LOGITS, TABLE, TEMPERATURE, RUN})
KIND, GROUP, STATE, SLOT, GENERATION, ELEMENT, COST = range(len(COLUMNS))
SOFT, OPEN, CLOSED, FROZEN, FREE = range(len(STATES))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """Options of a new gate.

    Attributes:
        init: initial logits, one number or one per element; by default 2.5 for "hard_concrete", ln 9 for "ste" and
            "bernoulli", 1 for "sigmoid", else 0.
        group: name of a group of gates that share a temperature; by default "hard_concrete" for that kind, else
            "default".
        cost: cost of each open element: "params", the number of param entries removed with it; "one"; or integers.
    """

    init: Any = None
    group: str | None = None
    cost: Cost = "params"


class GateKeywords(TypedDict, total=False):
    """The fields of `GateOptions` as keyword arguments."""

    init: Any
    group: str | None
    cost: Cost


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate of a program.

    Attributes:
        handle: the node of the first site.
        sites: the nodes that multiply a value by the gate, or add the logarithm of the gate, or the attentions.
        port: the number of the result of the node `gates` that has the gate's values.
        offset, length: the span of the gate's logits in the vector of all logits.
        kind: "scale", "sigmoid", "ste", "bernoulli", "concrete", "concrete_st", "hard_concrete" or "choice".
        group: name of the group of gates that share a temperature.
        owner: what is gated: `source -> junction`, the name of an axis, the path of a node, or the key of a pattern.
        over: kind of `owner`: `edges`, `units`, `nodes`, `layers`, `choice` or `pattern`.
        rows: the gate's rows of the table, int64 [length, 7], with the columns `array.formulas.gates.COLUMNS`.
    """

    handle: NodeId
    sites: tuple[NodeId, ...]
    port: int
    offset: int
    length: int
    kind: str
    group: str
    owner: str
    over: str
    rows: np.ndarray

    @property
    def span(self) -> slice:
        """The slice of the gate's logits in the vector of all logits."""
        return slice(self.offset, self.offset + self.length)

    @property
    def facts(self) -> GateKind:
        """What distinguishes the kind of the gate."""
        return GATE_KINDS[self.kind]

    @property
    def generation(self) -> int:
        """Number of removed gates that used the same logits before this gate."""
        return int(self.rows[0, GENERATION])

    @property
    def states(self) -> tuple[str, ...]:
        """The state of each element: `soft`, `open`, `closed` or `frozen`, or `free` for an unused one of a pattern."""
        return tuple(STATES[i] for i in self.rows[:, STATE])

    @property
    def cost(self) -> np.ndarray:
        """Cost of each element while it is open, in the unit of `gate(cost=...)`: int64 [length]."""
        return self.rows[:, COST]

    def names(self) -> list[str]:
        """Return a name for each element, with its index if there are several."""
        return [self.owner] if self.length == 1 else [f"{self.owner}[{i}]" for i in range(self.length)]


class Gates(Mapping[NodeId, Gate]):
    """Maps handle to gate for all gates of one version of a program, in the order of their logits."""

    def __init__(self, program: Program) -> None:
        self.program, self.version = program, program.version
        self._gates: dict[NodeId, Gate] = {}
        self._named: dict[str, tuple[Gate, int]] | None = None
        if not has_gates(program):
            return
        p, node = program, gate_node(program)
        table, groups, offset = p.weights[TABLE].data.to_numpy(), p.attrs(node)["groups"], 0
        readers: dict[int, list[NodeId]] = {}
        for edge in p.out_edges(node):
            readers.setdefault(p.edge_value(edge).port, []).append(p.graph.target(edge))
        for port, length in enumerate(p.attrs(node)["sizes"]):
            rows = table[offset : offset + length]
            if in_use(rows):
                kind, group = KINDS[rows[0, KIND]], groups[rows[0, GROUP]]
                if sites := tuple(site for reader in readers.get(port, ()) for site in _sites(p, reader)):
                    over, owner = _owner(p, sites, kind, length)
                    gate = Gate(sites[0], sites, port, offset, length, kind, group, owner, over, rows.copy())
                    self._gates[sites[0]] = gate
            offset += length

    def __getitem__(self, handle: NodeId) -> Gate:
        if (node := self.program.node(handle)) not in self._gates:
            raise UnknownGate("the node is not the handle of a gate", where=self.program.path(node))
        return self._gates[node]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)

    def at(self, port: int) -> Gate:
        """Return the gate whose values are result number `port` of the node `gates`. Raises: UnknownGate."""
        found = next((g for g in self._gates.values() if g.port == port), None)
        if found is None:
            ports = ", ".join(str(g.port) for g in self._gates.values())
            raise UnknownGate("no gate has this result of the node `gates`", expected=f"one of {ports}", got=port)
        return found

    @property
    def count(self) -> int:
        """Number of elements of all gates together; each element has one logit."""
        return sum(g.length for g in self.values())

    def named(self) -> dict[str, tuple[Gate, int]]:
        """Map each element's name to (gate, index in the gate); repeated names get the suffixes ` #2`, ` #3`, ..."""
        if self._named is None:
            self._named, last = {}, dict[str, int]()  # the last number: a hub may have many edges of one name
            used = ((gate, i, name) for gate in self.values() for i, name in enumerate(gate.names())
                    if gate.rows[i, STATE] != FREE)  # fmt: skip
            for found, i, name in used:
                n, unique = last.get(name, 1), name
                while unique in self._named:
                    n, unique = n + 1, f"{name} #{n + 1}"
                self._named[unique], last[name] = (found, i), n
        return dict(self._named)

    def logits(self) -> np.ndarray:
        """Return a copy of all logits, including those that removed gates left."""
        return self.program.weights[LOGITS].data.to_numpy().copy() if has_gates(self.program) else np.zeros(0)

    @property
    def mode(self) -> str:
        """The mode in which a run computes the gates: `eval`, except inside a `DifferentiableGraph.using` block."""
        run = self.program.weights[RUN].data.to_numpy() if has_gates(self.program) else np.zeros(3, np.int64)
        return MODES[run[2]]

    def __repr__(self) -> str:
        kinds = sorted({g.kind for g in self.values()})
        return f"Gates({len(self)} of {self.program.name!r}, {self.count} elements, {', '.join(kinds) or 'none'})"


def has_gates(p: Program) -> bool:
    """Return True if the program has gates, or logits that removed gates left."""
    return bool(p.of_traits(gates=True))


def gate_node(p: Program) -> NodeId:
    """Return the node that computes the gates of a program that has gates; it is called `gates` unless renamed."""
    return p.of_traits(gates=True)[0]


def gates(p: Program) -> Gates:
    """Return the gates of the program's present state by handle, including the changes of an open edit."""
    if p.history.open is not None:
        return Gates(p)
    known: Any = p.derived.get("gates")
    if not isinstance(known, Gates) or known.program is not p or known.version != p.version:
        known = p.derived["gates"] = Gates(p)
    return known


def _sites(p: Program, reader: NodeId) -> Iterator[NodeId]:
    """Yield the sites that `reader`, a node that reads a gate, reaches through nodes that reshape or cast the gate."""
    if _may_be_site(p, reader):
        yield reader
    elif p.op(reader) not in KINDS_OF_NODES and _passes(p, reader):
        for after in p.consumers(reader):
            yield from _sites(p, after)


def in_use(rows: np.ndarray) -> bool:
    """Return True if one of the rows of a gate is not free."""
    return bool((rows[:, STATE] != FREE).any())


def _may_be_site(p: Program, node: NodeId) -> bool:
    """Return True for a multiplication, an addition and an attention with gates, which alone can be sites of a gate."""
    row = traits(p.op(node))
    return row.multiplies or row.sums or gates_edges(p, node)


def gates_edges(p: OpGraph, node: NodeId) -> bool:
    """Return True if the node is an attention over a pattern whose edges have gates."""
    row = traits(p.op(node))
    return row.attention and row.table is not None and "gates" in p.attrs(node)["optional"]


def gated_operand(p: OpGraph, site: NodeId) -> int:
    """Return the index of the operand of a site that is the gate, or its logarithm."""
    table = traits(p.op(site)).table
    return 1 if table is None else table + 1 + p.attrs(site)["optional"].index("gates")


def _passes(p: Program, node: NodeId) -> bool:
    """Return True if a node may be between a gate and its site: a view, a cast, or an op that computes ln g."""
    row = get(p.op(node))
    return row.view is not None or row.traits.convert or p.op(node) in LOGARITHM


def of_site(p: Program, site: NodeId) -> Value | None:
    """Return the gate values that `site` multiplies by, adds the ln of, or has as gates of edges; None if no site."""
    if not _may_be_site(p, site):
        return None
    value = p.operands(site)[gated_operand(p, site)]
    while p.op(value.node) not in KINDS_OF_NODES and _passes(p, value.node):
        value = p.operands(value.node)[0]
    return value if traits(p.op(value.node)).gates else None


def between(p: Program, site: NodeId) -> list[NodeId]:
    """Return the nodes between the node `gates` and a site, last node first; no other site uses them."""
    found, value = [], p.operands(site)[gated_operand(p, site)]
    while not traits(p.op(value.node)).gates:
        found.append(value.node)
        value = p.operands(value.node)[0]
    return found


def refuse_soft(p: Program, what: str) -> None:
    """Raise SoftGates, listing the gates, if a program has any; `what` is the operation that cannot handle them.

    The fix of gates that cannot be folded is `to="one"`: the default of `discretize` freezes open ones.
    """
    found = gates(p).values()
    names = [gate.owner for gate in found]
    if names:
        fix = 'remove gates by DifferentiableGraph(program).discretize(), or fold them by discretize(0, to="fold")'
        if any(gate.over in ("pattern", "choice") for gate in found):
            fix = 'dg = DifferentiableGraph(program); dg.discretize(..., to="one"), because no weights can absorb them'
        got = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise SoftGates(f"{what} does not support gates", where=p.name, got=got, fix=fix)


def junction_edge(p: Program, site: NodeId) -> EdgeId | None:
    """Return the only edge that leaves a site if it enters a junction; None otherwise."""
    edges = p.out_edges(site)
    return edges[0] if len(edges) == 1 and p.is_junction(p.graph.target(edges[0])) else None


def _owner(p: Program, sites: tuple[NodeId, ...], kind: str, length: int) -> tuple[str, str]:
    """Return the attributes `over` and `owner` of a `Gate` with these sites, kind and number of elements."""
    site = sites[0]
    if (table := traits(p.op(site)).table) is not None:
        return "pattern", p.key(p.operands(site)[table].node)
    plain = p.path(site).removesuffix(".gate")
    if GATE_KINDS[kind].one_of:
        return "choice", p.path(p.graph.target(p.out_edges(site)[0])) if p.out_edges(site) else plain
    if length > 1:
        return "units", plain
    edge = junction_edge(p, site)
    if len(sites) == 1 and edge is not None:
        return "edges", f"{p.path(p.operands(site)[0])} -> {p.path(p.graph.target(edge))}"
    return "nodes" if len(sites) == 1 else "layers", plain


def relative(pattern: Pattern, values: np.ndarray) -> np.ndarray:
    """Return for each slot of a pattern's gates its largest value relative to the largest gate of one of its rows.

    Args:
        values: value of each slot; an edge without a gate has 1.
    """
    slots, queries = np.asarray(pattern.edges["gate"]), pattern.pairs()
    row = queries[:, 0].astype(np.int64) * pattern.blocks[0] + queries[:, 1]
    each = np.where(slots >= 0, values[np.maximum(slots, 0)] if len(values) else 1.0, 1.0)
    most = np.zeros(pattern.planes * pattern.blocks[0])
    np.maximum.at(most, row, each)
    found, gated = np.zeros(len(values)), slots >= 0
    np.maximum.at(found, slots[gated], each[gated] / np.maximum(most[row[gated]], TINY))
    return found


TINY = 1e-300


def axis_of(p: Program, gate: Gate) -> AxisGroup:
    """Return the axis whose units a gate multiplies."""
    axes = p.axes()
    mine = tuple(atoms(axes.solution.dims[Value(gate_node(p), gate.port)][0]))
    found = next((g for g in axes.values() if g.atoms == mine), None)
    if found is None:
        raise UnknownGate("no axis consists of exactly the units of this gate", where=gate.owner,
                          fix="remove it by e.ungate(gate), then gate an axis")  # fmt: skip
    return found


_MERGES = frozenset({"reshape", "flatten"})  # by name: an unflatten splits the gated axis, a permute moves it


def foldable(p: Program, kept: Collection[Value]) -> dict[NodeId, NodeId]:
    """Map nodes that multiply by a unit gate to the linear op whose weight can be multiplied by the gate instead.

    The op must be the only reader of the node, directly or through reshapes. A node is left out if its result is in
    `kept`, the values that the caller needs.
    """
    found = {}
    units = [gate for gate in gates(p).values() if gate.over == "units"] if is_grad_enabled() else []
    for site in (s for gate in units for s in gate.sites if traits(p.op(s)).multiplies):
        value = Value(site)
        while value not in kept and len(edges := p.out_edges(value.node)) == 1:
            reader = p.graph.target(edges[0])
            if traits(p.op(reader)).contracts == "out_in" and p.operands(reader)[0] == value:
                found[site] = reader
            if p.op(reader) not in _MERGES:
                break
            value = Value(reader)
    return found


def folding_pays(p: Program, site: NodeId, product: NodeId, values: Mapping[Value, Tensor]) -> bool:
    """Return True if multiplying a gate into the weight of the linear op `product` saves work.

    The weight [out, in] must be trained, and `out` smaller than the number of vectors of size `in` in the value that
    `site` gates. `values` maps values to tensors.
    """
    weight = origin(p, p.operands(product)[1])
    x, g = (values[v] for v in p.operands(site))
    if weight is None or not p.weights[p.key(weight)].requires_grad:
        return False
    rows, columns = p.weights[p.key(weight)].shape
    lead = _lead(x.shape, columns)
    return lead is not None and len(g.shape) <= len(x.shape) - lead and prod(x.shape[:lead]) > rows


def fold(x: tuple[int, ...], g: Tensor, weight: Tensor) -> Tensor:
    """Return the weight [out, in] with its columns multiplied by gates `g`; `x` is the shape of the gated operand."""
    rows, columns = weight.shape
    lead = _lead(x, columns)
    assert lead is not None
    wide = call("reshape", weight, shape=(rows, *x[lead:]))
    return call("reshape", wide * g, shape=(rows, columns))


def _lead(shape: tuple[int, ...], columns: int) -> int | None:
    """Return n such that the sizes from dimension n on multiply to `columns`; None if there is no such n."""
    lead = next((n for n in range(len(shape) - 1, -1, -1) if prod(shape[n:]) >= columns), None)
    return lead if lead is not None and prod(shape[lead:]) == columns else None
