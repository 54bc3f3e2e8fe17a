"""A genome and its Program are one thing: same genes, answers to the bit on the VM, gradients; edits replay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphwright as gw
from graphwright import evolve as ev
from graphwright.array.population.names import ACTIVATIONS
from graphwright.array.population.runner import Cases, Lesson, fit, outputs
from graphwright.array.population.table import tabulate
from graphwright.evolve.evolution import Evolution
from graphwright.evolve.neurons import program
from graphwright.evolve.neurons.genomes import columns_of, genome, take

WILD = {
    "population": 12, "grow": 0.1, "split_link": 0.25, "add_link": 0.4, "toggle_link": 0.2, "remove_link": 0.15,
    "remove_delay_link": 0.15, "set_activation": 0.2, "output": "sigmoid",
    "activation": ("tanh", "sigmoid49", "gauss", "identity", "step"),
}  # fmt: skip


def wild(seed, delays=0.0, generations=12, **changes):
    x = np.random.default_rng(0).normal(size=(20, 3))
    task = ev.Task(x, (x[:, :2] > 0).astype(float), split="same", names=("a", "b 1", "c"))
    run = Evolution(task, None, ev.NEAT(**{**WILD, "delays": delays, **changes}), seed=seed)
    run.run(generations, target=2.0)
    return run


@settings(max_examples=6)
@given(seed=st.integers(0, 1000), delays=st.sampled_from([0.0, 0.4]))
def test_replaying_a_lineage_gives_the_genome(seed, delays):
    run = wild(seed, delays)
    key = ev.IndividualKey(run.generation, seed % 12)
    genes = run.lineage.genome(key)
    p = run.lineage.replay(key)
    assert p.validate().ok
    assert program.read(p) == genes
    recurrent = any(e.delay for b in run.lineage.path(key) for e in run.lineage.genome(b.key).links)
    assert p.hash() == program.founder(genes, run.task.names, batch=1 if recurrent else "B").hash()
    assert p.journal[0].why == "found a genome"
    assert {e.author for e in p.journal} == {"evolution"}


@settings(max_examples=4)
@given(seed=st.integers(0, 1000))
def test_the_vm_and_the_population_loops_give_equal_bits(seed):
    run = wild(seed, activation=("tanh", "sigmoid49", "identity", "relu", "silu", "gelu"))
    x = np.random.default_rng(seed).normal(size=(19, 3)).astype(np.float32)
    for g in range(0, 12, 4):
        p = run.lineage.replay(ev.IndividualKey(run.generation, g))
        ours = run.individual(ev.IndividualKey(run.generation, g)).predict(x)
        planned = gw.compile(p, executor="vm")(x=x)["y"]
        assert planned.numpy().tobytes() == np.ascontiguousarray(ours).tobytes()
        np.testing.assert_allclose(p.run(x=x)["y"].to_numpy(), ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_runs_as_a_program(name):
    one = ev.Genome(
        2, 1, (ev.NodeGene(3, name),), tuple(ev.LinkGene(4 + i, i, 3, 0, True, w) for i, w in enumerate((1.5, -2, 0.3)))
    )
    p = program.founder(one)
    assert program.read(p) == program.read(program.founder(program.read(p)))
    x = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    ours = outputs(tabulate(columns_of([one]), 2, 1), columns_of([one]), Cases.of(x))[0, :, 0]
    np.testing.assert_allclose(p.run(x=x)["y"].to_numpy(), ours, rtol=1e-5, atol=1e-6)
    for other in ACTIVATIONS:  # one edit, and back by undo
        before = p.hash()
        program.apply(p, one, ev.Genome(2, 1, (ev.NodeGene(3, other),), one.links), "other")
        assert program.read(p).nodes[0].activation == other
        if other != name:
            p.undo()
        assert p.hash() == before


def test_a_recurrent_program_keeps_its_state():
    run = wild(3, delays=0.8, generations=30)
    key = next(
        ev.IndividualKey(29, g)
        for g in range(12)
        if any(e.delay and e.open for e in run.lineage.genome(ev.IndividualKey(29, g)).links)
    )
    x = np.random.default_rng(1).normal(size=(1, 7, 3)).astype(np.float32)
    ours = run.individual(key).predict(x)[0]
    p = run.lineage.replay(key)
    step = gw.compile(p, executor="aten")
    theirs = [step(x=x[:, t])["y"].numpy()[0].copy() for t in range(7)]
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    assert not np.allclose(ours, run.individual(key).predict(x[0]))  # without a memory it would be another answer


def test_a_delay_of_several_steps_is_a_chain_of_states():
    links = (
        ev.LinkGene(3, 0, 2, 3, True, 0.75),
        ev.LinkGene(4, 1, 2, 0, True, -0.25),
        ev.LinkGene(5, 2, 2, 2, True, 0.5),
    )
    one = ev.Genome(1, 1, (ev.NodeGene(2, "tanh"),), links)
    p = program.founder(one)
    assert program.read(p) == one
    assert len(p.states()) == 5
    x = np.random.default_rng(0).normal(size=(1, 9, 1)).astype(np.float32)
    ours = outputs(tabulate(columns_of([one]), 1, 1), columns_of([one]), Cases.of(x))[0, 0]
    step = gw.compile(p, executor="aten")
    theirs = [step(x=x[:, t])["y"].numpy()[0].copy() for t in range(9)]
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    program.apply(p, one, ev.Genome(1, 1, one.nodes, links[1:2]), "forget")
    assert not p.states()


def test_training_a_population_equals_training_each_program():
    run = wild(5, activation=("tanh", "sigmoid"), output="identity", generations=8)
    x = np.random.default_rng(2).normal(size=(11, 3)).astype(np.float32)
    y = (x[:, :2] * x[:, 1:] > 0).astype(np.float32)
    genes = type(run.genes)(*(c.copy() for c in run.genes))
    count = len(genes.node_off) - 1
    fit(tabulate(genes, 3, 2), genes, Lesson.of(x, y, "bce"), np.full(count, 50), np.full(count, 0.05), clip=1.0)
    for g in (0, 5, 11):
        p = program.founder(genome(run.genes, g, 3, 2))
        # a parameter that the loss does not depend on has no gradient, and stays
        opt = gw.optim.Adam(p.parameters(), lr=0.05)
        for _ in range(50):
            opt.zero_grad()
            loss = gw.nn.functional.binary_cross_entropy_with_logits(
                p(x=gw.tensor(x))[p.output_names()[0]], gw.tensor(y)
            )
            loss.backward()
            gw.optim.clip_grad_norm_([q for q in p.parameters() if q.grad is not None], 1.0)
            opt.step()
        theirs = {e.id: e.weight for e in program.read(p).links}
        ours = genome(genes, g, 3, 2).links
        assert max(abs(e.weight - theirs[e.id]) for e in ours) <= 1e-4
        assert any(abs(e.weight - f.weight) > 0.1 for e, f in zip(ours, genome(run.genes, g, 3, 2).links, strict=True))


def test_moments_follow_the_genes():
    task = ev.tasks.xor()
    run = Evolution(task, None, ev.Hybrid(population=8), seed=1)
    run.run(1, target=2.0)
    parents = type(run.genes)(*(c.copy() for c in run.genes))
    run._reproduce()
    for g in range(8):
        fitter_parent = int(run.births.fitter_parent[g])
        old = take(parents, np.array([fitter_parent]))
        index = {i: k for k, i in enumerate(old.link_id.tolist())}
        for e in range(run.genes.link_off[g], run.genes.link_off[g + 1]):
            k = index.get(int(run.genes.link_id[e]))
            for name in ("first", "second", "steps"):
                got = getattr(run.genes, name)[e]
                assert got == (0 if k is None else getattr(old, name)[k])


def test_growth_keeps_the_function():
    """Zero outgoing weights: a grown unit and an added link change no answer, to the bit."""
    x = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    task = ev.Task(x, (x[:, 0] > 0).astype(int), split="same")
    run = Evolution(task, None, ev.Hybrid(population=30, grow=0.6, split_link=0.0, add_link=1.0, weights=0.0,
                                         train=None), seed=0)  # fmt: skip
    old_links = np.diff(run.genes.link_off)
    for _ in range(6):
        run.run(run.generation + 2, target=2.0)
        before = run.population().answers(Cases.of(x))
        old_links = np.diff(run.genes.link_off)
        run._reproduce()
        after = run.population().answers(Cases.of(x))
        assert after.tobytes() == before[run.births.fitter_parent].tobytes()
    assert (np.diff(run.genes.link_off) > old_links[run.births.fitter_parent]).any()


def test_a_grown_network_solves_the_task_after_training():
    """XOR of one tanh unit, trained, grown to four, trained on: the grown part is used. 50 seeds at once."""
    task = ev.tasks.xor()
    run = Evolution(task, None, ev.Hybrid(population=50, grow=1.0, tournament=1, champions=9), seed=0)
    from graphwright.array.population.species import Parents
    from graphwright.evolve.neurons.species import Breeder

    def grow(generation):
        each = np.arange(50)
        alone = Parents(np.full(50, -1), each, np.arange(51), each)
        nursery = Breeder(run.settings, 2, 1, 0)
        run.genes, _, run.registry = nursery.breed(run.genes, np.zeros(50), alone, run.registry, generation)

    def train(steps):
        fit(tabulate(run.genes, 2, 1), run.genes, task.lesson(), np.full(50, steps), np.full(50, 0.05))
        return task.score(run.population(run.genes)).metric == 1.0

    grow(1)
    run.genes.link_open[run.genes.link_dst == 3] = run.genes.link_src[run.genes.link_dst == 3] > 1  # no way around
    before = train(300)
    for generation in (2, 3, 4):
        grow(generation)
    assert before.sum() < 25
    assert train(1500).sum() >= 45


def test_a_champion_can_be_saved_edited_and_exported(tmp_path):
    best = Evolution(ev.tasks.xor(), None, seed=1).run(300).best
    p = best.program
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    p.save(tmp_path / "xor")
    again = gw.load(tmp_path / "xor")
    assert again.hash() == p.hash()
    assert (again.run(x=x)["y"].to_numpy() == p.run(x=x)["y"].to_numpy()).all()
    assert "<svg" in p.to_svg()
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(p.to_onnx(tmp_path / "xor.onnx")), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], best.predict(x), rtol=0, atol=1e-5)
    link = next(e for e in best.genome.links if e.src > 3)
    why = [entry.why for entry in p.blame(f"n{link.dst}.l{link.id}")]
    assert why
    assert why[0].startswith("generation ")
    p.undo(len(p.journal) - 1)
    assert program.read(p) == best.evolution.lineage.genome(best.evolution.lineage.path(best.key)[0].key)


def test_programs_other_than_genomes_are_refused():
    b = gw.Builder()
    x = b.input("x", ("B", 2))
    b.output(b.tanh(x), "y")
    with pytest.raises(ev.TaskError, match="not a genome"):
        program.read(b.build())
