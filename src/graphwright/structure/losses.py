"""Penalties on the probabilities of gates, which are added to the task's loss, and distillation.

A penalty is any function of `Terms` that returns a scalar tensor; the penalties in this module are frozen dataclasses.
In formulas P is the open probability of an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import numpy as np

from graphwright.autograd import Tensor, Variable, as_tensor, no_grad
from graphwright.errors import UsageError
from graphwright.ops import call, traits
from graphwright.program import Program, Value
from graphwright.program.kinds import INPUT
from graphwright.program.run import check_feeds, tensors
from graphwright.settings import Count, NotNegative, Number, Positive, Settings, Share
from graphwright.structure.costs import Cost, above, check_cost, element_costs
from graphwright.structure.elements import Element, probabilities
from graphwright.structure.harden import maker

TINY = 1e-12


@dataclass(eq=False)
class Terms:
    """The argument of a penalty: the program, its elements, and values inside one training step.

    Attributes:
        program: the program with the gates.
        elements: the elements of its gates, in order of their logits.
        values: values in this step of all outputs, and of the nodes in `captures` of penalties.
        feeds: the inputs by name.
        step: number of steps since the warm-up, 0-d float.
        task: the task's loss in this step, detached; None if the program was not run.
    """

    program: Program
    elements: list[Element]
    values: Mapping[Value, Tensor]
    feeds: Mapping[str, Tensor]
    step: Tensor
    task: Tensor | None = None

    @cached_property
    def open(self) -> Tensor:
        """The open probability of each element, float [n]; [0.0] if there are no gates."""
        return probabilities(self.program, self.elements) if self.elements else as_tensor(np.zeros(1))

    def constant(self, values: Any) -> Tensor:
        """Return numbers as a tensor with the dtype of `open`."""
        return as_tensor(np.asarray(values, self.open.dtype.numpy))

    @property
    def cost(self) -> np.ndarray:
        """Cost of each element while it is open, in the unit of `gate(cost=...)`: float64 [n]."""
        return np.array([e.cost for e in self.elements], np.float64)

    def value(self, name: str) -> Tensor:
        """Return the value of an output of the program, or of a node in `captures` of a penalty, by name."""
        p = self.program
        outputs = dict(zip(p.output_names(), p.outputs(), strict=True))
        return self.values[outputs[name] if name in outputs else p.value(name)]


@dataclass(frozen=True)
class Penalty(Settings):
    """A term of the objective. Any other function of `Terms` is a penalty, too. All attributes are optional.

    Attributes:
        name: name in reports; by default that of the class.
        captures: names of the nodes whose values the penalty reads.
        states: dict from names to the variables that hold the state of the penalty.
        climb: function of `Terms` that returns the next value of the state, called in each step that trains gates.
    """

    name: str = field(default="", kw_only=True)

    def __call__(self, terms: Terms) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(terms)")


class Objective:
    """Base class of penalties that can replace the task, because cutting everything does not minimise them."""

    def __call__(self, terms: Terms) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(terms)")


def captures(penalty: Any) -> tuple[str, ...]:
    """Return the names of the nodes whose values a penalty reads; () if it declares none."""
    return tuple(getattr(penalty, "captures", ()))


def state_variables(penalty: Any) -> dict[str, Variable]:
    """Return the state variables of a penalty by name."""
    return getattr(penalty, "states", {})


def label(penalty: Any) -> str:
    """Return the name of a penalty in reports."""
    return getattr(penalty, "name", None) or getattr(penalty, "__name__", type(penalty).__name__.lower())


@dataclass(frozen=True)
class sparsity(Penalty):
    """λ·Σ c·P / Σ c, where c is the cost of an element and P its open probability.

    A gate closes if closing it increases the task's loss by less than λ·c/Σc.

    Attributes:
        lam: λ, in units of the loss; with `relative` in units of the gain of all gates: the task's loss with all gates
            closed minus the loss with all gates open, on the first batch that trains gates.
        weighted: False sets every c to 1.
    """

    lam: NotNegative
    weighted: bool = True
    relative: bool = False
    states: dict[str, Variable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relative and not self.states:
            self.states["gain"] = Variable(np.zeros((), np.float64), name=f"{label(self)}.gain")

    def __call__(self, terms: Terms) -> Tensor:
        c = terms.cost if self.weighted else np.ones(len(terms.elements))
        share = (terms.open * terms.constant(c / max(c.sum(), 1.0))).sum() * self.lam
        return share * self.states["gain"].to(share.dtype) if self.relative else share


def expected_l0(lam: float, relative: bool = False) -> sparsity:
    """Return the penalty λ · mean open probability, all elements weighted equally (Louizos et al. 2018)."""
    return sparsity(lam, weighted=False, name="expected_l0", relative=relative)


@dataclass(frozen=True)
class density(Penalty):
    """weight · (mean P - ρ)², where P is the open probability of an element; it pulls the mean to ρ."""

    rho: Share
    weight: NotNegative = 10.0

    def __call__(self, terms: Terms) -> Tensor:
        gap = terms.open.mean() - self.rho
        return gap * gap * self.weight


@dataclass(frozen=True)
class budget(Penalty):
    """λ₁·d + 10·d², where d = E[cost]/total - target; it drives the expected cost of open elements down to a target.

    The multiplier λ₁ starts at 0; each step adds rate·d to it and clips it to be at least 0.

    Attributes:
        target: share of the total cost to keep, in [0, 1]; a number above 1 is divided by the number of elements.
        of: `count` for the number of elements, or a cost as in the penalty `cost`.
        steps: number of steps of the run; after the warm-up the target falls from 1 to `target` over 30 % of them. With
            `steps=0` the target is constant.
        rate: learning rate of λ₁, which grows while the target falls: at rate 0.5 useful gates are closed, too
            (`tests/structure/test_losses.py`).
    """

    target: NotNegative
    of: Cost = "count"
    steps: Count = 0
    rate: NotNegative = 0.1
    states: dict[str, Variable] = field(default_factory=lambda: {
        "budget.multiplier": Variable(np.zeros((), np.float64), name="budget.multiplier")})  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cost(self.of, counted=True)

    def gap(self, terms: Terms) -> Tensor:
        """Return d = E[cost]/total - target, with the target of this step; a total of 0 has the share 0."""
        if isinstance(self.of, str) and self.of == "count":
            share = terms.open.mean()
        else:
            whole = float(element_costs(terms.program, terms.elements, self.of).sum())
            share = _expected(terms, terms.open, self.of) / (whole or 1.0)
        target = self.target / len(terms.elements) if self.target > 1 else self.target
        if not self.steps:
            return share - target
        fallen = call("minimum", terms.step / (0.3 * self.steps), 1.0)
        return share - (1.0 - fallen * (1.0 - target)).to(share.dtype)

    def __call__(self, terms: Terms) -> Tensor:
        gap = self.gap(terms)
        return self.multiplier.to(gap.dtype) * gap + gap * gap * 10.0

    @property
    def multiplier(self) -> Variable:
        """The multiplier λ₁."""
        return self.states["budget.multiplier"]

    def climb(self, terms: Terms) -> Tensor:
        """Return the next multiplier, max(λ₁ + rate·d, 0): gradient ascent, as d is the penalty's derivative by λ₁."""
        with no_grad():
            return call("maximum", self.multiplier + self.gap(terms).to(self.multiplier.dtype) * self.rate, 0.0)


