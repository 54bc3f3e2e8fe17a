"""The gradient of a program as a program that follows it: an edit rebuilds what it touched and no more.

Forward nodes are mirrored under their names. Beside each differentiated one stands a `Call`: what its vjp was given and
what it wrote. After an edit the calls of nodes that changed, of what they read, and of whose operands want a gradient
now, are looked at from the last to the first; where only the incoming gradient is another value, its readers are led to
the new one and nothing is written anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from graphwright.array import Spec, from_numpy
from graphwright.autograd import NoTape, Symbol, Tensor, Variable, active_recorder, no_grad, pull_back, scoped
from graphwright.graph import NodeId
from graphwright.ops import OPS, call, get
from graphwright.program.graveyard import Graveyard
from graphwright.program.kinds import CONST, INPUT, SOURCES, STORED, WRITE
from graphwright.program.program import Program, Value
from graphwright.program.trace import TraceRecorder


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


class Gradient:
    """d Σ roots / d wanted of `source`, kept up to date by `sync`.

    Args:
        source: the program; it is never changed.
        roots, wanted: values of it.
        sizes: numbers for named sizes of its inputs.
        seeded: a further input `seed.<path>` per root weighs its elements; else ones do.

    Attributes:
        program: the inputs of the source (and seeds) -> `grad.<path>` per wanted value; over the same variables.
        looked_at: forward nodes looked at since the start, for tests of locality.
    """

    def __init__(
        self, source: Program, roots: Sequence[Value], wanted: Sequence[Value], sizes: Mapping[str, int], seeded: bool
    ) -> None:
        self.source, self.roots, self.wanted, self.sizes = source, list(roots), list(wanted), dict(sizes)
        self.program = Program(f"grad of {source.name}")
        self.looked_at = 0
        self._recorder = _Recorder(self.program)
        self._twins: dict[NodeId, NodeId] = {}
        self._reads: dict[NodeId, list[Value]] = {}  # what each mirrored node read when it was looked at last
        self._readers: dict[NodeId, int] = {}  # edges by which mirrored nodes and roots need a node
        self._leads: dict[NodeId, bool] = {}
        self._calls: dict[NodeId, Call] = {}
        self._sums: dict[Value, Sum] = {}
        self._trash: list[NodeId] = []
        self._ends: set[Value] = set()
        self._zeros: dict[Value, Value] = {}
        self._changed = source.follow()
        self._inputs = source.inputs()
        p = self.program
        for node in self._inputs:
            spec = source.spec(node).bind(self.sizes)
            self._twins[node] = self._recorder.source(INPUT, source.path(node), spec, {})
        self._seeds: list[Value | None] = [None] * len(self.roots)
        if seeded:
            for i, root in enumerate(self.roots):
                spec = source.specs(root.node)[root.port].bind(self.sizes)
                self._seeds[i] = Value(self._recorder.source(INPUT, f"seed.{source.path(root)}", spec, {}))
        self._build(set(), [v.node for v in (*self.roots, *self.wanted)])
        self.version = p.version

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
        return mine and there and self.source.inputs() == self._inputs and self._specs_fit()

    def _specs_fit(self) -> bool:
        p, source = self.program, self.source
        return all(p.spec(self._twins[n]) == source.spec(n).bind(self.sizes) for n in self._inputs)

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

    # -- forward -----------------------------------------------------------------------------------------------------
    def _mirror(self, changed: set[NodeId], needed: Sequence[NodeId]) -> set[NodeId]:
        """Bring forward nodes up to date; returns the nodes whose calls have to be looked at."""
        source, graph = self.source, self.source.graph
        fresh = self._count(changed, needed)
        touched: set[NodeId] = set()
        key = source.order_labels.key
        work = [(key(n), n) for n in {*fresh, *(n for n in changed if n in self._reads and n in graph)}]
        work.sort()
        seen = {n for _, n in work}
        heap = work  # sorted, so a heap
        while heap:
            node = heappop(heap)[1]
            seen.discard(node)
            self.looked_at += 1
            again = self._mirror_one(node, touched)
            if again:
                for reader in graph.successors(node):
                    if reader in self._reads and reader not in seen:
                        seen.add(reader)
                        heappush(heap, (key(reader), reader))
        return touched

    def _count(self, changed: set[NodeId], needed: Sequence[NodeId]) -> list[NodeId]:
        """Count readers anew where edges changed; returns the nodes that are needed now and were not."""
        graph, readers = self.source.graph, self._readers
        fresh: dict[NodeId, None] = {}
        more, less = list(needed), []
        for node in changed:
            if node in self._reads:
                now = self._sources_of(node) if node in graph else []
                more += [v.node for v in now]
                less += [v.node for v in self._reads[node]]
                for v in self._reads[node]:  # a reader less, though its own node may be as it was
                    self._ends.add(v)
                self._reads[node] = now
        while more:
            node = more.pop()
            readers[node] = readers.get(node, 0) + 1
            if node not in self._reads:
                self._reads[node] = self._sources_of(node)
                fresh[node] = None
                more += [v.node for v in self._reads[node]]
        while less:
            node = less.pop()
            readers[node] -= 1
            if not readers[node]:
                fresh.pop(node, None)
                for v in self._reads.pop(node):
                    less.append(v.node)
                    self._ends.add(v)
                self._forget(node)
        return list(fresh)

    def _sources_of(self, node: NodeId) -> list[Value]:
        return [] if self.source.op(node) in SOURCES else self.source.operands(node)

    def _forget(self, node: NodeId) -> None:
        """A forward node is needed no more."""
        del self._readers[node]
        self._leads.pop(node, None)
        made = self._calls.pop(node, None)
        self._throw(made.made if made is not None else ())
        for value in [v for v in self._sums if v.node == node]:
            self._throw(self._sums.pop(value).made)
        twin = self._twins.get(node)
        if twin is not None and node not in self._inputs:
            del self._twins[node]
            self._throw((twin,))

    def _mirror_one(self, node: NodeId, touched: set[NodeId]) -> bool:
        """Make or update a node's twin; True if its readers have to be looked at."""
        source, p = self.source, self.program
        op, had = source.op(node), self._twins.get(node)
        touched.add(node)
        self._ends.update(self._reads[node])
        if op == INPUT:
            twin = self._twins[node]
            moved = False
        elif op in STORED:
            twin, moved = self._stored(node, op, had)
        elif not self._reads[node]:
            twin, moved = self._empty(node, had)
        else:
            twin, moved = self._copied(node, op, had)
        self._twins[node] = twin
        leads = self._leading(node, op)
        turned = self._leads.get(node) != leads
        self._leads[node] = leads
        if source.path(node) != p.path(twin):
            self._rename(twin, source.path(node))
        return moved or turned

    def _stored(self, node: NodeId, op: str, had: NodeId | None) -> tuple[NodeId, bool]:
        source, p = self.source, self.program
        key = source.key(node)
        variable = source.weights[key]
        if had is not None:
            same = p.op(had) == op and p.key(had) == key and p.weights[key] is variable
            if same and p.specs(had) == source.specs(node):
                return had, False
            self._throw((had,))
        self._free(source.path(node))
        p.weights.add(key, variable)
        return self._recorder.source(op, source.path(node), source.spec(node), dict(source.attrs(node))), True

    def _empty(self, node: NodeId, had: NodeId | None) -> tuple[NodeId, bool]:
        """A junction without edges: zeros."""
        source, p = self.source, self.program
        spec = source.spec(node).bind(self.sizes)
        if had is not None and p.op(had) == CONST and p.spec(had) == spec:
            return had, False
        if had is not None:
            self._throw((had,))
        path = source.path(node)
        self._free(path)
        key = path if path not in p.weights else f"{path}.zero"
        zero = call("cast", Tensor(from_numpy(np.zeros(spec.sizes, np.float32))), dtype=spec.dtype).data
        p.weights.add(key, Variable(zero, name=key))
        return self._recorder.source(CONST, path, spec, {"key": key}), True

    def _copied(self, node: NodeId, op: str, had: NodeId | None) -> tuple[NodeId, bool]:
        source, p = self.source, self.program
        operands = [Value(self._twins[v.node], v.port) for v in self._reads[node]]
        attrs = source.attrs(node)
        if had is None or p.op(had) != op:
            if had is not None:
                self._throw((had,))
            path = source.path(node)
            self._free(path)
            return p.add_op(op, operands, attrs, path, self._recorder.behind(operands)), True
        if p.operands(had) != operands:
            self._lead_to(had, operands)
        if p.attrs(had) != attrs:
            p.update_node(had, attrs=dict(attrs))
        specs = get(op).specs([p.specs(v.node)[v.port] for v in operands], attrs, source.path(node))
        moved = p.specs(had) != specs
        if moved:
            p.update_node(had, specs=specs)
        return had, moved

    def _lead_to(self, node: NodeId, operands: Sequence[Value]) -> None:
        """Let a node read these values, in order."""
        p = self.program
        edges = p.in_edges(node)
        if len(edges) == len(operands):
            for edge, value in zip(edges, operands, strict=True):
                if p.edge_value(edge) != value:
                    p.move_edge(edge, value)
            return
        for edge in edges:
            p.delete_edge(edge)
        for port, value in enumerate(operands):
            p.insert_edge(value, node, port)

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

    def _twin(self, value: Value) -> Value:
        return Value(self._twins[value.node], value.port)

    def _tensor(self, value: Value) -> Tensor:
        """A value of the gradient program, to write on with."""
        return Tensor(Symbol(self.program.specs(value.node)[value.port], value, self._recorder))

    def _throw(self, nodes: Sequence[NodeId]) -> None:
        """Nodes that nothing will read; their names are free at once."""
        for node in nodes:
            self._trash.append(node)
            self._rename(node, f"~{len(self._trash)}.{node.index}.{node.generation}")

    def _free(self, name: str) -> None:
        """Take a name away from whatever backward node has it."""
        p = self.program
        other = p.free_name(name)
        if other != name:
            p.update_node(p.node(name), name=other)

    def _rename(self, node: NodeId, name: str) -> None:
        p = self.program
        if p.path(node) != name:
            self._free(name)
            p.update_node(node, name=name)

    def _sweep(self) -> None:
        """Take thrown nodes out."""
        p, graph = self.program, self.program.graph
        gone = [n for n in self._trash if n in graph]
        for node in gone:
            for edge in graph.in_edges(node):
                p.delete_edge(edge)
        for node in gone:
            if p.op(node) in STORED and not any(p.key(n) == p.key(node) for n in p.of_kind(p.op(node)) if n != node):
                p.weights.drop(p.key(node))
            p.delete_node(node)
        self._trash.clear()
        self._drop_unread()
        p.graveyard = Graveyard()  # nothing is undone here

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


