"""A training step as one program: forward, objective, backward and update, which follows edits of the trained program.

Forward and backward are updated node by node. Objective and update are the caller's tensor code. They are traced again
when something they depend on changes; the new trace reuses the nodes of the previous one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.array import DType, Spec
from graphwright.autograd import (
    Parameter,
    Symbol,
    Tensor,
    Variable,
    active_recorder,
    autocast_to,
    enable_grad,
    scope,
    training,
)
from graphwright.graph import NodeId
from graphwright.ops import Op
from graphwright.program.builder import record
from graphwright.program.derived.backward import BackwardGraph, updatable, writes
from graphwright.program.derived.mirror import MirrorRecorder, recording
from graphwright.program.kinds import INPUT, PARAM, PATTERN, STATE
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_assign, add_op, set_outputs
from graphwright.program.run import evaluate_with
from graphwright.program.validate import refuse_broken
from graphwright.program.weights import add_weight, kind_of

if TYPE_CHECKING:
    from graphwright.program.derived.mirror import MirroredProgram
    from graphwright.program.program import Program


class TracedNodes(NamedTuple):
    """The nodes of one trace, by content (op, operands) and by role (position in the code), to reuse in the next."""

    # (op, operands, attributes), or the id of an array or variable -> (node, specs of the operands or the variable)
    by_content: dict[tuple[Any, ...], tuple[NodeId, tuple[Spec, ...]]]
    by_role: dict[tuple[str, int, str], NodeId]  # (scope and op, how often it was recorded so far, attributes) -> node
    arrays: list[Any]  # those whose ids are in `by_content`: alive, so that no later array gets such an id


class ReusingRecorder(MirrorRecorder):
    """A recorder of tensor code into the program of `mirror` that reuses the nodes of the previous trace, `before`.

    A node with the same role (see `TracedNodes.by_role`) but different operands is rewired, so its readers see no
    change. `stored` maps the id of each variable of the source that is mirrored to its value in the derived program.
    """

    def __init__(self, mirror: MirroredProgram, before: TracedNodes, stored: Mapping[int, Value]) -> None:
        super().__init__(mirror.program)
        self.near = True
        self.now = TracedNodes({}, {}, [])  # nodes of this trace
        self.results: dict[str, Value] = {}  # outputs of the traced step by name
        self._mirror, self._before, self._stored = mirror, before, stored
        self._taken: set[NodeId] = set()
        self._counts: Counter[str] = Counter()

    def tensor(self, value: Value) -> Tensor:
        """Return the tensor that stands for a value of the program in this trace."""
        return self._mirror.tensor(value, self)

    def written(self) -> Iterable[tuple[int, Value, Value]]:
        """Return (id of the variable, its value, its new value) for each assignment in the trace."""
        return [(key, self.variables[key][1], value) for key, value in self._current.items()]

    def record(self, op: Op, inputs: Sequence[Symbol], attrs: Mapping[str, Any]) -> tuple[Symbol, ...]:
        """Reuse, rewire or add a node for one operation."""
        return self.symbols(self._node(op, [self._own(s) for s in inputs], attrs))

    def update(self, targets: Sequence[Variable], op: Op, operands: Sequence[Tensor], attrs: Mapping[str, Any]) -> None:
        """Record that variables hold the results of an operation from here on."""
        node = self._node(op, list(map(self.value_of, operands)), attrs)
        for port, target in enumerate(targets):
            self._source(target)
            self._current[id(target)] = Value(node, port)

    def _node(self, op: Op, operands: list[Value], attrs: Mapping[str, Any]) -> NodeId:
        attributes = repr(sorted(attrs.items()))
        specs = tuple(map(self._mirror.spec, operands))  # of a node that stays, they may change
        base = ".".join((*scope.get(), op.name))
        self._counts[base] += 1
        role = (base, self._counts[base], attributes)

        def make() -> NodeId:
            node = self._rewired(role, op, operands, specs, attrs)
            if node is not None:
                return node
            return add_op(self.program, op.name, operands, attrs, self._name(op.name), self.after(operands, op))

        node = self.now.by_role[role] = self._take((op.name, *operands, attributes), specs, make)
        return node

    def _rewired(
        self, role: tuple[str, int, str], op: Op, operands: list[Value], specs: Sequence[Spec],
        attrs: Mapping[str, Any],
    ) -> NodeId | None:  # fmt: skip
        """Rewire the node that had this role in the previous trace to the new operands; None if it cannot be reused."""
        p, node = self.program, self._before.by_role.get(role)
        if node is None or node in self._taken or node not in p.graph:
            return None
        if op.specs(specs, attrs, p.path(node)) != p.specs(node):
            return None
        self._mirror.rewire(node, operands)
        return node

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value in the program that stands for a tensor; a plain array becomes a const node."""
        if isinstance(tensor, Variable) or isinstance(tensor.data, Symbol):
            return super().value_of(tensor)
        self.now.arrays.append(tensor.data)
        return Value(self._take((id(tensor.data),), (), lambda: super(ReusingRecorder, self).value_of(tensor).node))

    def source(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """Add a param, const or state before all other nodes; return it."""
        return self._mirror.recorder.source(kind, name, spec, attrs)

    def _source(self, variable: Variable) -> Value:
        found = self.variables.get(id(variable))
        if found is None:
            value = self._stored.get(id(variable))
            if value is None:
                value = Value(self._take((id(variable),), (variable.spec,), lambda: self._add_variable(variable)))
            found = self.variables[id(variable)] = (variable, value)
        return found[1]

    def _add_variable(self, variable: Variable) -> NodeId:
        """Add a param or state node for a variable that the source program does not have; return the node."""
        p, kind = self.program, kind_of(variable)
        name = p.free_name(variable.name or kind)
        key = p.weights.free_key(name)
        add_weight(p.weights, key, variable)
        return self.source(kind, name, variable.spec, {"key": key})

    def _take(self, key: tuple[Any, ...], specs: tuple[Spec, ...], make: Callable[[], NodeId]) -> NodeId:
        """Return the node of this content from this or the previous trace, else the node that `make()` adds."""
        found = self.now.by_content.get(key)
        if found is None:
            found = self._before.by_content.get(key)
            if found is None or found[1] != specs or found[0] in self._taken:  # it was already rewired to another role
                found = make(), specs
            self._taken.add(found[0])
            self.now.by_content[key] = found
        return found[0]


Objective = Callable[[Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""(outputs and inputs by name) -> the value to differentiate, and the results of the step by name."""


class StepValues(NamedTuple):
    """What the update of a training step may read besides the gradients of parameters.

    Attributes:
        named: the inputs, and the outputs that the objective reads.
        results: those of the objective.
        values: those that the task observes.
        gradients: of the differentiated value with respect to observed values; those that it depends on.
    """

    named: Mapping[str, Tensor]
    results: Mapping[str, Tensor]
    values: Mapping[Value, Tensor]
    gradients: Mapping[Value, Tensor]


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """The inputs, objective and parameter update of a training step of a program."""

    inputs: Mapping[str, Spec]  # specs of the program's inputs, and of additional inputs of the objective
    reads: Sequence[str]  # outputs of the program that the objective reads
    objective: Objective  # see `Objective`; runs with gradients enabled
    trained: Callable[[], Iterable[Parameter]]  # returns the parameters trained now
    # assigns new values to variables from the `.grad` of the parameters; returns further results of the step by name
    update: Callable[[StepValues], Mapping[str, Tensor]]
    low: DType | None = None  # the 16-bit float of autocast, if it is on
    observed: Callable[[], Iterable[Value]] = tuple  # returns the values of the program that the update reads now


class TrainingStepGraph:
    """One training step of `source` as a program; `update` follows the edits of `source`, which is never changed.

    Its `program` maps the inputs to the results of the objective. A run of it also performs the state assignments of
    the source, and the parameter update.
    """

    def __init__(self, source: Program, task: TrainingTask) -> None:
        self.source, self.task = source, task
        sizes: dict[str, int] = {}
        for node in source.inputs():
            source.spec(node).match(task.inputs[source.path(node)].sizes, sizes)
        name = f"step of {source.name}"
        self._backward = BackwardGraph(source, (), sizes, name, self._seeds_at, self._sum_dtype, task.low)
        self.mirror = self._backward.mirror
        self.program = self.mirror.program
        for name in task.inputs.keys() - {source.path(n) for n in source.inputs()}:
            self.mirror.recorder.source(INPUT, name, task.inputs[name], {})
        self._read_nodes: list[NodeId] = []
        self._stored: dict[int, tuple[NodeId, Value]] = {}  # id of a mirrored variable -> its node, and the twin
        self._seeds: dict[Value, Value] = {}
        self._objective_grads: dict[Parameter, Value] = {}  # of parameters that only the objective reads
        self._traced = TracedNodes({}, {}, [])
        self._writes: dict[int, tuple[NodeId, Value, Value]] = {}  # id of a variable -> its assign node and operands
        self._assumptions: list[tuple[Callable[[], object], object]] = []
        self._objective_key: Any = None
        self._update_key: Any = None
        self.update()

    @property
    def usable(self) -> bool:
        """True while only this object has edited `program` and the inputs of the source are unchanged."""
        same_inputs = set(self.program.input_names()) == set(self.task.inputs)
        return same_inputs and updatable(self.source) and self.mirror.usable

    @property
    def fresh(self) -> bool:
        """False once an assumption of the traced objective or update no longer holds."""
        return all(fact() == value for fact, value in self._assumptions)

    def update(self) -> None:
        """Follow the edits since the last update. After an error this object must not be used again."""
        source = self.source
        refuse_broken(source)
        reads = [source.output(name).node for name in self.task.reads]
        reads += [value.node for _, value in writes(source)]
        observed, trained = list(dict.fromkeys(self.task.observed())), list(self.task.trained())
        reads += [value.node for value in observed]
        params = {id(source.weights[source.key(n)]): n for n in source.params()}
        wanted = {Value(params[id(v)]): v for v in trained if id(v) in params}
        toggled = self._backward.set_wanted([*wanted, *(v for v in observed if source.spec(v).dtype.is_float)])
        with self.mirror.updating() as changed:
            visited = self.mirror.update(changed | toggled, reads, self._read_nodes)
            self._read_nodes = reads
            self._update_backward(visited, trained, wanted, observed)

    def _update_backward(
        self, visited: set[NodeId], trained: Sequence[Parameter], wanted: Mapping[Value, Parameter],
        observed: Sequence[Value],
    ) -> None:  # fmt: skip
        """Update the backward nodes; trace objective and parameter update again if what they depend on changed."""
        source, mirror = self.source, self.mirror
        nodes = [n for kind in (PARAM, STATE, PATTERN) for n in source.of_kind(kind) if mirror.has_twin(n)]
        self._stored = {id(source.weights[source.key(n)]): (n, mirror.twin(Value(n))) for n in nodes}
        ends = [source.output(name) for name in self.task.reads]
        twins = [(v, mirror.twin(v)) for v in ends]
        key: list[Any] = [(twin, mirror.spec(twin), self._backward.wants(v)) for v, twin in twins]
        key += [(mirror.has_twin(t.node) and mirror.twin(t), mirror.twin(v)) for t, v in writes(source)]
        key += [training(), *(id(v) for v in trained)]
        recorder = None if self.fresh and key == self._objective_key else self._trace_objective(trained)
        self._objective_key = key
        self._backward.update(visited)
        totals = {value: self._backward.gradient(value) for value in self._backward.wanted}
        grads: list[Any] = [(v, totals[value]) for value, v in wanted.items() if totals[value] is not None]
        grads += self._objective_grads.items()
        key = [(id(v), v.lineage, v.spec, self._stored.get(id(v)), g) for v, g in grads]
        key += [(v, mirror.twin(v), mirror.spec(mirror.twin(v)), totals.get(v)) for v in observed]
        if recorder is not None or key != self._update_key:
            seen = {v: totals.get(v) for v in observed}
            self._trace_update(recorder or self._trace_objective(trained), trained, grads, seen)
        self._update_key = key

    def _trace_objective(self, trained: Sequence[Parameter]) -> ReusingRecorder:
        """Trace the objective and its gradient; return the recorder, which then also traces the update."""
        mirror = self.mirror
        recorder = ReusingRecorder(mirror, self._traced, {key: twin for key, (_, twin) in self._stored.items()})
        for target, value in writes(self.source):
            recorder.assign(self.source.weights[self.source.key(target.node)], recorder.tensor(mirror.twin(value)))
        ends = {name: self.source.output(name) for name in self.task.reads}
        leaves: dict[Value, Tensor] = {}
        for value in ends.values():
            leaf = leaves.setdefault(value, recorder.tensor(mirror.twin(value)))
            leaf.requires_grad = self._backward.wants(value)
        p, names = self.program, self.task.inputs.keys() - ends.keys()
        given = {name: recorder.tensor(Value(p.node(name))) for name in names}
        with recording(recorder):
            try:
                for v in trained:
                    v.grad = None
                with enable_grad():
                    root, results = self.task.objective({**given, **{name: leaves[v] for name, v in ends.items()}})
                    root.backward()
                seeds = {v: recorder.value_of(leaf.grad) for v, leaf in leaves.items() if leaf.grad is not None}
                self._objective_grads = {}
                for v in trained:
                    if v.grad is not None:
                        grad, stored = recorder.value_of(v.grad), self._stored.get(id(v))
                        if stored is None:
                            self._objective_grads[v] = grad
                        else:
                            seeds[Value(stored[0])] = grad
                recorder.results = {name: recorder.value_of(t) for name, t in results.items()}
            finally:
                recorder.restore()
        both = self._seeds.keys() | seeds.keys()
        mirror.dirty.update(v for v in both if self._seeds.get(v) != seeds.get(v))
        self._seeds = seeds
        return recorder

    def _trace_update(
        self, recorder: ReusingRecorder, trained: Iterable[Parameter], grads: Sequence[tuple[Parameter, Value]],
        observed: Mapping[Value, Value | None],
    ) -> None:  # fmt: skip
        """Trace the parameter update, set the outputs and writes of the program, and discard unused nodes.

        `observed` maps the observed values to their gradients.
        """
        p, discard, twin, tensor = self.program, self.mirror.discard, self.mirror.twin, recorder.tensor
        named = {name: twin(self.source.output(name)) for name in self.task.reads}
        named |= {name: Value(p.node(name)) for name in self.task.inputs}
        seen = StepValues(
            {name: tensor(value) for name, value in named.items()},
            {name: tensor(value) for name, value in recorder.results.items()},
            {v: tensor(twin(v)) for v in observed},
            {v: tensor(g) for v, g in observed.items() if g is not None},
        )
        with recording(recorder):
            try:
                for variable, value in grads:
                    variable.grad = tensor(value)
                recorder.results |= {name: recorder.value_of(t) for name, t in self.task.update(seen).items()}
            finally:
                for variable in trained:
                    variable.grad = None
        if dict(zip(p.output_names(), p.outputs(), strict=True)) != recorder.results:
            set_outputs(p, recorder.results)
        writes: dict[int, tuple[NodeId, Value, Value]] = {}
        for key, target, value in recorder.written():
            node, *before = self._writes.pop(key, (None,))
            if node is None or before[0] != target:
                discard(() if node is None else (node,))
                node = add_assign(p, target, value, p.free_name(f"{p.path(target)}.next"))
            elif before[1] != value:
                self.mirror.rewire(node, [target, value])
            writes[key] = (node, target, value)
        discard([node for node, *_ in self._writes.values()])
        used, before = ({node for node, _ in t.by_content.values()} for t in (recorder.now, self._traced))
        discard(sorted(before - used))
        self._writes, self._traced, self._assumptions = writes, recorder.now, recorder.facts

    def _seeds_at(self, value: Value) -> Iterable[Value]:
        return [self._seeds[value]] if value in self._seeds else ()

    def _sum_dtype(self, value: Value) -> DType | None:
        if value not in self._backward.wanted or self.source.op(value.node) != PARAM:
            return None
        return self.source.weights[self.source.key(value.node)].grad_dtype


class RetracedStep:
    """A training step of a program with checkpoints or opaque ops (no vjp); after an edit, trace a new one."""

    def __init__(self, source: Program, task: TrainingTask) -> None:
        def step(*feeds: Tensor) -> Mapping[str, Tensor]:
            given = dict(zip(task.inputs, feeds, strict=True))
            for v in task.trained():
                v.grad = None
            with autocast_to(task.low):
                fed = {name: given.pop(name) for name in source.input_names()}
                outputs, observed = evaluate_with(source, fed, [*task.observed()])
            leaves = {v: t for v, t in observed.items() if t.requires_grad}
            for t in leaves.values():
                t.retain_grad()
            given |= {name: outputs[name] for name in task.reads}
            root, results = task.objective(given)
            root.backward()
            recorder: Any = active_recorder.get()
            named = {name: t.detach() for name, t in {**fed, **given}.items()}
            values = {v: recorder.recalled(t) for v, t in observed.items()}
            grads = {v: t.grad for v, t in leaves.items() if t.grad is not None}
            results = {**results, **task.update(StepValues(named, results, values, grads))}
            for v in task.trained():
                v.grad = None
            return results

        self.source, self.version = source, source.plan_version
        with enable_grad():
            self.program, self._recorder, _ = record(step, tuple(task.inputs.values()), names=tuple(task.inputs))

    @property
    def usable(self) -> bool:
        """True while the source has no edits since the trace and still has checkpoints or opaque ops (no vjp)."""
        return self.source.plan_version == self.version and not updatable(self.source)

    @property
    def fresh(self) -> bool:
        """False once an assumption of the trace no longer holds."""
        return all(fact() == value for fact, value in self._recorder.facts)

    def update(self) -> None:
        """Do nothing: after an edit of the source the caller creates a new object."""
