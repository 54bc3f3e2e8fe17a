"""Evolution edits the structure: NEAT on a population in arrays, gradients inside when wanted, champions as Programs.

>>> from graphwright import evolve as ev
>>> result = ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(), seed=7).run(max_generations=300)
>>> result.best.program.to_svg("xor.svg")
"""

from __future__ import annotations

from graphwright.evolve import genomes as islands
from graphwright.evolve import mutations, pareto, pictures, program, tasks
from graphwright.evolve.errors import (
    EvaluationFailed,
    LimitTooSmall,
    NoGradientPath,
    NoisyFitness,
    RegistryConflict,
    ResumeMismatch,
    Status,
    TaskError,
)
from graphwright.evolve.evolution import Evolution, blocks, scalar
from graphwright.evolve.genomes import Genome, Link, Node
from graphwright.evolve.layers.member import Member, Recipe
from graphwright.evolve.layers.result import LayerResult
from graphwright.evolve.layers.settings import Layers, Pareto
from graphwright.evolve.lineage import Birth, Key, Lineage
from graphwright.evolve.mutations import mutation
from graphwright.evolve.program import PopulationPlan
from graphwright.evolve.result import Individual, Result
from graphwright.evolve.saving import load_best, resume
from graphwright.evolve.seeds import Seeds, over_seeds
from graphwright.evolve.settings import NEAT, Hybrid, Train
from graphwright.evolve.tasks import Head, Task

__all__ = [
    "NEAT",
    "Birth",
    "EvaluationFailed",
    "Evolution",
    "Genome",
    "Head",
    "Hybrid",
    "Individual",
    "Key",
    "LayerResult",
    "Layers",
    "LimitTooSmall",
    "Lineage",
    "Link",
    "Member",
    "NoGradientPath",
    "Node",
    "NoisyFitness",
    "Pareto",
    "PopulationPlan",
    "Recipe",
    "RegistryConflict",
    "Result",
    "ResumeMismatch",
    "Seeds",
    "Status",
    "Task",
    "TaskError",
    "Train",
    "blocks",
    "islands",
    "load_best",
    "mutation",
    "mutations",
    "over_seeds",
    "pareto",
    "pictures",
    "program",
    "resume",
    "scalar",
    "tasks",
]
