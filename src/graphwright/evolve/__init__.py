"""Evolution of network structure: NEAT on neurons and links, with optional gradient steps, and evolution of layers.

>>> from graphwright import evolve as ev
>>> result = ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(), seed=7).run(max_generations=300)
>>> result.best.program.to_svg("xor.svg")
"""

from __future__ import annotations

from graphwright.evolve import mutations, pareto, pictures, tasks
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
from graphwright.evolve.evolution import Evolution, blocks, load_best, resume, scalar
from graphwright.evolve.layers.candidate import Candidate, CandidateBirth, TrainingGenes
from graphwright.evolve.layers.engine import LayerEvolution, LayerResult
from graphwright.evolve.mutations import mutation
from graphwright.evolve.neurons import genomes as islands
from graphwright.evolve.neurons import program
from graphwright.evolve.neurons.engine import Individual, NeuronEvolution, Result
from graphwright.evolve.neurons.genomes import Genome, LinkGene, NodeGene
from graphwright.evolve.neurons.island_run import IslandEvolution, IslandResult
from graphwright.evolve.neurons.lineage import Birth, IndividualKey, Lineage
from graphwright.evolve.neurons.program import PopulationPlan
from graphwright.evolve.seeds import Seeds, over_seeds
from graphwright.evolve.settings import NEAT, Hybrid, Islands, Layers, Pareto, Train
from graphwright.evolve.tasks import Head, Task

__all__ = [
    "NEAT", "Birth", "Candidate", "CandidateBirth", "EvaluationFailed", "Evolution", "Genome", "Head", "Hybrid",
    "Individual", "IndividualKey", "IslandEvolution", "IslandResult", "Islands", "LayerEvolution", "LayerResult",
    "Layers", "LimitTooSmall", "Lineage", "LinkGene", "NeuronEvolution", "NoGradientPath", "NodeGene",
    "NoisyFitness", "Pareto", "PopulationPlan", "RegistryConflict", "Result", "ResumeMismatch", "Seeds", "Status",
    "Task", "TaskError", "Train", "TrainingGenes", "blocks", "islands", "load_best", "mutation", "mutations",
    "over_seeds", "pareto", "pictures", "program", "resume", "scalar", "tasks",
]  # fmt: skip
