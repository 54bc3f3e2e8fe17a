"""The gradient of a program as a program that follows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from graphwright.autograd import NoTape, active_recorder, no_grad, scoped
from graphwright.ops import call
from graphwright.program.derived.backward import Backward
from graphwright.program.kinds import INPUT
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.program import Program


class Gradient(Backward):
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
        super().__init__(source, wanted, sizes, f"grad of {source.name}")
        self.roots = list(roots)
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

    def _seeds_at(self, value: Value) -> Iterable[Value]:
        return [self._seed(i) for i, root in enumerate(self.roots) if root == value]

    def _seed(self, root: int) -> Value:
        """What a root is weighed by."""
        seed = self._seeds[root]
        twin = self._tensor(self._twin(self.roots[root]))
        if seed is None or self.program.specs(seed.node)[seed.port] != twin.spec:
            with scoped("grad", self.source.path(self.roots[root])):
                seed = self._seeds[root] = self._recorder.value_of(call("full_like", twin, value=1.0))
        return seed

    # -- results and rubbish -----------------------------------------------------------------------------------------
    def _give_out(self) -> None:
        """Declare the outputs. Raises: NoTape for a value that the roots read, over no path that has a gradient."""
        source, p, outputs = self.source, self.program, {}
        reached: set[NodeId] | None = None
        for value in self.wanted:
            known = self._sum(value)
            if known is not None:
                if value in self._zeros:
                    self._throw([self._zeros.pop(value).node])
                outputs[f"grad.{source.path(value)}"] = known.total
                continue
            readers = [n for n in source.graph.successors(value.node) if value in self._reads.get(n, ())]
            if readers and reached is None:
                reached = source.reachable(self.roots)
            if value in self.roots or (reached is not None and not reached.isdisjoint(readers)):
                raise NoTape(
                    "an input does not reach the outputs", where=source.path(value), got=source.specs(value.node)
                )
            self._zeros[value] = outputs[f"grad.{source.path(value)}"] = self._zero(value)
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
