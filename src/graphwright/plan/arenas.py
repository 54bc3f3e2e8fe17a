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
    from graphwright.plan.binding import Binding


class SharedArena:
    """A block that workspaces use one after another; it goes with the last of them.

    Invariant: it is replaced by a larger one only by who holds it, so by nobody else's run.
    """

    def __init__(self, kernels: Any) -> None:
        self._allocate = kernels.allocate
        self._block: ref[Storage] | None = None
        self._spaces: WeakSet[Binding] = WeakSet()
        self._user: ref[Binding] | None = None
        self._held = Lock()
        self._members = Lock()  # nobody leaves while others are told to let go

    @property
    def nbytes(self) -> int:
        """Bytes of the block now."""
        block = self._block() if self._block is not None else None
        return 0 if block is None else block.nbytes

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

    def block(self, space: Binding, nbytes: int) -> Storage:
        """The block, at least so large; to be asked for by who holds it. For a larger one the others bind again."""
        with self._members:
            self._spaces.add(space)
            found = self._block() if self._block is not None else None
            if found is not None and found.nbytes < nbytes:
                for other in self._spaces:
                    if other is not space:
                        other.forget_arena()
        if found is None or found.nbytes < nbytes:
            found = None  # given back before the larger one is asked for
            made = self._allocate(nbytes)
            self._block = ref(made)
            return made
        return found


_arenas: WeakKeyDictionary[Any, SharedArena] = WeakKeyDictionary()


def shared_arena(kernels: Any) -> SharedArena:
    """The arena that plans on a backend share."""
    found = _arenas.get(kernels)
    if found is None:
        found = _arenas[kernels] = SharedArena(kernels)
    return found
