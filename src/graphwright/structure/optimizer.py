"""JointOptimizer: weights and gates in one step, which is one plan; edits come between steps and state follows them.

Order of a step: draw noise, forward, backward by weights and logits at once, clip, Adam on both, clip logits, lower the
temperature, and every K steps let the policy edit. Moments of weights belong to the parameter (`optim`), those of
logits to the element of a gate, by a handle that no other gate ever gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, log
from typing import TYPE_CHECKING, Any
from warnings import warn

import numpy as np

from graphwright.array import from_numpy
from graphwright.array.formulas import optimizers, specialise
from graphwright.autograd import Tensor, Variable, as_tensor, grad, no_grad
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.optim import Adam, clip_grad_norm_, save_state
from graphwright.optim.checkpoint import SavedState
from graphwright.plan import compile
from graphwright.program.gates import COST, FREE, LOGITS, STATE
from graphwright.structure.elements import elements, numbers
from graphwright.structure.errors import Diverged, GatesCannotClose, GatesUnused, NoTaskTerm, whole, within
from graphwright.structure.graph import check_task
from graphwright.structure.losses import Objective, Scales, carried, label
from graphwright.structure.policy import Policy
from graphwright.structure.report import StepReport
from graphwright.structure.schedule import Wait, worth

if TYPE_CHECKING:
    from graphwright.array import Device
    from graphwright.autograd import Parameter
    from graphwright.optim import Optimizer
    from graphwright.program import Program
    from graphwright.structure.elements import Key
    from graphwright.structure.graph import DifferentiableGraph, Task
    from graphwright.structure.losses import Terms
    from graphwright.structure.policy import Proposes

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
_UPDATES = specialise(optimizers, {"sqrt": partial(call, "sqrt")})
OVER = ("edges", "units", "nodes", "layers", "choice")


class LogitMoments:
    """The state of Adam (Kingma and Ba 2015) for the vector of logits of a program.

    Args:
        rates: one for all, or by what is gated; an element that is not soft has rate 0.

    Attributes:
        count: steps of the run, 0-d float64.
    """

    def __init__(self, program: Program, rates: float | Mapping[str, float]) -> None:
        self.program = program
        self.rates: dict[str, float] = (
            dict.fromkeys(map(str, OVER), float(rates)) if isinstance(rates, int | float) else dict(rates)
        )
        if unknown := self.rates.keys() - set(OVER):
            raise UsageError(f"rates for {', '.join(unknown)}: expected some of {', '.join(OVER)}")
        for name, rate in self.rates.items():
            within(f"rate of {name}", rate, 0)
        self.count = Variable(np.zeros((), np.float64), name="joint.count")
        self._held: dict[str, Variable] = {}
        self._keys: dict[Key, int] = {}
        self._gone: dict[Key, tuple[float, float, float]] = {}
        self._seen: int | None = None
        self.sync()

    @property
    def there(self) -> bool:
        """Whether the program has gates."""
        return LOGITS in self.program.weights

    def sync(self) -> None:
        """Follow the edits since the last time."""
        p = self.program
        now = p.version if self.there else -1
        if self._seen == now:
            return
        for key, place in self._keys.items():
            self._gone[key] = tuple(float(self._held[n].data.to_numpy()[place]) for n in ("m", "v", "t"))  # pyright: ignore[reportArgumentType]
        self._seen = now
        among = elements(p)
        size = len(p.weights[LOGITS].data.to_numpy()) if self.there else 0
        kind = p.weights[LOGITS].dtype.numpy if self.there else np.float32
        fresh = np.zeros((3, size), kind)
        rate = np.zeros(size, kind)
        for e in among:
            fresh[:, e.place] = self._gone.pop(e.key, (0.0, 0.0, 0.0))
            rate[e.place] = self.rates.get(e.over, 0.0) if e.state == "soft" else 0.0
        self._keys = {e.key: e.place for e in among}
        rows = {"m": fresh[0], "v": fresh[1], "t": fresh[2], "rate": rate}
        self._held = {name: Variable(from_numpy(x.copy()), name=f"joint.gates.{name}") for name, x in rows.items()}

    def step(self, g: Tensor, bad: Tensor, limit: float) -> None:
        """One step where `bad` is 0; logits stay within ±limit. A logit of rate 0 keeps its bits."""
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
        """By name; the rates are not state."""
        held = {v.name: v for n, v in self._held.items() if n != "rate"}
        return {self.count.name: self.count, **held}

    def slope(self, key: Key) -> float:
        """The mean gradient by a logit of late: its first moment without the bias towards 0; 0 before a step."""
        m, _, t = self.of(key)
        return m / (1 - BETA1**t) if t else 0.0

    def of(self, key: Key) -> tuple[float, float, float]:
        """(m, v, steps) of an element."""
        place = self._keys[key]
        m, v, t = (float(self._held[n].data.to_numpy()[place]) for n in ("m", "v", "t"))
        return m, v, t


MODES = ("joint", "bilevel", "alternate", "gates", "params")
BATCH = Mapping[str, Any]
_PATIENCE = 5
"""Steps in a row that may be skipped."""


class _Weights:
    """The trained parameters of a program but its logits, as they are now."""

    def __init__(self, view: DifferentiableGraph) -> None:
        self.view = view

    def parameters(self) -> list[Parameter]:
        """Without the logits, whose steps are the optimizer's own."""
        p = self.view.program
        return [v for v in p.parameters() if LOGITS not in p.weights or v is not p.weights[LOGITS]]


