"""State: the loop-carried variables of a program, to run on, reset, save and restore together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from graphwright.autograd import Variable
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.program.program import Program


class StateSnapshot:
    """Copies of the values of some variables."""

    def __init__(self, variables: Mapping[str, Variable]) -> None:
        self._values: dict[str, NDArray] = {key: v.data.copy() for key, v in variables.items()}

    def take(self, variables: Mapping[str, Variable]) -> None:
        """Copy the present values of the variables; reuse the memory of earlier copies of equal spec and device."""
        for key, variable in variables.items():
            held = self._values.get(key)
            if held is not None and held.spec == variable.spec and held.device == variable.data.device:
                held.copy_from(variable.data)
            else:
                self._values[key] = variable.data.copy()

    def put_back(self, variables: Mapping[str, Variable]) -> None:
        """Restore the values in place. Raises: UsageError if variables were added or reshaped; then nothing changes."""
        wrong = [k for k, v in variables.items() if k not in self._values or self._values[k].spec != v.spec]
        if wrong:
            got = ", ".join(str(variables[k].spec) for k in wrong[:5])
            expected = ", ".join(str(self._values[k].spec) if k in self._values else "no state" for k in wrong[:5])
            raise UsageError("states were added or reshaped since the snapshot", where=", ".join(wrong[:5]),
                             expected=expected, got=got, fix="create a new State, or undo the edit")  # fmt: skip
        for key, variable in variables.items():
            variable.own().copy_from(self._values[key])


class State(Mapping[str, Variable]):
    """Maps checkpoint key to variable for the states of a program and the params that it assigns.

    Pass it to an executable or to `run(state=...)`; so several independent sequences can run on one program.

    Args:
        program: the program whose states these are.
        own: True creates new variables with the present values; False uses the variables of the program.
    """

    def __init__(self, program: Program, *, own: bool = False) -> None:
        targets = [program.operands(node)[0].node for node in program.assigns()]
        self._paths = {program.key(n): program.path(n) for n in (*program.states(), *targets)}
        found = {key: program.weights[key] for key in self._paths}
        self._variables = {k: Variable(v.data.copy(), name=v.name) for k, v in found.items()} if own else found
        self.name = program.name
        self._first = self.snapshot()

    def __getitem__(self, key: str) -> Variable:
        return self._variables[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def snapshot(self) -> StateSnapshot:
        """Copy the present values, for `restore`."""
        return StateSnapshot(self._variables)

    def restore(self, mark: StateSnapshot) -> None:
        """Restore a snapshot. Raises: UsageError if a state was reshaped since; then nothing changes."""
        mark.put_back(self._variables)

    def reset(self, scope: str = "") -> None:
        """Restore the values that the variables had when this object was created.

        `scope`: path of a state, or a prefix such as "encoder" for `encoder.h`; by default all states are restored.
        Raises: UsageError for a scope without a state.
        """
        inside = {k: v for k, v in self._variables.items() if f"{self._paths[k]}.".startswith(f"{scope}.") or not scope}
        if scope and not inside:
            expected = ", ".join(self._paths.values())
            raise UsageError("no state in this scope", where=self.name, expected=expected, got=scope)
        self._first.put_back(inside)

    @contextmanager
    def transaction(self) -> Iterator[State]:
        """Restore the states from before the block if an error is raised inside it."""
        mark = self.snapshot()
        try:
            yield self
        except BaseException:  # also an interrupt
            self.restore(mark)
            raise

    def __repr__(self) -> str:
        return f"State({self.name!r}: {', '.join(self._paths.values()) or 'none'})"
