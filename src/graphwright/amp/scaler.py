"""Loss scaling for float16, in which small gradients round to zero (Micikevicius et al. 2018, section 3.2).

Everything is tensors: no value is read back, so the same lines run eagerly and as state inside a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Protocol

import numpy as np

from graphwright.array import DType, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable, no_grad, scoped
from graphwright.errors import UsageError
from graphwright.ops import call


class Steps(Protocol):
    """An optimizer."""

    def parameters(self) -> Iterable[Parameter]:
        """What it trains."""
        ...

    def step(self, *, found_inf: Tensor | None = None) -> None:
        """One update, left out where `found_inf` is not 0."""
        ...


class GradScaler:
    """Scale the loss up, gradients down again; a step with an infinity or NaN is skipped and the scale lowered.

        scaler.scale(loss).backward()
        scaler.unscale_(opt)          # only if gradients are clipped or looked at
        scaler.step(opt)
        scaler.update()

    Args:
        init_scale: first factor.
        growth_factor, growth_interval: the factor grows by this after so many steps in a row without infinity.
        backoff_factor: and shrinks by this after a step with one.
        enabled: False for bfloat16 and float32, which need no scale: everything passes through.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
    ) -> None:
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise UsageError(
                "a number is out of range",
                where="GradScaler",
                expected="init_scale > 0, growth_factor > 1, backoff_factor in (0, 1), growth_interval >= 1",
            )
        self.enabled = enabled
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._scale = Variable(from_numpy(np.asarray(init_scale, np.float32)), name="scaler.scale")
        self._good = Variable(from_numpy(np.asarray(0.0, np.float32)), name="scaler.good_steps")
        self._none = Tensor(from_numpy(np.asarray(0.0, np.float32)))
        self._found: dict[int, Tensor] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor."""
        return loss * self._scale.to(loss.dtype) if self.enabled else loss

    def get_scale(self) -> float:
        """The factor of the next step; 1 when not enabled. Waits for the value."""
        return self._scale.item() if self.enabled else 1.0

    def unscale_(self, optimizer: Steps) -> None:
        """Divide the optimizer's gradients by the factor, once per step, and note whether all are finite.

        Raises: UsageError if it was done already since `update`, or there is no gradient.
        """
        if not self.enabled:
            return
        if id(optimizer) in self._found:
            raise UsageError("gradients were unscaled already", fix="call update() at the end of each step")
        with no_grad(), scoped("scaler"):
            kinds: dict[DType, list[Parameter]] = {}
            for p in optimizer.parameters():
                if p.grad is not None:
                    kinds.setdefault(p.grad.dtype, []).append(p)
            if not kinds:
                raise UsageError("no parameter has a gradient", fix="call backward() first")
            found = self._none
            inverse = 1.0 / self._scale
            for members in kinds.values():
                found, *grads = call("unscale_check", inverse, found, *(p.grad for p in members))
                for p, g in zip(members, grads, strict=True):
                    p.grad = g
            self._found[id(optimizer)] = found

    def step(self, optimizer: Steps, *, waiting: Tensor | None = None) -> None:
        """The optimizer's step, unscaling first if that was not done; skipped, count and all, if not all is finite.

        Args:
            waiting: 0-d float32; where it is not 0, gradients are still being accumulated, and the step is left out.
        """
        if not self.enabled:
            optimizer.step(found_inf=waiting)
            return
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        found = self._found[id(optimizer)]
        optimizer.step(found_inf=found if waiting is None else call("maximum", found, waiting))

    def update(self, *, waiting: Tensor | None = None) -> None:
        """Set the factor of the next step by what all optimizers of this one found; unless it waits, see `step`."""
        if not self.enabled:
            return
        if not self._found:
            raise UsageError("nothing was unscaled since the last update", fix="call step(optimizer) first")
        with no_grad(), scoped("scaler"):
            found = reduce(lambda a, b: call("maximum", a, b), self._found.values())
            bad, good = found > 0.0, self._good + 1.0
            grown = good >= float(self.growth_interval)
            scale = call("where", grown, self._scale * self.growth_factor, self._scale)
            scale = call("where", bad, self._scale * self.backoff_factor, scale)
            good = call("where", bad, 0.0, call("where", grown, 0.0, good))
            if waiting is not None:
                scale = call("where", waiting > 0.0, self._scale, scale)
                good = call("where", waiting > 0.0, self._good, good)
            self._scale.assign(scale)
            self._good.assign(good)
        self._found.clear()

    def variables(self) -> dict[str, Variable]:
        """Everything that a resumed run needs, by name."""
        return {v.name: v for v in (self._scale, self._good)}
