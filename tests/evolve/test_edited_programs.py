"""What a genome is, and what a live graph owes to edits: one Program, forks that share weights, runs that follow."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from test_mutations import genome, mlp

import graphwright as gw
from graphwright import evolve as ev
from graphwright.errors import GraphwrightError
from graphwright.evolve import mutations as m
from graphwright.evolve.mutations.links import junctions, links, open_links
from seeds import deep

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
GROWTH = ("insert_layer", "add_skip", "widen", "add_link", "split_link", "toggle_link", "replace_activation", "narrow")


def net(seed=0):
    """Two layers, a junction between them that can take more."""
    draw, b = np.random.default_rng(seed), gw.Builder("net")
    x = b.input("x", (4, 3))
    h = b.linear(x, b.param("a.weight", draw.normal(size=(5, 3)).astype("f4")), name="a")
    total = b.junction(b.tanh(h, name="act"), name="total")
    b.output(b.linear(total, b.param("b.weight", draw.normal(size=(2, 5)).astype("f4")), name="b"), "y")
    return b.build()


def mutated(p, draw, names=GROWTH):
    """One random mutation that can be made; its name."""
    while True:
        kind = m.MUTATIONS[names[int(draw.integers(len(names)))]]
        sites = kind.sites(p)
        if len(sites):
            try:
                with p.edit(kind.name, author="evolution") as e:
                    kind.apply(e, sites[int(draw.integers(len(sites)))], draw)
                return kind.name
            except GraphwrightError:
                pass


# -- one Program -------------------------------------------------------------------------------------------------------
def test_genomes_reload_unchanged(tmp_path):
    scalar, layers, draw = genome(), mlp((3, 5, 2)), np.random.default_rng(1)
    for k, p in enumerate((scalar, layers)):
        for _ in range(6):
            mutated(p, draw, ("split_link", "add_link", "toggle_link") if p is scalar else GROWTH)
        p.save(tmp_path / str(k))
        assert gw.load(tmp_path / str(k)).hash() == p.hash()


def test_only_programs_and_genomes_store_a_topology():
    """Columns of genes are the form that a population is bred in, `Genome` one of them to read; no other."""
    words, found = {"nodes", "edges", "links", "consumers", "producers", "adjacency", "topology", "layers"}, set()
    for file in Path(ev.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = {ast.unparse(n.target).removeprefix("self.") for n in ast.walk(node)
                          if isinstance(n, ast.AnnAssign) and ast.unparse(n.annotation) != "int"}  # fmt: skip
                fields |= {ast.unparse(t).removeprefix("self.") for n in ast.walk(node) if isinstance(n, ast.Assign)
                           for t in n.targets if isinstance(t, ast.Attribute)}  # fmt: skip
                if {f.strip("_") for f in fields} & words:
                    found.add(node.name)
    assert found == {"Genome"}


def test_mutations_edit_a_user_program_in_place():
    p = net()
    handles = {n: p.path(n) for n in p.nodes()}
    edges = [(e, p.edge_port(e)) for n in handles for e in p.in_edges(n)]
    draw, before = np.random.default_rng(0), p.hash()
    for name in ("insert_layer", "widen", "add_skip", "add_link", "split_link"):
        mutated(p, draw, (name,))
    assert {n: p.path(n) for n in handles} == handles
    assert all(e in p.in_edges(p.graph.target(e)) and p.edge_port(e) == port for e, port in edges)
    with p.edit("a matrix edge") as e:
        edge = e.link("x", "total", np.zeros((int(p.spec("total").shape[1]), 3), np.float32))
    assert edge in p.in_edges("total")
    p.undo(6)
    assert p.hash() == before


# -- forks -------------------------------------------------------------------------------------------------------------
def test_mutations_of_a_fork_leave_its_parent_unchanged():
    p, draw = net(), np.random.default_rng(2)
    with p.edit("not the first entry") as e:
        e.rename("act", "f")
    before, y = p.hash(), p.run(x=X)["y"].tobytes()
    child = p.fork("child")

    def shared() -> int:
        """Bytes of weights that both hold as one array."""
        both = [k for k in p.weights if k in child.weights]
        return sum(p.weights.array(k).nbytes for k in both if p.weights.array(k) is child.weights.array(k))

    whole = sum(p.weights.array(k).nbytes for k in p.weights)
    assert shared() == whole == 4 * (15 + 10)  # nothing is copied before the first write
    for _ in range(10):
        mutated(child, draw, ("insert_layer", "add_skip", "add_link", "split_link", "toggle_link"))
        assert shared() == whole
    with child.edit("train one") as e:
        e.set_weight("a.weight", np.zeros((5, 3), np.float32))
    assert shared() == 4 * 10
    for _ in range(89):
        mutated(child, draw, ("widen", "narrow", "replace_activation", "remove_layer", "remove_skip", "toggle_link"))
    assert p.hash() == before
    assert p.run(x=X)["y"].tobytes() == y
    assert len(child.journal) == 100
    assert child.journal[0].prev == p.journal.hash
    child.journal.verify()


# -- edits between runs ------------------------------------------------------------------------------------------------
def third_parent(e):
    e.connect(e.add("relu", "act"), "total")


def rerouted(e):
    e.rewire(e.program.in_edges("b")[0], e.add("sin", "total"))


def over_old_and_new(e):
    p = e.program
    x2 = p.node("x2") if p.select("x2").count else e.input("x2", (4, 5))
    e.connect(e.add("mul", "act", x2), "total")


def test_run_after_an_edit_matches_a_reloaded_program(tmp_path):
    """Values, gradients and handles; only descendants of an edit are planned again; undo restores every byte."""
    for seed in range(deep(500, 6)):
        draw, p = np.random.default_rng(seed), net(seed)
        first, steps, start = p.hash(), [third_parent, rerouted, over_old_and_new, None], len(p.journal)
        for k in range(4):
            step = steps[int(draw.integers(4))]
            if step is None:
                mutated(p, draw, ("insert_layer", "add_skip", "add_link", "split_link", "toggle_link"))
            else:
                with p.edit("edit") as e:
                    step(e)
            feeds = {n: np.resize(X + 1, p.spec(n).sizes).astype("f4") for n in p.input_names()}
            p.save(tmp_path / f"{seed}.{k}")
            reloaded = gw.load(tmp_path / f"{seed}.{k}")
            truth, run = reloaded.run(feeds), p.run(feeds)
            assert np.abs(run["y"].to_numpy() - truth["y"].to_numpy()).max() <= 1e-6
            planned = p.compile({n: v.shape for n, v in feeds.items()})
            wanted = truth["y"].to_numpy()
            near = 1e-6 * max(1, np.abs(wanted).max())  # of elements that are small by cancellation
            np.testing.assert_allclose(planned(feeds)["y"].to_numpy(), wanted, rtol=1e-5, atol=near)
            ours, theirs = (r.grad("y", ["a.weight", "b.weight"]) for r in (run, truth))
            for value, other in zip(ours, theirs, strict=True):
                assert np.abs(value.to_numpy() - other.to_numpy()).max() <= 1e-5 * max(
                    1, np.abs(other.to_numpy()).max()
                )
        p.undo(len(p.journal) - start)
        assert p.hash() == first


def test_edit_replans_only_its_descendants():
    p = net()
    with p.edit("long") as e:
        for _ in range(60):
            e.insert(p.in_edges("a")[0], "tanh")
    feed, rows = {"x": X}, p.compile(x=(4, 3), deterministic=True).patched.nodes
    p.compile(x=(4, 3), deterministic=True)(feed)
    with p.edit("a third parent") as e:
        third_parent(e)
    plan = p.compile(x=(4, 3), deterministic=True)
    assert (plan.patched.kind, rows > 60) == ("patched", True)
    assert plan.patched.nodes <= 4
    np.testing.assert_allclose(plan(feed)["y"].to_numpy(), p.run(feed)["y"].to_numpy(), rtol=1e-5, atol=1e-6)


def test_refused_edits_change_nothing():
    """A bad shape, a cycle, a node of another program, a name that is taken: in random edits, after others in them."""
    p, other, draw = net(), mlp((3, *[5] * 8, 2)), np.random.default_rng(0)
    mutated(p, draw, ("insert_layer",))
    mutated(p, draw, ("split_link",) if open_links(p) else ("add_link",))
    foreign = [n for n in other.nodes() if n.index > 8 + max(k.index for k in p.nodes())]  # nor made in an edit
    assert foreign
    bad = [
        lambda e: e.add("add", "x", "b.weight"),
        lambda e: e.set_weight("a.weight", np.zeros((5, 3, 2), np.float32)),
        lambda e: e.connect("x", "total"),
        lambda e: e.connect("total", "total"),
        lambda e: e.rewire(p.in_edges("a")[0], "b"),
        lambda e: e.add("tanh", foreign[int(draw.integers(len(foreign)))]),
        lambda e: e.connect(foreign[int(draw.integers(len(foreign)))], "total"),
        lambda e: e.rename("a", "b"),
        lambda e: e.param("total", np.zeros(2, np.float32)),
        lambda e: m.add_link(e, "b", draw),
        lambda e: m.remove_delay_link(e, "a", draw),
    ]
    good = [
        lambda e: e.add("relu", "act"),
        lambda e: e.rename("act", "f"),
        lambda e: m.widen(e, m.widths(p)[0], draw, 2),
        lambda e: e.set_weight("b.weight", lambda w: w + 1),
        lambda e: m.add_link(e, junctions(p)[0], draw),
        lambda e: links(p) and m.remove_link(e, links(p)[0], draw),
    ]
    before, version, entries = p.hash(), p.version, len(p.journal)
    weights = {k: p.weights.array(k).tobytes() for k in p.weights}
    refused = np.zeros(len(bad), int)
    for _ in range(deep(1000, 150)):
        k = int(draw.integers(len(bad)))

        def edit(k=k):
            with p.edit("refused") as e:
                for at in draw.integers(len(good), size=draw.integers(3)):
                    good[at](e)
                bad[k](e)

        with pytest.raises(GraphwrightError):
            edit()
        refused[k] += 1
        assert (p.hash(), p.version, len(p.journal)) == (before, version, entries)
    assert refused.min() > 0
    assert {k: p.weights.array(k).tobytes() for k in p.weights} == weights
