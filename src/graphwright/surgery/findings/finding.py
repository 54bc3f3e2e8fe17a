"""A finding: one defect of a network, a witness that shows the defect, and edits that fix it.

A finding extends `Mismatch`, the result of `program.validate()`, by a severity, a witness and fixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphwright.array import Spec
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.program.draw import NodeNote
from graphwright.program.editing.replace import redirect
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import STORED
from graphwright.program.op_graph import Value
from graphwright.program.validate import Mismatch
from graphwright.report import Report, listed
from graphwright.settings import Count, NotNegative, Settings
from graphwright.surgery.findings.wiring import Wiring

if TYPE_CHECKING:
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.program.editing.journal import Entry
    from graphwright.program.program import Program


class Severity(IntEnum):
    """Severity of a finding: informative, suspicious, wrong, or fatal (the program cannot run)."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    CRITICAL = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Fix(Report):
    """Edits that fix one finding.

    Attributes:
        what: description of the edits, for the journal.
        apply: function that makes the edits in an open transaction.
        edges, ops: number of edges and ops that the fix adds or changes.
        parameters: number of parameters that the fix adds.
        keeps_function: True if no output of the program changes, or if the repaired part could not run before.
    """

    what: str
    apply: Callable[[Transaction], object]
    edges: int = 0
    ops: int = 0
    parameters: int = 0
    keeps_function: bool = False
    HIDDEN: ClassVar = ("apply", "edges", "ops", "parameters")
    FIGURES: ClassVar = ("cost",)

    @property
    def cost(self) -> float:
        """Cost by which fixes are ranked: 1 per edge, 2 per op, 1 per 10⁶ parameters, 10 if the function changes."""
        return round(self.edges + 2 * self.ops + self.parameters / 1e6 + (0 if self.keeps_function else 10), 6)


@dataclass(frozen=True, slots=True)
class Finding(Mismatch):
    """One defect: a `Mismatch` with evidence and fixes.

    Attributes:
        kind: name of the rule that found the defect.
        nodes, edges: handles of the affected nodes and edges.
        paths: paths of the nodes, then of the edges, at the time of the diagnosis.
        witness: dict of the evidence: paths, keys, indices, numbers.
        fixes: fixes by ascending cost.
    """

    severity: Severity = Severity.WARNING
    nodes: tuple[NodeId, ...] = ()
    edges: tuple[EdgeId, ...] = ()
    paths: tuple[str, ...] = ()
    witness: Mapping[str, Any] = field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()
    HIDDEN: ClassVar = ("nodes", "edges")
    OPTIONAL: ClassVar = ()

    @staticmethod
    def of(
        p: Program, kind: str, severity: Severity, what: str, *nodes: NodeId, edges: tuple[EdgeId, ...] = (),
        where: str | None = None, fixes: tuple[Fix, ...] = (), witness: Mapping[str, Any] | None = None,
        axis: int | None = None, expected: str | None = None, got: str | None = None,
    ) -> Finding:  # fmt: skip
        """Return a finding about nodes and edges; `what` describes the defect, `where` defaults to the first path."""
        paths = (*map(p.path, nodes), *map(p.path, edges))
        return Finding(kind, where or paths[0], what, axis, expected, got, severity, nodes, edges, paths,
                       dict(witness or {}), tuple(sorted(fixes, key=lambda f: f.cost)))  # fmt: skip

    @property
    def identity(self) -> tuple[str, str]:
        """Kind and location; findings that agree in both count as the same finding."""
        return self.kind, self.where

    def cheapest(self, only: str | None = None) -> Fix | None:
        """Return the cheapest fix, or with `only="keeps_function"` the cheapest that changes no output; else None."""
        return next((f for f in self.fixes if only is None or f.keeps_function), None)


@dataclass(frozen=True, slots=True)
class Limits(Settings):
    """Thresholds of the rules.

    Attributes:
        siblings: a block without a residual path is reported if at least this share of its sibling blocks has a path.
        head_ratio: a head's norm must be within this factor of the median norm of its layer.
        dead_head: a head counts as dead if its norm is below this share of the median.
        rank: smallest effective rank of a matrix, as a share of its shorter side.
        gradient: smallest gradient norm of a param, as a share of the median of similar params.
        rows: smallest number of probe rows for which inactive units are reported.
        width: a layer through which all paths lead is a bottleneck if its features number less than this share of the
            features of both neighbours.
        declared: path patterns of intended bottlenecks, which are not reported.
        redundant: an edge is redundant if cutting it changes each output by less than this share of its largest entry.
        gain: largest ratio between gradients along the residual stream, and largest gain of a chain of linear maps.
        stable_rank: smallest stable rank of the representations of tokens.
        unlike: largest ratio between the root mean squares of a weight and of its nearest siblings.
        noise: a matrix counts as noise if the flatness of its spectrum is within this distance of 1.
        idle: largest difference between the shares of idle units of an axis and of its siblings.
        errors: a block is harmful if the loss falls by more than this many standard errors without it.
        harm: smallest share of the loss by which another order of heads must lower it.
        swaps: largest number of pairs of heads per attention that are exchanged in search of a better order.
    """

    siblings: NotNegative = 0.5
    head_ratio: NotNegative = 8.0
    dead_head: NotNegative = 1e-3
    rank: NotNegative = 0.05
    gradient: NotNegative = 1e-6
    rows: Count = 32
    width: NotNegative = 0.25
    declared: tuple[str, ...] = ()
    redundant: NotNegative = 1e-6
    gain: NotNegative = 1e4
    stable_rank: NotNegative = 1.5
    unlike: NotNegative = 4.0
    noise: NotNegative = 0.02
    idle: NotNegative = 0.05
    errors: NotNegative = 3.0
    harm: NotNegative = 0.01
    swaps: Count = 64


