"""The tensors of a life by name, and which of them may have changed since the last commit.

A parameter and its moments have changed if the number of its updates moved; anything else if its memory was written.
Where another array, variable or shape is found, or memory was written without an update, the digest decides. So an
expert without tokens costs neither a write nor a read, although the plan of the step writes its memory in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import CPU, NDArray, changes
from graphwright.autograd import Variable
from graphwright.lifecycle.store import Payload
from graphwright.optim.checkpoint import training_variables
from graphwright.optim.optimizer import Optimizer
from graphwright.program.patterns import PatternVariable
from graphwright.program.weights import digest_of

if TYPE_CHECKING:
    from graphwright.optim.training_step import CompiledStep
    from graphwright.program import Program


@dataclass(frozen=True, slots=True)
class Holding:
    """A variable of a life, and the number of updates of its parameter; None if no optimizer owns it."""

    variable: Variable
    updates: Variable | None = None


class Contents(Mapping[str, Holding]):
    """The variables of a program, and of the step that trains it, by name; a tied one under its first name."""

    def __init__(self, p: Program, train: CompiledStep | None) -> None:
        self._train, self._at = train, changes.count
        self._holdings = _holdings(p, train)
        self._hosts: dict[str, np.ndarray] = {}
        counts = {id(h.updates): h.updates for h in self.values() if h.updates is not None}
        number = {key: i for i, key in enumerate(counts)}
        self._counts = [(v, v.data.to_numpy() if v.device == CPU else None) for v in counts.values()]
        self._rows = [(name, h.variable.data.storage, None if h.updates is None else number[id(h.updates)])
                      for name, h in self.items()]  # fmt: skip

    def fresh(self, train: CompiledStep | None) -> bool:
        """Return whether no variable was added, removed or given another array; values may have changed."""
        return self._train is train and self._at == changes.count

    def __getitem__(self, name: str) -> Holding:
        return self._holdings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._holdings)

    def __len__(self) -> int:
        return len(self._holdings)

    def host(self, name: str) -> np.ndarray:
        """Return the bits of a variable as a numpy array, which is the memory of the variable if it is on the CPU."""
        array = self[name].variable.data
        if array.device != CPU:
            return array.to_numpy(bits=True)
        if name not in self._hosts:
            self._hosts[name] = array.to_numpy(bits=True)
        return self._hosts[name]

    def writes(self) -> dict[str, tuple[float, int]]:
        """Return for each name the number of updates of its parameter, and of other writes; of all writes without one.

        If both are as they were, and the array is, then so are its values.
        """
        counts = [float(v.data.to_numpy() if view is None else view) for v, view in self._counts]
        return {name: (-1.0, block.version) if i is None else (counts[i], block.own_writes)
                for name, block, i in self._rows}  # fmt: skip


def _holdings(p: Program, train: CompiledStep | None) -> dict[str, Holding]:
    optimizer = None if train is None else train.optimizer
    scaler = None if train is None else train.settings.scaler
    named, _ = training_variables(_Weights(p), optimizer, scaler, train)
    updates: dict[int, Variable] = {}
    if isinstance(optimizer, Optimizer):
        assigned = {id(p.weights[p.key(p.operands(node)[0].node)]) for node in p.assigns()}
        for _, parameter, state in optimizer.states():
            others = {id(state.moments[name]) for name in optimizer.extra_moments if name in state.moments}
            for variable in (parameter, *state.variables().values()):
                if id(variable) not in others | assigned:
                    updates[id(variable)] = state.steps
    return {name: Holding(variable, updates.get(id(variable))) for name, variable in named.items()}


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of a program, consts included, as a model whose state is tensors."""

    program: Program

    def variables(self) -> dict[str, Variable]:
        return {key: v for key, v in self.program.weights.items() if not isinstance(v, PatternVariable)}


class Tracker:
    """What each variable was at the last commit: the variable, its last change of shape, its array, and its writes."""

    def __init__(self) -> None:
        self._contents: Contents | None = None
        self._arrays: Mapping[str, tuple[Variable, object, NDArray]] = {}
        self._writes: dict[str, tuple[float, int]] = {}

    def changed(self, contents: Contents) -> list[str]:
        """Return the names of what may have changed since the last call, and note its present state."""
        now, before = contents.writes(), self._writes
        found = [name for name, writes in now.items() if before.get(name) != writes]
        if contents is not self._contents:  # else no variable got another array
            arrays = {name: (h.variable, h.variable.lineage, h.variable.data) for name, h in contents.items()}
            written = set(found)
            found = [name for name, new in arrays.items() if name in written or not _same(new, self._arrays.get(name))]
            self._arrays = arrays
        self._contents, self._writes = contents, now
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Forget some names, so that they count as changed: they were not written."""
        for name in names:
            self._writes.pop(name, None)

    def note(self, contents: Contents) -> None:
        """Note the present state as written."""
        self.changed(contents)


def _same(new: tuple[object, ...], old: tuple[object, ...] | None) -> bool:
    return old is not None and all(a is b for a, b in zip(new, old, strict=True))


def payload(
    array: NDArray, reference: str | None = None, *, copy: bool = False, host: np.ndarray | None = None
) -> Payload:
    """Return an array to write; a `copy` does not change while training continues.

    Args:
        reference: see `Promise`.
        host: the bits of the array, if they are known.
    """
    bits = array.to_numpy(bits=True) if host is None else host
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
