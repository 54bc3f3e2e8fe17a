"""Two poles on a cart, many episodes at once, with the velocities in sight.

Source: Wieland 1991; equations and constants as in Gomez and Miikkulainen 1999, Runge-Kutta of order 4.
"""

from __future__ import annotations

import numpy as np

from graphwright.evolve.tasks.environment import Episodes
from graphwright.evolve.tasks.task import Population

GRAVITY, CART, MASSES, HALVES = -9.8, 1.0, (0.1, 0.01), (0.5, 0.05)
HINGE, FORCE, TAU, SUBSTEPS = 2e-6, 20.0, 0.01, 2
X_LIMIT, ANGLE_LIMIT = 2.4, np.radians(36.0)
SCALE = np.array([4.8, 2.0, 0.52, 2.0, 0.52, 2.0])


class DoublePole:
    """State [..., 6]: x and its speed, then angle and spin of the long and of the short pole; answers lie in (0, 1)."""

    inputs, outputs = 6, 1

    def __init__(self, limit: int = 1000, friction: float = 0.0) -> None:
        self.limit, self.friction = limit, friction
        self.state = np.zeros((0, 6))

    def __repr__(self) -> str:
        return f"DoublePole({self.limit}, {self.friction})"

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """At rest, the long pole 0.07 rad off."""
        self.state = np.zeros((*shape, 6))
        self.state[..., 2] = 0.07
        return self.state / SCALE

    def derivative(self, s: np.ndarray, force: np.ndarray) -> np.ndarray:
        """Ds/dt under a force on the cart."""
        pushed, mass = force - self.friction * np.sign(s[..., 1]), np.full(force.shape, CART)
        parts = []
        for i, (m, half) in enumerate(zip(MASSES, HALVES, strict=True)):
            angle, spin = s[..., 2 + 2 * i], s[..., 3 + 2 * i]
            cos, sin = np.cos(angle), np.sin(angle)
            hinge = HINGE * spin / (m * half)
            pushed = pushed + m * half * spin**2 * sin + 0.75 * m * cos * (hinge + GRAVITY * sin)
            mass = mass + m * (1 - 0.75 * cos**2)
            parts.append((cos, sin, hinge, half, spin))
        push = pushed / mass
        out = [s[..., 1], push]
        for cos, sin, hinge, half, spin in parts:
            out += [spin, -0.75 * (push * cos + GRAVITY * sin + hinge) / half]
        return np.stack(out, -1)

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One answer holds for two steps of 0.01 s; reward 1."""
        force, s, h = FORCE * (answers[..., 0].astype(np.float64) - 0.5), self.state, TAU
        for _ in range(SUBSTEPS):
            k1 = self.derivative(s, force)
            k2 = self.derivative(s + 0.5 * h * k1, force)
            k3 = self.derivative(s + 0.5 * h * k2, force)
            k4 = self.derivative(s + h * k3, force)
            s = s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        fell = (np.abs(s[..., 0]) > X_LIMIT) | (np.abs(s[..., 2]) > ANGLE_LIMIT) | (np.abs(s[..., 4]) > ANGLE_LIMIT)
        self.state = np.where(fell[..., None], 0.0, s)  # who fell stays finite, and does not count
        return self.state / SCALE, np.ones(fell.shape), fell


class _Balance(Episodes):
    """One fixed start; a champion has to hold for 100 000 steps."""

    def confirm(self, population: Population) -> bool:
        """Whether a population of one balances for 100 000 steps."""
        returns, _, _ = self.play(population, 1, (0, 0), limit=100_000)
        return bool(returns[0, 0] >= 100_000)

    def test(self, population: Population, episodes: int = 1) -> float:
        """Steps of a population of one, up to 100 000; counts its calls."""
        self.test_reads += 1
        return float(self.play(population, 1, (0, 0), limit=100_000)[0].mean())


def double_pole() -> Episodes:
    """Balance two poles with velocities in sight: fitness up to 1000 steps, a champion does 100 000."""
    names = ("position", "speed", "angle 1", "spin 1", "angle 2", "spin 2")
    return _Balance(DoublePole(), "double-pole", 1, 1000.0, names)
