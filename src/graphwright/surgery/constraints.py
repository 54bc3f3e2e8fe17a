"""Constraints: conditions on a program whose violations are findings, with repairs as fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.graph.analysis import critical_path
from graphwright.ops import OPS, traits
from graphwright.program.axes.solve_axes import origin
from graphwright.program.constraints import KINDS
from graphwright.program.cost import size
from graphwright.program.editing.replace import redirect
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Value
from graphwright.program.selection import matches
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Limits, Severity, add_linear, cut, grown, map_sizes
from graphwright.surgery.findings.gradients import by_structure
from graphwright.surgery.findings.heads import unbalanced_heads
from graphwright.surgery.findings.residuals import gated, has_identity_path
from graphwright.surgery.walks import shortest_path

if TYPE_CHECKING:
    from graphwright.program.program import Program


@dataclass(frozen=True)
class Constraint:
    """A condition on a program. It names nodes by path and axes by pattern, so that it can be saved."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.name:
            KINDS[cls.name] = cls

    def violations(self, p: Program) -> list[Finding]:
        """Return a finding with repairs for each violation in a program; an empty list if the constraint holds."""
        return list(self._violations(p))

    def _violations(self, p: Program) -> Iterable[Finding]:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the constraint's name and fields."""
        return {"constraint": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}

    def broken(
        self, p: Program, what: str, *nodes: NodeId, where: str, severity: Severity = Severity.ERROR,
        fixes: tuple[Fix, ...] = (), witness: Mapping[str, Any] | None = None, expected: str | None = None,
        got: str | None = None,
    ) -> Finding:  # fmt: skip
        """Return a finding that reports the violation `what`; see `Finding.of` for the other arguments."""
        return Finding.of(p, self.name, severity, what, *nodes, where=where, fixes=fixes, witness=witness,
                          expected=expected, got=got)  # fmt: skip


Condition = Callable[["Program"], "Iterable[Finding | str]"]
_conditions: dict[str, Condition] = {}


def constraint(name: str) -> Callable[[Condition], Condition]:
    """Return a decorator that registers a function under a name, for the constraint `Custom(name)`.

    The function gets a program, and returns its violations: findings, or texts that describe them.
    Raises: UsageError if a different function is already registered under the name.
    """

    def enter(rule: Condition) -> Condition:
        if _conditions.setdefault(name, rule) is not rule:
            raise UsageError("a different function is already registered under this name", where=name)
        return rule

    return enter


@dataclass(frozen=True)
class Custom(Constraint):
    """A condition `rule`: the name of a function registered by `constraint`, or a function, which cannot be saved."""

    rule: str | Condition
    name: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        if isinstance(self.rule, str) and self.rule not in _conditions:
            fix = 'first import the module that registers it by @graphwright.surgery.constraint("name")'
            raise UsageError("no function is registered under this name", got=self.rule, fix=fix,
                             expected=", ".join(_conditions))  # fmt: skip

    def _violations(self, p: Program) -> Iterator[Finding]:
        rule = _conditions[self.rule] if isinstance(self.rule, str) else self.rule
        label = self.rule if isinstance(self.rule, str) else getattr(rule, "__name__", "custom")
        for at, each in enumerate(rule(p)):
            yield each if isinstance(each, Finding) else self.broken(p, each, where=f"{label} {at}")

    def to_json(self) -> dict[str, Any]:
        """Return a dict with the name of the registered function. Raises: UsageError if `rule` is a function."""
        if not isinstance(self.rule, str):
            fix = 'decorate it with @graphwright.surgery.constraint("name"), and use Custom("name")'
            raise UsageError("the constraint holds a callable, which cannot be saved", fix=fix,
                             got=getattr(self.rule, "__qualname__", repr(self.rule)))  # fmt: skip
        return super().to_json()


# -- paths between two nodes -------------------------------------------------------------------------------------------
Wrong = tuple[str, Severity, tuple[Fix, ...]]
"""Description of a violation, its severity, and repairs."""


