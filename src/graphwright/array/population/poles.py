"""Two poles on a cart: one native call advances many episodes by one action.

This is not numpy code, because calls of numpy would take longer than the arithmetic on a few numbers.
Source: Wieland 1991; equations and constants as in Gomez and Miikkulainen 1999, Runge-Kutta of order 4.
Importing this module loads numba.
"""

from __future__ import annotations

import math

import numpy as np

from graphwright.array.population.genes import compiled, native

GRAVITY, CART, MASSES, HALVES = -9.8, 1.0, (0.1, 0.01), (0.5, 0.05)
HINGE, FORCE, TAU, SUBSTEPS = 2e-6, 20.0, 0.01, 2
X_LIMIT, ANGLE_LIMIT = 2.4, math.radians(36.0)


@native
def _pole(angle: float, spin: float, mass: float, half: float) -> tuple[float, float, float, float]:
    """Return a pole's force on the cart, its effective mass, its pull by gravity and friction, and cos(angle).

    `spin` is its angular velocity, `half` is half its length.
    """
    cos, sin = math.cos(angle), math.sin(angle)
    pull = HINGE * spin / (mass * half) + GRAVITY * sin
    force = mass * half * spin * spin * sin + 0.75 * mass * cos * pull
    return force, mass * (1.0 - 0.75 * cos * cos), pull, cos


@native
def _derivative(
    s: tuple[float, float, float, float, float, float], force: float, friction: float
) -> tuple[float, float, float, float, float, float]:
    """Return ds/dt of a state s: position and speed of the cart, angle and angular velocity of each pole."""
    first, mass1, pull1, cos1 = _pole(s[2], s[3], MASSES[0], HALVES[0])
    second, mass2, pull2, cos2 = _pole(s[4], s[5], MASSES[1], HALVES[1])
    rubbed = friction * np.sign(s[1])
    push = (force - rubbed + (first + second)) / (CART + (mass1 + mass2))
    turn1, turn2 = -0.75 * (push * cos1 + pull1) / HALVES[0], -0.75 * (push * cos2 + pull2) / HALVES[1]
    return s[1], push, s[3], turn1, s[5], turn2


@native
def _moved(
    s: tuple[float, float, float, float, float, float], k: tuple[float, float, float, float, float, float], h: float
) -> tuple[float, float, float, float, float, float]:
    return (
        s[0] + h * k[0], s[1] + h * k[1], s[2] + h * k[2], s[3] + h * k[3], s[4] + h * k[4], s[5] + h * k[5],
    )  # fmt: skip


@compiled
def act(state: np.ndarray, answers: np.ndarray, friction: float, fell: np.ndarray) -> None:
    """Advance episodes by one action, two steps of 0.01 s. The state of a failed episode is set to 0 to stay finite.

    Args:
        state: float64 [N, 6], changed: position and speed of the cart, angle and angular velocity of each pole.
        answers: float64 [N], outputs of the networks in (0, 1); the force on the cart is 20·(answer - 0.5).
        friction: friction of the cart on its track.
        fell: bool [N], written: whether the cart or a pole left its limits, so that the episode failed.
    """
    for n in range(len(state)):
        force = FORCE * (answers[n] - 0.5)
        s = (state[n, 0], state[n, 1], state[n, 2], state[n, 3], state[n, 4], state[n, 5])
        for _ in range(SUBSTEPS):
            k1 = _derivative(s, force, friction)
            k2 = _derivative(_moved(s, k1, 0.5 * TAU), force, friction)
            k3 = _derivative(_moved(s, k2, 0.5 * TAU), force, friction)
            k4 = _derivative(_moved(s, k3, TAU), force, friction)
            s = _moved(_moved(_moved(_moved(s, k1, TAU / 6), k2, TAU / 3), k3, TAU / 3), k4, TAU / 6)
        fell[n] = abs(s[0]) > X_LIMIT or abs(s[2]) > ANGLE_LIMIT or abs(s[4]) > ANGLE_LIMIT
        for i, v in enumerate(s):
            state[n, i] = 0.0 if fell[n] else v
