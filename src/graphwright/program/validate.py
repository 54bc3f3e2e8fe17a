"""Validation of a whole program, with all mismatches in one report.

Each node is inferred from the stored specs of its operands, so that one defect is one finding and does not propagate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphwright.errors import GraphwrightError
from graphwright.graph.analysis import strongly_connected_components
from graphwright.ops import OPS
from graphwright.program.errors import InvalidProgram
from graphwright.program.infer import check_ports, infer_node
from graphwright.program.kinds import ASSIGN, KINDS, SOURCES, STORED

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program.program import Program


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One defect of a program.

    Attributes:
        kind: `spec`, `weight`, `port`, `cycle`, `order`, `name`, `op` or `output`; of a model also `tied_mismatch`.
        where: path of the node, name of the output, or key in the file.
        what: one sentence.
        axis: the first dimension that differs, for a shape mismatch.
        expected, got: as text.
    """

    kind: str
    where: str
    what: str
    axis: int | None = None
    expected: str | None = None
    got: str | None = None

    def __str__(self) -> str:
        axis = "" if self.axis is None else f", axis {self.axis}"
        known = [f"{name} {value}" for name, value in (("expected", self.expected), ("got", self.got)) if value]
        return f"{self.where}{axis}: {self.what}" + (f" ({', '.join(known)})" if known else "")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set."""
        return {n: getattr(self, n) for n in self.__slots__ if getattr(self, n) is not None}


@dataclass(frozen=True, slots=True)
class AssemblyReport:
    """Result of `program.validate()`; without mismatches the program is valid."""

    mismatches: tuple[Mismatch, ...]
    nodes: int
    edges: int

    @property
    def ok(self) -> bool:
        """True if there is no mismatch."""
        return not self.mismatches

    def check(self, name: str) -> None:
        """Raises: InvalidProgram with all mismatches, if there are any."""
        if self.mismatches:
            raise InvalidProgram(
                "the program is invalid:\n  " + "\n  ".join(map(str, self.mismatches)),
                where=name,
                findings=self.mismatches,
                fix="repair it in program.edit(why, check=False); load(dir, check=False) opens a saved one",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "ok": self.ok,
            "nodes": self.nodes,
            "edges": self.edges,
            "mismatches": [m.to_json() for m in self.mismatches],
        }

    def __str__(self) -> str:
        head = f"{self.nodes} nodes, {self.edges} edges: " + (
            "valid" if self.ok else f"{len(self.mismatches)} mismatches"
        )
        return "\n".join([head, *(f"  {m}" for m in self.mismatches)])


def validate(p: Program) -> AssemblyReport:
    """Infer every node again, and check every weight, port, name and output, and for cycles; report all defects."""
    found = [m for node in p.nodes() for m in _node(p, node)]
    found += [*_weights(p), *_cycles(p), *_outputs(p)]
    return AssemblyReport(tuple(found), len(p), p.graph.edge_count)


def refuse_broken(p: Program) -> None:
    """Raises: InvalidProgram with all mismatches, if the program was left broken."""
    if not p.valid:
        validate(p).check(p.name)
        raise InvalidProgram(
            "an edit left the program broken", where=p.name, fix="with program.edit('repair'): ... validates it again"
        )


def _node(p: Program, node: NodeId) -> Iterator[Mismatch]:
    path, op = p.path(node), p.op(node)
    if p._names.get(path) != node:
        yield Mismatch("name", path, "two nodes have this name")
    if op not in KINDS and op not in OPS:
        yield Mismatch("op", path, "unknown op", got=op)
        return
    broken = [v for v in p.operands(node) if v.port >= len(p.specs(v.node))]
    if broken:
        yield Mismatch(
            "port", path, "reads a result that does not exist", got=f"{p.path(broken[0])}, result {broken[0].port}"
        )
        return
    try:
        check_ports(p, node)
    except GraphwrightError as error:
        yield Mismatch("port", path, error.what, expected=f"an edge at {str(error.where).rpartition(', ')[2]}")
        return
    try:
        fresh = infer_node(p, node)
    except GraphwrightError as error:
        yield Mismatch("spec", path, error.what, None, _text(error.expected), _text(error.got))
        return
    for want, have in zip(fresh, p.specs(node), strict=False):
        if want != have:
            yield Mismatch(
                "spec", path, "its spec is not what its op infers", first_axis(want, have), repr(want), repr(have)
            )
    count = 1 if op in SOURCES else len(fresh)  # the spec of a source is declared
    if count != len(p.specs(node)):
        yield Mismatch("spec", path, "wrong number of results", None, str(count), str(len(p.specs(node))))


def _weights(p: Program) -> Iterator[Mismatch]:
    for kind in sorted(STORED):
        for node in p.of_kind(kind):
            key = p.attrs(node).get("key", "")
            if key not in p.weights:
                yield Mismatch("weight", p.path(node), "no weight has its key", got=repr(key))
            elif p.specs(node) and (have := p.weights[key].spec) != (want := p.spec(node)):
                yield Mismatch(
                    "weight",
                    p.path(node),
                    f"its weight {key} has another spec",
                    first_axis(want, have),
                    repr(want),
                    repr(have),
                )
    assigned: dict[NodeId, str] = {}
    for node in p.of_kind(ASSIGN):
        targets = p.operands(node)[:1]
        if targets and targets[0].node in assigned:
            yield Mismatch("weight", p.path(targets[0].node), "is assigned twice in a step", got=p.path(node))
        assigned.update({v.node: p.path(node) for v in targets})


def _cycles(p: Program) -> Iterator[Mismatch]:
    tangled: set[NodeId] = set()
    for component in strongly_connected_components(p.graph):
        if len(component) > 1 or p.graph.has_edge(*component, *component):
            tangled |= set(component)
            names = [p.path(n) for n in _cycle(p, component)]
            shown = [*names[:10], "..."] if len(names) > 10 else names
            yield Mismatch("cycle", names[0], "the nodes form a cycle", got=" -> ".join([*shown, names[0]]))
    key = p.order_labels.key
    for edge in p.graph.edges():
        src, dst = p.graph.endpoints(edge)
        if src not in tangled and key(src) >= key(dst):
            yield Mismatch("order", p.path(edge), "the order has the source after the target")


def _cycle(p: Program, component: Sequence[NodeId]) -> list[NodeId]:
    """Return a shortest cycle of a component, through the end of a back edge or its oldest node."""
    inside = set(component)
    ends = [dst for src, dst in map(p.graph.endpoints, sorted(p.back_edges)) if src in inside and dst in inside]
    start = ends[0] if ends else min(inside, key=p.seq)
    came: dict[NodeId, NodeId] = {}
    queue = [start]
    for before in queue:
        fresh = [n for n in p.graph.successors(before) if n in inside and n not in came]
        came.update(dict.fromkeys(fresh, before))
        queue += fresh
    path = [start]
    while (node := came[path[-1]]) != start:
        path.append(node)
    return [start, *path[:0:-1]]


def _outputs(p: Program) -> Iterator[Mismatch]:
    for name, value in zip(p.output_names(), p.outputs(), strict=True):
        if value.node not in p.graph or not 0 <= value.port < len(p.specs(value.node)):
            yield Mismatch("output", name, "refers to a result that does not exist", got=repr(value))


def first_axis(want: Spec, have: Spec) -> int | None:
    """Return the first dimension in which two specs of equal rank differ."""
    if len(want.shape) != len(have.shape):
        return None
    return next((i for i, (a, b) in enumerate(zip(want.shape, have.shape, strict=True)) if a != b), None)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