class _Recorder(TraceRecorder):
    """Notes what it writes; once `near`, puts it just behind what it reads, so that the order need not be repaired."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.made: list[NodeId] = []
        self.near = False
        self.front: NodeId | None = None

    def source(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """A new input, param, const or state, in front of everything else."""
        if self.front is not None and self.front not in self.program.graph:
            self.front = min(self.program.nodes(), key=self.program.order_labels.key)
        self.front = self.program.add_source(kind, name, spec, attrs, before=self.front)
        return self.front

    def constants(self) -> list[NodeId]:
        """Nodes of the numbers that vjps wrote down."""
        return [value.node for _, value in self._consts.values()]

    def drop(self, node: NodeId) -> None:
        """Forget such a node."""
        self._consts = {k: known for k, known in self._consts.items() if known[1].node != node}

    def constant(self, name: str, spec: Spec) -> NodeId:
        """A new const node."""
        return self.source(CONST, name, spec, {"key": name})

    def record(self, op: Any, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Take down one operation."""
        operands = [self._own(s) for s in inputs]
        node = self.program.add_op(op.name, operands, attrs, self._name(op.name), self.behind(operands))
        self.made.append(node)
        return tuple(Symbol(spec, Value(node, port), self) for port, spec in enumerate(self.program.specs(node)))

    def behind(self, operands: Sequence[Value]) -> NodeId | None:
        """The last of what is read."""
        if not self.near or not operands:
            return None
        return max((v.node for v in operands), key=self.program.order_labels.key)
