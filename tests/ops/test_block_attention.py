"""Block-sparse attention equals dense masked attention in float64, forward and backward, for random patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from block_patterns import Blocks, random_blocks
from hypothesis import given
from hypothesis import strategies as st

from graphwright.array import from_numpy
from graphwright.array.cpu import get_num_threads, set_num_threads, tensor_allocations
from graphwright.autograd import grad, tensor
from graphwright.errors import IndexOutOfRange
from graphwright.ops import call
from graphwright.patterns import table as words

Arrays = list[np.ndarray]


def run(name: str, *ins: Any, **attrs: Any) -> Any:
    """Results of an op on arrays, as numpy."""
    found = call(name, *(from_numpy(np.asarray(x)) for x in ins), **attrs)
    return [np.asarray(t) for t in found] if isinstance(found, tuple) else np.asarray(found)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Blocks, gates: torch.Tensor | None = None, *,
    scale: float, softcap: float | None = None, where: str = "exp",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Masked attention over all pairs, and the log-sum-exp; differentiable."""
    heads, (_, groups) = q.shape[1], k.shape[:2]
    k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))

    def each(t: Any) -> torch.Tensor:
        return torch.as_tensor(t).repeat_interleave(heads // pattern.planes, 0)

    s = (q @ k.mT) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    mask = each(pattern.dense())
    if gates is None:
        g = torch.ones(mask.shape, dtype=q.dtype)
    else:
        slots = np.full((pattern.planes, *pattern.tokens), -1)
        for p, i, j, _, gate, _ in pattern.edges:
            b = pattern.block
            slots[p, i * b : (i + 1) * b, j * b : (j + 1) * b] = gate
        g = torch.cat([gates, torch.ones(1, dtype=gates.dtype)])[each(slots)]
    shown = mask if where == "weight" else mask & (g > 0)
    base = s.masked_fill(~shown, -torch.inf).amax(-1, True).detach()
    base = torch.where(base > -torch.inf, base, torch.inf)
    e = (s - base).masked_fill(~mask, -torch.inf).exp()
    e = e if where == "weight" else e * g
    whole = e.sum(-1, True)
    seen = whole > 0
    a = e / torch.where(seen, whole, 1.0)
    out = (a * g if where == "weight" else a) @ v
    lse = torch.where(seen, torch.where(seen, base, 0.0) + torch.where(seen, whole, 1.0).log(), -torch.inf)
    return out, lse.squeeze(-1)


@st.composite
def cases(draw: Any, gated: bool | None = None) -> tuple[Blocks, Arrays, dict[str, Any]]:
    """A pattern with operands q, k, v, perhaps gates, and attributes."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    batch, groups, share = draw(st.sampled_from([(1, 1, 1), (3, 2, 2), (2, 1, 3), (1, 2, 1), (2, 3, 1)]))
    planes = draw(st.sampled_from([1, groups, groups * share]))
    queries = draw(st.sampled_from([1, 17, 63, 65, 129]))
    keys = queries + draw(st.sampled_from([0, 0, 5, 64]))
    block = draw(st.sampled_from([1, 3, 16, 64, 100])) if queries < 64 else draw(st.sampled_from([7, 16, 64, 70, 256]))
    rule: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        rule |= {"window": draw(st.integers(1, 40)), "symmetric": not rule["causal"] and draw(st.booleans())}
    if draw(st.booleans()):
        rule["segments"] = np.sort(rng.integers(0, 3, keys))[-queries:], np.sort(rng.integers(0, 3, keys))
    with_gates = draw(st.booleans()) if gated is None else gated
    pattern = random_blocks(rng, queries, keys, block, planes, density=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0])),
                            gates=4 if with_gates else 0, **rule)  # fmt: skip
    d, dv = draw(st.sampled_from([(1, 3), (16, 16), (20, 7), (64, 64), (8, 70)]))
    ins = [rng.normal(size=(batch, h, t, n)) for h, t, n in (
        (groups * share, queries, d), (groups, keys, d), (groups, keys, dv))]  # fmt: skip
    attrs: dict[str, Any] = {"scale": draw(st.sampled_from([1.0, 0.3])), "planes": planes}
    attrs["softcap"] = draw(st.sampled_from([None, None, 1.5]))
    if with_gates:
        attrs |= {"optional": ("gates",), "where": draw(st.sampled_from(["exp", "exp", "weight"]))}
        gates = rng.uniform(0.2, 2.0, 4) * (rng.random(4) < 0.7)
        ins.append(gates * rng.choice([-1.0, 1.0], 4) if attrs["where"] == "weight" else gates)
    return pattern, ins, attrs


def oracle(pattern: Blocks, ins: Arrays, attrs: dict[str, Any], g: np.ndarray) -> tuple[Arrays, Arrays]:
    """Results and gradients of dense masked attention."""
    tensors = [torch.tensor(x, requires_grad=True) for x in ins]
    rule = {key: attrs[key] for key in ("scale", "softcap", "where") if key in attrs}
    q, k, v, *gates = tensors
    out, lse = dense(q, k, v, pattern, *gates, **rule)
    grads = torch.autograd.grad(out, tensors, torch.tensor(g), allow_unused=True)
    found = [np.zeros(x.shape) if t is None else t.numpy() for x, t in zip(ins, grads, strict=True)]
    return [out.detach().numpy(), lse.detach().numpy()], found


def both(
    pattern: Blocks, ins: Arrays, attrs: dict[str, Any], g: np.ndarray, kind: type = np.float64
) -> tuple[Arrays, Arrays]:
    """Results and gradients of the ops in a dtype."""
    q, k, v, *gates = (x.astype(kind) for x in ins)
    operands = [q, k, v, pattern.words(), *gates]
    results = run("block_sdpa", *operands, **attrs)
    return results, run("block_sdpa_backward", *operands, *results, g.astype(kind), **attrs)


def check(found: Arrays, wanted: Arrays, most: float) -> None:
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.shape == y.shape
        low, seen = np.isneginf(y), np.isfinite(y)
        assert np.array_equal(np.isneginf(x), low), i
        np.testing.assert_allclose(
            x[seen], y[seen], atol=most * max(1.0, np.abs(y[seen]).max(initial=0.0)), rtol=0, err_msg=str(i)
        )


def check_grads(found: Arrays, wanted: Arrays, kind: type, g: np.ndarray) -> None:
    near = 1e-10 if kind is np.float64 else 3e-5
    check(found[:3], wanted[:3], near)
    # a gate's gradient adds a term per query of its edges, and may be 0 by cancellation: rounding grows as their root
    check(found[3:], wanted[3:], near * max(1, np.prod(g.shape[:3]) / 16) ** 0.5)


@given(cases(), st.sampled_from([np.float64, np.float32]))
def test_it_equals_dense_masked_attention(case: tuple[Blocks, Arrays, dict[str, Any]], kind: type) -> None:
    pattern, ins, attrs = case
    g = np.random.default_rng(1).normal(size=(*ins[0].shape[:3], ins[2].shape[3]))
    results, grads = both(pattern, ins, attrs, g, kind)
    wanted, wanted_grads = oracle(pattern, ins, attrs, g)
    check(results, wanted, 1e-10 if kind is np.float64 else 1e-5)
    check_grads(grads, wanted_grads, kind, g)


def weights(pattern: Blocks, ins: Arrays, attrs: dict[str, Any]) -> torch.Tensor:
    """The softmax weights [N, H, Tq, Tk], gates inside the softmax included."""
    q, k, v, *gates = (torch.tensor(x) for x in ins)
    rule = {key: attrs[key] for key in ("scale", "softcap", "where") if key in attrs}
    one = torch.ones(*k.shape[:3], 1, dtype=k.dtype)
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    if rule.get("where") == "weight":
        gates = [torch.ones_like(gates[0])]
    del v, one
    return dense(q, k, eye, pattern, *gates, **rule)[0]


@given(cases(), st.sampled_from([np.float64, np.float32]), st.sampled_from(["sum", "max"]))
def test_the_mass_of_edges_is_that_of_the_dense_weights(case: Any, kind: type, reduce: str) -> None:
    pattern, ins, attrs = case
    q, k, v, *gates = (x.astype(kind) for x in ins)
    lse = run("block_sdpa", q, k, v, pattern.words(), *gates, **attrs)[1]
    slots = int(pattern.table[words.EDGE_SLOTS])
    mass = run("block_mass", q, k, pattern.words(), lse, *gates, **attrs, edges=slots, reduce=reduce)
    wanted, b, a = np.zeros(slots), pattern.block, weights(pattern, ins, attrs).numpy()
    for p, i, j, _, _, edge in pattern.edges:
        heads = a.shape[1] // pattern.planes
        part = a[:, p * heads : (p + 1) * heads, i * b : (i + 1) * b]
        each, seen = part[..., j * b : (j + 1) * b].sum(-1), part.sum(-1) > 0.5
        wanted[pattern.slot(edge)] = each.max() if reduce == "max" else each.sum() / max(seen.sum(), 1)
    np.testing.assert_allclose(mass, wanted, atol=1e-5 if kind is np.float32 else 1e-6)


@given(cases(gated=False), st.sampled_from([np.float64, np.float32]), st.integers(0, 99))
def test_the_gradient_of_an_absent_gate_is_that_of_an_edge_with_gate_0(case: Any, kind: type, seed: int) -> None:
    pattern, ins, attrs = case
    rng = np.random.default_rng(seed)
    q, k, v = (x.astype(kind) for x in ins)
    g = rng.normal(size=(*q.shape[:3], v.shape[3])).astype(kind)
    out, lse = run("block_sdpa", q, k, v, pattern.words(), **attrs)
    pairs = np.stack([rng.integers(0, n, 5) for n in (pattern.planes, pattern.nq, pattern.nk)], 1).astype(np.int32)
    held = {edge[:3] for edge in pattern.edges}
    pairs = np.array([p for p in dict.fromkeys(map(tuple, pairs.tolist())) if p not in held], np.int32).reshape(-1, 3)
    found = run("block_gate_gradient", q, k, v, out, lse, g, pairs, pattern.words(), **attrs)
    for n, pair in enumerate(pairs.tolist()):
        pattern.add(*pair, gate=n)
    gates = np.zeros(max(len(pairs), 1))
    (_, wanted) = oracle(pattern, [*ins, gates], {**attrs, "where": "exp"}, g.astype(float))
    most = np.abs(wanted[3]).max(initial=1.0)
    np.testing.assert_allclose(found, wanted[3][: len(pairs)], atol=(1e-5 if kind is np.float32 else 1e-9) * most)


@given(cases(), st.sampled_from(["float64", "float32"]))
def test_the_entropy_and_its_gradient(case: Any, kind: str) -> None:
    pattern, ins, attrs = case
    q, k, v, *gates = (tensor(x, kind, requires_grad=True) for x in ins)
    table = tensor(pattern.words())
    _, lse = call("block_sdpa", q, k, v, table, *gates, **attrs)
    entropy = call("block_entropy", q, k, table, lse, *gates, **attrs)
    g = np.random.default_rng(0).normal(size=entropy.shape)
    leaves = [q, k, *(gates if attrs.get("where") == "exp" else [])]
    grads = grad(entropy, leaves, [tensor(g, kind)])
    q, k, *inside = (torch.tensor(t.numpy("float64"), requires_grad=True) for t in leaves)
    rule = {key: attrs[key] for key in ("scale", "softcap") if key in attrs}
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    a = dense(q, k, eye, pattern, *inside, **rule)[0]
    wanted = -(a * torch.where(a > 0, a, 1.0).log()).sum(-1)
    np.testing.assert_allclose(entropy.numpy(), wanted.detach().numpy(), atol=1e-10 if kind == "float64" else 1e-4)
    most = 1e-8 if kind == "float64" else 1e-4
    found = torch.autograd.grad(wanted, [q, k, *inside], torch.tensor(g), allow_unused=True)
    for i, (x, y) in enumerate(zip(grads, found, strict=True)):
        shown = np.zeros(x.shape) if y is None else y.numpy()
        if i == 2:  # the slope at 0 is infinite
            used = ins[3] > 0
            x, shown = x.numpy()[used], shown[used]
        np.testing.assert_allclose(np.asarray(x), shown, atol=most * max(1.0, np.abs(shown).max(initial=0.0)))


@given(cases(), st.sampled_from(["dense", "reference", "block"]), st.sampled_from([np.float64, np.float32]))
def test_all_algorithms_agree(case: Any, algorithm: str, kind: type) -> None:
    pattern, ins, attrs = case
    g = np.random.default_rng(1).normal(size=(*ins[0].shape[:3], ins[2].shape[3]))
    results, grads = both(pattern, ins, {**attrs, "algorithm": algorithm}, g, kind)
    wanted, wanted_grads = oracle(pattern, ins, attrs, g)
    check(results, wanted, 1e-10 if kind is np.float64 else 1e-5)
    check_grads(grads, wanted_grads, kind, g)


def drawn(*shapes: tuple[int, ...], seed: int = 0, factor: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return [factor * rng.normal(size=s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_gate_of_0_gives_the_bits_of_a_cut_edge(block: int, kind: type) -> None:
    """At every index of the lists, forward and backward."""
    q, k, v, g = (x.astype(kind) for x in drawn(*[(2, 2, 130, 32)] * 4))
    tokens = 130 if block > 1 else 40
    q, k, v, g = (x[:, :, :tokens] for x in (q, k, v, g))
    rng, count = np.random.default_rng(3), -(-tokens // block)
    gated, cut, plain = (Blocks(tokens, tokens, block) for _ in range(3))
    for i in range(count):
        for j in rng.permutation(i + 1):
            zero = rng.random() < 0.3
            gated.add(0, i, j, gate=0 if zero else 1)
            plain.add(0, i, j)
            if not zero:
                cut.add(0, i, j)
    attrs = {"scale": 0.2}
    gates = np.array([0, 1], kind)
    for pattern, values in ((cut, gates), (plain, np.ones(2, kind))):
        ours = {**attrs, "optional": ("gates",)}
        out, lse = run("block_sdpa", q, k, v, gated.words(), values, **ours)
        wanted = run("block_sdpa", q, k, v, pattern.words(), **attrs)
        grads = run("block_sdpa_backward", q, k, v, gated.words(), values, out, lse, g, **ours)
        wanted_grads = run("block_sdpa_backward", q, k, v, pattern.words(), *wanted, g, **attrs)
        for x, y in zip([out, lse, *grads[:3]], [*wanted, *wanted_grads], strict=True):
            if kind is np.float32:
                assert x.tobytes() == y.tobytes()
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 if kind is np.float64 else 0)
        assert np.isfinite(grads[3]).all()


@pytest.mark.parametrize("queries", [1, 5, 64, 100])
@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.deep), 16, 64])
def test_queries_from_a_start_give_the_rows_of_all_queries(queries: int, block: int) -> None:
    """As in decoding: the buffer of keys is longer than the pattern, and what is there is not read."""
    tokens, rng = 200, np.random.default_rng(0)
    pattern = random_blocks(rng, tokens, tokens, block, 2, density=0.5)
    q, k, v = drawn((2, 4, tokens, 16), (2, 2, tokens, 16), (2, 2, tokens, 16))
    whole = run("block_sdpa", q, k, v, pattern.words(), scale=0.25, planes=2)
    longer = [np.concatenate([x, np.full_like(x[:, :, :77], np.nan)], axis=2) for x in (k, v)]
    for start in {0, 63, tokens - queries}:
        for kind, most in ((np.float32, 2e-6), (np.float64, 2e-6)):
            some = q[:, :, start : start + queries].astype(kind)
            found = run("block_sdpa", some, *(x.astype(kind) for x in longer), pattern.words(), np.int64(start),
                        scale=0.25, planes=2, optional=("q_start",))  # fmt: skip
            for x, y in zip(found, whole, strict=True):
                part = y[:, :, start : start + queries]
                np.testing.assert_allclose(x, part, atol=most, rtol=1e-5)


def test_large_scores_stay_finite() -> None:
    q, k, v, g = drawn((3, 4, 130, 8), (3, 2, 130, 8), (3, 2, 130, 8), (3, 4, 130, 8))
    pattern = random_blocks(np.random.default_rng(1), 130, 130, 64, 4, density=0.8)
    q = q / np.linalg.norm(q, axis=-1, keepdims=True) * 1000
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    (results, grads), (wanted, _) = both(pattern, [q, k, v], {"scale": 1.0, "planes": 4}, g, np.float32), oracle(
        pattern, [x.astype(float) for x in (q, k, v)], {"scale": 1.0, "planes": 4}, g)  # fmt: skip
    assert all(np.isfinite(x).all() for x in grads)
    check(results, wanted, 1e-3)


def test_a_query_or_a_key_without_edges_gives_0() -> None:
    pattern = Blocks(192, 192, 64)
    pattern.add(0, 1, 1)
    q, k, v, g = drawn(*[(2, 2, 192, 16)] * 4)
    for kind in (np.float32, np.float64):
        (out, lse), (dq, dk, dv) = both(pattern, [q, k, v], {"scale": 1.0}, g, kind)
        empty = np.r_[0:64, 128:192]
        assert not out[:, :, empty].any()
        assert np.isneginf(lse[:, :, empty]).all()
        assert not any(x[:, :, empty].any() for x in (dq, dk, dv))
        assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    empty = Blocks(70, 70, 64)
    out, lse = run("block_sdpa", *(x[:, :, :70] for x in (q, k, v)), empty.words(), scale=1.0)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("heads", [1, 4])
def test_the_bits_do_not_depend_on_threads(heads: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v, g = drawn(*[(1, heads, 700, 64)] * 4)
    pattern = random_blocks(rng, 700, 700, 64, density=0.7, gates=3)
    gates = rng.uniform(0.5, 2, 3).astype(np.float32)
    attrs, found, before = {"scale": 0.1, "optional": ("gates",)}, set(), get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            set_num_threads(threads)
            results, grads = both(pattern, [q, k, v, gates], attrs, g, np.float32)
            found.add(b"".join(x.tobytes() for x in (*results, *grads)))
    finally:
        set_num_threads(before)
    assert len(found) == 1


REFUSED = [
    ({}, {"q": 65}, "longer than the pattern"),
    ({"planes": 2}, {}, "planes"),
    ({"optional": ("gates",)}, {"gates": 1}, "gates"),
    ({"optional": ("q_start",)}, {"q_start": 1}, "longer than the pattern"),
    ({"optional": ("q_start",)}, {"q_start": -1}, "longer than the pattern"),
    ({}, {"table": 0}, "table of a pattern"),
]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize(("attrs", "wrong", "text"), REFUSED)
def test_operands_that_do_not_fit_the_pattern_are_refused(attrs: Any, wrong: Any, text: str, kind: type) -> None:
    pattern = Blocks(64, 64, 16)
    pattern.add(0, 1, 0, gate=1)
    tokens = wrong.get("q", 64)
    q, k, v = (x.astype(kind) for x in drawn(*[(1, 2, tokens, 4)] * 3))
    table = np.zeros(words.WORDS, np.int64) if "table" in wrong else pattern.words()
    extra = [np.ones(wrong["gates"], kind)] if "gates" in wrong else []
    extra += [np.int64(wrong["q_start"])] if "q_start" in wrong else []
    with pytest.raises(IndexOutOfRange, match=text):
        run("block_sdpa", q, k, v, table, *extra, scale=1.0, **attrs)


def test_temporaries_grow_linearly() -> None:
    held = []
    for tokens in (512, 2048):
        pattern = Blocks(tokens, tokens, 64)
        for i in range(tokens // 64):
            for j in range(max(i - 3, 0), i + 1):
                pattern.add(0, i, j)
        q, k, v, g = (from_numpy(x) for x in drawn(*[(1, 2, tokens, 32)] * 4))
        table = from_numpy(pattern.words())

        def step(ins: Any = (q, k, v, table), g: Any = g) -> None:
            out, lse = call("block_sdpa", *ins, scale=0.2)
            call("block_sdpa_backward", *ins, out, lse, g, scale=0.2)

        step()
        held.append(sum(tensor_allocations(step)))
    assert held[1] < 4.5 * held[0]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_finite_differences(kind: type) -> None:
    """Of a sum of products with a random matrix, in float64; in float32 the same gradients."""
    rng = np.random.default_rng(5)
    pattern = random_blocks(rng, 9, 12, 4, 2, density=0.8, gates=3, window=9)
    ins = [rng.normal(size=s) for s in ((1, 4, 9, 3), (1, 2, 12, 3), (1, 2, 12, 2))] + [np.array([0.5, 1.0, 2.0])]
    g = rng.normal(size=(1, 4, 9, 2))
    attrs = {"scale": 0.7, "planes": 2, "softcap": 2.0, "optional": ("gates",)}
    _, grads = both(pattern, ins, attrs, g, kind)

    def loss(at: int, change: np.ndarray) -> float:
        q, k, v, gates = (x + change if i == at else x for i, x in enumerate(ins))
        return float((run("block_sdpa", q, k, v, pattern.words(), gates, **attrs)[0] * g).sum())

    for at, grad_ in enumerate(grads):
        direction, h = rng.normal(size=ins[at].shape), 1e-5
        slope = (loss(at, h * direction) - loss(at, -h * direction)) / (2 * h)
        assert abs(slope - float((grad_ * direction).sum())) <= (1e-6 if kind is np.float64 else 1e-4)
