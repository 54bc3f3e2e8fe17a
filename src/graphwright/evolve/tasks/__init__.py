"""Tasks: data split into training, validation and test, or episodes in an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphwright.evolve.errors import TaskError
from graphwright.evolve.tasks.data import (
    blobs,
    csv,
    digits,
    event_xor,
    iris,
    irregular_sine,
    mnist,
    parity,
    two_moons,
    xor,
)
from graphwright.evolve.tasks.environment import CartPole, DoublePole, Episodes, cartpole, double_pole, gym
from graphwright.evolve.tasks.task import Head, Population, Scores, Task

_KNOWN = (xor, parity, event_xor, irregular_sine, two_moons, iris, digits, cartpole, double_pole)
TASKS: dict[str, Callable[..., Any]] = {task.__name__.replace("_", "-"): task for task in _KNOWN}
"""Name on the command line -> function that makes the task; it needs no arguments."""


def named(name: str) -> Any:
    """Create the task with this name in `TASKS`. Raises: TaskError listing all names if the name is unknown."""
    if name not in TASKS:
        raise TaskError("unknown task", got=name, expected=", ".join(TASKS))
    return TASKS[name]()


__all__ = [
    "TASKS", "CartPole", "DoublePole", "Episodes", "Head", "Population", "Scores", "Task", "blobs", "cartpole",
    "csv", "digits", "double_pole", "event_xor", "gym", "iris", "irregular_sine", "mnist", "named", "parity",
    "two_moons", "xor",
]  # fmt: skip
