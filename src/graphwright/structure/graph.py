"""A differentiable view of a program's gates, which copies neither graph nor logits; and temperature schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import cos, pi
from typing import Any, Literal

import numpy as np

from graphwright.array.formulas.gates import GATE_KINDS, MODES
from graphwright.autograd import Tensor, as_tensor, enable_grad, grad, no_grad
from graphwright.errors import UsageError
from graphwright.program import Program
from graphwright.program.gates import LOGITS, RUN, TEMPERATURE, gate_node
from graphwright.program.op_graph import Value
from graphwright.program.run import check_feeds, tensors
from graphwright.settings import Count, Positive, Range, Settings
from graphwright.structure import harden
from graphwright.structure.elements import Element, elements
from graphwright.structure.errors import NotScalar
from graphwright.structure.losses import Objective, Terms, captures
from graphwright.structure.policy import Policy, Proposal, Proposes, ThresholdPolicy, additions, protect
from graphwright.structure.report import Discretized, ungated


@dataclass(frozen=True, slots=True)
class TemperatureSchedule(Settings):
    """A temperature that falls monotonically from `start` to `end`; with `steps=0` it stays at `start`.

    Attributes:
        start, end: temperatures > 0, end <= start.
        steps: number of steps after which the temperature is `end`.
        form: `exponential`, `linear` or `cosine`.
    Raises: UsageError if a value is out of range.
    """

    start: Positive = 1.0
    end: Positive = 0.1
    steps: Count = 0
    form: Literal["exponential", "linear", "cosine"] = "exponential"

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.end > self.start:
            raise self.out_of_range("end", f"at most the start, {self.start}")

    def at(self, step: int) -> float:
        """Return the temperature at step number `step`, counted from 0."""
        if not self.steps:
            return self.start
        x = min(max(step, 0) / self.steps, 1.0)
        if self.form == "exponential":
            return max(self.end, self.start * (self.end / self.start) ** x)
        if self.form == "linear":
            return self.start + (self.end - self.start) * x
        return self.end + (self.start - self.end) * (1 + cos(pi * x)) / 2


Task = str | Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor] | Objective
"""Name of a scalar output, a function of (outputs, batch), or an objective such as `distill`."""

Schedules = TemperatureSchedule | Mapping[str, TemperatureSchedule]
"""One schedule for all groups of gates, or one by group name."""


class DifferentiableGraph:
    """A view of the gates of a program, for training and cutting its structure.

    Args:
        program: the program with the gates; the view shows its later edits, too.
        seed: seed of the noise of gates in training.
        schedule: temperature schedule of all groups of gates except `hard_concrete`, or a dict from group names to
            schedules; None leaves temperatures unchanged.

    Attributes:
        step: number of training steps so far, which is also part of the random key of the noise.
    """

    def __init__(self, program: Program, seed: int = 0, schedule: Schedules | None = None) -> None:
        if not isinstance(program, Program):
            raise UsageError("the argument is not a program", where="program", expected="a Program",
                             got=type(program).__name__)  # fmt: skip
        Range(0, (1 << 63) - 1, whole=True).check("seed", seed)
        self.program, self.seed, self.schedule = program, seed, schedule
        self.step = 0
        if program.gates():
            self._set_run("eval")

    # -- state -------------------------------------------------------------------------------------------------------
    def elements(self) -> list[Element]:
        """Return all elements, in order of their logits."""
        return elements(self.program)

    def table(self) -> list[dict[str, Any]]:
        """Return a list with one JSON-serialisable dict per element."""
        return [e.to_json() for e in self.elements()]

    def probabilities(self, at: float | str = 1.0) -> dict[str, float]:
        """Map element names to decision probabilities, or for `at="T"` to current open probabilities."""
        if at not in (1.0, "T"):
            raise UsageError("unknown temperature", where="at", expected='1.0 or "T"', got=at)
        return {e.name: e.p if at == 1.0 else e.p_now for e in self.elements()}

    def matrix(self) -> dict[tuple[str, str], list[float]]:
        """Map each pair (source, target) to the decision probabilities of the gated edges between the two nodes."""
        found: dict[tuple[str, str], list[float]] = {}
        for e in self.elements():
            if e.over == "edges":
                source, target = e.gate.owner.split(" -> ")
                found.setdefault((source, target), []).append(e.p)
        return found

    def adjacency(self, threshold: float = 0.5) -> dict[tuple[str, str], int]:
        """Map each pair (source, target) to its number of gated edges with a decision probability >= `threshold`."""
        return {ends: sum(p >= threshold for p in ps) for ends, ps in self.matrix().items()}

    def overlay(self) -> dict[str, float]:
        """Map paths of nodes that multiply by a gate to mean decision probabilities, for `to_svg(overlay=...)`."""
        found: dict[str, list[float]] = {}
        for e in self.elements():
            for site in e.gate.sites:
                found.setdefault(self.program.path(site), []).append(e.p)
        return {path: float(np.mean(ps)) for path, ps in found.items()}

    @property
    def temperatures(self) -> dict[str, float]:
        """The current temperature of each group of gates, by name."""
        p = self.program
        if not p.gates():
            return {}
        return dict(zip(p.attrs(gate_node(p))["groups"], map(float, p.weights[TEMPERATURE].numpy()), strict=True))

    # -- running -----------------------------------------------------------------------------------------------------
    def _set_run(self, mode: str) -> None:
        run = np.array([self.seed, self.step, MODES.index(mode)], np.int64)
        self.program.weights[RUN].assign(as_tensor(run))

    @contextmanager
    def using(self, mode: str) -> Iterator[None]:
        """Set the mode of all gates inside a `with` block: `train`, `eval`, `soft`, `hard` or `open`.

        Only `train` draws noise. `soft` never rounds gates, `hard` rounds them to 0 or 1, `open` sets all gates to 1.
        """
        if mode not in MODES:
            raise UsageError("unknown mode of gates", expected=", ".join(MODES), got=mode)
        if not self.program.gates():
            yield
            return
        before = self.program.weights[RUN].data.to_numpy().copy()
        self._set_run(mode)
        try:
            yield
        finally:
            if RUN in self.program.weights:
                self.program.weights[RUN].assign(as_tensor(before))

    def run(self, feeds: Mapping[str, Any] | None = None, *, gates: str = "eval", **named: Any) -> dict[str, Tensor]:
        """Run the program with its gates in mode `gates` (see `using`); return a dict from output names to tensors.

        The outputs have a tape, also with respect to the logits of gates.
        """
        held = self.program.weights[RUN] if self.program.gates() else None
        before = None if held is None else held.data
        with self.using(gates):
            if held is not None and before is not None:
                held.data = before.copy()  # for the tape: `using` writes to the other one when it ends
            try:
                return self.program(**{**(feeds or {}), **named})
            finally:
                if held is not None and before is not None:
                    held.data = before

    def anneal(self, step: int | None = None) -> dict[str, float]:
        """Set temperatures to the schedule's values at `step` (default: the current step); return them by group."""
        step = self.step if step is None else step
        if self.schedule is not None and self.program.gates():
            now, given = self.temperatures, self.schedule
            if isinstance(given, TemperatureSchedule):
                constant = {kind.group for kind in GATE_KINDS.values() if kind.temperature != 1.0}
                given = {group: given for group in now if group not in constant}
            now |= {group: mine.at(step) for group, mine in given.items() if group in now}
            held = self.program.weights[TEMPERATURE]
            fresh = np.array(list(now.values()), held.dtype.numpy)
            if not np.array_equal(fresh, held.data.to_numpy()):
                held.assign(as_tensor(fresh))
        return self.temperatures

    def evaluate(
        self, feeds: Mapping[str, Any], task: Task | None, penalties: Sequence[Any] = (), step: Any = None,
        keep: Sequence[Value] = (), trained: bool = False,
    ) -> tuple[Tensor, list[Tensor], Terms]:  # fmt: skip
        """Return the task's loss (0 without a task), the list of penalty values, and the `Terms` passed to penalties.

        Gates run in their current mode. If the program has no gates, penalties are 0, except those that read nodes
        (see `captures`) and objectives.

        Args:
            step: number of the step as a tensor; by default `self.step`.
            keep: further values to store in `Terms.values`; trained: whether gradients of weights are needed.
        Raises: NotScalar if the loss or a penalty is not a scalar; UsageError for an invalid task.
        """
        p = self.program
        check_task(p, task)
        checked, dims = check_feeds(p, {n: feeds[n] for n in p.input_names() if n in feeds})
        read = [n for c in (*penalties, task) for n in captures(c)]
        roots = list(dict.fromkeys([*p.outputs(), *(Value(p.node(n)) for n in read), *keep]))
        values = tensors(p, checked, dims, roots, trained=trained)
        zero = as_tensor(np.float64(0))
        terms = Terms(p, self.elements(), values, {**feeds, **checked}, self._number() if step is None else step)
        outputs = {n: values[v] for n, v in zip(p.output_names(), p.outputs(), strict=True)}
        loss = zero
        if isinstance(task, Objective):
            loss = _scalar(task(terms), task)
        elif task is not None:
            loss = _scalar(outputs[task] if isinstance(task, str) else task(outputs, dict(terms.feeds)), task)
        terms.task = loss.detach()
        found = [_scalar(t(terms), t) if terms.elements or captures(t) or isinstance(t, Objective) else zero
                 for t in penalties]  # fmt: skip
        if task is None and found:
            loss = found[0] * 0.0
        return loss, found, terms

    def gradients(
        self, task: Task, feeds: Mapping[str, Any], penalties: Sequence[Any] = (), gates: str = "train"
    ) -> np.ndarray:
        """Return d(task + penalties) / d logits, float [number of logits]; nothing is updated."""
        if not self.program.gates():
            return np.zeros(0)
        with self.using(gates), enable_grad():
            loss, extra, _ = self.evaluate({n: as_tensor(v) for n, v in feeds.items()}, task, penalties)
            for term in extra:
                loss = loss + term.to(loss.dtype)
            (found,) = grad(loss, [self.program.weights[LOGITS]], allow_unused=True)
        return np.zeros(len(self.program.gates().logits())) if found is None else found.numpy().copy()

    def penalty(self, penalty: Any) -> Tensor:
        """Compute a penalty at the current logits, differentiable with respect to them; the program is not run."""
        return penalty(Terms(self.program, self.elements(), {}, {}, self._number()))

    def _number(self) -> Tensor:
        return as_tensor(np.float64(self.step))

    # -- deciding ----------------------------------------------------------------------------------------------------
    def propose(
        self, policy: Proposes | None = None, *, task: Task | None = None, batch: Mapping[str, Any] | None = None,
        add_gain: float | None = None, newton: bool = False,
    ) -> list[Proposal]:  # fmt: skip
        """Return the cuts that a policy proposes and, with `add_gain`, missing edges that would lower the loss.

        Args:
            task, batch: if given, proposals get gradients of the task on this batch; required with `add_gain`.
            add_gain: propose missing edges with a gain above this number, in units of the loss (see `gains`).
            newton: estimate gains to second order.
        """
        if add_gain is not None and (task is None or batch is None):
            raise UsageError("add_gain is set without task or batch", fix="propose(task=..., batch=..., add_gain=...)")
        found = list((policy or Policy(patience=1)).propose(self))
        if task is not None and batch is not None:
            found = self._with_gradients(found, task, batch)
            if add_gain is not None:
                found += additions(self, task, batch, least=add_gain, newton=newton)
        return found

    def _with_gradients(self, proposals: Sequence[Proposal], task: Task, batch: Mapping[str, Any]) -> list[Proposal]:
        slopes = self.gradients(task, batch, gates="eval")
        return [q if q.element is None else replace(q, gradient=float(slopes[q.element.offset])) for q in proposals]

    def apply(self, proposals: Sequence[Proposal], why: str = "a policy of gates") -> list[str]:
        """Apply proposals as one edit of author `gate`; added edges get a `sigmoid` gate. Return the names of the cuts.

        The journal entry stores step, probability, gradient and reason of each proposal (see `program.blame(name)`).
        """
        cuts = [q for q in proposals if q.action == "cut" and q.element is not None]
        adds = [q for q in proposals if q.action == "add"]
        if not cuts and not adds:
            return []
        with self.program.edit(why, author="gate") as e:
            done = harden.cut(e, cuts, self.step) if cuts else []
            for q in adds:
                source, target = q.name.split(" -> ")
                e.gate(e.connect(source, target), "sigmoid")
                harden.annotate(e, q, self.step)
        return done

    def discretize(
        self, by: float | Proposes = 0.5, *, to: str = "auto", probe: Mapping[str, Any] | None = None,
        task: Task | None = None, copy: bool = False, protection: str = "keep",
    ) -> Discretized:  # fmt: skip
        """Cut elements with closed gates, and remove all gates, in one edit; the journal stores each cut as in `apply`.

        Args:
            by: decision probability below which elements are cut, or a policy.
            to: what replaces open gates: `one` (the number 1); `fold` (multiply adjacent weights by the gate; gates
                without such weights, e.g. those of a pattern's edges, are frozen); `auto` (fold `sigmoid` and `scale`
                gates, replace other kinds by 1). A program with frozen gates cannot be exported.
            probe: batch for measuring the loss before and after, and for computing gradients for the journal.
            task: as in `JointOptimizer`; by default the first scalar output.
            copy: harden a fork; leave the program unchanged.
            protection: if a cut would remove a protected element, `keep` skips the cut and `strict` raises.
        Raises: WouldDisconnect, BudgetUnreachable; the program is then unchanged.
        """
        if to not in ("auto", "one", "fold"):
            raise UsageError("unknown replacement for open gates", where="to", expected="auto, one or fold", got=to)
        view = DifferentiableGraph(self.program.fork(), self.seed, self.schedule) if copy else self
        p = view.program
        policy = ThresholdPolicy(by) if isinstance(by, int | float) else by
        if not hasattr(policy, "propose"):
            raise UsageError("`by` is neither a threshold nor a policy",
                             expected="a number, or an object with propose(view)", got=repr(by))  # fmt: skip
        among = view.elements()
        proposed = [q for q in policy.propose(view) if q.action == "cut" and q.element is not None]
        if probe is not None:
            task = task_of(p, task, "discretize")
            proposed = view._with_gradients(proposed, task, probe) if proposed else []
        mine = {"min_in": getattr(policy, "min_in", 1), "keep": getattr(policy, "protect", ())}
        wanted = [q.element for q in proposed if q.element is not None]
        cuts, kept = protect(p, wanted, among, **mine, strict=protection == "strict")
        gone = {e.name for e in cuts}
        before, shape = view._probe(probe, task), ungated(p)
        values = view._values()
        with p.edit("harden gates", author="gate") as e:
            done = harden.cut(e, [q for q in proposed if q.name in gone], view.step)
            harden.remove_gates(e, list(p.gates().values()), to, view._values(among, values))
        after = view._probe(probe, task)
        return Discretized(p, among, done, kept, shape, ungated(p), before, after, p.journal[-1])

    def _values(self, before: Sequence[Element] = (), values: np.ndarray | None = None) -> np.ndarray:
        """Return the values of all gates in evaluation mode, as an array indexed by logit offset.

        If `values` is such an array for the elements `before` an edit, return it reordered to the current offsets.
        """
        if values is None:
            p = self.program
            if not p.gates():
                return np.zeros(0)
            node = gate_node(p)
            ports = [Value(node, port) for port in range(len(p.specs(node)))]
            with self.using("eval"):
                found = tensors(p, {}, {}, ports[:1])
            return np.concatenate([found[port].numpy() for port in ports]).astype(np.float64)
        known = {e.key: values[e.offset] for e in before}
        found = np.zeros(len(self.program.gates().logits()))
        for e in self.elements():
            found[e.offset] = known[e.key]
        return found

    def _probe(self, probe: Mapping[str, Any] | None, task: Task | None) -> float | None:
        if probe is None:
            return None
        with self.using("eval"), no_grad():
            loss, _, _ = self.evaluate({n: as_tensor(v) for n, v in probe.items()}, task)
        return loss.item()


