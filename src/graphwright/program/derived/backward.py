"""Forward and backward of a program as one graph that follows its edits.

Every differentiated node has a `VjpCall`: the gradients passed to its vjp and the nodes that the vjp recorded. After an
edit the affected calls are visited from the last node to the first. If only the values that a call reads changed, not
their specs, its recorded nodes are rewired instead of recorded again; if its results are unchanged, earlier nodes are
not visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import DType, Spec
from graphwright.autograd import Tensor, pull_back, scoped
from graphwright.graph import NodeId
from graphwright.ops import OPS, get
from graphwright.program.derived.mirror import MirroredProgram
from graphwright.program.incremental import IncrementalWalk
from graphwright.program.kinds import ASSIGN, SOURCES
from graphwright.program.op_graph import Value
from graphwright.program.primitives import move_edge

if TYPE_CHECKING:
    from graphwright.program.program import Program


def updatable(p: Program) -> bool:
    """Return True if the gradient can follow edits: no checkpoints and no opaque ops (with a gradient, but no vjp)."""
    return not p.checkpoints and not p.of_traits(opaque=True)


def writes(p: Program) -> list[tuple[Value, Value]]:
    """Return the pair (state or param, its next value) of each assign node of a program."""
    return [(target, value) for target, value in map(p.operands, p.assigns())]


class VjpCall(NamedTuple):
    """The recorded vector-Jacobian product of one node."""

    operands: tuple[Value, ...]  # of the node's twin
    facts: tuple[Any, ...]  # what else was recorded from: path, twin, attributes and all specs
    grads: tuple[Value | None, ...]  # gradients of the node's results
    needs: tuple[bool, ...]  # which operands want a gradient
    results: tuple[Value | None, ...]  # gradients of the operands
    made: tuple[NodeId, ...]  # the recorded nodes
    sent: Mapping[Value, Sequence[tuple[int, Value]]]  # value of the source -> (operand number, gradient) of each use


class GradientSum(NamedTuple):
    """The gradients `parts` of one value, their sum `total`, and the nodes `made` that add them.

    `facts` is what else was recorded from: the path of the value's node, the dtype of the sum and the specs of `parts`.
    """

    facts: tuple[Any, ...]
    parts: tuple[Value, ...]
    total: Value
    made: tuple[NodeId, ...]


class BackwardGraph:
    """The backward nodes of a mirrored program, for the gradients of `wanted` values; see `MirroredProgram`.

    Args:
        sizes, name, low: see `MirroredProgram`.
        seeds_at: function from a value of the source to its initial gradients (seeds), which are summed before the
            gradients from its readers.
        sum_dtype: function from a value to the dtype in which its gradients are summed; None for the value's dtype.
    """

    def __init__(
        self,
        source: Program,
        wanted: Iterable[Value],
        sizes: Mapping[str, int],
        name: str,
        seeds_at: Callable[[Value], Iterable[Value]],
        sum_dtype: Callable[[Value], DType | None] = lambda value: None,
        low: DType | None = None,
    ) -> None:
        self.source, self.wanted = source, dict.fromkeys(wanted)
        self._seeds_at, self._sum_dtype = seeds_at, sum_dtype
        self.mirror = MirroredProgram(source, sizes, name, low, self._dropped, self._updated)
        self._toggled: set[NodeId] = set()
        self._passes_gradient: dict[NodeId, bool] = {}
        self._calls: dict[NodeId, VjpCall] = {}
        self._sums: dict[NodeId, dict[int, GradientSum]] = {}  # by node and port

    def set_wanted(self, wanted: Iterable[Value]) -> set[NodeId]:
        """Set the wanted values; return the nodes whose values became wanted or are no longer wanted."""
        wanted = dict.fromkeys(wanted)
        self._toggled = {v.node for v in wanted.keys() ^ self.wanted.keys() if v.node in self.source.graph}
        self.wanted = wanted
        return self._toggled

    def wants(self, value: Value) -> bool:
        """Return True if the gradient of a value is wanted, or is needed for a wanted gradient."""
        if value in self.wanted:
            return True
        return self._passes_gradient[value.node] and self.source.specs(value.node)[value.port].dtype.is_float

    def gradient(self, value: Value) -> Value | None:
        """Return the summed gradient of a value of the source; None if no gradient reaches it."""
        known = self._sums.get(value.node, {}).get(value.port)
        return None if known is None else known.total

    def update(self, visited: Iterable[NodeId]) -> None:
        """Update the backward nodes after `MirroredProgram.update`, which returned the `visited` nodes."""
        operands = self.mirror.operands
        edited = set(visited)
        start = edited | {v.node for v in self.mirror.dirty}
        self.mirror.dirty.clear()
        walk = IncrementalWalk(self.source, (n for n in start if n in operands), backwards=True)
        for node in walk:
            self.mirror.visited += 1
            grads = tuple(self._incoming(Value(node, port)) for port in range(len(self.source.specs(node))))
            old = self._calls.get(node)
            new = self._vjp(node, grads, old, node in edited)
            edited.discard(node)
            if new is None:
                self._calls.pop(node, None)
            else:
                self._calls[node] = new
            before, now = ({} if call is None else call.sent for call in (old, new))
            if before is not now:
                changed = (v for v in {**before, **now} if before.get(v) != now.get(v))
                walk.add(v.node for v in changed if v.node in operands)

    # -- what the mirror reports -------------------------------------------------------------------------------------
    def _dropped(self, node: NodeId) -> None:
        self._passes_gradient.pop(node, None)
        call = self._calls.pop(node, None)
        if call is not None:
            self.mirror.discard(call.made)
        for known in self._sums.pop(node, {}).values():
            self.mirror.discard(known.made)

    def _updated(self, node: NodeId, op: str) -> bool:
        """Store whether a node passes gradients to its operands; return True if this or the wanted results changed."""
        passes = False
        if op not in SOURCES and op != ASSIGN:
            row = OPS[op]
            differentiable = row.vjp is not None or row.traits.opaque
            passes = differentiable and any(self.wants(v) for v in self.mirror.operands[node])
        changed = self._passes_gradient.get(node) != passes
        self._passes_gradient[node] = passes
        return changed or node in self._toggled

    # -- sums --------------------------------------------------------------------------------------------------------
    def _incoming(self, at: Value) -> Value | None:
        """Return the sum of the gradients of a value: seeds first, then those from its readers, last reader first."""
        if not self.wants(at):
            return self._total(at, ())
        key, sent = self.source.order_labels.key, []
        for reader in self.source.graph.successors(at.node):
            call = self._calls.get(reader)
            if call is not None:
                label, created = key(reader)
                sent += [(-label, -created, number, g) for number, g in call.sent.get(at, ())]
        return self._total(at, (*self._seeds_at(at), *(g for *_, g in sorted(set(sent)))))

    def _total(self, at: Value, parts: tuple[Value, ...]) -> Value | None:
        mirror, path = self.mirror, self.source.path(at.node)
        dtype = self._sum_dtype(at) or mirror.spec(mirror.twin(at)).dtype
        known = self._sums.get(at.node, {}).get(at.port)
        facts = (path, dtype, *map(mirror.spec, parts))
        if known is not None and known.facts == facts:
            if known.parts == parts:
                return known.total
            if (swap := self._rewired(known.made, known.parts, parts)) is not None:
                total = swap.get(known.total, known.total)
                self._sums[at.node][at.port] = GradientSum(facts, parts, total, known.made)
                return total
        if known is not None:
            mirror.discard(known.made)
            del self._sums[at.node][at.port]
        if not parts:
            return None
        mirror.recorder.made = []
        with scoped("grad", path):
            tensor = mirror.tensor(parts[0]).to(dtype)
            for part in parts[1:]:
                tensor = tensor + mirror.tensor(part).to(dtype)
        made = GradientSum(facts, parts, mirror.recorder.value_of(tensor), tuple(mirror.recorder.made))
        self._sums.setdefault(at.node, {})[at.port] = made
        return made.total

    # -- vjps --------------------------------------------------------------------------------------------------------
    def _vjp(self, node: NodeId, grads: tuple[Value | None, ...], old: VjpCall | None, edited: bool) -> VjpCall | None:
        """Reuse or rewire the call `old`, or record the vjp of a node for gradients of its results; None for no vjp."""
        mirror, reads = self.mirror, self.mirror.operands[node]
        needs = tuple(self.wants(v) for v in reads)
        if self.source.op(node) in SOURCES or not any(needs) or all(g is None for g in grads):
            if old is not None:
                mirror.discard(old.made)
            return None
        if old is not None and not edited and old.needs == needs and old.grads == grads:
            return old
        p, twin = mirror.program, mirror.twin(Value(node)).node
        row = get(p.op(twin))
        operands = p.operands(twin)
        in_specs = [mirror.spec(v) for v in operands]
        dtypes = [mirror.spec(mirror.twin(v)).dtype for v in reads]
        grad_specs = [None if g is None else mirror.spec(g) for g in grads]
        facts = (self.source.path(node), twin, p.attrs(twin), in_specs, p.specs(twin), dtypes, grad_specs)
        if old is not None and old.needs == needs and old.facts == facts:
            before, after = (*old.operands, *old.grads), (*operands, *grads)
            if (swap := self._rewired(old.made, before, after)) is not None:
                results = tuple(None if g is None else swap.get(g, g) for g in old.results)
                return VjpCall((*operands,), facts, grads, needs, results, old.made, _sent(reads, results))
        if old is not None:
            mirror.discard(old.made)
        saved = row.saves.reads(len(operands))
        ins: list[Tensor | Spec] = [
            mirror.tensor(v) if i in saved else spec for i, (v, spec) in enumerate(zip(operands, in_specs, strict=True))
        ]
        outs: list[Tensor | Spec] = [
            mirror.tensor(Value(twin, port)) if port in row.saves.outputs else spec
            for port, spec in enumerate(p.specs(twin))
        ]
        given = [None if g is None else mirror.tensor(g) for g in grads]
        mirror.recorder.made, mirror.recorder.spare = [], [] if old is None else [*old.made]
        with scoped("grad", self.source.path(node)):
            found = pull_back(row, given, ins, outs, p.attrs(twin), needs, in_specs)
            if node in mirror.casts:  # cast the gradients back to the dtypes before autocast
                found = [g if g is None else g.to(dtype) for g, dtype in zip(found, dtypes, strict=True)]
        results = tuple(None if g is None else mirror.recorder.value_of(g) for g in found)
        made, mirror.recorder.spare = tuple(mirror.recorder.made), []
        return VjpCall((*operands,), facts, grads, needs, results, made, _sent(reads, results))

    def _rewired(
        self, made: Sequence[NodeId], before: Sequence[Value | None], after: Sequence[Value | None]
    ) -> dict[Value, Value] | None:
        """Rewire recorded nodes from old values to new ones of the same specs; return a dict from old to new.

        Returns None if the nodes must be recorded again instead: an old value that changed has two replacements, or was
        removed.
        """
        pairs = {(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None}
        swap = {a: b for a, b in pairs if a != b}
        p = self.mirror.program
        unique = len({a for a, _ in pairs}) == len(pairs)
        if not unique or any(a.node not in p.graph for a in swap):
            return None
        for node in made:
            for edge in p.in_edges(node):
                old = p.edge_value(edge)
                if swap.get(old, old) != old:
                    move_edge(p, edge, swap[old])
        return swap


def _sent(operands: Sequence[Value], results: Sequence[Value | None]) -> dict[Value, list[tuple[int, Value]]]:
    """Map each operand to the number and the gradient of each of its uses."""
    sent: dict[Value, list[tuple[int, Value]]] = {}
    for number, (value, gradient) in enumerate(zip(operands, results, strict=True)):
        if gradient is not None:
            sent.setdefault(value, []).append((number, gradient))
    return sent
