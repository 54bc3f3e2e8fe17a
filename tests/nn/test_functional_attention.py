"""`functional.attention` against torch's and against explicit scores, with every option."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.functional import attention
from values import grad_of


def case(seed: int, heads: int = 4, groups: int = 2, queries: int = 5, keys: int = 7, kind: str = "float64") -> Any:
    rng = np.random.default_rng(seed)
    shapes = ((2, heads, queries, 3), (2, groups, keys, 3), (2, groups, keys, 4))
    return [rng.normal(size=s).astype(kind) for s in shapes], rng


def reference(q: Any, k: Any, v: Any, seen: Any, bias: Any, cap: float | None, scale: float) -> torch.Tensor:
    """Head by head; a row that sees nothing is 0."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(2, 3) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if bias is None else scores + bias
    seen = seen.expand(scores.shape) & (scores > -torch.inf)
    weights = torch.where(seen, scores, -1e30).softmax(-1) * seen
    return weights @ v


def visible_keys(queries: int, keys: int, causal: bool, window: int | None, start: int | None) -> torch.Tensor:
    first = keys - queries if start is None else start
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for i, j in product(range(queries), range(keys)):
        if causal:
            seen[i, j] = j <= first + i and (window is None or j > first + i - window)
    return seen


@given(
    seed=st.integers(0, 99),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (3, 3)]),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3]),
    start=st.sampled_from([None, 0, 2, -2]),
    cap=st.sampled_from([None, 0.7]),
    masks=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_attention_matches_explicit_scores(
    seed: int,
    heads: tuple[int, int],
    causal: bool,
    window: int | None,
    start: int | None,
    cap: float | None,
    masks: Any,
) -> None:
    hosts, rng = case(seed, *heads)
    window, start = (window, start) if causal else (None, None)
    hosts.append(rng.normal(size=(heads[0], 5, 7)))
    hosts[3][:, 1, 2:4] = -np.inf
    mask = rng.random((2, 1, 5, 7)) < 0.7
    mask[0, :, 3] = False  # a query that sees nothing
    padding = rng.random((2, 7)) < 0.7
    ours = [gw.tensor(h, requires_grad=True) for h in hosts]
    theirs = [torch.tensor(h, requires_grad=True) for h in hosts]
    found = attention(
        *ours[:3],
        mask=gw.tensor(mask) if masks[0] else None,
        bias=ours[3] if masks[1] else None,
        key_mask=gw.tensor(padding) if masks[2] else None,
        causal=causal,
        window=window,
        q_start=start,
        softcap=cap,
        scale=0.6,
    )
    seen = visible_keys(5, 7, causal, window, start)[None, None]
    seen = seen & torch.tensor(mask) if masks[0] else seen
    seen = seen & torch.tensor(padding)[:, None, None] if masks[2] else seen
    q, k, v, bias = theirs
    truth = reference(q, k, v, seen, bias if masks[1] else None, cap, 0.6)
    np.testing.assert_allclose(found.numpy(), truth.detach().numpy(), rtol=1e-10, atol=1e-12)
    weights = rng.normal(size=truth.shape)
    (found * gw.tensor(weights)).sum().backward()
    (truth * torch.tensor(weights)).sum().backward()
    for mine, other in zip(ours[: 4 if masks[1] else 3], theirs, strict=False):
        np.testing.assert_allclose(grad_of(mine).numpy(), grad_of(other).numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["bool", "float", "none"])
def test_attention_matches_torch(how: str, kind: str) -> None:
    hosts, rng = case(0)
    extra = {"bool": rng.random((2, 1, 5, 7)) < 0.8, "float": rng.normal(size=(2, 4, 5, 7)), "none": None}[how]
    if how == "bool":
        extra[..., 0] = True
    name = {"bool": "mask", "float": "bias"}
    ours = [gw.tensor(h).to(kind) for h in hosts]
    own: dict[str, Any] = {}
    if extra is not None:
        own[name[how]] = gw.tensor(extra).to("bool" if how == "bool" else kind)
    found = attention(*ours, **own)
    theirs = [torch.tensor(h).to(getattr(torch, kind)) for h in hosts]
    other = None if extra is None else torch.tensor(extra).to(torch.bool if how == "bool" else theirs[0].dtype)
    truth = torch.nn.functional.scaled_dot_product_attention(*theirs, attn_mask=other, enable_gqa=True)
    assert found.dtype.name == kind
    tol = 1e-5 if kind == "float32" else 0.03
    np.testing.assert_allclose(found.numpy("f4"), truth.float().numpy(), rtol=tol, atol=tol)


def test_the_fused_op_equals_the_primitives() -> None:
    hosts, _ = case(1)
    ours = [gw.tensor(h) for h in hosts]
    for options in ({}, {"causal": True}, {"causal": True, "window": 2}, {"causal": True, "q_start": 4}):
        fused = attention(*ours, **options)
        written = attention(*ours, mask=gw.tensor(np.ones((1, 1, 1, 1), bool)), **options)
        np.testing.assert_allclose(written.numpy(), fused.numpy(), rtol=1e-10)


def test_attention_dropout_uses_one_mask_in_both_directions() -> None:
    q, k = gw.tensor(np.zeros((1, 1, 400, 2)), requires_grad=True), gw.tensor(np.zeros((1, 1, 50, 2)))
    v = gw.tensor(np.ones((1, 1, 50, 1)), requires_grad=True)
    with gw.fork_rng(0):
        found = attention(q, k, v, dropout_p=0.25)
    kept = found.numpy().ravel() * 0.75 * 50  # of 50 equal probabilities
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-9)
    assert abs(kept.mean() / 50 - 0.75) < 0.02
    found.sum().backward()
    assert grad_of(v).numpy().sum() == pytest.approx(found.numpy().sum())


def test_q_start_may_be_a_traced_tensor() -> None:
    hosts, _ = case(2)
    ours = dict(zip("qkv", hosts, strict=True))
    p = gw.trace(lambda q, k, v, at: attention(q, k, v, causal=True, q_start=at, softcap=2.0), *hosts, np.asarray(0))
    for start in (0, 2, 6):
        found = p(**ours, at=np.asarray(start))["out"].numpy()
        truth = attention(*map(gw.tensor, hosts), causal=True, q_start=start, softcap=2.0)
        np.testing.assert_allclose(found, truth.numpy(), rtol=1e-10)


def test_mismatched_operands_are_refused() -> None:
    (q, k, v), _ = case(0)
    ours = [gw.tensor(h) for h in (q, k, v)]
    with pytest.raises(UsageError, match="causal"):
        attention(*ours, window=2)
    for wrong in ((ours[0][:, :3], *ours[1:]), (ours[0][0], *ours[1:]), (*ours[:2], ours[2][:, :, :3])):
        for options in ({}, {"softcap": 1.0}):
            with pytest.raises(ShapeError):
                attention(*wrong, **options)