def task_of(p: Program, task: Task | None, caller: str) -> Task:
    """Return the task; if it is None, the first scalar output. Raises: NotScalar if there is no scalar output."""
    scalars = (n for n, v in zip(p.output_names(), p.outputs(), strict=True) if not p.spec(v).shape)
    if (found := task or next(scalars, None)) is None:
        raise NotScalar("no task is given and no output is a scalar", where=p.name, fix=f"{caller}(..., task=...)")
    return found


def check_task(p: Program, task: Task | None) -> None:
    """Raise UsageError if a task is invalid, NotScalar if it names an output that is not a scalar."""
    if isinstance(task, str):
        outputs = dict(zip(p.output_names(), p.outputs(), strict=True))
        if task not in outputs:
            raise UsageError("the program has no such output", where=p.name, expected=", ".join(outputs), got=task)
        if p.spec(outputs[task]).shape != ():
            raise NotScalar("the output used as the loss is not a scalar", where=task, got=p.spec(outputs[task]))
    elif task is not None and not callable(task):
        raise UsageError("the task is neither an output name nor a function", got=repr(task),
                         expected="a scalar output by name, or a function of (outputs, batch)")  # fmt: skip


def _scalar(value: Tensor, what: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != ():
        got = getattr(value, "spec", type(value).__name__)
        raise NotScalar("the loss or penalty is not a scalar", where=str(what)[:60], got=got)
    return value
