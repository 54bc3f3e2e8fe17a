"""Batches, candidates and search methods that workers import."""

from __future__ import annotations

import os
import signal
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.structure.searching.candidates import Skips
from graphwright.structure.searching.methods import METHODS
from graphwright.structure.searching.trials import SearchOutcome, Trials


class KilledOnce:
    """The batches of a teacher; the first worker that asks for one ends by SIGKILL, and leaves a file."""

    def __init__(self, teacher: Any, folder: str) -> None:
        self.teacher, self.folder = teacher, folder

    def __call__(self, rng: np.random.Generator) -> Any:
        if parent_process() is not None:
            try:
                Path(self.folder, "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.teacher.batch(rng)


class Half(Skips):
    """Skips of which most add no parameters."""

    def free(self, p: Any, name: str) -> bool:
        return self.names(p).index(name) < 14


def all_open(t: Trials) -> SearchOutcome:
    """The method `gates`, which finds that all candidates are useful."""
    from graphwright.structure.searching import methods

    methods._threshold = lambda probabilities: 0.0
    return METHODS["gates"](t)


def misfit(t: Trials) -> SearchOutcome:
    """Return a program that has none of the chosen candidates."""
    return SearchOutcome(("x -> h2",), t.start.fork(), 0.0)
