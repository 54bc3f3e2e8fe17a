"""State: what a program carries from one step to the next, as one thing to run on, reset, keep and go back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from graphwright.autograd import Variable
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.program.program import Program


class Snapshot:
    """Values of variables at one time, in memory of its own.

    Args:
        variables: whose values are kept.
    """

    def __init__(self, variables: Mapping[str, Variable]) -> None:
        self._kept: dict[str, NDArray] = {key: v.data.copy() for key, v in variables.items()}

    def take(self, variables: Mapping[str, Variable]) -> None:
        """Keep the values that they have now, in the memory there is where it fits."""
        for key, variable in variables.items():
            held = self._kept.get(key)
            if held is not None and held.spec == variable.spec and held.device == variable.data.device:
                held.copy_from(variable.data)
            else:
                self._kept[key] = variable.data.copy()

    def put_back(self, variables: Mapping[str, Variable]) -> None:
        """Give the variables these values, in place. Raises: UsageError with nothing changed, for others."""
        wrong = [k for k, v in variables.items() if k not in self._kept or self._kept[k].spec != v.spec]
        if wrong:
            raise UsageError(
                "states were added or took another shape since",
                where=", ".join(wrong[:5]),
                got=", ".join(str(variables[k].spec) for k in wrong[:5]),
                fix="a new State, or undo the edit",
            )
        for key, variable in variables.items():
            variable.own().copy_from(self._kept[key])


class State(Mapping[str, Variable]):
    """The states of a program, and the params that it writes: key -> variable.

    Workspaces and `run(state=...)` take it, so that several sequences of steps can run on one program.

    Args:
        program: whose states.
        own: True for variables of its own, which begin with the present values of the program's; else the program's.
    """

    def __init__(self, program: Program, *, own: bool = False) -> None:
        targets = [program.operands(write)[0].node for write in program.assigns()]
        self._paths = {program.key(n): program.path(n) for n in (*program.states(), *targets)}
        self._variables = {key: program.weights[key] for key in self._paths}
        if own:
            self._variables = {k: Variable(v.data.copy(), name=v.name) for k, v in self._variables.items()}
        self.name = program.name
        self._first = self.snapshot()

    def __getitem__(self, key: str) -> Variable:
        return self._variables[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def snapshot(self) -> Snapshot:
        """The present values, to come back to any number of times."""
        return Snapshot(self._variables)

    def restore(self, mark: Snapshot) -> None:
        """Go back to a snapshot. Raises: UsageError, with nothing changed, if a state has another shape since."""
        mark.put_back(self._variables)

    def reset(self, scope: str = "") -> None:
        """Give states the values they had when this was made.

        Args:
            scope: the path of a state or the beginning of one, "encoder" for `encoder.h`; all by default.
        Raises: UsageError for a scope without a state.
        """
        inside = {k: v for k, v in self._variables.items() if f"{self._paths[k]}.".startswith(f"{scope}.") or not scope}
        if scope and not inside:
            raise UsageError(
                "no state in this scope", where=scope, expected=", ".join(self._paths.values()), got=self.name
            )
        self._first.put_back(inside)

    @contextmanager
    def transaction(self) -> Iterator[State]:
        """Steps inside the block count together: an error takes the states back to where they were."""
        mark = self.snapshot()
        try:
            yield self
        except BaseException:  # an interrupt too
            self.restore(mark)
            raise

    def __repr__(self) -> str:
        return f"State({self.name!r}: {', '.join(self._paths.values()) or 'none'})"
