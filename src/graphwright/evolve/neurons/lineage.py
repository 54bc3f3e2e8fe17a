"""The lineage of a run: all births, and the genes of the ancestors of every living genome and every champion.

A child has the structure of its fitter parent; the other parent contributes weights of genes that both have. A line of
fitter parents is therefore a sequence of edits, which includes manual edits. The genes of an ancestor are stored as
long as it has living descendants or descendants that were champions; other genes are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from graphwright.array.population.names import MUTATIONS, Births
from graphwright.evolve.neurons.genomes import Genome, genome, replaced, take
from graphwright.evolve.neurons.program import apply, founder
from graphwright.evolve.pictures import lineage_page
from graphwright.files import StrPath
from graphwright.program import Program
from graphwright.program.draw import written

_MISSING: Any = None
_EVERY = 64  # generations between two sweeps that drop genes without living descendants


@dataclass(frozen=True, slots=True, order=True)
class IndividualKey:
    """The identity of an individual: generation, index in the generation, and number of its manual edits so far."""

    generation: int
    index: int
    edit: int = 0


@dataclass(frozen=True, slots=True)
class Birth:
    """The record of the birth and the scores of an individual.

    Attributes:
        key: key of the individual.
        fitter_parent, other_parent: keys of its parents, or None; the parent of a manual edit is the edited individual,
            an immigrant has none here.
        mutation: name of the mutation, "edit" for a manual edit; site: innovation number of the mutated gene, or -1.
        species, fitness, metric: species and scores of the individual.
        author: "evolution"; "human" for a manual edit, "migration" for an immigrant of another island; why: the reason
            of the edit, or the origin of the immigrant.
    """

    key: IndividualKey
    fitter_parent: IndividualKey | None
    other_parent: IndividualKey | None
    mutation: str
    site: int
    species: int
    fitness: float
    metric: float
    author: str = "evolution"
    why: str = ""

    def __str__(self) -> str:
        what = "founder" if self.fitter_parent is None else _mutation_text(self.mutation, self.site)
        crossed = f", crossed with {self.other_parent.index}" if self.other_parent is not None else ""
        texts = {"human": f"manual edit, {self.why}", "migration": f"immigrant from {self.why}"}
        made = texts.get(self.author, f"{what}{crossed}")
        return f"generation {self.key.generation}: {made}"


def birth_text(births: Births, index: int) -> str:
    """Describe the mutation by which genome `index` was created."""
    if births.fitter_parent[index] < 0:
        return "founder"
    return _mutation_text(MUTATIONS[births.mutation[index]], int(births.site[index]))


def _mutation_text(mutation: str, site: int) -> str:
    return mutation.replace("_", " ") + (f" at {site}" if site >= 0 else "")


@dataclass(frozen=True, slots=True)
class ManualEdit:
    """A manual edit: index of the individual, reason, edited genes as a population of one genome, and their scores.

    The replacement of an individual by an immigrant of another island has the author "migration".
    """

    index: int
    why: str
    genes: Any
    fitness: float
    metric: float
    author: str = "human"


@dataclass(slots=True)
class PastGeneration:
    """A scored generation: all births, the genes of the individuals with indices `stored`, and all manual edits."""

    births: Births
    species: np.ndarray
    fitness: np.ndarray
    metric: np.ndarray
    stored: np.ndarray
    genes: Any
    edits: list[ManualEdit] = field(default_factory=list, init=False)

    def edited(self, index: int) -> list[ManualEdit]:
        """Return the manual edits of one individual, oldest first."""
        return [e for e in self.edits if e.index == index]


def _only(past: PastGeneration, indices: set[int]) -> PastGeneration:
    """Return a copy of a generation that stores the genes of few individuals."""
    stored = np.array(sorted(indices), np.int32)
    twin = replace(past, stored=stored, genes=take(past.genes, np.searchsorted(past.stored, stored)))
    twin.edits = past.edits
    return twin


class Lineage:
    """The births and stored genes of all generations of a run.

    Args:
        inputs, outputs: numbers of inputs and outputs of each genome.
        names: names of the inputs.
    """

    def __init__(self, inputs: int, outputs: int, names: tuple[str, ...] = ()) -> None:
        self.inputs, self.outputs, self.names = inputs, outputs, names
        self.past: list[PastGeneration] = []
        self.pinned: set[IndividualKey] = set()
        self.sweeping = True
        """False if the owner calls `sweep_if_due` itself, since past generations are missing in the meantime."""

    def __len__(self) -> int:
        return len(self.past)

    def add(self, genes: Any, births: Births, species: np.ndarray, fitness: np.ndarray, metric: np.ndarray) -> None:
        """Add a scored generation; `genes` must not be modified afterwards."""
        everyone = np.arange(len(fitness), dtype=np.int32)
        self.past.append(PastGeneration(births, species.astype(np.int32), fitness, metric, everyone, genes))
        if self.sweeping:
            self.sweep_if_due(1)

    def sweep_if_due(self, added: int) -> None:
        """Call `sweep` if one of the last `added` generations makes it due."""
        if len(self.past) // _EVERY > (len(self.past) - added) // _EVERY:
            self.sweep()

    def recent(self, keys: Iterable[IndividualKey | None]) -> Lineage:
        """Return a copy for a process that continues the run: with the last generation, and with all about `keys`."""
        twin, wanted = Lineage(self.inputs, self.outputs, self.names), dict[int, set[int]]()
        for key in (key for key in keys if key is not None):
            wanted.setdefault(key.generation, set()).add(key.index)
            wanted.setdefault(key.generation - 1, set())  # of the parents
        wanted.setdefault(len(self.past) - 1, set())
        twin.past = [_only(past, wanted[g]) if g in wanted else _MISSING for g, past in enumerate(self.past)]
        twin.pinned, twin.sweeping = set(self.pinned), self.sweeping
        return twin

    def since(self, generation: int) -> Lineage:
        """Return a copy without the generations before `generation`, which a process has that sent `recent`."""
        twin = Lineage(self.inputs, self.outputs, self.names)
        twin.past = [_MISSING] * generation + self.past[generation:]
        twin.pinned, twin.sweeping = set(self.pinned), self.sweeping
        return twin

    def extend(self, newer: Lineage) -> None:
        """Add the generations by which `newer`, a copy that was continued, is longer."""
        self.past += newer.past[len(self.past) :]
        self.pinned = newer.pinned

    def edit(self, change: ManualEdit) -> IndividualKey:
        """Add a manual edit of an individual of the last generation; return the key of the result."""
        self.past[-1].edits.append(change)
        return self.latest(len(self.past) - 1, change.index)

    def latest(self, generation: int, index: int) -> IndividualKey:
        """Return the key of an individual after all its manual edits; children descend from that version."""
        return IndividualKey(generation, index, len(self.past[generation].edited(index)))

    def living(self) -> Any:
        """Return the genes of the last generation after all manual edits."""
        genes = self.past[-1].genes
        for change in self.past[-1].edits:
            genes = replaced(genes, change.index, change.genes)
        return genes

    def sweep(self, since: int = 0) -> None:
        """Drop the genes of individuals that are neither alive nor champions and have no such descendants.

        A generation keeps all genes as long as more than half of them are needed; so do those before `since`.
        """
        if not self.past:
            return
        wanted = np.arange(len(self.past[-1].fitness), dtype=np.int32)
        for g in range(len(self.past) - 1, since - 1, -1):
            past = self.past[g]
            pinned = [k.index for k in self.pinned if k.generation == g]
            wanted = np.union1d(wanted, np.array(pinned, np.int32)).astype(np.int32)
            if 2 * len(wanted) <= len(past.stored):  # unused genes cost less than frequent copies
                past.genes = take(past.genes, np.searchsorted(past.stored, wanted))
                past.stored = wanted
                past.edits = [e for e in past.edits if e.index in wanted]
            elif g < len(self.past) - 2 * _EVERY and not pinned:
                break  # nothing changed here, so nothing changes in earlier generations
            parents = past.births.fitter_parent[wanted]
            wanted = np.unique(parents[parents >= 0])

    def birth(self, key: IndividualKey) -> Birth:
        """Return the birth of an individual. Raises: KeyError if the key is unknown."""
        g, i = key.generation, key.index
        past = self._of(key)
        if key.edit:
            e = past.edited(i)[key.edit - 1]
            edited, species = IndividualKey(g, i, key.edit - 1), int(past.species[i])
            parent = None if e.author == "migration" else edited
            return Birth(key, parent, None, "edit", -1, species, e.fitness, e.metric, e.author, e.why)
        b = past.births
        parents = (int(b.fitter_parent[i]), int(b.other_parent[i]))
        fitter, other = (self.latest(g - 1, parent) if parent >= 0 else None for parent in parents)
        mutation, scores = MUTATIONS[b.mutation[i]], (float(past.fitness[i]), float(past.metric[i]))
        return Birth(key, fitter, other, mutation, int(b.site[i]), int(past.species[i]), *scores)

    def path(self, key: IndividualKey) -> list[Birth]:
        """Return the births from the founder to an individual, along fitter parents."""
        line = [self.birth(key)]
        while (parent := line[-1].fitter_parent) is not None:
            line.append(self.birth(parent))
        return line[::-1]

    def genome(self, key: IndividualKey) -> Genome:
        """Return the genes of an individual. Raises: KeyError if the genes were dropped (see `sweep`)."""
        return genome(*self._stored(key), self.inputs, self.outputs)

    def columns(self, key: IndividualKey) -> Any:
        """Return the genes of an individual as a population of one genome. Raises: KeyError as `genome` does."""
        genes, at = self._stored(key)
        return take(genes, np.array([at]))

    def size(self, key: IndividualKey) -> tuple[int, int]:
        """Return the numbers of hidden nodes and open links of an individual. Raises: KeyError as `genome` does."""
        genes, at = self._stored(key)
        nodes, links = genes.node_off[at + 1] - genes.node_off[at], slice(genes.link_off[at], genes.link_off[at + 1])
        return int(nodes) - self.outputs, int(genes.link_open[links].sum())

    def _of(self, key: IndividualKey) -> PastGeneration:
        g, i = key.generation, key.index
        if 0 <= g < len(self.past) and 0 <= i < len(self.past[g].fitness):
            past = self.past[g]
            if not key.edit or 0 < key.edit <= len(past.edited(i)):
                return past
        raise KeyError(f"no individual has the key {key}; {len(self.past)} generations were scored so far")

    def _stored(self, key: IndividualKey) -> tuple[Any, int]:
        """Return the population that stores the genes of an individual, and its index there."""
        past = self._of(key)
        at = int(np.searchsorted(past.stored, key.index))
        if at == len(past.stored) or past.stored[at] != key.index:
            raise KeyError(f"the genes of {key} were dropped: neither it nor a descendant is alive or was a champion")
        return (past.edited(key.index)[key.edit - 1].genes, 0) if key.edit else (past.genes, at)

    def replay(self, key: IndividualKey, batch: int | str = "B") -> Program:
        """Rebuild an individual as a Program whose journal has one entry for the founder and one per later change."""
        line = self.path(key)
        genomes = [self.genome(birth.key) for birth in line]
        recurrent = any(link.delay for g in genomes for link in g.links)
        p = founder(genomes[0], self.names, 1 if recurrent and isinstance(batch, str) else batch)
        for birth, before, after in zip(line[1:], genomes, genomes[1:], strict=False):
            if before.nodes != after.nodes or before.links != after.links:
                apply(p, before, after, str(birth), "human" if birth.author == "human" else "evolution")
        return p

    def to_html(self, path: StrPath | None = None, key: IndividualKey | None = None) -> str:
        """Draw an individual (default: the last champion) and its ancestors as HTML; write it to `path`, if given."""
        chosen = max(self.pinned) if key is None else key
        title = f"Ancestors of individual {chosen.index} of generation {chosen.generation}"
        return written(lineage_page(self, chosen, title), path)

    def champions(self) -> Iterator[Birth]:
        """Return an iterator over the births of all champions, oldest first."""
        return (self.birth(key) for key in sorted(self.pinned))
