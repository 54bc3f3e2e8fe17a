"""Every op that the VM has a form for, beside its ATen kernel: samples, sizes around a vector, layouts, axes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import chain, combinations
from typing import Any, cast

import numpy as np
import pytest
from vm_forms import agree, encode, low, single, view, vm

from graphwright.array import NDArray, bfloat16, bool_, empty, float32, from_numpy
from graphwright.array.vm.running.segment import BadIndex
from graphwright.errors import GraphwrightError
from graphwright.ops import OPS, compute
from graphwright.ops.expansion import vm_form

SIZES = (0, 1, 2, 15, 16, 17, 33, 1023, 1024, 1025)
OTHER = {
    **{"clamp": "a bound", "topk": "the op sort", "stack": "concat of any number", "dispatch": "bincount and sort"},
    **dict.fromkeys(("expert_mlp", "expert_mlp_backward", "expert_probe"), "scatter_add"),
    **dict.fromkeys(("routed_attention", "routed_attention_backward"), "scatter_add"),
    "select_blocks": "sort",
}
"""Ops whose expansion has a step that the VM does not run: that step."""
FORMS = sorted(n for n in OPS if vm_form(OPS[n]) and n not in OTHER)
TOLERANCE = {
    "muon_step": 2e-5,  # five products after each other
    "linear_int8": 0.05,  # it rounds activations; `test_vm_few_rows` has the bound
}
"""Absolute error where it is not that of one rounding."""
_WITH_ATTRS = ("full_like", "cast")
ELEMENTWISE = [n for n in FORMS if OPS[n].traits.elementwise and OPS[n].arity in (1, 2) and n not in _WITH_ATTRS]


@pytest.mark.parametrize("name", [n for n in FORMS if n != "cast"])  # which has a form for one pair of dtypes
def test_samples_of_every_op_match_aten(name: str) -> None:
    row, done = OPS[name], 0
    for k in range(12):
        inputs, attrs = row.sample(np.random.default_rng(zlib.crc32(name.encode()) + k))
        arrays = [single(x) for x in inputs]
        if row.traits.updates_states and name != "unscale_check":  # a rate is float64
            arrays[0] = from_numpy(np.asarray(inputs[0], np.float64))
        done += agree(name, arrays, row.complete(attrs), atol=TOLERANCE.get(name, 2e-6))
    assert done >= 2, "the VM takes samples of every op it has"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ops_of_any_size_and_layout_match_aten(name: str) -> None:
    rng, arity = np.random.default_rng(0), OPS[name].arity
    assert isinstance(arity, int)
    attrs = OPS[name].complete({})
    for n in SIZES:
        arrays = [from_numpy(rng.uniform(0.2, 0.9, n).astype("f4")) for _ in range(arity)]
        assert agree(name, arrays, attrs), n
    base = rng.uniform(0.2, 0.9, (6, 40)).astype("f4")
    layouts = [base, base[::2], base[:, :17], base[:, ::2], base.T.copy().T, base[:1], base[:, :1], base[2:3, 5:6]]
    for a in layouts:
        if arity == 1:
            agree(name, [from_numpy(a)], attrs)
            continue
        for b in (*layouts, np.float32(0.5).reshape(()), base[0]):
            try:
                np.broadcast_shapes(a.shape, b.shape)
            except ValueError:
                continue
            agree(name, [from_numpy(a), from_numpy(b)], attrs)


def test_ops_over_three_unmergeable_axes_match_aten() -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, 6)).astype("f4")
    a, b = from_numpy(x[:, ::2, :]), from_numpy(x[:, :3, ::-1][:, :, ::-1][:1])
    assert agree("add", [a, b], {})
    assert agree("exp", [from_numpy(x[:, ::2, :].transpose(1, 0, 2))], {})


def test_factor_per_head_broadcasts_over_any_layout() -> None:
    """More rows than may be unrolled, but for one axis that is walked."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 70, 5, 8)).astype("f4")
    g = from_numpy(rng.normal(size=(5, 1)).astype("f4"))
    assert agree("mul", [from_numpy(x), g], {})
    assert agree("mul", [from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)), g], {})


