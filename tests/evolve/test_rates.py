"""How often each mutation is drawn, against the tables written out: 10⁵ draws, within three standard errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population.names import MUTATIONS as SCALAR
from graphwright.array.population.species import Parents
from graphwright.errors import UsageError
from graphwright.evolve import mutations as m
from graphwright.evolve.layers.candidate import GENES
from graphwright.evolve.layers.engine import tried
from graphwright.evolve.neurons.genomes import LINK, SPLIT, columns_of, minimal, number
from graphwright.evolve.neurons.species import Breeder

DRAWS = 100_000
ALWAYS = {
    "insert_layer": (0.20, 0.06), "insert_node": (0.10, 0.08), "remove_layer": (0.08, 0.08),
    "replace_activation": (0.04, 0.08), "widen": (0.12, 0.10), "narrow": (0.08, 0.10), "layer_attr": (0.05, 0.05),
    "learning_rate": (0.05, 0.15), "optimizer": (0.02, 0.08), "loss": (0.02, 0.02), "add_skip": (0.06, 0.04),
    "remove_skip": (0.04, 0.04),
}  # fmt: skip
SEQUENCES = {
    "cell_type": (0.10, 0.10), "insert_cell": (0.10, 0.06), "add_delay_link": (0.08, 0.06),
    "remove_delay_link": (0.04, 0.04),
}  # fmt: skip
IMAGES = {"kernel": (0.10, 0.06), "stride": (0.10, 0.06)}
LINKS = {"split_link": (0.03, 0.03), "add_link": (0.05, 0.05)}
"""Mutation -> its weight while a run explores, and while it refines."""


def within(count, p, draws=DRAWS):
    """Whether a count of draws is within three standard errors of a probability."""
    return abs(count / draws - p) <= 3 * math.sqrt(p * (1 - p) / draws)


def traced(kind):
    """A program in which all mutations of its kind have a site."""
    gw.manual_seed(0)
    n = gw.nn
    layers = {
        "vectors": [n.Linear(4, 6), n.Tanh(), n.Dropout(0.1), n.Linear(6, 2)],
        "images": [n.Conv2d(1, 4, 3, padding=1), n.ReLU(), n.Dropout(0.1), n.AdaptiveAvgPool2d(1), n.Flatten(),
                   n.Linear(4, 2)],
        "sequences": [n.Linear(4, 6), n.Tanh(), n.Dropout(0.1), n.Linear(6, 2)],
    }  # fmt: skip
    shape = {"vectors": (3, 4), "images": (3, 1, 6, 6), "sequences": (3, 5, 4)}[kind]
    p, rng = gw.trace(n.Sequential(*layers[kind]), gw.zeros(*shape)), np.random.default_rng(0)
    with p.edit("something to remove") as e:
        last = m.linears(p)[-1]
        m.insert_layer(e, last, rng, 3)
        m.add_skip(e, last, rng)
        if kind == "sequences":
            m.insert_cell(e, last, rng, "gru", 3)
            m.add_delay_link(e, last, rng)
    return p


def start():
    b = gw.Builder()
    w = b.param("out.weight", np.zeros((1, 2), np.float32))
    b.output(b.linear(b.input("x", ("B", 2)), w, name="out"), "y")
    return b.build()


def layers(**settings) -> Any:
    return ev.Evolution(ev.tasks.two_moons(60), ev.blocks(start()), ev.Layers(population=2, steps=0, **settings))


@pytest.mark.parametrize("late", [0, 1], ids=["explore", "refine"])
def test_layer_mutations_are_sampled_by_the_two_weight_tables(late):
    run = layers()
    rates = run.rates(0.4 if late else 0.399)
    names, weights = list(rates), np.array(list(rates.values()))
    assert rates == {k: v[late] for k, v in (ALWAYS | SEQUENCES | IMAGES | LINKS).items()}
    drawn = tried(weights, np.random.default_rng(0), DRAWS)
    for kind, table in (("vectors", {}), ("images", IMAGES), ("sequences", SEQUENCES)):
        p = traced(kind)
        sited = [name for name in names if name in GENES or len(m.MUTATIONS[name].sites(p))]
        expected = {k: v[late] for k, v in (ALWAYS | table | LINKS).items() if k in sited}
        assert {*ALWAYS, *table} <= {*sited} == {*expected}  # renormalised over those that have a site
        can = np.isin(names, sited)
        first = drawn[np.arange(DRAWS), can[drawn].argmax(1)]
        for k, name in enumerate(names):
            p_ = expected.get(name, 0.0) / sum(expected.values())
            assert within((first == k).sum(), p_), (kind, name)


def test_child_gets_the_first_possible_mutation(monkeypatch):
    run = layers()
    run.run(max_generations=1, target=2.0)
    names = list(run.rates(0.0))
    order = ["kernel", "remove_skip", "optimizer", "widen"]  # neither images nor skips are there
    ranks = np.array([[names.index(n) for n in (*order, *(n for n in names if n not in order))]])
    monkeypatch.setattr("graphwright.evolve.layers.engine.tried", lambda *a: ranks)
    child = run._child(1, 0.0)
    assert (child.change[0], child.newborn.training.optimizer) == ("optimizer", "sgd")


def test_rates_can_be_set_by_name():
    run = layers(rates={"widen": 3.0, "insert_layer": 0, "loss": 1})
    rates = run.rates(0.9)
    assert (rates["widen"], rates["loss"], "insert_layer" in rates) == (3.0, 1.0, False)
    assert rates["narrow"] == 0.10
    assert ev.Layers.from_json(run.settings.to_json()) == run.settings
    with pytest.raises(UsageError, match="unknown mutations") as error:
        layers(rates={"wide": 1.0})
    assert error.value.got == "wide"
    for wrong in (-1.0, math.nan, math.inf, "often"):
        with pytest.raises(ValueError, match="out of range"):
            ev.Layers(rates={"widen": wrong})  # pyright: ignore[reportArgumentType]


def test_run_explores_for_two_fifths_then_refines(monkeypatch):
    run, real, seen = layers(), ev.Evolution(ev.tasks.two_moons(60), ev.blocks(start()), ev.Layers()).rates, []
    monkeypatch.setattr(run, "rates", lambda done: seen.append(round(done, 9)) or real(done))
    run.run(max_generations=6, target=2.0)
    assert np.allclose(seen, np.repeat(np.arange(1, 6) / 6, 2))
    seen.clear()
    again = layers()
    monkeypatch.setattr(again, "rates", lambda done: seen.append(done) or real(done))
    again.run(max_generations=100, max_evaluations=9, target=2.0)  # the nearer limit says how far it is
    assert np.allclose(seen, np.repeat([1, 3, 5, 7], 2) / 9)


@pytest.mark.parametrize("stagnation", [0, 20])
def test_stagnation_leaves_only_structural_mutations(stagnation):
    run = layers(stagnation=stagnation)
    table = dict(m.MUTATIONS)
    table["polish"] = m.MutationKind("polish", m.linears, lambda e, site, rng: None, 1.0, 1.0, structural=False)
    for done in (0.0, 0.9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("graphwright.evolve.layers.engine.MUTATIONS", table)
            for silent in range(stagnation + 4):  # children of generation `gained + silent`
                run.gained, run.generation = 7, 7 + silent
                drawn = run.rates(done)
                soft = {*GENES, "polish"} & set(drawn)
                assert soft == ({*GENES, "polish"} if silent <= stagnation else set())
                assert "widen" in drawn
            run.gained = run.generation  # the next gain
            assert "polish" in run.rates(done)


def test_layers_widen_by_a_quarter_a_half_or_double():
    p, sizes = traced("vectors"), []
    axis = next(a for a in m.widths(p) if p.axes()[a].size == 6)

    class Edit:
        program = p
        grow = staticmethod(lambda site, more, seed: sizes.append(more))

    rng, draws = np.random.default_rng(0), 5000
    for _ in range(draws):
        m.widen(Edit, axis, rng)  # pyright: ignore[reportArgumentType]
    for more, share in ((round(6 * 0.25), 0.4), (3, 0.4), (6, 0.2)):
        assert within(sizes.count(more), share, draws)


def test_mutations_of_neurons_are_tried_in_order_and_one_is_made():
    """split_link 0.03, then add_link 0.05, then weights 0.8; a child of the first two keeps its weights."""
    settings = ev.NEAT(population=DRAWS, output="tanh", mutate_only=1.0)
    (registry,) = minimal(2, 1, 1, settings, 0)[1:]
    split = number(registry, SPLIT, 4)
    into, out = number(registry, LINK, 0, split), number(registry, LINK, split, 3)
    links = [(4, 0, 3), (5, 1, 3), (6, 2, 3), (into, 0, split), (out, split, 3)]
    parent = ev.Genome(2, 1, (ev.NodeGene(3, "tanh"), ev.NodeGene(split, "tanh")),
                       tuple(ev.LinkGene(i, s, d, 0, True, 0.5 + i) for i, s, d in links))  # fmt: skip
    one = np.zeros(DRAWS, np.int64)
    alone = Parents(one - 1, one, np.array([0, 1]), np.arange(1))
    genes, births, _ = Breeder(settings, 2, 1, 5).breed(columns_of([parent]), np.zeros(1), alone, registry, 1)
    counts = dict(zip(SCALAR, np.bincount(births.mutation, minlength=len(SCALAR)).tolist(), strict=True))
    found = 1 - 0.8**20  # two of ten pairs of nodes can be linked, and twenty are tried
    left = 0.97 * (1 - 0.05 * found)
    expected = {"split_link": 0.03, "add_link": 0.97 * 0.05 * found, "weights": left * 0.8, "copy": left * 0.2}
    assert {name for name, count in counts.items() if count} == set(expected)
    found_of: dict[str, int] = {**counts}
    for name, p in expected.items():
        assert within(found_of[name], p), name
    kept = np.isin(genes.link_id, [i for i, _, _ in links])
    moved = genes.weight[kept].reshape(DRAWS, 5) != np.array([0.5 + i for i, _, _ in links], np.float32)
    assert (moved.any(1) == (births.mutation == SCALAR.index("weights"))).all()


def test_parents_are_one_or_two_and_seldom_of_two_species():
    settings = ev.NEAT(population=DRAWS)
    genes, registry = minimal(2, 1, DRAWS, settings, 0)
    of = np.repeat([0, 1], DRAWS // 2)
    parents = Parents(np.full(DRAWS, -1), of, np.array([0, DRAWS // 2, DRAWS]), np.arange(DRAWS))
    _, births, _ = Breeder(settings, 2, 1, 5).breed(genes, np.zeros(DRAWS), parents, registry, 1)
    crossed = births.other_parent >= 0
    assert within((~crossed).sum(), 0.25)
    far = births.other_parent[crossed] // (DRAWS // 2) != births.fitter_parent[crossed] // (DRAWS // 2)
    assert within(far.sum(), 0.001, crossed.sum())
    assert births.refused[SCALAR.index("add_link")] > 0.04 * DRAWS  # no link is missing here
