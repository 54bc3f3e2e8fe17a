"""The contract of a training, which one that resumes it shares: optimizer, options of the step, and the data."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.files import flat_bytes
from graphwright.lifecycle.errors import ResumeMismatch
from graphwright.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from graphwright.optim.training_step import CompiledStep


def contract_of(train: CompiledStep, data: Any, scheduler: object, objective: str) -> dict[str, Any]:
    """Return what a training must share to resume one with these arguments, as JSON values."""
    optimizer, groups = train.optimizer, []
    if isinstance(optimizer, Optimizer):
        groups = [{n: v for n, v in group.options.items() if n != "lr"} for group in optimizer.param_groups]
    return _plain({
        "optimizer": {"class": type(optimizer).__name__, "low": getattr(optimizer, "low", None), "groups": groups},
        "step": train.options(),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "data": data_facts(data),
        "objective": objective,
    })  # fmt: skip


def data_facts(data: Any) -> dict[str, Any]:
    """Return name, digest and number of items of data; a mapping is taken as these facts themselves.

    The digest is that of the arrays of a dataset; None where they are not known.
    """
    if data is None:
        return {}
    if isinstance(data, Mapping):
        return dict(data)
    dataset = getattr(data, "dataset", data)
    arrays = dataset if isinstance(dataset, np.ndarray) else getattr(dataset, "arrays", None)
    arrays = [arrays] if isinstance(arrays, np.ndarray) else arrays
    digest = None
    if isinstance(arrays, list | tuple) and all(isinstance(a, np.ndarray) and a.dtype != object for a in arrays):
        state = blake2b(digest_size=16)
        for array in arrays:
            state.update(f"{array.dtype.str}{array.shape}".encode() + flat_bytes(np.ascontiguousarray(array)))
        digest = state.hexdigest()
    items = len(dataset) if hasattr(dataset, "__len__") else None
    return {"name": type(dataset).__name__, "digest": digest, "items": items}


def check_contract(then: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Check that a training has the contract of the one that a life would resume. Raises: ResumeMismatch."""

    def flat(value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Mapping) and value:
            return {k: v for name, part in value.items() for k, v in flat(part, f"{path}.{name}").items()}
        return {path.lstrip("."): value}

    old, new = flat(then, ""), flat(now, "")
    wrong = [f"{n}: expected {old.get(n)}, got {new.get(n)}" for n in dict.fromkeys((*old, *new))
             if old.get(n) != new.get(n)]  # fmt: skip
    if wrong:
        what = "the training differs from the one that the life would resume:\n  " + "\n  ".join(wrong[:20])
        raise ResumeMismatch(what, where=where, fix="use the same options and data, or begin a life.segment(...)")


def _plain(value: Any) -> Any:
    """Return a JSON value with lists for tuples."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
