"""Predictive integrity (PI): how well errors fit the model's own uncertainty. Its falls show that the world changed.

    PI = exp(-α·[(1 - γ)·ε / max(τ, 0.05) + γ·S])

ε is the mean cross-entropy and τ the mean entropy of the predictions, in nats, over the same supervised tokens; S is
the norm of the gradient of experts that had tokens, relative to its own moving average. A calibrated model has ε = τ,
so the level of PI says nothing about quality, and no decision reads it. The signal is its deviation from its own moving
average,

    d = (PI - b) / (√v + 0.02),

with b and v of the steps before. An alarm, d < -3 after 100 steps, is latched: ρ = 1, and then ρ falls by e^(-1/W).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import exp

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, Variable
from graphwright.errors import UsageError
from graphwright.experts.observed import mlps_of
from graphwright.experts.routers import RouterNodes, threshold_routers
from graphwright.ops import call
from graphwright.ops.experts import FIRST
from graphwright.optim import StepTerm, StepView
from graphwright.optim.step_terms import PATIENCE
from graphwright.program import Program
from graphwright.program.axes.solve_axes import origin
from graphwright.settings import AtLeastOne, Positive, Settings, Share

LEAST_ENTROPY = 0.05
"""Nats below which an entropy counts as this much."""
LEAST_LOG = -1e30
"""Log-probabilities count as at least this, so that a class of probability 0 adds no entropy, as its limit."""
WARM = 20
"""Steps before the variance of PI is measured."""
_STATES = {
    **{"t": 0.0, "epsilon": 0.0, "tau": 0.0, "surprise": 0.0, "pi": 0.0, "b": 0.0, "v": 1e-4, "s": 0.0, "d": 0.0},
    **{"rho": 0.0, "alarms": 0.0, "skipped": 0.0, "streak": 0.0, "gradient": 0.0},
}


@dataclass(frozen=True)
class integrity(Settings, StepTerm):
    """Predictive integrity as a term of a compiled step: `compile_step(..., also=[experts.integrity()])`.

    It only measures. `step.reports` has `integrity.pi`, `d`, `rho` (the latch), `epsilon`, `tau`, `surprise`,
    `gradient` (the norm in S) and `alarms` (their number) of each step; the states are saved and resumed with the
    training.

    A step whose loss, ε, τ or S is not finite skips its update (see `StepView.skip`), changes no state, and is counted:
    in `skipped`, and in `streak` while such steps follow each other, which stays at five. Gradients that overflow under
    a GradScaler are the scaler's to skip, and are counted in `skipped` only.

    Attributes:
        alpha: weight of the exponent; above 8, PI is too small to be read.
        gamma: share of S in the exponent, in [0, 1].
        alarm: how far PI must fall below its average, in deviations.
        after: steps before the first alarm.
        window: W, steps in which ρ falls to 1/e.
        decay: of the moving averages of PI, of its square, and of the norm of gradients.
        logits, targets: names of the scores [..., classes] and of the ids or classes [...] among the outputs that the
            loss reads and the inputs of the step. Without such an input, ε is the loss.
        mask: name of an input, bool [...], that is True for supervised tokens.
        shifted: whether the score of a position predicts the target of the next one.
    """

    alpha: Positive = 1.0
    gamma: Share = 0.5
    alarm: Positive = 3.0
    after: AtLeastOne = 100
    window: AtLeastOne = 50
    decay: Share = 0.99
    logits: str = "logits"
    targets: str = "targets"
    mask: str | None = None
    shifted: bool = False
    states: dict[str, Variable] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha > 8:
            highest = exp(-self.alpha * (1 - self.gamma))
            text = f"alpha {self.alpha:g}: a calibrated model has a PI of at most {highest:.1e}"
            warnings.warn(text, UserWarning, stacklevel=3)
        for name, value in _STATES.items():
            self.states[name] = Variable(from_numpy(np.asarray(value, np.float32)), name=f"integrity.{name}")

    def variables(self) -> dict[str, Variable]:
        """Return the states: step, ε, τ, S, PI, its average b and variance v, average norm s, d, ρ, and others."""
        return dict(self.states)

    def __call__(self, view: StepView) -> None:
        """Measure one step, and assign the states."""
        epsilon, tau = self.errors(view)
        found, any_gradient = gradient_norm(view, threshold_routers(view.program))
        s, t = self.states["s"], self.states["t"]
        first = call("eq", s, 0.0)
        mean = call("where", first, found, s * self.decay + found * (1 - self.decay))
        surprise = call("where", any_gradient, found / mean.clamp(min=1e-30), 0.0)
        ratio = epsilon / tau.clamp(min=LEAST_ENTROPY)
        pi = ((ratio * (1 - self.gamma) + surprise * self.gamma) * -self.alpha).exp()
        errors = call("isfinite", view.loss.to("float32") + epsilon + tau)
        usable = call("logical_and", errors, call("isfinite", mean))
        skip = call("logical_not", errors if view.scaled else usable)
        view.skip(skip)
        self._count(usable, skip)
        terms = {"epsilon": epsilon, "tau": tau, "surprise": surprise, "gradient": found}
        self._follow(view, usable, pi, mean, t, terms)

    def _count(self, usable: Tensor, skip: Tensor) -> None:
        counts = self.states
        counts["skipped"].assign(counts["skipped"] + call("logical_not", usable).to("float32"))
        streak = (counts["streak"] + 1.0) * skip.to("float32")
        lost = call("ge", counts["streak"], float(PATIENCE))  # kept for a reader that comes later
        counts["streak"].assign(call("where", lost, counts["streak"], streak))

    def _follow(
        self, view: StepView, usable: Tensor, pi: Tensor, mean: Tensor, t: Tensor, terms: Mapping[str, Tensor]
    ) -> None:
        """Update averages, the deviation and the latch; a step whose figures are not finite changes none of them."""
        old = self.states
        start = call("eq", t, 0.0)
        b = call("where", start, pi, old["b"])
        d = (pi - b) / (old["v"].sqrt() + 0.02)
        square = (pi - b) * (pi - b)
        v = call("where", call("ge", t, float(WARM)), old["v"] * self.decay + square * (1 - self.decay), old["v"])
        alarm = call("logical_and", call("gt", t, float(self.after)), call("lt", d, -float(self.alarm)))
        rho = call("where", alarm, 1.0, old["rho"] * exp(-1 / self.window))
        count = old["alarms"] + alarm.to("float32")
        new = {**terms, "pi": pi, "b": b * self.decay + pi * (1 - self.decay), "v": v, "s": mean, "d": d, "rho": rho}
        new |= {"t": t + 1.0, "alarms": count}
        for name, value in new.items():
            view.report(f"integrity.{name}", value)
            kept = call("where", usable, value, old[name])
            old[name].assign(kept.to(old[name].dtype))

    def errors(self, view: StepView) -> tuple[Tensor, Tensor]:
        """Return (mean cross-entropy ε, mean entropy of predictions τ) over supervised tokens, 0-d, in nats."""
        try:
            scores = view.named(self.logits)
        except UsageError as error:
            error.fix = f"name the scores: {type(self).__name__}(logits=...)"
            raise
        log = call("log_softmax", scores.to("float32") if scores.dtype.is_low else scores, axis=-1)
        entropy = -(log.exp() * log.clamp(min=LEAST_LOG)).sum(axis=-1)
        marks = None if self.mask is None else view.named(self.mask)
        try:
            targets = view.named(self.targets)
        except UsageError:
            return view.loss.to("float32"), self._mean(entropy, marks)
        if self.shifted:
            log, entropy, targets = log[:, :-1], entropy[:, :-1], targets[:, 1:]
            marks = None if marks is None else marks[:, 1:]
        picked = -call("gather", log, targets.unsqueeze(-1), axis=-1).squeeze(-1)
        return self._mean(picked, marks), self._mean(entropy, marks)

    def _mean(self, values: Tensor, marks: Tensor | None) -> Tensor:
        if marks is None:
            return values.mean().to("float32")
        flags = marks.to(values.dtype)
        return ((values * flags).sum() / flags.sum().clamp(min=1.0)).to("float32")


def gradient_norm(view: StepView, routers: list[RouterNodes]) -> tuple[Tensor, Tensor]:
    """Return (mean of ‖dL/dθ_e‖ over the experts with a gradient that is not zero, whether there is one)."""
    norms = []
    for keys in expert_keys(view.program, routers):
        grads = [g for key in keys if (g := view.grad(key)) is not None]
        if grads:
            squares = [(g * g).sum() for g in grads]
            norms.append(sum(squares[1:], squares[0]).sqrt())
    if not norms:
        zero = view.loss.to("float32") * 0.0
        return zero, call("gt", zero, 0.0)
    row = call("stack", *norms).to("float32")
    used = call("gt", row, 0.0).to("float32")
    number = used.sum()
    return row.sum() / number.clamp(min=1.0), call("gt", number, 0.0)


def expert_keys(program: Program, routers: list[RouterNodes]) -> Iterator[list[str]]:
    """Iterate over the keys of the matrices of each expert of these routers."""
    for router in routers:
        node = mlps_of(router)
        if node is None:
            continue
        operands, count = program.operands(node)[FIRST:], len(router.prototypes)
        width = len(operands) // count
        for i in range(count):
            found = [origin(program, v) for v in operands[i * width : (i + 1) * width]]
            yield [program.key(n) for n in found if n is not None]
