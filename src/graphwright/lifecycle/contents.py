"""The tensors of a life by name, and which of them may have changed since the last commit.

A parameter and its moments have changed if the number of its updates moved; anything else if its memory was written.
Where another array, variable or shape is found, or memory was written without an update, the digest decides. So an
expert without tokens costs neither a write nor a read, although the plan of the step writes its memory in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray
from graphwright.autograd import Variable
from graphwright.lifecycle.store import Payload
from graphwright.optim.checkpoint import optimizer_states, state_variables, training_variables
from graphwright.optim.optimizer import Optimizer
from graphwright.program.weights import digest_of

if TYPE_CHECKING:
    from graphwright.optim.training_step import CompiledStep
    from graphwright.program import Program


@dataclass(frozen=True, slots=True)
class Holding:
    """A variable of a life; `updates` counts the updates of its parameter, and is None if no optimizer owns it."""

    variable: Variable
    updates: float | None = None


def contents(p: Program, train: CompiledStep | None) -> dict[str, Holding]:
    """Return the variables of a program, and of the step that trains it, by name; a tied one under its first name."""
    optimizer = None if train is None else train.optimizer
    scaler = None if train is None else train.settings.scaler
    named, _ = training_variables(_Weights(p), optimizer, scaler, train)
    updates: dict[int, float] = {}
    if isinstance(optimizer, Optimizer):
        assigned = {id(p.weights[p.key(p.operands(node)[0].node)]) for node in p.assigns()}
        for parameter, state in optimizer_states(optimizer):
            others = {id(state.moments[name]) for name in optimizer.extra_moments if name in state.moments}
            count = float(state.steps.data.to_numpy())
            for variable in (parameter, *state_variables(state).values()):
                if id(variable) not in others | assigned:
                    updates[id(variable)] = count
    return {name: Holding(variable, updates.get(id(variable))) for name, variable in named.items()}


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of a program, consts included, as a model whose state is tensors."""

    program: Program

    def variables(self) -> dict[str, Variable]:
        return dict(self.program.weights.items())


@dataclass(frozen=True, slots=True)
class _Seen:
    variable: Variable
    lineage: object
    array: NDArray
    updates: float | None
    writes: int

    @classmethod
    def of(cls, holding: Holding) -> _Seen:
        v = holding.variable
        storage = v.data.storage
        writes = storage.version if holding.updates is None else storage.own_writes
        return cls(v, v.lineage, v.data, holding.updates, writes)

    def same(self, other: _Seen) -> bool:
        same = self.variable is other.variable and self.lineage is other.lineage and self.array is other.array
        return same and self.updates == other.updates and self.writes == other.writes


class Tracker:
    """What each variable was at the last commit."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def changed(self, holdings: Mapping[str, Holding]) -> list[str]:
        """Return the names of what may have changed since the last call, and note its present state."""
        now = {name: _Seen.of(holding) for name, holding in holdings.items()}
        found = [name for name, seen in now.items() if name not in self._seen or not seen.same(self._seen[name])]
        self._seen = now
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Forget some names, so that they count as changed: they were not written."""
        for name in names:
            self._seen.pop(name, None)

    def note(self, holdings: Mapping[str, Holding]) -> None:
        """Note the present state as written."""
        self.changed(holdings)


def payload(array: NDArray, reference: str | None = None, *, copy: bool = False) -> Payload:
    """Return an array to write; a `copy` does not change while training continues."""
    bits = array.to_numpy(bits=True)
    data = np.array(bits, order="C") if copy else np.ascontiguousarray(bits)
    return Payload(array.dtype.safetensors, array.shape, data, _digest(array, data), reference)


def _digest(array: NDArray, data: np.ndarray) -> Callable[[], str]:
    spec = array.spec
    return lambda: digest_of(spec, data)


class Digests:
    """The digests of arrays that undo data holds, computed once each; such arrays are never written."""

    def __init__(self, known: Mapping[NDArray, str] | None = None) -> None:
        self._known: dict[int, tuple[NDArray, str]] = {id(a): (a, d) for a, d in (known or {}).items()}

    def __call__(self, array: NDArray) -> str:
        """Return the digest of an array."""
        if id(array) not in self._known:
            self._known[id(array)] = (array, payload(array).digest())
        return self._known[id(array)][1]

    def keep(self, arrays: Iterable[NDArray]) -> None:
        """Forget all arrays but these."""
        kept = {id(array) for array in arrays}
        self._known = {number: pair for number, pair in self._known.items() if number in kept}


def plain(value: Any) -> Any:
    """Return a JSON value with lists for tuples."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
