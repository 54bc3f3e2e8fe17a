"""Tasks in environments: in each step all genomes act in all their episodes.

Fitness is the mean return over start states that change every generation. A genome that reaches the target is tested on
100 new starts, and is a solution only if it exceeds the target by two standard errors. The test metric uses 100 more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from graphwright.errors import MissingExtra
from graphwright.evolve.errors import TaskError, need
from graphwright.evolve.tasks.task import Population, Scores, Trial
from graphwright.files import blake2b_128

_FITNESS, _CONFIRM, _TEST = 3, 4, 5  # ids of random streams by purpose
Step = tuple[np.ndarray, np.ndarray, np.ndarray]


class Environment(Protocol):
    """Protocol of an environment that runs many episodes at once; `state` is the only attribute that `step` changes."""

    inputs: int
    outputs: int
    limit: int
    state: np.ndarray

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Start an array of episodes with shape `shape`; return observations [*shape, inputs]."""
        ...

    def step(self, answers: np.ndarray) -> Step:
        """Step all episodes with network outputs [..., outputs]; return observations, rewards [...] and ended [...]."""
        ...


class Episodes:
    """A task in an environment.

    Args:
        environment: the environment; name: name of the task.
        episodes: number of episodes per genome and generation.
        target: mean return that solves the task.
        names: names of the inputs.
    """

    loss, split, sequence, lesson = "mse", "episodes", False, None

    def __init__(
        self, environment: Environment, name: str, episodes: int, target: float, names: tuple[str, ...] = ()
    ) -> None:
        self.environment, self.name, self.episodes, self.target = environment, name, episodes, target
        self.inputs, self.outputs = environment.inputs, environment.outputs
        self.names = names or tuple(f"x{i}" for i in range(self.inputs))
        self.metric, self.test_reads = "return", 0

    @property
    def foreign(self) -> bool:
        """True if the environment is not one of this module; see `Scorer.foreign`."""
        return not isinstance(self.environment, CartPole | DoublePole)

    def hash(self) -> str:
        """Return a hash of everything that determines scores; the current state of episodes does not."""
        rules = {name: value for name, value in vars(self.environment).items() if name != "state"}
        return blake2b_128(f"{self.name} {self.episodes} {self.target} {rules!r}".encode())

    def score(self, population: Population) -> Scores:
        """Compute the mean return over the start states of this generation, which are the same for all genomes."""
        returns, steps, seconds = self.play(population, self.episodes, (_FITNESS, population.generation))
        return Scores(returns.mean(1), returns.mean(1), steps, seconds)

    def confirm(self, population: Population) -> Trial:
        """Test if the mean return of a single genome on 100 starts is at least two standard errors above the target."""
        returns, steps, seconds = self.play(population, 100, (_CONFIRM, population.generation))
        return Trial(bool(returns.mean() - 2 * returns.std(ddof=1) / 10 >= self.target), steps, seconds)

    def test(self, population: Population, episodes: int = 100) -> float:
        """Return the mean return of a single genome on unseen starts; `test_reads` counts the calls."""
        self.test_reads += 1
        returns, _, _ = self.play(population, episodes, (_TEST, 0))
        return float(returns.mean())

    def play(
        self, population: Population, episodes: int, purpose: tuple[int, int], limit: int | None = None
    ) -> tuple[np.ndarray, int, float]:
        """Play episodes with all genomes.

        `purpose` selects the random stream of the start states; `limit` is the maximum number of steps.
        Returns: the return of each episode, float64 [G, episodes]; the number of steps; the seconds in the environment.
        """
        rng = np.random.Generator(np.random.Philox(key=[population.seed, (purpose[0] << 32) | purpose[1]]))
        count, began = len(population), perf_counter()
        seen = self._spread(self.environment.reset(rng, (episodes,)), count)
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
        self.environment.state = np.repeat(self.environment.state[None], count, 0)
        return np.repeat(start[None], count, 0)