AXES = list(chain.from_iterable(combinations(range(3), r) for r in range(1, 4)))


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
def test_reductions_over_any_axes_match_aten(name: str, keepdims: bool) -> None:
    rng, done = np.random.default_rng(0), 0
    for shape in ((2, 3, 4), (1, 5, 1), (3, 1, 33), (2, 300, 17), (4, 1, 1)):
        for axes in AXES:
            x = rng.normal(size=shape).astype("f4")
            done += agree(name, [from_numpy(x)], {"axes": axes, "keepdims": keepdims}, atol=4e-5)
            done += agree(name, [from_numpy(x.transpose(2, 0, 1))], {"axes": axes, "keepdims": keepdims}, atol=4e-5)
    assert done >= 30


@pytest.mark.parametrize("n", [1, 4095, 4096, 4097, 2**20])
def test_long_sums_are_accurate(n: int) -> None:
    x = np.full(n, 0.1, np.float32)
    (found,) = vm("sum", [from_numpy(x)], {"axes": (0,), "keepdims": False}) or [None]
    assert found is not None
    assert abs(found.item() - x.astype("f8").sum()) <= 1e-6 * x.sum(dtype="f8")
    (found,) = vm("sum", [from_numpy(x[:65536].reshape(-1, 1))], {"axes": (0,), "keepdims": False}) or [None]
    assert found is not None
    assert abs(found.item() - x[:65536].astype("f8").sum()) <= 1e-6 * x[:65536].sum(dtype="f8")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 800.0])
@pytest.mark.parametrize("classes", [1, 2, 10, 16, 17, 100])
def test_losses_of_large_scores_match_aten(scale: float, classes: int, smoothing: float) -> None:
    rng = np.random.default_rng(0)
    scores = from_numpy((scale * rng.normal(size=(7, classes))).astype("f4"))
    targets = rng.integers(0, classes, 7)
    targets[2] = -100
    attrs = OPS["cross_entropy"].complete({"smoothing": smoothing})
    assert agree("cross_entropy", [scores, from_numpy(targets)], attrs)
    _, lse = compute(OPS["cross_entropy"], [scores, from_numpy(targets)], attrs)
    grad = from_numpy(rng.normal(size=7).astype("f4"))
    assert agree("cross_entropy_backward", [scores, from_numpy(targets), lse, grad], attrs)
    assert agree("softmax", [scores], OPS["softmax"].complete({}))


@pytest.mark.parametrize("target", [3, -1, 10**12])
def test_target_out_of_range_raises(target: int) -> None:
    scores = from_numpy(np.zeros((2, 3), np.float32))
    with pytest.raises(BadIndex):
        vm("cross_entropy", [scores, from_numpy(np.array([0, target]))], OPS["cross_entropy"].complete({}))


RNG = np.random.default_rng(0)


def _draw(*shape: int) -> NDArray:
    return from_numpy(RNG.uniform(0.2, 0.9, shape).astype("f4"))


def _ids(n: int, below: int) -> NDArray:
    return from_numpy(RNG.integers(0, below, n))


def _key() -> NDArray:
    return from_numpy(np.array([1, 2]))


def _state(n: int, columns: int) -> list[NDArray]:
    """Rate, flag, `columns` of one parameter of n numbers, and its count."""
    rate, none, count = (from_numpy(np.asarray(x)) for x in (0.01, np.float32(0), np.float32(3)))
    return [rate, none, *(_draw(n) for _ in range(columns)), count]


def _scored(n: int) -> list[NDArray]:
    scores, targets = _draw(3, n), _ids(3, n)
    _, lse = compute(OPS["cross_entropy"], [scores, targets], OPS["cross_entropy"].complete({}))
    return [scores, targets, lse, _draw(3)]


