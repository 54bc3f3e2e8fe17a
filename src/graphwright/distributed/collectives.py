"""Collectives of tensors, for code that all ranks run: eager, taped or traced, with gradients.

All ranks call them in the same order with arrays of equal specs, which they compare before values are sent.
Gradients are those of the sum of the losses of all ranks; the loss of a run is the mean over its ranks, so
data-parallel code divides by the number of ranks once. All raise CollectivesDiffer and RankLost when they run, and
UsageError without `setup`.
"""

from __future__ import annotations

from typing import Any

from graphwright.array.world import described, joined, world
from graphwright.autograd import Tensor, active_recorder, as_tensor
from graphwright.errors import UsageError
from graphwright.ops import call


def all_reduce(x: Any) -> Tensor:
    """Return the sum of x over all ranks; its gradient is the sum of the gradients."""
    return _compared("all_reduce", x)


def all_gather(x: Any, axis: int = 0) -> Tensor:
    """Return the x of all ranks, concatenated along an axis in the order of the ranks."""
    return _compared("all_gather", x, axis=axis)


def reduce_scatter(x: Any, axis: int = 0) -> Tensor:
    """Return the block of this rank, of equal blocks along an axis, of the sum of x over all ranks."""
    return _compared("reduce_scatter", x, axis=axis)


def all_to_all(x: Any, split: int = 0, join: int = 0) -> Tensor:
    """Send block r of x along the axis `split` to rank r; concatenate the received blocks along the axis `join`."""
    return _compared("all_to_all", x, split=split, join=join)


def broadcast(x: Any, root: int = 0) -> Tensor:
    """Return the x of rank `root`."""
    return _compared("broadcast", x, root=root)


def reduce(x: Any, root: int = 0) -> Tensor:
    """Return the sum of x over all ranks on rank `root`, and 0 elsewhere."""
    return _compared("reduce", x, root=root)


def send(x: Any, to: int) -> Tensor:
    """Send x to rank `to`, which calls `recv`; return 0, 0-d. Add it to the loss to get the gradient of x back.

    Raises: UsageError if `to` is this rank; RankLost.
    """
    _other("send", to)
    return _run("send", x, to=to)


def recv(x: Any, source: int) -> Tensor:
    """Return what rank `source` sends, an array with the spec of x.

    If x requires a gradient, `backward` sends the gradient of the result to `source`.
    Raises: UsageError if `source` is this rank; RankLost.
    """
    _other("recv", source)
    return _run("recv", x, source=source)


def _other(name: str, rank: int) -> None:
    here = joined(name)
    if here.ranks > 1 and rank == here.rank:
        raise UsageError("a rank sends to another one, not to itself", where=name, got=rank)


def _compared(name: str, x: Any, **attrs: Any) -> Tensor:
    """Run a collective after the ranks have compared their calls, also invalid ones, unless it is recorded."""
    x, group = as_tensor(x), joined(name).group
    if group is None or active_recorder.get() is not None:
        return _run(name, x, **attrs)
    group.compare("a collective", calls=[described(name, [x.spec], attrs)], label=name)
    with group.running():
        return _run(name, x, **attrs)


def _run(name: str, x: Any, **attrs: Any) -> Tensor:
    return call(name, as_tensor(x), ranks=world().ranks, **attrs)
