"""A plan bound to memory that its caller writes and reads: what is left to pay for a run is one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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

    def __init__(self, space: Workspace) -> None:
        self._space = space
        space.pinned = True  # its memory is in others' hands now
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        self._look()

    def _look(self) -> None:
        self._space.refresh()
        self.inputs, self.outputs = self._space.memory()

    def __call__(self) -> None:
        """Run."""
        space = self._space
        if space.stale:
            self._look()
        space.execute()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in (*self.inputs.items(), *self.outputs.items()))
        return f"Bound({shapes})"