class JointOptimizer:
    """Trains the weights and the gates of a program together.

    Args:
        view: whose gates; its seed, step and schedule are those of the run.
        task: a scalar output by name, a function of (outputs, batch) that gives one, or `distill(teacher)`.
        penalties: functions of `Terms`, added to the task's loss.
        params: learning rate of Adam on the weights, or a function of what has `parameters()` to an optimizer.
        gates: learning rate of Adam on the logits; or by what is gated: {"edges": 0.02, "units": 0.01}, 0 for others.
        mode: `joint`; `bilevel`: weights on `batch`, gates on `valid`, both from where the step began (first order);
            `alternate`: `turns` of each; `gates` or `params` alone.
        turns: of `alternate`: steps on weights, then steps on gates.
        warmup: steps on weights alone at first: a gate over weights that have learned nothing closes, since they
            only disturb. By default until the task's loss has levelled off (see `waiting`), where both are trained and
            `steps` is given: half of them at most, and never so many that gates can't close in the rest; else none.
        policy: what goes online; by default `Policy()`.
        prune_every: steps between two checks of the policy; 0 for none.
        clip: common norm of the gradients of the weights, at most.
        steps: of the run, if it is known: for the warm-up, and to warn where gates can't close in so many.
        logit_limit: logits stay within plus and minus this.
        executor, device: of the plan, see `gw.compile`.
        noise: without it gates run relaxed, as a function of their logits alone.
    """

    def __init__(
        self,
        view: DifferentiableGraph,
        task: Task | None,
        penalties: Sequence[Any] = (),
        *,
        params: float | Callable[[Any], Optimizer] = 1e-3,
        gates: float | Mapping[str, float] = 0.02,
        mode: str = "joint",
        turns: tuple[int, int] = (1, 1),
        warmup: int | None = None,
        policy: Proposes | None = None,
        prune_every: int = 0,
        clip: float | None = None,
        steps: int = 0,
        logit_limit: float = 10.0,
        executor: str = "auto",
        device: Device | str = "cpu",
        noise: bool = True,
    ) -> None:
        if not hasattr(view, "elements"):
            raise UsageError("gates are seen through a view", expected="DifferentiableGraph(program)", got=repr(view))
        if mode not in MODES:
            raise UsageError("no such mode", expected=", ".join(MODES), got=mode)
        for name, number in {"warmup": warmup or 0, "prune_every": prune_every, "steps": steps}.items():
            whole(name, number)
        if len(turns) != 2:
            raise UsageError("two kinds take turns", where="turns", expected="(on weights, on gates)", got=turns)
        for number in turns:
            whole("turns", number, 1)
        within("logit_limit", logit_limit, 0, above=True)
        within("clip", 1 if clip is None else clip, 0, above=True)
        if isinstance(penalties, str) or not isinstance(penalties, Sequence) or not all(map(callable, penalties)):
            raise UsageError("penalties are functions of Terms, in a list", where="penalties", got=repr(penalties))
        if policy is not None and not hasattr(policy, "propose"):
            raise UsageError("a policy proposes what goes", where="policy", got=repr(policy))
        self.view, self.task, self.penalties = view, task, tuple(penalties)
        self.mode, self.turns, self.clip = mode, turns, clip
        self.policy: Proposes = Policy() if policy is None else policy
        self.prune_every, self.logit_limit, self.noise = prune_every, logit_limit, noise
        self.options = {"executor": executor, "device": device}
        weights = _Weights(view)
        self.weights: Optimizer | None = None
        if weights.parameters() and mode != "gates":
            self.weights = params(weights) if callable(params) else Adam(weights, params)
        self.logits = LogitMoments(view.program, gates)
        self._wait = Wait(self._most(steps) if warmup is None else warmup, warmup is None, steps)
        self._scales = Scales(view.program) if self.warmup > 0 else None
        self._begun = False
        self.skipped = self._in_a_row = 0
        self._steps: dict[tuple[bool, bool, tuple[str, ...], tuple[str, ...]], Any] = {}
        self._names = _unique([label(p) for p in self.penalties])
        self._depends = False
        self._check(steps)

    def _check(self, steps: int) -> None:
        p = self.view.program
        if self.task is None and not any(isinstance(t, Objective) for t in self.penalties):
            warn("the objective has no task: its optimum is to cut everything", NoTaskTerm, 3)
        check_task(p, self.task)
        rate, reach = self._reach()
        left = steps - self.warmup
        if steps and rate and left * rate < reach:
            warn(
                f"{left} steps at {rate} move a logit by {left * rate:.3g} at most: gates that begin at "
                f"{reach / 2:.3g} need steps · lr of {reach:.3g} to close",
                GatesCannotClose,
                3,
            )

    def _reach(self) -> tuple[float, float]:
        """The largest rate of gates, 0 if none are trained, and how far the farthest has to go to close and beyond."""
        rate = max(self.logits.rates.values(), default=0.0) if self.mode != "params" else 0.0
        return rate, 2 * max((abs(e.z) for e in self.view.elements() if e.state == "soft"), default=0.0)

    def _most(self, steps: int) -> int:
        """Steps of the warm-up at most, by default: see the class."""
        rate, reach = self._reach()
        trained = self.weights is not None and rate > 0
        return max(0, min(steps // 2, steps - ceil(reach / rate))) if trained else 0

    @property
    def warmup(self) -> int:
        """Steps on weights alone, as far as it is known by now."""
        return self._wait.until

    # -- one step ------------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Steps made."""
        return self.view.step

    def _turn(self) -> tuple[bool, bool, bool]:
        """Whether this step trains weights, and gates, and whether those on a batch of their own."""
        if self.steps < self.warmup or self.mode == "params":
            return True, False, False
        if self.mode == "alternate":
            weights = (self.steps - self.warmup) % sum(self.turns) < self.turns[0]
            return weights, not weights, False
        return self.mode != "gates", True, self.mode == "bilevel"

    def step(self, batch: BATCH, valid: BATCH | None = None) -> StepReport:
        """One step: arrays by name, the inputs of the program and whatever else the task reads.

        Raises: Diverged after five steps in a row whose loss or gradients are not finite; GatesUnused if the loss
            depends on no gate; UsageError without `valid` in bilevel mode. An exception of the policy leaves program
            and optimizer as before its check.
        """
        view, (by_weights, by_gates, apart) = self.view, self._turn()
        for name, given in {"batch": batch, "valid": valid or {}}.items():
            if not isinstance(given, Mapping):
                raise UsageError("a batch is arrays by name", where=name, expected="a dict", got=type(given).__name__)
        if apart and valid is None:
            raise UsageError("gates are trained on data that weights are not", expected="step(batch, valid)")
        view.anneal()
        self.logits.sync()
        if self._scales is not None:
            self._scales.sync()
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
        self._wait.saw(number, first[1])
        view.step += 1
        if self.prune_every and view.step > self.warmup and view.step % self.prune_every == 0:
            found = [q if q.element is None or q.gradient is not None
                     else replace(q, gradient=self.logits.slope(q.element.key))
                     for q in self.policy.propose(view)]  # fmt: skip
            edits = tuple(view.apply(found))
        return self._report(number, first, warm, edits, False)

    def _begin(self, batch: BATCH) -> None:
        """From this step on gates are trained: what is measured once is measured now."""
        self._begun = True
        if self._scales is not None:
            self._scales.begin()
        units = [carried(p)["worth"] for p in self.penalties if "worth" in carried(p)]
        if not units or not self.logits.there:
            return
        names = tuple(batch)
        whole = compile(lambda *values: self._whole(dict(zip(names, values, strict=True))), **self.options)
        given = [as_tensor(batch[n]) for n in names]
        gained = worth(self.view, lambda: float(whole(*given).item()), self.logit_limit)
        if not np.isfinite(gained):
            self._begun = False  # the step is skipped; the next batch will say
            return
        for unit in units:
            unit.assign(Tensor(from_numpy(np.asarray(gained, np.float64))))

    def _whole(self, feeds: Mapping[str, Tensor]) -> Tensor:
        """The task and what stands for one, without prices."""
        _, task, extra, _ = self._objective(feeds, False)
        for term, penalty in zip(extra, self.penalties, strict=True):
            if isinstance(penalty, Objective):
                task = task + term.to(task.dtype)
        return task.detach()

    def _skip(self, found: list[float], warm: Mapping[str, float], batch: BATCH) -> StepReport:
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= _PATIENCE:
            raise Diverged(
                f"{_PATIENCE} steps in a row were not finite; weights and gates are as before them",
                where=f"step {self.view.step}, {self._culprit(batch)}",
                got=found[0],
                fix="a smaller learning rate, clip=1.0, or a look at the batch",
            )
        return self._report(self.view.step, found, warm, (), True)

    def _culprit(self, batch: BATCH) -> str:
        """The first node whose value has a NaN or +∞ (-∞ masks attention)."""
        p = self.view.program
        run = p.run({n: batch[n] for n in p.input_names()})
        for node in p.order():
            if p.specs(node)[0].dtype.is_float:
                value = run.value(node).to_numpy("float64")
                if (np.isnan(value) | np.isposinf(value)).any():
                    return f"node {p.path(node)}"
        return "no node: a gradient, or the loss behind the outputs"

    def _report(
        self, step: int, found: list[float], warm: Mapping[str, float], edits: tuple[str, ...], skipped: bool
    ) -> StepReport:
        parts = dict(zip(self._names, found[2:], strict=True))
        is_open, expected = self._open()
        return StepReport(step, found[0], found[1], parts, dict(warm), is_open, expected, edits, skipped)

    def _open(self) -> tuple[int, float]:
        """How many elements are rather open than closed, and the expected share of the cost."""
        if not self.view.program.gates():
            return 0, 0.0
        table, _, by, now, _ = numbers(self.view.program)
        cost = np.where(table[:, STATE] == FREE, 0, table[:, COST])
        return int((by >= 0.5).sum()), float((cost * now).sum() / max(cost.sum(), 1))

    def _run(self, batch: BATCH, valid: BATCH | None, by_weights: bool, by_gates: bool) -> list[float]:
        names, theirs = tuple(batch), tuple(valid or ())
        key = (by_weights, by_gates, names, theirs)
        if key not in self._steps:
            fn = self._traced(names, theirs, by_weights, by_gates)
            self._steps[key] = compile(fn, **self.options)
        given = [*(batch[n] for n in names), *((valid or {})[n] for n in theirs)]
        out = self._steps[key](*map(as_tensor, given))  # as tensors they go to the plan without a detour
        return [float(x) for x in out.numpy()]

    def _traced(
        self, names: Sequence[str], theirs: Sequence[str], by_weights: bool, by_gates: bool
    ) -> Callable[..., Tensor]:
        """The whole step as a function of tensors, those of the second batch last; taken down again after an edit."""

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
                    if by_gates and self._scales is not None:
                        self._scales.hold()
                if held and slopes[-1] is not None:
                    self.logits.step(slopes[-1], stay, self.logit_limit)
                if held:
                    for penalty in self.penalties:
                        for variable in carried(penalty).values() if hasattr(penalty, "climb") else ():
                            variable.assign(call("where", stay > 0.0, variable, penalty.climb(above[3])))
                self.logits.count.assign(self.logits.count + (1.0 - stay).to("float64"))
            told = [loss, task, *extra, bad, worse]
            return call("concat", *(n.detach().to("float64").reshape(1) for n in told), axis=0)

        return step

    def _objective(self, feeds: Mapping[str, Tensor], trained: bool) -> tuple[Tensor, Tensor, list[Tensor], Terms]:
        """Task and penalties together, the task, each penalty, and what they looked at."""
        number = call("maximum", self.logits.count - float(self.warmup), 0.0)
        task, extra, terms = self.view.evaluate(feeds, self.task, self.penalties, number, trained=trained)
        loss = task
        for term in extra:
            loss = loss + term.to(loss.dtype)
        return loss, task, extra, terms

    def _check_depends(self, task: Tensor, extra: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Raises: GatesUnused."""
        objectives = [t for t, penalty in zip(extra, self.penalties, strict=True) if isinstance(penalty, Objective)]
        whole = [*objectives] if self.task is None else [task, *objectives]
        self._depends = not whole or any(
            slope is not None for one in whole for slope in grad(one, held, retain_graph=True, allow_unused=True)
        )
        if not self._depends:
            raise GatesUnused(
                "the loss does not depend on any gate, so that nothing holds one open",
                where=self.task if isinstance(self.task, str) else getattr(self.task, "__name__", "task"),
                got=", ".join(g.owner for g in list(self.view.program.gates().values())[:4]),
                fix="gate what the loss reads, or take a loss that reads what is gated",
            )

    @staticmethod
    def _not_finite(loss: Tensor, slopes: Iterable[Tensor | None]) -> Tensor:
        """1 if the loss or a gradient has an infinity or NaN, 0-d float32."""
        total = call("abs", loss * 0.0).to("float32")
        for slope in slopes:
            if slope is not None:
                total = total + (slope * 0.0).sum().to("float32")
        return 1.0 - call("eq", total, 0.0).to("float32")

    # -- what a resumed run needs --------------------------------------------------------------------------------------
    def variables(self) -> dict[str, Variable]:
        """Moments of weights and logits, multipliers and the count of steps, by name."""
        self.logits.sync()
        held = dict(self.weights.variables()) if self.weights is not None else {}
        for name, penalty in zip(self._names, self.penalties, strict=True):
            held |= {f"joint.{name}.{key}": v for key, v in carried(penalty).items()}
        scales = {} if self._scales is None else self._scales.variables()
        return {**held, **scales, **self.logits.variables()}

    def save(self, directory: Any) -> None:
        """Write weights, logits, moments and counts, atomically; see `optim.save_state`."""
        counts = [[*key, n] for key, n in getattr(self.policy, "counts", {}).items()]
        facts = {"counts": counts, "wait": [self._wait.until, self._begun, self._wait.losses]}
        save_state(directory, self.view.program, self, step=self.view.step, facts=facts)

    def load(self, directory: Any) -> None:
        """Continue a saved run on a program of the same structure, to the bit. Raises: StateError, CheckpointError."""
        saved = SavedState.read(directory)
        saved.restore(self.view.program, self)
        self.view.step = saved.step
        self._wait.until, self._begun, self._wait.losses = saved.facts["wait"]
        if isinstance(self.policy, Policy):
            self.policy.counts = {(a, b, c): n for a, b, c, n in saved.facts["counts"]}


def _slopes(loss: Tensor, by: Sequence[Variable]) -> Sequence[Tensor | None]:
    return grad(loss, by, allow_unused=True) if by else ()


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        n, label_ = 1, name
        while label_ in found:
            n, label_ = n + 1, f"{name}_{n + 1}"
        found.append(label_)
    return found