def _expected(terms: Terms, p: Tensor, of: Cost) -> Tensor:
    """Σ c·ΠP over elements: c is the cost of the element alone, ΠP is over the element and all that contain it."""
    own = element_costs(terms.program, terms.elements, of)
    parents = above(terms.program, terms.elements)
    whole = p
    for depth in range(max((len(chain) for chain in parents), default=0)):
        rows = np.array([chain[depth] if depth < len(chain) else -1 for chain in parents])
        factor = call("index", p, as_tensor(np.maximum(rows, 0)), axis=0)
        there = as_tensor(rows >= 0)
        whole = whole * call("where", there, factor, terms.constant(np.ones(len(rows))))
    return (whole * terms.constant(own)).sum()


@dataclass(frozen=True)
class cost(Penalty):
    """λ · E[cost], where gates may be nested: a head in a gated layer costs P_layer · P_head · c.

    Attributes:
        of: `params`, `bytes` or `flops`; `table` for the costs given to `e.gate`; or a dict from node paths to
            costs, such as the nanoseconds that `latency` measures.
        relative: divide by the total cost.
    """

    lam: NotNegative = 1.0
    of: Cost = "params"
    relative: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cost(self.of)

    def __call__(self, terms: Terms) -> Tensor:
        total = element_costs(terms.program, terms.elements, self.of).sum() if self.relative else 1.0
        return _expected(terms, terms.open, self.of) * (self.lam / max(total, TINY))


