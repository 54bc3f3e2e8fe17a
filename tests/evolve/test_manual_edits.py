"""Manual edits during a run: innovation numbers, lineage, and equal bits after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import UsageError
from graphwright.evolve import mutations as m
from graphwright.evolve.layers import train
from graphwright.evolve.layers.candidate import GENES
from graphwright.evolve.mutations.links import links
from graphwright.evolve.mutations.registry import parts
from graphwright.evolve.neurons.genomes import genome
from seeds import some

rng = np.random.default_rng(0)
WILD = {"population": 12, "split_link": 0.3, "add_link": 0.4, "set_activation": 0.1, "activation": ("tanh", "relu")}


def run_of(generations=5, kind=ev.NEAT, **changes) -> Any:
    run = ev.Evolution(ev.tasks.xor(), ev.scalar(), kind(**{**WILD, **changes}), seed=3)
    run.run(generations, target=9.0)
    return run


def state(run) -> list[bytes]:
    used = int(run.registry.count[0])
    return [c.tobytes() for c in run.genes] + [run.registry.keys[:used].tobytes(), run.fitness.tobytes()]


def split(run, who, link=0, why="a neuron in the middle") -> Any:
    """Split an open link of a genome; return its number."""
    found = [e for e in run.lineage.genome(run.alive(who)).links if e.open][link]
    with run.edit(who, why) as e:
        m.split_link(e, f"n{found.dst}.l{found.id}", rng, "tanh")
    return found.id


def test_manual_edit_replaces_the_individual_and_is_scored():
    run = run_of()
    before, genes, c = genome(run.genes, 4, 2, 1), run.genes, run.counters.evaluations
    number = split(run, 4)
    key = run.alive(4)
    assert key == ev.IndividualKey(4, 4, 1)
    after = genome(run.genes, 4, 2, 1)
    assert after == run.lineage.genome(key)
    assert run.lineage.genome(ev.IndividualKey(4, 4)) == before
    assert [n for n in range(12) if genome(run.genes, n, 2, 1) != genome(genes, n, 2, 1)] == [4]
    assert run.counters.evaluations == c + 1
    one = run.individual(key)
    assert one.rescore() == one.fitness == run.fitness[4]
    (node,) = {n.id for n in after.nodes} - {n.id for n in before.nodes}
    keys = run.registry.keys
    assert keys[node].tolist()[:2] == [4, number]  # the number of a neuron that splits this link, whatever makes it
    for e in after.links:
        assert keys[e.id].tolist() == [3, e.src, e.dst, e.delay]
    birth = run.lineage.birth(key)
    assert (birth.author, birth.why, birth.fitter_parent) == ("human", "a neuron in the middle", ev.IndividualKey(4, 4))
    assert str(birth) == "generation 4: manual edit, a neuron in the middle"


def test_manual_and_evolved_splits_have_equal_innovation_numbers():
    run = run_of(generations=1, population=40)
    split(run, 0)
    manual = {n.id for n in genome(run.genes, 0, 2, 1).nodes} - {3}
    run.run(8, target=9.0)
    births = run.lineage.past[1].births
    assert 4 in births.site[births.mutation == 3]  # the first link is split by evolution too
    child = int(np.flatnonzero((births.site == 4) & (births.mutation == 3) & (births.fitter_parent != 0))[0])
    assert manual <= {n.id for n in run.lineage.genome(ev.IndividualKey(1, child)).nodes}


def test_children_descend_from_a_manual_edit_and_blame_names_it():
    run = run_of(champions=0, tournament=1)
    best = int(run.fitness.argmax())
    with run.edit(best, "a look at the product") as e:
        x, y = (e.program.node(f"n{i}.x{i}") for i in (0, 1))
        total = e.add("junction", x, name="n99.sum")
        e.cut(e.program.in_edges(total)[0])
        e.add("relu", total, name="n99.out")
        for k, source in enumerate((x, y)):
            w = e.param(f"n99.l{200 + k}.weight", np.float32(1.5))
            e.connect(e.add("mul", source, w, name=f"n99.l{200 + k}"), total, port=200 + k)
        w = e.param("n3.l300.weight", np.float32(9.0))
        e.connect(e.add("mul", "n99.out", w, name="n3.l300"), "n3.sum", port=300)
    key = run.alive(best)
    run.run(run.generation + 3, target=9.0)
    heirs = [g for g in range(12) if key in [b.key for b in run.lineage.path(ev.IndividualKey(run.generation, g))]]
    assert heirs
    node = max(n.id for n in run.lineage.genome(key).nodes)
    assert run.registry.keys[node, 0] == 6
    for g in heirs:
        who = ev.IndividualKey(run.generation, g)
        p, genes = run.lineage.replay(who), run.lineage.genome(who)
        assert ev.program.read(p) == genes
        assert p.structure_hash() == ev.program.founder(genes, run.task.names).structure_hash()
        if node in {n.id for n in genes.nodes}:
            assert p.blame(f"n{node}.out")[0].author == "human"
            assert p.blame(f"n{node}.out")[0].why == "generation 4: manual edit, a look at the product"
    assert "manual edit, a look at the product" in run.lineage.to_html(key=ev.IndividualKey(run.generation, heirs[0]))


@pytest.mark.parametrize("kind", some(["neat", "hybrid", "baldwin"], 2))
def test_edited_run_resumes_bit_for_bit(tmp_path, kind):
    how: Any = {"neat": {"delays": 0.3}, "hybrid": {"kind": ev.Hybrid, "train": ev.Train(5)},
                "baldwin": {"kind": ev.Hybrid, "train": ev.Train(5), "inherit": "baldwin"}}[kind]  # fmt: skip
    runs = [run_of(**how) for _ in range(2)]
    for run in runs:
        for who in (0, 3, 3):
            split(run, who, -1)
        with run.edit(run.alive(7), "weaker") as e:
            e.set_weight(e.program.params()[0], np.float32(0.125))
    whole, first = runs
    first.save(tmp_path / "run")
    rest = ev.resume(tmp_path / "run")
    rest.save(tmp_path / "again")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()
    }
    assert rest.alive(3) == ev.IndividualKey(4, 3, 2)
    assert state(rest) == state(whole)
    assert [c.tobytes() for c in rest.scored] == [c.tobytes() for c in whole.scored]
    for run in (whole, rest):
        run.run(9, target=9.0)
    assert state(rest) == state(whole)
    assert rest.log == whole.log
    for g in range(12):
        who = ev.IndividualKey(8, g)
        assert [str(b) for b in rest.lineage.path(who)] == [str(b) for b in whole.lineage.path(who)]
        assert rest.lineage.replay(who).structure_hash() == whole.lineage.replay(who).structure_hash()
    plain = run_of(**how)
    plain.run(9, target=9.0)
    assert state(plain) != state(whole)


def test_children_inherit_untrained_weights_except_manually_set_ones():
    run = run_of(kind=ev.Hybrid, train=ev.Train(5), inherit="baldwin", generations=3)
    seeds, trained = genome(run.genes, 2, 2, 1), genome(run.scored, 2, 2, 1)
    with run.edit(2, "one weight") as e:
        link = trained.links[0]
        e.set_weight(f"n{link.dst}.l{link.id}.weight", np.float32(0.25))
    heir, shown = genome(run.genes, 2, 2, 1), genome(run.scored, 2, 2, 1)
    assert [e.weight for e in heir.links] == [0.25, *(e.weight for e in seeds.links[1:])]
    assert [e.weight for e in shown.links] == [0.25, *(e.weight for e in trained.links[1:])]
    assert run.lineage.genome(run.alive(2)) == shown


def test_moments_stay_with_unchanged_links():
    run = run_of(kind=ev.Hybrid, train=ev.Train(5), generations=3)
    old = run.lineage.columns(run.alive(0))
    assert old.steps.any()
    split(run, 0)
    new = run.lineage.columns(run.alive(0))
    for k, i in enumerate(new.link_id.tolist()):
        at = np.flatnonzero(old.link_id == i)
        for name in ("first", "second", "steps"):
            assert getattr(new, name)[k] == (getattr(old, name)[at[0]] if len(at) else 0)


def test_manual_edit_can_solve_the_task():
    """XOR with two neurons, made from the first genome of a run."""
    run = run_of(generations=1, output="step", activation="step", population=4)
    with run.edit(0, "xor") as e:
        p = e.program
        for path in [p.path(n) for n in links(p)]:
            m.remove_link(e, path, rng)
        for n, (bias, weight) in enumerate(((-0.5, 1.0), (-1.5, -2.0))):
            total = e.add("junction", "n2.bias", name=f"n{90 + n}.sum")
            e.cut(p.in_edges(total)[0])
            e.add("relu", e.add("sign", total, name=f"n{90 + n}.side"), name=f"n{90 + n}.out")
            for source, w in (("n0.x0", 1.0), ("n1.x1", 1.0), ("n2.bias", bias)):
                m.add_link(e, total, rng, source, w)
            m.add_link(e, "n3.sum", rng, f"n{90 + n}.out", weight)
        m.add_link(e, "n3.sum", rng, "n2.bias", -0.5)
    result = run.run(50)
    assert result.status is ev.Status.TARGET_REACHED
    assert result.best.key == run.alive(0) == run.best
    assert len(run.log) == 1
    assert result.best.metric == 1.0
    run.run(3, target=9.0)  # bred on, the champion is still what it was
    assert result.best.rescore() == result.best.fitness


def too_many(e):
    for _ in range(4):
        m.split_link(e, next(n for n in links(e.program) if e.program.consumers(n)), rng)


def circle(e):
    m.split_link(e, links(e.program)[0], rng)
    w = e.param("n4.l99.weight", np.float32(1))
    e.add("mul", "n3.out", w, name="n4.l99")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda e: e.insert(e.program.out_edges("n3.sum")[0], "tanh", name="odd"), "odd: the edited program"),
        (lambda e: e.set_weight("n3.l4.weight", np.float32(np.nan)), "a weight is not finite"),
        (lambda e: m.add_link(e, "n3.sum", rng, "n0.x0", 1.0), "same ends and delay"),
        (lambda e: e.set_outputs(y="n3.out", z="n3.sum"), "no longer a genome of neurons"),
        (too_many, "exceeds the limits"),
        (circle, "links without delay form a cycle"),
        (lambda e: e.remove("nowhere"), "nowhere"),
    ],
)  # fmt: skip
def test_edits_that_genes_cannot_express_are_refused(edit, message):
    run = run_of(generations=2, split_link=0, add_link=0, max_nodes=4)
    before = state(run)
    with pytest.raises(UsageError, match=message), run.edit(1, "no") as e:
        edit(e)
    assert state(run) == before
    assert not run.lineage.past[-1].edits
    assert run.alive(1) == ev.IndividualKey(1, 1)


def test_only_living_individuals_can_be_edited():
    fresh: Any = ev.Evolution(ev.tasks.xor(), None, ev.NEAT(**WILD))
    with pytest.raises(UsageError, match="no individual was scored yet"), fresh.edit(0):
        pass
    run = run_of()
    for who in (ev.IndividualKey(0, 3), 12, -1, ev.IndividualKey(4, 3, 1)):
        with pytest.raises(UsageError, match="no living individual has this key"), run.edit(who):
            pass
    split(run, 3)
    with pytest.raises(UsageError, match="no living individual has this key"), run.edit(ev.IndividualKey(4, 3)):
        pass
    with run.edit(ev.IndividualKey(4, 3, 1), "nothing at all"):
        pass
    assert run.alive(3) == ev.IndividualKey(4, 3, 1)


# -- layers ------------------------------------------------------------------------------------------------------------
def start():
    b = gw.Builder()
    w = b.param("out.weight", np.zeros((1, 2), np.float32))
    b.output(b.linear(b.input("x", ("B", 2)), w, b.param("out.bias", np.zeros(1, np.float32)), name="out"), "y")
    return b.build()


def layers(seed=0, **settings) -> Any:
    settings = {"population": 3, "steps": 4, **settings}
    run: Any = ev.Evolution(ev.tasks.two_moons(60), ev.blocks(start()), ev.Layers(**settings), seed=seed)
    run.run(3, target=9.0)
    return run


def grow(run, who):
    with run.edit(who, "a layer and another") as e:
        m.insert_layer(e, "out", np.random.default_rng(1), 3, "tanh")
        m.insert_layer(e, "out", np.random.default_rng(2), 3, "tanh")
        e.set_weight("out.bias", np.full(1, 0.25, np.float32))
    return run.births[-1]


@pytest.mark.parametrize("inherit", ["lamarck", "baldwin"])
def test_edited_member_becomes_a_candidate_with_author_human(inherit):
    run = layers(inherit=inherit)
    old, archive = run.members[-1], list(run.archive)
    y = old.program.run(x=np.ones((2, 2), "f4"))["y"].to_numpy()
    birth = grow(run, old.number)
    new = next(n for n in run.members if n.birth is birth)
    assert old not in run.members
    assert set(archive) & set(run.archive)
    assert (birth.author, birth.fitter_parent, birth.what) == ("human", old.number, "manual edit, a layer and another")
    assert train.measure(run.task, new.program, run.task.valid) == (birth.metric, birth.loss)
    assert len(run.births) == run.counters.evaluations
    made = parts(new.program) - parts(old.program)
    assert made <= set(run.numbers.values())
    assert len(made) == 2
    name = min(made)
    assert new.program.blame(f"{name}.from")[0].author == "human"
    assert run.replay(birth.number).structure_hash() == new.program.structure_hash()
    assert run.replay(birth.number).blame(f"{name}.from")[0].author == "human"
    shift = 0.25 - old.program.weights.array("out.bias").to_numpy()
    np.testing.assert_allclose(new.program.run(x=np.ones((2, 2), "f4"))["y"].to_numpy() - y, shift[None].repeat(2, 0),
                               atol=1e-6)  # fmt: skip
    if inherit == "baldwin":
        assert new.untrained.structure_hash() == new.program.structure_hash()
        assert new.untrained.weights.array("out.bias").to_numpy() == 0.25
        assert new.untrained_moments.keys() == new.moments.keys()
    else:
        kept = [k for k in new.moments if k in old.moments]
        assert kept
        assert all(new.moments[k].tobytes() == old.moments[k].tobytes() for k in kept)


def test_equal_manual_edits_get_equal_part_names():
    run = layers(rates={name: float(name == "learning_rate") for name in (*m.MUTATIONS, *GENES)})
    for who in [member.number for member in run.members[:2]]:
        grow(run, who)
    assert [(kind, k) for kind, _, k in run.numbers] == [("manual", 0), ("manual", 1)]


def test_an_edit_does_not_count_as_a_generation_without_change():
    run = layers(rates={"learning_rate": 1.0, **dict.fromkeys((*m.MUTATIONS, "optimizer", "loss"), 0.0)}, steps=0)
    steady = run.steady  # no candidate differs from the start
    assert steady > 0
    with run.edit(run.members[0].number, "the same weights") as e:
        e.set_weight("out.bias", lambda w: w)
    assert run.steady == steady


@pytest.mark.deep
def test_edited_layer_run_resumes_to_the_same_births(tmp_path):
    runs = [layers(inherit="baldwin", crossover=0.5) for _ in range(2)]
    for run in runs:
        grow(run, run.members[0].number)
    whole, first = runs
    first.save(tmp_path / "run")
    rest = ev.resume(tmp_path / "run", first.task)
    assert rest.births == first.births
    for run in (whole, rest):
        run.run(6, target=9.0)
    assert rest.births == whole.births
    for a, b in zip(rest.members, whole.members, strict=True):
        assert a.program.hash() == b.program.hash()
        assert rest.replay(a.number).structure_hash() == a.program.structure_hash()
    edited = next(b.number for b in rest.births if b.author == "human")
    heirs = [b.number for b in rest.births if edited in [c.number for c in rest.line(b.number)]]
    assert len(heirs) > 1
    for number in heirs:
        assert "human" in [entry.author for entry in rest.replay(number).journal]


def test_invalid_manual_edit_leaves_layer_run_unchanged():
    run = layers(max_params=60)
    members, births, numbers = list(run.members), len(run.births), dict(run.numbers)
    who = members[0].number

    def wide(e):
        m.insert_layer(e, "out", rng, 64)

    def other(e):
        e.set_outputs(y="out", z="out")

    def broken(e):
        e.set_weight("out.bias", np.full(1, np.nan, np.float32))

    for edit, message in ((wide, "more parameters"), (other, "changed the inputs"), (broken, "not finite")):
        with pytest.raises(UsageError, match=message), run.edit(who, "no") as e:
            edit(e)
    with pytest.raises(UsageError, match="no member of the population has this number"), run.edit(10**6):
        pass
    with run.edit(who, "nothing at all"):
        pass
    assert (run.members, len(run.births), run.numbers) == (members, births, numbers)
