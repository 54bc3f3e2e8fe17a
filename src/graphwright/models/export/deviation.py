"""What of a program is not as its family's template has it: the reason why a rung can or cannot carry it.

Nodes are matched by path, and those that were renamed by what they are: op, attributes and matched operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphwright.array import dtype
from graphwright.autograd import Parameter
from graphwright.graph import NodeId
from graphwright.models.export.affine_map import Stretch
from graphwright.models.export.template_reader import read
from graphwright.models.export.uniform import AXES, fits
from graphwright.ops import traits
from graphwright.program import Builder
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import CONST, STORED
from graphwright.program.weights import hollow_array

if TYPE_CHECKING:
    from graphwright.models.export.template_reader import Reading
    from graphwright.models.export.uniform import Fits
    from graphwright.models.model import Model
    from graphwright.program import Program


KINDS = ("size", "removed", "added", "rewired", "gate", "factor", "dtype", "attrs", "op")
_UNIFORM, _DENSE, _CODE = 2, 3, 5


@dataclass(frozen=True, slots=True)
class Deviation:
    """One difference from the template.

    Attributes:
        path: of the node.
        kind: one of `KINDS`: a weight of another size or dtype, a node removed or added, one that reads other values;
            a node that scales a branch (`gate`) or stands with others for one matrix (`factor`); other attributes, or
            another op.
        detail: in words.
        rungs: those that can carry it; a rung can carry a program if it can carry all its deviations.
        axis: what the units are called, where a size differs.
        field: of the config, that counts them.
    """

    path: str
    kind: str
    detail: str
    rungs: tuple[int, ...] = (_CODE,)
    axis: str = ""
    field: str = ""


def template(model: Model) -> Program:
    """The program that the family's template gives for the model's config; its weights have specs and no bytes."""
    b = Builder("template")
    params = {}
    program = model.program
    stored = {program.key(n): program.spec(n).dtype for n in program.params()}
    shapes = {path: shape for path, _, shape, _ in model.arch.weights(model.dims)}
    for path, key in model.keys.items():
        array = hollow_array(shapes[path], stored.get(key, dtype("float32")))
        params[path] = b.param(path, Parameter(array, True, key), key=key)
    model.arch.build(b, model.dims, params, dtype(model.compute))
    return b.build()


def deviations(model: Model) -> list[Deviation]:
    """Every node that differs from the template, by path, with the rungs that can carry it; none for one renamed."""
    reading = read(model, template(model))
    return classified(model, reading, fits(reading, model.config))


def classified(model: Model, reading: Reading, fitted: Fits) -> list[Deviation]:
    """Deviations of a program from the template that it was read by."""
    sizes = _Carriers(model, reading, fitted)
    return sorted(
        (sizes.carried(d, node, other) for d, node, other in _deviations(model.program, reading.template)),
        key=lambda d: (d.path, d.kind),
    )


class _Carriers:
    """Which rungs can carry a deviation: 3 what was read as the template's, 2 if no other layer forbids its size."""

    def __init__(self, model: Model, reading: Reading, fitted: Fits) -> None:
        self.reading, self.arch, self.dims = reading, model.arch, model.dims
        self.explained = reading.explained()
        self.stretches = {
            n: s.kind for part in reading.read_parts() for s in part.stretches for n in (*s.nodes, *s.constants())
        }
        self.terms = {path: terms for path, _, _, terms in model.arch.weights(model.dims)}
        self.uneven = fitted.uniform if isinstance(fitted.uniform, list) else []
        self.misfits = {i for i, _ in fitted.misfits}
        self.eps = isinstance(fitted.dense, str)

    def carried(self, d: Deviation, node: NodeId | None, other: NodeId | None) -> Deviation:
        """The deviation of a node of the program, of the template, or of both, with its rungs."""
        slot = self._slot(other) if other is not None else self.explained.get(node) if node is not None else None
        read = slot not in self.reading.lost if node is None else node in self.explained
        kind = self.stretches.get(node, d.kind) if node is not None else d.kind
        kind = "factor" if node is None and slot is not None and self._stretched(slot, other) else kind
        name, axis, field = self._axis(other) if kind == "size" else ("", "", "")
        rungs = [_CODE]
        if read and kind not in ("op", "dtype"):
            if slot not in self.misfits and not (self.eps and name == "hidden"):
                rungs.append(_DENSE)
            if kind not in ("gate", "factor") and not self._forbidden(slot, axis):
                rungs.append(_UNIFORM)
        detail = f"{d.detail} ({axis}, {field})" if field else d.detail
        return replace(d, kind=kind, rungs=tuple(sorted(rungs)), axis=axis, field=field, detail=detail)

    def _slot(self, other: NodeId) -> int | None:
        t = self.reading.template
        path = t.path(other)
        for i, slot in enumerate(self.reading.slots):
            if other == slot.junction.node or path.startswith(f"{slot.name}."):
                return i
        return None

    def _stretched(self, slot: int, other: NodeId | None) -> bool:
        """True for a weight of the template that is a stretch here."""
        part, t = self.reading.parts[slot], self.reading.template
        return part is not None and other is not None and isinstance(part.weights.get(t.path(other)), Stretch)

    def _forbidden(self, slot: int | None, axis: str) -> bool:
        return any(r.slot is None or (r.slot == slot and not axis) or (axis and r.axis == axis) for r in self.uneven)

    def _axis(self, other: NodeId | None) -> tuple[str, str, str]:
        """Dimension, units and config field of a weight's size, or of a split into heads."""
        t, path = self.reading.template, self.reading.template.path(other) if other is not None else ""
        slot = self._slot(other) if other is not None else None
        here = self.reading.sizes.get(slot if slot is not None else -1, {})
        base = path.removesuffix("_split") + ".weight" if path.endswith("_split") else path
        names = [n for term in self.terms.get(base, ()) for n in term.split("*")]
        name = next((n for n in names if here.get(n, getattr(self.dims, n)) != getattr(self.dims, n)), "")
        assert t is not None
        return name, AXES.get(name, ""), self.arch.fields.get(name, "")


