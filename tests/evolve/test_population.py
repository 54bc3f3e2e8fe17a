"""The native loops against NEAT in plain Python: the same genomes, records, distances, species and answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import slow_neat as slow

from graphwright.array.population.breed import Rates
from graphwright.array.population.names import ACTIVATIONS, MUTATIONS
from graphwright.array.population.runner import Cases, Lesson, Session, fit, outputs
from graphwright.array.population.species import Parents
from graphwright.array.population.table import tabulate
from graphwright.evolve import tasks
from graphwright.evolve.evolution import Evolution
from graphwright.evolve.neurons.genomes import columns_of, genome, join, minimal, take, with_room
from graphwright.evolve.neurons.species import Breeder, Species, distance, rates
from graphwright.evolve.settings import NEAT

erf = np.vectorize(math.erf)
ACT = {
    "identity": lambda x: x,
    "sigmoid49": lambda x: 1 / (1 + np.exp(-4.9 * x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x < 0, 0.01 * x, x),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "sech": lambda x: 1 / np.cosh(x),
    "gauss": lambda x: np.exp(-(x**2)),
    "sin": np.sin,
    "abs": np.abs,
    "step": lambda x: (x > 0).astype(float),
    "sign": np.sign,
}
THRESHOLD = 1.5
WILD = NEAT(
    population=40, grow=0.05, split_link=0.25, add_link=0.4, toggle_link=0.1, remove_link=0.1,
    remove_delay_link=0.1, set_activation=0.2, delays=0.4, activation=("tanh", "relu", "gauss", "identity"),
    output="tanh", c4=0.5, tournament=2, tries=5,
)  # fmt: skip


def setup(inputs, outputs_, settings, seed=0):
    genes, registry = minimal(inputs, outputs_, settings.population, settings, seed)
    return genes, registry, slow.Numbers(registry.keys[: int(registry.count[0])].tolist())


def slow_of(genes, g, inputs, outs):
    return slow.Slow.of(genome(genes, g, inputs, outs))


def same(a, b):
    assert a.nodes == b.nodes
    assert list(a.links) == sorted(b.links)
    for i, e in a.links.items():
        other = b.links[i]
        assert (e.src, e.dst, e.delay, e.open) == (other.src, other.dst, other.delay, other.open)
        assert abs(float(e.weight) - float(other.weight)) <= 2e-6 * max(1, abs(float(e.weight)))


def evolved(settings=WILD, inputs=3, outs=2, generations=25, seed=0):
    """A population some generations on, by random fitness."""
    genes, registry, _ = setup(inputs, outs, settings, seed)
    rng, nursery = np.random.default_rng(seed), Breeder(settings, inputs, outs, seed)
    count = settings.population
    for g in range(1, generations):
        pool = rng.permutation(count)[: count // 2]
        fitness, one = rng.normal(size=count), np.zeros(count, np.int64)
        of = Parents(one - 1, one, np.array([0, len(pool)]), pool)
        genes, _, registry = nursery.breed(genes, fitness, of, registry, g)
    return genes, registry


def remembering():
    """As `evolved`, with delays of one to three steps."""
    genes, _ = evolved(generations=40)
    late = genes.link_delay > 0
    genes.link_delay[late] = np.random.default_rng(7).integers(1, 4, int(late.sum()))
    return genes


@pytest.mark.parametrize("settings", [WILD, NEAT(population=30, split_link=0.2, add_link=0.3)], ids=["wild", "NEAT"])
def test_children_match_the_reference_implementation(settings):
    inputs, outs, count = 3, 2, settings.population
    genes, registry, numbers = setup(inputs, outs, settings)
    r = rates(settings)
    old = [slow_of(genes, g, inputs, outs) for g in range(count)]
    rng = np.random.default_rng(1)
    made = set()
    for generation in range(1, 13):
        fitness = rng.integers(0, 5, count).astype(float)  # ties, so that sizes decide
        of = np.sort(rng.integers(0, 3, count))
        order = np.lexsort((np.arange(count), -fitness, of))
        pools = [[int(i) for i in order if of[i] == s] or [0] for s in range(3)]
        pool = np.concatenate(pools)
        off = np.concatenate([[0], np.cumsum([len(p) for p in pools])])
        elite = np.where(rng.random(count) < 0.1, rng.integers(0, count, count), -1)
        species = rng.integers(0, 3, count)
        chosen = Parents(elite, species, off, pool)
        genes, births, registry = Breeder(settings, inputs, outs, 99).breed(
            genes, fitness, chosen, registry, generation
        )
        new = []
        for c in range(count):
            stream = slow.Stream(99, c, generation, slow.BREEDING)
            kid, record = slow.child(old, fitness, pools, int(species[c]), int(elite[c]), r, settings.hidden, inputs,
                                     outs, numbers, stream)  # fmt: skip
            native = slow_of(genes, c, inputs, outs)
            same(native, kid)
            assert record == (
                births.fitter_parent[c],
                births.other_parent[c],
                MUTATIONS[births.mutation[c]],
                births.site[c],
            )
            made.add(record[2])
            new.append(native)  # rounding of sums must not add up
        old = new
    keys = registry.keys[: int(registry.count[0])].tolist()
    assert {tuple(k): i for i, k in enumerate(keys)} == numbers.ids
    again = [k for k in numbers.ids if k[0] == slow.SPLIT and k[2] > 0]  # a link that was opened and split once more
    assert again or settings is not WILD
    assert made >= ({"copy", "weights", "split_link", "add_link"} if settings is not WILD else set(MUTATIONS))


def test_distances_match_the_reference_implementation():
    genes, _ = evolved()
    one = [slow_of(genes, g, 3, 2) for g in range(40)]
    for settings in (WILD, NEAT(c1=2, c2=0.5, c3=1)):
        ours = distance(genes, genes, settings)
        theirs = [[slow.distance(a, b, settings.c1, settings.c2, settings.c3, settings.c4) for b in one] for a in one]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        assert (ours == ours.T).all()
        assert (np.diag(ours) == 0).all()


def test_genomes_join_the_first_near_species():
    genes, _ = evolved()
    settings = NEAT(threshold=THRESHOLD)
    d = distance(genes, genes, settings)
    first = Species.founders(genes, settings)
    leaders, expected = [], []
    for g in range(40):
        near = [s for s, leader in enumerate(leaders) if d[leader, g] < THRESHOLD]
        if not near:
            leaders.append(g)
        expected.append(near[0] if near else len(leaders) - 1)
    assert first.of.tolist() == expected
    assert len(first) == len(leaders) > 1
    after = first.next(genes, np.array(leaders), take(genes, np.arange(39, -1, -1)), settings, 1)
    nearest = [next(s for s, leader in enumerate(leaders) if d[leader, g] < THRESHOLD) for g in range(39, -1, -1)]
    assert after.ids[after.of].tolist() == first.ids[nearest].tolist()


def test_children_have_no_cycle_and_sorted_genes():
    genes, _ = evolved(generations=40)
    for g in range(40):
        one = genome(genes, g, 3, 2)
        assert [n.id for n in one.nodes] == sorted({n.id for n in one.nodes})
        assert [e.id for e in one.links] == sorted({e.id for e in one.links})
        ends = {n.id for n in one.nodes} | set(range(4))
        assert all(e.src in ends and e.dst in ends for e in one.links)
        todo = {n.id: {e.src for e in one.links if e.dst == n.id and not e.delay and e.src > 3} for n in one.nodes}
        while ready := [n for n, before in todo.items() if not before]:
            for n in ready:
                del todo[n]
            todo = {n: before - set(ready) for n, before in todo.items()}
        assert not todo


def test_equal_structure_has_equal_numbers():
    settings = NEAT(population=60, split_link=0.5, add_link=0.5)
    genes, _ = evolved(settings, generations=12)
    ends: dict = {}
    for g in range(60):
        for e in genome(genes, g, 3, 2).links:
            assert ends.setdefault(e.id, (e.src, e.dst, e.delay)) == (e.src, e.dst, e.delay)
    assert len(set(ends.values())) == len(ends)


def test_a_link_closed_in_a_parent_stays_closed_in_three_quarters_of_children():
    settings = NEAT(population=20_000, split_link=0, add_link=0, weights=0, mutate_only=0.0)
    genes, registry, _ = setup(3, 1, NEAT(population=2))
    genes.link_open[:4] = 0  # all of the first parent, none of the second
    count = settings.population
    parents = Parents(np.full(count, -1), np.zeros(count, np.int64), np.array([0, 2]), np.arange(2))
    out, births, _ = Breeder(settings, 3, 1, 5).breed(genes, np.zeros(2), parents, registry, 1)
    crossed = np.repeat(births.other_parent >= 0, 4)
    assert abs((1 - out.link_open[crossed]).mean() - 0.75) < 3 * math.sqrt(0.75 * 0.25 / crossed.sum())
    alone = np.repeat((births.other_parent < 0) & (births.fitter_parent == 0), 4)
    assert (out.link_open[alone] == 0).all()  # a genome crossed with itself is itself


@pytest.mark.parametrize("steps", [1, 5])
def test_outputs_match_the_definition(steps):
    genes = remembering()
    rng = np.random.default_rng(2)
    x = rng.normal(size=(37, steps, 3)).astype(np.float32)
    table = tabulate(genes, 3, 2)
    ours = outputs(table, genes, Cases.of(x))
    for g in range(40):
        theirs = slow.outputs_of(slow_of(genes, g, 3, 2), x, 3, 2, ACT)
        np.testing.assert_allclose(ours[g], theirs, rtol=2e-5, atol=2e-5)
    tiled = outputs(table, genes, Cases.of(x, tile=16), threads=2)
    assert tiled.tobytes() == np.ascontiguousarray(ours).tobytes()
    alone = take(genes, np.array([7]))
    assert (outputs(tabulate(alone, 3, 2), alone, Cases.of(x)) == ours[7:8]).all()


def test_running_a_session_step_by_step_equals_running_the_sequence():
    genes = remembering()
    x = np.random.default_rng(3).normal(size=(40, 4, 6, 3)).astype(np.float32)  # genomes, episodes, steps
    table = tabulate(genes, 3, 2)
    session = Session(table, genes, 4, 3)
    seen = [session.step(x[:, :, t]).copy() for t in range(6)]
    for g in range(40):
        whole = outputs(table, genes, Cases.of(x[g]))[g]
        assert (whole == np.stack([s[g] for s in seen], 1)).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_their_formulas(name):
    genes = columns_of([genome(minimal(1, 1, 2, NEAT(output=name), 0)[0], 0, 1, 1)])
    genes.weight[:] = [1.0, 0.0]
    x = np.array([0.0, 1, -1, 0.3, -0.7, 5, -5, 50, -50, 800, -800], np.float32)[:, None]
    y = outputs(tabulate(genes, 1, 1), genes, Cases.of(x))[0, :, 0, 0]
    assert np.isfinite(y).all()
    with np.errstate(over="ignore"):
        expected = ACT[name](x[:, 0].astype(float))
    np.testing.assert_allclose(y, expected, rtol=3e-6, atol=3e-5 if name == "sin" else 1e-6)


@pytest.mark.parametrize("loss", ["mse", "bce", "cross_entropy"])
def test_gradients_match_finite_differences(loss):
    smooth = ("tanh", "sigmoid", "silu", "softplus", "sech", "gauss", "sin", "gelu")
    settings = NEAT(
        population=30, split_link=0.3, add_link=0.5, delays=0.5, activation=smooth, output="identity", power=0.5,
        new_link=0.7,
    )  # fmt: skip
    genes, _ = evolved(settings, generations=15)
    genes.link_delay[genes.link_delay > 0] = 1 + np.arange((genes.link_delay > 0).sum()) % 3
    rng = np.random.default_rng(4)
    x = rng.normal(size=(9, 4, 3)).astype(np.float32)
    target = rng.random((9, 4, 2)).astype(np.float32)
    if loss == "cross_entropy":
        target = np.eye(2, dtype=np.float32)[rng.integers(0, 2, (9, 4))]
    counts = (np.arange(4) < rng.integers(1, 5, 9)[:, None]).astype(np.float32)
    before = type(genes)(*(c.copy() for c in genes))
    table = tabulate(genes, 3, 2)
    count = settings.population
    losses = fit(table, genes, Lesson.of(x, target, loss, counts), np.ones(count, int), np.zeros(count), clip=0.0)

    def value(one):
        y = slow.outputs_of(one, x, 3, 2, ACT)
        if loss == "mse":
            each = ((y - target) ** 2).mean(-1)
        elif loss == "bce":
            each = (np.logaddexp(0, y) - y * target).mean(-1)
        else:
            each = np.log(np.exp(y).sum(-1)) - (y * target).sum(-1)
        return (each * counts).sum() / counts.sum()

    checked = 0
    for g in range(0, count, 3):
        one = slow_of(before, g, 3, 2)
        assert abs(losses[g, 0] - value(one)) < 2e-5
        for k, e in enumerate(one.links.values()):
            at, held, h = before.link_off[g] + k, e.weight, 1e-5
            e.weight = float(held) + h
            up = value(one)
            e.weight = float(held) - h
            slope = (up - value(one)) / (2 * h)
            e.weight = held
            ours = genes.first[at] / 0.1  # the first moment after one step is a tenth of the gradient
            if e.open and genes.steps[at]:
                assert abs(ours - slope) < 2e-4 * max(1, abs(slope))
                checked += 1
            else:
                assert genes.first[at] == 0
    assert checked > 50


def test_training_makes_the_given_number_of_steps():
    run = Evolution(tasks.xor(), None, seed=0)
    genes = run.genes
    lesson = run.task.lesson()
    steps = np.arange(150) % 3
    fit(tabulate(genes, 2, 1), genes, lesson, steps, np.full(150, 0.01))
    assert (genes.steps.reshape(150, 3) == steps[:, None]).all()


def test_take_and_join_select_and_concatenate_genomes():
    genes, _ = evolved()
    which = np.array([5, 5, 0, 39])
    part = take(genes, which)
    assert [genome(part, i, 3, 2) for i in range(4)] == [genome(genes, g, 3, 2) for g in which]
    both = join(part, genes)
    assert genome(both, 4 + 17, 3, 2) == genome(genes, 17, 3, 2)
    again = columns_of([genome(genes, g, 3, 2) for g in range(40)])
    for name in genes._fields:
        assert (getattr(again, name) == getattr(genes, name)).all()


def test_a_growing_registry_keeps_its_numbers():
    _, registry = evolved(generations=3)
    used = int(registry.count[0])
    grown = with_room(registry, 5000)
    assert len(grown.keys) >= used + 5000
    assert (grown.keys[:used] == registry.keys[:used]).all()


def test_table_allocates_only_its_rows():
    genes, _ = evolved(generations=40)
    table = tabulate(genes, 3, 2)
    assert len(table.rows) == table.row_off[-1] <= genes.node_off[-1]
    assert len(table.links) == table.rows[-1, 2] <= genes.link_open.sum()
    assert Rates._fields[0] == "grow"


def test_unchanged_genomes_reuse_rows_of_their_fitter_parent():
    run = Evolution(tasks.parity(4), None, NEAT(population=60, split_link=0.2, add_link=0.3, delays=0.3), seed=2)
    for _ in range(15):
        run.run(run.generation + 2, target=2.0)
        old, table = run.genes, run.table
        run._reproduce()
        fresh = tabulate(run.genes, 1, 1)
        for name in ("row_off", "rows", "links", "outputs", "node", "most", "ring"):
            np.testing.assert_array_equal(getattr(run.table, name), getattr(fresh, name))
        changed = [
            g
            for g, m in enumerate(run.births.fitter_parent.tolist())
            if (a := genome(run.genes, g, 1, 1)).nodes != (b := genome(old, m, 1, 1)).nodes
            or [e[:5] for e in a.links] != [e[:5] for e in b.links]
        ]
        assert 0 < len(changed) < 60
        assert run.table.written == sum(np.diff(run.table.row_off)[changed])
        assert fresh.written == len(fresh.rows) >= len(table.outputs)
