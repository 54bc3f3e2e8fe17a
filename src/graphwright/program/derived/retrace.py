"""Taking tensor code down again: nodes that are there from before are taken as they are, or led to new operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphwright.autograd import Parameter, Symbol, Tensor, Variable, scope
from graphwright.graph import NodeId
from graphwright.program.derived.mirror import Recorder
from graphwright.program.kinds import PARAM, STATE
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.ops import Op
    from graphwright.program.derived.step import Step

Known = dict[tuple[Any, ...], NodeId]
Role = tuple[str, int, str]


class Reused(Recorder):
    """Takes down objective and update; a node, constant or variable that is there from the last time is taken again.

    One that now reads other values is led to them, so that a new gradient of one weight is no new update of the others.

    Attributes:
        used: all that was taken down, by what it is: its op, operands and attributes, or its array or variable.
        roles: nodes by name, number among those of the name, and attributes.
        results: outputs of the step by name.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step.program)
        self.step, self.near = step, True
        self.used: Known = {}
        self.roles: dict[Role, NodeId] = {}
        self._settled: set[NodeId] = set()
        self._counts: Counter[str] = Counter()
        self.results: dict[str, Value] = {}

    def tensor(self, value: Value) -> Tensor:
        """A value of the program, to write on with."""
        return Tensor(Symbol(self.program.specs(value.node)[value.port], value, self))

    def written(self) -> dict[int, tuple[Value, Value]]:
        """By id of each variable that was assigned to: its node, and its new value."""
        return {key: (self.variables[key][1], self.value_of(value)) for key, value in self._current.items()}

    def record(self, op: Op, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Take down one operation."""
        operands = [self._own(s) for s in inputs]
        form = repr(sorted(attrs.items()))
        base = ".".join((*scope.get(), op.name))
        self._counts[base] += 1
        role = (base, self._counts[base], form)

        def make() -> NodeId:
            led = self._led(role, op, operands, attrs)
            if led is None:
                return self.program.add_op(op.name, operands, attrs, self._name(op.name), self.behind(operands))
            return led

        node = self.roles[role] = self._take((op.name, *operands, form), make)
        return tuple(Symbol(spec, Value(node, port), self) for port, spec in enumerate(self.program.specs(node)))

    def _led(self, role: Role, op: Op, operands: list[Value], attrs: Mapping[str, Any]) -> NodeId | None:
        """The node that did the same the last time, reading these values; so who reads it has nothing new."""
        p, node = self.program, self.step.roles.get(role)
        if node is None or node in self._settled or node not in p.graph:
            return None
        if op.specs([p.specs(v.node)[v.port] for v in operands], attrs, p.path(node)) != p.specs(node):
            return None
        self.step.lead_to(node, operands)
        return node

    def value_of(self, tensor: Tensor) -> Value:
        """The node that stands for a tensor."""
        if isinstance(tensor, Variable) or isinstance(tensor.data, Symbol):
            return super().value_of(tensor)
        return Value(self._take((id(tensor.data),), lambda: super(Reused, self).value_of(tensor).node))

    def source(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """A new param, const or state, in front of everything else."""
        return self.step.source_node(kind, name, spec, attrs)

    def _source(self, variable: Variable) -> Value:
        found = self.variables.get(id(variable))
        if found is None:
            value = self.step.stands_for(variable)
            if value is None:
                value = Value(self._take((id(variable), variable.spec), lambda: self._stored(variable)))
            found = self.variables[id(variable)] = (variable, value)
        return found[1]

    def _stored(self, variable: Variable) -> NodeId:
        """A new node for a variable that the source does not have."""
        p, kind = self.program, PARAM if isinstance(variable, Parameter) else STATE
        name = p.free_name(variable.name or kind)
        p.weights.add(name, variable)
        return self.source(kind, name, variable.spec, {"key": name})

    def _take(self, key: tuple[Any, ...], make: Callable[[], NodeId]) -> NodeId:
        node = self.used.get(key)
        if node is None:
            node = self.step.known(key)
            if node is None or node in self._settled:  # it was led to something else
                node = make()
            self._settled.add(node)
            self.used[key] = node
        return node


__all__ = ["Known", "Reused", "Role"]
