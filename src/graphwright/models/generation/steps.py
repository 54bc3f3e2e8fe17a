"""What runs the steps of a cache: programs derived from the model as it is, and workspaces of their plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from graphwright.array import Device, NDArray, empty
from graphwright.autograd import Variable
from graphwright.models.generation.cached_program import KEYS, RULES, SEEN, Derived
from graphwright.models.generation.draw import Draw
from graphwright.plan import Workspace, plan_for
from graphwright.program import Program

EXECUTOR = "auto"  # of the plans: the VM, which reads weights as they are stored, where it is built


class Fed:
    """A workspace with arrays of its own for the inputs: a step writes to them and allocates none.

    Attributes:
        space: the workspace.
        hosts: input -> its memory.
    """

    def __init__(self, space: Workspace) -> None:
        self.space = space
        self._arrays = [empty(spec.sizes, spec.dtype) for spec in space.plan.inputs.values()]
        self.hosts = {name: a.to_numpy() for name, a in zip(space.plan.inputs, self._arrays, strict=True)}

    def ask(self, row: int, draw: Draw, position: int, seen: np.ndarray) -> None:
        """Have the id at a position drawn; `seen` as `Seen.pairs`."""
        hosts = self.hosts
        hosts[RULES][row], hosts[KEYS][row] = draw.rule.numbers(), draw.keys(position)
        most = hosts[SEEN].shape[1]
        hosts[SEEN][row, : len(seen)] = seen[:most]  # as many as there may be need no end

    def ask_nothing(self) -> None:
        """Have no ids drawn."""
        if KEYS in self.hosts:
            self.hosts[KEYS][:, 2] = -1

    def run(self) -> tuple[NDArray, np.ndarray | None]:
        """Logits for what lies in the inputs; and the ids drawn from them [B], where they are of the last rows only."""
        made = self.space.step(self._arrays)
        return made["logits"], made["ids"].to_numpy() if "ids" in made else None


class Steps:
    """Workspaces of a cache by (last row only, sequences, rows); those of an earlier state of the model are dropped.

    Args:
        program: of the model.
        derive: whether only the last row's logits are wanted -> the program behind the cache.
        device: where steps run.

    Attributes:
        spaces: those there are.
    """

    def __init__(self, program: Program, derive: Callable[[bool], Derived], device: Device) -> None:
        self.program, self.device, self._make = program, device, derive
        self.spaces: dict[tuple[bool, int, int], Fed] = {}
        self._derived: dict[bool, Derived] = {}
        self._version = program.version

    def derived(self, last_only: bool = True) -> Derived:
        """The program behind the cache, of the model as it is."""
        if self._version != self.program.version:
            self._version = self.program.version
            self._derived.clear()
            self.spaces.clear()
        if last_only not in self._derived:
            self._derived[last_only] = self._make(last_only)
        return self._derived[last_only]

    def space(self, last_only: bool, batch: int, rows: int, variables: Mapping[str, Variable]) -> Fed:
        """The workspace of a step, made at its first use over the carried states `variables`."""
        p, key = self.derived(last_only).program, (last_only, batch, rows)
        if key not in self.spaces:
            specs = {p.path(n): p.spec(n).bind({"B": batch, "T": rows}) for n in p.inputs()}
            plan = plan_for(p, specs, freeze=True, executor=EXECUTOR, device=self.device)
            self.spaces[key] = Fed(plan.new_workspace(variables))
        return self.spaces[key]
