"""Seed and state of the default generator under torch's names."""

from __future__ import annotations

from secrets import randbits
from typing import TYPE_CHECKING

import numpy as np

from graphwright.autograd.apply import as_tensor
from graphwright.autograd.random import rng
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor


def initial_seed() -> int:
    """Return the seed of the default generator."""
    return rng.seed


def seed() -> int:
    """Restart the default generator at a seed of the operating system, and return the seed."""
    return rng.manual_seed(randbits(64)).seed


def get_rng_state() -> Tensor:
    """Return seed, step and next stream of the default generator, int64 [3]."""
    return as_tensor(np.array(list(rng.state_dict().values()), np.uint64).view(np.int64))


def set_rng_state(new_state: Tensor) -> None:
    """Restore a result of `get_rng_state`. Raises: UsageError for another tensor."""
    if new_state.shape != (3,) or new_state.dtype.name != "int64":
        raise UsageError("not a state of a generator", where="set_rng_state", expected="int64 [3]", got=new_state.spec)
    start, step, stream = new_state.numpy().view(np.uint64).tolist()
    rng.load_state_dict({"seed": start, "step": step, "stream": stream})
