"""Planted structure is found: edges that carry signal, heads that are noise; at the stated settings, every seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from fixtures import tiny_llama
from graphwright import structure as st
from graphwright.nn.functional import cross_entropy
from graphwright.program import Program
from graphwright.testing.planted import Edges, Sources
from seeds import deep, some

STEPS = 300


def trained(
    problem: Edges, seed: int, schedule: st.TemperatureSchedule | None = None, **options: Any
) -> st.DifferentiableGraph:
    view = st.DifferentiableGraph(problem.program, seed=seed, schedule=schedule)
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1, steps=STEPS, **options)
    for _ in range(STEPS):
        opt.step(problem.batch())
    return view


def remaining(done: st.Discretized) -> set[str]:
    return {e.name for e in done.elements} - set(done.cut)


@pytest.mark.parametrize("seed", range(deep(5, 2)))
def test_planted_edges_are_found(seed: int) -> None:
    problem = Edges(seed)
    problem.gate("hard_concrete")
    done = trained(problem, seed).discretize(0.5, probe=problem.batch(512))
    planted, others = problem.found(remaining(done))
    assert planted >= 0.95
    assert others >= 0.9
    assert done.loss_after is not None
    assert done.loss_before is not None
    assert done.loss_after <= 1.05 * done.loss_before
    assert done.num_pruned_edges == len(done.cut) == 56 - sum(len(problem.program.in_edges(f"y{i}")) for i in range(8))


@pytest.mark.parametrize("seed", range(deep(5, 1)))
def test_planted_sources_with_trained_weights_are_found(seed: int) -> None:
    """Gates wait for the weights: at random weights every source disturbs, and all gates would close."""
    problem = Sources(seed, scale=0.3)
    p = problem.program
    with p.edit("gates on all edges") as e:
        e.gate(list(p.in_edges("total")))
    view = st.DifferentiableGraph(p, seed=seed)
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1, steps=STEPS)
    for _ in range(STEPS):
        opt.step(problem.batch())
    done = view.discretize(0.5, probe=problem.batch(512))
    assert remaining(done) == problem.planted
    assert done.loss_after is not None
    assert done.loss_before is not None
    assert done.loss_after <= 1.05 * done.loss_before


KINDS = {
    "hard_concrete": (0.5, None),
    "concrete": (0.5, None),
    "ste": (0.9, None),
    "sigmoid": (0.9, st.TemperatureSchedule(1.0, 0.1, STEPS)),
}


@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_each_kind_hardens_without_loss(kind: str) -> None:
    p0, schedule = KINDS[kind]
    problem = Edges(11)
    problem.gate(kind, init=st.init_for(p0, kind, 2 / 3 if kind == "hard_concrete" else 1.0))
    done = trained(problem, 11, schedule).discretize(0.5, probe=problem.batch(512))
    assert done.loss_after is not None
    assert done.loss_before is not None
    assert done.loss_after <= 1.05 * done.loss_before
    planted, _ = problem.found(remaining(done))
    assert planted >= 0.95


@pytest.mark.deep
def test_a_soft_sigmoid_gate_loses_accuracy_when_hardened() -> None:
    """What the annealed kinds are for: at T = 1, unfolded, no warm-up, the loss at least doubles in the median."""
    ratios = []
    for seed in range(3):
        problem = Edges(seed)
        problem.gate("sigmoid", init=st.init_for(0.5, "sigmoid"))
        done = trained(problem, seed, warmup=0).discretize(0.5, to="one", probe=problem.batch(512))
        assert done.loss_before
        assert done.loss_after
        ratios.append(done.loss_after / done.loss_before)
    assert np.median(ratios) > 2


# -- heads -------------------------------------------------------------------------------------------------------------
def noisy_llama(seed: int = 0) -> gw.models.Model:
    """Tiny Llama with a key head of noise in each layer: two query heads whose columns of o are small and random."""
    model, rng = gw.open(tiny_llama.directory("f32")), np.random.default_rng(seed)
    p = model.program
    with p.edit("noise heads") as e:
        for layer in range(2):
            axis = f"layers.{layer}.attn.kv_groups"
            before = p.weights[f"model.layers.{layer}.self_attn.o_proj.weight"].numpy()
            norm = np.median(np.linalg.norm(before, axis=0))
            e.grow(axis, 1, seed=seed + layer)
            noise = rng.normal(size=(64, 32)).astype("f4")
            noise *= 0.05 * norm / np.linalg.norm(noise, axis=0)
            e.set_weight(f"model.layers.{layer}.self_attn.o_proj.weight",
                         lambda w, noise=noise: np.concatenate([w[:, :64], noise], 1))  # fmt: skip
    return model


def task(outputs: dict, batch: dict) -> gw.Tensor:
    """Cross entropy of the repeats."""
    return cross_entropy(outputs["logits"][:, :-1], batch["targets"], dim=-1)


def batch(seed: int, rows: int = 16) -> dict[str, np.ndarray]:
    ids, mask = tiny_llama.batch(seed, rows)
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    return {"ids": ids, "positions": positions, "targets": np.where(mask, ids[:, 1:], -100)}


def accuracy(p: Program) -> float:
    ids, mask = tiny_llama.batch(0, 128)
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return tiny_llama.accuracy(p.run(ids=ids, positions=positions, keep="outputs")["logits"].to_numpy(), ids, mask)


@pytest.mark.deep
def test_noise_heads_are_cut_first() -> None:
    model = noisy_llama()
    p = model.program
    before = accuracy(p)
    handles = p.select("layers.*.attn").heads.gate()
    assert accuracy(p) == before
    needed = set()
    for handle in handles:
        for i in range(4):
            with p.edit("close") as e:
                e.set_gate(handle, "closed", [i])
            if before - accuracy(p) > 0.01:
                needed.add(p.gates()[handle].names()[i])
            p.undo()
    view = st.DifferentiableGraph(p)
    opt = st.JointOptimizer(view, task, [st.budget(8, steps=STEPS)], mode="gates", gates=0.05)
    for step in range(STEPS):
        opt.step(batch(1000 + step, 8))
    done = view.discretize(st.TopPolicy(8), probe=batch(5000), task=task)
    stay = remaining(done)
    assert len(stay) == 8
    noise = {f"layers.{layer}.attn.heads[{i}]" for layer in range(2) for i in (4, 5)}
    assert before - accuracy(p) <= 0.01
    assert not (noise & stay and needed - stay)
    assert done.gap is not None
    assert p.undo() is None
    assert p.gates().count == 12


@pytest.mark.deep
def test_heads_branches_and_skips_compete_for_one_budget() -> None:
    model = gw.open(tiny_llama.directory("f32"))
    p = model.program
    before = accuracy(p)
    p.select("layers.*.attn").heads.gate()
    residual = [j for j in p.junctions() if len(p.in_edges(j)) == 2]
    with p.edit("branches and skips") as e:
        e.gate([edge for j in residual for edge in p.in_edges(j)])
    assert p.gates().count == 16
    view = st.DifferentiableGraph(p)
    opt = st.JointOptimizer(view, task, [st.budget(11, steps=STEPS)], params=1e-3, gates=0.05)
    for step in range(STEPS):
        opt.step(batch(1000 + step, 8))
    done = view.discretize(st.TopPolicy(11), probe=batch(5000), task=task)
    right_after = before - accuracy(p)
    assert len(done.elements) - len(done.cut) == 11
    healing = st.JointOptimizer(view, task, params=1e-3, mode="params")
    for step in range(200):
        healing.step(batch(3000 + step, 16))
    print(f"drop {100 * right_after:.1f} points right after the cut, {100 * (before - accuracy(p)):.1f} healed")
    assert before - accuracy(p) <= 0.01
