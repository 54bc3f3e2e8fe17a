"""The plain KV cache: contiguous rows per attention node, carried as states of a program derived from the model's.

A cache knows which structure and weights its rows were computed with; an edit upstream of them makes it stale, another
edit does not, and an undo makes it good again. Rows past the length are zero: a NaN there would pass every mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np

from graphwright.array import CPU, Device, NDArray, from_numpy
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.models.generation.cached_program import LENGTH, derived_for
from graphwright.models.generation.draw import Draw
from graphwright.models.generation.memory import fill, filled
from graphwright.models.generation.rows import Rows, Watch
from graphwright.models.generation.sampling import need
from graphwright.models.generation.steps import Steps
from graphwright.program import Program


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A place in a sequence to come back to: its ids, the logits behind them, and of which state of the model."""

    tokens: np.ndarray
    logits: np.ndarray | None
    model: object

    @property
    def length(self) -> int:
        """Rows at that time."""
        return self.tokens.shape[1]

    def release(self) -> None:
        """Nothing is held."""


class Cache(Rows):
    """Contiguous keys and values of `batch` sequences of equal length.

    Attributes:
        variables: the carried states by key.
        device: where they lie, and steps run.
        steps: what runs them.
    """

    def __init__(self, program: Program, batch: int, capacity: int, device: Device = CPU) -> None:
        need("batch", batch)
        need("tokens", capacity)
        if batch < 1 or capacity < 1:
            raise UsageError("a cache has at least one sequence and one row", got=f"batch {batch}, capacity {capacity}")
        super().__init__(program, batch, Watch(program))
        self._capacity, self.device = capacity, device
        self.variables: dict[str, Variable] = {}
        self.steps = Steps(program, lambda last_only: derived_for(program, capacity, last_only), device)
        try:
            self._start()
        except MemoryError as error:
            raise UsageError("there is no memory for so many rows", where="tokens", got=str(error)) from error
        self.fingerprints = dict(self._current())

    @property
    def capacity(self) -> int:
        """Rows it holds."""
        return self._capacity

    @property
    def length(self) -> int:
        """Rows filled."""
        return int(self.variables[LENGTH].item())

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(v.data.nbytes for v in self.variables.values())

    def _run(self, ids: np.ndarray, all_logits: bool, draws: Several[Draw]) -> tuple[NDArray, np.ndarray | None]:
        length, rows = self.length, ids.shape[1]
        fed = self.steps.space(not all_logits, self.batch, rows, self.variables)
        fed.hosts["ids"][...] = ids
        if "positions" in fed.hosts:
            fed.hosts["positions"][...] = np.arange(length, length + rows)
        fed.ask_nothing()
        for row, draw in enumerate(() if all_logits else draws):
            self.ask(fed, row, ids[row], draw, row)
        return fed.run()

    def _fits(self) -> bool:
        sizes, states = {"B": self.batch}, self.steps.derived().states
        return all(k in self.variables and self.variables[k].spec == s.bind(sizes) for k, s in states.items())

    def _start(self) -> None:
        specs = {k: s.bind({"B": self.batch}) for k, s in self.steps.derived().states.items()}
        if {k: v.spec for k, v in self.variables.items()} != specs:
            self.steps.spaces.clear()
            self.variables = {k: Variable(filled(s, 0.0, self.device), name=k) for k, s in specs.items()}

    # -- going back --------------------------------------------------------------------------------------------------
    def cut(self, length: int) -> None:
        """As `Rows.cut`."""
        for key, variable in self.variables.items():
            if key != LENGTH:
                fill(variable.own()[:, :, length:], 0.0)
        self._regrow(length)
        self._forget(length)

    def _row(self, at: int) -> Iterator[NDArray]:
        for key, variable in self.variables.items():
            if key != LENGTH:
                yield variable.own()[:, :, at]

    def _regrow(self, length: int) -> None:
        self.variables[LENGTH].own().copy_from(from_numpy(np.asarray(length, np.int64)))

    def snapshot(self) -> Snapshot:
        """A place to come back to; costs the ids, not the rows."""
        return Snapshot(self.tokens, self._logits, self._watch.mark)

    def restore(self, mark: Snapshot) -> None:
        """Go back to a snapshot, any number of times. Raises: UsageError if its rows were overwritten since."""
        if not isinstance(mark, Snapshot):
            raise UsageError("not a snapshot", got=type(mark).__name__, expected="what cache.snapshot() gave")
        if not np.array_equal(self.tokens[:, : mark.length], mark.tokens):
            raise UsageError(
                "rows of this snapshot were dropped or overwritten",
                expected=f"{mark.length} rows",
                got=f"{self.length} rows",
                fix="cache.reset(); model.prefill(cache, mark.tokens)",
            )
        self.truncate(mark.length)
        self._logits, self._logits_of = mark.logits, mark.model