@dataclass(frozen=True)
class gate_entropy(Penalty):
    """weight · mean of -P ln P - (1-P) ln(1-P), where P is the open probability; it pushes gates to 0 or 1."""

    weight: Number = 1.0

    def __call__(self, terms: Terms) -> Tensor:
        p = terms.open
        return -(_xlogx(p) + _xlogx(1.0 - p)).mean() * self.weight


def _xlogx(p: Tensor) -> Tensor:
    """p ln p, elementwise; 0 at p = 0."""
    return p * call("maximum", p, TINY).log()


@dataclass(frozen=True)
class edge_entropy(Penalty):
    """weight · mean of -Σ π ln π over target nodes; π = P/ΣP for the open probabilities P of edges into a node."""

    weight: Number = 1.0

    def __call__(self, terms: Terms) -> Tensor:
        rows, count = _ends(terms)[1]
        if not count:
            raise UsageError("the program has no gated edges for edge_entropy", where=terms.program.name)
        there = np.flatnonzero(rows >= 0)
        p = terms.open[there]
        sums = _by_row(p, rows[there], count)
        pi = p / call("maximum", call("index", sums, as_tensor(rows[there]), axis=0), TINY)
        return -_xlogx(pi).sum() * (self.weight / count)


def _ends(terms: Terms) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
    """Number the source nodes of gated edges, and likewise the target nodes; return a pair (numbers, count) for each.

    `numbers[i]` is the number of the node at element i, or -1 if element i is not an edge.
    """
    p, graph = terms.program, terms.program.graph
    ends: list[tuple[dict[Any, int], list[int]]] = [({}, []), ({}, [])]
    for e in terms.elements:
        site = e.gate.sites[0] if e.over == "edges" else None
        nodes = (None, None) if site is None else (p.operands(site)[0], graph.target(p.out_edges(site)[0]))
        for (numbers, row), node in zip(ends, nodes, strict=True):
            row.append(-1 if node is None else numbers.setdefault(node, len(numbers)))
    (sources, by_source), (targets, by_target) = ends
    return (np.array(by_source), len(sources)), (np.array(by_target), len(targets))


def _by_row(p: Tensor, rows: np.ndarray, count: int) -> Tensor:
    """Return `count` sums: sum i is over the entries of `p` at which `rows` equals i."""
    zero = as_tensor(np.zeros(count, p.dtype.numpy))
    return call("scatter_add", zero, as_tensor(rows), p, axis=0)


