"""Trained gates on the edges of a pattern: the common table of gates, planted offsets, relative cuts, steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense_attention import dense

import graphwright as gw
from block_edges import edges_of
from graphwright import attention as at
from graphwright import structure as st
from graphwright.attention.gates import allowed_pairs, gate_of
from graphwright.errors import UsageError
from graphwright.graph import StaleHandle
from graphwright.patterns import GateNotAllowed, Pattern, causal_full, sliding_window
from graphwright.program import Program
from graphwright.program.errors import DeadGate


def program_of(pattern: Pattern, tokens: int, width: int, batch: int = 1, heads: int = 1, kind: str = "f4") -> Program:
    zero = gw.tensor(np.zeros((batch, heads, tokens, width), kind))
    return gw.trace(lambda q, k, v: at.attend(q, k, v, pattern), zero, zero, zero)


def feeds(p: Program, *arrays: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(p.input_names(), arrays, strict=True))


def test_gates_are_nodes_of_the_program_and_undo_removes_them() -> None:
    rng = np.random.default_rng(0)
    pattern = causal_full(12, block=4)
    p = program_of(pattern, 12, 4, kind="f8")
    q, k, v = (rng.normal(size=(1, 1, 12, 4)) for _ in range(3))
    before, plain = p.hash(), p(**feeds(p, q, k, v))
    handle = pattern.gate("sigmoid", init=np.array([0.3, -1.0, 2.0, 0.1, 0.5, 0.7]))
    assert [e.over for e in st.DifferentiableGraph(p).elements()] == ["pattern"] * 6
    assert p.gates()[handle].owner in p.patterns
    z = p.gates().logits()
    values = 1 / (1 + np.exp(-z[np.asarray(pattern.edges["gate"])]))
    each = np.ones((1, 3, 3))
    for (_, i, j), value in zip(pattern.pairs(), values, strict=True):
        each[0, i, j] = value
    import torch

    factor = torch.from_numpy(each.repeat(4, 1).repeat(4, 2))
    ref, _ = dense(q, k, v, pattern.to_dense(), factor)
    (out,) = p(**feeds(p, q, k, v)).values()
    np.testing.assert_allclose(out.numpy(), ref.numpy(), atol=1e-12)
    plan = p.compile({n: x.shape for n, x in feeds(p, q, k, v).items()})
    (planned,) = plan(feeds(p, q, k, v)).values()
    np.testing.assert_allclose(np.asarray(planned), ref.numpy(), atol=1e-12)
    p.undo()
    assert p.hash() == before
    assert (pattern.gates, np.asarray(pattern.edges["gate"]).max()) == (0, -1)
    (again,) = p(**feeds(p, q, k, v)).values()
    assert np.array_equal(again.numpy(), next(iter(plain.values())).numpy())
    p.redo()
    assert pattern.gates == 6
    with p.edit("no gates") as e:
        e.ungate(handle)
    assert not p.gates()
    (again,) = p(**feeds(p, q, k, v)).values()
    assert np.array_equal(again.numpy(), next(iter(plain.values())).numpy())


def test_gates_can_be_tied_by_offset_and_cost_pairs() -> None:
    pattern = causal_full(10, block=4)
    p = program_of(pattern, 10, 4)
    pattern.gate("hard_concrete", tie="offset")
    gate = next(iter(p.gates().values()))
    assert gate.length == 3
    slots, pairs = np.asarray(pattern.edges["gate"]), pattern.pairs()
    assert len({(slot, i - j) for slot, (_, i, j) in zip(slots, pairs, strict=True)}) == 3
    by_slot = {int(slot): 0 for slot in slots}
    mask = pattern.to_dense()[0]
    for slot, (_, i, j) in zip(slots, pairs, strict=True):
        by_slot[int(slot)] += mask[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].sum()
    assert gate.cost.tolist() == [by_slot[i] for i in range(3)]
    assert allowed_pairs(pattern, pattern.edges()).sum() == mask.sum()
    terms = st.DifferentiableGraph(p).penalty(st.cost(1.0, of="table"))
    assert terms.item() == pytest.approx(st.DifferentiableGraph(p).elements()[0].p_now)


def test_only_some_edges_can_be_gated() -> None:
    pattern = sliding_window(16, window=8, block=4)
    p = program_of(pattern, 16, 4)
    pattern.gate("sigmoid", edges=edges_of(pattern, (3, 2), (2, 1)))
    assert p.gates().count == 2
    assert (np.asarray(pattern.edges["gate"]) >= 0).sum() == 2


def test_gates_that_cannot_be_are_refused_with_nothing_changed() -> None:
    pattern = sliding_window(16, window=8, block=4)
    with pytest.raises(UsageError, match="trace"):
        pattern.gate("sigmoid")
    p = program_of(pattern, 16, 4)
    before = p.hash()
    with pytest.raises(GateNotAllowed, match="weight"):
        pattern.gate("scale")
    with pytest.raises(UsageError, match="kind"):
        pattern.gate("open")
    with pytest.raises(UsageError, match="choice"):
        pattern.gate("choice")
    with pytest.raises(DeadGate):
        pattern.gate("sigmoid", init=np.inf)
    with pytest.raises(UsageError, match="no edge"):
        pattern.gate("sigmoid", edges=[])
    (gone,) = edges_of(pattern, (3, 2))
    pattern.cut(gone)
    with pytest.raises(StaleHandle):
        pattern.gate("sigmoid", edges=[gone])
    p.undo()
    assert (p.hash(), len(p.gates())) == (before, 0)
    pattern.gate("scale", "weight", init=1.0)
    with pytest.raises(UsageError, match="already"):
        pattern.gate("sigmoid")


def offset_problem(
    tokens: int = 48, batch: int = 8, seed: int = 0
) -> tuple[Pattern, Program, st.DifferentiableGraph, Any]:
    """All causal edges with gates, fixed random scores; the result should be the value `offset` tokens before."""
    rng = np.random.default_rng(seed)
    pattern = causal_full(tokens, block=1)
    q, k = (0.7 * rng.normal(size=(1, 1, tokens, 8)).repeat(batch, 0).astype("f4") for _ in range(2))
    p = program_of(pattern, tokens, 8, batch=batch)
    pattern.gate("sigmoid", init=2.0)

    def draw() -> dict[str, np.ndarray]:
        return feeds(p, q, k, rng.normal(size=(batch, 1, tokens, 8)).astype("f4"))

    return pattern, p, st.DifferentiableGraph(p), draw


def recovered(pairs: set[tuple[int, int]], tokens: int = 48, offset: int = 7) -> tuple[float, float]:
    """Recall and precision of edges, among the queries that have a planted key."""
    wanted = {(i, i - offset) for i in range(offset, tokens)}
    mine = {pair for pair in pairs if pair[0] >= offset}
    return len(mine & wanted) / len(wanted), len(mine & wanted) / max(len(mine), 1)


@pytest.mark.parametrize("lam", [pytest.param(1e-3, marks=pytest.mark.deep), 1e-2, 5e-2])
def test_gates_find_a_planted_offset_and_are_cut_relative_to_their_row(lam: float) -> None:
    tokens = 48
    pattern, p, dg, batch = offset_problem(tokens)
    name = p.input_names()[2]

    def task(outputs: Any, given: Any) -> Any:
        (out,) = outputs.values()
        gap = out[:, :, 7:] - given[name][:, :, : tokens - 7]
        return (gap * gap).mean()

    def penalty(terms: Any) -> Any:
        return terms.open.sum() * (lam / tokens)

    opt = st.JointOptimizer(dg, task, [penalty], gates=0.1, mode="gates")
    for _ in range(600):
        opt.step(batch())
    now = {e.index: e.p_now for e in dg.elements()}
    slots = np.asarray(pattern.edges["gate"])
    absolute = {(i, j) for slot, (_, i, j) in zip(slots, pattern.pairs().tolist(), strict=True) if now[slot] >= 0.5}
    done = dg.discretize(0.5, to="one")
    assert not p.gates()
    recall, precision = recovered({(i, j) for _, i, j in pattern.pairs().tolist()})
    assert recall >= 0.97
    assert precision >= 0.97
    assert p.journal[-1].author == "gate"
    assert done.num_pruned_edges > 0
    if lam == 5e-2:
        assert recall == precision == 1
        assert recovered(absolute)[0] == 0, "the penalty shrinks a whole row together: a fixed threshold deletes it"
    p.undo()
    assert p.gates().count == 48 * 49 // 2


def test_steps_hold_the_planted_key_with_a_constant_number_of_edges() -> None:
    rng = np.random.default_rng(0)
    tokens, offset, prune, batch = 64, 11, 32, 16
    pattern = sliding_window(tokens, window=4, block=1)
    p = program_of(pattern, tokens, 16, batch=batch)
    pattern.gate("sigmoid")
    dg = st.DifferentiableGraph(p)
    name = p.input_names()[2]

    def task(outputs: Any, given: Any) -> Any:
        (out,) = outputs.values()
        gap = out[:, :, offset:] - given[name][:, :, : tokens - offset]
        return (gap * gap).mean()

    def draw() -> dict[str, np.ndarray]:
        return feeds(p, *(rng.normal(size=(batch, 1, tokens, 16)).astype("f4") for _ in range(3)))

    opt = st.JointOptimizer(dg, task, gates=0.1, mode="gates")
    first = last = opt.step(draw()).loss
    edges = len(pattern)
    for _ in range(10):
        q, k, v = draw().values()
        (out,) = p(**feeds(p, q, k, v)).values()
        slope = np.zeros_like(v)
        slope[:, :, offset:] = out.numpy()[:, :, offset:] - v[:, :, : tokens - offset]
        done = pattern.step(q, k, v, slope, prune=prune)
        assert (len(pattern), len(done.cut), len(done.added)) == (edges, prune, prune)
        assert p.journal[-1].author == "gate"
        for _ in range(30):
            last = opt.step(draw()).loss
    held = np.mean([pattern.has(i, i - offset) for i in range(offset, tokens)])
    assert held >= 0.95
    assert last <= first / 10
    assert gate_of(pattern) is not None
