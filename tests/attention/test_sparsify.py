"""Sparsify on traced modules: masks of padding, cross-attention, gradients, and what reports say."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import attention as at
from graphwright.errors import UsageError
from graphwright.models.inspect import inspect_program
from graphwright.patterns import PatternShape
from graphwright.program.cost import flops

F = gw.nn.functional


def drawn(*shape: int, seed: int = 0) -> gw.Tensor:
    return gw.tensor(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def output(p: gw.Program, **feeds: gw.Tensor) -> np.ndarray:
    """Return the output of a plan, which equals that of a run."""
    found = np.asarray(gw.compile(p)(feeds)["out"])
    np.testing.assert_allclose(np.asarray(p.run(feeds)["out"]), found, atol=1e-5)
    return found


def test_multihead_attention_of_a_module() -> None:
    gw.manual_seed(0)
    net, x = gw.nn.MultiheadAttention(16, 4, batch_first=True), drawn(2, 32, 16)
    p = gw.trace(lambda x: net(x, x, x, need_weights=False)[0], x)
    whole = output(p, x=x)
    at.sparsify(p, "**", at.full(32, block=8))
    np.testing.assert_allclose(output(p, x=x), whole, atol=1e-5)
    at.patterns(p)["pattern"].cut(at.patterns(p)["pattern"].edges()[:4])
    assert np.abs(output(p, x=x) - whole).max() > 1e-3


@pytest.mark.parametrize("causal", [True, False])
def test_padding_of_the_attention_stays(causal: bool) -> None:
    q, k, v = (drawn(2, 4, 24, 8, seed=i) for i in range(3))
    mask = gw.tensor(np.arange(24)[None] < np.array([[17], [24]]))
    p = gw.trace(lambda q, k, v, mask: F.attention(q, k, v, causal=causal, key_mask=mask), q, k, v, mask)
    assert [p.attrs(n)["optional"] for n in p.of_traits(attention=True)] == [("key_mask",)]
    whole = output(p, q=q, k=k, v=v, mask=mask)
    at.sparsify(p, "**", at.causal_full(24, block=8) if causal else at.full(24, block=8))
    np.testing.assert_allclose(output(p, q=q, k=k, v=v, mask=mask), whole, atol=1e-5)


def test_cross_attention_needs_its_lengths() -> None:
    q, k, v = drawn(1, 2, 5, 8), drawn(1, 2, 20, 8, seed=1), drawn(1, 2, 20, 8, seed=2)
    p = gw.trace(lambda q, k, v: F.attention(q, k, v, causal=True), q, k, v)
    whole = output(p, q=q, k=k, v=v)
    with pytest.raises(PatternShape):
        at.sparsify(p, "**", at.causal_full(20, block=4))
    at.sparsify(p, "**", at.causal_full((5, 20), block=4))
    np.testing.assert_allclose(output(p, q=q, k=k, v=v), whole, atol=1e-5)


def test_gradients_equal_those_of_dense_attention() -> None:
    gw.manual_seed(0)
    net, x = gw.nn.MultiheadAttention(16, 4, batch_first=True), drawn(2, 32, 16)
    p = gw.trace(lambda x: net(x, x, x, need_weights=False)[0], x)
    names = [p.path(n) for n in p.params()]
    whole = p.grad("out", names).run(x=x)
    at.sparsify(p, "**", at.full(32, block=8))
    sparse = p.grad("out", names).run(x=x)
    for name in whole:
        np.testing.assert_allclose(np.asarray(sparse[name]), np.asarray(whole[name]), atol=2e-4, rtol=1e-4)


def test_a_trace_of_code_with_a_pattern_owns_it() -> None:
    from graphwright.ops import call
    from graphwright.program.patterns import variable_of

    pattern = at.sliding_window(16, 4, block=4)
    q = drawn(1, 2, 16, 4)
    p = gw.trace(lambda q: call("block_sdpa", q, q, q, variable_of(pattern), scale=0.5)[0], q)
    assert list(at.patterns(p).values()) == [pattern]
    before = output(p, q=q)
    pattern.connect(3, 0)
    assert len(p.journal) == 1
    assert np.abs(output(p, q=q) - before).max() > 1e-4
    with pytest.raises(UsageError, match="owns"):
        pattern.undo()


def test_costs_and_reports_count_connected_blocks() -> None:
    q = drawn(1, 2, 64, 8)
    p = gw.trace(lambda q: F.attention(q, q, q, causal=True), q)
    dense = flops(p, {})
    at.sparsify(p, "**", at.sliding_window(64, 8, block=8), name="window")
    assert flops(p, {}) == round(dense * 15 / 64)  # 8 blocks on the diagonal, 7 next to it
    (row,) = inspect_program(p).patterns
    assert (row.key, row.edges, row.attentions, row.density) == ("window", 15, 1, 15 / 64)
    assert "pattern window: 64 x 64 tokens in blocks of 8, 15 edges" in str(inspect_program(p))
    assert "15 edges of 8" in p.to_svg()
