"""Routed heads and blocks against dense masked attention, NumPy and difference quotients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn, optim
from graphwright.autograd import Tensor, no_grad
from graphwright.errors import UsageError
from graphwright.ops import call
from values import grad_of

B, T, C, D, E = 2, 12, 8, 4, 5


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def dense(x: torch.Tensor, mask: torch.Tensor, w: torch.Tensor, heads: list[list[torch.Tensor]], theta: float | None):
    """One masked attention of all tokens per head: mask m_i ∧ m_j ∧ j <= i."""
    time, half = x.shape[1], heads[0][0].shape[0] // 2
    angle = torch.arange(time, dtype=x.dtype)[:, None] * (theta or 1.0) ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = angle if theta else angle * 0

    def rotated(t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    total = torch.zeros_like(x)
    for e, (q, k, v, o) in enumerate(heads):
        own = mask[..., e]
        seen = own[:, :, None] & own[:, None, :] & torch.ones(time, time, dtype=torch.bool).tril()
        blank = ~own[..., None]
        made = F.scaled_dot_product_attention(rotated(x @ q.T), rotated(x @ k.T), x @ v.T, attn_mask=seen | blank)
        total = total + (made.masked_fill(blank, 0.0) @ o.T) * (w[..., e : e + 1] * own[..., None])
    return total


def drawn(seed: int, kind: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray, list[list[np.ndarray]]]:
    """Tokens, a mask with any number of heads per token, weights, and matrices of heads."""
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T, E)) < rng.choice([0.15, 0.4, 0.9])
    shapes = [(D, C), (D, C), (3, C), (C, 3)]
    heads = [[rng.normal(size=s).astype(kind) for s in shapes] for _ in range(E)]
    return rng.normal(size=(B, T, C)).astype(kind), mask, rng.random((B, T, E)).astype(kind), heads


def packed(x: Any, mask: np.ndarray, w: Any, heads: list[list[Any]], theta: float | None) -> Tensor:
    tensors = [t if isinstance(t, Tensor) else gw.tensor(t) for t in (x, w, *(m for head in heads for m in head))]
    runs = call("dispatch", gw.tensor(mask.reshape(-1, E)), experts=E)
    positions = gw.tensor(np.arange(T)[None])
    flat = tensors[1].reshape(-1, E)
    return call("routed_attention", tensors[0], *runs, flat, positions, *tensors[2:], theta=theta)


def near(a: np.ndarray, b: np.ndarray, bound: float) -> None:
    """Compare, relative to the largest entry."""
    np.testing.assert_allclose(a, b, rtol=0, atol=bound * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize(("kind", "atol"), [("float64", 1e-10), pytest.param("float32", 1e-5, marks=pytest.mark.deep)])
def test_packed_heads_equal_dense_masked_attention(kind, atol):
    for seed in range(200):
        theta = [None, 100.0][seed % 2]
        x, mask, w, heads = drawn(seed, kind)
        flat = [x, w, *(m for head in heads for m in head)]
        theirs = [torch.from_numpy(t.copy()).requires_grad_() for t in flat]
        mine = [Tensor(gw.tensor(t).data, requires_grad=True) for t in flat]
        group = lambda ts: [list(ts[2 + 4 * e : 6 + 4 * e]) for e in range(E)]  # noqa: E731
        wanted = dense(theirs[0], torch.from_numpy(mask), theirs[1], group(theirs), theta)
        made = packed(mine[0], mask, mine[1], group(mine), theta)
        near(made.numpy(), wanted.detach().numpy(), atol)
        u = normal(B, T, C, seed=seed).astype(kind)
        (made * gw.tensor(u)).sum().backward()
        (wanted * torch.from_numpy(u)).sum().backward()
        found = [grad_of(a).numpy().ravel() for a in mine], [grad_of(b).numpy().ravel() for b in theirs]
        near(*map(np.concatenate, found), bound=atol)


def test_long_runs_equal_dense_attention_too():
    """Tiles of queries: more tokens of a head than one tile has."""
    rng, time = np.random.default_rng(0), 300
    x, mask = rng.normal(size=(1, time, C)), rng.random((1, time, 2)) < 0.9
    w = rng.random((1, time, 2))
    heads = [[rng.normal(size=s) for s in ((D, C), (D, C), (3, C), (C, 3))] for _ in range(2)]
    runs = call("dispatch", gw.tensor(mask[0]), experts=2)
    given = Tensor(gw.tensor(x).data, requires_grad=True)
    operands = [gw.tensor(m) for head in heads for m in head]
    made = call(
        "routed_attention", given, *runs, gw.tensor(w[0]), gw.tensor(np.arange(time)[None]), *operands, theta=50.0
    )
    other = torch.from_numpy(x).requires_grad_()
    matrices = [[torch.from_numpy(m) for m in head] for head in heads]
    wanted = dense(other, torch.from_numpy(mask), torch.from_numpy(w), matrices, 50.0)
    np.testing.assert_allclose(made.numpy(), wanted.detach().numpy(), rtol=0, atol=1e-10)
    made.square().sum().backward()
    wanted.square().sum().backward()
    np.testing.assert_allclose(grad_of(given).numpy(), grad_of(other).numpy(), rtol=0, atol=1e-9)


class _Scores(TorchDispatchMode):
    """Counts the entries of score matrices: products over D entries, other than shares times values of width 7."""

    pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func) and args[0].shape[-1] == D and args[1].shape[-1] != 7:
            self.pairs += args[0].shape[0] * args[1].shape[1]
        return func(*args, **(kwargs or {}))


def test_sparse_heads_do_not_compute_all_pairs():
    """Σ |S|² of each head and sequence, of which causality leaves half: not E·T²."""
    x, mask, w, heads = drawn(3)
    mask = np.random.default_rng(0).random(mask.shape) < 0.3
    heads = [[q, k, np.ones((7, C)), np.ones((C, 7))] for q, k, *_ in heads]
    with _Scores() as count:
        packed(x, mask, w, heads, None)
    sizes = mask.sum(1)
    assert count.pairs == (sizes**2).sum()
    assert count.pairs < 0.2 * E * B * T * T


def test_long_runs_compute_pairs_up_to_the_tile_of_the_query():
    """Σ |S|(|S| + 1)/2 pairs are seen; those of a tile of queries with its own later keys are computed and masked."""
    rng, time = np.random.default_rng(0), 4000
    mask = rng.random((time, 2)) < np.array([0.25, 0.5])
    runs = call("dispatch", gw.tensor(mask), experts=2)
    heads = [gw.tensor(m) for _ in range(2) for m in (*rng.normal(size=(2, D, C)), np.ones((7, C)), np.ones((C, 7)))]
    x, w = gw.tensor(rng.normal(size=(1, time, C))), gw.tensor(rng.random((time, 2)))
    with _Scores() as count:
        call("routed_attention", x, *runs, w, gw.tensor(np.arange(time)[None]), *heads, theta=None)
    sizes = mask.sum(0)
    seen = (sizes * (sizes + 1) // 2).sum()
    assert seen <= count.pairs <= seen + 128 * sizes.sum()
    assert count.pairs < 0.12 * 2 * time**2


def test_a_head_sees_its_own_tokens_only():
    x, mask, w, heads = drawn(5)
    mask[..., 0] = np.arange(T) % 3 > 0
    mask[..., 1:] = False
    made = packed(x, mask, w, heads, 100.0).numpy()
    assert not made[:, ~mask[0, :, 0]].any()
    outside, inside = x.copy(), x.copy()
    outside[:, 3], inside[:, 4] = 9.0, 9.0
    np.testing.assert_array_equal(packed(outside, mask, w, heads, 100.0).numpy(), made)
    changed = packed(inside, mask, w, heads, 100.0).numpy()
    assert (changed[:, 5] != made[:, 5]).any()
    np.testing.assert_array_equal(changed[:, :4], made[:, :4])
    kept = np.flatnonzero(mask[0, :, 0])
    operands = [gw.tensor(t) for t in (x[:, kept], *heads[0])]
    runs = call("dispatch", gw.tensor(np.ones((B * len(kept), 1), bool)), experts=1)
    weights, positions = (gw.tensor(t) for t in (w[:, kept, :1].reshape(-1, 1).copy(), kept[None]))
    deleted = call("routed_attention", operands[0], *runs, weights, positions, *operands[1:], theta=100.0).numpy()
    near(deleted, made[:, kept], 1e-12)
    other = x.copy()
    other[1] = normal(T, C, seed=8)
    np.testing.assert_array_equal(packed(other, mask, w, heads, 100.0).numpy()[0], made[0])


def smha(**options: Any) -> ex.DynSMHA:
    m = ex.DynSMHA(C, E, D, 2, name="h.", seed=0, **options).to("float64")
    with no_grad():
        ex.calibrate(m, gw.tensor(normal(4, 64, C, seed=50)), 2)
    return m


def test_a_layer_is_the_formula_of_its_routing_and_shared_heads():
    m, x = smha(), normal(B, T, C)
    r = m.route(gw.tensor(x.reshape(-1, C)))
    heads = [[torch.from_numpy(p.numpy()) for p in head.operands()] for head in m.heads]
    shape = (B, T, E)
    mask, w = (torch.from_numpy(t.numpy().reshape(shape).copy()) for t in (r.choice, r.weights))
    wanted = dense(torch.from_numpy(x), mask, w, heads, 10000.0).numpy()
    assert m.shared is not None
    np.testing.assert_allclose(m(gw.tensor(x)).numpy(), wanted + m.shared(gw.tensor(x)).numpy(), rtol=0, atol=1e-6)
    sets = {tuple(row) for row in r.choice.numpy()[:T].tolist()}
    assert len(sets) > 3  # two tokens of one sequence use different heads


def test_calibrated_tokens_of_a_sequence_use_many_sets_of_heads():
    m = ex.DynSMHA(32, 16, D, 3, name="h.", seed=0)
    x = normal(1, 128, 32).astype("f4")
    ex.calibrate(m, gw.tensor(x), 3)
    choice = m.route(gw.tensor(x[0])).choice.numpy()
    assert len({tuple(row) for row in choice.tolist()}) > 10


def test_outputs_and_choices_do_not_depend_on_later_tokens():
    m, x = smha(), normal(B, T, C)
    before, later = m(gw.tensor(x)).numpy(), x.copy()
    later[:, 7] = 5.0
    after = m(gw.tensor(later)).numpy()
    np.testing.assert_allclose(after[:, :7], before[:, :7], rtol=0, atol=1e-14)  # products of other sizes round apart
    assert (after[:, 7:] != before[:, 7:]).any()
    choices = [m.route(gw.tensor(t[0])).choice.numpy()[:7] for t in (x, later)]
    np.testing.assert_array_equal(choices[0], choices[1])


def test_a_gate_per_sequence_would_depend_on_later_tokens():
    """Red twin: the mean token of each sequence is routed in place of the tokens."""
    m, x = smha(), normal(B, T, C)
    mean = lambda t: np.broadcast_to(t.mean(1, keepdims=True), t.shape).reshape(-1, C)  # noqa: E731
    later = x.copy()
    later[:, 7] = 5.0
    choices = [m.route(gw.tensor(mean(t).copy())).weights.numpy().reshape(B, T, E)[:, :7] for t in (x, later)]
    assert (choices[0] != choices[1]).any()


def test_padding_is_seen_by_no_head():
    m, x = smha(), normal(B, T, C)
    valid = np.arange(T)[None] < np.array([[T], [9]])
    made = m(gw.tensor(x), gw.tensor(valid)).numpy()
    other = x.copy()
    other[1, 9:] = 7.0
    np.testing.assert_array_equal(m(gw.tensor(other), gw.tensor(valid)).numpy()[valid], made[valid])
    np.testing.assert_allclose(made[1, :9], m(gw.tensor(x[1:, :9])).numpy()[0], rtol=0, atol=1e-12)


def test_a_head_without_tokens_gives_0_and_gets_gradients_of_0():
    m, x = smha(shared=0), normal(B, T, C)
    m.heads[2].threshold.assign(gw.tensor(np.float64(3.0)))
    with no_grad():
        assert not m.route(gw.tensor(x.reshape(-1, C))).counts.numpy()[2]
    m(gw.tensor(x)).square().sum().backward()
    for p in m.parameters():
        assert np.isfinite(grad_of(p).numpy()).all()
    assert not any(grad_of(p).numpy().any() for p in m.heads[2].parameters())


def composed(m: ex.DynSMHA, x: np.ndarray) -> np.ndarray:
    """One attention per sequence, with matrices of its own for each token."""
    r = m.route(gw.tensor(x.reshape(-1, C)))
    w = r.weights.numpy().reshape(*x.shape[:2], -1)
    q, k, v, o = (np.stack([head.operands()[i].numpy() for head in m.heads]) for i in range(4))
    made = np.zeros_like(x)
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    turn = np.exp(1j * angle) if m.theta else np.ones_like(angle) + 0j
    for b, tokens in enumerate(x):
        each = [np.einsum("te,edc,tc->td", w[b], matrices, tokens) for matrices in (q, k, v)]
        pairs = [(t[:, : D // 2] + 1j * t[:, D // 2 :]) * turn for t in each[:2]]
        for i in range(len(tokens)):
            scores = (pairs[0][i] * pairs[1][: i + 1].conj()).sum(-1).real / D**0.5
            share = np.exp(scores - scores.max())
            made[b, i] = np.einsum("e,ecd,d->c", w[b, i], o, share / share.sum() @ each[2][: i + 1])
    return made


@pytest.mark.parametrize("options", [{}, {"theta": None, "null": True}])
def test_composed_heads_are_one_head_with_matrices_of_each_token(options):
    m, x = smha(mode="composed", shared=0, **options), normal(B, T, C)
    with no_grad():
        np.testing.assert_allclose(m(gw.tensor(x)).numpy(), composed(m, x), rtol=0, atol=1e-6)
        valid = np.arange(T)[None] >= np.array([[0], [3]])
        padded = m(gw.tensor(x), gw.tensor(valid)).numpy()
    np.testing.assert_allclose(padded[1, 3:], composed(m, x[1:, 3:])[0], rtol=0, atol=1e-6)
    assert not padded[1, :3].any()
    m(gw.tensor(x)).square().sum().backward()
    assert all(grad_of(p).numpy().any() for p in m.heads[0].parameters())


def test_composed_heads_are_cut_as_if_they_were_dead():
    m, x = smha(mode="composed"), normal(1, T, C)
    p = gw.trace(m, gw.tensor(x))
    with p.edit("off") as e:
        ex.set_alive(e, "", [3], alive=False)
    dead = np.asarray(p.run({"x": x})["out"])
    p.undo()
    with p.edit("cut") as e:
        e.cut_units(p.axes()["router.units"].units([3]))
    np.testing.assert_allclose(np.asarray(p.run({"x": x})["out"]), dead, rtol=0, atol=1e-9)
    assert not any(key.startswith("heads.3.") for key in p.weights)


# -- blocks ------------------------------------------------------------------------------------------------------------
class Two(nn.Module):
    def __init__(self, **options: Any) -> None:
        made = [ex.DynONN(C, E, D, 6, 5, 2, name=f"{i}.", seed=i, **options) for i in range(2)]
        self.blocks = [b.to("float64") for b in made]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def two(**options: Any) -> Two:
    m = Two(**options)
    with no_grad():
        ex.calibrate(m, gw.tensor(normal(4, 32, C, seed=50)), 2)
    return m


NAMED = [
    *(f"blocks.0.attn.heads.1.{name}" for name in ("q.weight", "k.weight", "v.weight", "o.weight", "prototype")),
    *("blocks.1.moe.experts.2.down.weight", "blocks.0.moe.router.eta", "blocks.1.attn.heads.0.threshold"),
    *("blocks.0.norm2.weight", "blocks.1.moe.experts.3.gate.weight", "blocks.0.moe.experts.1.prototype"),
]


def test_gradients_of_two_blocks_are_difference_quotients():
    m, x, u = two(null=True), normal(1, 6, C), gw.tensor(normal(1, 6, C, seed=4))

    def loss() -> Tensor:
        return (m(gw.tensor(x)) * u).sum()

    loss().backward()
    rng = np.random.default_rng(0)
    for name in NAMED:
        p = m.get_parameter(name)
        value, grad = p.numpy().copy(), grad_of(p).numpy()
        at = tuple(int(rng.integers(n)) for n in value.shape)
        found = []
        for step in (1e-6, -1e-6):
            moved = value.copy()
            moved[at] += step
            p.assign(gw.tensor(moved))
            found.append(loss().item())
        p.assign(gw.tensor(value))
        assert grad[at] == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-6, abs=1e-6), name
    assert grad_of(m.get_parameter(NAMED[0])).numpy().any()


def test_half_of_a_block_is_opened_by_an_edit_and_undone():
    m, x = two(), normal(1, T, C)
    p = gw.trace(m, gw.tensor(x))
    before, start = p.hash(), np.asarray(p.run({"x": x})["out"])
    for half in ("attn", "moe"):
        with p.edit("open") as e:
            ex.to_dense(e, "blocks.1", half)
        found = p.run({"x": x})
        assert np.asarray(found.value(f"blocks.1.{half}.router.hits")).all()
        assert not np.asarray(found.value(f"blocks.0.{half}.router.hits")).all()
        assert (np.asarray(found["out"]) != start).any()
        p.undo()
        assert p.hash() == before
    with pytest.raises(ex.NotAMixture, match="no such half"), p.edit("open") as e:
        ex.to_dense(e, "blocks.2", "attn")
    assert p.hash() == before


def test_an_open_half_with_one_expert_is_a_plain_one():
    m, x = ex.DynONN(C, 1, D, 1, 5, 1, shared=0, name="b.", seed=0), gw.tensor(normal(B, T, C).astype("f4"))
    for part in (m.attn.heads[0], m.moe.experts[0]):
        part.threshold.assign(gw.tensor(np.float32(-20)))
    head, expert = m.attn.heads[0], m.moe.experts[0]
    plain = nn.MultiHeadAttention(C, 1, head_dim=D, rope=nn.RotaryEmbedding(D))
    for to, source in ((plain.q, head.q), (plain.k, head.k), (plain.v, head.v), (plain.out, head.o)):
        to.weight.assign(source.weight)
    h = x + plain(m.norm1(x))
    z = m.norm2(h)
    wanted = h + expert.down(nn.functional.silu(expert.gate(z)) * expert.up(z))
    np.testing.assert_allclose(m(x).numpy(), wanted.numpy(), rtol=0, atol=1e-6)


def test_heads_are_cut_with_their_parameters_as_if_they_were_dead():
    m, x = two(), normal(1, T, C)
    p = gw.trace(m, gw.tensor(x))
    run = lambda: np.asarray(p.run({"x": x})["out"])  # noqa: E731
    start = run()
    m.blocks[0].attn.router.alive.assign(gw.tensor(np.arange(E) != 3))
    dead = run()
    m.blocks[0].attn.router.alive.assign(gw.tensor(np.ones(E, bool)))
    with p.edit("cut a head") as e:
        e.cut_units(p.axes()["blocks.0.attn.heads"].units([3]))
    np.testing.assert_allclose(run(), dead, rtol=0, atol=1e-9)
    assert not any(key.startswith("blocks.0.attn.heads.3.") for key in p.weights)
    p.undo()
    np.testing.assert_array_equal(run(), start)


def test_a_block_trains_in_a_compiled_step_with_terms():
    m = Two().to("float32")
    x = normal(2, T, C).astype("f4")
    ex.calibrate(m, gw.tensor(x), 2)
    p, opt = gw.trace(m, gw.tensor(x)), optim.Adam(m.parameters(), lr=1e-2)
    loss = lambda out, target: (out - target).square().mean()  # noqa: E731
    step = gw.compile_step(p, loss, opt, {"x": x, "target": x}, also=[ex.sdl(target=2), ex.ghost(layers="*.moe.*")])
    losses = [step(x=x, target=x[:, ::-1].copy()).item() for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    halves = [f"blocks.{i}.{half}.router" for i in range(2) for half in ("attn", "moe")]
    assert set(step.reports) == {f"sdl.{path}.{name}" for path in halves for name in ("soft_count", "k")}


def test_a_mixture_of_any_number_of_experts_is_the_formula_of_its_routing():
    m, x = ex.DynMoE(C, 5, 6, 2, null=True, name="m.", seed=0).to("float64"), normal(40, C)
    with no_grad():
        ex.calibrate(m, gw.tensor(x), 2)
        r = m.route(gw.tensor(x))
    mask, w, wanted = r.choice.numpy(), r.weights.numpy(), np.zeros_like(x)
    for n, e in np.argwhere(mask):
        gate, up, down = (getattr(m.experts[e], name).weight.numpy() for name in ("gate", "up", "down"))
        a = gate @ x[n]
        wanted[n] += w[n, e] * (down @ (a / (1 + np.exp(-a)) * (up @ x[n])))
    assert set(mask.sum(1).tolist()) >= {1, 2, 3}
    near(m(gw.tensor(x)).numpy(), wanted, 1e-10)


def test_experts_beyond_the_first_ones_are_free_slots_until_growth_needs_them():
    m = ex.DynMoE(C, 5, 6, 2, max_experts=9, name="m.", seed=0)
    x = normal(40, C).astype("f4")
    assert len(m.experts) == 9
    assert m.router.alive.numpy().tolist() == [True] * 6 + [False] * 3
    with no_grad():
        ex.calibrate(m, gw.tensor(x), 2)
        chosen = m.route(gw.tensor(x)).choice.numpy()
    assert chosen[:, :6].any(0).all()
    assert not chosen[:, 6:].any()
    few, most = (ex.DynMoE(C, 5, n, 2, name="m.", seed=0) for n in (6, 9))
    assert m.router.start == few.router.start != most.router.start
    with pytest.raises(UsageError, match="live experts"):
        ex.DynMoE(C, 5, 6, 2, max_experts=5)


def test_wide_experts_warn_once():
    with pytest.warns(UserWarning, match="many small") as seen:
        ex.DynMoE(8, 256, 4, 2)
    assert len(seen) == 1
    assert ex.DynMoE(8, 128, 4, 2).experts[0].up.weight.shape == (128, 8)


@pytest.mark.parametrize("wrong", [{"head_dim": 3}, {"head_dim": 0}, {"shared": -1}, {"k0": 9}, {"mode": "soft"}])
def test_invalid_heads_are_refused(wrong):
    with pytest.raises(UsageError, match="invalid"):
        ex.DynSMHA(**{"dim": 8, "heads": 4, "head_dim": 4, "k0": 2, **wrong})
