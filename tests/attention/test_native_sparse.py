"""Native sparse attention against loops over queries: each branch, choices, gradients; no query sees its future."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import selected_reference as reference
import torch

import graphwright as gw
from graphwright import attention as at
from graphwright.attention.native_sparse import FORCED, NativeSparse
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call
from graphwright.program.kinds import KINDS
from graphwright.testing.oracle import assert_bits
from seeds import deep

DIM, TIME = 12, 45
SMALL: dict[str, Any] = {"head_dim": 4, "summary": 8, "stride": 4, "block": 4, "window": 10}
VARIANTS: dict[str, dict[str, Any]] = {
    "tau": {},
    "tile": {"granularity": "tile"},
    "topn": {"select": "topn", "n": 2},
    "topn tile": {"select": "topn", "n": 2, "granularity": "tile"},
    "mlp, own kv": {"compressor": "mlp", "shared_kv": False},
    "capped": {"most": 2},
    "equal sizes": {"summary": 4, "stride": 4},
    "wide overlap": {"summary": 12, "stride": 2, "block": 6},
}


def module(seed: int = 0, dtype: str = "float64", **options: Any) -> NativeSparse:
    return NativeSparse(DIM, 4, 2, **{**SMALL, **options}, name="nsa.", seed=seed, qk_gain=3.0).to(dtype)


def psi(m: NativeSparse) -> Any:
    assert m.psi is not None
    return m.psi


def tokens(seed: int = 0, batch: int = 2, time: int = TIME) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, time, DIM))


def lists(
    m: NativeSparse, made: at.SparseAttention, time: int, ghosts: bool = False
) -> dict[tuple[int, int, int], set]:
    """The blocks of each (sequence, key head, query): those that are read, or the ghosts."""
    blocks, gates = made.choice.blocks.numpy(), made.choice.gates.numpy()
    tile = m.block if m.granularity == "tile" else 1
    return {
        (b, g, t): {int(j) for j, gate in zip(blocks[b, g, t // tile], gates[b, g, t // tile], strict=True)
                    if j >= 0 and (gate == 0) == ghosts}
        for b in range(blocks.shape[0]) for g in range(blocks.shape[1]) for t in range(time)
    }  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_each_branch_and_gradient_equals_a_slow_reference(name: str) -> None:
    time = deep(TIME, 29)  # not a multiple of any size
    m, x = module(**VARIANTS[name]), tokens(time=time)
    inputs, w = gw.tensor(x, requires_grad=True), reference.weights(m)
    known: dict[str, Any] = w
    made = m.attend(inputs)
    ghosts = lists(m, made, time, ghosts=True)
    theirs = torch.from_numpy(x).requires_grad_()
    r = reference.attend(m, w, theirs, ghosts=ghosts)
    assert lists(m, made, time) == r.blocks
    for branch in ("compressed", "selected", "sliding", "out"):
        assert np.abs(getattr(made, branch).numpy() - getattr(r, branch).detach().numpy()).max() < 1e-10, branch
    total = r.out
    seeds = np.random.default_rng(1).normal(size=total.shape)
    loss, other = (made.out * gw.tensor(seeds)).sum(), (r.out * torch.from_numpy(seeds)).sum()
    if m.psi is not None:
        auxiliary = reference.aux(m, w, r)
        assert abs(float(made.aux.numpy()) - float(auxiliary.detach())) < 1e-12
        loss, other = loss + made.aux, other + auxiliary
    loss.backward()
    other.backward()
    if m.psi is not None:
        add_gate_gradients(m, w, r)
        assert any(ghosts.values())
    assert inputs.grad is not None
    assert theirs.grad is not None
    assert np.abs(inputs.grad.numpy() - theirs.grad.numpy()).max() < 1e-9
    for key, p in m.named_parameters():
        assert p.grad is not None
        assert np.abs(p.grad.numpy() - known[key].grad.numpy()).max() < 1e-9, key


def slope_of(t: Any) -> torch.Tensor:
    return t.grad


def add_gate_gradients(m: NativeSparse, w: dict[str, Any], r: reference.Reference) -> None:
    """dL/dτ = -Σ dL/dg·σ'((P·n - τ)/0.1)/0.1 over the blocks that were evaluated."""
    tau = torch.nn.functional.softplus(w["psi"]).detach().numpy()
    slopes = np.zeros(m.kv_heads)
    for (b, g, t, j), gate in r.gates.items():
        s = 1 / (1 + np.exp(-(r.shares[b, g, t][j] * r.candidates[t] - tau[g]) / 0.1))
        slopes[g] -= float(slope_of(gate)) * s * (1 - s) / 0.1
    w["psi"].grad += torch.from_numpy(slopes) * torch.sigmoid(w["psi"].detach())