Found = tuple[Deviation, NodeId | None, NodeId | None]
"""A deviation with its node of the program and of the template."""


def _deviations(ours: Program, theirs: Program) -> Iterator[Found]:
    pairs = _matched(ours, theirs)
    mine = {node: other for other, node in pairs.items()}
    alive = ours.reachable(ours.outputs())
    for n in theirs.nodes():
        if n not in pairs:
            yield Deviation(theirs.path(n), "removed", f"{theirs.op(n)} is gone"), None, n
    for node in ours.nodes():
        if node not in mine:
            if node in alive or ours.graph.out_degree(node):
                yield Deviation(ours.path(node), "added", f"{ours.op(node)} is not in the family's block"), node, None
            continue
        for d in _differences(ours, node, theirs, mine[node], mine):
            yield d, node, mine[node]
    results = [(n, mine.get(v.node), v.port) for n, v in zip(ours.output_names(), ours.outputs(), strict=True)]
    wanted = [(n, v.node, v.port) for n, v in zip(theirs.output_names(), theirs.outputs(), strict=True)]
    if results != wanted:
        d = Deviation("outputs", "rewired", "another node is the output")
        yield d, ours.outputs()[0].node, theirs.outputs()[0].node


def _matched(ours: Program, theirs: Program) -> dict[NodeId, NodeId]:
    """Node of the template -> node of the program: by path or key, else by what it is, along the order of reading."""
    by_path = {ours.path(n): n for n in ours.nodes()}
    by_key = {ours.key(n): n for kind in STORED for n in ours.of_kind(kind)}
    pairs: dict[NodeId, NodeId] = {}
    known = {theirs.path(n) for n in theirs.nodes()}
    for other in theirs.order():
        node = by_key.get(theirs.key(other)) if theirs.op(other) in STORED else by_path.get(theirs.path(other))
        if node is None:
            reads = [pairs.get(v.node) for v in theirs.operands(other)]
            near = ours.consumers(reads[0]) if reads and reads[0] is not None else ()
            strangers = (n for n in near if ours.path(n) not in known and n not in pairs.values())
            node = next((n for n in strangers if _same(ours, n, theirs, other, pairs)), None)
        if node is not None:
            pairs[other] = node
    return pairs


def _same(ours: Program, node: NodeId, theirs: Program, other: NodeId, pairs: dict[NodeId, NodeId]) -> bool:
    reads = [(v.node, v.port) for v in ours.operands(node)]
    wanted = [(pairs.get(v.node), v.port) for v in theirs.operands(other)]
    return ours.op(node) == theirs.op(other) and ours.attrs(node) == theirs.attrs(other) and reads == wanted


def _differences(
    ours: Program, node: NodeId, theirs: Program, other: NodeId, mine: dict[NodeId, NodeId]
) -> Iterator[Deviation]:
    path = ours.path(node)
    if ours.op(node) != theirs.op(other):
        yield Deviation(path, "op", f"{ours.op(node)} instead of {theirs.op(other)}")
    elif ours.op(node) in STORED:
        here, there = ours.spec(node), theirs.spec(other)
        if here.shape != there.shape:
            yield Deviation(path, "size", f"{here} instead of {there}")
        elif here != there:
            yield Deviation(path, "dtype", f"{here} instead of {there}")
        elif ours.op(node) == CONST and ours.weights.digest(ours.key(node)) != theirs.weights.digest(theirs.key(other)):
            yield Deviation(path, "attrs", "other numbers than the config gives")
    else:
        here, there = encode_attrs(ours.attrs(node)), encode_attrs(theirs.attrs(other))
        split = traits(ours.op(node)).splits_axis and here.keys() == there.keys() and here["axis"] == there["axis"]
        changed = [f"{k} {here.get(k)} instead of {there.get(k)}" for k in there | here if here.get(k) != there.get(k)]
        if changed:
            yield Deviation(path, "size" if split else "attrs", ", ".join(changed))
    reads = [(mine.get(v.node), v.port) for v in ours.operands(node)]
    if reads != [(v.node, v.port) for v in theirs.operands(other)]:
        here, there = (", ".join(p.path(v) for v in p.operands(n)) for p, n in ((ours, node), (theirs, other)))
        yield Deviation(path, "rewired", f"reads {here or 'nothing'} instead of {there}")
