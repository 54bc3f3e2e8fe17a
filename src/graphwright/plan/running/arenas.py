"""One arena for the plans of a device that do not run at the same time: as large as the largest of them.

A plan for each of twenty lengths would otherwise hold twenty arenas. Values that stay from step to step lie in
variables, so nothing in an arena is needed after a run but what is asked for at once.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

from graphwright.array import Storage

if TYPE_CHECKING:
    from graphwright.plan.running.binding import Binding


class SharedArena:
    """Chunks that workspaces use one after another; they go with the last of them.

    Invariant: one is replaced by a larger one only by who holds them, so by nobody else's run.
    """

    def __init__(self, kernels: Any) -> None:
        self._allocate = kernels.allocate
        self._chunks: list[ref[Storage]] = []
        self._spaces: WeakSet[Binding] = WeakSet()
        self._user: ref[Binding] | None = None
        self._held = Lock()
        self._members = Lock()  # nobody leaves while others are told to let go

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks now."""
        return sum(chunk.nbytes for known in self._chunks if (chunk := known()) is not None)

    def hold(self) -> bool:
        """Keep others out, until `leave`; False if a run has it."""
        return self._held.acquire(blocking=False)

    def enter(self, space: Binding) -> bool:
        """Hold it for a run, until `leave`; False if somebody else's run has it."""
        if not self._held.acquire(False):  # not by `hold`: a call less in every run
            return False
        if self._user is not space.handle:
            last = self._user() if self._user is not None else None
            if last is not None:
                last.end_lease()
            self._user = space.handle
        return True

    def leave(self) -> None:
        """Let others use it."""
        self._held.release()

    def forget(self, space: Binding) -> None:
        """It has an arena of its own from now on."""
        with self._members:
            self._spaces.discard(space)
            if self._user is space.handle:
                self._user = None

    def used_by(self, space: Binding) -> bool:
        """True if nobody used it since this workspace did."""
        return self._user is space.handle

    def chunk(self, space: Binding, i: int, nbytes: int) -> Storage:
        """The i-th chunk, at least so large; to be asked for in turn, by who holds them.

        For a larger one the others bind again.
        """
        with self._members:
            self._spaces.add(space)
            found = self._chunks[i]() if i < len(self._chunks) else None
            if found is not None and found.nbytes >= nbytes:
                return found
            if found is not None:
                for other in self._spaces:
                    if other is not space:
                        other.forget_arena()
        del found  # given back before the larger one is asked for
        made = self._allocate(nbytes)
        self._chunks[i : i + 1] = [ref(made)]
        return made


_arenas: WeakKeyDictionary[Any, SharedArena] = WeakKeyDictionary()


def shared_arena(kernels: Any) -> SharedArena:
    """The arena that plans on a backend share."""
    found = _arenas.get(kernels)
    if found is None:
        found = _arenas[kernels] = SharedArena(kernels)
    return found
