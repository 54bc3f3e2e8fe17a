"""Attention against a masked softmax written out pair by pair: grouped heads, windows, padding, query positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch_ops import sdpa as torch_sdpa
from torch_ops import torch_grads

from graphwright.array import Spec, bfloat16, float16, float32, from_numpy
from graphwright.autograd import Tensor, tensor
from graphwright.errors import ShapeError
from graphwright.ops import OPS, call, compute
from graphwright.plan import Executable
from graphwright.program import Builder
from graphwright.testing.gradcheck import check_masks
from graphwright.testing.oracle import assert_bits, assert_close, strided
from values import grad_of

NONE_OR_WINDOW = st.sampled_from([None, 1, 2, 5, 64])


@st.composite
def attention(draw) -> tuple[list[np.ndarray], dict]:
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    batch, groups, shared = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(st.sampled_from([1, 2, 7])), draw(st.sampled_from([1, 3, 7, 12]))
    d, dv = draw(st.sampled_from([1, 4])), draw(st.sampled_from([1, 3]))
    causal = draw(st.booleans())
    inputs: list[np.ndarray] = [
        rng.normal(size=(batch, groups * shared, queries, d)),
        rng.normal(size=(batch, groups, keys, d)),
        rng.normal(size=(batch, groups, keys, dv)),
    ]
    optional: list[str] = []
    if draw(st.booleans()):
        mask = rng.random((batch, keys)) < 0.6
        if draw(st.booleans()):
            mask[0] = False  # a sequence that is all padding
        optional.append("key_mask")
        inputs.append(mask)
    if causal and draw(st.booleans()):
        optional.append("q_start")
        inputs.append(np.asarray(draw(st.integers(-2, keys + 3))))
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, n])) for n in (batch, groups * shared, queries, keys)]
        hidden = rng.random(shape) < 0.3
        optional.append("bias")
        inputs.append(~hidden if draw(st.booleans()) else np.where(hidden, -np.inf, rng.normal(size=shape)))
    if draw(st.booleans()):
        optional.append("sinks")
        inputs.append(rng.normal(size=groups * shared) * 2)
    window = draw(NONE_OR_WINDOW) if causal else None
    return inputs, {
        "scale": draw(st.sampled_from([1.0, 0.37])),
        "causal": causal,
        "window": window,
        "optional": tuple(optional),
        "softcap": draw(st.sampled_from([None, None, 0.7])),
    }


def _case(queries: int, keys: int, window: int | None, *, heads: int = 4, groups: int = 2, **extra: np.ndarray):
    rng = np.random.default_rng(5)
    inputs = [rng.normal(size=(2, heads, queries, 3)), *(rng.normal(size=(2, groups, keys, n)) for n in (3, 2))]
    attrs = {"scale": 0.5, "causal": True, "window": window, "optional": tuple(extra), "softcap": None}
    return [*inputs, *extra.values()], attrs


@given(case=attention())
@example(case=_case(1, 3, 1))
@example(case=_case(7, 7, 3, heads=6, groups=3))
@example(case=_case(3, 5, None, key_mask=np.array([[False] * 5, [True, False, True, True, False]])))
@example(case=_case(2, 6, 2, q_start=np.asarray(1)))
@example(case=_case(3, 5, 2, bias=np.arange(15.0).reshape(1, 1, 3, 5) % 4))
@example(case=_case(3, 5, None, bias=np.array([-np.inf, 0.0, 1.0, -np.inf, 2.0]).reshape(1, 1, 1, 5)))
@example(case=_case(3, 5, 2, sinks=np.array([1.0, -2.0, 0.0, 9.0])))
@example(case=_case(3, 5, None, bias=np.zeros((1, 1, 1, 5)), sinks=np.array([1.0, -2.0, 0.0, 9.0])))
@example(case=_case(4, 2, None, sinks=np.array([1.0, -2.0, 0.0, 9.0])))
@example(case=_case(3, 5, None, bias=np.arange(60).reshape(1, 4, 3, 5) % 3 > 1))
def test_values_and_gradients_equal_explicit_softmax_attention(case: tuple[list[np.ndarray], dict]) -> None:
    inputs, attrs = case
    ours = call("sdpa", *(from_numpy(np.array(x)) for x in inputs), **attrs)
    theirs = torch_sdpa([torch.from_numpy(np.array(x)) for x in inputs], attrs)
    assert_close(ours, theirs.numpy(), rtol=1e-10, atol=1e-12)
    masks = check_masks(OPS["sdpa"], inputs, attrs, lambda xs, seeds, mask: torch_grads("sdpa", xs, attrs, seeds, mask))
    trained = [x for name, x in zip(attrs["optional"], inputs[3:], strict=True) if name in ("bias", "sinks")]
    assert masks == 2 ** (3 + sum(x.dtype.kind == "f" for x in trained)) - 1


@pytest.mark.parametrize("start", [-3, -1, 0, 6, 20])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_query_without_visible_keys_gives_zeros_and_no_gradient(start: int, window: int | None) -> None:
    inputs, attrs = _case(4, 6, window, q_start=np.asarray(start))
    ours = call("sdpa", *(from_numpy(np.array(x)) for x in inputs), **attrs)
    theirs = torch_sdpa([torch.from_numpy(np.array(x)) for x in inputs], attrs)
    assert_close(ours, theirs.numpy(), rtol=1e-10, atol=1e-12)
    check_masks(OPS["sdpa"], inputs, attrs, lambda xs, seeds, mask: torch_grads("sdpa", xs, attrs, seeds, mask))


def test_a_start_without_a_causal_mask_changes_nothing() -> None:
    inputs, _ = _case(2, 5, None)
    b = Builder("all keys")
    q, k, v = (b.const(name, x) for name, x in zip("qkv", inputs, strict=True))
    b.output(b.op("sdpa", q, k, v, scale=1.0, causal=False), "plain")
    start = b.const("start", np.asarray(3))
    b.output(b.op("sdpa", q, k, v, start, scale=1.0, causal=False, optional=("q_start",)), "started")
    found = Executable(b.build().compile(executor="aten"), poison=True).run({})  # memory begins as NaN, masks as true
    assert_bits(found["started"], found["plain"])


def test_the_window_counts_the_query_itself() -> None:
    inputs, attrs = _case(5, 5, 1)
    out = call("sdpa", *(from_numpy(x) for x in inputs), **attrs).to_numpy()
    assert_bits(out, np.repeat(inputs[2], 2, axis=1))  # one visible key: the value at its index


def test_causal_masks_are_aligned_to_the_last_key() -> None:
    inputs, attrs = _case(2, 5, None)
    out = call("sdpa", *(from_numpy(x) for x in inputs), **attrs)
    shifted = [*inputs, np.asarray(3)]
    assert_bits(call("sdpa", *(from_numpy(x) for x in shifted), **{**attrs, "optional": ("q_start",)}), out)
    ones = inputs[2].copy()
    ones[:, :, 4] += 100  # only the last query may see the last key
    moved = call("sdpa", *(from_numpy(x) for x in (*inputs[:2], ones)), **attrs).to_numpy()
    assert_bits(moved[:, :, 0], out.to_numpy()[:, :, 0])
    assert np.abs(moved[:, :, 1] - out.to_numpy()[:, :, 1]).min() > 0.1


def test_consecutive_query_heads_share_a_key_head() -> None:
    """Query heads 0, 1 read key head 0 and 2, 3 key head 1: repeat_interleave, not tile."""
    inputs, attrs = _case(3, 3, None)
    alone = []
    for head in range(4):
        one = [inputs[0][:, head : head + 1], *(x[:, head // 2 : head // 2 + 1] for x in inputs[1:])]
        alone.append(call("sdpa", *(from_numpy(np.ascontiguousarray(x)) for x in one), **attrs).to_numpy())
    together = call("sdpa", *(from_numpy(x) for x in inputs), **attrs)
    assert_close(together, np.concatenate(alone, 1), rtol=1e-12, atol=1e-14)


def test_a_fully_padded_sequence_gives_zeros_and_no_gradient() -> None:
    mask = np.array([[False] * 4, [True] * 4])
    inputs, attrs = _case(3, 4, None, key_mask=mask)
    q, k, v = (tensor(x, requires_grad=True) for x in inputs[:3])
    out = call("sdpa", q, k, v, tensor(mask), **attrs)
    assert not out.numpy()[0].any()
    (out * out).sum().backward()
    for t in (q, k, v):
        assert not grad_of(t).numpy()[0].any()
        assert grad_of(t).numpy()[1].any()


@pytest.mark.parametrize("kind", [float32, bfloat16, float16], ids=str)
def test_scores_of_800_do_not_overflow_and_keep_the_maximum(kind) -> None:
    q = np.array([[[[800.0], [-800.0]]]])
    k = np.array([[[[1.0], [-1.0], [1.0]]]])
    v = np.array([[[[1.0], [2.0], [3.0]]]])
    arrays = [compute(OPS["cast"], [from_numpy(x)], {"dtype": kind})[0] for x in (q, k, v)]
    out = call("sdpa", *arrays, scale=1.0, causal=False)
    assert out.to_numpy("float32").ravel().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("how", ["permuted", "sliced"])
def test_keys_and_values_may_be_strided(how: str) -> None:
    inputs, attrs = _case(3, 5, 2)
    plain = call("sdpa", *(from_numpy(x) for x in inputs), **attrs)
    moved = call("sdpa", *(strided(x, how) for x in inputs), **attrs)
    assert_close(moved, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("heads", "groups", "fits"), [("H", "H", True), (0, 0, True), (4, 2, True), (3, 2, False), (2, 0, False)]
)
def test_query_heads_must_be_a_multiple_of_key_heads(heads: str | int, groups: str | int, fits: bool) -> None:
    q, k, v = (Spec(("B", h, "T", 4), float32) for h in (heads, groups, groups))
    attrs = OPS["sdpa"].complete({"scale": 1.0})
    if fits:
        assert OPS["sdpa"].specs([q, k, v], attrs) == (q,)
    else:
        with pytest.raises(ShapeError, match="a multiple of"):
            OPS["sdpa"].specs([q, k, v], attrs)


def test_symbolic_head_counts_are_refused() -> None:
    q, k = Spec(("B", "H", "T", 4), float32), Spec(("B", "G", "T", 4), float32)
    for a, b in ((q, k), (q, Spec(("B", 2, "T", 4), float32)), (Spec(("B", 2, "T", 4), float32), k)):
        with pytest.raises(ShapeError, match="a multiple of"):
            OPS["sdpa"].specs([a, b, b], OPS["sdpa"].complete({"scale": 1.0}))


def test_invalid_mask_operands_are_refused() -> None:
    inputs, attrs = _case(3, 5, None, key_mask=np.ones((2, 4), bool))
    with pytest.raises(ShapeError, match="key_mask"):
        call("sdpa", *(Tensor(from_numpy(x)) for x in inputs), **attrs)
    with pytest.raises(ShapeError, match="optional"):
        call("sdpa", *(Tensor(from_numpy(x)) for x in inputs[:3]), **attrs)
