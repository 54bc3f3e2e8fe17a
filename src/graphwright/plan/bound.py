"""A plan bound to memory that its caller writes and reads: what is left to pay for a run is one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import changes

if TYPE_CHECKING:
    from graphwright.plan.workspace import Workspace


class Bound:
    """Inputs and outputs as numpy arrays that stay where they are; calling it runs on what lies in the inputs.

    Attributes:
        inputs: input name -> array to write to; bfloat16 as its uint16 bits. Inputs that nothing reads are left out.
        outputs: output name -> array that every run overwrites.

    It runs as planned, also after an edit of a program. Used by one thread at a time.
    Raises, when called: StalePlan, ComputeError as `Workspace.run`.
    """

    __slots__ = ("_run", "_runs", "_seen", "_space", "inputs", "outputs")

    def __init__(self, space: Workspace) -> None:
        self._space = space
        space.leave_shared()  # what the caller wrote must stay there
        space.pinned = True  # its memory is in others' hands now
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        self._runs, self._seen = space.runs, -1
        self._run: Any = None
        self._look()

    def _look(self) -> None:
        space = self._space
        space.refresh()
        self.inputs, self.outputs = space.memory()
        self._run = space.single
        # without one call that does it all, or where what it relies on has to be looked at, no shortcut is taken
        self._seen = changes.count if self._run is not None and not space.watching else -1

    def __call__(self) -> None:
        """Run."""
        if changes.count == self._seen:
            self._runs.count += 1
            if self._run() is not None:
                raise self._space.failed_single()
            return
        if self._space.stale or self._seen >= 0:
            self._look()
        self._space.execute()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in (*self.inputs.items(), *self.outputs.items()))
        return f"Bound({shapes})"
