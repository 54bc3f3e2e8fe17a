"""Joint training of weights and gates: a step is a single plan, and optimizer state follows edits between steps.

Order of a step: set the temperature, draw noise, forward, backward with respect to weights and logits, clip gradients,
Adam on both, clip logits; every `prune_every` steps the policy may then cut elements. Moments of a weight belong to
its parameter (see `optim`); moments of a logit belong to the element of its gate, whose key is never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from math import ceil, log
from typing import Any
from warnings import warn

import numpy as np

from graphwright.array import Device, from_numpy
from graphwright.array.formulas import optimizers, specialise
from graphwright.autograd import Parameter, Tensor, Variable, as_tensor, grad, no_grad
from graphwright.errors import Diverged, UsageError
from graphwright.ops import call
from graphwright.optim import Adam, Optimizer, clip_grad_norm_, save_state
from graphwright.optim.checkpoint import SavedState
from graphwright.optim.step_terms import PATIENCE
from graphwright.plan import compile
from graphwright.program import Program
from graphwright.program.gates import COST, FREE, LOGITS, STATE
from graphwright.settings import Range
from graphwright.structure.elements import Key, elements, numbers
from graphwright.structure.errors import GatesCannotClose, GatesUnused, NoTaskTerm
from graphwright.structure.graph import DifferentiableGraph, Task, check_task
from graphwright.structure.losses import NormLimits, Objective, Terms, label, state_variables
from graphwright.structure.policy import Policy, Proposes
from graphwright.structure.report import StepReport

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
_UPDATES = specialise(optimizers, {"sqrt": partial(call, "sqrt")})
OVER = ("edges", "units", "nodes", "layers", "choice", "pattern")


class LogitMoments:
    """Adam (Kingma and Ba 2015) for the vector of logits of a program.

    Args:
        rates: a learning rate, or a dict from kinds of elements to rates; elements that are not soft have rate 0.

    Attributes:
        count: number of steps of the run so far, 0-d float64.
    """

    def __init__(self, program: Program, rates: float | Mapping[str, float]) -> None:
        self.program = program
        self.rates: dict[str, float] = (
            dict.fromkeys(OVER, float(rates)) if isinstance(rates, int | float) else dict(rates)
        )
        if unknown := ", ".join(self.rates.keys() - set(OVER)):
            raise UsageError("a learning rate is given for an unknown kind of element", expected=", ".join(OVER),
                             got=unknown)  # fmt: skip
        for name, rate in self.rates.items():
            Range(0).check(f"rate of {name}", rate)
        self.count = Variable(np.zeros((), np.float64), name="joint.count")
        self._held: dict[str, Variable] = {}
        self._keys: dict[Key, int] = {}
        self._gone: dict[Key, tuple[float, float, float]] = {}
        self._seen: int | None = None
        self.sync()

    @property
    def there(self) -> bool:
        """True if the program has gates."""
        return LOGITS in self.program.weights

    def sync(self) -> None:
        """Move moments to the new offsets of their logits after edits; new elements start with zeros."""
        p = self.program
        now = p.version if self.there else -1
        if self._seen == now:
            return
        self._gone |= {key: self.of(key) for key in self._keys}
        self._seen = now
        among = elements(p)
        logits = p.weights[LOGITS].data.to_numpy() if self.there else np.zeros(0, np.float32)
        rows = np.zeros((4, len(logits)), logits.dtype)
        for e in among:
            rate = self.rates.get(e.over, 0.0) if e.state == "soft" else 0.0
            rows[:, e.offset] = *self._gone.pop(e.key, (0.0, 0.0, 0.0)), rate
        self._keys = {e.key: e.offset for e in among}
        self._held = {name: Variable(from_numpy(x.copy()), name=f"joint.gates.{name}")
                      for name, x in zip(("m", "v", "t", "rate"), rows, strict=True)}  # fmt: skip

    def step(self, g: Tensor, bad: Tensor, limit: float) -> None:
        """Update logits with rate > 0 by Adam with gradient `g` and clip them to ±limit; do nothing if `bad` is 1."""
        z = self.program.weights[LOGITS]
        m, v, t, rate = (self._held[n] for n in ("m", "v", "t", "rate"))
        moves = call("logical_and", rate > 0.0, (bad * 1.0 < 0.5).reshape(1))
        t1 = t + 1.0
        m1, v1 = _UPDATES.adam_moments(g, m, v, BETA1, BETA2, 1 - BETA1, 1 - BETA2)
        scales = _UPDATES.adam_scales(rate, (t1 * log(BETA1)).exp(), (t1 * log(BETA2)).exp())
        moved = z - _UPDATES.adam_update(m1, v1, *scales, EPS)
        moved = call("maximum", call("minimum", moved, limit), -limit)
        for variable, value in ((z, moved), (m, m1), (v, v1), (t, t1)):
            variable.assign(call("where", moves, value, variable))

    def variables(self) -> dict[str, Variable]:
        """Map names to the variables of Adam: steps of the run; per logit both moments and the number of steps."""
        held = {v.name: v for n, v in self._held.items() if n != "rate"}
        return {self.count.name: self.count, **held}

    def slope(self, key: Key) -> float:
        """Return the recent mean gradient of a logit: its bias-corrected first moment; 0 before the first step."""
        m, _, t = self.of(key)
        return m / (1 - BETA1**t) if t else 0.0

    def of(self, key: Key) -> tuple[float, float, float]:
        """Return a tuple (first moment, second moment, number of steps) of the logit of an element."""
        offset = self._keys[key]
        m, v, t = (float(self._held[n].data.to_numpy()[offset]) for n in ("m", "v", "t"))
        return m, v, t


MODES = ("joint", "bilevel", "alternate", "gates", "params")
BATCH = Mapping[str, Any]


@dataclass(frozen=True)
class _Weights:
    """The current trainable parameters of a program, except the logits of gates."""

    view: DifferentiableGraph

    def parameters(self) -> list[Parameter]:
        p = self.view.program
        return [v for v in p.parameters() if LOGITS not in p.weights or v is not p.weights[LOGITS]]


class JointOptimizer:
    """Trains the weights and the gates of a program together.

    Args:
        view: the view of the gates; it also holds seed, step and temperature schedule.
        task: name of a scalar output, a function of (outputs, batch) that returns a scalar, or `distill(teacher)`.
        penalties: functions of `Terms`, added to the task's loss.
        params: learning rate of Adam on the weights, or a function that makes an optimizer of an object with
            `parameters()`.
        gates: learning rate of Adam on the logits; or a dict by kind of element, {"edges": 0.02, "units": 0.01},
            where missing kinds have rate 0.
        mode: `joint` trains weights and gates on one batch; `bilevel` trains weights on `batch` and gates on `valid`;
            `alternate` trains them in `turns`; `gates` and `params` train only gates or only weights.
        turns: for `alternate`: number of steps on weights, then number of steps on gates.
        warmup: number of initial steps that train only weights, because gates on untrained weights close. The default
            ends when the loss has levelled off (see `WarmUp`), at most after half of `steps` and in time for gates to
            close; it is 0 if `steps` is not given, or if weights and gates are not both trained.
        policy: cuts elements during training; by default `Policy()`.
        prune_every: number of steps between two checks of the policy; 0 for no checks.
        clip: maximum norm of the gradient of all weights together.
        steps: number of steps of the run, if known; used for the warm-up, and to warn if gates cannot close.
        logit_limit: largest absolute value of logits.
        executor, deterministic, device: see `CompileOptions`.
        noise: if False, gates are not sampled; their values are functions of the logits.
    """

    def __init__(
        self, view: DifferentiableGraph, task: Task | None, penalties: Sequence[Any] = (), *,
        params: float | Callable[[Any], Optimizer] = 1e-3, gates: float | Mapping[str, float] = 0.02,
        mode: str = "joint", turns: tuple[int, int] = (1, 1), warmup: int | None = None,
        policy: Proposes | None = None, prune_every: int = 0, clip: float | None = None, steps: int = 0,
        logit_limit: float = 10.0, executor: str = "auto", deterministic: bool = False, device: Device | str = "cpu",
        noise: bool = True,
    ) -> None:  # fmt: skip
        if not hasattr(view, "elements"):
            raise UsageError("`view` is not a DifferentiableGraph", expected="DifferentiableGraph(program)",
                             got=repr(view))  # fmt: skip
        if mode not in MODES:
            raise UsageError("unknown training mode", expected=", ".join(MODES), got=mode)
        for name, number in {"warmup": warmup or 0, "prune_every": prune_every, "steps": steps}.items():
            Range(0, whole=True).check(name, number)
        if len(turns) != 2:
            raise UsageError("`turns` is not a pair", expected="(steps on weights, steps on gates)", got=turns)
        for number in turns:
            Range(1, whole=True).check("turns", number)
        Range(0, above=True).check("logit_limit", logit_limit)
        Range(0, above=True).check("clip", 1 if clip is None else clip)
        if isinstance(penalties, str) or not isinstance(penalties, Sequence) or not all(map(callable, penalties)):
            raise UsageError("`penalties` is not a list of functions",
                             expected="a list of functions of Terms", got=repr(penalties))  # fmt: skip
        if policy is not None and not hasattr(policy, "propose"):
            raise UsageError("`policy` is not a policy", expected="an object with propose(view)", got=repr(policy))
        self.view, self.task, self.penalties = view, task, tuple(penalties)
        self.mode, self.turns, self.clip = mode, turns, clip
        self.policy: Proposes = Policy() if policy is None else policy
        self.prune_every, self.logit_limit, self.noise = prune_every, logit_limit, noise
        self.options = {"executor": executor, "deterministic": deterministic, "device": device}
        weights = _Weights(view)
        self.weights: Optimizer | None = None
        if weights.parameters() and mode != "gates":
            self.weights = params(weights) if callable(params) else Adam(weights, params)
        self.logits = LogitMoments(view.program, gates)
        rate, reach = self._reach()
        most = max(0, min(steps // 2, steps - ceil(reach / rate))) if self.weights is not None and rate > 0 else 0
        self._warmup = WarmUp(most if warmup is None else warmup, warmup is None, steps)
        self._limits = NormLimits(view.program) if self.warmup > 0 else None
        self._begun = False
        self.skipped = self._in_a_row = 0
        self._steps: dict[tuple[Any, ...], Any] = {}
        self._names = _unique([label(p) for p in self.penalties])
        self._depends = False
        self._check(steps)

    def _check(self, steps: int) -> None:
        p = self.view.program
        if self.task is None and not any(isinstance(t, Objective) for t in self.penalties):
            warn("the objective has no task term: its optimum is to cut everything", NoTaskTerm, 3)
        check_task(p, self.task)
        rate, reach = self._reach()
        left = steps - self.warmup
        if steps and rate and left * rate < reach:
            warn(f"{left} steps at learning rate {rate} move a logit by at most {left * rate:.3g}: gates that start at "
                 f"{reach / 2:.3g} need steps · lr of {reach:.3g} to close", GatesCannotClose, 3)  # fmt: skip

    def _reach(self) -> tuple[float, float]:
        """Return the largest learning rate of gates (0 if not trained), and twice the largest trained |logit|."""
        rate = max(self.logits.rates.values(), default=0.0) if self.mode != "params" else 0.0
        return rate, 2 * max((abs(e.z) for e in self.view.elements() if e.state == "soft"), default=0.0)

    @property
    def warmup(self) -> int:
        """The number of initial steps that train only weights; it decreases when the loss levels off."""
        return self._warmup.until

    # -- one step ------------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """The number of training steps so far."""
        return self.view.step

    def _turn(self) -> tuple[bool, bool, bool]:
        """Return three bools: the step trains weights; the step trains gates; gates use a second batch."""
        if self.steps < self.warmup or self.mode == "params":
            return True, False, False
        if self.mode == "alternate":
            weights = (self.steps - self.warmup) % sum(self.turns) < self.turns[0]
            return weights, not weights, False
        return self.mode != "gates", True, self.mode == "bilevel"

    def step(self, batch: BATCH, valid: BATCH | None = None) -> StepReport:
        """Run one training step on a dict of arrays by name: the program's inputs, and other data that the task reads.

        `valid` is a second batch, on which mode `bilevel` trains gates.
        Raises: Diverged after five consecutive steps whose loss or gradients are not finite; GatesUnused if the loss
            depends on no gate; UsageError for invalid batches. If the policy raises, no element is cut.
        """
        view, (by_weights, by_gates, apart) = self.view, self._turn()
        for name, given in {"batch": batch, "valid": valid or {}}.items():
            if not isinstance(given, Mapping):
                got = type(given).__name__
                raise UsageError("the batch is not a mapping", where=name, expected="arrays by name", got=got)
        if apart and valid is None:
            raise UsageError("mode='bilevel' got no second batch for the gates", fix="step(batch, valid)")
        view.anneal()
        self.logits.sync()
        if self._limits is not None:
            self._limits.sync()
        if by_gates and not self._begun:
            self._begin(batch)
        warm = view.temperatures
        with view.using("train" if self.noise else "soft"):
            found = self._run(batch, valid if apart else None, by_weights and self.weights is not None, by_gates)
        *first, bad, worse = found
        if bad or worse:
            return self._skip(first, warm, batch if bad or valid is None else valid)
        self._in_a_row = 0
        number, edits = view.step, ()
        self._warmup.saw(number, first[1])
        view.step += 1
        if self.prune_every and view.step > self.warmup and view.step % self.prune_every == 0:
            found = [q if q.element is None or q.gradient is not None
                     else replace(q, gradient=self.logits.slope(q.element.key))
                     for q in self.policy.propose(view)]  # fmt: skip
            edits = tuple(view.apply(found))
        return self._report(number, first, warm, edits, False)

    def _begin(self, batch: BATCH) -> None:
        """Before the first step that trains gates, set norm limits and measure how much all gates lower the loss."""
        self._begun = True
        if self._limits is not None:
            self._limits.begin()
        units = [state_variables(p)["gain"] for p in self.penalties if "gain" in state_variables(p)]
        if not units or not self.logits.there:
            return
        names = tuple(batch)
        whole = compile(lambda *values: self._whole(dict(zip(names, values, strict=True))), **self.options)
        given = [as_tensor(batch[n]) for n in names]
        gain = gates_gain(self.view, lambda: float(whole(*given).item()), self.logit_limit)
        if not np.isfinite(gain):
            self._begun = False  # the step is skipped; measure on the next batch
            return
        for unit in units:
            unit.assign(as_tensor(np.float64(gain)))

    def _whole(self, feeds: Mapping[str, Tensor]) -> Tensor:
        _, task, extra, _ = self._objective(feeds, False)
        for term, penalty in zip(extra, self.penalties, strict=True):
            if isinstance(penalty, Objective):
                task = task + term.to(task.dtype)
        return task.detach()

    def _skip(self, found: list[float], warm: Mapping[str, float], batch: BATCH) -> StepReport:
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= PATIENCE:
            raise Diverged(f"loss or gradients were not finite in {PATIENCE} consecutive steps, which were skipped",
                           where=f"step {self.view.step}, {self._culprit(batch)}", got=found[0],
                           fix="use a smaller learning rate, clip=1.0, or check the batch")  # fmt: skip
        return self._report(self.view.step, found, warm, (), True)

    def _culprit(self, batch: BATCH) -> str:
        """Describe as text the first node with a NaN or +∞ in its value (-∞ is allowed, for attention masks)."""
        p = self.view.program
        run = p.run({n: batch[n] for n in p.input_names()})
        for node in p.order():
            if p.specs(node)[0].dtype.is_float:
                value = run.value(node).to_numpy("float64")
                if (np.isnan(value) | np.isposinf(value)).any():
                    return f"node {p.path(node)}"
        return "not in a node: in a gradient, or in the loss after the outputs"

    def _report(
        self, step: int, found: list[float], warm: Mapping[str, float], edits: tuple[str, ...], skipped: bool
    ) -> StepReport:
        parts, is_open, expected = dict(zip(self._names, found[2:], strict=True)), 0, 0.0
        if self.view.program.gates():
            table, _, by, now, _ = numbers(self.view.program)
            cost = np.where(table[:, STATE] == FREE, 0, table[:, COST])
            is_open, expected = int((by >= 0.5).sum()), float((cost * now).sum() / max(cost.sum(), 1))
        return StepReport(step, found[0], found[1], parts, dict(warm), is_open, expected, edits, skipped)

    def _run(self, batch: BATCH, valid: BATCH | None, by_weights: bool, by_gates: bool) -> list[float]:
        names, theirs = tuple(batch), tuple(valid or ())
        key = (by_weights, by_gates, names, theirs)
        if key not in self._steps:
            fn = self._traced(names, theirs, by_weights, by_gates)
            self._steps[key] = compile(fn, **self.options)
        given = [*(batch[n] for n in names), *((valid or {})[n] for n in theirs)]
        out = self._steps[key](*map(as_tensor, given))  # passing tensors avoids a conversion
        return [float(x) for x in out.numpy()]

    def _traced(
        self, names: Sequence[str], theirs: Sequence[str], by_weights: bool, by_gates: bool
    ) -> Callable[..., Tensor]:
        """Return the step to compile, a function of the tensors `names` of the batch, then `theirs` of the second."""

        def step(*values: Tensor) -> Tensor:
            p = self.view.program
            own = values[: len(names)]
            trained = self.weights.parameters() if self.weights is not None and by_weights else ()
            loss, task, extra, terms = self._objective(dict(zip(names, own, strict=True)), bool(trained))
            wanted: list[Parameter] = [v for v in trained if v.requires_grad]
            held = [p.weights[LOGITS]] if by_gates and self.logits.there else []
            above = (loss, task, extra, terms)
            if theirs:
                above = self._objective(dict(zip(theirs, values[len(names) :], strict=True)), False)
            with no_grad():
                if held and not self._depends:
                    self._check_depends(above[1], above[2], held)
                if theirs:
                    ours, others = _slopes(loss, wanted), _slopes(above[0], held)
                    slopes, bad = [*ours, *others], self._not_finite(loss, ours)
                    worse = self._not_finite(above[0], others)
                else:
                    slopes = _slopes(loss, [*wanted, *held])
                    bad = worse = self._not_finite(loss, slopes)
                stay = call("maximum", bad, worse)
                for parameter, slope in zip(wanted, slopes, strict=False):
                    parameter.grad = slope
                if wanted and self.weights is not None:
                    if self.clip is not None:
                        clip_grad_norm_(wanted, self.clip)
                    self.weights.step(found_inf=stay)
                    if by_gates and self._limits is not None:
                        self._limits.hold()
                if held and slopes[-1] is not None:
                    self.logits.step(slopes[-1], stay, self.logit_limit)
                if held:
                    for penalty in self.penalties:
                        for variable in state_variables(penalty).values() if hasattr(penalty, "climb") else ():
                            variable.assign(call("where", stay > 0.0, variable, penalty.climb(above[3])))
                self.logits.count.assign(self.logits.count + (1.0 - stay).to("float64"))
            reported = [loss, task, *extra, bad, worse]
            return call("concat", *(n.detach().to("float64").reshape(1) for n in reported), axis=0)

        return step

    def _objective(self, feeds: Mapping[str, Tensor], trained: bool) -> tuple[Tensor, Tensor, list[Tensor], Terms]:
        """Return the total loss, the task's loss, the list of penalty values, and the `Terms` passed to penalties."""
        number = call("maximum", self.logits.count - float(self.warmup), 0.0)
        task, extra, terms = self.view.evaluate(feeds, self.task, self.penalties, number, trained=trained)
        loss = task
        for term in extra:
            loss = loss + term.to(loss.dtype)
        return loss, task, extra, terms

    def _check_depends(self, task: Tensor, extra: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        objectives = [t for t, penalty in zip(extra, self.penalties, strict=True) if isinstance(penalty, Objective)]
        whole = objectives if self.task is None else [task, *objectives]
        self._depends = not whole or any(
            slope is not None for one in whole for slope in grad(one, held, retain_graph=True, allow_unused=True)
        )
        if not self._depends:
            where = self.task if isinstance(self.task, str) else getattr(self.task, "__name__", "task")
            gates = ", ".join(g.owner for g in list(self.view.program.gates().values())[:4])
            raise GatesUnused("the loss does not depend on any gate", where=where, got=f"gates on {gates}",
                              fix="gate nodes that the loss reads, or use a loss that reads gated nodes")  # fmt: skip

    @staticmethod
    def _not_finite(loss: Tensor, slopes: Iterable[Tensor | None]) -> Tensor:
        """Return 1 if the loss or a gradient is not finite, else 0; 0-d float32."""
        total = call("abs", loss * 0.0).to("float32")
        for slope in slopes:
            if slope is not None:
                total = total + (slope * 0.0).sum().to("float32")
        return 1.0 - call("eq", total, 0.0).to("float32")

    # -- saving ------------------------------------------------------------------------------------------------------
    def variables(self) -> dict[str, Variable]:
        """Map names to variables: moments of weights and logits, state of penalties, norm limits and step count."""
        self.logits.sync()
        held = dict(self.weights.variables()) if self.weights is not None else {}
        for name, penalty in zip(self._names, self.penalties, strict=True):
            held |= {f"joint.{name}.{key}": v for key, v in state_variables(penalty).items()}
        scales = {} if self._limits is None else self._limits.variables()
        return {**held, **scales, **self.logits.variables()}

    def save(self, directory: Any) -> None:
        """Save weights, logits, moments, step and the policy's counts atomically; see `optim.save_state`."""
        counts = [[*key, n] for key, n in getattr(self.policy, "counts", {}).items()]
        facts = {"counts": counts, "wait": [self._warmup.until, self._begun, self._warmup.losses]}
        save_state(directory, self.view.program, self, step=self.view.step, facts=facts)

    def load(self, directory: Any) -> None:
        """Restore what `save` wrote, bit for bit, into the same structure. Raises: StateError, CheckpointError."""
        saved = SavedState.read(directory)
        saved.restore(self.view.program, self)
        self.view.step = saved.step
        self._warmup.until, self._begun, self._warmup.losses = saved.facts["wait"]
        if isinstance(self.policy, Policy):
            self.policy.counts = {(a, b, c): n for a, b, c, n in saved.facts["counts"]}


def _slopes(loss: Tensor, by: Sequence[Variable]) -> Sequence[Tensor | None]:
    return grad(loss, by, allow_unused=True) if by else ()


def _unique(names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        candidates = chain([name], (f"{name}_{n}" for n in count(2)))
        found[next(c for c in candidates if c not in found)] = None
    return list(found)


# -- the warm-up on weights alone, and the gain of all gates -----------------------------------------------------------
LEVEL = 0.05
"""The loss has levelled off if it decreases by less than this share from one window to the next."""


class WarmUp:
    """The initial steps of a run, which train only weights.

    Args:
        most: largest number of warm-up steps.
        levels: whether the warm-up ends as soon as the loss has levelled off: the mean over a window of steps is less
            than 5 % below the mean over the window before.
        steps: number of steps of the run; a window is a fifteenth of them, clipped to 10 to 50.

    Attributes:
        until: the step at which training of gates starts; lowered when the loss levels off.
        losses: the task's losses in the last two windows; empty after the warm-up.
    """

    def __init__(self, most: int, levels: bool, steps: int) -> None:
        self.until, self.levels, self.window = most, levels, max(10, min(50, steps // 15))
        self.losses: list[float] = []

    def saw(self, step: int, loss: float) -> None:
        """Record the task's loss of a finished step, and end the warm-up if the loss has levelled off."""
        if not self.levels or step >= self.until:
            self.losses.clear()
            return
        w = self.window
        self.losses = [*self.losses, loss][-2 * w :]
        if len(self.losses) == 2 * w:
            before, now = np.mean(self.losses[:w]), np.mean(self.losses[w:])
            if before - now < LEVEL * abs(before):
                self.until = step + 1


def gates_gain(view: DifferentiableGraph, loss: Callable[[], float], limit: float) -> float:
    """Return the loss with all soft gates closed minus that with all open; if not positive, |loss with gates open|.

    Args:
        loss: runs the program and returns its loss.
        limit: gates are closed by setting their logits to -limit.
    """
    with view.using("open"):
        value_with_gates_open = loss()
    with view.using("hard"), _closed(view, limit):
        gain = loss() - value_with_gates_open
    return gain if np.isfinite(gain) and gain > 0 else abs(value_with_gates_open)


@contextmanager
def _closed(view: DifferentiableGraph, limit: float) -> Iterator[None]:
    held = view.program.weights[LOGITS]
    before = held.data.to_numpy().copy()
    low = np.full(held.shape, -limit, held.dtype.numpy)
    for e in view.elements():
        if e.gate.facts.linear:
            low[e.offset] = 0
    held.assign(as_tensor(low))
    try:
        yield
    finally:
        held.assign(as_tensor(before))
