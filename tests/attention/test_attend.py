"""`attend` equals dense masked attention in float64, forward and backward, and refuses operands that do not fit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import dense, pattern_of
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from block_edges import edges_of
from graphwright.attention import attend
from graphwright.autograd import ModifiedSinceForward
from graphwright.errors import ShapeError, UsageError
from graphwright.patterns import GateNotAllowed, HeadMismatch, Pattern, PatternShape, causal_full, sliding_window
from values import grad_of


def drawn(
    rng: np.random.Generator, batch: int, heads: int, groups: int, tokens: tuple[int, int], d: int, dv: int
) -> Any:
    queries, keys = tokens
    shapes = (batch, heads, queries, d), (batch, groups, keys, d), (batch, groups, keys, dv)
    return [rng.normal(size=shape) for shape in shapes]


@st.composite
def cases(draw: Any) -> tuple[Pattern, list[np.ndarray], dict[str, Any]]:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    batch, groups, share = draw(st.sampled_from([(1, 1, 1), (3, 2, 2), (2, 1, 3)]))
    planes = draw(st.sampled_from([1, groups, groups * share]))
    queries = draw(st.sampled_from([1, 17, 33]))
    tokens = queries, queries + draw(st.sampled_from([0, 6]))
    rule: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        rule["window"] = draw(st.integers(1, 20))
    pattern = pattern_of(rng, tokens, draw(st.sampled_from([1, 4, 16])), planes, **rule)
    attrs = {"softcap": draw(st.sampled_from([None, 1.5])), "scale": draw(st.sampled_from([None, 0.7]))}
    return pattern, drawn(rng, batch, groups * share, groups, tokens, *draw(st.sampled_from([(4, 4), (3, 6)]))), attrs


@given(cases())
def test_it_equals_dense_masked_attention_with_gradients(
    case: tuple[Pattern, list[np.ndarray], dict[str, Any]],
) -> None:
    pattern, ins, attrs = case
    ours = [gw.tensor(x, requires_grad=True) for x in ins]
    theirs = [torch.tensor(x, requires_grad=True) for x in ins]
    out, (ref, _) = attend(*ours, pattern=pattern, **attrs), dense(*theirs, mask=pattern.to_dense(), **attrs)
    g = np.random.default_rng(1).normal(size=ref.shape)
    (out * gw.tensor(g)).sum().backward()
    ref.backward(torch.tensor(g))
    np.testing.assert_allclose(out.numpy(), ref.detach().numpy(), atol=1e-10)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(grad_of(a).numpy(), grad_of(b).numpy(), atol=1e-10)


@pytest.mark.parametrize("where", ["exp", "weight"])
def test_gates_multiply_and_get_gradients(where: Any) -> None:
    rng = np.random.default_rng(0)
    pattern = causal_full(12, block=4)
    edges = pattern.edges()
    with pattern.edit("gates") as e:
        e.set(edges, gate=np.arange(len(edges)))
    pattern.gates = len(edges)
    values = rng.uniform(0, 2, len(edges)) * (rng.random(len(edges)) < 0.7)
    if where == "weight":
        values[1] *= -1
    ins = drawn(rng, 2, 2, 2, (12, 12), 4, 4)
    ours = [gw.tensor(x, requires_grad=True) for x in (*ins, values)]
    out = attend(*ours[:3], pattern=pattern, gates=ours[3], where=where)
    theirs = [torch.tensor(x, requires_grad=True) for x in (*ins, values)]
    _, q, k = pattern.pairs().T
    whole = torch.ones(1, 3, 3, dtype=torch.float64).index_put(
        (torch.zeros(len(q), dtype=torch.long), torch.tensor(q).long(), torch.tensor(k).long()), theirs[3]
    )
    each = whole.repeat_interleave(4, 1).repeat_interleave(4, 2)
    ref, _ = dense(*theirs[:3], mask=pattern.to_dense(), gates=each, where=where)
    g = rng.normal(size=ref.shape)
    (out * gw.tensor(g)).sum().backward()
    ref.backward(torch.tensor(g))
    np.testing.assert_allclose(out.numpy(), ref.detach().numpy(), atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(grad_of(a).numpy(), grad_of(b).numpy(), atol=1e-10)
    assert np.isfinite(grad_of(ours[3]).numpy()).all()


def test_a_gate_of_zero_equals_the_cut_edge() -> None:
    rng = np.random.default_rng(0)
    pattern = causal_full(16, block=4)
    (edge,) = edges_of(pattern, (3, 1))
    with pattern.edit("gate") as e:
        e.set(edge, gate=0)
    pattern.gates = 1
    ins = [gw.tensor(x) for x in drawn(rng, 1, 2, 2, (16, 16), 4, 4)]
    plain = attend(*ins, pattern=pattern)
    one, zero = (attend(*ins, pattern=pattern, gates=np.array([g])) for g in (1.0, 0.0))
    assert np.array_equal(plain.numpy(), one.numpy())
    pattern.cut(edge)
    np.testing.assert_allclose(zero.numpy(), attend(*ins, pattern=pattern).numpy(), atol=1e-12)


def test_operands_that_do_not_fit_are_refused_before_any_work() -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(16, window=5, block=4, planes=2)
    q, k, v = (gw.tensor(x) for x in drawn(rng, 1, 4, 2, (16, 16), 4, 4))
    long = [gw.tensor(x) for x in drawn(rng, 1, 2, 2, (17, 17), 4, 4)]
    with pytest.raises(PatternShape, match=r"extend"):
        attend(*long, pattern=pattern)
    with pytest.raises(PatternShape, match="lengths"):  # is the last query at the last key, or at key 3?
        attend(q[:, :, :4], k, v, pattern)
    with pytest.raises(HeadMismatch):
        attend(q, k[:, :1], v[:, :1], sliding_window(16, window=5, block=4, planes=3))
    with pytest.raises(ShapeError, match="evenly"):
        attend(q[:, :3], k, v, pattern)
    with pytest.raises(ShapeError, match="operands"):
        attend(q[0], k, v, pattern)
    with pytest.raises(GateNotAllowed, match="weight"):
        attend(q, k, v, pattern, gates=np.array([0.5, -0.5]))
    assert attend(q, k, v, pattern, gates=np.array([0.5, -0.5]), where="weight").shape == q.shape
    with pytest.raises(UsageError, match="not finite"):
        attend(q, k, v, pattern, gates=np.array([np.nan]))
    with pytest.raises(ShapeError, match="one value per gate"):
        attend(q, k, v, pattern, gates=np.ones((2, 2)))
    mask: Any = pattern.to_dense()
    with pytest.raises(UsageError, match="pattern"):
        attend(q, k, v, mask)
    shorter = attend(q[:, :, :9], k[:, :, :9], v[:, :, :9], pattern)
    ref, _ = dense(*(x.numpy()[:, :, :9] for x in (q, k, v)), mask=mask[:, :9, :9])
    np.testing.assert_allclose(shorter.numpy(), ref.numpy(), atol=1e-12)


def test_backward_after_an_edit_is_refused() -> None:
    pattern = sliding_window(16, window=5, block=4)
    q, k, v = (gw.tensor(np.ones((1, 1, 16, 4)), requires_grad=True) for _ in range(3))
    attend(q, k, v, pattern, collect="mass").sum().backward()  # a score is no edit
    loss = attend(q, k, v, pattern).sum()
    pattern.connect(3, 0)
    with pytest.raises(ModifiedSinceForward, match="edited"):
        loss.backward()


def test_edits_wait_for_runs_of_other_threads() -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(64, window=16, block=8)
    ins = [gw.tensor(x) for x in drawn(rng, 1, 2, 2, (64, 64), 8, 8)]
    with_edge, without = [], attend(*ins, pattern=pattern).numpy()
    pattern.connect(7, 0)
    with_edge = attend(*ins, pattern=pattern).numpy()
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.extend(attend(*ins, pattern=pattern).numpy() for _ in range(40)))
    thread.start()
    while thread.is_alive():
        pattern.cut(*edges_of(pattern, (7, 0)))
        pattern.connect(7, 0)
    assert len(found) == 40
    assert all(np.array_equal(x, with_edge) or np.array_equal(x, without) for x in found)


def test_a_trace_gets_a_pattern_node_whose_edits_change_the_next_run() -> None:
    rng = np.random.default_rng(0)
    pattern = sliding_window(16, window=4, block=4)
    ins = [x.astype("f4") for x in drawn(rng, 1, 2, 2, (16, 16), 4, 4)]
    program = gw.trace(lambda q, k, v: attend(q, k, v, pattern), *map(gw.tensor, ins))
    assert [program.op(n) for n in program.of_kind("pattern")] == ["pattern"]
    names = program.input_names()
    for key in (0, 1):
        ref, _ = dense(*ins, mask=pattern.to_dense())
        (out,) = program(**dict(zip(names, ins, strict=True))).values()
        np.testing.assert_allclose(out.numpy(), ref.numpy(), atol=1e-5)
        pattern.connect(3, key)
    with pytest.raises(UsageError, match="trace"):
        gw.trace(lambda q, k, v: attend(q, k, v, pattern, collect="mass"), *map(gw.tensor, ins))
