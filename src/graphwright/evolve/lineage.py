"""Who descends from whom, and by which edits: every living genome, and every champion, back to its founder.

A child has the structure of its mother; a father gives weights of genes that both have. So a line of mothers is a line
of edits, and an edit by hand of somebody who lives is one more. Genes of ancestors are kept as long as somebody
descends from them; the rest of a generation is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array.population.names import MUTATIONS
from graphwright.evolve.genomes import genome, replaced, take
from graphwright.evolve.program import apply, founder
from graphwright.program.draw import written

if TYPE_CHECKING:
    from graphwright.array.population.names import Births
    from graphwright.evolve.genomes import Genome
    from graphwright.files import StrPath
    from graphwright.program import Program

_EVERY = 64  # generations between two sweeps of what nobody descends from


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """An individual: its generation, its place there, and how often it had been edited by hand by then."""

    generation: int
    index: int
    edit: int = 0


@dataclass(frozen=True, slots=True)
class Birth:
    """How an individual came to be.

    Attributes:
        key: of the individual; mother, father: of its parents, or None; who is edited by hand is a mother too.
        mutation: its name, "edit" by hand; site: innovation number of the gene it concerned, or -1.
        species, fitness, metric: as the individual was scored.
        author: "evolution" or "human"; why: what a human said of it.
    """

    key: Key
    fitter_parent: Key | None
    other_parent: Key | None
    mutation: str
    site: int
    species: int
    fitness: float
    metric: float
    author: str = "evolution"
    why: str = ""

    def __str__(self) -> str:
        if self.author == "human":
            return f"generation {self.key.generation}: by hand, {self.why}"
        if self.fitter_parent is None:
            return f"generation {self.key.generation}: founder"
        crossed = f", crossed with {self.other_parent.index}" if self.other_parent is not None else ""
        return f"generation {self.key.generation}: {_what(self.mutation, self.site)}{crossed}"


def said(births: Births, place: int) -> str:
    """By which edit somebody came to be, in words."""
    if births.fitter_parent[place] < 0:
        return "founder"
    return _what(MUTATIONS[births.mutation[place]], int(births.site[place]))


def _what(mutation: str, site: int) -> str:
    return mutation.replace("_", " ") + (f" at {site}" if site >= 0 else "")


@dataclass(frozen=True, slots=True)
class Edited:
    """An edit by hand: of whom, why, the genes after it as a population of one, and what these scored."""

    index: int
    why: str
    genes: Any
    fitness: float
    metric: float


@dataclass(slots=True)
class _Past:
    """One generation: births of all, genes of those that are kept, and edits by hand in their order."""

    births: Births
    species: np.ndarray
    fitness: np.ndarray
    metric: np.ndarray
    kept: np.ndarray
    genes: Any
    edits: list[Edited] = field(default_factory=list, init=False)

    def edited(self, index: int) -> list[Edited]:
        """The edits of one individual."""
        return [e for e in self.edits if e.index == index]


class Lineage:
    """The history of a run.

    Args:
        inputs, outputs: of each genome; names: of the inputs.
    """

    def __init__(self, inputs: int, outputs: int, names: tuple[str, ...] = ()) -> None:
        self.inputs, self.outputs, self.names = inputs, outputs, names
        self.past: list[_Past] = []
        self.pinned: set[Key] = set()

    def __len__(self) -> int:
        return len(self.past)

    def add(self, genes: Any, births: Births, species: np.ndarray, fitness: np.ndarray, metric: np.ndarray) -> None:
        """Enter a generation that was scored; `genes` must not be written any more."""
        everybody = np.arange(len(fitness), dtype=np.int32)
        self.past.append(_Past(births, species.astype(np.int32), fitness, metric, everybody, genes))
        if len(self.past) % _EVERY == 0:
            self.sweep()

    def edit(self, change: Edited) -> Key:
        """Enter an edit of an individual of the last generation; the key of what it became."""
        self.past[-1].edits.append(change)
        return self.latest(len(self.past) - 1, change.index)

    def latest(self, generation: int, index: int) -> Key:
        """An individual after all edits: what its children descend from."""
        return Key(generation, index, len(self.past[generation].edited(index)))

    def living(self) -> Any:
        """Genes of the last generation after all edits."""
        genes = self.past[-1].genes
        for change in self.past[-1].edits:
            genes = replaced(genes, change.index, change.genes)
        return genes

    def sweep(self) -> None:
        """Drop genes that neither a living nor a pinned individual descends from."""
        if not self.past:
            return
        wanted = np.arange(len(self.past[-1].fitness), dtype=np.int32)
        for g in range(len(self.past) - 1, -1, -1):
            past = self.past[g]
            pinned = [k.index for k in self.pinned if k.generation == g]
            wanted = np.union1d(wanted, np.array(pinned, np.int32)).astype(np.int32)
            if 2 * len(wanted) <= len(past.kept):  # what is left over costs less than copying it often
                past.genes = take(past.genes, np.searchsorted(past.kept, wanted))
                past.kept = wanted
                past.edits = [e for e in past.edits if e.index in wanted]
            elif g < len(self.past) - 2 * _EVERY and not pinned:
                break  # nothing changed here, so nothing changes before
            mothers = past.births.fitter_parent[wanted]
            wanted = np.unique(mothers[mothers >= 0])

    def birth(self, key: Key) -> Birth:
        """How an individual came to be. Raises: KeyError for a key that nobody has."""
        g, i = key.generation, key.index
        past = self._of(key)
        if key.edit:
            e = past.edited(i)[key.edit - 1]
            return Birth(key, Key(g, i, key.edit - 1), None, "edit", -1, int(past.species[i]), e.fitness, e.metric,
                         "human", e.why)  # fmt: skip
        fitter_parent, other_parent = int(past.births.fitter_parent[i]), int(past.births.other_parent[i])
        return Birth(
            key,
            self.latest(g - 1, fitter_parent) if fitter_parent >= 0 else None,
            self.latest(g - 1, other_parent) if other_parent >= 0 else None,
            MUTATIONS[past.births.mutation[i]],
            int(past.births.site[i]),
            int(past.species[i]),
            float(past.fitness[i]),
            float(past.metric[i]),
        )

    def path(self, key: Key) -> list[Birth]:
        """Births from the founder to an individual, along mothers."""
        line = [self.birth(key)]
        while (fitter_parent := line[-1].fitter_parent) is not None:
            line.append(self.birth(fitter_parent))
        return line[::-1]

    def genome(self, key: Key) -> Genome:
        """The genes of an individual. Raises: KeyError if they were dropped: nobody lives that descends from it."""
        genes, at = self._kept(key)
        return genome(genes, at, self.inputs, self.outputs)

    def columns(self, key: Key) -> Any:
        """The genes of an individual as a population of one. Raises: KeyError, as `genome`."""
        genes, at = self._kept(key)
        return take(genes, np.array([at]))

    def size(self, key: Key) -> tuple[int, int]:
        """Hidden nodes and open links of an individual. Raises: KeyError, as `genome`."""
        genes, at = self._kept(key)
        nodes, links = genes.node_off[at + 1] - genes.node_off[at], slice(genes.link_off[at], genes.link_off[at + 1])
        return int(nodes) - self.outputs, int(genes.link_open[links].sum())

    def _of(self, key: Key) -> _Past:
        """The generation of an individual. Raises: KeyError for a key that nobody has."""
        g, i = key.generation, key.index
        if 0 <= g < len(self.past) and 0 <= i < len(self.past[g].fitness):
            past = self.past[g]
            if not key.edit or 0 < key.edit <= len(past.edited(i)):
                return past
        raise KeyError(f"nobody has the key {key}: {len(self.past)} generations were scored")

    def _kept(self, key: Key) -> tuple[Any, int]:
        """The genes that are kept of a generation, and the place of an individual there."""
        past = self._of(key)
        at = int(np.searchsorted(past.kept, key.index))
        if at == len(past.kept) or past.kept[at] != key.index:
            raise KeyError(f"no genes of {key} are kept: it has no living descendants and was no champion")
        return (past.edited(key.index)[key.edit - 1].genes, 0) if key.edit else (past.genes, at)

    def replay(self, key: Key, batch: int | str = "B") -> Program:
        """An individual as a Program; its journal is its history: the founder, then an entry per generation or edit."""
        line = self.path(key)
        genomes = [self.genome(birth.key) for birth in line]
        recurrent = any(link.delay for g in genomes for link in g.links)
        p = founder(genomes[0], self.names, 1 if recurrent and isinstance(batch, str) else batch)
        for birth, before, after in zip(line[1:], genomes, genomes[1:], strict=False):
            if before.nodes != after.nodes or before.links != after.links:
                apply(p, before, after, str(birth), birth.author)
        return p

    def to_html(self, path: StrPath | None = None, key: Key | None = None) -> str:
        """The line of an individual (by default the last champion) as a page, also written to `path` if given."""
        from graphwright.evolve.pictures import lineage

        chosen = max(self.pinned) if key is None else key
        text = lineage(self, chosen, f"How {chosen.index} of generation {chosen.generation} came to be")
        return written(text, path)

    def champions(self) -> Iterator[Birth]:
        """Individuals that were the best so far, oldest first."""
        return (self.birth(key) for key in sorted(self.pinned))