@dataclass(frozen=True)
class smoothness(Penalty):
    """μ Σ (P_e - P_f)² over unordered pairs of edges that share a source, plus pairs that share a target; O(edges).

    P is the open probability of an edge. The sum over pairs at a node of degree n is nΣP² - (ΣP)² = nΣ(P - P̄)²; the
    second form is accurate also for many nearly equal P. The mean is subtracted twice, since a float32 sum of 10^5
    values is inexact (Chan, Golub and LeVeque 1983).
    """

    mu: NotNegative

    def __call__(self, terms: Terms) -> Tensor:
        total = terms.open.sum() * 0.0
        for rows, count in _ends(terms):
            there = np.flatnonzero(rows >= 0)
            if len(there):
                p, mine = terms.open[there], rows[there]
                degree = np.bincount(mine, minlength=count)
                centred, at = p, as_tensor(mine)
                for _ in range(2):
                    mean = _by_row(centred, mine, count) * terms.constant(1 / degree)
                    centred = centred - call("index", mean, at, axis=0)
                total = total + (centred * centred * terms.constant(degree[mine])).sum()
        return total * self.mu


@dataclass(frozen=True)
class attention_entropy(Penalty):
    """weight · mean over batch, heads and queries of -Σ a ln a, where a are the weights of the nodes `nodes`.

    A node is a softmax, whose result is a, or an attention over a pattern. Queries that attend to no key do not count.
    """

    nodes: tuple[str, ...]
    weight: Number = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.nodes, str) or not self.nodes:
            raise UsageError("`nodes` is empty or not a tuple of node names", where="attention_entropy", got=self.nodes)

    @property
    def captures(self) -> tuple[str, ...]:
        return self.nodes

    def _rows(self, terms: Terms, node: str) -> tuple[Tensor, Tensor]:
        """Return the entropy of each query, and 1 for each query that attends to a key, else 0."""
        p = terms.program
        where = p.node(node)
        if traits(p.op(where)).table is None:
            a = terms.value(node)
            return -_xlogx(a).sum(axis=-1), (a.sum(axis=-1) > 0.0).to(a.dtype)
        q, k, _, table, *extra = (terms.values[v] for v in p.operands(where))
        lse = terms.values[Value(where, 1)]
        found = call("block_entropy", q, k, table, lse, *extra, **p.attrs(where))
        return found, (lse > -np.inf).to(found.dtype)

    def __call__(self, terms: Terms) -> Tensor:
        total = terms.open.sum() * 0.0
        for node in self.nodes:
            each, rows = self._rows(terms, node)
            total = total + (each * rows).sum() / call("maximum", rows.sum(), 1.0)
        return total * (self.weight / len(self.nodes))


@dataclass(frozen=True)
class reachability(Penalty):
    """-weight · Σ over outputs of ln r, where r estimates the probability that open edges link the output to an input.

    An input has r = 1, an op the minimum of r over its operands, and a junction r = 1 - Π (1 - P_e·r_u) over its
    incoming edges e, where P_e is the open probability of e and u the source of e.
    """

    weight: NotNegative = 1.0

    def __call__(self, terms: Terms) -> Tensor:
        p, gate = terms.program, {e.gate.sites[0]: i for i, e in enumerate(terms.elements) if e.over == "edges"}
        one = terms.constant(1.0)
        reach: dict[Any, Tensor | None] = {}
        needed = p.reachable(p.outputs())
        for node in (n for n in p.order() if n in needed):
            live = [r for v in p.operands(node) if (r := reach[v.node]) is not None]
            if p.op(node) == INPUT:
                reach[node] = one
            elif p.is_junction(node):
                reach[node] = 1.0 - reduce(lambda missed, r: missed * (1.0 - r), live, one)
            else:
                least = reduce(lambda a, b: call("minimum", a, b), live) if live else None
                reach[node] = least * terms.open[gate[node]] if least is not None and node in gate else least
        found = [r for v in p.outputs() if (r := reach[v.node]) is not None]
        total = terms.constant(0.0)
        for r in found:
            total = total - call("maximum", r, TINY).log()
        return total * self.weight


