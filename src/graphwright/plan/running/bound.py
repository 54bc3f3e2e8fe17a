"""A plan bound to memory that its caller writes and reads: what is left to pay for a run is one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import changes

if TYPE_CHECKING:
    from graphwright.plan.running.workspace import Workspace


class Bound:
    """Inputs and outputs as numpy arrays that stay where they are; calling it runs on what lies in the inputs.

    Attributes:
        inputs: input name -> array to write to; bfloat16 as its uint16 bits. Inputs that nothing reads are left out.
        outputs: output name -> array that every run overwrites.

    It runs as planned, also after an edit of a program. Used by one thread at a time.
    Raises, when called: StalePlan, ComputeError as `Workspace.run`.
    """

    # the call is an attribute: where all is one native call it is that call itself, with no code of Python before it
    __slots__ = ("__call__", "inputs", "outputs")
    __call__: Callable[[], None]

    def __init__(self, space: Workspace) -> None:
        space.leave_shared()  # what the caller wrote must stay there
        space.pinned = True  # its memory is in others' hands now
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        run = _Run(space, self.inputs, self.outputs)
        self.__call__ = run if run.native is None else run.native.call(run)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in (*self.inputs.items(), *self.outputs.items()))
        return f"Bound({shapes})"


class _Run:
    """A run that looks at everything; the native call comes here when it may not run by itself.

    Attributes:
        native: what the native call runs, or None where there is more than one call to make.
    """

    __slots__ = ("_inputs", "_outputs", "_single", "_space", "native")

    def __init__(self, space: Workspace, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        self._space, self._inputs, self._outputs, self._single = space, inputs, outputs, False
        self.native: Any = None
        self._look()

    def _look(self) -> None:
        space = self._space
        space.refresh()
        for kept, found in zip((self._inputs, self._outputs), space.memory(), strict=True):
            kept.update(found)
        segment = space.single
        # without one call that does it all, or where what it relies on has to be looked at, no shortcut is taken
        self._single = segment is not None and segment.short and not space.watching
        if self._single and self.native is None:
            from graphwright.array.vm.running.segment import Guarded  # loads numba

            self.native = Guarded()
        if self._single:
            self.native.aim(segment, changes.address, changes.count, space.runs.address)
        elif self.native is not None:
            self.native.rest()

    def __call__(self) -> None:
        failed = self.native.failed() if self.native is not None else 0
        if failed:
            raise self._space.failed_single(failed)
        if self._space.stale or self._single:
            self._look()
        self._space.execute()