AXIS, WIDE = {"axes": (-1,), "keepdims": False}, {"dtype": float32}
SIZED: dict[str, Callable[[int], tuple[list[NDArray], dict[str, Any]]]] = {
    **{name: lambda n: ([_draw(3, n)], AXIS) for name in ("sum", "mean", "amax")},
    "softmax": lambda n: ([_draw(3, n)], {}),
    "rms_norm": lambda n: ([_draw(3, n), _draw(n)], {}),
    "layer_norm": lambda n: ([_draw(3, n), _draw(n), _draw(n)], {}),
    "cross_entropy": lambda n: ([_draw(3, n), _ids(3, n)], {}),
    "log_softmax": lambda n: ([_draw(3, n)], {}),
    "logsumexp": lambda n: ([_draw(3, n)], AXIS),
    "group_norm": lambda n: ([_draw(2, 4, n), _draw(4), _draw(4)], {"groups": 2}),
    "batch_norm": lambda n: ([_draw(3, n), _draw(n), _draw(n), _draw(n), _draw(n)], {}),
    "batch_norm_train": lambda n: ([_draw(3, n), _draw(n), _draw(n), _draw(n), _draw(n)], {}),
    "cross_entropy_backward": lambda n: (_scored(n), {}),
    "linear": lambda n: ([_draw(7, n), _draw(5, n), _draw(5)], {}),
    "matmul": lambda n: ([_draw(3, n), _draw(n, 5)], {}),
    "copy": lambda n: ([_draw(2, 3, n)], {}),
    "embedding": lambda n: ([_draw(4, n), _ids(5, 4)], {}),
    "embedding_backward": lambda n: ([_draw(5, n), _ids(5, 4)], {"rows": 4}),
    "rope": lambda n: ([_draw(1, 2, 3, 2 * n), _draw(1, 3, n), _draw(1, 3, n)], {}),
    "where": lambda n: ([from_numpy(RNG.integers(0, 2, n) > 0), _draw(n), _draw(n)], {}),
    "full_like": lambda n: ([_draw(n)], {"value": 2.5}),
    "cast": lambda n: ([from_numpy(_ids(3 * n, 2**15).to_numpy().astype("u2").reshape(3, n), bits=bfloat16)], WIDE),
    "rope_table": lambda n: ([from_numpy(RNG.integers(0, 999, (2, 3))), _draw(n)], {"scale": 1.5}),
    "size": lambda n: ([_draw(2, n)], {"axis": -1}),
    "junction": lambda n: ([_draw(n)] * 3, {}),
    "dropout": lambda n: ([_draw(n), _key()], {"p": 0.3, "stream": 1}),
    "bernoulli": lambda n: ([_draw(n), _key()], {"stream": 1}),
    "uniform": lambda n: ([_key()], {"stream": 1, "shape": (n,), "dtype": float32}),
    "adam_step": lambda n: (_state(n, 4), {}),
    "adamw_step": lambda n: (_state(n, 4), {}),
    "sgd_step": lambda n: (_state(n, 3), {"momentum": 0.9}),
    "rmsprop_step": lambda n: (_state(n, 3), {}),
    "lion_step": lambda n: (_state(n, 3), {}),
    "zero_check": lambda n: ([from_numpy(np.zeros((), "f4")), _draw(n), from_numpy(np.zeros(n, "f4"))], {}),
    "ema_step": lambda n: ([from_numpy(np.asarray(0.1)), _draw(n), _draw(n)], {}),
}
"""Operands whose row, or whose only axis, has n entries."""
ELSEWHERE = {
    **dict.fromkeys(("sdpa", "sdpa_backward"), "test_vm_attention"),
    **dict.fromkeys(("kv_append", "kv_append_paged", "sdpa_paged"), "test_vm_decode"),
    "sample_token": "test_choose: beside its kernel",
    "linear_int8": "test_vm_few_rows: it rounds activations",
    "muon_step": "test_vm_steps: its matrices are small",
    **dict.fromkeys(("block_sdpa", "block_sdpa_backward", "block_mass"), "tests/ops/test_block_attention.py"),
    **dict.fromkeys(("block_gate_gradient", "block_entropy", "block_entropy_backward"), "the same"),
    **dict.fromkeys(("sdpa_selected", "sdpa_selected_backward"), "test_vm_selected_attention"),
}


def test_every_vm_form_is_tested_at_sizes() -> None:
    assert {*ELEMENTWISE, *SIZED, *ELSEWHERE} == set(FORMS)


