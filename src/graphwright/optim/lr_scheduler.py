"""Learning-rate schedules: functions of the step only, so that a resumed run has the same rates.

A scheduler sets the rate of step 0 at construction and the rate of the next step at each `step()`; compiled steps read
the rate from a variable. All but WarmupCosineLR and WSDLR have the names, arguments and values of torch.
ReduceLROnPlateau depends on a metric as well, and its state has what that needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import cos, inf, isinf, pi, prod
from typing import Any, Literal, get_args

from graphwright.errors import UsageError
from graphwright.optim.optimizer import Optimizer


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Return the rate of a step: linear warm-up over `warmup` steps to `peak`, then a half cosine.

    The cosine ends at floor · peak at step `total`; the rate is constant afterwards.

    >>> tuple(round(warmup_cosine(s, peak=1.0, warmup=2, total=6), 3) for s in range(7))
    (0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0)
    """
    fine, expected = total >= 1 and warmup >= 0 and 0 <= floor <= 1, "total >= 1, warmup >= 0, floor in [0, 1]"
    _check(fine, expected, total, warmup, floor)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + cos(pi * progress)))


class LRScheduler:
    """Base of the schedulers.

    Args:
        rate: function that returns the learning rate, of the initial rate of a group, the step (counted from 0) and the
            index of the group.
        last_epoch: the last step of an earlier run, whose initial rates the groups have; -1 for a new run.

    Attributes:
        last_step: the step whose rate is set now.
        scales: whether all rates are multiples of the initial rate, so that a chain can multiply them.
    """

    scales: bool = False

    def __init__(
        self, optimizer: Optimizer, rate: Callable[[float, int, int], float], last_epoch: int = -1
    ) -> None:  # fmt: skip
        _check(last_epoch >= -1, "last_epoch >= -1", last_epoch)
        self.optimizer, self.rate = optimizer, rate
        self.last_step = last_epoch + 1
        self._set()

    @property
    def last_epoch(self) -> int:
        """The step whose rate is set now, under torch's name."""
        return self.last_step

    @property
    def base_lrs(self) -> list[float]:
        """The initial rate of each group."""
        return [group.initial_lr for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Return the rate of the present step of each group."""
        return [self.rate(base, self.last_step, i) for i, base in enumerate(self.base_lrs)]

    def step(self) -> None:
        """Set the next step's rate; call it after `optimizer.step()`."""
        self.last_step += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return [group.lr for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the step; the other parameters of the schedule are not saved."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the saved step and set its rates. Raises: UsageError if the state is invalid."""
        step = state.get("last_step")
        if type(step) is not int or step < 0 or len(state) != 1:
            raise UsageError("invalid state of a scheduler", expected="{'last_step': step}", got=state)
        self.last_step = step
        self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group.lr = rate


class ConstantLR(LRScheduler):
    """base · factor for `total_iters` steps, then base."""

    scales = True

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5, last_epoch: int = -1) -> None:
        _check(0 <= factor <= 1 and total_iters >= 0, "factor in [0, 1], total_iters >= 0", factor, total_iters)
        super().__init__(optimizer, lambda base, step, _: base * (factor if step < total_iters else 1.0), last_epoch)


class StepLR(LRScheduler):
    """base · gamma^⌊step / step_size⌋."""

    scales = True

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        _check(step_size >= 1 and gamma >= 0, "step_size >= 1, gamma >= 0", step_size, gamma)
        super().__init__(optimizer, lambda base, step, _: base * gamma ** (step // step_size), last_epoch)


class LambdaLR(LRScheduler):
    """base · f(step), with one function f for all groups, or one per group."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        groups = len(optimizer.param_groups)
        functions = [lr_lambda] * groups if callable(lr_lambda) else list(lr_lambda)
        _check(len(functions) == groups, f"lr_lambda: one function, or {groups}", f"{len(functions)} functions")
        super().__init__(optimizer, lambda base, step, group: base * functions[group](step), last_epoch)


class MultiplicativeLR(LRScheduler):
    """base · Π of lr_lambda(i) for i from 1 to the step; one function for all groups or one per group."""

    scales = True

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:  # fmt: skip
        groups = len(optimizer.param_groups)
        functions = [lr_lambda] * groups if callable(lr_lambda) else list(lr_lambda)
        _check(len(functions) == groups, f"lr_lambda: one function, or {groups}", f"{len(functions)} functions")
        products = [[1.0] for _ in functions]  # by step

        def rate(base: float, step: int, group: int) -> float:
            known = products[group]
            while len(known) <= step:
                known.append(known[-1] * functions[group](len(known)))
            return base * known[step]

        super().__init__(optimizer, rate, last_epoch)


class LinearLR(LRScheduler):
    """base · factor, with a linear change from `start_factor` to `end_factor` over the first `total_iters` steps."""

    scales = True

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        fine = 0 < start_factor <= 1 and 0 <= end_factor <= 1 and total_iters >= 1
        expected = "start_factor in (0, 1], end_factor in [0, 1], total_iters >= 1"
        _check(fine, expected, start_factor, end_factor, total_iters)
        rise = end_factor - start_factor
        super().__init__(
            optimizer,
            lambda base, step, _: base * (start_factor + rise * (min(step, total_iters) / total_iters)),
            last_epoch,
        )


class CosineAnnealingLR(LRScheduler):
    """eta_min + (base - eta_min)·(1 + cos(π·step / T_max)) / 2; it rises again after T_max, as in torch."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        _check(T_max >= 1 and eta_min >= 0, "T_max >= 1, eta_min >= 0", T_max, eta_min)
        self.scales = not eta_min
        super().__init__(
            optimizer, lambda base, step, _: eta_min + (base - eta_min) * (1 + cos(pi * step / T_max)) / 2, last_epoch
        )


class MultiStepLR(LRScheduler):
    """base · gamma^(number of milestones reached)."""

    scales = True

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        _check(gamma >= 0, "gamma >= 0", gamma)
        steps = sorted(milestones)
        super().__init__(optimizer, lambda base, step, _: base * gamma ** bisect_right(steps, step), last_epoch)


class ExponentialLR(LRScheduler):
    """base · gamma^step."""

    scales = True

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        _check(gamma >= 0, "gamma >= 0", gamma)
        super().__init__(optimizer, lambda base, step, _: base * gamma**step, last_epoch)


class PolynomialLR(LRScheduler):
    """base · (1 - step / total_iters)^power, 0 from step `total_iters` on."""

    scales = True

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        _check(total_iters >= 1 and power >= 0, "total_iters >= 1, power >= 0", total_iters, power)
        super().__init__(
            optimizer, lambda base, step, _: base * (1 - min(step, total_iters) / total_iters) ** power, last_epoch
        )


class CosineAnnealingWarmRestarts(LRScheduler):
    """Half cosines from base to `eta_min`, of T_0, T_0·T_mult, T_0·T_mult², ... steps (Loshchilov and Hutter 2017)."""

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        _check(T_0 >= 1 and T_mult >= 1, "T_0 >= 1, T_mult >= 1", T_0, T_mult)

        def rate(base: float, step: int, _: int) -> float:
            length = T_0
            if T_mult == 1:
                step %= T_0
            while step >= length:
                step, length = step - length, length * T_mult
            return eta_min + (base - eta_min) * (1 + cos(pi * step / length)) / 2

        super().__init__(optimizer, rate, last_epoch)


class CyclicLR(LRScheduler):
    """Triangles between `base_lr` and `max_lr` (Smith 2017); the initial rates of the groups are not used.

    Args:
        optimizer: optimizer whose rates are set; its momentum is left alone.
        base_lr, max_lr: bounds of the rate, for all groups or one per group.
        step_size_up, step_size_down: steps of a rise and of a fall, by default equal.
        mode: `triangular`; `triangular2` halves the height with each cycle; `exp_range` scales it by gamma^step.
        gamma: factor of `exp_range`.
    """

    def __init__(
        self, optimizer: Optimizer, base_lr: float | Sequence[float], max_lr: float | Sequence[float],
        step_size_up: int = 2000, step_size_down: int | None = None, mode: str = "triangular", gamma: float = 1.0,
        last_epoch: int = -1,
    ) -> None:  # fmt: skip
        up, down = step_size_up, step_size_up if step_size_down is None else step_size_down
        fine = up >= 1 and down >= 1 and mode in ("triangular", "triangular2", "exp_range")
        _check(fine, "step sizes >= 1, mode triangular, triangular2 or exp_range", up, down, mode)
        low, high = _per_group(optimizer, base_lr), _per_group(optimizer, max_lr)

        def rate(_: float, step: int, group: int) -> float:
            cycle, at = divmod(step, up + down)
            height = at / up if at <= up else (up + down - at) / down
            scale = {"triangular": 1.0, "triangular2": 0.5**cycle, "exp_range": gamma**step}[mode]
            return low[group] + (high[group] - low[group]) * height * scale

        super().__init__(optimizer, rate, last_epoch)


Annealing = Literal["cos", "linear"]
_COSINE, _LINEAR = get_args(Annealing)
_ANNEALED: dict[str, Callable[[float], float]] = {_COSINE: lambda x: (1 - cos(pi * x)) / 2, _LINEAR: lambda x: x}
"""Strategy -> the part of the way at a part of the time."""


class OneCycleLR(LRScheduler):
    """A rise from max_lr / div_factor to `max_lr`, then a fall to the initial rate / final_div_factor (Smith 2018).

    Args:
        optimizer: optimizer whose rates are set; its momentum is left alone.
        max_lr: highest rate, for all groups or one per group; the initial rates of the groups are not used.
        total_steps: steps of the whole cycle, or None for epochs · steps_per_epoch.
        epochs, steps_per_epoch: used without `total_steps`.
        pct_start: fraction of the cycle that rises.
        anneal_strategy: `cos` or `linear`.
        div_factor, final_div_factor: see above.
        three_phase: whether the fall first mirrors the rise, and then ends linearly or by a cosine.
    Raises: UsageError for a value out of range, and at a step after the cycle.
    """

    def __init__(
        self, optimizer: Optimizer, max_lr: float | Sequence[float], total_steps: int | None = None,
        epochs: int | None = None, steps_per_epoch: int | None = None, pct_start: float = 0.3,
        anneal_strategy: Annealing = "cos", div_factor: float = 25.0, final_div_factor: float = 1e4,
        three_phase: bool = False, last_epoch: int = -1,
    ) -> None:  # fmt: skip
        total = (epochs or 0) * (steps_per_epoch or 0) if total_steps is None else total_steps
        fine = total >= 1 and 0 <= pct_start <= 1 and anneal_strategy in _ANNEALED
        _check(fine, "total_steps >= 1, pct_start in [0, 1], cos or linear", total, pct_start, anneal_strategy)
        highest = _per_group(optimizer, max_lr)
        top = pct_start * total - 1
        middle = [2 * pct_start * total - 2] if three_phase else []
        ends = [top, *middle, total - 1]

        def rate(_: float, step: int, group: int) -> float:
            _check(step <= total, f"at most {total} steps", step)
            high = highest[group]
            first = high / div_factor
            rates = [first, high, *([first] if three_phase else []), first / final_div_factor]
            begin, phase = 0.0, 0
            while phase < len(ends) - 1 and step > ends[phase]:
                begin, phase = ends[phase], phase + 1
            part = (step - begin) / (ends[phase] - begin) if ends[phase] > begin else 1.0
            return rates[phase] + (rates[phase + 1] - rates[phase]) * _ANNEALED[anneal_strategy](part)

        super().__init__(optimizer, rate, last_epoch)


class SequentialLR(LRScheduler):
    """Schedules one after another: each counts its steps from its milestone, and its base is the initial rate.

    Raises: UsageError unless there is one milestone less than schedulers, or for schedulers of other optimizers.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int], last_epoch: int = -1
    ) -> None:
        fine = len(milestones) == len(schedulers) - 1 and all(s.optimizer is optimizer for s in schedulers)
        expected = "schedulers of this optimizer, with a milestone between each two"
        _check(fine, expected, len(schedulers), list(milestones))

        def rate(base: float, step: int, group: int) -> float:
            at = bisect_right(milestones, step)
            return schedulers[at].rate(base, step - (milestones[at - 1] if at else 0), group)

        super().__init__(optimizer, rate, last_epoch)


class ChainedScheduler(LRScheduler):
    """All schedules at once: the base times the factor of each, as `torch.optim.lr_scheduler.ChainedScheduler`.

    Raises: UsageError for no schedulers, schedulers of other optimizers, or rates that do not scale the base.
    """

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None = None) -> None:
        owner = optimizer or (schedulers[0].optimizer if schedulers else None)
        fine = owner is not None and all(s.optimizer is owner and s.scales for s in schedulers)
        expected = "one or more schedulers of one optimizer, each of which scales the base"
        _check(fine, expected, ", ".join(type(s).__name__ for s in schedulers))
        assert owner is not None
        self.schedulers = list(schedulers)

        def rate(base: float, step: int, group: int) -> float:
            return base * prod(s.rate(base, step, group) / base for s in schedulers) if base else base

        super().__init__(owner, rate)

    def _set(self) -> None:
        for scheduler in self.schedulers:
            scheduler.last_step = self.last_step
        super()._set()


Threshold = Literal["rel", "abs"]
_RELATIVE = dict(zip(get_args(Threshold), (True, False), strict=True))


class ReduceLROnPlateau:
    """Multiply the rates by `factor` when a metric has not improved for more than `patience` steps.

    Args:
        optimizer: optimizer whose rates are set.
        mode: `min` if lower values are better, or `max`.
        factor: factor of the rates, below 1.
        patience: steps without improvement that are tolerated.
        threshold: smallest change that counts as an improvement.
        threshold_mode: `rel`, a fraction of the best value, or `abs`.
        cooldown: steps after a reduction in which no bad step is counted.
        min_lr: lower bound of the rates, for all groups or one per group.
        eps: smallest change of a rate that is made.

    Attributes:
        best: best value so far.
        num_bad_epochs: steps since then.
        cooldown_counter: steps of the cooldown that are left.
        last_step: number of steps.
    """

    def __init__(
        self, optimizer: Optimizer, mode: str = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, threshold_mode: Threshold = "rel", cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        fine = factor < 1 and mode in ("min", "max") and threshold_mode in _RELATIVE
        _check(fine, "factor < 1, mode min or max, threshold_mode rel or abs", factor, mode, threshold_mode)
        self.optimizer, self.factor, self.patience, self.cooldown, self.eps = optimizer, factor, patience, cooldown, eps
        self.sign, self.threshold, self.relative = 1.0 if mode == "min" else -1.0, threshold, _RELATIVE[threshold_mode]
        self.min_lrs = _per_group(optimizer, min_lr)
        self.best, self.num_bad_epochs, self.cooldown_counter, self.last_step = self.sign * inf, 0, 0, 0

    def step(self, metrics: Any) -> None:
        """Take the value of the metric, a number or a tensor of one element, and set the rates of the next step."""
        value = float(metrics)
        self.last_step += 1
        margin = self.threshold * self.best if self.relative else self.threshold
        better = self.sign * value < self.sign * self.best - (0.0 if isinf(self.best) else margin)
        if better:
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
            for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
                rate = max(group.lr * self.factor, least)
                if group.lr - rate > self.eps:
                    group.lr = rate

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return [group.lr for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the best value (None before the first) and the rates."""
        best = None if isinf(self.best) else self.best
        return {**{name: getattr(self, name) for name in _COUNTERS}, "best": best, "lr": self.get_last_lr()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with saved counters and rates. Raises: UsageError if the state is invalid."""
        known = {*_COUNTERS, "best", "lr"}
        if state.keys() != known or len(state["lr"]) != len(self.optimizer.param_groups):
            raise UsageError("invalid state of a scheduler", expected=", ".join(sorted(known)), got=state)
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.best = self.sign * inf if state["best"] is None else state["best"]
        for group, rate in zip(self.optimizer.param_groups, state["lr"], strict=True):
            group.lr = rate


_COUNTERS = ("num_bad_epochs", "cooldown_counter", "last_step")


def _per_group(optimizer: Optimizer, value: float | Sequence[float]) -> list[float]:
    groups = len(optimizer.param_groups)
    values = [float(v) for v in value] if isinstance(value, Sequence) else [float(value)] * groups
    _check(len(values) == groups, f"one value, or {groups}", f"{len(values)} values")
    return values


class WarmupCosineLR(LRScheduler):
    """Linear warm-up, then a half cosine down to floor · base at step `total`: see `warmup_cosine`."""

    def __init__(self, optimizer: Optimizer, warmup: int, total: int, floor: float = 0.0) -> None:
        super().__init__(
            optimizer, lambda base, step, _: warmup_cosine(step, peak=base, warmup=warmup, total=total, floor=floor)
        )


class WSDLR(LRScheduler):
    """Warm-up, stable, decay: up linearly over `warmup` steps, base for `stable` steps, then linearly to floor · base
    over `decay` steps (Hu et al. 2024, "MiniCPM", section 4).
    """

    def __init__(self, optimizer: Optimizer, warmup: int, stable: int, decay: int, floor: float = 0.0) -> None:
        fine = min(warmup, stable, decay) >= 0 and 0 <= floor <= 1
        _check(fine, "warmup, stable, decay >= 0, floor in [0, 1]", warmup, stable, decay, floor)

        def rate(base: float, step: int, _: int) -> float:
            into = step - warmup - stable
            if into < 0:
                return base * (step + 1) / warmup if step < warmup else base
            return base * (1 - (1 - floor) * min(into / decay, 1.0)) if decay else base * floor

        super().__init__(optimizer, rate)


def _check(fine: bool, expected: str, *got: object) -> None:
    if not fine:
        raise UsageError("a parameter of the schedule is out of range", expected=expected, got=", ".join(map(str, got)))
