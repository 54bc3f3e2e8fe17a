"""The arrays with which layers begin.

An array is drawn from a stream of its own per parameter name, so that a new layer changes no other. Parameters without
a name take the next stream of the default generator, which `gw.manual_seed` restarts.
"""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from graphwright.array import NDArray, from_numpy, random
from graphwright.autograd import Tensor, Variable, rng
from graphwright.errors import UsageError


def source(name: str = "", seed: int | None = None) -> dict[str, int]:
    """Return the keywords seed and stream (and step) with which `array.random` draws the values of a parameter.

    A name has a stream of its own, by default with seed 0. Without a name, all are those of the default generator.
    """
    if name:
        return {"seed": 0 if seed is None else seed, "stream": random.stream_of(name)}
    state = rng.state_dict()
    rng.draw()
    return {**state, "seed": state["seed"] if seed is None else seed}


def normal(shape: tuple[int, ...], name: str = "", *, std: float = 0.02, seed: int | None = None) -> NDArray:
    """Sample N(0, std²), float32."""
    return from_numpy(random.normal(prod(shape), **source(name, seed)).reshape(shape) * np.float32(std))


def uniform(shape: tuple[int, ...], name: str = "", *, bound: float, seed: int | None = None) -> NDArray:
    """Sample uniformly from [-bound, bound), float32."""
    values = random.uniform(prod(shape), **source(name, seed)).reshape(shape)
    return from_numpy((values * 2 - 1) * np.float32(bound))


def kaiming_uniform(
    shape: tuple[int, ...], name: str = "", *, fan_in: int, a: float = sqrt(5), seed: int | None = None
) -> NDArray:
    """Sample uniformly within ±√(6 / ((1 + a²)·fan_in)) (He et al. 2015); a = √5 gives torch's ±1/√fan_in."""
    return uniform(shape, name, bound=sqrt(6 / ((1 + a * a) * fan_in)) if fan_in else 0.0, seed=seed)


def xavier_uniform(shape: tuple[int, ...], name: str = "", *, gain: float = 1.0, seed: int | None = None) -> NDArray:
    """Sample uniformly within ±gain·√(6 / (fan_in + fan_out)), float32 (Glorot and Bengio 2010, eq. 16)."""
    return uniform(shape, name, bound=gain * sqrt(6 / sum(fans(shape))), seed=seed)


def xavier_normal(shape: tuple[int, ...], name: str = "", *, gain: float = 1.0, seed: int | None = None) -> NDArray:
    """Sample N(0, gain²·2 / (fan_in + fan_out)), float32."""
    return normal(shape, name, std=gain * sqrt(2 / sum(fans(shape))), seed=seed)


def full(shape: tuple[int, ...], value: float) -> NDArray:
    """Return a constant array, float32."""
    return from_numpy(np.full(shape, value, np.float32))


def zeros(*shape: int) -> NDArray:
    """Return zeros, float32."""
    return full(shape, 0.0)


def ones(*shape: int) -> NDArray:
    """Return ones, float32."""
    return full(shape, 1.0)


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (fan_in, fan_out) of a weight [out, in, kernel...]."""
    if len(shape) < 2:
        raise UsageError("cannot compute fan_in and fan_out of this shape", expected="[out, in, ...]", got=shape)
    kernel = prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def set_values(target: Variable, values: NDArray) -> None:
    """Set a variable to values of its shape, in its dtype and on its device."""
    target.assign(Tensor(values).to(dtype=target.dtype, device=target.device))


def redraw(fan_in: int, *targets: Variable | None) -> None:
    """Sample the variables again, uniformly within ±1/√fan_in, from the default generator."""
    for target in targets:
        if target is not None:
            set_values(target, kaiming_uniform(target.shape, fan_in=fan_in))
