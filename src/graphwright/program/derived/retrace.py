"""Re-trace tensor code, reusing existing nodes or rewiring them to their new operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.autograd import Parameter, Symbol, Variable, scope
from graphwright.program.derived.mirror import MirrorRecorder
from graphwright.program.kinds import PARAM, STATE
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.autograd import Tensor
    from graphwright.graph import NodeId
    from graphwright.ops import Op
    from graphwright.program.derived.mirror import MirroredProgram


class TracedNodes(NamedTuple):
    """The nodes of one trace.

    Attributes:
        by_content: (op, operands, attributes), or the id of an array or variable -> node.
        by_role: (name, number among nodes of that name, attributes) -> node.
    """

    by_content: dict[tuple[Any, ...], NodeId]
    by_role: dict[tuple[str, int, str], NodeId]


class ReusingRecorder(MirrorRecorder):
    """Records tensor code into a derived program, reusing the nodes of the previous trace.

    A node with the same role but other operands is rewired, so its readers see no change.

    Args:
        mirror: the program it records into.
        before: nodes of the previous trace.
        stored: id of each variable of the source that the program reads -> its node there.

    Attributes:
        now: nodes of this trace.
        results: outputs of the traced step by name.
    """

    def __init__(self, mirror: MirroredProgram, before: TracedNodes, stored: Mapping[int, Value]) -> None:
        super().__init__(mirror.program)
        self.near = True
        self.now = TracedNodes({}, {})
        self.results: dict[str, Value] = {}
        self._mirror, self._before, self._stored = mirror, before, stored
        self._taken: set[NodeId] = set()
        self._counts: Counter[str] = Counter()

    def tensor(self, value: Value) -> Tensor:
        """A value of the program as a symbolic tensor of this trace."""
        return self._mirror.tensor(value, self)

    def written(self) -> Iterable[tuple[int, Value, Value]]:
        """(id of the variable, its node, its new value) of each assignment."""
        return [(key, self.variables[key][1], self.value_of(value)) for key, value in self._current.items()]

    def record(self, op: Op, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Record one operation."""
        operands = [self._own(s) for s in inputs]
        attributes = repr(sorted(attrs.items()))
        base = ".".join((*scope.get(), op.name))
        self._counts[base] += 1
        role = (base, self._counts[base], attributes)

        def make() -> NodeId:
            node = self._rewired(role, op, operands, attrs)
            if node is not None:
                return node
            return self.program.add_op(op.name, operands, attrs, self._name(op.name), self.after(operands))

        node = self.now.by_role[role] = self._take((op.name, *operands, attributes), make)
        return self.symbols(node)

    def _rewired(
        self, role: tuple[str, int, str], op: Op, operands: list[Value], attrs: Mapping[str, Any]
    ) -> NodeId | None:
        """The node that had this role in the previous trace, reading the new operands; None if it cannot be reused."""
        p, node = self.program, self._before.by_role.get(role)
        if node is None or node in self._taken or node not in p.graph:
            return None
        if op.specs([self._mirror.spec(v) for v in operands], attrs, p.path(node)) != p.specs(node):
            return None
        self._mirror.rewire(node, operands)
        return node

    def value_of(self, tensor: Tensor) -> Value:
        """The node of a tensor; an untracked array becomes a constant."""
        if isinstance(tensor, Variable) or isinstance(tensor.data, Symbol):
            return super().value_of(tensor)
        return Value(self._take((id(tensor.data),), lambda: super(ReusingRecorder, self).value_of(tensor).node))

    def source(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """Add a param, const or state before all other nodes."""
        return self._mirror.recorder.source(kind, name, spec, attrs)

    def _source(self, variable: Variable) -> Value:
        found = self.variables.get(id(variable))
        if found is None:
            value = self._stored.get(id(variable))
            if value is None:
                value = Value(self._take((id(variable), variable.spec), lambda: self._add_variable(variable)))
            found = self.variables[id(variable)] = (variable, value)
        return found[1]

    def _add_variable(self, variable: Variable) -> NodeId:
        """Add a node for a variable that the source does not have."""
        p, kind = self.program, PARAM if isinstance(variable, Parameter) else STATE
        name = p.free_name(variable.name or kind)
        p.weights.add(name, variable)
        return self.source(kind, name, variable.spec, {"key": name})

    def _take(self, key: tuple[Any, ...], make: Callable[[], NodeId]) -> NodeId:
        """The node of this content: of this trace, of the previous one, or a new one."""
        node = self.now.by_content.get(key)
        if node is None:
            node = self._before.by_content.get(key)
            if node is None or node in self._taken:  # rewired for another role
                node = make()
            self._taken.add(node)
            self.now.by_content[key] = node
        return node
