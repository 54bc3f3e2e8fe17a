"""Evolution edits the structure: NEAT on a population in arrays, gradients inside when wanted, champions as Programs.

>>> from graphwright import evolve as ev
>>> result = ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(), seed=7).run(max_generations=300)
>>> result.best.program.to_svg("xor.svg")
"""

from __future__ import annotations

from graphwright.evolve import blocks, mutations, pareto, pictures, program, tasks
from graphwright.evolve.blocks import BlockEvolution, BlockResult, BlockSettings, Member
from graphwright.evolve.errors import (
    EvaluationFailed,
    IdxError,
    LimitTooSmall,
    NoisyFitness,
    ResumeMismatch,
    TaskError,
)
from graphwright.evolve.evolution import Evolution, scalar
from graphwright.evolve.genomes import Genome, Link, Node
from graphwright.evolve.lineage import Birth, Key, Lineage
from graphwright.evolve.result import Individual, Result, Status
from graphwright.evolve.saving import load_best, resume
from graphwright.evolve.settings import NEAT, Hybrid, Train
from graphwright.evolve.tasks import Task

__all__ = [
    "NEAT",
    "Birth",
    "BlockEvolution",
    "BlockResult",
    "BlockSettings",
    "EvaluationFailed",
    "Evolution",
    "Genome",
    "Hybrid",
    "IdxError",
    "Individual",
    "Key",
    "LimitTooSmall",
    "Lineage",
    "Link",
    "Member",
    "Node",
    "NoisyFitness",
    "Result",
    "ResumeMismatch",
    "Status",
    "Task",
    "TaskError",
    "Train",
    "blocks",
    "load_best",
    "mutations",
    "pareto",
    "pictures",
    "program",
    "resume",
    "scalar",
    "tasks",
]