@dataclass(frozen=True)
class _Pair(Constraint):
    """A condition on the paths from node `a` to `b`. A missing node is a violation, unless `optional` is True."""

    a: str
    b: str
    optional: ClassVar[bool] = False

    def _violations(self, p: Program) -> list[Finding]:
        known = {p.path(n): n for n in p.nodes()}
        if missing := [path for path in (self.a, self.b) if path not in known]:
            what = "a node of the constraint does not exist"
            return [] if self.optional else [self.broken(p, what, where=", ".join(missing))]
        source, target = known[self.a], known[self.b]
        return [self.broken(p, what, source, target, where=f"{self.a} -> {self.b}", severity=severity, fixes=fixes)
                for what, severity, fixes in self.between(p, source, target)]  # fmt: skip

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Wrong]:
        """Return the violations of the condition on the paths from `source` to `target`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ResidualPath(_Pair):
    """A constraint: some path from node `a` to node `b` has only sums, casts and scalar gates.

    If `b` is not a junction, the path may end at any junction that reads `b`. If the shapes or dtypes of `a` and the
    junction differ, the path may start with one linear map.
    """

    name: ClassVar[str] = "residual"

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Wrong]:
        """Report a missing path. The repair adds an edge with a gate or matrix that is zero until it is trained."""
        sums = [target] if p.is_junction(target) else [n for n in p.consumers(target) if p.is_junction(n)]
        if any(has_identity_path(p, source, s) or _projected(p, source, s) for s in sums):
            return []
        what = f"there is no identity path from {self.a} into {self.b}"
        return [(what, Severity.WARNING, bridge(p, source, target))]


@dataclass(frozen=True)
class Reachable(_Pair):
    """A constraint: a path exists from node `a` to node `b`."""

    name: ClassVar[str] = "reachable"

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Wrong]:
        """Report a missing path. The repair adds an edge with a gate or matrix that is zero until it is trained."""
        if target in p.dependents([source]):
            return []
        return [(f"there is no path from {self.a} to {self.b}", Severity.ERROR, bridge(p, source, target))]


@dataclass(frozen=True)
class NoPath(_Pair):
    """A constraint: no path exists from node `a` to node `b`. It also holds if either node does not exist."""

    name: ClassVar[str] = "no_path"
    optional: ClassVar[bool] = True

    def between(self, p: Program, source: NodeId, target: NodeId) -> list[Wrong]:
        """Report an existing path. The repair cuts edges into junctions."""
        if target not in p.dependents([source]):
            return []
        edges = _cut_set(p, source, target)
        fixes = () if edges is None else (cut(p, *edges, keeps=False),)
        return [(f"there is a path from {self.a} to {self.b}", Severity.ERROR, fixes)]


def bridge(p: Program, source: NodeId, target: NodeId) -> tuple[Fix, ...]:
    """Return a tuple of one fix, which connects `source` to `target`; empty if no connection is possible.

    If `target` is not a junction, a new junction after it adds both values. The connection passes through a gate or a
    matrix that is zero until it is trained.
    """
    if source in p.dependents([target]):
        return ()
    have, want = p.specs(source)[0], p.specs(target)[0]
    fits, sizes = have == want, map_sizes(have, want)
    if not fits and sizes is None:
        return ()

    def apply(e: Transaction) -> None:
        junction = target
        if not e.program.is_junction(target):  # all its readers read the new sum
            junction = e.add("junction", target, name=e.program.free_name(f"{e.program.path(target)}.sum"))
            redirect(e, {Value(target): Value(junction)})
        if fits or sizes is None:
            gated(e, Value(source), junction)
        else:
            e.connect(add_linear(e, Value(source), np.zeros(sizes), f"{e.program.path(junction)}.bridge"), junction)

    how = "through a gate at 0" if fits else "through a matrix of zeros"
    return (Fix(f"connect {p.path(source)} -> {p.path(target)} {how}", apply, 1, 1 if p.is_junction(target) else 2,
                1 if fits else prod(sizes or ()), keeps_function=True),)  # fmt: skip


def _projected(p: Program, source: NodeId, junction: NodeId) -> bool:
    """Return whether `source` reaches the junction, of another spec, by a trained linear map and a residual path."""
    if p.specs(source)[0] == p.spec(junction):
        return False
    maps = [n for n in p.consumers(source) if traits(p.op(n)).contracts == "out_in" and p.operands(n)[0].node == source]
    weights = [origin(p, p.operands(n)[1]) for n in maps]
    return any(w is not None and p.op(w) == PARAM and has_identity_path(p, n, junction)
               for n, w in zip(maps, weights, strict=True))  # fmt: skip


def _cut_set(p: Program, source: NodeId, target: NodeId) -> list[EdgeId] | None:
    """Return edges into junctions whose removal leaves no path; None if a path has no edge into a junction.

    The search is greedy: while a path remains, its last edge into a junction is added to the result.
    """
    gone: set[EdgeId] = set()
    while (path := shortest_path(p, source, target, lambda e: e not in gone)) is not None:
        last = next((e for e in path if p.is_junction(p.graph.target(e))), None)
        if last is None:
            return None
        gone.add(last)
    return sorted(gone)


# -- sizes, gradients and heads ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Budget(Constraint):
    """A constraint: upper limits of a program's size; None means no limit. An exceeded limit has no repair.

    Attributes:
        parameters: limit of the number of parameters.
        flops: limit of the floating point operations of one run in which every named dimension is 1.
        bytes: limit of the bytes of all weights, in their stored dtypes.
    """

    parameters: int | None = None
    flops: int | None = None
    bytes: int | None = None
    name: ClassVar[str] = "budget"

    def _violations(self, p: Program) -> Iterator[Finding]:
        taken = size(p, p.params() if self.flops is None else None)  # count operations only if they are limited
        limits = {"parameters": (taken.params, self.parameters), "flops": (taken.flops, self.flops),
                  "bytes": (taken.bytes, self.bytes)}  # fmt: skip
        for what, (got, most) in limits.items():
            if most is not None and got > most:
                yield self.broken(p, f"too many {what}", where=what, expected=f"{most:,}", got=f"{got:,}")


@dataclass(frozen=True)
class EqualSizes(Constraint):
    """A constraint: all axes that match a pattern have the same size. Repairs add units that change no result."""

    axis: str
    name: ClassVar[str] = "uniform"

    def _violations(self, p: Program) -> Iterator[Finding]:
        groups = [g for name, g in p.axes().items() if matches(self.axis, name)]
        most = max((g.size for g in groups), default=0)
        for g in groups:
            if g.size < most:
                yield self.broken(p, "the axis is smaller than others", where=g.name, expected=str(most),
                                  got=str(g.size), fixes=grown(g, most))  # fmt: skip


@dataclass(frozen=True)
class MultipleOf(Constraint):
    """A constraint: axes that match a pattern have sizes divisible by `k`. Repairs add units that change no result."""

    axis: str
    k: int
    name: ClassVar[str] = "multiple_of"

    def _violations(self, p: Program) -> Iterator[Finding]:
        for name, g in p.axes().items():
            if matches(self.axis, name) and g.size % self.k:
                yield self.broken(p, "the size is not a multiple", where=g.name, expected=f"a multiple of {self.k}",
                                  got=str(g.size), fixes=grown(g, -(-g.size // self.k) * self.k))  # fmt: skip


@dataclass(frozen=True)
class MaxDepth(Constraint):
    """A constraint: no path has more than `n` ops, not counting views. Violations have no repair."""

    n: int
    name: ClassVar[str] = "max_depth"

    def _violations(self, p: Program) -> Iterator[Finding]:
        def computes(node: NodeId) -> bool:
            return p.op(node) in OPS and OPS[p.op(node)].view is None

        length, path = critical_path(p.graph, lambda node: float(computes(node)))
        ops = [node for node in path if computes(node)]
        if length > self.n:
            yield self.broken(p, "the longest path is too long", *ops, where=p.path(ops[-1]), expected=f"{self.n} ops",
                              got=f"{length:.0f}", witness={"path": [p.path(n) for n in ops]})  # fmt: skip


@dataclass(frozen=True)
class GradientFlow(Constraint):
    """A constraint: trained weights have a path to the loss through differentiable ops and open gates.

    Attributes:
        params: path pattern of the weights.
        loss: name of the output that is the loss; None means all floating outputs.
    """

    params: str = "**"
    loss: str | None = None
    name: ClassVar[str] = "gradient_flow"

    def _violations(self, p: Program) -> Iterator[Finding]:
        for f in by_structure(Diagnosis(p), self.loss):
            if any(matches(self.params, path) for path in f.witness["params"]):
                yield replace(f, kind=self.name)


@dataclass(frozen=True)
class HeadBalance(Constraint):
    """A constraint: norms of each attention head's weights are within a factor `ratio` of their layer's median norms.

    Repairs multiply the weights q (or o) of a head by a constant and divide k (or v) by it, or cut dead heads.
    """

    ratio: float = 8.0
    name: ClassVar[str] = "head_balance"

    def _violations(self, p: Program) -> Iterator[Finding]:
        found = unbalanced_heads(Diagnosis(p, limits=Limits(head_ratio=self.ratio)))
        return (replace(f, kind=self.name) for f in found)