def remove(e: Transaction, nodes: Iterable[NodeId]) -> None:
    """Remove the given nodes, except nodes that no longer exist."""
    e.remove([n for n in nodes if n in e.program.graph])


def remove_unread_cone(e: Transaction, *ends: NodeId) -> None:
    """Remove the given nodes that nothing reads, and all nodes that only the removed nodes use."""
    w = Wiring(e.program)
    dead = [w.at[n] for n in ends if n in w.at and w.unread(w.at[n])]
    remove(e, [w.nodes[i] for i in w.cone(dead)])


def map_sizes(have: Spec, want: Spec) -> tuple[int, int] | None:
    """Return sizes (out, in) of a linear map that turns spec `have` into `want`; None if no linear map can."""
    if have.dtype != want.dtype or not have.dtype.is_float or len(have.shape) != len(want.shape) or not have.shape:
        return None
    out, inner = want.shape[-1], have.shape[-1]
    same = have.shape[:-1] == want.shape[:-1]
    return (out, inner) if same and isinstance(out, int) and isinstance(inner, int) else None


def add_linear(e: Transaction, x: Value, weight: np.ndarray, name: str) -> NodeId:
    """Add a linear map of `x`, whose new param is stored in float32 and cast to the dtype of `x`."""
    name, kind = e.program.free_name(name), e.spec(x).dtype
    matrix = e.param(f"{name}.weight", weight.astype(np.float32))
    if kind.name != "float32":
        matrix = e.add("cast", matrix, dtype=kind, name=f"{name}.weight.cast")
    return e.add("linear", x, matrix, name=name)


def cut(p: Program, *edges: EdgeId, keeps: bool) -> Fix:
    """Return a fix that cuts edges into junctions and removes unread nodes. `keeps`: whether outputs stay equal."""

    def apply(e: Transaction) -> None:
        sources = [e.program.graph.source(edge) for edge in edges]
        for edge in edges:
            e.cut(edge)
        remove_unread_cone(e, *sources)

    return Fix(f"cut {', '.join(map(p.path, edges))}", apply, edges=len(edges), keeps_function=keeps)


def rewired(p: Program, edge: EdgeId, source: Value, *, keeps: bool) -> Fix:
    """Return a fix that rewires an edge to `source` and removes unread nodes. `keeps`: whether outputs stay equal."""
    before = p.graph.source(edge)

    def apply(e: Transaction) -> None:
        e.rewire(edge, source)
        remove_unread_cone(e, before)

    return Fix(f"rewire {p.path(edge)} to {p.path(source)}", apply, edges=1, keeps_function=keeps)


def bypassed(p: Program, node: NodeId, *, keeps: bool) -> Fix:
    """Return a fix that lets readers of a node read its only operand instead. `keeps`: whether outputs stay equal."""

    def apply(e: Transaction) -> None:
        (operand,) = e.program.operands(node)
        redirect(e, {Value(node): operand})
        remove_unread_cone(e, node)

    return Fix(f"bypass {p.path(node)} ({p.op(node)})", apply, edges=1, keeps_function=keeps)


def removed(p: Program, nodes: Sequence[NodeId], *, keeps: bool) -> Fix:
    """Return a fix that removes the given nodes. `keeps`: whether outputs stay equal."""
    more = f" and {len(nodes) - 1} nodes that only it uses" if len(nodes) > 1 else ""
    return Fix(f"remove {p.path(nodes[0])}{more}", lambda e: remove(e, nodes), edges=1, keeps_function=keeps)


