"""The gradient of a program as a program that follows it: an edit rebuilds what it touched and no more.

Forward nodes are mirrored under their names. Beside each differentiated one stands a `Call`: what its vjp was given and
what it wrote. After an edit the calls of nodes that changed, of what they read, and of whose operands want a gradient
now, are looked at from the last to the first; where only the incoming gradient is another value, its readers are led to
the new one and nothing is written anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from graphwright.array import Spec
from graphwright.autograd import NoTape, Tensor, active_recorder, no_grad, pull_back, scoped
from graphwright.graph import NodeId
from graphwright.ops import OPS, call, get
from graphwright.program.kinds import INPUT, SOURCES, WRITE
from graphwright.program.mirror import Mirror
from graphwright.program.program import Program, Value


class Call(NamedTuple):
    """One use of a vjp: gradients of the results, which operands wanted one, theirs, and the nodes it wrote."""

    grads: tuple[Value | None, ...]
    needs: tuple[bool, ...]
    results: tuple[Value | None, ...]
    made: tuple[NodeId, ...]


class Sum(NamedTuple):
    """Gradients that arrive at a value, in order, their sum, and the nodes that add them up."""

    parts: tuple[Value, ...]
    total: Value
    made: tuple[NodeId, ...]


class Gradient(Mirror):
    """d Σ roots / d wanted of `source`, kept up to date by `sync`.

    Args:
        source: the program; it is never changed.
        roots, wanted: values of it.
        sizes: numbers for named sizes of its inputs.
        seeded: a further input `seed.<path>` per root weighs its elements; else ones do.

    Attributes:
        program: the inputs of the source (and seeds) -> `grad.<path>` per wanted value; over the same variables.
    """

    def __init__(
        self, source: Program, roots: Sequence[Value], wanted: Sequence[Value], sizes: Mapping[str, int], seeded: bool
    ) -> None:
        super().__init__(source, sizes, f"grad of {source.name}")
        self.roots, self.wanted = list(roots), list(wanted)
        self._leads: dict[NodeId, bool] = {}
        self._calls: dict[NodeId, Call] = {}
        self._sums: dict[Value, Sum] = {}
        self._zeros: dict[Value, Value] = {}
        self._seeds: list[Value | None] = [None] * len(self.roots)
        if seeded:
            for i, root in enumerate(self.roots):
                spec = source.specs(root.node)[root.port].bind(self.sizes)
                self._seeds[i] = Value(self._recorder.source(INPUT, f"seed.{source.path(root)}", spec, {}))
        self._build(set(), [v.node for v in (*self.roots, *self.wanted)])
        self.version = self.program.version

    def sync(self) -> None:
        """Follow the edits since the last time. After an error it is of no use any more."""
        if self._changed:
            changed = set(self._changed)
            self._changed.clear()
            self._recorder.near = True
            self._build(changed, [])
            self.program.version += 1
            self.version = self.program.version

    @property
    def usable(self) -> bool:
        """True while the program was edited by nobody else, and the source has the inputs it had."""
        graph = self.source.graph
        mine = self.program.version == self.version
        there = all(v.node in graph for v in (*self.roots, *self.wanted))
        return mine and there and self._fits()

    def _build(self, changed: set[NodeId], needed: Sequence[NodeId]) -> None:
        token = active_recorder.set(self._recorder)
        try:
            with no_grad():
                touched = self._mirror(changed, needed)
                self._differentiate(touched)
                self._give_out()
        finally:
            active_recorder.reset(token)
        self._sweep()
        self._drop_unread()

    # -- forward -----------------------------------------------------------------------------------------------------
    def _dropped(self, node: NodeId) -> None:
        self._leads.pop(node, None)
        made = self._calls.pop(node, None)
        self._throw(made.made if made is not None else ())
        for value in [v for v in self._sums if v.node == node]:
            self._throw(self._sums.pop(value).made)

    def _noticed(self, node: NodeId, op: str) -> bool:
        leads = self._leading(node, op)
        turned = self._leads.get(node) != leads
        self._leads[node] = leads
        return turned

    def _leading(self, node: NodeId, op: str) -> bool:
        """True if an operand of the node wants a gradient and the op passes one on."""
        if op in SOURCES or op == WRITE:
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
        key, parts = source.order_labels.key, []
        for i, root in enumerate(self.roots):
            if root == here:
                parts.append(self._seed(i))
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

    def _seed(self, root: int) -> Value:
        """What a root is weighed by."""
        seed = self._seeds[root]
        twin = self._tensor(self._twin(self.roots[root]))
        if seed is None or self.program.specs(seed.node)[seed.port] != twin.spec:
            with scoped("grad", self.source.path(self.roots[root])):
                seed = self._seeds[root] = self._recorder.value_of(call("full_like", twin, value=1.0))
        return seed

    def _total(self, at: Value, parts: tuple[Value, ...]) -> Value | None:
        known = self._sums.get(at)
        if known is not None and known.parts == parts:
            return known.total
        if known is not None:
            self._throw(known.made)
            del self._sums[at]
        if not parts:
            return None
        self._recorder.made = []
        total = self._tensor(parts[0])
        with scoped("grad", self.source.path(at.node)):
            for part in parts[1:]:
                total = total + self._tensor(part)
        made = Sum(parts, self._recorder.value_of(total), tuple(self._recorder.made))
        self._sums[at] = made
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
                return self._led(old, grads)
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
        results = tuple(None if g is None else self._recorder.value_of(g) for g in found)
        return Call(grads, needs, results, tuple(self._recorder.made))

    def _same_form(self, before: Sequence[Value | None], after: Sequence[Value | None]) -> bool:
        """True if gradients can take each other's place one for one."""
        p, pairs = self.program, list(zip(before, after, strict=True))
        if any((a is None) != (b is None) for a, b in pairs):
            return False
        kept = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len({a for a, _ in kept}) != len(kept) or any(a.node not in p.graph for a, _ in kept):
            return False
        return all(p.specs(a.node)[a.port] == p.specs(b.node)[b.port] for a, b in kept)

    def _led(self, old: Call, grads: tuple[Value | None, ...]) -> Call:
        """The same call, reading other gradients."""
        p = self.program
        swap = {a: b for a, b in zip(old.grads, grads, strict=True) if a is not None and b is not None and a != b}
        for node in old.made:
            for edge in p.in_edges(node):
                other = swap.get(p.edge_value(edge))
                if other is not None:
                    p.move_edge(edge, other)
        results = tuple(None if g is None else swap.get(g, g) for g in old.results)
        return Call(grads, old.needs, results, old.made)

    # -- results and rubbish -----------------------------------------------------------------------------------------
    def _give_out(self) -> None:
        """Declare the outputs. Raises: NoTape for a value that the roots read, over no path that has a gradient."""
        source, p, outputs = self.source, self.program, {}
        reached: set[NodeId] | None = None
        for value in self.wanted:
            known = self._sums.get(value)
            name = f"grad.{source.path(value)}"
            if known is not None:
                outputs[name] = known.total
                continue
            reached = source.reachable(self.roots) if reached is None else reached
            readers = (n for n in source.graph.successors(value.node) if n in reached)
            if value in self.roots or any(value in self._reads[n] for n in readers):
                raise NoTape(
                    "an input does not reach the outputs", where=source.path(value), got=source.specs(value.node)
                )
            self._zeros[value] = outputs[name] = self._zero(value)
        for value in [v for v in self._zeros if self._zeros[v] not in outputs.values()]:
            self._throw([self._zeros.pop(value).node])
        if list(outputs.items()) != list(zip(p.output_names(), p.outputs(), strict=True)):
            p.set_outputs(outputs)

    def _zero(self, value: Value) -> Value:
        """Zeros like a value."""
        known, like = self._zeros.get(value), self._twin(value)
        if known is not None and self.program.operands(known.node) == [like]:
            return known
        if known is not None:
            self._throw([known.node])
        with scoped("grad", self.source.path(value)):
            return self._recorder.value_of(call("full_like", self._tensor(like), value=0.0))

    def _drop_unread(self) -> None:
        """Take out constants and seeds that nothing reads any more."""
        p, given = self.program, {v.node for v in self.program.outputs()}
        for i, seed in enumerate(self._seeds):
            if seed is not None and p.op(seed.node) != INPUT and not self._read(seed.node, given):
                p.delete_edge(p.in_edges(seed.node)[0])
                p.delete_node(seed.node)
                self._seeds[i] = None
        for node in self._recorder.constants():
            if not self._read(node, given):
                p.weights.drop(p.key(node))
                p.delete_node(node)
                self._recorder.drop(node)

    def _read(self, node: NodeId, given: set[NodeId]) -> bool:
        return node in given or bool(self.program.graph.out_degree(node))
