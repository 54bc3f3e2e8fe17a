"""Every family once with dead memory filled with NaN: a buffer that was given back too early shows in the logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from checkpoints import Made, some_ids

import graphwright as gw
from graphwright.plan import Executable


@pytest.mark.parametrize("executor", ["aten", "vm"])
@pytest.mark.parametrize("name", ["llama", "llama-mlp-bias", "rope-dynamic", "mistral-window", "qwen2", "qwen3"])
def test_logits_are_the_same_under_poison(made: Callable[[str], Made], name: str, executor: str) -> None:
    p = gw.open(made(name).path).program
    feeds = {"ids": some_ids((2, 9)), "positions": np.arange(9)[None].repeat(2, 0)}
    plan = p.compile({n: a.shape for n, a in feeds.items()}, executor=executor)
    plain, poisoned = (Executable(plan, poison=poison).run(feeds)["logits"] for poison in (False, True))
    assert np.isfinite(poisoned.to_numpy()).all()
    assert poisoned.tobytes() == plain.tobytes()
