"""Moments of parameters while no optimizer holds them: between opening a life and resuming its training.

They follow edits as in a training: those of a removed parameter stay with it for undo, and those of a resized one are
remapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.array import NDArray, Spec, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable
from graphwright.autograd.variable import ShapeChange
from graphwright.lifecycle.store import Fold
from graphwright.optim.optimizer import Optimizer, moment_remap

if TYPE_CHECKING:
    from graphwright.lifecycle.structure import MappedFiles
    from graphwright.program import Program

PREFIX = "optimizer."


@dataclass(slots=True)
class Moments:
    """The optimizer state of one parameter.

    Attributes:
        owner: name of the optimizer.
        variable: the parameter.
        spec, lineage: of the parameter, when the arrays were made.
        arrays: `steps`, moments and `master` by label.
    """

    owner: str
    variable: Variable
    spec: Spec
    lineage: ShapeChange | None
    arrays: dict[str, NDArray]

    def follow(self) -> bool:
        """Remap the arrays to the present shape of the parameter; return whether they changed.

        They are dropped, so that moments begin at 0, if the shape was changed otherwise than by edits of axes.
        """
        v = self.variable
        if self.lineage is v.lineage and self.spec == v.spec:
            return False
        remap = moment_remap(self.spec, self.lineage, v) if isinstance(v, Parameter) else None
        if remap is None:
            self.arrays = {}
        else:
            moved = lambda a: from_numpy(remap(a.to_numpy().copy()))  # noqa: E731
            self.arrays = {name: moved(a) if a.shape else a for name, a in self.arrays.items()}
        self.spec, self.lineage = v.spec, v.lineage
        return True


class HeldMoments:
    """The moments of all parameters of a program, and of parameters that only undo can reach."""

    def __init__(self) -> None:
        self._by_id: dict[int, Moments] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Moments]:
        return iter(self._by_id.values())

    def add(self, owner: str, variable: Variable, arrays: dict[str, NDArray]) -> None:
        """Hold the state of a parameter."""
        self._by_id[id(variable)] = Moments(owner, variable, variable.spec, variable.lineage, arrays)

    def of(self, variable: Variable) -> Moments | None:
        """Return the state of a parameter, in its present shape; None if it has none."""
        found = self._by_id.get(id(variable))
        if found is not None:
            found.follow()
        return found

    def named(self, p: Program) -> dict[str, NDArray]:
        """Return the arrays of all parameters of a program by the names that commits have for them."""
        found: dict[str, NDArray] = {}
        seen: set[int] = set()
        for key, variable in p.weights.items():
            moments = None if id(variable) in seen else self.of(variable)
            seen.add(id(variable))
            if moments is not None:
                found |= {f"{PREFIX}{moments.owner}.{key}.{label}": a for label, a in moments.arrays.items()}
        return found


def split(name: str, p: Program) -> tuple[str, str, str] | None:
    """Return (optimizer, key, label) of the name of a moment of a program's parameter; None for any other name."""
    owner, _, rest = name.removeprefix(PREFIX).partition(".")
    key, _, label = rest.rpartition(".")
    return (owner, key, label) if name.startswith(PREFIX) and p.weights.has_key(key) else None


def read_moments(held: HeldMoments, p: Program, state: Fold, files: MappedFiles) -> set[str]:
    """Hold the moments of a program's parameters that a state has; return their names in the state."""
    rows: dict[str, tuple[str, dict[str, NDArray]]] = {}
    names: set[str] = set()
    for name, home in state.items():
        if (parts := split(name, p)) is not None:
            owner, key, label = parts
            rows.setdefault(key, (owner, {}))[1][label] = files.array(p, home)
            names.add(name)
    for key, (owner, arrays) in rows.items():
        held.add(owner, p.weights.at_key(key), arrays)
    return names


def give_moments(held: HeldMoments, optimizer: Optimizer) -> None:
    """Give an optimizer all moments that are held, of parameters that only undo can reach too."""
    for moments in held:
        moments.follow()
        if isinstance(moments.variable, Parameter) and moments.arrays:
            labels = [label for label in moments.arrays if label not in ("steps", "master", *optimizer.extra_moments)]
            state = optimizer.state_of(moments.variable, labels)
            for label, v in state.variables().items():
                array = moments.arrays.get(label)
                if array is not None and array.spec == v.spec:
                    v.assign(Tensor(array))
