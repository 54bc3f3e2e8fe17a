"""Mutations of layers, units, windows and single links, on a user's own program."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population.species import Parents
from graphwright.errors import UsageError
from graphwright.evolve import mutations as m
from graphwright.evolve.mutations.layers import branches
from graphwright.evolve.mutations.links import delayed, junctions, links, open_links
from graphwright.evolve.neurons.genomes import columns_of, minimal
from graphwright.evolve.neurons.genomes import genome as read_genome
from graphwright.evolve.neurons.species import Breeder
from graphwright.program.cost import parameters
from graphwright.program.kinds import STORED
from seeds import deep

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 64)).astype(np.float32)
KEEP = ("widen", "insert_layer", "insert_node", "add_skip", "add_link", "add_delay_link", "insert_cell")


def mlp(widths=(64, 8, 7, 7), seed=0, kind="float32"):
    gw.manual_seed(seed)
    layers = []
    for a, b in pairwise(widths):
        layers += [gw.nn.Linear(a, b), gw.nn.Tanh(), gw.nn.Dropout(0.1), gw.nn.LeakyReLU()]
    net = gw.nn.Sequential(*layers[:-3])
    net.eval()
    return gw.trace(net, gw.tensor(X[:, : widths[0]]))


def cnn(seed=0):
    gw.manual_seed(seed)
    n = gw.nn
    head = (n.AdaptiveAvgPool2d(1), n.Flatten(), n.Linear(6, 6))
    net = n.Sequential(n.Conv2d(1, 4, 3, padding=1), n.ReLU(), n.Conv2d(4, 6, 3, padding=1), n.Tanh(), *head)
    return gw.trace(net, gw.tensor(X.reshape(40, 1, 8, 8)))


def over_time(inputs=8):
    """A layer over four steps, beside it a GRU."""
    b = gw.Builder("sequence")
    w = b.param("out.weight", np.ones((2, inputs), np.float32))
    b.output(b.linear(b.input("x", (2, 4, inputs)), w, name="out"), "y")
    p = b.build()
    with p.edit("a memory") as e:
        m.insert_cell(e, "out", np.random.default_rng(0), "gru", 4)
    return p


STARTS = {"mlp": mlp, "cnn": cnn, "gru": over_time}


def answers(p):
    name = p.input_names()[0]
    return p.run({name: np.resize(X, p.spec(name).shape)}, keep="outputs")[p.output_names()[0]].to_numpy()


def prepared(start):
    """A program that every mutation has a site in: a branch, a skip, a link; weights that are not those of growth."""
    p = STARTS[start]()
    last = m.linears(p)[-1]
    with p.edit("something to remove") as e:
        m.insert_layer(e, last, np.random.default_rng(5))
        m.add_skip(e, last, np.random.default_rng(6))
        m.add_link(e, junctions(p)[0], rng, last, 0.5)
        if start == "gru":
            m.insert_layer(e, last, rng, 5, "leaky_relu")
            m.add_delay_link(e, last, rng)
    for v in p.parameters():
        v.assign(gw.tensor(v.numpy() + 0.1 * np.random.default_rng(1).normal(size=v.shape).astype("f4")))
    return p


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", list(m.MUTATIONS))
def test_each_mutation_has_its_documented_effect_and_can_be_undone(name, start):
    p = prepared(start)
    kind, before, y = m.MUTATIONS[name], p.hash(), answers(p)
    made = 0
    for k, site in enumerate(kind.sites(p)):
        try:
            with p.edit(name, author="evolution") as e:
                kind.apply(e, site, np.random.default_rng(k))
        except UsageError:
            assert p.hash() == before  # a refused one changed nothing
            continue
        made += 1
        assert p.validate().ok
        assert parameters(p) == sum(p.weights.array(p.key(n)).size for n in p.params())
        if name in KEEP:
            assert np.abs(answers(p) - y).max() <= 1e-6 * np.abs(y).max()
        else:
            answers(p)
        assert set(p.weights) == {p.key(n) for n in p.nodes() if p.op(n) in STORED}
        p.undo()
        assert p.hash() == before
    assert made or name in LACKS[start]


SEQUENCE = ("insert_cell", "cell_type", "add_delay_link", "remove_delay_link")
LACKS = {"mlp": ("kernel", "stride", *SEQUENCE), "cnn": ("layer_attr", *SEQUENCE), "gru": ("kernel", "stride")}


def perceptron():
    return mlp((64, 3))


@pytest.mark.parametrize("start", [perceptron, mlp, cnn, over_time])
def test_mutated_programs_compile_and_run(start):
    draw = np.random.default_rng(deep(4, 3))
    p, made = start(), 0
    x = np.resize(X, p.spec(p.input_names()[0]).shape)
    while made < deep(2500, 10):
        kind = list(m.MUTATIONS.values())[int(draw.integers(len(m.MUTATIONS)))]
        sites = kind.sites(p)
        if not len(sites):
            continue
        try:
            with p.edit(kind.name) as e:
                kind.apply(e, sites[int(draw.integers(len(sites)))], draw)
        except UsageError:
            continue
        made += 1
        name = p.input_names()[0]
        planned = p.compile({name: x.shape})({name: x})
        assert p.validate().ok, kind.name
        assert np.isfinite(planned[p.output_names()[0]].to_numpy()).all(), kind.name
        if made % 20 == 0:
            p = start()  # else it grows for ever


@pytest.mark.parametrize("start", STARTS)
def test_gradients_are_correct_after_random_mutations(start):
    p = STARTS[start]()
    step = np.random.default_rng({"mlp": 5, "cnn": 3, "gru": 1}[start])  # that all of them come up
    names, entries = [p.path(n) for n in p.nodes()], len(p.journal)
    done: set[str] = set()
    for _ in range(deep(200, 80)):
        kind = list(m.MUTATIONS.values())[int(step.integers(len(m.MUTATIONS)))]
        sites = kind.sites(p)
        small = sum(v.data.size for v in p.parameters()) < 3000
        if len(sites) and (small or kind.name not in ("widen", "insert_layer", "insert_node", "add_skip", "kernel")):
            try:
                with p.edit(kind.name) as e:
                    kind.apply(e, sites[int(step.integers(len(sites)))], step)
                done.add(kind.name)
            except UsageError:
                pass
    assert {"widen", "narrow", "insert_layer", "add_skip"} <= done
    own = {"mlp": {"split_link", "add_link", "toggle_link"}, "cnn": {"kernel", "stride"}, "gru": {*SEQUENCE}}[start]
    assert own <= done
    assert p.validate().ok
    for v in p.parameters():
        v.grad = None
    # Σ sin y, so that zeros of growth are no stationary points
    p(**{p.input_names()[0]: gw.tensor(np.resize(X, p.spec(p.input_names()[0]).shape))})[
        p.output_names()[0]
    ].sin().sum().backward()
    for v in list(p.parameters()):
        if v.grad is None or not v.data.size:
            continue
        direction = step.normal(size=v.shape).astype("f4")
        direction /= np.abs(direction).max()
        slope, size, old = float((v.grad.numpy() * direction).sum()), 1e-3, v.numpy().copy()
        values = []
        for sign in (1, -1):
            v.assign(gw.tensor(old + sign * size * direction))
            values.append(np.sin(answers(p).astype("f8")).sum())
        v.assign(gw.tensor(old))
        assert abs(slope - (values[0] - values[1]) / (2 * size)) <= 2e-2 * (abs(slope) + 1)
    p.undo(len(p.journal) - entries)
    assert [p.path(n) for n in p.nodes()] == names


def test_new_parts_receive_gradients():
    p = mlp()
    first, second = (p.key(p.operands(n)[1].node) for n in m.linears(p)[:2])
    with p.edit("widen") as e:
        m.widen(e, next(a for a in m.widths(p) if p.axes()[a].size == 8), rng, 4)
    found = _gradients(p)
    assert np.abs(found[second][:, 8:]).min() > 0  # zeros out of the new units
    assert (found[first][8:] == 0).all()  # nothing comes back through zeros, until they moved
    with p.edit("branch") as e:
        m.insert_layer(e, m.linears(p)[1], rng, 5, "tanh")
    assert np.abs(_gradients(p)["b1.to.weight"]).max() > 0


def _gradients(p) -> dict[str, Any]:
    for q in p.parameters():
        q.grad = None
    (
        p(**{p.input_names()[0]: gw.tensor(X.reshape(p.spec(p.input_names()[0]).shape))})[p.output_names()[0]] ** 2
    ).sum().backward()
    return {key: None if v.grad is None else v.grad.numpy() for key, v in p.variables().items()}


def test_removing_a_part_leaves_no_unused_nodes():
    p = mlp()
    weights = set(p.weights)
    with p.edit("in") as e:
        m.insert_layer(e, m.linears(p)[0], rng)
    with p.edit("inside") as e:
        m.insert_layer(e, p.node("b1.from"), rng)
    with p.edit("out") as e:
        m.remove_layer(e, p.node("b1.to"), rng)
    assert set(p.weights) == weights
    assert not branches(p)
    assert not [n for n in p.nodes() if p.path(n).startswith("b")]


def test_narrow_removes_units_with_the_smallest_weights():
    p = mlp()
    node = m.linears(p)[0]
    w = p.operands(node)[1].node
    old = p.weights.array(p.key(w)).to_numpy().copy()
    old[3] = 0
    with p.edit("weak") as e:
        e.set_weight(w, old)
        e.set_weight(p.operands(node)[2].node, np.zeros(8, np.float32))
    y = answers(p)
    axis = next(a for a in m.widths(p) if p.axes()[a].size == 8)
    with p.edit("narrow") as e:
        m.narrow(e, axis, rng, 1)
    np.testing.assert_allclose(answers(p), y, atol=1e-6)  # the silent unit went
    with pytest.raises(UsageError), p.edit("too much") as e:
        m.narrow(e, axis, rng, 7)


def test_a_larger_kernel_keeps_the_function():
    p = cnn()
    y, node = answers(p), p.of_kind("conv")[1]
    with p.edit("look further") as e:
        m.kernel(e, node, rng, 5)
    assert p.weights.array(p.key(p.operands(node)[1].node)).shape == (6, 4, 5, 5)
    np.testing.assert_allclose(answers(p), y, atol=1e-6)
    with p.edit("and back") as e:
        m.kernel(e, node, rng, 3)
    np.testing.assert_allclose(answers(p), y, atol=1e-6)
    with pytest.raises(UsageError, match="would change the size of the result"), p.edit("even") as e:
        m.kernel(e, node, rng, 4)


# -- single links ------------------------------------------------------------------------------------------------------
def genome():
    run = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(population=2), seed=3)
    return ev.program.founder(read_genome(run.genes, 0, 2, 1))


def test_split_link_gives_the_genome_with_a_neuron():
    p = genome()
    before = ev.program.read(p)
    first = before.links[0]
    y = p.run(x=np.eye(2, dtype="f4"))["y"].to_numpy()
    with p.edit("split") as e:
        m.split_link(e, f"n{first.dst}.l{first.id}", rng, "copy")
    after = ev.program.read(p)
    (node,) = set(after.nodes) - set(before.nodes)
    assert node.activation == "identity"
    old = next(e for e in after.links if e.id == first.id)
    assert not old.open
    new = {(e.src, e.dst): e.weight for e in after.links if node.id in (e.src, e.dst)}
    assert new == {(first.src, node.id): 1.0, (node.id, first.dst): first.weight}
    assert (p.run(x=np.eye(2, dtype="f4"))["y"].to_numpy() == y).all()  # an identity in the middle: the same bits
    with p.edit("and out") as e:
        m.remove_link(e, f"n{node.id}.l{min(e.id for e in after.links if e.dst == node.id)}", rng)
    assert ev.program.read(p).nodes == after.nodes  # a neuron with a link out of it stays


def test_neuron_is_removed_with_its_last_link():
    p = genome()
    names, link = {p.path(n) for n in p.nodes()}, links(p)[0]
    with p.edit("split") as e:
        m.split_link(e, link, rng)
    (base,) = {p.path(n).partition(".")[0] for n in p.nodes()} - {n.partition(".")[0] for n in names}
    into = next(n for n in links(p) if p.path(n).startswith(base))
    out = next(n for n in links(p) if p.path(n) not in names and n != into)
    with p.edit("remove what leads out of it") as e:
        m.remove_link(e, out, rng)
    assert p.select(f"{base}.sum").count
    with p.edit("and what leads into it") as e:
        m.remove_link(e, into, rng)
    assert {p.path(n) for n in p.nodes()} == names


def test_toggling_twice_restores_the_function_and_delay_links_have_memory():
    p = genome()
    y = p.run(x=np.eye(2, dtype="f4"))["y"].to_numpy()
    link = links(p)[0]
    for _ in range(2):
        with p.edit("toggle") as e:
            m.toggle_link(e, link, rng)
    assert (p.run(x=np.eye(2, dtype="f4"))["y"].to_numpy() == y).all()

    b = gw.Builder("memory")
    x = b.input("x", (1, 1))
    b.output(b.junction(x, name="total"), "y")
    p = b.build()
    with p.edit("h = x + 0.5 h of the step before") as e:
        m.add_delay_link(e, "total", rng, "total", 0.5)
    h = 0.0
    for value in (1.0, -2.0, 3.0):
        h = value + 0.5 * h
        assert p.run(x=np.full((1, 1), value, "f4"))["y"].to_numpy().item() == pytest.approx(h)
    with p.edit("forget") as e:
        m.remove_link(e, links(p)[0], rng)
    assert not p.of_kind("state")
    assert len(list(p.nodes())) == 2


def test_link_ends_at_a_junction_and_makes_no_cycle():
    p = prepared("mlp")
    with pytest.raises(UsageError, match="a link cannot end at this node"), p.edit("no") as e:
        m.add_link(e, m.linears(p)[0], rng)
    total, before = junctions(p)[0], len(links(p))

    def all_possible():
        with p.edit("all there are") as e:
            for k in range(20):
                m.add_link(e, total, np.random.default_rng(k))

    with pytest.raises(UsageError, match="all earlier values"):
        all_possible()
    assert len(links(p)) == before
    with p.edit("one") as e:
        m.add_link(e, total, rng)
    assert p.validate().ok
    with pytest.raises(UsageError, match="not a link"), p.edit("no") as e:
        m.toggle_link(e, m.linears(p)[0], rng)


# -- links with a delay ------------------------------------------------------------------------------------------------
def test_delay_matrix_reads_the_previous_step():
    p, x = over_time(3), X.reshape(-1)[:24].reshape(2, 4, 3)
    y, names = p.run(x=x)["y"].to_numpy(), {p.path(n) for n in p.nodes()}
    with p.edit("remember") as e:
        m.add_delay_link(e, "out", rng, "x", 0.5)
    past = np.concatenate([np.zeros((2, 1, 3), "f4"), x[:, :-1]], 1)
    np.testing.assert_allclose(p.run(x=x)["y"].to_numpy() - y, past @ np.full((3, 2), 0.5, "f4"), atol=1e-5)
    assert {p.path(n) for n in p.nodes()} - names == {
        "b2.first", "b2.nothing", "b2.past", "b2.before", "b2.to.weight", "b2.to"
    }  # fmt: skip
    with p.edit("forget") as e:
        m.remove_delay_link(e, "b2.to", rng)
    assert {p.path(n) for n in p.nodes()} == names
    np.testing.assert_array_equal(p.run(x=x)["y"].to_numpy(), y)
    with pytest.raises(UsageError, match="not a delay link"), p.edit("no") as e:
        m.remove_delay_link(e, "out", rng)
    with pytest.raises(UsageError, match="delay link cannot end at"), p.edit("no") as e:
        m.add_delay_link(e, "x", rng)


@pytest.mark.parametrize("name", ["toggle_link", "remove_link", "remove_delay_link"])
def test_columns_and_programs_have_equal_links(name):
    """Chains of neurons, closed links, a state that two links read: what goes, and what stays."""
    ends = [(4, 0, 3, 0), (5, 1, 3, 0), (6, 2, 3, 0), (8, 3, 7, 1), (9, 3, 3, 1), (11, 7, 10, 0), (12, 1, 13, 0),
            (14, 13, 15, 2), (17, 16, 3, 0)]  # fmt: skip
    links_ = tuple(ev.LinkGene(i, s, d, k, i != 12, 0.25 * i) for i, s, d, k in ends)
    nodes = tuple(ev.NodeGene(n, "tanh") for n in (3, 7, 10, 13, 15, 16))
    before = ev.Genome(2, 1, nodes, links_)
    none = dict.fromkeys(("split_link", "add_link", "weights"), 0)
    settings: Any = ev.NEAT(population=200, mutate_only=1.0, **{**none, name: 1.0})
    one = np.zeros(200, np.int64)
    alone, registry = Parents(one - 1, one, np.array([0, 1]), np.arange(1)), minimal(2, 1, 1, settings, 0)[1]
    bred, births, _ = Breeder(settings, 2, 1, 5).breed(columns_of([before]), np.zeros(1), alone, registry, 1)
    assert set(births.site.tolist()) == {i for i, *_, k in ends if k or name != "remove_delay_link"}
    hidden = set()
    for site in set(births.site.tolist()):
        p = ev.program.founder(before)
        h, dst = p.hash(), next(d for i, _, d, _ in ends if i == site)
        with p.edit(name) as e:
            m.MUTATIONS[name].apply(e, f"n{dst}.l{site}", rng)
        after = ev.program.read(p)
        assert after == read_genome(bred, births.site.tolist().index(site), 2, 1), site
        hidden.add(after.hidden)
        read = {e.src for e in after.links if e.delay}
        assert {p.path(n).partition(".")[0] for n in p.of_kind("state")} == {f"n{n}" for n in read}
        p.undo()
        assert p.hash() == h
    assert hidden == {"toggle_link": {5}, "remove_link": {4, 5}, "remove_delay_link": {4, 5}}[name]


def test_edges_are_consistent_in_both_directions():
    """Random edits of single links: producers and consumers agree, whatever was made and taken back."""
    draw, made = np.random.default_rng(deep(2, 1)), 0
    p = ev.program.founder(ev.program.read(genome()), batch=2)
    start = p.hash()
    kinds = [m.split_link, m.add_link, m.add_delay_link, m.remove_delay_link, m.remove_link, m.toggle_link]
    sites = [open_links, junctions, junctions, delayed, links, links]
    done = np.zeros(len(kinds), int)
    while made < deep(10_000, 250):
        k = int(draw.integers(len(kinds)))
        found = sites[k](p)
        if not found or (k < 3 and len(list(p.nodes())) > 60):
            continue
        try:
            with p.edit("one") as e:
                kinds[k](e, found[int(draw.integers(len(found)))], draw)
        except UsageError:
            continue
        made, done[k] = made + 1, done[k] + 1
        if draw.random() < 0.1:
            p.undo()
        for n in p.nodes():
            assert all(n in p.producers(c) for c in p.consumers(n))
            assert all(n in p.consumers(v) for v in p.producers(n))
    assert done.min() > 5
    p.undo(sum(entry.undoes is None for entry in p.journal[1:]) - sum(entry.undoes is not None for entry in p.journal))
    assert p.hash() == start
