"""A training step as a program that follows the one it trains: forward, objective, backward, update, all one graph.

Forward and backward are kept up to date node by node. Objective and update are tensor code of the caller: after an edit
that they depend on they run again on symbols, and what they write that is there already is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphwright.autograd import (
    Parameter,
    Tensor,
    active_recorder,
    autocast_to,
    enable_grad,
    no_grad,
    training,
)
from graphwright.ops import OPS
from graphwright.program.derived.backward import Backward
from graphwright.program.derived.retrace import Reused
from graphwright.program.kinds import INPUT, PARAM, STATE
from graphwright.program.op_graph import Value
from graphwright.program.run import evaluate
from graphwright.program.trace import record
from graphwright.program.validate import refuse_broken

if TYPE_CHECKING:
    from graphwright.array import DType, Spec
    from graphwright.autograd import (
        Variable,
    )
    from graphwright.graph import NodeId
    from graphwright.program.derived.retrace import Known, Role
    from graphwright.program.program import Program

Objective = Callable[[Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""(outputs and inputs by name) -> what is differentiated, and the results of the step by name."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a training step does with a program.

    Attributes:
        inputs: specs of the program's inputs, and of further ones that the objective reads.
        reads: outputs of the program that the objective reads.
        objective: see `Objective`; runs with a tape.
        trained: gives the parameters trained now.
        update: assigns to variables by what `.grad` of the parameters holds.
        low: the 16-bit float of autocast, if it is on.
    """

    inputs: Mapping[str, Spec]
    reads: Sequence[str]
    objective: Objective
    trained: Callable[[], Iterable[Parameter]]
    update: Callable[[], None]
    low: DType | None = None


