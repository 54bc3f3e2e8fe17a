"""Rematerialisation: fit a plan's arena into a byte budget by recomputing values instead of keeping them.

At the instruction with the most live bytes, values that are needed only later are candidates. One at a time, the value
that frees the most bytes per operation is recomputed, until the arena fits. The planned program is a derived one, in
which the recomputing nodes read their operands through `recall` ops, so that no rewrite merges them with the originals.
Results keep their bits. Decisions are kept, see `Decisions`.
Source for the rule: Kirisame et al. 2021, "Dynamic Tensor Rematerialization", section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Unpack

from graphwright.errors import ComputeError, Facts
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import get
from graphwright.plan.table import TEMP, TILE, UNUSED
from graphwright.program.derived.recompute import BARRIER, Decisions
from graphwright.program.derived.rewrite import copy_node, rewrite
from graphwright.program.kinds import KINDS
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_op

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.program.program import Program

_TRIED = 8
"""Maximum candidates tried per round; usually the first one succeeds."""
_CHAIN = 32
"""Maximum operations recomputed for one value."""


class BudgetImpossible(ComputeError):
    """The arena does not fit the budget, and no further value was found whose recomputation makes it smaller.

    Attributes:
        best: bytes of the smallest arena that was found.
    """

    def __init__(self, what: str, *, best: int = 0, **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.best = best


def smallest_arena(plan: Plan, enough: int, plan_of: Callable[[Program], Plan], seconds: float) -> int:
    """Return the bytes of the smallest arena found by recomputing values, until it has at most `enough` bytes.

    The search ends after `seconds`, at the latest with the plan that is made then.
    """
    best, until = plan.arena_bytes, monotonic() + seconds
    for smaller, _ in _smaller(plan, plan_of):
        best = min(best, smaller.arena_bytes)
        if best <= enough or monotonic() > until:
            break
    return best


def _smaller(plan: Plan, plan_of: Callable[[Program], Plan]) -> Iterator[tuple[Plan, str]]:
    """Yield plans that recompute one value more each, with the path of the node that computes it, to the last one."""
    while True:
        now = _fullness(plan)
        for candidate in _candidates(plan)[:_TRIED]:
            trial = plan_of(candidate.applied(plan.program))
            if _fullness(trial) < now:
                plan = trial
                yield trial, candidate.path
                break
        else:
            return


def within(p: Program, budget: int, plan_of: Callable[[Program], Plan]) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan whose arena has at most `budget` bytes, and the paths of the recomputed nodes.

    `plan_of` plans a program. Raises: BudgetImpossible if no such plan is found.
    """
    plan = plan_of(p)
    recomputed: tuple[str, ...] = ()
    best, smaller = plan.arena_bytes, _smaller(plan, plan_of)
    while plan.arena_bytes > budget:
        found = next(smaller, None)
        if found is None:
            what = "the arena exceeds the budget, and recomputing no further value makes it smaller"
            raise BudgetImpossible(what, best=best, where=p.name, expected=f"at most {budget:,} bytes",
                                   got=f"{best:,} bytes at best", fix="a larger remat, or a smaller batch")  # fmt: skip
        plan, path = found
        best, recomputed = min(best, plan.arena_bytes), (*recomputed, path)
    return plan, recomputed


