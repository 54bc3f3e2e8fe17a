"""A program mirrored with its backward, kept up to date: an edit rebuilds what it touched and no more.

Forward nodes are mirrored under their names. Beside each differentiated one stands a `Call`: what its vjp was given and
what it wrote. After an edit the calls of nodes that changed, of what they read, and of whose operands want a gradient
now, are looked at from the last to the first; where only an incoming gradient is another value, its readers are led to
the new one and nothing is written anew. So are sums: what they give stays, and nothing before them is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from graphwright.autograd import pull_back, scoped
from graphwright.ops import OPS, get
from graphwright.program.derived.mirror import Mirror
from graphwright.program.kinds import ASSIGN, SOURCES
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.array import DType, Spec
    from graphwright.autograd import Tensor
    from graphwright.graph import NodeId
    from graphwright.program.program import Program


class Call(NamedTuple):
    """One use of a vjp: gradients of the results, which operands wanted one, theirs, and the nodes it wrote."""

    grads: tuple[Value | None, ...]
    needs: tuple[bool, ...]
    results: tuple[Value | None, ...]
    made: tuple[NodeId, ...]


class Sum(NamedTuple):
    """Gradients that arrive at a value, in order, their sum, and the nodes that add them up, named after `path`."""

    path: str
    parts: tuple[Value, ...]
    total: Value
    made: tuple[NodeId, ...]


class Backward(Mirror):
    """Forward and backward of `source`.

    Args:
        wanted: values of the source whose gradients are wanted.
        source, sizes, name, low: see `Mirror`.
    """

    def __init__(
        self, source: Program, wanted: Iterable[Value], sizes: Mapping[str, int], name: str, low: DType | None = None
    ) -> None:
        super().__init__(source, sizes, name, low)
        self.wanted = dict.fromkeys(wanted)
        self._leads: dict[NodeId, bool] = {}
        self._calls: dict[NodeId, Call] = {}
        self._sums: dict[NodeId, dict[int, Sum]] = {}  # by node and port

    def _seeds_at(self, value: Value) -> Iterable[Value]:
        """Gradients that arrive at a value from outside, before those of its readers."""
        raise NotImplementedError

    def _summed_in(self, value: Value) -> DType:
        """The dtype in which the gradients of a value are summed."""
        return self.program.spec(self._twin(value)).dtype

    # -- forward -----------------------------------------------------------------------------------------------------
    def _dropped(self, node: NodeId) -> None:
        super()._dropped(node)
        self._leads.pop(node, None)
        made = self._calls.pop(node, None)
        self._throw(made.made if made is not None else ())
        for known in self._sums.pop(node, {}).values():
            self._throw(known.made)

    def _noticed(self, node: NodeId, op: str) -> bool:
        leads = self._leading(node, op)
        turned = self._leads.get(node) != leads
        self._leads[node] = leads
        return turned

    def _leading(self, node: NodeId, op: str) -> bool:
        """True if an operand of the node wants a gradient and the op passes one on."""
        if op in SOURCES or op == ASSIGN:
            return False
        row = OPS[op]
        return (row.vjp is not None or row.traits.opaque) and any(self._wants(v) for v in self._reads[node])

    def _wants(self, value: Value) -> bool:
        """True if a gradient of this value leads to a wanted one."""
        if value in self.wanted:
            return True
        return self._leads[value.node] and self.source.specs(value.node)[value.port].dtype.is_float

    # -- backward ----------------------------------------------------------------------------------------------------
    def _differentiate(self, touched: set[NodeId]) -> None:
        """Look at calls from the last forward node to the first."""
        key = self.source.order_labels.key
        heap: list[tuple[tuple[int, int], NodeId]] = []
        waiting: set[NodeId] = set()

        def look(node: NodeId) -> None:
            if node not in waiting and node in self._reads:
                waiting.add(node)
                label, created = key(node)
                heappush(heap, ((-label, -created), node))

        anew = set(touched)
        for node in touched | {v.node for v in self._ends}:
            look(node)
        self._ends.clear()
        while heap:
            node = heappop(heap)[1]
            waiting.discard(node)
            self.looked_at += 1
            grads = tuple(self._arrived(node, port) for port in range(len(self.source.specs(node))))
            old = self._calls.get(node)
            new = self._call(node, grads, old, node in anew)
            anew.discard(node)
            if new is None:
                self._calls.pop(node, None)
            else:
                self._calls[node] = new
            before = old.results if old is not None else (None,) * len(self._reads[node])
            after = new.results if new is not None else (None,) * len(self._reads[node])
            if before != after:
                for value in self._reads[node]:
                    look(value.node)

    def _arrived(self, node: NodeId, port: int) -> Value | None:
        """The sum of what readers and roots send to one result of a node: the last reader's first."""
        source, here = self.source, Value(node, port)
        if not self._wants(here):
            return self._total(here, ())
        key, parts = source.order_labels.key, list(self._seeds_at(here))
        found = []
        for reader in source.graph.successors(node):
            sent = self._calls.get(reader)
            if sent is not None:
                label, created = key(reader)
                found += [
                    (-label, -created, place, g)
                    for place, (v, g) in enumerate(zip(self._reads[reader], sent.results, strict=True))
                    if v == here and g is not None
                ]
        parts += [g for *_, g in sorted(set(found))]
        return self._total(here, tuple(parts))

    def _sum(self, at: Value) -> Sum | None:
        """What arrives at a value, if anything does."""
        sums = self._sums.get(at.node)
        return None if sums is None else sums.get(at.port)

    def _total(self, at: Value, parts: tuple[Value, ...]) -> Value | None:
        known, path, kind = self._sum(at), self.source.path(at.node), self._summed_in(at)
        if known is not None and known.path == path and self._spec_of(known.total).dtype is kind:
            if known.parts == parts:
                return known.total
            if self._same_form(known.parts, parts):
                swap = self._lead(known.made, known.parts, parts)
                led = Sum(path, parts, swap.get(known.total, known.total), known.made)
                self._sums[at.node][at.port] = led
                return led.total
        if known is not None:
            self._throw(known.made)
            del self._sums[at.node][at.port]
        if not parts:
            return None
        self._recorder.made = []
        with scoped("grad", path):
            total = self._tensor(parts[0]).to(kind)
            for part in parts[1:]:
                total = total + self._tensor(part).to(kind)
        made = Sum(path, parts, self._recorder.value_of(total), tuple(self._recorder.made))
        self._sums.setdefault(at.node, {})[at.port] = made
        return made.total

    def _call(self, node: NodeId, grads: tuple[Value | None, ...], old: Call | None, anew: bool) -> Call | None:
        """The vjp of a node for these gradients: as it was, led to other ones, or written anew."""
        needs = tuple(self._wants(v) for v in self._reads[node])
        if self.source.op(node) in SOURCES or not any(needs) or all(g is None for g in grads):
            if old is not None:
                self._throw(old.made)
            return None
        if old is not None and not anew and old.needs == needs:
            if old.grads == grads:
                return old
            if self._same_form(old.grads, grads):
                swap = self._lead(old.made, old.grads, grads)
                return Call(grads, needs, tuple(None if g is None else swap.get(g, g) for g in old.results), old.made)
        if old is not None:
            self._throw(old.made)
        p, twin = self.program, self._twins[node]
        row = get(p.op(twin))
        operands = p.operands(twin)
        ins: list[Tensor | Spec] = [
            self._tensor(v) if i in row.saves.inputs else p.specs(v.node)[v.port] for i, v in enumerate(operands)
        ]
        outs: list[Tensor | Spec] = [
            self._tensor(Value(twin, port)) if port in row.saves.outputs else spec
            for port, spec in enumerate(p.specs(twin))
        ]
        in_specs = [p.specs(v.node)[v.port] for v in operands]
        given = [None if g is None else self._tensor(g) for g in grads]
        self._recorder.made = []
        with scoped("grad", self.source.path(node)):
            found = pull_back(row, given, ins, outs, p.attrs(twin), needs, in_specs)
            if node in self._casts:  # back through the casts that autocast put there
                kinds = [self._tensor(self._twin(v)).dtype for v in self._reads[node]]
                found = [g if g is None else g.to(kind) for g, kind in zip(found, kinds, strict=True)]
        results = tuple(None if g is None else self._recorder.value_of(g) for g in found)
        return Call(grads, needs, results, tuple(self._recorder.made))

    def _same_form(self, before: Sequence[Value | None], after: Sequence[Value | None]) -> bool:
        """True if gradients can take each other's place one for one."""
        if len(before) != len(after):
            return False
        p, pairs = self.program, list(zip(before, after, strict=True))
        if any((a is None) != (b is None) for a, b in pairs):
            return False
        kept = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len({a for a, _ in kept}) != len(kept) or any(a.node not in p.graph for a, _ in kept):
            return False
        return all(self._spec_of(a) == self._spec_of(b) for a, b in kept)

    def _spec_of(self, value: Value) -> Spec:
        return self.program.specs(value.node)[value.port]

    def _lead(
        self, made: Sequence[NodeId], before: Sequence[Value | None], after: Sequence[Value | None]
    ) -> dict[Value, Value]:
        """Let nodes that read gradients read others in their place; returns which stands for which."""
        p = self.program
        swap = {a: b for a, b in zip(before, after, strict=True) if a is not None and b is not None and a != b}
        for node in made:
            for edge in p.in_edges(node):
                other = swap.get(p.edge_value(edge))
                if other is not None:
                    p.move_edge(edge, other)
        return swap
