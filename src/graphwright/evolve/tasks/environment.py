"""Tasks in environments: all individuals in all their episodes step together.

Fitness is the mean return over starts that change every generation. Who reaches the target with them is tried on 100
starts of its own, and only taken for a solution if it is beyond the target by more than chance; the test is 100 more.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import numpy as np

from graphwright.evolve.tasks.task import Population, Scores, Trial
from graphwright.files import blake2b_128

_FITNESS, _CONFIRM, _TEST = 3, 4, 5  # purposes of random streams


class Environment(Protocol):
    """Many episodes at once; arrays have any leading shape. `state` is all that steps change, so that a run resumes."""

    inputs: int
    outputs: int
    limit: int
    state: np.ndarray

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Starts of `shape` episodes; returns observations [..., inputs]."""
        ...

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One step by the networks' answers [..., outputs]: observations, rewards [...], who ended [...]."""
        ...


class Episodes:
    """A task in an environment.

    Args:
        environment: makes one.
        episodes: per genome and generation; target: mean return that solves it.
        fixed: the same starts in each generation.
    """

    loss, split, sequence, lesson = "mse", "episodes", False, None

    def __init__(
        self, environment: Environment, name: str, episodes: int, target: float, names: tuple[str, ...] = ()
    ) -> None:
        self.environment, self.name, self.episodes, self.target = environment, name, episodes, target
        self.inputs, self.outputs = environment.inputs, environment.outputs
        self.names = names or tuple(f"x{i}" for i in range(self.inputs))
        self.metric, self.test_reads = "return", 0

    def hash(self) -> str:
        """Of everything that decides a score; where episodes stand now does not."""
        rules = {name: value for name, value in vars(self.environment).items() if name != "state"}
        return blake2b_128(f"{self.name} {self.episodes} {self.target} {rules!r}".encode())

    def score(self, population: Population) -> Scores:
        """Mean return over this generation's starts, the same for all genomes."""
        returns, steps, seconds = self.play(population, self.episodes, (_FITNESS, population.generation))
        mean = returns.mean(1)
        return Scores(mean, mean, steps, seconds)

    def confirm(self, population: Population) -> Trial:
        """Whether a population of one reaches the target on 100 starts of its own, less two standard errors."""
        returns, steps, seconds = self.play(population, 100, (_CONFIRM, population.generation))
        return Trial(bool(returns.mean() - 2 * returns.std(ddof=1) / 10 >= self.target), steps, seconds)

    def test(self, population: Population, episodes: int = 100) -> float:
        """Mean return of a population of one on unseen starts; counts its calls."""
        self.test_reads += 1
        returns, _, _ = self.play(population, episodes, (_TEST, 0))
        return float(returns.mean())

    def play(
        self, population: Population, episodes: int, purpose: tuple[int, int], limit: int | None = None
    ) -> tuple[np.ndarray, int, float]:
        """Returns float64 [G, episodes], steps made in all, and seconds spent in the environment."""
        rng = np.random.Generator(np.random.Philox(key=[population.seed, (purpose[0] << 32) | purpose[1]]))
        count, began = len(population), perf_counter()
        start = self.environment.reset(rng, (episodes,))
        seen = self._spread(start, count)
        seconds, steps = perf_counter() - began, 0
        returns, running = np.zeros((count, episodes)), np.ones((count, episodes), bool)
        session = population.session(episodes, self.inputs)
        for _ in range(limit or self.environment.limit):
            answers = session.step(seen)
            began = perf_counter()
            seen, reward, ended = self.environment.step(answers)
            steps += int(running.sum())
            returns += reward * running
            running &= ~ended
            seconds += perf_counter() - began
            if not running.any():
                break
        return returns, steps, seconds

    def _spread(self, start: Any, count: int) -> np.ndarray:
        """The same starts for all genomes."""
        self.environment.state = np.repeat(self.environment.state[None], count, 0)
        return np.repeat(start[None], count, 0)
