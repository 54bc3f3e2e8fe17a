"""Fitness functions that workers import."""

from __future__ import annotations

import os
import signal
from multiprocessing import parent_process
from typing import Any

import numpy as np

X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)


def weights(program: Any) -> list[float]:
    return [float(program.weights.array(key).to_numpy()) for key in program.weights if key.endswith(".weight")]


def small(program: Any) -> float:
    return -float(np.abs(weights(program)).sum())


def deadly(program: Any) -> float:
    """Some genomes end their worker."""
    if weights(program)[0] > 3.5:
        if parent_process() is None:
            raise AssertionError("called in the process that drives the run")
        os.kill(os.getpid(), signal.SIGKILL)
    return small(program)


def deadly_for_all(program: Any) -> float:
    os._exit(3)