class Gymnasium:
    """Instances of a gymnasium environment.

    A discrete action is the index of the largest output. If there are only two, one output > 0.5 selects action 1.
    """

    def __init__(self, name: str) -> None:
        try:
            gymnasium: Any = import_module("gymnasium")
        except ImportError:
            raise MissingExtra("evolve", f"the environment {name}") from None
        self._make = lambda: gymnasium.make(name)
        try:
            probe: Any = self._make()
        except Exception as error:  # unknown name, old version, or a missing package of this environment
            raise TaskError("gymnasium cannot make this environment", where=name,
                            got=f"{type(error).__name__}: {error}") from error  # fmt: skip
        space = probe.action_space
        seen = probe.observation_space
        need(len(seen.shape) == 1, "the observations of the environment are not vectors", where=name, got=seen)
        self.discrete, self.inputs = hasattr(space, "n"), int(seen.shape[0])
        self.outputs = int(space.n if self.discrete else np.prod(space.shape))
        if self.discrete and self.outputs == 2:
            self.outputs = 1
        self.name, self.limit = name, probe.spec.max_episode_steps or 1000
        self._space, self._pool = space, [probe]

    def __repr__(self) -> str:
        return f"Gymnasium({self.name})"

    def __reduce__(self) -> tuple[type[Gymnasium], tuple[str]]:
        return Gymnasium, (self.name,)

    def begin(self, seeds: np.ndarray, genomes: int) -> np.ndarray:
        """Start one episode per genome and seed; return observations [genomes, episodes, inputs]."""
        self._pool += [self._make() for _ in range(len(self._pool), genomes * len(seeds))]
        self.ended = np.zeros((genomes, len(seeds)), bool)
        self.seen = np.zeros((genomes, len(seeds), self.inputs))
        for i in range(genomes * len(seeds)):
            g, k = divmod(i, len(seeds))
            self.seen[g, k] = self._pool[i].reset(seed=int(seeds[k]))[0]
        return self.seen

    def step(self, answers: np.ndarray) -> Step:
        """Step all episodes that have not ended."""
        reward = np.zeros(self.ended.shape)
        for g, k in np.argwhere(~self.ended):
            answer = answers[g, k]
            if self.discrete:
                action: Any = int(answer[0] > 0.5) if len(answer) == 1 else int(answer.argmax())
            else:
                low, high = self._space.low, self._space.high
                action = np.clip(low + (high - low) * answer.reshape(low.shape), low, high)
            at = self._pool[g * self.ended.shape[1] + k]
            self.seen[g, k], reward[g, k], over, cut, _ = at.step(action)
            self.ended[g, k] = over or cut
        return self.seen, reward, self.ended.copy()

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw the seeds of the episodes; `begin` starts them."""
        self.state = rng.integers(0, 2**31, shape)
        return self.state


class _Gym(Episodes):
    environment: Gymnasium

    def hash(self) -> str:
        return blake2b_128(f"{self.environment!r} {self.episodes} {self.target}".encode())

    def _spread(self, start: Any, count: int) -> np.ndarray:
        return self.environment.begin(start, count)


def gym(name: str, target: float | None = None, episodes: int = 3) -> Episodes:
    """Create a task from a gymnasium environment with vector observations.

    The action space is discrete, or a box onto which network outputs in (0, 1) are mapped.

    Args:
        name: name of the environment.
        target: mean return that solves the task; by default the reward threshold that gymnasium registers.
        episodes: number of episodes per genome and generation.
    Raises: MissingExtra if gymnasium is not installed; TaskError if the name is unknown or observations are no vectors.
    """
    environment = Gymnasium(name)
    aim = target if target is not None else environment._pool[0].spec.reward_threshold
    return _Gym(environment, name, episodes, float("inf") if aim is None else float(aim))


GRAVITY, CART, POLE, HALF, FORCE, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL, MOMENT = CART + POLE, POLE * HALF
X_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * np.pi / 360


@dataclass(eq=False)
class CartPole:
    """The CartPole environment with state [..., 4]: position, speed, angle, angular speed.

    Args:
        limit: maximum number of steps of an episode.
        middle: network output above which the push is to the right: 0.5, or 0 for tanh.
    """

    inputs, outputs = 4, 1
    limit: int = 500
    middle: float = 0.5
    state: np.ndarray = field(init=False, repr=False)

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw start states from U(-0.05, 0.05)."""
        self.state = rng.uniform(-0.05, 0.05, (*shape, 4))
        return self.state

    def step(self, answers: np.ndarray) -> Step:
        """Simulate 0.02 s; the reward is 1 for each step, also for the last one."""
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
    """Create the task of balancing a pole on a cart; a mean return of 475 in episodes of 500 steps solves it."""
    return Episodes(CartPole(limit), "cartpole", episodes, 475.0, ("position", "speed", "angle", "spin"))


SCALE = np.array([4.8, 2.0, 0.52, 2.0, 0.52, 2.0])


@dataclass(eq=False)
class DoublePole:
    """A cart with two poles and state [..., 6]; a network output from 0 to 1 controls the push of the cart.

    The state is position and speed, then angle and angular speed of the long pole, then those of the short pole.
    """

    inputs, outputs = 6, 1
    limit: int = 1000
    friction: float = 0.0
    state: np.ndarray = field(init=False, repr=False)

    def reset(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Start all episodes at rest with the long pole at an angle of 0.07 rad."""
        self.state = np.zeros((*shape, 6))
        self.state[..., 2] = 0.07
        return self.state / SCALE

    def step(self, answers: np.ndarray) -> Step:
        """Simulate two steps of 0.01 s with the same push; the reward is 1."""
        from graphwright.array.population.poles import act

        shape = self.state.shape[:-1]
        self.state, fell = self.state.copy(), np.empty(shape, bool)
        pushes = np.ascontiguousarray(answers[..., 0], np.float64).reshape(-1)
        act(self.state.reshape(-1, 6), pushes, self.friction, fell.reshape(-1))
        return self.state / SCALE, np.ones(shape), fell


class _Balance(Episodes):
    """The task of balancing poles from one fixed start; a solution balances for 100 000 steps."""

    def confirm(self, population: Population) -> Trial:
        """Test if a single genome balances for 100 000 steps."""
        returns, steps, seconds = self.play(population, 1, (0, 0), limit=100_000)
        return Trial(bool(returns[0, 0] >= 100_000), steps, seconds)

    def test(self, population: Population, episodes: int = 1) -> float:
        """Return how many steps, at most 100 000, a single genome balances; `test_reads` counts the calls."""
        self.test_reads += 1
        return float(self.play(population, 1, (0, 0), limit=100_000)[0].mean())


def double_pole() -> Episodes:
    """Create a task of balancing two poles for 100 000 steps, with speeds as inputs; fitness is steps, at most 1000."""
    names = ("position", "speed", "angle 1", "spin 1", "angle 2", "spin 2")
    return _Balance(DoublePole(), "double-pole", 1, 1000.0, names)
