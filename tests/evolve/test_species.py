"""Breeding species and their numbers of children, in small examples and random cases."""

from __future__ import annotations

import numpy as np
import pytest
from test_population import evolved

from graphwright.array.population.species import offspring, parents, representatives
from graphwright.evolve.neurons.genomes import genome
from graphwright.evolve.neurons.species import Breeder, Species, breeding
from graphwright.evolve.settings import NEAT


def species_of(best, gained):
    count = len(best)
    return Species(np.arange(count), np.arange(count), np.array(best, float), np.array(gained), 3.0, count)


def test_offspring_counts_of_a_small_example():
    fitness = np.array([3.0, 1.0, 4.0, 4.0, 0.0, 0.0])
    of = np.array([0, 0, 1, 1, 1, 1])
    # sums of shared fitness: 4/2 and 8/4
    assert offspring(fitness, of, np.array([True, True]), 10).tolist() == [5, 5]
    # with negative fitness the ranking stays: shifted by 2, (5 + 3)/2 to (6 + 6)/4, that is 4.57 to 3.43
    assert offspring(fitness - 2 * np.array([0, 0, 0, 0, 1, 1]), of, np.array([True, True]), 8).tolist() == [5, 3]
    assert offspring(fitness, of, np.array([False, True]), 7).tolist() == [0, 7]
    assert offspring(np.zeros(6), of, np.array([True, True]), 5).tolist() == [3, 2]


def test_offspring_counts_sum_to_the_population():
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        count, kinds = int(rng.integers(1, 40)), int(rng.integers(1, 8))
        of = rng.integers(0, kinds, count)
        of = np.unique(of, return_inverse=True)[1]
        kinds = of.max() + 1
        breeds = rng.random(kinds) < 0.7
        breeds[rng.integers(kinds)] = True
        fitness = rng.normal(size=count) * 10.0 ** rng.integers(-3, 4)
        fitness[rng.random(count) < 0.1] = -np.inf
        found = offspring(fitness, of, breeds, count)
        assert found.sum() == count
        assert found.min() >= 0
        assert (found[~breeds] == 0).all()


def test_parents_are_the_best_of_each_species_that_breeds():
    fitness = np.array([1.0, 5.0, 3.0, 4.0, 2.0, 9.0, 5.0])
    of = np.array([0, 0, 0, 1, 1, 2, 0])
    got = parents(fitness, of, np.array([3, 0, 2]), 5, 0.5, 3)
    assert got.species.tolist() == [0, 0, 0, 2, 2]
    assert got.pool_off.tolist() == [0, 2, 2, 3]
    assert got.pool.tolist() == [1, 6, 5]  # of equals the first
    assert got.elite.tolist() == [1, -1, -1, -1, -1]  # only the first species has more than three
    assert parents(fitness, of, np.array([3, 0, 2]), 5, 0.1, 0).elite.tolist() == [-1, -1, -1, 5, -1]


def test_a_stagnant_species_stops_breeding_at_its_limit():
    settings = NEAT(stagnation=15, silence=20)
    two = species_of([5.0, 9.0], [0, 0])
    assert breeding(two, settings, 14, 0).tolist() == [True, True]
    assert breeding(two, settings, 15, 0).tolist() == [False, True]  # the second holds the best
    three = species_of([5.0, 9.0, 7.0], [90, 90, 90])
    assert breeding(three, settings, 100, 20).all()
    assert breeding(three, settings, 100, 21).tolist() == [False, True, True]
    assert three.gained.tolist() == [90, 100, 100]  # they count as new
    assert breeding(three, settings, 101, 22).tolist() == [True, True, True]


def test_improvement_is_recorded_per_species():
    s = species_of([1.0, 2.0], [0, 0])
    s.note(np.array([1.5, 2.0]), 7)
    assert s.best.tolist() == [1.5, 2.0]
    assert s.gained.tolist() == [7, 0]


def test_the_champion_of_a_large_species_is_copied():
    genes, registry = evolved()
    fitness = np.random.default_rng(0).normal(size=40)
    of = np.repeat([0, 1], [35, 5])
    s = Species(of, np.array([3, 8]), np.array([9.0, 8.0]), np.array([0, 0]), 3.0, 9)
    settings = NEAT(population=40)
    children, births, _ = Breeder(settings, 3, 2, 1).children(genes, fitness, s, registry, 1, 0)
    champion = int(np.argmax(fitness[:35]))
    assert genome(children, 0, 3, 2) == genome(genes, champion, 3, 2)
    copies = (births.fitter_parent == champion) & (births.mutation == 0) & (births.other_parent < 0)
    assert copies[0]
    pool = set(np.argsort(-fitness[:35], kind="stable")[:7].tolist()) | {35 + int(np.argmax(fitness[35:]))}
    assert set(births.fitter_parent.tolist()) <= pool  # the best fifth of each


def test_without_species_only_the_best_individual_survives():
    genes, registry = evolved()
    fitness = np.random.default_rng(1).normal(size=40)
    s = Species.founders(genes, NEAT(species=False))
    assert len(s) == 1
    settings = NEAT(population=40, species=False, champions=0, tournament=3, survival=1.0, weights=0.0)
    _, births, _ = Breeder(settings, 3, 2, 1).children(genes, fitness, s, registry, 1, 0)
    assert births.fitter_parent[0] == np.argmax(fitness)
    rank = np.argsort(np.argsort(-fitness))
    assert rank[births.fitter_parent].mean() < 14  # the best of three


def test_representatives_are_members_of_their_species():
    genes, _ = evolved()
    s = Species.founders(genes, NEAT(threshold=1.5))
    found = []
    for generation in range(400):
        chosen = representatives(s.of, len(s), 3, generation)
        assert (s.of[chosen] == np.arange(len(s))).all()
        found.append(chosen)
    large = int(np.argmax(s.sizes))
    seen = np.bincount(np.array(found)[:, large], minlength=40)[s.of == large]
    expected = 400 / s.sizes[large]
    assert ((seen - expected) ** 2 / expected).sum() < 3 * s.sizes[large]  # χ²: each member as often as the others


@pytest.mark.parametrize("target", [3, 40])
def test_a_target_number_of_species_adapts_the_threshold(target):
    genes, _ = evolved()
    settings = NEAT(threshold=1.5, target_species=target)
    s = Species.founders(genes, settings)
    for generation in range(1, 12):
        before = s.threshold
        s = s.next(genes, representatives(s.of, len(s), 0, generation), genes, settings, generation)
        gap = len(s) - target
        assert np.isclose(s.threshold, max(0.3, before + 0.3 * np.sign(gap)))
    assert (s.threshold == 0.3) == (target == 40)  # too many to reach
