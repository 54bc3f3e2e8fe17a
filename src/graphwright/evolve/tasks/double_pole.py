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
_MASS, _HALF = np.array(MASSES), np.array(HALVES)
_MOMENTS, _REDUCED = _MASS * _HALF, 0.75 * _MASS
_HINGES = HINGE / _MOMENTS
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
        """Ds/dt [..., 6] under a force [...] on the cart; both poles at once, on the last axis."""
        angle, spin = s[..., 2::2], s[..., 3::2]
        cos, sin = np.cos(angle), np.sin(angle)
        pull = _HINGES * spin + GRAVITY * sin
        parts = _MOMENTS * spin * spin * sin + _REDUCED * cos * pull
        masses = _MASS * (1 - 0.75 * cos * cos)
        pushed = force - self.friction * np.sign(s[..., 1]) if self.friction else force
        push = (pushed + (parts[..., 0] + parts[..., 1])) / (CART + (masses[..., 0] + masses[..., 1]))
        out = np.empty_like(s)
        out[..., 0], out[..., 1] = s[..., 1], push
        out[..., 2::2], out[..., 3::2] = spin, -0.75 * (push[..., None] * cos + pull) / _HALF
        return out

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One answer holds for two steps of 0.01 s; reward 1."""
        force, s, h = FORCE * (answers[..., 0].astype(np.float64) - 0.5), self.state, TAU
        for _ in range(SUBSTEPS):
            k1 = self.derivative(s, force)
            k2 = self.derivative(s + 0.5 * h * k1, force)
            k3 = self.derivative(s + 0.5 * h * k2, force)
            k4 = self.derivative(s + h * k3, force)
            s = s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        fell = (np.abs(s[..., 0]) > X_LIMIT) | (np.abs(s[..., 2::2]) > ANGLE_LIMIT).any(-1)
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
