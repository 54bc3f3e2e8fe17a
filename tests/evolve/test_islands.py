"""Registries of two runs as one: structure written out without numbers is the oracle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from graphwright import evolve as ev
from graphwright.evolve.errors import RegistryConflict
from graphwright.evolve.neurons import genomes as islands
from graphwright.evolve.neurons.genomes import LINK, MANUAL, SPLIT, genome, number, with_room
from graphwright.evolve.neurons.species import Species, distance

WILD = {"population": 30, "grow": 0.2, "split_link": 0.4, "add_link": 0.5, "delays": 0.4}


def wild(seed, task=None):
    run = ev.Evolution(task or ev.tasks.xor(), ev.scalar(), ev.NEAT(**WILD), seed=seed)
    run.run(max_generations=15, target=2.0)
    return run


def written_out(registry):
    """What each number stands for, without numbers."""
    names = []
    for kind, a, b, c in registry.keys[: int(registry.count[0])].tolist():
        if kind == LINK:
            names.append(("link", names[a], names[b], c))
        else:
            names.append(("split", names[a], b) if kind == SPLIT else (kind, a, b, c))
    return names


def test_merged_registry_keeps_existing_numbers():
    mine, other = wild(1), wild(2)
    before = [column.copy() for column in (*mine.registry, *other.registry)]
    merged, numbers = islands.merge(mine.registry, other.registry)
    for column, was in zip((*mine.registry, *other.registry), before, strict=True):
        np.testing.assert_array_equal(column, was)
    ours, theirs, both = written_out(mine.registry), written_out(other.registry), written_out(merged)
    assert both[: len(ours)] == ours
    assert [both[n] for n in numbers] == theirs
    assert len(set(both)) == len(both) == len({*ours, *theirs})
    assert len(set(ours) & set(theirs)) > 20  # the runs did find some of the same, under other numbers
    assert (numbers != np.arange(len(numbers))).sum() > 20
    again, same = islands.merge(merged, other.registry)
    assert int(again.count[0]) == len(both)
    np.testing.assert_array_equal(same, numbers)


def test_distances_are_those_under_one_registry():
    mine, other = wild(3), wild(4)
    ours, theirs = written_out(mine.registry), written_out(other.registry)
    _, numbers = islands.merge(mine.registry, other.registry)
    renumbered = islands.renumbered(other.genes, numbers)
    found = distance(mine.genes, renumbered, ev.NEAT())
    for i in range(0, 30, 3):
        a = {ours[e.id]: e.weight for e in genome(mine.genes, i, 2, 1).links}
        for k in range(0, 30, 4):
            b = {theirs[e.id]: e.weight for e in genome(other.genes, k, 2, 1).links}
            shared = a.keys() & b.keys()
            size = max(len(a), len(b)) if max(len(a), len(b)) >= 20 else 1
            wanted = (len(a) + len(b) - 2 * len(shared)) / size  # excess and disjoint genes have equal weight
            wanted += 0.4 * np.mean([abs(a[s] - b[s]) for s in shared])
            assert found[i, k] == pytest.approx(wanted, rel=1e-5)


def test_renumbered_genomes_compute_the_same():
    mine, other = wild(5), wild(6)
    merged, numbers = islands.merge(mine.registry, other.registry)
    renumbered = islands.renumbered(other.genes, numbers)
    for column in (renumbered.node_id, renumbered.link_id):
        off = renumbered.node_off if column is renumbered.node_id else renumbered.link_off
        assert all((np.diff(column[low:high]) > 0).all() for low, high in pairwise(off))
    scores = other.task.score(other.population(renumbered))
    np.testing.assert_allclose(scores.fitness, other.task.score(other.population(other.genes)).fitness, rtol=1e-4)
    home = Species.founders(renumbered, mine.settings)  # and they breed under the other registry
    children, _, registry = mine._nursery.children(renumbered, scores.fitness, home, merged, 1, 0)
    for i, a, b, delay in zip(children.link_id, children.link_src, children.link_dst, children.link_delay, strict=True):
        assert registry.keys[i].tolist() == [LINK, a, b, delay]


def test_manual_neurons_match_only_with_a_common_past():
    mine = wild(7)
    mine.registry = with_room(mine.registry, 10)
    number(mine.registry, MANUAL, 12345, 0)
    at = int(mine.registry.count[0]) - 1
    _, numbers = islands.merge(mine.registry, mine.registry)
    np.testing.assert_array_equal(numbers, np.arange(at + 1))
    other = wild(8)
    other.registry = with_room(other.registry, 10)
    unknown = number(other.registry, MANUAL, 12345, 0)
    merged, numbers = islands.merge(mine.registry, other.registry)
    assert merged.keys[numbers[unknown]].tolist() == [MANUAL, 12345, 1, 0]


def test_runs_with_other_inputs_cannot_merge():
    with pytest.raises(RegistryConflict, match="different numbers of inputs or outputs"):
        islands.merge(wild(0).registry, wild(0, ev.tasks.parity(3)).registry)