@dataclass(frozen=True)
class distill(Penalty, Objective):
    """KL(teacher ‖ student)·τ² over the last axis of an output, averaged over the other axes.

    Attributes:
        teacher: a program with the same inputs as the student; it runs without gradient.
        tau: softmax temperature τ of both programs.
        hidden: weight of the mean squared difference between teacher and student at the nodes `match`.
        match: names of nodes of both programs, such as hidden states.
        output: name of the output with the logits; by default the first output.
    """

    teacher: Program
    tau: Positive = 1.0
    hidden: NotNegative = 0.0
    match: tuple[str, ...] = ()
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.teacher, Program):
            raise UsageError("the teacher is not a program", where="teacher", got=type(self.teacher).__name__)
        if self.output is not None and self.output not in self.teacher.output_names():
            raise UsageError("the teacher has no such output", where=self.teacher.name, got=self.output,
                             expected=", ".join(self.teacher.output_names()))  # fmt: skip
        if self.hidden and not self.match:
            raise UsageError("`hidden` is given without nodes to match", where="distill", fix="match=(names of nodes)")

    @property
    def captures(self) -> tuple[str, ...]:
        return self.match

    def __call__(self, terms: Terms) -> Tensor:
        p, teacher = terms.program, self.teacher
        name = self.output or p.output_names()[0]
        wanted = dict(zip(teacher.output_names(), teacher.outputs(), strict=True))[name]
        inner = [teacher.value(n) for n in self.match]
        with no_grad():
            checked, dims = check_feeds(teacher, {n: terms.feeds[n] for n in teacher.input_names()})
            theirs = tensors(teacher, checked, dims, [wanted, *inner])
        target = call("log_softmax", theirs[wanted].detach() / self.tau, axis=-1)
        ours = call("log_softmax", terms.value(name) / self.tau, axis=-1)
        total = (target.exp() * (target - ours)).sum(axis=-1).mean() * self.tau**2
        for node, value in zip(self.match, inner, strict=True):
            gap = terms.value(node) - theirs[value].detach()
            total = total + (gap * gap).mean() * self.hidden
        return total


class NormLimits:
    """Upper limits of weight norms, so that training cannot offset a lower `sigmoid` gate by larger weights before it.

    Args:
        program: the trained program. The limits apply to linear maps whose results are multiplied by gates on edges,
            nodes or layers.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._most: dict[tuple[str, ...], Variable] = {}
        self._seen: int | None = None
        self.sync()

    def sync(self) -> None:
        """Update the list of limited weights after edits; new weights get the limit infinity."""
        p = self.program
        if self._seen == p.version:
            return
        self._seen = p.version
        gates = (g for g in p.gates().values() if g.facts.folded and not g.facts.linear)  # of kind `sigmoid`
        mine = [g for g in gates if g.over not in ("units", "choice", "pattern")]
        keys = [tuple(found) for g in mine for site in g.sites if (found := maker(p, p.operands(site)[0], {site}))]
        there = {key: self._most.get(key) for key in keys if all(p.weights[k].requires_grad for k in key)}
        self._most = {key: Variable(np.full((), np.inf), name=f"joint.norm.{key[0]}") if held is None else held
                      for key, held in there.items()}  # fmt: skip

    def begin(self) -> None:
        """Set the limits to the current norms; weights that are zero or added later stay unlimited."""
        for keys, most in self._most.items():
            now = np.sqrt(sum(float((self.program.weights[k].numpy("float64") ** 2).sum()) for k in keys))
            most.assign(as_tensor(np.asarray(now or np.inf)))

    def hold(self) -> None:
        """Scale down weights whose norm exceeds its limit; called inside a traced step."""
        for keys, most in self._most.items():
            weights = [self.program.weights[k] for k in keys]
            parts = [(w * w).sum().to("float64") for w in weights]
            square = call("maximum", sum(parts[1:], start=parts[0]), 1e-30)
            factor = call("minimum", most / square.sqrt(), 1.0)
            for w in weights:
                w.assign(w * factor.to(w.dtype))

    def variables(self) -> dict[str, Variable]:
        """Return the limits by name."""
        return {v.name: v for v in self._most.values()}
