"""CartPole, many episodes at once, by the equations of gymnasium's CartPole-v1.

Source: Barto, Sutton and Anderson 1983, as in gymnasium's `classic_control/cartpole.py`, Euler's method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.evolve.tasks.environment import Episodes
from graphwright.evolve.tasks.task import Trial

if TYPE_CHECKING:
    from graphwright.evolve.tasks.task import Population

GRAVITY, CART, POLE, HALF, FORCE, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL, MOMENT = CART + POLE, POLE * HALF
X_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * np.pi / 360


class CartPole:
    """State [..., 4]: x, its speed, the angle, its speed. An answer above one half (or 0 for tanh) pushes right.

    Args:
        limit: steps after which an episode is cut off.
        middle: answer that divides left from right.
    """

    inputs, outputs = 4, 1

    def __init__(self, limit: int = 500, middle: float = 0.5) -> None:
        self.limit, self.middle = limit, middle
        self.state = np.zeros((0, 4))

    def __repr__(self) -> str:
        return f"CartPole({self.limit}, {self.middle})"

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """States from U(-0.05, 0.05)."""
        self.state = rng.uniform(-0.05, 0.05, (*shape, 4))
        return self.state

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reward 1 a step, the last one included."""
        x, dx, angle, spin = np.moveaxis(self.state, -1, 0)
        force = np.where(answers[..., 0] > self.middle, FORCE, -FORCE)
        cos, sin = np.cos(angle), np.sin(angle)
        temp = (force + MOMENT * spin**2 * sin) / TOTAL
        turning = (GRAVITY * sin - cos * temp) / (HALF * (4.0 / 3.0 - POLE * cos**2 / TOTAL))
        pushed = temp - MOMENT * turning * cos / TOTAL
        self.state = np.stack([x + TAU * dx, dx + TAU * pushed, angle + TAU * spin, spin + TAU * turning], -1)
        fell = (np.abs(self.state[..., 0]) > X_LIMIT) | (np.abs(self.state[..., 2]) > ANGLE_LIMIT)
        return self.state, np.ones(fell.shape), fell


def cartpole(episodes: int = 5, limit: int = 500) -> Episodes:
    """Balance a pole on a cart: solved at a mean of 475 of 500 steps."""
    names = ("position", "speed", "angle", "spin")
    return Episodes(CartPole(limit), "cartpole", episodes, 475.0, names)


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

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One answer holds for two steps of 0.01 s; reward 1."""
        from graphwright.array.population.poles import act

        shape = self.state.shape[:-1]
        self.state, fell = self.state.copy(), np.empty(shape, bool)
        pushes = np.ascontiguousarray(answers[..., 0], np.float64).reshape(-1)
        act(self.state.reshape(-1, 6), pushes, self.friction, fell.reshape(-1))
        return self.state / SCALE, np.ones(shape), fell


class _Balance(Episodes):
    """One fixed start; a champion has to hold for 100 000 steps."""

    def confirm(self, population: Population) -> Trial:
        """Whether a population of one balances for 100 000 steps."""
        returns, steps, seconds = self.play(population, 1, (0, 0), limit=100_000)
        return Trial(bool(returns[0, 0] >= 100_000), steps, seconds)

    def test(self, population: Population, episodes: int = 1) -> float:
        """Steps of a population of one, up to 100 000; counts its calls."""
        self.test_reads += 1
        return float(self.play(population, 1, (0, 0), limit=100_000)[0].mean())


def double_pole() -> Episodes:
    """Balance two poles with velocities in sight: fitness up to 1000 steps, a champion does 100 000."""
    names = ("position", "speed", "angle 1", "spin 1", "angle 2", "spin 2")
    return _Balance(DoublePole(), "double-pole", 1, 1000.0, names)