def grown(group: AxisGroup, size: int) -> tuple[Fix, ...]:
    """Return (fix,) to grow an axis to `size` with equal outputs; () if it is frozen or a product of two axes."""
    if group.frozen or len(group.atoms) != 1:
        return ()
    more = size - group.size
    held = sum(prod(group.axes.program.weights.array(m.key).shape) for m in group.members if m.key is not None)
    what = f"grow {group.name} by {more}"
    return (Fix(what, lambda e: e.grow(group.name, more), parameters=held * more // group.size, keeps_function=True),)


SCHEMA = 1
TOOL = "graphwright diagnose"


@dataclass(frozen=True, slots=True, repr=False)
class Findings(Report, Sequence[Finding]):
    """The findings of a diagnosis: a sequence, empty if the program has no defects.

    Attributes:
        program: the diagnosed program.
        version: version of the program at the diagnosis.
        found: the findings by descending severity.
        asked: names of the rules that were asked to run.
        complete: False if the caller cancelled the diagnosis.
    """

    program: Program
    version: int
    found: tuple[Finding, ...]
    asked: tuple[str, ...]
    complete: bool = True

    # -- access ------------------------------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Any:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def of(self, kind: str) -> tuple[Finding, ...]:
        """Return the findings of the given kind."""
        return tuple(f for f in self.found if f.kind == kind)

    def counts(self) -> dict[str, int]:
        """Map each severity to its number of findings, by descending severity."""
        found = Counter(f.severity for f in self.found)
        return {str(s): found[s] for s in sorted(Severity, reverse=True)}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of the report."""
        return {"schema": SCHEMA, "program": self.program.name, "version": self.version, "complete": self.complete,
                "kinds": list(self.asked), "counts": self.counts(),
                "findings": [f.to_json() for f in self.found]}  # fmt: skip

    def _text(self) -> str:
        if not self.found:
            return f"{self.program.name}: no defects ({len(self.asked)} kinds)"
        counts = ", ".join(f"{n} {name}" for name, n in self.counts().items() if n)
        rows = [(str(f.severity), f.kind, f.where) for f in self.found]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = list[str]()
        for f, row in zip(self.found, rows, strict=True):
            known = [f"{name} {value}" for name, value in (("expected", f.expected), ("got", f.got)) if value]
            fix, facts = f.cheapest(), f" ({', '.join(known)})" if known else ""
            keeps = " (keeps the function)" if fix is not None and fix.keeps_function else ""
            line = "".join(f"  {c:<{w}}" for c, w in zip(row, widths, strict=True)) + f"  {f.what}{facts}\n"
            lines.append(line + " " * (sum(widths) + 8) + ("no fix" if fix is None else f"fix: {fix.what}{keeps}"))
        head = f"{self.program.name}: {len(self.found)} finding{'s'[: len(self.found) > 1]} ({counts})"
        return "\n".join([head, *listed(lines, "more findings")])

    def __repr__(self) -> str:
        return f"Findings({len(self.found)} in {self.program.name!r}: {dict(Counter(f.kind for f in self.found))})"

    def overlay(self) -> dict[NodeId, NodeNote]:
        """Map nodes to notes (highest severity, texts of findings) that `program.to_html(overlay=...)` draws.

        Nodes that no longer exist are left out.
        """
        by_node: dict[NodeId, list[Finding]] = {}
        for f in self.found:
            ends = [self.program.graph.target(e) for e in f.edges if e in self.program.graph]
            here = [n for n in dict.fromkeys((*f.nodes, *ends)) if n in self.program.graph]
            if here and self.program.op(here[0]) in STORED:  # weights are drawn inside their readers
                here += [n for n in self.program.consumers(here[0]) if n not in here]
            for node in here:
                by_node.setdefault(node, []).append(f)
        return {node: NodeNote(int(max(f.severity for f in found)),
                               "\n".join(f"{f.severity}: {f.kind}: {f.what}" for f in found))
                for node, found in by_node.items()}  # fmt: skip

    # -- fixing ------------------------------------------------------------------------------------------------------
    def fix(self, finding: Finding, fix: Fix | None = None) -> Entry:
        """Fix a finding in one edit, by `fix` or, if that is None, by the cheapest fix of the finding.

        Raises: UsageError if there is no fix or the program changed; errors of the edit, which leave it unchanged.
        """
        chosen = fix or finding.cheapest()
        if chosen is None:
            raise UsageError("the finding has no fix", where=f"{finding.kind} at {finding.where}", fix="pass fix=...")
        self._make([(finding, chosen)], f"fix {finding.kind}: {chosen.what}")
        return self.program.journal[-1]

    def fix_all(self, only: str | None = "keeps_function") -> tuple[Finding, ...]:
        """Fix all findings that have fixes in one edit, each by its cheapest fix.

        Args:
            only: "keeps_function" uses only fixes that change no output; None uses any fix.
        Returns: the fixed findings.
        Raises: UsageError for an unknown `only` or a changed program; errors of the edit, which leave it unchanged.
        """
        if only not in ("keeps_function", None):
            raise UsageError("unknown value of only", expected='"keeps_function" or None', got=only)
        pairs = [(f, fix) for f in self.found if (fix := f.cheapest(only)) is not None]
        if pairs:
            self._make(pairs, f"fix {len(pairs)} finding{'s'[: len(pairs) > 1]}")
        return tuple(f for f, _ in pairs)

    def _make(self, pairs: list[tuple[Finding, Fix]], why: str) -> None:
        p = self.program
        if p.version != self.version:
            raise UsageError("the program changed after the diagnosis", where=p.name, got=f"version {p.version}",
                             expected=f"version {self.version}", fix="diagnose the program again")  # fmt: skip
        with p.edit(why, tool=TOOL, check=p.valid) as e:
            for _, fix in pairs:
                fix.apply(e)
