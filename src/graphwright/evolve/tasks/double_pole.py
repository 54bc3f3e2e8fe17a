"""Two poles on a cart, many episodes at once, with the velocities in sight; for physics `array.population.poles`."""

from __future__ import annotations

import numpy as np

from graphwright.evolve.tasks.environment import Episodes
from graphwright.evolve.tasks.task import Population, Trial

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