@pytest.mark.parametrize("name", SIZED)
def test_sizes_around_a_vector_and_a_tile_match_aten(name: str) -> None:
    done = 0
    for n in SIZES:
        try:
            arrays, attrs = SIZED[name](n)
            attrs = OPS[name].complete(attrs)
            OPS[name].specs([a.spec for a in arrays], attrs)
        except (ValueError, GraphwrightError):  # no classes to pick from, no largest of nothing
            assert n == 0
            continue
        done += agree(name, arrays, attrs, atol=2e-5, rtol=1e-5)
    assert done >= len(SIZES) - 1


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "softmax", "rms_norm", "layer_norm", "matmul", "linear"])
def test_rows_with_special_values_match_aten(name: str, special: float) -> None:
    for n in (1, 5, 16, 40):
        for index in {0, n // 2, n - 1}:
            arrays, attrs = SIZED[name](n)
            x = arrays[0].to_numpy().copy()
            x[1, index] = special
            with np.errstate(all="ignore"):
                assert agree(name, [from_numpy(x), *arrays[1:]], OPS[name].complete(attrs), atol=1e-5, rtol=1e-5), n


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_dot_of_a_million_terms_is_accurate(name: str) -> None:
    """Of positive numbers, where a running sum in float32 would lose four of them."""
    a, b = (np.random.default_rng(s).uniform(0, 1, 10**6).astype("f4") for s in (0, 1))
    truth = float(a.astype("f8") @ b.astype("f8"))
    for rows in (1, 8):
        x = np.tile(a, (rows, 1))
        w = b[:, None] if name == "matmul" else b[None]
        (found,) = vm(name, [from_numpy(x), from_numpy(w)], OPS[name].complete({})) or [None]
        assert found is not None
        assert (np.abs(found.to_numpy() - truth) <= 2e-6 * truth).all(), rows


def test_int64_addition_is_exact() -> None:
    x = np.array([2**62, -(2**63), -1, 0, 5])
    assert agree("add", [from_numpy(x), from_numpy(np.array([1, 2**40, 1, 0, -6]))], {})
    assert agree("add", [from_numpy(x), from_numpy(np.array(1))], {})
    assert agree("add", [from_numpy(np.arange(12).reshape(3, 4).T), from_numpy(np.arange(3))], {})


def test_comparisons_with_nan_match_aten() -> None:
    x = np.array([1, 2, np.nan, np.inf, -np.inf, 0, -0.0] * 5, np.float32)
    y = np.array([1, 1, 1, np.inf, np.nan, -0.0, 0] * 5, np.float32)
    for name, truth in (("lt", x < y), ("le", x <= y), ("eq", x == y)):
        (found,) = vm(name, [from_numpy(x), from_numpy(y)], {}) or [None]
        assert found is not None
        assert found.dtype is bool_
        assert (found.to_numpy() == truth).all()
        assert agree("where", [found, from_numpy(x), from_numpy(y)], {})
    for flag in (True, False):
        assert agree("where", [from_numpy(np.array(flag)), from_numpy(x), from_numpy(y)], {})


def test_every_bfloat16_is_widened_exactly() -> None:
    bits = np.arange(2**16, dtype="u2").reshape(256, 256)
    for part in (bits, bits[::3, 5:], bits.T.copy().T, bits[:, :1], bits[:, ::2]):
        (found,) = vm("cast", [from_numpy(part, bits=bfloat16)], WIDE) or [None]
        if found is None:
            assert part.strides[1] != 2, "columns that are not adjacent"
            continue
        np.testing.assert_array_equal(found.to_numpy().view("u4"), part.astype("u4") << 16)
    repeated = from_numpy(bits[:, :1], bits=bfloat16).expand(256, 20)
    (found,) = vm("cast", [repeated], WIDE) or [None]
    assert found is not None
    np.testing.assert_array_equal(found.to_numpy().view("u4"), np.repeat(bits[:, :1].astype("u4") << 16, 20, 1))


def test_rounding_to_bfloat16_matches_aten() -> None:
    """Halves between two, what overflows, numbers below the smallest normal one, both zeros; a NaN stays one."""
    upper = np.arange(0, 2**16, 7, dtype="u4")
    bits = (upper[:, None] << 16) | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], "u4")
    x = bits.view("f4")
    for part in (x, x.reshape(-1), x[:, 1:4], x[::2], np.repeat(x[:, :1], 20, 1)):
        (found,) = vm("cast", [from_numpy(part)], {"dtype": bfloat16}) or [None]
        (truth,) = compute(OPS["cast"], [from_numpy(part)], {"dtype": bfloat16})
        assert found is not None
        mine, other = (a.to_numpy(bits=True) for a in (found, truth))
        nan = np.isnan(part)
        np.testing.assert_array_equal(mine[~nan], other[~nan])
        assert ((mine[nan] & 0x7FFF) > 0x7F80).all()


