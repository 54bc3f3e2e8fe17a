"""Learning-rate schedules: functions of the step only, so that a resumed run has the same rates.

A scheduler sets the rate of step 0 at construction and the rate of the next step at each `step()`; compiled steps read
the rate from a variable. ConstantLR to CosineAnnealingLR have the names, arguments and values of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi
from typing import Any

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

    Attributes:
        last_step: the step whose rate is set now.
    """

    def __init__(self, optimizer: Optimizer, rate: Callable[[float, int, int], float]) -> None:
        self.optimizer, self.rate = optimizer, rate
        self.last_step = 0
        self._set()

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
        for i, group in enumerate(self.optimizer.param_groups):
            group.lr = self.rate(group.initial_lr, self.last_step, i)


class ConstantLR(LRScheduler):
    """base · factor for `total_iters` steps, then base."""

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5) -> None:
        _check(0 <= factor <= 1 and total_iters >= 0, "factor in [0, 1], total_iters >= 0", factor, total_iters)
        super().__init__(optimizer, lambda base, step, _: base * (factor if step < total_iters else 1.0))


class StepLR(LRScheduler):
    """base · gamma^⌊step / step_size⌋."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        _check(step_size >= 1 and gamma >= 0, "step_size >= 1, gamma >= 0", step_size, gamma)
        super().__init__(optimizer, lambda base, step, _: base * gamma ** (step // step_size))


class LambdaLR(LRScheduler):
    """base · f(step), with one function f for all groups, or one per group."""

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]]
    ) -> None:
        groups = len(optimizer.param_groups)
        functions = [lr_lambda] * groups if callable(lr_lambda) else list(lr_lambda)
        _check(len(functions) == groups, f"lr_lambda: one function, or {groups}", f"{len(functions)} functions")
        super().__init__(optimizer, lambda base, step, group: base * functions[group](step))


class LinearLR(LRScheduler):
    """base · factor, with a linear change from `start_factor` to `end_factor` over the first `total_iters` steps."""

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        fine = 0 < start_factor <= 1 and 0 <= end_factor <= 1 and total_iters >= 1
        expected = "start_factor in (0, 1], end_factor in [0, 1], total_iters >= 1"
        _check(fine, expected, start_factor, end_factor, total_iters)
        rise = end_factor - start_factor
        super().__init__(
            optimizer, lambda base, step, _: base * (start_factor + rise * (min(step, total_iters) / total_iters))
        )


class CosineAnnealingLR(LRScheduler):
    """eta_min + (base - eta_min)·(1 + cos(π·step / T_max)) / 2; it rises again after T_max, as in torch."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        _check(T_max >= 1 and eta_min >= 0, "T_max >= 1, eta_min >= 0", T_max, eta_min)
        super().__init__(optimizer, lambda base, step, _: eta_min + (base - eta_min) * (1 + cos(pi * step / T_max)) / 2)


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
