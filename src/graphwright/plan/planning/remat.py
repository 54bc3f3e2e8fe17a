"""A plan within a budget of bytes: values that lie idle at the fullest instruction are dropped and computed again.

Greedy, by bytes freed per operation run again, one value at a time, until the arena fits. What is planned then is a
derived program with clones that read through `recall`, so that no rewrite takes them for what was there; the bits stay.
Source for the rule: Kirisame et al. 2021, "Dynamic Tensor Rematerialization", section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Unpack

from graphwright.errors import ComputeError
from graphwright.ops import get
from graphwright.plan.table import TEMP, TILE, UNUSED
from graphwright.program import Program, Value
from graphwright.program.derived.recompute import BARRIER
from graphwright.program.kinds import ASSIGN, KINDS, STORED

if TYPE_CHECKING:
    from graphwright.errors import Facts
    from graphwright.graph import EdgeId, NodeId
    from graphwright.plan.plan import Plan

_TRIED = 8
"""Candidates measured per round; the first one mostly does."""
_CHAIN = 32
"""Operations run again for one value, at most."""


class BudgetImpossible(ComputeError):
    """No choice of values to compute again that was found fits.

    Attributes:
        best: the smallest arena that was found, in bytes.
    """

    def __init__(self, what: str, *, best: int = 0, **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.best = best


def within(p: Program, budget: int, plan_of: Callable[[Program], Plan]) -> Plan:
    """The plan of a program, with values computed again until its arena has at most `budget` bytes.

    Args:
        plan_of: makes a plan of a program.
    Raises: BudgetImpossible.
    """
    plan = plan_of(p)
    again: tuple[str, ...] = ()
    best = plan.arena_bytes
    while plan.arena_bytes > budget:
        now = _fullness(plan)
        for choice in _choices(plan)[:_TRIED]:
            trial = plan_of(choice.applied(plan.program))
            if _fullness(trial) < now:
                plan, again = trial, (*again, choice.path)
                best = min(best, plan.arena_bytes)
                break
        else:
            raise BudgetImpossible(
                "no values are left that could be computed again",
                best=best,
                where=p.name,
                expected=f"{budget:,} bytes",
                got=f"{best:,} bytes at best",
                fix="a larger budget, or a smaller batch",
            )
    return replace(plan, options=replace(plan.options, remat=budget), again=again)


def _fullness(plan: Plan) -> tuple[int, int]:
    """The most bytes that are live, and at how many instructions."""
    line = plan.memory_timeline()
    most = max(line, default=0)
    return most, line.count(most)


@dataclass(slots=True)
class _Choice:
    """One value to be computed again.

    Attributes:
        path: of the node that makes it.
        clones: nodes to run again for it.
        late: edges that carry the clone's value.
        score: bytes freed per operation.
    """

    path: str
    clones: frozenset[NodeId]
    late: frozenset[EdgeId]
    score: float

    def applied(self, p: Program) -> Program:
        """The program with the clones in front of the first reader; it shares all variables."""
        new = Program(p.name)
        new.source = (p, p.version)
        values: dict[Value, Value] = {}
        twins: dict[Value, Value] = {}
        taken = {p.path(n) for n in p.nodes()}

        def named(wanted: str) -> str:
            name = next(n for n in chain([wanted], (f"{wanted}_{k}" for k in count(2))) if n not in taken)
            taken.add(name)
            return name

        def twin(value: Value) -> Value:
            if value not in twins:
                name = named(f"recall.{p.path(value.node)}")
                twins[value] = Value(new.add_op(BARRIER, [values[value]], {}, name))
            return twins[value]

        def copied(node: NodeId, name: str, operands: Sequence[Value]) -> NodeId:
            made = new.insert_node(p.op(node), p.attrs(node), name, p.specs(node))
            for edge, operand in zip(p.in_edges(node), operands, strict=True):
                new.insert_edge(operand, made, p.edge_port(edge))
            return made

        order = p.order()
        readers = {p.graph.target(e) for e in self.late}
        first = next(n for n in order if n in readers)
        for node in order:
            if node == first:
                for inner in (n for n in order if n in self.clones):
                    made = copied(inner, named(f"again.{p.path(inner)}"), [twin(v) for v in p.operands(inner)])
                    twins.update({Value(inner, k): Value(made, k) for k in range(len(p.specs(inner)))})
            carried = [(e, p.edge_value(e)) for e in p.in_edges(node)]
            operands = [twins[v] if e in self.late else values[v] for e, v in carried]
            if p.op(node) == ASSIGN:
                new.add_assign(operands[0], operands[1], p.path(node))
                continue
            if p.op(node) in STORED:
                new.weights.add(p.key(node), p.weights[p.key(node)])
            made = copied(node, p.path(node), operands)
            values.update({Value(node, k): Value(made, k) for k in range(len(p.specs(node)))})
        new.set_outputs({name: values[v] for name, v in zip(p.output_names(), p.outputs(), strict=True)})
        return new


class _Uses:
    """Which instruction makes each value, which read it, and of which other value a view is."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.slots, self.buffers, self.rows = plan, plan.slots, plan.buffers, plan.arranged.rows
        self.made: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for i, instr in enumerate(plan.instrs):
            for s in instr.outs:
                self.made[s] = i
            for base in {self.slots[s].base for s in instr.ins}:
                self.readers.setdefault(base, []).append(i)
        kept = (*plan.outputs.values(), *plan.watched.values())
        kept += tuple(new for _, new in plan.arranged.ledger.writes().values())
        self.kept = {self.slots[s].base for s in kept}

    def base(self, value: Value) -> int:
        """The slot whose value a value shows."""
        return self.slots[self.rows[value.node].results[value.port]].base

    def kind(self, base: int) -> str:
        """The kind of buffer that a value lies in."""
        return self.buffers[self.slots[base].buffer].kind

    def there(self, base: int, at: int) -> bool:
        """True if a value is in memory at an instruction anyway."""
        if self.kind(base) not in (TEMP, TILE, UNUSED) or base in self.kept:
            return True
        return base in self.made and self.kind(base) == TEMP and max(self.readers.get(base, [-1])) >= at


