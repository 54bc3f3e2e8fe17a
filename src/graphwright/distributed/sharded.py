"""Optimizer states divided among the ranks (ZeRO-1; Rajbhandari et al. 2020): each parameter has one owner.

Whole parameters are divided, not flat memory, so every optimizer works unchanged: the owner runs the ordinary update on
the ordinary gradient. A bucket of gradients is laid out by owner; its sums are scattered, and the new values gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np

from graphwright.array import DType, float32, float64, from_numpy
from graphwright.array.world import World, world
from graphwright.autograd import Parameter, Tensor
from graphwright.distributed.balance import owners
from graphwright.distributed.data_parallel import DataParallel, buckets, nbytes, parts
from graphwright.ops import call
from graphwright.optim.optimizer import Optimizer, wide

if TYPE_CHECKING:
    from graphwright.program.program import Program


class OwnedBucket(NamedTuple):
    """A bucket of parameters by owner.

    Attributes:
        rows: per rank the parameters that it owns.
        length: number of elements of a block: that of the longest row.
    """

    rows: Sequence[Sequence[Parameter]]
    length: int


class ShardedOptimizer(DataParallel):
    """Averages gradients for the owner of each parameter, and gathers the new values.

    Attributes:
        owner: id of a parameter -> its owner, while the program or its history has the parameter: one that an undo
            brings back, or that is no longer frozen, finds its moments where they were.
    """

    same_trace = False
    each_batch = True

    def __init__(self, world: World, bucket_bytes: int, optimizer: Optimizer, source: Program) -> None:
        super().__init__(world, bucket_bytes, optimizer, source)
        self.owner: dict[int, tuple[int, ref[Parameter]]] = {}
        self._buckets: list[OwnedBucket] = []
        self._assign_owners([*optimizer.parameters()])
        optimizer.shards = self
        self._release()

    # -- owners ------------------------------------------------------------------------------------------------------
    def owns(self, p: Parameter) -> bool:
        """Return whether this rank has the state of a parameter."""
        if id(p) not in self.owner:
            self._assign_owners([*self.optimizer.parameters()])
        return self.owner[id(p)][0] == self.world.rank

    def _assign_owners(self, members: Sequence[Parameter]) -> None:
        """Give an owner to each parameter without one."""
        held, loads = self.owner, [0] * self.ranks
        added = [p for p in members if id(p) not in held]
        for p in members:  # which are the same on all ranks; others may live longer on one of them
            if id(p) in held:
                loads[held[id(p)][0]] += nbytes(p)
        for rank, p in zip(owners([*map(nbytes, added)], loads), added, strict=True):
            held[id(p)] = rank, ref(p, partial(_drop, held, id(p)))

    def _release(self) -> None:
        """Drop the states of parameters that other ranks own."""
        for p in [p for p in self.optimizer.state if id(p) in self.owner and not self.owns(p)]:
            del self.optimizer.state[p]

    # -- what is traced ----------------------------------------------------------------------------------------------
    def gradients(self, members: Sequence[Parameter], gate: Tensor | None) -> None:
        """Replace the gradients of own parameters by their means over all ranks, and the others by None."""
        n, me = self.ranks, self.world.rank
        self._note(members)
        self._assign_owners([*self.optimizer.parameters()])
        self._release()
        most = max(self.bucket_bytes, n * max(map(nbytes, members), default=0))  # so that owners have similar shares
        self._buckets = []
        started = []
        for bucket in buckets(members, most):
            rows = [[p for p in bucket if self.owner[id(p)][0] == r] for r in range(n)]
            held = OwnedBucket(rows, max(sum(p.numel() for p in row) for row in rows))
            grads = [p.grad.to(wide(p.dtype)) for row in rows for p in row if p.grad is not None]
            attrs = {"ranks": n, "scale": 1.0 / n, "counts": tuple(len(row) for row in rows)}
            self._buckets.append(held)
            started.append((held, call("reduce_scatter_start", *grads, **attrs)))
        for held, begun in started:
            found = call("reduce_scatter_wait", *begun, rank=me, ranks=n)
            for row in held.rows:
                for p in row:
                    p.grad = None
            for p, g in zip(held.rows[me], parts(found, [p.shape for p in held.rows[me]]), strict=True):
                p.grad = g

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients of all owners."""
        kinds = {wide(p.dtype) for p in self.optimizer.parameters()}
        norm = norm.to(float64 if float64 in kinds else float32)  # also where this rank owns none of them
        return call("all_reduce", norm * norm, ranks=self.ranks).sqrt()

    def found(self, found: Tensor) -> Tensor:
        """Return whether a gradient of any owner is not finite."""
        return (call("all_reduce", found, ranks=self.ranks) > 0.0).to("float32")

    def updated(self, members: Sequence[Parameter], gate: Tensor | None) -> None:
        """Send the new values of own parameters to the other ranks, and assign theirs."""
        n, me = self.ranks, self.world.rank
        gates = () if gate is None else (gate,)
        started = []
        for held in self._buckets:
            kind = next(p.dtype for row in held.rows for p in row)
            own = held.rows[me] or [_nothing(kind)]
            attrs = {"ranks": n, "rank": me, "length": held.length, "gated": gate is not None}
            started.append((held, call("all_gather_start", *own, *gates, **attrs)))
        for held, begun in started:
            found = call("all_gather_wait", begun, ranks=n)
            for r, row in enumerate(held.rows):
                if r == me:
                    continue
                for p, value in zip(row, parts(found, [p.shape for p in row], r * held.length), strict=True):
                    p.assign(value if gate is None else call("where", gate > 0.0, value, p))

    # -- saved trainings ---------------------------------------------------------------------------------------------
    @contextmanager
    def whole(self, optimizer: Optimizer, gather: bool) -> Iterator[None]:
        """See `Shards.whole`: with `gather`, rank 0 has all states; else all ranks do."""
        if gather:
            self._gather()
        alone = gather and self.world.rank != 0
        try:
            optimizer.shards = self if alone else None
            yield
        finally:
            optimizer.shards = self
            self._release()

    def _gather(self) -> None:
        """Copy all states to rank 0."""
        n, me = world().ranks, self.world.rank
        self._assign_owners([*self.optimizer.parameters()])
        for p in self.optimizer.parameters():
            owner = self.owner[id(p)][0]
            if owner == 0 or me not in (0, owner):
                continue
            for variable in self.optimizer.state_of(p).variables().values():
                if me == owner:
                    call("send", variable.detach(), to=0, ranks=n)
                else:
                    variable.assign(call("recv", variable.detach(), source=owner, ranks=n))


def _drop(held: dict[int, Any], key: int, _: object) -> None:
    held.pop(key, None)


def _nothing(kind: DType) -> Tensor:
    """Return an array of no elements."""
    return Tensor(from_numpy(np.zeros(0, kind.numpy), bits=kind if kind.as_bits else None))
