"""Attention layers against torch and against explicit scores in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphwright import nn
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from values import grad_of

rng = np.random.default_rng(0)


def random_module(module, seed: int = 0):
    """Float64, with values of spread 0.3."""
    module.to("float64")
    for k, p in enumerate(module.parameters()):
        p.assign(Tensor(from_numpy(np.random.default_rng(seed + k).normal(0, 0.3, p.shape))))
    return module


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-2 * torch.arange(half) / (2 * half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def reference(m: nn.MultiHeadAttention, w: dict, x, context, mask, theta) -> torch.Tensor:
    """Head by head, query by query."""
    q, k, v = x @ w["q.weight"].T, context @ w["k.weight"].T, context @ w["v.weight"].T
    batch, tq, tk, size = len(x), x.shape[1], context.shape[1], m.head_dim
    rows = []
    for b in range(batch):
        for i in range(tq):
            at, heads = tk - tq + i, []
            for h in range(m.heads):
                g = h // (m.heads // m.kv_heads)
                query = q[b, i, h * size : (h + 1) * size]
                keys, values = (t[b, :, g * size : (g + 1) * size] for t in (k, v))
                if theta:
                    query = rotate(query[None], torch.tensor([float(at)]), theta)[0]
                    keys = rotate(keys, torch.arange(tk).double(), theta)
                scores = keys @ query / size**0.5
                if m.softcap:
                    scores = m.softcap * torch.tanh(scores / m.softcap)
                seen = [
                    (not m.causal or (j <= at and (m.window is None or j > at - m.window)))
                    and (mask is None or bool(mask[b, j]))
                    for j in range(tk)
                ]
                if not any(seen):
                    heads.append(torch.zeros(size, dtype=torch.float64))
                    continue
                p = torch.softmax(scores.masked_fill(~torch.tensor(seen), float("-inf")), 0)
                heads.append(p @ values)
            rows.append(torch.cat(heads))
    return torch.stack(rows).reshape(batch, tq, -1) @ w["out.weight"].T


@pytest.mark.parametrize("theta", [None, 100.0])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2)])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_layer_matches_explicit_scores(causal, window, softcap, theta, cross):
    """Two key heads for four of queries, another number of keys than queries, padding, all in float64."""
    rope = None if theta is None else nn.RotaryEmbedding(4, theta)
    m = nn.MultiHeadAttention(12, 4, 2, head_dim=4, causal=causal, window=window, softcap=softcap, rope=rope)
    random_module(m)
    x = rng.normal(size=(2, 3, 12))
    context = rng.normal(size=(2, 5, 12)) if cross else x
    mask = np.ones((2, context.shape[1]), bool)
    mask[1, 0] = mask[0, 1] = False
    leaves = [Tensor(from_numpy(v.copy()), requires_grad=True) for v in (x, context)]
    others = [torch.from_numpy(v.copy()).requires_grad_() for v in (x, context)]
    w = {n: torch.from_numpy(p.numpy().copy()).requires_grad_() for n, p in m.named_parameters()}
    if rope is not None:  # its table is rounded to float32 by design
        assert rope.inv_freq.dtype.name == "float64"
    mine = m(leaves[0], leaves[1] if cross else None, key_mask=Tensor(from_numpy(mask)))
    theirs = reference(m, w, others[0], others[1] if cross else others[0], torch.from_numpy(mask), theta)
    tol = 1e-10 if theta is None else 2e-6
    np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=tol, atol=tol)
    (mine * mine).sum().backward()
    (theirs * theirs).sum().backward()
    for leaf, other in [*zip(leaves, others, strict=True)][: 2 if cross else 1]:
        np.testing.assert_allclose(grad_of(leaf).numpy(), grad_of(other).numpy(), rtol=10 * tol, atol=10 * tol)
    for n, p in m.named_parameters():
        np.testing.assert_allclose(grad_of(p).numpy(), grad_of(w[n]).numpy(), rtol=10 * tol, atol=10 * tol)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_layer_matches_torch(causal):
    mine, theirs = (
        nn.MultiHeadAttention(8, 2, bias=True, causal=causal),
        torch.nn.MultiheadAttention(8, 2, batch_first=True),
    )
    state = {n: v.numpy() for n, v in theirs.state_dict().items()}
    parts = {"weight": np.split(state["in_proj_weight"], 3), "bias": np.split(state["in_proj_bias"], 3)}
    mine.load_state_dict(
        {
            **{f"{n}.{kind}": parts[kind][k] for k, n in enumerate("qkv") for kind in parts},
            **{f"out.{kind}": state[f"out_proj.{kind}"] for kind in parts},
        }
    )
    x = rng.normal(size=(2, 5, 8)).astype("f4")
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1) if causal else None
    y = torch.from_numpy(x)
    other, _ = theirs(y, y, y, attn_mask=mask)
    np.testing.assert_allclose(mine(Tensor(from_numpy(x))).numpy(), other.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_rope_frequencies_follow_the_dtype_and_are_not_saved():
    m = nn.MultiHeadAttention(8, 2, rope=nn.RotaryEmbedding(4))
    assert [n for n, _ in m.named_buffers()] == ["rope.inv_freq"]
    assert not any("rope" in n for n in m.state_dict())


def test_interleaved_rope_rotates_complex_numbers():
    """The two styles are one another's under a permutation of the weights' rows, as checkpoints are converted."""
    m, other = (nn.MultiHeadAttention(8, 2, 1, rope=nn.RotaryEmbedding(4, style=s)) for s in ("interleaved", "half"))
    state = random_module(m).state_dict()
    rows = np.array([0, 2, 1, 3])  # (0, 1), (2, 3) become (0, 2), (1, 3)
    for name in ("q.weight", "k.weight"):
        state[name] = Tensor(from_numpy(state[name].numpy().reshape(-1, 4, 8)[:, rows].reshape(-1, 8)))
    other.to("float64").load_state_dict(state)
    x = Tensor(from_numpy(rng.normal(size=(2, 5, 8))))
    np.testing.assert_allclose(m(x).numpy(), other(x).numpy(), rtol=1e-10)
    with pytest.raises(UsageError, match="interleaved"):
        nn.RotaryEmbedding(4, style="pairs")


def test_rope_depends_on_relative_positions():
    """Scores depend on differences of positions alone."""
    m = nn.MultiHeadAttention(8, 2, rope=nn.RotaryEmbedding(4))
    x = Tensor(from_numpy(rng.normal(size=(1, 6, 8)).astype("f4")))
    positions = np.arange(6)[None]
    far = m(x, positions=Tensor(from_numpy(positions + 100)))
    np.testing.assert_allclose(far.numpy(), m(x).numpy(), rtol=1e-3, atol=1e-5)
    apart = m(x, positions=Tensor(from_numpy(positions * 3)))
    assert np.abs(apart.numpy() - m(x).numpy()).max() > 1e-3


def test_sinusoidal_embedding_matches_its_formula():
    table = nn.SinusoidalEmbedding(6)(Tensor(from_numpy(np.arange(12).reshape(3, 4)))).numpy()
    for pos in range(12):
        for i in range(3):
            angle = pos / 10000 ** (2 * i / 6)
            row = table[pos // 4, pos % 4]
            assert row[2 * i] == pytest.approx(np.sin(angle), abs=2e-6)
            assert row[2 * i + 1] == pytest.approx(np.cos(angle), abs=2e-6)


def test_swiglu_and_block_match_their_formulas():
    attention = nn.MultiHeadAttention(8, 2, rope=nn.RotaryEmbedding(4))
    block = nn.TransformerBlock(attention, nn.SwiGLU(8, 12), 8, eps=1e-5)
    random_module(block, 5)
    x = rng.normal(size=(2, 5, 8))
    given = Tensor(from_numpy(x))
    w = {n: p.numpy() for n, p in block.named_parameters()}

    def norm(v, name):
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    h = x + attention(Tensor(from_numpy(norm(x, "attention_norm")))).numpy()
    n = norm(h, "feed_forward_norm")
    gate = n @ w["feed_forward.gate.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (n @ w["feed_forward.up.weight"].T)
    np.testing.assert_allclose(block(given).numpy(), h + inner @ w["feed_forward.down.weight"].T, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiHeadAttention(8, 3),
        lambda: nn.MultiHeadAttention(8, 4, 3),
        lambda: nn.MultiHeadAttention(8, 4, 0),
        lambda: nn.MultiHeadAttention(8, 0),
        lambda: nn.MultiHeadAttention(8, 2, causal=False, window=2),
        lambda: nn.RotaryEmbedding(3),
        lambda: nn.SinusoidalEmbedding(0),
    ],
)
def test_invalid_head_counts_are_refused(make):
    with pytest.raises(UsageError):
        make()