def test_float32_equals_float64() -> None:
    exact, low = module().attend(gw.tensor(tokens())), module(dtype="float32").attend(gw.tensor(tokens().astype("f4")))
    assert np.array_equal(exact.choice.blocks.numpy()[..., :-2], low.choice.blocks.numpy()[..., :-2])
    assert np.abs(exact.out.numpy() - low.out.numpy()).max() < 1e-5


def test_default_overlap_weights() -> None:
    m = NativeSparse(8, 1, summary=32, stride=16, block=64)
    shares = np.zeros((1, 1, 1, 15))
    found = [m._importance(gw.tensor(np.eye(15)[c].reshape(shares.shape)), 4).numpy()[0, 0, 0, 1] for c in range(15)]
    assert found == [0, 0, 0, 0.5, 1, 1, 1, 0.5, *[0] * 7]


def test_equal_sizes_give_the_compressed_probabilities() -> None:
    m = module(summary=4, stride=4)
    shares = np.random.default_rng(0).random((1, 2, 5, 11))
    assert np.array_equal(m._importance(gw.tensor(shares), 12).numpy()[..., :11], shares)


def test_two_tokens_of_one_block_choose_different_blocks() -> None:
    m = module()
    found = lists(m, m.attend(gw.tensor(tokens())), TIME)
    pairs = [(found[b, g, t], found[b, g, t + 1]) for b, g, t in found if t % 4 < 3 and t + 1 < TIME]
    assert any(a != b for a, b in pairs)
    assert all(found.values())


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 63, 65])
@pytest.mark.parametrize("granularity", ["token", "tile"])
def test_a_tiny_threshold_reads_all_blocks_as_dense_attention(length: int, granularity: Any) -> None:
    m, x = module(granularity=granularity), gw.tensor(tokens(time=length))
    psi(m).assign(gw.tensor(np.full(2, -60.0)))
    made = m.attend(x)
    q, keys, values = m._projected(x)
    cos, sin = m.rope(gw.arange(length)[None])
    q, k = m.rope.rotate(q, cos, sin), m.rope.rotate(keys[0], cos, sin)
    dense = call("sdpa", q, k, values[0], scale=m.head_dim**-0.5)
    if granularity == "token" or length < 13:
        assert np.abs(made.selected.numpy() - dense.numpy()).max() < 1e-10
    else:  # what the query before a tile gives no weight at all is not read
        assert np.median(np.abs(made.selected.numpy() - dense.numpy())) < 1e-10