def _choices(plan: Plan) -> list[_Choice]:
    """Values that lie idle at the fullest instruction, the best first."""
    line, uses = plan.memory_timeline(), _Uses(plan)
    if not line:
        return []
    peak = line.index(max(line))
    found: list[_Choice] = []
    for base, made in uses.made.items():
        value, readers = uses.slots[base].value, uses.readers.get(base, [])
        after = [i for i in readers if i > peak]
        if value is None or made >= peak or not after or peak in readers or base in uses.kept:
            continue
        if uses.kind(base) == TEMP and (choice := _choice(uses, value.node, base, after)) is not None:
            found.append(choice)
    return sorted(found, key=lambda c: -c.score)


def _choice(uses: _Uses, node: NodeId, base: int, after: Sequence[int]) -> _Choice | None:
    """What it takes to have a value again for the instructions `after`; None if too much."""
    plan, p = uses.plan, uses.plan.program
    late: set[EdgeId] = set()
    for instr in map(plan.instrs.__getitem__, after):
        edges = [e for e in p.in_edges(instr.node) if uses.base(p.edge_value(e)) == base]
        if instr.why or not edges:
            return None  # a copy that a layout needs, or what a rewrite made of several nodes
        late.update(edges)
    at, flops = after[0], 0
    stack = list({p.edge_value(e).node for e in late})
    clones = set(stack)
    while stack:
        row = uses.rows[stack.pop()]
        if row.op in KINDS or p.op(row.node) in KINDS or get(row.op).traits.update or len(clones) > _CHAIN:
            return None
        ins = [uses.slots[uses.rows[v.node].results[v.port]].spec for v in row.sources]
        flops += get(p.op(row.node)).cost(ins, row.specs, p.attrs(row.node)).flops
        for operand in row.sources:
            source = uses.base(operand)
            if operand.node not in clones and (source == base or not uses.there(source, at)):
                clones.add(operand.node)
                stack.append(operand.node)
    freed = uses.buffers[uses.slots[base].buffer].nbytes
    return _Choice(plan.path(node), frozenset(clones), frozenset(late), freed / (flops + 1))
