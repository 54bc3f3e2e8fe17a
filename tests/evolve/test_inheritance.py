"""Inheritance of weights by children: a table of mutations, and steps to a target compared with new weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import wilcoxon
from test_cells import start as sequence
from test_mutations import cnn, mlp

from graphwright import evolve as ev
from graphwright.evolve import mutations as m
from graphwright.evolve.layers import train
from graphwright.evolve.layers.candidate import TrainingGenes

rng = np.random.default_rng(0)
ADAM = TrainingGenes.of(0.01, "adam", "bce")


def with_cell():
    p = sequence()
    with p.edit("a cell") as e:
        m.insert_cell(e, "out", np.random.default_rng(1), "gru", 4)
    return p


def axis(p, size):
    return next(a for a in m.widths(p) if p.axes()[a].size == size)


# what is made, by what, axes of weights that changed their size, prefixes of weights that are new
CASES = {
    "widen neurons": (mlp, lambda e: m.widen(e, axis(e.program, 8), rng, 3), {0: 2, 1: 1}, ()),
    "narrow neurons": (mlp, lambda e: m.narrow(e, axis(e.program, 8), rng, 3), {0: 2, 1: 1}, ()),
    "widen channels": (cnn, lambda e: m.widen(e, axis(e.program, 4), rng, 2), {0: 2, 1: 1}, ()),
    "another activation": (
        mlp, lambda e: m.replace_activation(e, e.program.of_kind("tanh")[0], rng, "relu"), {}, (),
    ),
    "a new layer": (mlp, lambda e: m.insert_layer(e, m.linears(e.program)[1], rng, 5, block="b9"), {}, ("b9.",)),
    "another cell": (with_cell, lambda e: m.cell_type(e, "b1.to", rng, "lstm"), {}, ("b1.lstm.",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_inherited_where_shapes_match(case):
    make, mutate, resized, new = CASES[case]
    p = make()
    opt = train.optimizer(p, ADAM)
    for key in p.weights:  # no two numbers are equal, so each says where it comes from
        with p.edit("mark") as e:
            e.set_weight(key, rng.normal(size=p.weights[key].shape).astype("f4"))
    marks = train.moments(opt)
    train.restore(opt, {name: rng.random(v.shape).astype(v.dtype) for name, v in marks.items()})
    kept = {**{k: p.weights.array(k).to_numpy().copy() for k in p.weights}, **train.moments(opt)}
    with p.edit(case) as e:
        mutate(e)
    now = {**{k: p.weights.array(k).to_numpy() for k in p.weights}, **train.moments(opt)}
    weights, changed = set(p.weights), {}
    for name, value in now.items():
        if name not in kept:
            assert any(prefix in name for prefix in new), name
            assert name in weights or not value.any()  # a moment begins at 0
            continue
        before = kept[name]
        grown = [d for d, (a, b) in enumerate(zip(value.shape, before.shape, strict=True)) if a != b]
        if not grown:
            assert value.tobytes() == before.tobytes(), name
            continue
        (dim,) = grown
        if name in weights:
            changed[dim] = changed.get(dim, 0) + 1
        small, large = sorted((value, before), key=lambda a: a.shape[dim])
        rows = {np.take(large, i, dim).tobytes(): i for i in range(large.shape[dim])}
        indices = [rows[np.take(small, i, dim).tobytes()] for i in range(small.shape[dim])]
        assert indices == sorted(set(indices)), name  # the overlap, in its order
        if name not in weights and value.shape[dim] > before.shape[dim]:
            assert not np.delete(value, indices, dim).any(), name
    assert changed == resized
    assert weights - set(kept) == {k for k in weights if new and k.startswith(new)}


def test_inherited_weights_reach_a_target_sooner_than_fresh_ones():
    """XOR in so many gradient steps; `python -m benchmarks evolve:inherited` does the same on layers and on data."""

    def steps(inherit, seed):
        settings = ev.Hybrid(inherit=inherit, train=ev.Train(steps=5))
        return ev.Evolution(ev.tasks.xor(), None, settings, seed=seed).run(80).evolution.counters.backward

    inherited, fresh = ([steps(how, seed) for seed in range(20)] for how in ("lamarck", "none"))
    found: Any = wilcoxon(inherited, fresh, alternative="less")
    assert found.pvalue < 0.05, (inherited, fresh)