def test_a_huge_threshold_reads_forced_blocks_only() -> None:
    m, x = module(), gw.tensor(tokens())
    psi(m).assign(gw.tensor(np.full(2, 1e6)))
    made = m.attend(x)
    assert made.choice.taken.numpy().max() == 0
    found = lists(m, made, TIME)
    assert all(found[key] == {0, max(key[2] // 4 - 1, 0), key[2] // 4} for key in found)
    (made.out.sum() + made.aux).backward()
    slopes: list[Any] = [p.grad for p in m.parameters()]
    assert all(np.isfinite(slope.numpy()).all() for slope in slopes)


def test_flat_scores_take_all_and_a_cap_takes_the_lowest() -> None:
    for kind in ("float32", "float64"):
        m = module(dtype=kind)
        m.q.weight.assign(m.q.weight.detach() * 0.0)
        made = m.attend(gw.tensor(tokens().astype(kind)))
        n = made.choice.candidates.numpy()
        assert np.array_equal(made.choice.taken.numpy(), np.broadcast_to(n, made.choice.taken.shape))
        assert not made.choice.capped.numpy().any()
    capped = module(most=2)
    capped.q.weight.assign(capped.q.weight.detach() * 0.0)
    made = capped.attend(gw.tensor(tokens()))
    assert all(
        found == {0, 1, 2, t // 4 - 1, t // 4} for (_, _, t), found in lists(capped, made, TIME).items() if t >= 16
    )
    assert np.array_equal(made.choice.capped.numpy(), np.broadcast_to(n > 2, made.choice.capped.shape))


# -- learning ----------------------------------------------------------------------------------------------------------
def test_ghosts_leave_the_result_unchanged() -> None:
    x = tokens().astype("f4")
    results = [module(dtype="float32", ghosts=n).attend(gw.tensor(x)) for n in (0, 8)]
    assert_bits(results[0].out, results[1].out)
    assert results[1].choice.blocks.shape[3] == results[0].choice.blocks.shape[3] + 8


def test_the_threshold_has_a_gradient_from_the_first_step_on() -> None:
    m = module(entropy_weight=0.0, sparse_weight=0.0)
    (m.attend(gw.tensor(tokens())).out ** 2).sum().backward()
    assert (psi(m).grad.numpy() != 0).all()


@pytest.mark.parametrize("useful", [True, False])
def test_a_useful_block_lowers_the_threshold(useful: bool) -> None:
    """Block 3, just below the threshold, has values that the loss asks for; only a ghost can tell."""
    m = module(entropy_weight=0.0, sparse_weight=0.0, ghosts=8)
    q, k, v = (np.random.default_rng(s).normal(size=(2, n, TIME, 4)) for s, n in ((1, 4), (2, 2), (3, 2)))
    v[:, :, 12:16] = 5.0 if useful else -5.0
    importance = np.zeros((2, 2, TIME, 12))
    importance[..., 3], importance[..., 1] = 0.95, np.maximum(np.arange(TIME) // 4 - 2, 1) - 0.95
    choice = m._choose(gw.tensor(importance), gw.arange(TIME) // 4, None)
    assert (choice.blocks.numpy()[:, :, 24:, FORCED:-8] != 3).all()
    out = m._selected(gw.tensor(q), gw.tensor(k), gw.tensor(v), choice)
    (-out[:, :, 24:].sum()).backward()
    assert (psi(m).grad.numpy() > 0).all() == useful


def test_scores_learn_only_if_asked() -> None:
    def gradient(**options: Any) -> np.ndarray:
        m = module(**options)
        made = m.attend(gw.tensor(tokens()))
        made.choice.gates.sum().backward()
        return np.zeros(1) if m.q.weight.grad is None else m.q.weight.grad.numpy()

    assert not gradient().any()
    assert gradient(ste="scores").any()


def test_mod_is_clipped() -> None:
    m, x = module(), gw.tensor(tokens())
    ones = np.ones((2, TIME))
    for extreme, bound in ((1e9, 2.0), (0.0, 0.5)):
        a, b = (m.eval().attend(x, gw.tensor(ones * value)) for value in (extreme, bound))
        assert_bits(a.out, b.out)
    assert lists(m, a, TIME) != lists(m, m.attend(x), TIME)


@pytest.mark.parametrize("granularity", ["token", "tile"])
def test_mod_equals_the_reference(granularity: Any) -> None:
    m, x, mod = module(granularity=granularity), tokens(), np.random.default_rng(5).uniform(0.3, 3, (2, TIME))
    made = m.attend(gw.tensor(x), gw.tensor(mod))
    assert lists(m, made, TIME) == reference.attend(m, reference.weights(m), torch.from_numpy(x), mod).blocks


# -- no leak of the future ---------------------------------------------------------------------------------------------
class PooledOverOwnTile(NativeSparse):
    """A red twin: a tile chooses by the scores of all its own queries."""

    def _of_tiles(self, t: gw.Tensor, first: float = 0.0) -> gw.Tensor:
        count = -(-t.shape[2] // self.block)
        rows = [t[:, :, i * self.block : (i + 1) * self.block].mean(axis=2, keepdims=True) for i in range(count)]
        return gw.cat(rows, 2)


class Uncausal(NativeSparse):
    """A red twin: summaries are visible before they are complete."""

    def _compressed(self, q: gw.Tensor, summaries: Any, positions: gw.Tensor) -> Any:
        return super()._compressed(q, summaries, positions + self.summary)


def leaks(m: NativeSparse, at_token: int, time: int = TIME) -> bool:
    """Whether a change of a token changes earlier results, branches or choices in any bit."""
    x = tokens(time=time).astype(m.q.weight.dtype.numpy)
    other = x.copy()
    other[:, at_token] += 1.0
    first, second = (m.eval().attend(gw.tensor(t)) for t in (x, other))
    assert not np.array_equal(first.out.numpy()[:, at_token], second.out.numpy()[:, at_token])
    same = [np.array_equal(first.out.numpy()[:, :at_token], second.out.numpy()[:, :at_token])]
    for branch in ("compressed", "selected", "sliding", "branch_gates"):
        a, b = (getattr(made, branch).numpy()[:, :, :at_token] for made in (first, second))
        same.append(np.array_equal(a, b))
    before = [
        {key: blocks for key, blocks in lists(m, made, time).items() if key[2] < at_token} for made in (first, second)
    ]
    return not (all(same) and before[0] == before[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_no_query_sees_a_later_token(name: str) -> None:
    m = module(dtype="float32", **VARIANTS[name])
    assert not any(leaks(m, t) for t in (1, 15, 16, 22, 37, 44))


def test_no_query_sees_a_later_token_without_native_code(no_native_code: None) -> None:
    assert not any(leaks(module(dtype="float64"), t) for t in (15, 22, 37))


def test_pooling_over_the_own_tile_leaks() -> None:
    m = PooledOverOwnTile(DIM, 4, 2, **SMALL, granularity="tile", name="nsa.", seed=0, qk_gain=3.0).to("float64")
    assert any(leaks(m, t) for t in range(20, 44))


def test_incomplete_summaries_leak() -> None:
    m = Uncausal(DIM, 4, 2, **SMALL, name="nsa.", seed=0, qk_gain=3.0)
    assert any(leaks(m, t) for t in (22, 37))


# -- programs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tau", "tile", "topn"])
def test_a_trace_shows_scores_thresholds_lists_and_gates(name: str) -> None:
    m, x = module(dtype="float32", **VARIANTS[name]).eval(), tokens().astype("f4")
    p = gw.trace(m, gw.tensor(x))
    made = m.attend(gw.tensor(x))
    watched = {"importance": None, "probabilities": made.choice.probabilities, "blocks": made.choice.blocks,
               "gates": made.choice.gates, "taken": made.choice.taken, "entropy": made.choice.entropy,
               "capped": made.choice.capped, "branch_gates": made.branch_gates}  # fmt: skip
    if made.tau is not None:
        watched |= {"tau": made.tau, "openness": made.choice.openness, "thresholds": None, "aux": made.aux}
    with p.run({"x": x}, keep=[p.value(n) for n in watched]) as run:
        for path, expected in watched.items():
            if expected is not None:
                assert np.array_equal(np.asarray(run.value(p.value(path))), expected.numpy()), path
    assert_bits(p.run({"x": x}, keep="outputs")["out"], made.out)


def test_live_values_equal_a_recomputation() -> None:
    m = module().eval()
    made: Any = m.attend(gw.tensor(tokens()))
    found = lists(m, made, TIME)
    taken = np.array([[[len(found[b, g, t] - {0, t // 4, max(t // 4 - 1, 0)}) for t in range(TIME)]
                       for g in range(2)] for b in range(2)])  # fmt: skip
    assert np.array_equal(made.choice.taken.numpy(), taken)
    assert float(made.mean_taken().numpy()) == pytest.approx(taken.mean())
    assert np.array_equal(made.histogram().numpy()[: taken.max() + 1], np.bincount(taken.ravel()))
    assert np.allclose(made.tau.numpy(), np.log1p(np.exp(psi(m).numpy())))
    r = reference.attend(m, reference.weights(m), torch.from_numpy(tokens()))
    for (b, g, t), share in r.shares.items():
        n = r.candidates[t]
        wanted = 0.0 if n < 2 else -sum(p * np.log(p) for p in share if p > 0) / np.log(n)
        assert float(made.choice.entropy.numpy()[b, g, t]) == pytest.approx(wanted, abs=1e-12)
        assert bool(made.choice.capped.numpy()[b, g, t]) == r.capped[b, g, t]


@pytest.mark.parametrize("low", [True, False])
def test_recomputation_reads_the_lists_of_the_first_pass(low: bool) -> None:
    """All scores are flat, at the threshold: a second decision could differ."""
    m, x = module(dtype="float32"), gw.tensor(tokens().astype("f4"))
    m.q.weight.assign(m.q.weight.detach() * 0.0)

    def gradients(marks: bool) -> tuple[gw.Program, Any]:
        gw.manual_seed(0)
        with gw.autocast(gw.bfloat16, enabled=low):
            p = gw.trace(lambda x: (m(x).to("float32") ** 2).sum(), x)
        if marks:
            p.checkpoint([n for n in p.nodes() if p.op(n) not in KINDS and p.path(n) != "out"])
        g = p.grad("out", ["x", *(p.path(n) for n in p.params())])
        return g, g.run({"x": x})

    (_, truth), (g, found) = gradients(False), gradients(True)
    again = {g.op(n) for n in g.nodes() if g.path(n).startswith("recompute.")}
    assert again >= {"softmax", "gather", "sdpa_selected"}
    assert "select_blocks" not in again
    for name in truth:
        assert_bits(found[name], truth[name], what=name)


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stride": 3}, "stride"),
        ({"stride": 0}, "stride"),
        ({"window": 0}, "window"),
        ({"n": -1}, "n -1"),
        ({"most": -1}, "most -1"),
        ({"select": "best"}, "tau, topn"),
        ({"granularity": "block"}, "token, tile"),
        ({"compressor": "max"}, "mean, mlp"),
        ({"ste": "all"}, "tau, scores"),
        ({"theta": 0}, "theta"),
        ({"sparse_weight": -1.0}, "sparse_weight"),
        ({"entropy_weight": float("nan")}, "entropy_weight"),
    ],
)
def test_invalid_options_are_refused(options: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        module(**options)


def test_invalid_heads_and_operands_are_refused() -> None:
    with pytest.raises(UsageError, match="heads 4, kv_heads 3"):
        NativeSparse(8, 4, 3)
    with pytest.raises(UsageError, match="multiple of 3"):
        NativeSparse(8, 3)
    with pytest.raises(ShapeError, match="mod"):
        module().attend(gw.tensor(tokens()), gw.tensor(np.ones((2, 3))))
    with pytest.raises(UsageError, match="no threshold"):
        module(select="topn").tau()
