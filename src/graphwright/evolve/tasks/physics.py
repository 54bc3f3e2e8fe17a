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
    """CartPole with state [..., 4]: position, speed, angle, angular speed. Larger answers push to the right.

    Args:
        limit: number of steps of an episode.
        middle: answer above which the push is to the right: 0.5, or 0 for tanh.
    """

    inputs, outputs = 4, 1

    def __init__(self, limit: int = 500, middle: float = 0.5) -> None:
        self.limit, self.middle = limit, middle
        self.state = np.zeros((0, 4))

    def __repr__(self) -> str:
        return f"CartPole({self.limit}, {self.middle})"

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw states from U(-0.05, 0.05)."""
        self.state = rng.uniform(-0.05, 0.05, (*shape, 4))
        return self.state

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step by 0.02 s, with reward 1 for each step including the last one."""
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
    """Balance a pole on a cart; a mean of 475 of 500 steps solves it."""
    names = ("position", "speed", "angle", "spin")
    return Episodes(CartPole(limit), "cartpole", episodes, 475.0, names)


SCALE = np.array([4.8, 2.0, 0.52, 2.0, 0.52, 2.0])


class DoublePole:
    """State [..., 6]: position and speed, then angle and angular speed of the long and the short pole; answers 0..1."""

    inputs, outputs = 6, 1

    def __init__(self, limit: int = 1000, friction: float = 0.0) -> None:
        self.limit, self.friction = limit, friction
        self.state = np.zeros((0, 6))

    def __repr__(self) -> str:
        return f"DoublePole({self.limit}, {self.friction})"

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Start at rest with the long pole at 0.07 rad."""
        self.state = np.zeros((*shape, 6))
        self.state[..., 2] = 0.07
        return self.state / SCALE

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step twice by 0.01 s with one answer, with reward 1."""
        from graphwright.array.population.poles import act

        shape = self.state.shape[:-1]
        self.state, fell = self.state.copy(), np.empty(shape, bool)
        pushes = np.ascontiguousarray(answers[..., 0], np.float64).reshape(-1)
        act(self.state.reshape(-1, 6), pushes, self.friction, fell.reshape(-1))
        return self.state / SCALE, np.ones(shape), fell


class _Balance(Episodes):
    """One fixed start; a solution balances for 100 000 steps."""

    def confirm(self, population: Population) -> Trial:
        """Accept a population of one that balances for 100 000 steps."""
        returns, steps, seconds = self.play(population, 1, (0, 0), limit=100_000)
        return Trial(bool(returns[0, 0] >= 100_000), steps, seconds)

    def test(self, population: Population, episodes: int = 1) -> float:
        """Count the steps of a population of one, up to 100 000, and count the calls."""
        self.test_reads += 1
        return float(self.play(population, 1, (0, 0), limit=100_000)[0].mean())


def double_pole() -> Episodes:
    """Balance two poles, with speeds as inputs: fitness counts up to 1000 steps, a solution makes 100 000."""
    names = ("position", "speed", "angle 1", "spin 1", "angle 2", "spin 2")
    return _Balance(DoublePole(), "double-pole", 1, 1000.0, names)
