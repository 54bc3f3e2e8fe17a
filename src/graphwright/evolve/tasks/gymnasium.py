"""Environments of gymnasium as tasks: one instance per genome and episode, stepped together."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from graphwright.errors import MissingExtra
from graphwright.evolve.errors import TaskError
from graphwright.evolve.tasks.environment import Episodes


class Gymnasium:
    """Instances of one environment; a discrete action is the largest answer (of one answer: above one half)."""

    def __init__(self, name: str) -> None:
        try:
            gymnasium: Any = import_module("gymnasium")
        except ImportError:
            raise MissingExtra("evolve", f"the environment {name}") from None
        self._make = lambda: gymnasium.make(name)
        try:
            probe: Any = self._make()
        except Exception as error:  # an unknown name, an old version, a package that this environment needs
            raise TaskError("gymnasium does not make this environment", where=name,
                            got=f"{type(error).__name__}: {error}") from error  # fmt: skip
        space = probe.action_space
        if len(probe.observation_space.shape) != 1:
            raise TaskError("observations must be vectors", where=name, got=probe.observation_space)
        self.discrete = hasattr(space, "n")
        self.inputs = int(probe.observation_space.shape[0])
        self.outputs = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.outputs = 1 if self.discrete and self.outputs == 2 else self.outputs
        self.low: Any
        self.high: Any
        self.low, self.high = (0, 0) if self.discrete else (space.low, space.high)
        self.name, self.limit = name, probe.spec.max_episode_steps or 1000
        self._pool: list[Any] = [probe]

    def __repr__(self) -> str:
        return f"Gymnasium({self.name})"

    def __deepcopy__(self, memo: Any) -> Gymnasium:
        return self

    def begin(self, seeds: np.ndarray, genomes: int) -> np.ndarray:
        """Observations [genomes, episodes, inputs] of episodes that start by their seeds."""
        while len(self._pool) < genomes * len(seeds):
            self._pool.append(self._make())
        self.ended = np.zeros((genomes, len(seeds)), bool)
        self.seen = np.zeros((genomes, len(seeds), self.inputs))
        for i in range(genomes * len(seeds)):
            g, k = divmod(i, len(seeds))
            self.seen[g, k] = self._pool[i].reset(seed=int(seeds[k]))[0]
        return self.seen

    def step(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One step of all that have not ended."""
        reward = np.zeros(self.ended.shape)
        for g, k in np.argwhere(~self.ended):
            answer = answers[g, k]
            if self.discrete:
                action: Any = int(answer[0] > 0.5) if len(answer) == 1 else int(answer.argmax())
            else:
                action = np.clip(
                    self.low + (self.high - self.low) * answer.reshape(self.low.shape), self.low, self.high
                )
            at = self._pool[g * self.ended.shape[1] + k]
            self.seen[g, k], reward[g, k], over, cut, _ = at.step(action)
            self.ended[g, k] = over or cut
        return self.seen, reward, self.ended.copy()

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Seeds of the episodes; `begin` starts them."""
        self.state = rng.integers(0, 2**31, shape)
        return self.state


class _Gym(Episodes):
    environment: Gymnasium

    def hash(self) -> str:
        from graphwright.files import blake2b_128

        return blake2b_128(f"{self.environment!r} {self.episodes} {self.target}".encode())

    def _spread(self, start: Any, count: int) -> np.ndarray:
        return self.environment.begin(start, count)


def gym(name: str, target: float | None = None, episodes: int = 3) -> Episodes:
    """An environment of gymnasium with vectors to see; actions are discrete, or boxes that answers in (0, 1) span.

    Args:
        target: mean return that solves it; by default the one that gymnasium registers.
    Raises: MissingExtra if gymnasium is not installed, TaskError for other observations and unknown names.
    """
    environment = Gymnasium(name)
    registered = environment._pool[0].spec.reward_threshold
    aim = target if target is not None else registered
    return _Gym(environment, name, episodes, float("inf") if aim is None else float(aim))