class Step(Backward):
    """One training step of `source`, kept up to date by `sync`.

    Args:
        source: the program; it is never changed.
        task: what is done with it.

    Attributes:
        program: the inputs -> the results of the objective; it writes what the source writes and what `update` assigns.
        roles: see `Reused`.
    """

    def __init__(self, source: Program, task: Task) -> None:
        sizes: dict[str, int] = {}
        for node in source.inputs():
            source.spec(node).match(task.inputs[source.path(node)].sizes, sizes)
        super().__init__(source, (), sizes, f"step of {source.name}", task.low)
        self.task = task
        for name in task.inputs.keys() - {source.path(n) for n in source.inputs()}:
            self._recorder.source(INPUT, name, task.inputs[name], {})
        self._held: list[NodeId] = []
        self._flipped: set[NodeId] = set()
        self._stored_at: dict[int, NodeId] = {}  # id of each variable of the source that is read -> its node there
        self._seeds: dict[Value, Value] = {}
        self._beside: dict[Parameter, Value] = {}  # gradients of parameters that the objective alone reads
        self._known: Known = {}
        self.roles: dict[Role, NodeId] = {}
        self._writes: dict[int, NodeId] = {}
        self._facts: list[tuple[Callable[[], object], object]] = []
        self._before: Any = None
        self._after: Any = None
        self.version = -1
        self.sync()

    @staticmethod
    def follows(source: Program) -> bool:
        """False for a program whose gradient is not kept up to date: with marks to compute again, or opaque ops."""
        return not source.checkpoints and not any(source.of_kind(n) for n, row in OPS.items() if row.traits.opaque)

    @property
    def usable(self) -> bool:
        """True while the program was edited by nobody else, and the source has the inputs it had."""
        mine = self.program.version == self.version and set(self.program.input_names()) == set(self.task.inputs)
        return mine and self.follows(self.source) and self._fits()

    @property
    def fresh(self) -> bool:
        """False once something that objective or update relied on, beside the program, is not so any more."""
        return all(fact() == value for fact, value in self._facts)

    def sync(self) -> None:
        """Follow the edits since the last time. After an error it is of no use any more."""
        source = self.source
        refuse_broken(source)
        self._recorder.near = self.version >= 0
        changed = set(self._changed)
        self._changed.clear()
        held = [source.output(name) for name in self.task.reads]
        held += [source.operands(write)[1] for write in source.assigns()]
        trained = list(self.task.trained())
        params = {id(source.weights[source.key(n)]): n for n in source.params()}
        wanted = {Value(params[id(v)]): None for v in trained if id(v) in params}
        self._flipped = {v.node for v in wanted.keys() ^ self.wanted.keys() if v.node in source.graph}
        self.wanted = wanted
        token = active_recorder.set(self._recorder)
        try:
            with no_grad():
                now = [v.node for v in held]
                touched = self._mirror(changed | self._flipped, now, self._held)
                self._held = now
                self._write_around(touched, trained)
        finally:
            active_recorder.reset(token)
        self._sweep()
        self._drop_unread()
        self.program.version += 1
        self.version = self.program.version

    # -- around the backward -----------------------------------------------------------------------------------------
    def _write_around(self, touched: set[NodeId], trained: Sequence[Parameter]) -> None:
        """Objective, backward and update, each as far as it depends on something new."""
        nodes = [n for kind in (PARAM, STATE) for n in self.source.of_kind(kind) if n in self._twins]
        self._stored_at = {id(self.source.weights[self.source.key(n)]): n for n in nodes}
        ends = [self.source.output(name) for name in self.task.reads]
        before: list[Any] = [(self._twin(v), self._tensor(self._twin(v)).spec, self._wants(v)) for v in ends]
        before += [(self._twins.get(t.node), self._twin(v)) for t, v in self._carried()]
        before += [training(), *(id(v) for v in trained)]
        recorder = None if self.fresh and before == self._before else self._run_objective(trained)
        self._before = before
        self._differentiate(touched)
        grads: list[tuple[Parameter, Value]] = []
        for value in self.wanted:
            if (arrived := self._sum(value)) is not None:
                variable = self.source.weights[self.source.key(value.node)]
                assert isinstance(variable, Parameter)
                grads.append((variable, arrived.total))
        grads += self._beside.items()
        after = [(id(v), v.lineage, v.spec, self.stands_for(v), g) for v, g in grads]
        if recorder is not None or after != self._after:
            self._run_update(recorder or self._run_objective(trained), grads)
        self._after = after

    def _run_objective(self, trained: Sequence[Parameter]) -> Reused:
        """Write the objective and its gradient; returns the recorder, for the update to go on with."""
        recorder = Reused(self)
        for target, value in self._carried():
            recorder.assign(self.source.weights[self.source.key(target.node)], recorder.tensor(self._twin(value)))
        ends = {name: self.source.output(name) for name in self.task.reads}
        leaves: dict[Value, Tensor] = {}
        for value in ends.values():
            leaf = leaves.setdefault(value, recorder.tensor(self._twin(value)))
            leaf.requires_grad = self._wants(value)
        p, names = self.program, self.task.inputs.keys() - ends.keys()
        given = {name: recorder.tensor(Value(p.node(name))) for name in names}
        token = active_recorder.set(recorder)
        try:
            for v in trained:
                v.grad = None
            with enable_grad():
                root, results = self.task.objective({**given, **{name: leaves[v] for name, v in ends.items()}})
                root.backward()
            given_grads = [(v, leaf.grad) for v, leaf in leaves.items()]
            seeds = {v: recorder.value_of(g) for v, g in given_grads if g is not None}
            self._beside = {}
            for v in trained:
                if v.grad is not None:
                    node, grad = self._stored_at.get(id(v)), recorder.value_of(v.grad)
                    if node is None:
                        self._beside[v] = grad
                    else:
                        seeds[Value(node)] = grad
            recorder.results = {name: recorder.value_of(t) for name, t in results.items()}
        finally:
            active_recorder.reset(token)
            recorder.restore()
        both = self._seeds.keys() | seeds.keys()
        self._ends.update(v for v in both if self._seeds.get(v) != seeds.get(v))
        self._seeds = seeds
        return recorder

    def _run_update(self, recorder: Reused, grads: Sequence[tuple[Parameter, Value]]) -> None:
        """Write the update, the results and the writes; what nothing stands for any more goes."""
        p = self.program
        token = active_recorder.set(recorder)
        try:
            for variable, value in grads:
                variable.grad = recorder.tensor(value)
            self.task.update()
        finally:
            active_recorder.reset(token)
            for variable, _ in grads:
                variable.grad = None
        if dict(zip(p.output_names(), p.outputs(), strict=True)) != recorder.results:
            p.set_outputs(recorder.results)
        writes: dict[int, NodeId] = {}
        for key, (target, value) in recorder.written().items():
            node = self._writes.pop(key, None)
            if node is not None and p.operands(node)[0] == target:
                self.lead_to(node, [target, value])
            else:
                self._throw(() if node is None else (node,))
                node = p.add_assign(target, value, p.free_name(f"{p.path(target)}.next"))
            writes[key] = node
        self._throw(tuple(self._writes.values()))
        still = set(recorder.used.values())
        self._throw([node for node in dict.fromkeys(self._known.values()) if node not in still])
        self._writes, self._known, self._facts = writes, recorder.used, recorder.facts
        self.roles = recorder.roles

    def _carried(self) -> list[tuple[Value, Value]]:
        """(state or param, its next value) of the source's own writes."""
        return [(v[0], v[1]) for v in map(self.source.operands, self.source.assigns())]

    def stands_for(self, variable: Variable) -> Value | None:
        """The node that is there for a variable of the source, if the source reads it."""
        node = self._stored_at.get(id(variable))
        return None if node is None else self._twin(Value(node))

    def known(self, key: tuple[Any, ...]) -> NodeId | None:
        """What objective and update wrote the last time."""
        return self._known.get(key)

    def source_node(self, kind: str, name: str, spec: Spec, attrs: Mapping[str, Any]) -> NodeId:
        """A new param, const or state, in front of everything else."""
        return self._recorder.source(kind, name, spec, attrs)

    # -- the backward ------------------------------------------------------------------------------------------------
    def _seeds_at(self, value: Value) -> Iterable[Value]:
        return [self._seeds[value]] if value in self._seeds else ()

    def _summed_in(self, value: Value) -> DType:
        if value not in self.wanted:
            return super()._summed_in(value)
        variable = self.source.weights[self.source.key(value.node)]
        return variable.grad_dtype

    def _noticed(self, node: NodeId, op: str) -> bool:
        return super()._noticed(node, op) or node in self._flipped

    def _drop_unread(self) -> None:
        """Take out constants that nothing reads any more."""
        p = self.program
        for node in self._recorder.constants():
            if not p.graph.out_degree(node):
                p.weights.drop(p.key(node))
                p.delete_node(node)
                self._recorder.drop(node)


class Retraced:
    """The same step of a program that `Step` cannot follow: traced anew after every edit. See `Step`."""

    def __init__(self, source: Program, task: Task) -> None:
        def step(*feeds: Tensor) -> Mapping[str, Tensor]:
            given = dict(zip(task.inputs, feeds, strict=True))
            for v in task.trained():
                v.grad = None
            with autocast_to(task.low):
                outputs = evaluate(source, {name: given.pop(name) for name in source.input_names()})
            root, results = task.objective({**given, **{name: outputs[name] for name in task.reads}})
            root.backward()
            task.update()
            return results

        self.source, self.version = source, source.version
        with enable_grad():
            self.program, self._recorder, _ = record(step, tuple(task.inputs.values()), tuple(task.inputs))

    @property
    def usable(self) -> bool:
        """True while the source is what was traced."""
        return self.source.version == self.version and not Step.follows(self.source)

    @property
    def fresh(self) -> bool:
        """False once something that the trace relied on is not so any more."""
        return all(fact() == value for fact, value in self._recorder.facts)

    def sync(self) -> None:
        """Nothing can be brought up to date."""


__all__ = ["Retraced", "Step", "Task"]