def _fullness(plan: Plan) -> tuple[int, int]:
    """Return (the maximum of live bytes over all instructions, the number of instructions at which it is reached)."""
    line = plan.memory_timeline()
    most = max(line, default=0)
    return most, line.count(most)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One value to recompute.

    Attributes:
        path: path of the node that computes it.
        clones: nodes to run again for it.
        late: edges into later readers, which will carry the recomputed value instead of the original.
        score: bytes freed per floating-point operation that is run again.
    """

    path: str
    clones: frozenset[NodeId]
    late: frozenset[EdgeId]
    score: float

    def applied(self, p: Program) -> Program:
        """Return a copy of `p`, sharing its variables, that recomputes the value just before its first late reader."""
        order = p.order()
        readers = {p.graph.target(e) for e in self.late}
        first = next(n for n in order if n in readers)

        def insert_clones(new: Program, node: NodeId, values: Mapping[Value, Value]) -> Mapping[Value | EdgeId, Value]:
            if node != first:
                return {}
            twins: dict[Value, Value] = {}

            def twin(value: Value) -> Value:
                if value not in twins:
                    name = new.free_name(f"recall.{p.path(value.node)}")
                    twins[value] = Value(add_op(new, BARRIER, [values[value]], {}, name))
                return twins[value]

            for inner in (n for n in order if n in self.clones):
                name = new.free_name(f"again.{p.path(inner)}")
                made = copy_node(p, inner, new, name, [twin(v) for v in p.operands(inner)])
                twins.update({Value(inner, k): Value(made, k) for k in range(len(p.specs(inner)))})
            return {e: twins[p.edge_value(e)] for e in self.late}

        return rewrite(p, p.name, before=insert_clones)[0]


class _ValueUses:
    """The instruction that computes each value and the instructions that read it, by slot."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.slots, self.buffers = plan, plan.slots, plan.buffers
        self.records = plan.buffer_layout.records
        self.made: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for i, instr in enumerate(plan.instrs):
            for s in instr.outs:
                self.made[s] = i
            for base in {self.slots[s].base for s in instr.ins}:
                self.readers.setdefault(base, []).append(i)
        self.decisions = Decisions(plan.program)
        returned = (*plan.outputs.values(), *plan.watched.values())
        written = (new for _, new in plan.buffer_layout.builder.writes().values())
        self.outlives = {self.slots[s].base for s in (*returned, *written)}

    def base(self, value: Value) -> int:
        """Return the slot of a value; for a view, the slot that it views."""
        return self.slots[self.records[value.node].results[value.port]].base

    def kind(self, base: int) -> str:
        """Return the kind (see `Buffer`) of the buffer that holds the slot `base`."""
        return self.buffers[self.slots[base].buffer].kind

    def live(self, base: int, at: int) -> bool:
        """Return True if the value of slot `base` is still in memory at instruction `at`, without recomputing it."""
        if self.kind(base) not in (TEMP, TILE, UNUSED) or base in self.outlives:
            return True
        return base in self.made and self.kind(base) == TEMP and max(self.readers.get(base, [-1])) >= at


def _candidates(plan: Plan) -> list[_Candidate]:
    """Return the values that could be recomputed after the instruction with the most live bytes, best first."""
    line, uses = plan.memory_timeline(), _ValueUses(plan)
    if not line:
        return []
    peak = line.index(max(line))
    found: list[_Candidate] = []
    for base, made in uses.made.items():
        value, readers = uses.slots[base].value, uses.readers.get(base, [])
        after = [i for i in readers if i > peak]
        if value is None or made >= peak or not after or peak in readers or base in uses.outlives:
            continue
        if uses.kind(base) == TEMP and (candidate := _candidate(uses, value.node, base, after)) is not None:
            found.append(candidate)
    return sorted(found, key=lambda c: -c.score)


def _candidate(uses: _ValueUses, node: NodeId, base: int, after: Sequence[int]) -> _Candidate | None:
    """Return the candidate that recomputes a node's value, in slot `base`, for the instructions `after` that read it.

    None if the value cannot be recomputed, or if more than 32 nodes would have to run again.
    """
    plan, p = uses.plan, uses.plan.program
    late: set[EdgeId] = set()
    for instr in map(plan.instrs.__getitem__, after):
        edges = [e for e in p.in_edges(instr.node) if uses.base(p.edge_value(e)) == base]
        if instr.why or not edges:
            return None  # a copy for its layout, or an instruction that a rewrite made of several nodes
        late.update(edges)
    at, flops = after[0], 0
    stack = list({p.edge_value(e).node for e in late})
    clones = set(stack)
    while stack:
        record = uses.records[stack.pop()]
        kinds = {record.op, p.op(record.node)}
        kept = record.node in uses.decisions or get(record.op).traits.update
        if kinds & KINDS or kept or len(clones) > _CHAIN:
            return None
        ins = [uses.slots[uses.records[v.node].results[v.port]].spec for v in record.sources]
        flops += get(p.op(record.node)).cost(ins, record.specs, p.attrs(record.node)).flops
        for operand in record.sources:
            source, decides = uses.base(operand), operand.node in uses.decisions
            if operand.node not in clones and (source == base or not (decides or uses.live(source, at))):
                clones.add(operand.node)
                stack.append(operand.node)
    freed = uses.buffers[uses.slots[base].buffer].nbytes
    return _Candidate(plan.path(node), frozenset(clones), frozenset(late), freed / (flops + 1))
