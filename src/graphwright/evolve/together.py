"""Programs of genomes as one population: all of them on all cases in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphwright.evolve.errors import TaskError
from graphwright.evolve.genomes import columns_of
from graphwright.evolve.program import read

if TYPE_CHECKING:
    from graphwright.program import Program


class PopulationPlan:
    """Programs planned together: their rows lie one behind another, and each runs as it would alone, bit for bit.

    Args:
        programs: of the form of `evolve.program.founder`, of the same inputs and outputs; as they are now.
        threads: genomes are independent, so their number changes no result.
    Raises: TaskError for a program that is no genome, or of other inputs or outputs than the first.

    >>> plan = ev.PopulationPlan([result.best.program, other])
    >>> plan(x).shape  # x [N, inputs]
    (2, N, outputs)
    """

    def __init__(self, programs: Sequence[Program], threads: int = 1) -> None:
        from graphwright.array.population.table import tabulate

        genomes = [read(p) for p in programs]
        if not genomes:
            raise TaskError("a population has somebody in it", got="no programs")
        self.inputs, self.outputs, self.threads = genomes[0].inputs, genomes[0].outputs, threads
        for p, g in zip(programs, genomes, strict=True):
            if (g.inputs, g.outputs) != (self.inputs, self.outputs):
                raise TaskError("programs of one population have the same inputs and outputs", where=p.name,
                                expected=(self.inputs, self.outputs), got=(g.inputs, g.outputs))  # fmt: skip
        self.genes = columns_of(genomes)
        self.table = tabulate(self.genes, self.inputs, self.outputs)

    def __len__(self) -> int:
        return len(self.genes.node_off) - 1

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Answers to the same cases: [N, inputs] to float32 [G, N, outputs]; [N, T, inputs] to [G, N, T, outputs]."""
        from graphwright.array.population.runner import Cases, outputs

        values = self._checked(x, (2, 3))
        answers = outputs(self.table, self.genes, Cases.of(values), self.threads)
        return (answers if values.ndim == 3 else answers[:, :, 0]).copy()

    def each(self, x: np.ndarray) -> np.ndarray:
        """Answers of every genome to cases of its own: [G, N, inputs] to float32 [G, N, outputs]."""
        from graphwright.array.population.runner import Session

        values = self._checked(x, (3,))
        if len(values) != len(self):
            raise TaskError("cases of its own for every genome", expected=len(self), got=len(values))
        session = Session(self.table, self.genes, values.shape[1], self.inputs, self.threads)
        return np.ascontiguousarray(session.step(values))

    def _checked(self, x: np.ndarray, ranks: tuple[int, ...]) -> np.ndarray:
        values = np.asarray(x, np.float32)
        if values.ndim not in ranks or values.shape[-1] != self.inputs:
            raise TaskError(
                "inputs that do not fit", expected=f"[..., {self.inputs}] of rank {ranks}", got=values.shape
            )
        return values
