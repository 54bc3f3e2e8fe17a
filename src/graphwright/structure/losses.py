"""What open gates cost: penalties on probabilities, added to the task's loss. All of them are ordinary tensor code.

A penalty is any function of `Terms`; those here are frozen values, so that a report can name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, Variable, no_grad
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.program import Program
from graphwright.program.run import check_feeds, tensors
from graphwright.structure.errors import whole, within
from graphwright.structure.harden import maker
from graphwright.structure.pricing import above, check_cost, prices
from graphwright.structure.relaxation import probabilities

if TYPE_CHECKING:
    from graphwright.program import Value
    from graphwright.structure.elements import Element
    from graphwright.structure.pricing import Cost

TINY = 1e-12


@dataclass(eq=False)
class Terms:
    """What a penalty may look at, inside a step.

    Attributes:
        program: whose gates.
        elements: what can be opened, in order.
        values: results of the program's nodes in this step: all of its outputs, and those that penalties capture.
        feeds: the inputs by name.
        step: number of the step, counted from the end of the warm-up, 0-d float.
        task: the task's loss in this step, a constant; None where nothing was run.
    """

    program: Program
    elements: list[Element]
    values: Mapping[Value, Tensor]
    feeds: Mapping[str, Tensor]
    step: Tensor
    task: Tensor | None = None

    @cached_property
    def open(self) -> Tensor:
        """Probability that each element is open, floating [n]; without gates a single 0."""
        return probabilities(self.program, self.elements) if self.elements else Tensor(from_numpy(np.zeros(1)))

    def constant(self, values: Any) -> Tensor:
        """Numbers as a tensor of the dtype of `open`."""
        return Tensor(from_numpy(np.asarray(values, self.open.dtype.numpy)))

    @property
    def cost(self) -> np.ndarray:
        """What each element costs, float64 [n]."""
        return np.array([e.cost for e in self.elements], np.float64)

    def value(self, name: str) -> Tensor:
        """The result of a captured node, or an output of the program, by name."""
        p = self.program
        outputs = dict(zip(p.output_names(), p.outputs(), strict=True))
        return self.values[outputs[name] if name in outputs else p.value(name)]


class Objective:
    """A penalty that can stand for the task: what it asks for does not get better by cutting everything."""

    def __call__(self, terms: Terms) -> Tensor:
        """One number."""
        raise NotImplementedError


class Penalty(Protocol):
    """A term of the objective. `captures` names nodes that it reads; `carried` is state, next `climb`."""

    def __call__(self, terms: Terms) -> Tensor:
        """One number."""
        ...


def captures(penalty: Any) -> tuple[str, ...]:
    """Names of the nodes that a penalty looks at."""
    return tuple(getattr(penalty, "captures", ()))


def carried(penalty: Any) -> dict[str, Variable]:
    """Variables that a penalty keeps from step to step."""
    return getattr(penalty, "carried", {})


def label(penalty: Any) -> str:
    """What a report calls a penalty."""
    return getattr(penalty, "name", None) or getattr(penalty, "__name__", type(penalty).__name__.lower())


@dataclass(frozen=True)
class sparsity:
    """λ Σ c·P / Σ c: a price. A gate closes if its removal costs the task less than λ·c/Σc.

    Attributes:
        lam: in units of the loss; with `relative` in units of what all gates are worth to the task: its loss with all
            of them closed less that with all open, on the batch at which they begin to be trained.
        weighted: by what an element costs; else all count as one.
    """

    lam: float
    weighted: bool = True
    name: str = "sparsity"
    relative: bool = False
    carried: dict[str, Variable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        within("lam", self.lam, 0)
        if self.relative and not self.carried:
            self.carried["worth"] = Variable(np.zeros((), np.float64), name=f"{self.name}.worth")

    def __call__(self, terms: Terms) -> Tensor:
        """See the class; with `relative` 0 until gates begin."""
        c = terms.cost if self.weighted else np.ones(len(terms.elements))
        share = (terms.open * terms.constant(c / max(c.sum(), 1.0))).sum() * self.lam
        return share * self.carried["worth"].to(share.dtype) if self.relative else share


def expected_l0(lam: float, relative: bool = False) -> sparsity:
    """λ times the mean open probability, each element counted as one (Louizos et al. 2018)."""
    return sparsity(lam, weighted=False, name="expected_l0", relative=relative)


@dataclass(frozen=True)
class density:
    """weight · (mean P - ρ)²."""

    rho: float
    weight: float = 10.0
    name: str = "density"

    def __post_init__(self) -> None:
        within("rho", self.rho, 0, 1)
        within("weight", self.weight, 0)

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        gap = terms.open.mean() - self.rho
        return gap * gap * self.weight


@dataclass(frozen=True)
class budget:
    """λ₁·d + 10·d², d = E[cost]/total - target, an upper bound: λ₁ climbs by rate·d a step and stays >= 0.

    Attributes:
        target: share that may stay open, in [0, 1], or a number of elements above 1.
        of: `count`, or what `cost` takes.
        steps: of the run; from where gates begin to be trained, the target falls from 1 to its value over 30 % of them.
        rate: of λ₁. The gap of the fall sums up in it: at 0.5 hard gates that carry signal close with the others
            (`tests/structure/test_losses.py`).
    """

    target: float
    of: Cost = "count"
    steps: int = 0
    rate: float = 0.1
    name: str = "budget"
    carried: dict[str, Variable] = field(default_factory=lambda: {
        "budget.multiplier": Variable(np.zeros((), np.float64), name="budget.multiplier")})  # fmt: skip

    def __post_init__(self) -> None:
        within("target", self.target, 0)
        within("rate", self.rate, 0)
        whole("steps", self.steps)
        check_cost(self.of, counted=True)

    def gap(self, terms: Terms) -> Tensor:
        """E[cost] / total, less the target at this step."""
        if isinstance(self.of, str) and self.of == "count":
            share = terms.open.mean()
        else:
            whole = float(prices(terms.program, terms.elements, self.of).sum())
            share = _expected(terms, terms.open, self.of) / whole
        target = self.target / len(terms.elements) if self.target > 1 else self.target
        if not self.steps:
            return share - target
        fallen = call("minimum", terms.step / (0.3 * self.steps), 1.0)
        return share - (1.0 - fallen * (1.0 - target)).to(share.dtype)

    def __call__(self, terms: Terms) -> Tensor:
        """See the class; the multiplier takes its step when the optimizer does."""
        gap = self.gap(terms)
        return self.multiplier.to(gap.dtype) * gap + gap * gap * 10.0

    @property
    def multiplier(self) -> Variable:
        """λ₁."""
        return self.carried["budget.multiplier"]

    def climb(self, terms: Terms) -> Tensor:
        """The multiplier after this step: the gap is the slope of the penalty by it."""
        with no_grad():
            return call("maximum", self.multiplier + self.gap(terms).to(self.multiplier.dtype) * self.rate, 0.0)


def _expected(terms: Terms, p: Tensor, of: Cost) -> Tensor:
    """Σ own price times the probabilities of an element and of all gates above it."""
    own = prices(terms.program, terms.elements, of)
    parents = above(terms.program, terms.elements)
    whole = p
    for depth in range(max((len(chain) for chain in parents), default=0)):
        rows = np.array([chain[depth] if depth < len(chain) else -1 for chain in parents])
        factor = call("index", p, Tensor(from_numpy(np.maximum(rows, 0))), axis=0)
        there = Tensor(from_numpy(rows >= 0))
        whole = whole * call("where", there, factor, terms.constant(np.ones(len(rows))))
    return (whole * terms.constant(own)).sum()


@dataclass(frozen=True)
class cost:
    """λ · E[cost] under nesting: a head inside a gated layer costs P_layer · P_head · c.

    Attributes:
        of: `params`, `bytes`, `flops`; `table` for the numbers that the gates were given; or a number per node by path,
            as `latency` measures them in nanoseconds.
        relative: divide by the cost of everything open.
    """

    lam: float = 1.0
    of: Cost = "params"
    relative: bool = True
    name: str = "cost"

    def __post_init__(self) -> None:
        within("lam", self.lam, 0)
        check_cost(self.of)

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        total = prices(terms.program, terms.elements, self.of).sum() if self.relative else 1.0
        return _expected(terms, terms.open, self.of) * (self.lam / max(total, TINY))


@dataclass(frozen=True)
class gate_entropy:
    """weight · mean of -P ln P - (1-P) ln(1-P): pushes gates to 0 or 1."""

    weight: float = 1.0
    name: str = "gate_entropy"

    def __post_init__(self) -> None:
        within("weight", self.weight)

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        p = terms.open
        return -(_xlogx(p) + _xlogx(1.0 - p)).mean() * self.weight


def _xlogx(p: Tensor) -> Tensor:
    """P ln p, 0 at 0."""
    return p * call("maximum", p, TINY).log()


@dataclass(frozen=True)
class edge_entropy:
    """weight · mean over targets of -Σ π ln π, π = P/ΣP over the gated edges into one target."""

    weight: float = 1.0
    name: str = "edge_entropy"

    def __post_init__(self) -> None:
        within("weight", self.weight)

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        rows, count = _ends(terms)[1]
        if not count:
            raise UsageError("no edge has a gate", where=terms.program.name)
        there = np.flatnonzero(rows >= 0)
        p = terms.open[there]
        sums = _by_row(p, rows[there], count)
        pi = p / call("maximum", call("index", sums, Tensor(from_numpy(rows[there])), axis=0), TINY)
        return -_xlogx(pi).sum() * (self.weight / count)


def _ends(terms: Terms) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
    """Per element the number of its source and of its target among gated edges, -1 for what is no edge; the counts."""
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
    """Sums of entries by row number."""
    zero = Tensor(from_numpy(np.zeros(count, p.dtype.numpy)))
    return call("scatter_add", zero, Tensor(from_numpy(rows)), p, axis=0)


@dataclass(frozen=True)
class smoothness:
    """μ Σ (P_e - P_f)² over unordered pairs of edges that share a source, plus pairs that share a target; O(edges).

    Per node: deg·Σp² - (Σp)² = deg·Σ(p - p̄)²; the latter loses nothing at a hub whose gates are nearly alike. The mean
    is taken again of what is left, as 10^5 float32 values summed in a row lose it (Chan, Golub and LeVeque 1983).
    """

    mu: float
    name: str = "smoothness"

    def __post_init__(self) -> None:
        within("mu", self.mu, 0)

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        total = terms.open.sum() * 0.0
        for rows, count in _ends(terms):
            there = np.flatnonzero(rows >= 0)
            if len(there):
                p, mine = terms.open[there], rows[there]
                degree = np.bincount(mine, minlength=count)
                apart, at = p, Tensor(from_numpy(mine))
                for _ in range(2):
                    mean = _by_row(apart, mine, count) * terms.constant(1 / degree)
                    apart = apart - call("index", mean, at, axis=0)
                total = total + (apart * apart * terms.constant(degree[mine])).sum()
        return total * self.mu


@dataclass(frozen=True)
class attention_entropy:
    """weight · mean over batch, heads and queries with a key of -Σ a ln a, of softmax nodes by name.

    A row that sees no key counts as no row; keys with weight 0 add nothing.
    """

    nodes: tuple[str, ...]
    weight: float = 1.0
    name: str = "attention_entropy"

    def __post_init__(self) -> None:
        within("weight", self.weight)
        if isinstance(self.nodes, str) or not self.nodes:
            raise UsageError(
                "entropy is that of some nodes", where="nodes", expected="a tuple of names", got=self.nodes
            )

    @property
    def captures(self) -> tuple[str, ...]:
        """The nodes."""
        return self.nodes

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        total = terms.open.sum() * 0.0
        for node in self.nodes:
            a = terms.value(node)
            rows = (a.sum(axis=-1) > 0.0).to(a.dtype)
            seen = call("maximum", rows.sum(), 1.0)
            total = total - (_xlogx(a).sum(axis=-1) * rows).sum() / seen
        return total * (self.weight / len(self.nodes))


@dataclass(frozen=True)
class reachability:
    """-weight · Σ over outputs of ln r, r the probability that some path of open edges comes from an input.

    r of an input is 1; r_v = 1 - Π (1 - P_e·r_u) at a junction; other ops pass on the least of what they read.
    """

    weight: float = 1.0
    name: str = "reachability"

    def __post_init__(self) -> None:
        within("weight", self.weight, 0)

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        p, gate = terms.program, {e.gate.sites[0]: i for i, e in enumerate(terms.elements) if e.over == "edges"}
        one = terms.constant(1.0)
        reach: dict[Any, Tensor | None] = {}
        needed = p.reachable(p.outputs())
        for node in (n for n in p.order() if n in needed):
            reads = [reach[v.node] for v in p.operands(node)]
            live = [r for r in reads if r is not None]
            if p.op(node) == "input":
                reach[node] = one
            elif p.is_junction(node):
                missed = one
                for r in live:
                    missed = missed * (1.0 - r)
                reach[node] = 1.0 - missed
            elif not live:
                reach[node] = None
            else:
                least = live[0]
                for r in live[1:]:
                    least = call("minimum", least, r)
                reach[node] = least * terms.open[gate[node]] if node in gate else least
        found = [r for v in p.outputs() if (r := reach[v.node]) is not None]
        total = terms.constant(0.0)
        for r in found:
            total = total - call("maximum", r, TINY).log()
        return total * self.weight


@dataclass(frozen=True)
class distill(Objective):
    """KL(teacher || student)·τ² over the last axis of an output, mean over the other ones; optionally hidden states.

    Attributes:
        teacher: a program with the inputs that the student has; run beside it, without gradient.
        tau: temperature of both.
        hidden: weight of the mean squared difference of the nodes `match`.
        output: name of the logits; the first output by default.
    """

    teacher: Program
    tau: float = 1.0
    hidden: float = 0.0
    match: tuple[str, ...] = ()
    output: str | None = None
    name: str = "distill"

    def __post_init__(self) -> None:
        within("tau", self.tau, 0, above=True)
        within("hidden", self.hidden, 0)
        if not isinstance(self.teacher, Program):
            raise UsageError("a teacher is a program", where="teacher", got=type(self.teacher).__name__)
        if self.output is not None and self.output not in self.teacher.output_names():
            raise UsageError("no such output", where=self.teacher.name, expected=", ".join(self.teacher.output_names()),
                             got=self.output)  # fmt: skip
        if self.hidden and not self.match:
            raise UsageError("hidden states are those of some nodes", where="match", fix="match=(names of nodes)")

    @property
    def captures(self) -> tuple[str, ...]:
        """The hidden states."""
        return self.match

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
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


KIND = "sigmoid"


class Scales:
    """The norms that weights behind gates may have at most.

    Args:
        program: what is trained; of gates on edges, nodes and layers, the linear that makes their message is held.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._most: dict[tuple[str, ...], Variable] = {}
        self._seen: int | None = None
        self.sync()

    def sync(self) -> None:
        """Follow the edits since the last time: what is new may be as large as it is."""
        p = self.program
        if self._seen == p.version:
            return
        self._seen = p.version
        mine = [g for g in p.gates().values() if g.kind == KIND and g.over not in ("units", "choice")]
        keys = [tuple(found) for g in mine for site in g.sites if (found := maker(p, p.operands(site)[0], {site}))]
        there = {key: self._most.get(key) for key in keys if all(p.weights[k].requires_grad for k in key)}
        self._most = {key: Variable(np.full((), np.inf), name=f"joint.norm.{key[0]}") if held is None else held
                      for key, held in there.items()}  # fmt: skip

    def begin(self) -> None:
        """Norms are held from here on, but for those of weights that are 0, and of what is added later."""
        for keys, most in self._most.items():
            now = np.sqrt(sum(float((self.program.weights[k].numpy("float64") ** 2).sum()) for k in keys))
            most.assign(Tensor(from_numpy(np.asarray(now or np.inf))))

    def hold(self) -> None:
        """Part of a step: what has grown too large is made smaller, in the same direction."""
        for keys, most in self._most.items():
            weights = [self.program.weights[k] for k in keys]
            parts = [(w * w).sum().to("float64") for w in weights]
            square = call("maximum", sum(parts[1:], start=parts[0]), 1e-30)
            factor = call("minimum", most / square.sqrt(), 1.0)
            for w in weights:
                w.assign(w * factor.to(w.dtype))

    def variables(self) -> dict[str, Variable]:
        """The norms, by name."""
        return {v.name: v for v in self._most.values()}