LOW = sorted({*(n for n in ELEMENTWISE if OPS[n].vm), "junction"} - {"copy", "eq", "ne", "lt", "le", "gt", "ge"})


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_elementwise_ops_round_once(name: str) -> None:
    """Of ops that ATen computes in float32 the bits of that, but where the VM's function rounds another way."""
    rng, attrs = np.random.default_rng(0), OPS[name].complete({})
    arity = 2 if name == "junction" else OPS[name].arity
    base = rng.uniform(0.2, 0.9, (6, 1200)).astype("f4")
    for part in (base, base[:, :17], base[1], base[::2, :40], base[:0], base[:, :1]):
        sides = [part] if arity == 1 else [part, part[..., ::-1].copy()]
        others = [[*sides[:1], np.float32(0.5)]] if arity == 2 and name != "junction" else []
        for ins in (sides, *others):
            arrays = [low(x) for x in ins]
            (found,) = vm(name, arrays, attrs) or [None]
            (truth,) = compute(OPS[name], arrays, attrs)
            assert found is not None
            mine, other = (a.to_numpy(bits=True).astype(int) for a in (found, truth))
            assert np.abs(mine - other).max(initial=0) <= (1 if name not in _EXACT else 0)


def test_bfloat16_copies_move_pairs_of_elements() -> None:
    bits = np.random.default_rng(0).integers(0, 2**16, (3, 4, 6, 8), dtype="u2")
    for part, fits in ((bits.transpose(0, 2, 1, 3), True), (bits[..., :5], False), (bits[..., 1:5], True)):
        (found,) = vm("copy", [from_numpy(part, bits=bfloat16)], {}) or [None]
        assert (found is not None) == fits
        assert found is None or (found.to_numpy(bits=True) == part).all()


_EXACT = {"add", "sub", "mul", "div", "neg", "abs", "relu", "minimum", "maximum", "junction", "sqrt", "sign"}


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float64", "int64", "int8"])
def test_gathered_rows_keep_their_bits(kind: str) -> None:
    rng, ids = np.random.default_rng(0), np.array([[3, 0], [3, 6]])
    stored, marks = ("u2", {"bits": bfloat16}) if kind == "bfloat16" else (kind, {})
    size = np.dtype(stored).itemsize
    for columns in (1, 2, 4, 33, 34, 36):
        held = rng.integers(0, 256, (7, (columns + 4) * size), dtype="u1").view(stored)
        for rows in (held, held[:, 4:], held[::2][:, :columns]):
            table = from_numpy(rows, **cast("Any", marks))
            outs = [empty((2, 2, rows.shape[1]), table.dtype)]
            found = vm("embedding", [table, from_numpy(ids % len(rows))], {}, outs)
            assert (found is None) == (rows.shape[1] * size % 4 > 0 or held.shape[1] * size % 4 > 0)
            if found is not None:
                assert found[0].to_numpy(bits=True).tobytes() == rows[ids % len(rows)].tobytes()
    with pytest.raises(BadIndex):
        vm("embedding", [table, from_numpy(np.array([4]))], {}, [empty((1, columns), table.dtype)])


def test_other_dtypes_have_no_vm_form() -> None:
    x = from_numpy(np.ones(3))
    assert encode("add", [view(x)], [view(x), view(x)], {}) is None
    ids = from_numpy(np.ones(3, np.int32))
    assert encode("add", [view(ids)], [view(ids), view(ids)], {}) is None
    assert view(x).dtype is not float32
