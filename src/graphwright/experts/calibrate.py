"""Thresholds of routers set from data, so that a token uses a given mean number of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright.arguments import checked
from graphwright.autograd import Tensor, no_grad
from graphwright.errors import UsageError
from graphwright.experts.routers import NotAMixture, threshold_routers
from graphwright.models import Model
from graphwright.nn.module import Module
from graphwright.nn.router import HIGHEST_THRESHOLD, ThresholdRouter
from graphwright.program import Program
from graphwright.program.weights import as_array
from graphwright.report import Report

ROUNDING = 1e-6
"""Difference of cosines that the order of additions in float32 can make."""


@dataclass(frozen=True, slots=True)
class CalibratedLayer(Report):
    """How the tokens of the batch use one layer with its new thresholds.

    Attributes:
        router: its path.
        experts: number of experts that are alive.
        tokens: number of tokens.
        mean, std: of the number of hits per token, over the tokens with hits.
        distinct: how many different numbers of hits there are, among tokens with hits.
        unrouted: share of tokens without a hit, which go to the fallback.
        expected: this share for independent cosines: (1 - k0/E)^E.
    """

    router: str
    experts: int
    tokens: int
    mean: float
    std: float
    distinct: int
    unrouted: float
    expected: float

    @classmethod
    def of(cls, router: str, hits: np.ndarray, k0: float) -> CalibratedLayer:
        """Count the hits [N, E] of alive experts."""
        (tokens, experts), counts = hits.shape, hits.sum(1)
        routed = counts[counts > 0]
        mean, std = (float(f(routed)) if len(routed) else 0.0 for f in (np.mean, np.std))
        share = float((counts == 0).mean()) if tokens else 0.0
        return cls(router, experts, tokens, mean, std, len(set(routed.tolist())), share, (1 - k0 / experts) ** experts)


@dataclass(frozen=True, slots=True)
class Calibrated(Report):
    """The result of `calibrate`: what was aimed at, and how each layer's tokens use it.

    Attributes:
        k0: mean number of experts per token, unrouted tokens counted as 0.
        layers: in the order in which they run.
    """

    k0: float
    layers: tuple[CalibratedLayer, ...]

    def _text(self) -> str:
        head = f"{'router':<32}{'experts':>8}{'tokens':>8}{'k':>7}{'sd':>6}{'unrouted':>10}{'expected':>10}"
        rows = [
            f"{r.router:<32}{r.experts:>8}{r.tokens:>8}{r.mean * (1 - r.unrouted):>7.2f}{r.std:>6.2f}"
            f"{r.unrouted:>10.3f}{r.expected:>10.3f}"
            for r in self.layers
        ]
        return "\n".join([f"thresholds for k0 = {self.k0:g} experts per token", head, *rows])


@checked
def calibrate(target: Module | Program | Model, batch: Any, k0: float = 3) -> Calibrated:
    """Set each threshold to the (1 - k0/E) quantile of its expert's cosines on a batch, layer after layer.

    The next layer sees the tokens that the layer before it makes with its new thresholds. Quantiles are linearly
    interpolated, thresholds clipped to ±0.99; E counts experts that are alive, and dead ones keep their thresholds. A
    quantile that is the cosine of a token, as where tokens repeat, moves halfway to the next larger cosine: else
    rounding would decide whether the expert has the token.

    Args:
        target: a module, which is set in place; a program or model gets one edit of author `pass`.
        batch: a module's argument, or a tuple of its arguments; a program's inputs by name; a model's text or ids.
        k0: mean number of experts per token; at most the experts of the smallest layer.
    Raises: NotAMixture without a threshold router; UsageError for an invalid k0.
    """
    if isinstance(target, Module):
        return _module(target, batch, k0)
    if isinstance(target, Model):
        return _program(target.program, lambda **options: target.run(batch, **options), k0)
    return _program(target, lambda **options: target.run(batch, **options), k0)


def thresholds_of(cosines: np.ndarray, k0: float, where: str) -> np.ndarray:
    """Return the threshold θ of each expert from cosines [N, E] of the alive experts, float64 [E]."""
    experts = cosines.shape[1]
    if not 0 < k0 <= experts:
        raise UsageError(
            "invalid mean number of experts per token", where=where, expected=f"0 < k0 <= {experts}", got=k0
        )
    known = cosines[np.isfinite(cosines).all(1)]
    if not len(known):
        raise UsageError("the batch has no token for this router", where=where, got=f"cosines {list(cosines.shape)}")
    known = known.astype(np.float64)
    found = np.quantile(known, 1 - k0 / experts, axis=0)
    larger = np.where(known > found + ROUNDING, known, np.inf).min(0)
    ties = (np.abs(known - found) <= ROUNDING).any(0) & np.isfinite(larger)
    found[ties] = (found[ties] + larger[ties]) / 2
    return np.clip(found, -HIGHEST_THRESHOLD, HIGHEST_THRESHOLD)


def _set(
    cosines: np.ndarray, alive: np.ndarray, old: np.ndarray, k0: float, path: str
) -> tuple[np.ndarray, CalibratedLayer]:
    """Return the new parameters ϑ [E], θ = tanh ϑ, and what the batch makes of them."""
    new, theta = old.astype(np.float64).copy(), thresholds_of(cosines[:, alive], k0, path)
    new[alive] = np.arctanh(theta)
    return new, CalibratedLayer.of(path, cosines[:, alive] > theta, k0)


def _module(module: Module, batch: Any, k0: float) -> Calibrated:
    routers = {name: m for name, m in module.named_modules() if isinstance(m, ThresholdRouter)}
    if not routers:
        raise NotAMixture("the module has no threshold router", got=type(module).__name__)
    done: dict[str, CalibratedLayer] = {}

    def before(path: str) -> Callable[..., None]:
        def hook(router: ThresholdRouter, args: tuple[Tensor, ...], given: dict[str, Any]) -> None:
            x, experts = args[0], given["experts"]
            valid = args[1] if len(args) > 1 else given.get("valid")
            cosines = router.cosines(x, experts).numpy()
            cosines = cosines if valid is None else cosines[valid.numpy()]
            old = np.array([float(e.threshold.numpy()) for e in experts])
            new, done[path] = _set(cosines, router.alive.numpy(), old, k0, path)
            for expert, value in zip(experts, new, strict=True):
                expert.threshold.assign(Tensor(as_array(value, expert.threshold.dtype)))

        return hook

    handles = [m.register_forward_pre_hook(before(name), with_kwargs=True) for name, m in routers.items()]
    try:
        with no_grad():
            module(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for handle in handles:
            handle.remove()
    return Calibrated(k0, tuple(done.values()))


def _program(program: Program, run: Callable[..., Any], k0: float) -> Calibrated:
    routers = threshold_routers(program)
    if not routers:
        raise NotAMixture("the program has no threshold router", where=program.name)
    patch: dict[Any, np.ndarray] = {}
    layers = []
    for router in routers:
        cosine, thresholds = router.value("cosine"), router.value("thresholds")
        with run(keep=[cosine], patch=patch) as made:
            cosines = np.asarray(made.value(cosine))
        kind = program.spec(thresholds).dtype
        old = np.array([float(program.weights.array(key).to_numpy("float64")) for key in router.thresholds])
        alive = program.weights.array(router.alive).to_numpy()
        new, layer = _set(cosines, alive, old, k0, router.path)
        patch[thresholds] = new.astype(kind.numpy)
        layers.append(layer)
    with program.edit(
        f"calibrate thresholds to {k0:g} experts per token", author="pass", tool="experts.calibrate"
    ) as e:
        for router, new in zip(routers, patch.values(), strict=True):
            for key, value in zip(router.thresholds, new, strict=True):
                e.set_weight(key, np.asarray(value))
    return Calibrated(k0, tuple(layers))
