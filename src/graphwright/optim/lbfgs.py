"""L-BFGS with or without a line search, as `torch.optim.LBFGS`; eager, as a step calls the loss several times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, ClassVar, NamedTuple

import numpy as np

from graphwright.autograd import active_recorder, as_tensor, enable_grad, no_grad
from graphwright.errors import UsageError
from graphwright.optim.optimizer import Optimizer, Params

_SEARCHES = (None, "strong_wolfe")
_ARMIJO, _CURVATURE = 1e-4, 0.9  # Nocedal and Wright 2006, eq. 3.7


class _Point(NamedTuple):
    """A point on the line of a search: the length of the step, and there loss, gradient and slope along the line."""

    step: float
    loss: float
    gradient: np.ndarray
    slope: float


@dataclass(slots=True)
class _History:
    """What a step remembers of those before it; gradients are of all parameters in one vector."""

    steps: int = 0
    calls: int = 0  # of the loss
    direction: np.ndarray | None = None
    length: float = 0.0
    gradient: np.ndarray | None = None
    loss: float = 0.0
    scale: float = 1.0  # of the initial inverse Hessian
    pairs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # changes of the gradient, and moves


class LBFGS(Optimizer):
    """Quasi-Newton steps from the last changes of the gradient (Liu and Nocedal 1989); for whole batches.

    Args:
        params: parameters of one group.
        lr: length of a step, or with a line search its first trial.
        max_iter: largest number of iterations of a step.
        max_eval: largest number of calls of the closure in a step; 1.25 · max_iter by default.
        tolerance_grad: stop when no entry of the gradient is larger.
        tolerance_change: stop when neither a parameter nor the loss changes by more.
        history_size: number of changes of the gradient that are remembered.
        line_search_fn: None, or `strong_wolfe`.
    Raises: UsageError for several groups, for other arguments, and in a trace.
    """

    op = ""
    moment_names: ClassVar[Mapping[str, str | None]] = {}

    def __init__(
        self, params: Params, lr: float = 1.0, max_iter: int = 20, max_eval: int | None = None,
        tolerance_grad: float = 1e-7, tolerance_change: float = 1e-9, history_size: int = 100,
        line_search_fn: str | None = None,
    ) -> None:  # fmt: skip
        options = {"max_iter": max_iter, "max_eval": max_iter * 5 // 4 if max_eval is None else max_eval}
        options |= {"tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}
        options |= {"history_size": history_size, "line_search_fn": line_search_fn}
        super().__init__(params, lr, options, low="nearest")
        if len(self.param_groups) != 1:
            raise UsageError("LBFGS has one parameter group", got=len(self.param_groups))
        self.history = _History()

    @classmethod
    def _out_of_range(cls, options: Mapping[str, Any]) -> dict[str, str]:
        wrong = {n: ">= 1" for n in ("max_iter", "max_eval", "history_size") if options[n] < 1}
        if options["line_search_fn"] not in _SEARCHES:
            wrong["line_search_fn"] = "None or strong_wolfe"
        return super()._out_of_range(options) | wrong

    def step(self, closure: Callable[[], Any] | None = None, *, found_inf: object = None) -> Any:
        """Run up to `max_iter` iterations; return the loss before the first.

        Args:
            closure: function that sets the gradients to zero, computes the loss and calls its `backward`.
        """
        if closure is None or found_inf is not None or active_recorder.get() is not None:
            fix = "define closure(): opt.zero_grad(); loss = ...; loss.backward(); return loss"
            what, expected = "LBFGS computes the loss several times in a step", "opt.step(closure), outside traces"
            raise UsageError(what, expected=expected, fix=fix)
        options, h = self.param_groups[0].options, self.history
        first = self._evaluated(closure)
        loss, gradient = float(first), self._gradient()
        used, tolerance = 1, options["tolerance_change"]
        for iteration in range(options["max_iter"]):
            if np.abs(gradient).max(initial=0.0) <= options["tolerance_grad"]:
                break
            h.steps += 1
            direction = self._direction(gradient, options["history_size"])
            start = min(1.0, 1.0 / float(np.abs(gradient).sum())) if h.steps == 1 else 1.0
            before, h.gradient, h.loss, h.direction = loss, gradient, loss, direction
            h.length, slope = start * self.lr, float(gradient @ direction)
            if slope > -tolerance:
                break
            origin = self._values()
            if options["line_search_fn"] is None:
                self._set(origin + self._typed(h.length) * direction)
                if iteration + 1 == options["max_iter"]:
                    break
                loss, gradient = float(self._evaluated(closure)), self._gradient()
                used += 1
            else:
                calls = h.calls

                def at(step: float, x: np.ndarray = origin, d: np.ndarray = direction) -> _Point:
                    self._set(x + self._typed(step) * d)
                    value = float(self._evaluated(closure))
                    g = self._gradient()
                    return _Point(step, value, g, float(g @ d))

                begin = _Point(0.0, loss, gradient, slope)
                found = _wolfe(
                    at, begin, h.length, float(np.abs(direction).max()), tolerance, options["max_eval"] - used
                )
                h.length, loss, gradient = found.step, found.loss, found.gradient
                used += h.calls - calls
                self._set(origin + self._typed(h.length) * direction)
            still = float(np.abs(direction).max()) * abs(h.length) <= tolerance or abs(loss - before) < tolerance
            if used >= options["max_eval"] or still:
                break
        return first

    def _direction(self, gradient: np.ndarray, size: int) -> np.ndarray:
        """Return -H·gradient, with the inverse Hessian H of the pairs (Nocedal and Wright 2006, algorithm 7.4)."""
        h = self.history
        if h.direction is None or h.gradient is None:
            return -gradient
        change, move = gradient - h.gradient, h.direction * self._typed(h.length)
        curvature = float(change @ move)
        if curvature > 1e-10:
            h.pairs = [*h.pairs, (change, move)][-size:]
            h.scale = curvature / float(change @ change)
        q, factors = -gradient, []
        for y, s in reversed(h.pairs):
            factors.append(float(s @ q) / float(y @ s))
            q = q - self._typed(factors[-1]) * y
        q = q * self._typed(h.scale)
        for (y, s), factor in zip(h.pairs, reversed(factors), strict=True):
            q = q + self._typed(factor - float(y @ q) / float(y @ s)) * s
        return q

    # -- all parameters as one vector ----------------------------------------------------------------------------------
    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        self.history.calls += 1
        with enable_grad():
            return closure()

    def _typed(self, value: float) -> Any:
        return next(self.parameters()).dtype.numpy.type(value)

    def _gradient(self) -> np.ndarray:
        parts = [
            np.zeros(p.numel(), p.dtype.numpy) if p.grad is None else p.grad.numpy().ravel() for p in self.parameters()
        ]
        return np.concatenate(parts)

    def _values(self) -> np.ndarray:
        return np.concatenate([p.detach().numpy().ravel() for p in self.parameters()])

    def _set(self, values: np.ndarray) -> None:
        begin = 0
        with no_grad():
            for p in self.parameters():
                part = values[begin : begin + p.numel()].reshape(p.shape)
                p.assign(as_tensor(np.ascontiguousarray(part)).to(dtype=p.dtype, device=p.device))
                begin += p.numel()

    # -- state ---------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the history, copied, as the state of parameter 0, and `param_groups`."""
        h = self.history
        state = {name: getattr(h, name) for name in ("steps", "calls", "length", "loss", "scale")}
        vectors = {"direction": h.direction, "gradient": h.gradient}
        vectors |= {f"pairs.{i}.{j}": v for i, pair in enumerate(h.pairs) for j, v in enumerate(pair)}
        state |= {name: as_tensor(v.copy()) for name, v in vectors.items() if v is not None}
        return {"state": {0: state}, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. Raises: UsageError for other options or parameters."""
        (state,) = state_dict["state"].values()
        vectors = {name: np.array(v) for name, v in state.items() if np.ndim(v)}
        total = sum(p.numel() for p in self.parameters())
        if any(v.shape != (total,) for v in vectors.values()):
            raise UsageError("the state is of other parameters", where="LBFGS", expected=f"{total} entries")
        super().load_state_dict({**state_dict, "state": {}})
        pairs = [
            (vectors[f"pairs.{i}.0"], vectors[f"pairs.{i}.1"]) for i in range(sum(n.endswith(".1") for n in vectors))
        ]
        numbers = {name: v.item() if hasattr(v, "item") else v for name, v in state.items() if not np.ndim(v)}
        self.history = _History(
            **numbers, direction=vectors.get("direction"), gradient=vectors.get("gradient"), pairs=pairs
        )


# -- the line search ---------------------------------------------------------------------------------------------------
def _cubic(a: _Point, b: _Point, low: float, high: float) -> float:
    """Return the minimum of the cubic through two points with their slopes, clamped (Nocedal and Wright 2006, 3.59)."""
    a, b = (a, b) if a.step <= b.step else (b, a)
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0:
        return (low + high) / 2
    d2 = sqrt(square)
    return min(max(b.step - (b.step - a.step) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2)), low), high)


def _wolfe(
    at: Callable[[float], _Point], begin: _Point, step: float, size: float, tolerance: float, most: int
) -> _Point:
    """Return a point on the line with both strong Wolfe conditions, or the best found by `most` + 1 calls of `at`.

    Args:
        begin: the point at step 0.
        step: first trial.
        size: largest entry of the direction; brackets shorter than `tolerance` / size are not divided.
    """
    steep = lambda p: p.loss > begin.loss + _ARMIJO * p.step * begin.slope  # noqa: E731
    flat = lambda p: abs(p.slope) <= -_CURVATURE * begin.slope  # noqa: E731
    before, here, count = begin, at(step), 0
    bracket = [begin, here]
    while count < most:  # bracket a point that has them
        bracket = [before, here]
        if steep(here) or (count > 1 and here.loss >= before.loss):
            break
        if flat(here):
            return here
        if here.slope >= 0:
            break
        further = _cubic(before, here, here.step + 0.01 * (here.step - before.step), here.step * 10)
        before, here, count = here, at(further), count + 1
        bracket = [begin, here]
    stuck = False
    bracket.sort(key=lambda p: p.loss)  # the lower one first
    while count < most and abs(bracket[1].step - bracket[0].step) * size >= tolerance:  # divide the bracket
        left, right = sorted(p.step for p in bracket)
        t, margin = _cubic(*bracket, left, right), 0.1 * (right - left)
        near = min(right - t, t - left) < margin
        if near and (stuck or t >= right or t <= left):
            t = right - margin if abs(t - right) < abs(t - left) else left + margin
            near = False
        stuck = near
        here, count = at(t), count + 1
        if steep(here) or here.loss >= bracket[0].loss:
            bracket = sorted([bracket[0], here], key=lambda p: p.loss)
        elif flat(here):
            return here
        else:
            other = bracket[0] if here.slope * (bracket[1].step - bracket[0].step) >= 0 else bracket[1]
            bracket = [here, other]
    return bracket[0]
