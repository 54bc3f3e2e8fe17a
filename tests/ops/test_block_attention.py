"""Block-sparse attention equals dense masked attention in float64, forward and backward, for random patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from block_patterns import Blocks, random_blocks
from hypothesis import given
from hypothesis import strategies as st

from graphwright.array import from_numpy
from graphwright.autograd import grad, tensor
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
    out, lse = dense(*tensors[:3], pattern, *tensors[3:], **rule)
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


@given(cases(), st.sampled_from([np.float64, np.float32]))
def test_it_equals_dense_masked_attention(case: tuple[Blocks, Arrays, dict[str, Any]], kind: type) -> None:
    pattern, ins, attrs = case
    g = np.random.default_rng(1).normal(size=(*ins[0].shape[:3], ins[2].shape[3]))
    results, grads = both(pattern, ins, attrs, g, kind)
    wanted, wanted_grads = oracle(pattern, ins, attrs, g)
    check(results, wanted, 1e-10 if kind is np.float64 else 1e-5)
    check(grads, wanted_grads, 1e-10 if kind is np.float64 else 3e-5)


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


@given(cases())
def test_the_entropy_and_its_gradient(case: Any) -> None:
    pattern, ins, attrs = case
    q, k, v, *gates = (tensor(x, requires_grad=True) for x in ins)
    table = tensor(pattern.words())
    _, lse = call("block_sdpa", q, k, v, table, *gates, **attrs)
    entropy = call("block_entropy", q, k, table, lse, *gates, **attrs)
    g = np.random.default_rng(0).normal(size=entropy.shape)
    leaves = [q, k, *(gates if attrs.get("where") == "exp" else [])]
    grads = grad(entropy, leaves, [tensor(g)])
    q, k, *inside = (torch.tensor(np.asarray(t.numpy()), requires_grad=True) for t in leaves)
    rule = {key: attrs[key] for key in ("scale", "softcap") if key in attrs}
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    a = dense(q, k, eye, pattern, *inside, **rule)[0]
    wanted = -(a * torch.where(a > 0, a, 1.0).log()).sum(-1)
    np.testing.assert_allclose(entropy.numpy(), wanted.detach().numpy(), atol=1e-10)
    found = torch.autograd.grad(wanted, [q, k, *inside], torch.tensor(g), allow_unused=True)
    for i, (x, y) in enumerate(zip(grads, found, strict=True)):
        shown = np.zeros(x.shape) if y is None else y.numpy()
        if i == 2:  # the slope at 0 is infinite
            used = ins[3] > 0
            x, shown = x.numpy()[used], shown[used]
        np.testing.assert_allclose(np.asarray(x), shown, atol=1e-8 * max(1.0, np.abs(shown).max(initial=0.0)))
