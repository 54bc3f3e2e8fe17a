"""Every op has each field of a definition, or None with a reason; every sample runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_cases import draws
from torch_ops import TORCH

from graphwright.array import CPU, NDArray, Spec, backend, from_numpy, int64
from graphwright.errors import DTypeError, GraphwrightError, ShapeError, UsageError
from graphwright.ops import OPS, UnknownOp, call, compute, get, op


def sampled(name: str) -> tuple[list[Spec], dict]:
    """Specs of the operands of a sample, and its attributes."""
    inputs, attrs = draws(name, 1)[0]
    return [from_numpy(x).spec for x in inputs], attrs


@pytest.mark.parametrize("name", OPS)
def test_each_field_is_set_or_has_a_reason(name: str) -> None:
    row = OPS[name]
    assert row.doc.strip()
    assert row.infer is not None
    assert row.cost is not None
    for field in ("vjp", "sample", "axes", "emit", "onnx"):
        falls_back = field in ("emit", "onnx") and row.expand is not None
        falls_back |= field == "emit" and row.torch_module is not None
        assert getattr(row, field) is not None or row.why.get(field) or falls_back, f"{name}.{field} is None, no reason"
    assert set(row.why) <= {"vjp", "sample", "axes", "emit", "onnx"}
    assert row.aten is None or (row.view is None and callable(getattr(torch, row.aten)))
    assert (row.method or row.functional) is None or row.operands
    made, counted = (
        len(row.specs(*sampled(name))),
        row.traits.updates_states or row.traits.gates or "wanted" in row.attrs,
    )
    assert len(row.results) == (made if made > 1 and not counted else 0)
    assert not row.traits.backward_of or row.traits.backward_of in OPS
    assert not row.traits.applies or row.traits.applies in OPS
    assert row.traits.contracts in {"", "out_in", "in_out", "window"}
    assert not row.traits.mixes or row.traits.mixes in row.attrs
    assert row.traits.amp in {"low", "f32", "promote", "inner", "keep"}
    low, high = row.arity if isinstance(row.arity, tuple) else (row.arity, row.arity)
    most = low + 8 if high is None else high
    ports = [*row.traits.fixed, *(i for _, i in row.traits.inplace), *(i for i, _ in row.traits.identity)]
    assert all(-most <= port < most for port in [*ports, *row.traits.contiguous])
    assert all(port < most for port in row.saves.inputs)


@pytest.mark.parametrize("name", OPS)
def test_each_op_computes_or_is_a_view(name: str) -> None:
    assert (OPS[name].view is not None) != (name in backend(CPU).kernels() or OPS[name].expand is not None)


def test_every_kernel_belongs_to_an_op() -> None:
    assert backend(CPU).kernels() <= OPS.keys()


def test_the_torch_reference_covers_the_table() -> None:
    assert TORCH.keys() == OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_samples_run_and_have_the_inferred_specs(name: str) -> None:
    row = OPS[name]
    for inputs, attrs in draws(name):
        arrays = [from_numpy(x) for x in inputs]
        specs = row.specs([a.spec for a in arrays], attrs)
        results = compute(row, arrays, attrs)
        assert tuple(r.spec for r in results) == specs
        cost = row.cost([a.spec for a in arrays], specs, attrs)
        assert min(cost.flops, cost.read, cost.write) >= 0


@pytest.mark.parametrize("name", OPS)
def test_ops_do_not_write_to_their_operands(name: str) -> None:
    inputs, attrs = draws(name, 1)[0]
    arrays = [from_numpy(x) for x in inputs]
    before = [a.tobytes() for a in arrays]
    compute(OPS[name], arrays, attrs)
    assert [a.tobytes() for a in arrays] == before


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].arity != (0, None)])
def test_a_wrong_number_of_operands_is_refused_by_name(name: str) -> None:
    _, attrs = draws(name, 1)[0]
    with pytest.raises(UsageError, match=name):
        OPS[name].specs([], attrs, "layer.3")


def test_unknown_ops_name_similar_ones() -> None:
    with pytest.raises(UnknownOp, match="matmul"):
        get("matmull")


def test_unknown_and_missing_attributes_are_refused() -> None:
    with pytest.raises(UsageError, match="softmax"):
        call("softmax", from_numpy(np.ones(2)), dim=3)
    with pytest.raises(UsageError, match="reshape"):
        call("reshape", from_numpy(np.ones(2)))


def test_duplicate_names_and_missing_reasons_are_refused() -> None:
    with pytest.raises(UsageError, match="tanh"):
        op("tanh")(type("Again", (), {"__doc__": "again"}))
    with pytest.raises(UsageError, match="vjp"):
        op("never_entered")(
            type("Bad", (), {"__doc__": "x", "arity": 1, "infer": lambda x: x, "vjp": None, "sample": lambda r: 0})
        )
    assert "never_entered" not in OPS


LINE, KEY = np.ones((1, 2, 5)), np.zeros(2, np.int64)
F, N, B = np.ones((2, 3)), np.ones((2, 3), np.int64), np.ones((2, 3), bool)
POOL = np.ones((2, 1, 2, 2))


def _table(blocks: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([blocks], np.int32), np.array([length], np.int32)


def _rules(rows: int) -> tuple[np.ndarray, ...]:
    return np.ones((rows, 6), "f4"), np.ones((rows, 4), np.int64), np.ones((rows, 3, 2), "i4")


LOGITS = np.ones((2, 3), "f4")
Q8 = np.ones((4, 3), np.int8)
LR, NO = np.float64(0.1), np.float32(0)
REFUSED: list[tuple[str, list[np.ndarray], dict, type[GraphwrightError]]] = [
    ("add", [F, np.ones((2, 4))], {}, ShapeError),
    ("add", [F, N], {}, DTypeError),
    ("exp", [N], {}, DTypeError),
    ("where", [F, F, F], {}, DTypeError),
    ("where", [B, F, N], {}, DTypeError),
    ("junction", [F, np.ones((2, 1))], {}, ShapeError),
    ("reshape", [F], {"shape": (4, 2)}, ShapeError),
    ("unflatten", [F], {"axis": 1, "sizes": (2, 2)}, ShapeError),
    ("flatten", [F], {"start": 1, "end": 0}, ShapeError),
    ("permute", [F], {"axes": (0, 0)}, ShapeError),
    ("expand", [F], {"shape": (3, 3)}, ShapeError),
    ("expand", [np.ones(1)], {"shape": (-3, 1)}, UsageError),
    ("expand", [np.ones(1)], {"shape": (1 << 70,)}, UsageError),
    ("slice", [F], {"axis": 1, "start": 2, "size": 2}, ShapeError),
    ("slice", [F], {"axis": 2, "start": 0, "size": 1}, ShapeError),
    ("last", [np.ones((2, 0))], {"axis": 1}, ShapeError),
    ("pad_slice", [F], {"axis": 1, "start": 1, "size": 3}, ShapeError),
    ("concat", [F, np.ones((3, 3))], {"axis": 1}, ShapeError),
    ("sum", [F], {"axes": (2,)}, ShapeError),
    ("amax", [np.ones((2, 0))], {"axes": (1,)}, ShapeError),
    ("argmax", [np.ones((2, 0))], {"axis": 1}, ShapeError),
    ("mean", [N], {"axes": (0,)}, DTypeError),
    ("matmul", [F, np.ones((2, 3))], {}, ShapeError),
    ("matmul", [np.ones((2, 2, 3)), np.ones((3, 3, 4))], {}, ShapeError),
    ("matmul", [N.astype(bool), np.ones((3, 2), bool)], {}, DTypeError),
    ("linear", [F, np.ones((4, 2))], {}, ShapeError),
    ("linear", [F, np.ones((4, 3)), np.ones(3)], {}, ShapeError),
    ("rms_norm", [F, np.ones(2)], {}, ShapeError),
    ("cross_entropy", [F, np.ones(2)], {}, DTypeError),
    ("cross_entropy", [F, np.ones(3, np.int64)], {}, ShapeError),
    ("cross_entropy", [np.ones((2, 0)), np.ones(2, np.int64)], {}, ShapeError),
    ("embedding", [F, F], {}, DTypeError),
    ("embedding", [np.ones(3), np.ones(2, np.int64)], {}, ShapeError),
    ("sdpa", [np.ones((1, 3, 2, 2)), np.ones((1, 2, 2, 2)), np.ones((1, 2, 2, 2))], {"scale": 1.0}, ShapeError),
    ("rope", [np.ones((1, 2, 3, 2)), np.ones((1, 4, 1)), np.ones((1, 4, 1))], {}, ShapeError),
    ("rope", [np.ones((1, 2, 3, 2)), np.ones((1, 3, 1)), np.ones((1, 3, 1))], {"style": "pairs"}, UsageError),
    ("kv_append", [np.ones((1, 1, 4, 2)), np.ones((1, 1, 2, 3)), np.asarray(0)], {}, ShapeError),
    ("sample_token", [LOGITS.astype("f8"), *_rules(2)], {}, DTypeError),
    ("sample_token", [LOGITS, *_rules(3)], {}, ShapeError),
    ("sample_token", [LOGITS[:, :0], *_rules(2)], {}, ShapeError),
    ("sample_token", [LOGITS[0], *_rules(2)], {}, ShapeError),
    ("linear_int8", [F, np.ones((4, 3)), np.ones((4, 1))], {}, DTypeError),
    ("linear_int8", [F, Q8, np.ones((4, 2))], {}, ShapeError),
    ("linear_int8", [F, Q8, np.ones((4, 1)), np.ones(3)], {}, ShapeError),
    ("linear_int8", [np.ones((2, 4)), Q8, np.ones((4, 1))], {}, ShapeError),
    ("kv_append_paged", [POOL, np.ones((1, 1, 2, 3)), *_table([0], 0)], {}, ShapeError),
    ("kv_append_paged", [POOL, np.ones((2, 1, 2, 2)), *_table([0], 0)], {}, ShapeError),
    ("kv_append_paged", [POOL, np.ones((1, 1, 2, 2)), np.array([[0]]), np.array([0])], {}, DTypeError),
    ("sdpa_paged", [np.ones((1, 1, 1, 3)), POOL, POOL, *_table([0], 0)], {"scale": 1.0}, ShapeError),
    ("sdpa_paged", [np.ones((1, 1, 1, 2)), POOL, POOL, *_table([0], 0)], {"scale": 1.0, "window": 0}, UsageError),
    ("sdpa_paged", [np.ones((1, 1, 1, 2)), POOL, POOL, *_table([0], 0)], {"scale": 1.0, "softcap": 0.0}, UsageError),
    ("grouped_matmul", [F, np.ones((2, 4, 5)), np.array([0, 1, 2])], {}, ShapeError),
    ("grouped_matmul", [F, np.ones((2, 3, 5)), np.array([0, 2])], {}, ShapeError),
    ("grouped_matmul", [F, np.ones((3, 5)), np.array([0, 2])], {}, ShapeError),
    ("grouped_outer", [F, np.ones((3, 5)), np.array([0, 2])], {}, ShapeError),
    ("grouped_outer", [F, F, np.array([0.0, 2.0])], {}, ShapeError),
    ("adamw_step", [LR, NO, np.ones((3, 2)), F, F, F, NO], {}, ShapeError),
    ("adamw_step", [LR, NO, F, F, F, NO], {}, ShapeError),
    ("adamw_step", [LR, NO, F, F, np.ones((3, 2)), F, NO], {}, ShapeError),
    ("muon_step", [LR, NO, *[np.ones(3)] * 3, NO], {}, ShapeError),
    ("sgd_step", [LR, NO, F, F, LR], {}, ShapeError),
    ("nadam_step", [LR, NO, F, F, F, F, F, NO], {}, ShapeError),  # the product of momenta is one number
    ("sgd_step", [NO, NO, F, F, NO], {}, DTypeError),
    ("sgd_step", [LR, LR, F, F, NO], {}, DTypeError),
    ("sgd_step", [LR, NO, F, F.astype("f4"), F, F.astype("f4"), NO, NO], {}, DTypeError),
    ("ema_step", [LR, F, np.ones((3, 2))], {}, ShapeError),
    ("ema_step", [LR, N, N], {}, DTypeError),
    ("unscale_check", [NO, NO, F, F.astype("f4")], {}, DTypeError),
    ("conv", [LINE, np.ones((3, 4, 2))], {}, ShapeError),
    ("conv", [LINE, np.ones((3, 1, 2))], {"groups": 2}, ShapeError),
    ("conv", [LINE, np.ones((3, 2, 6))], {}, ShapeError),
    ("conv", [LINE, np.ones((3, 2, 2))], {"stride": 0}, ShapeError),
    ("conv", [LINE, np.ones((3, 2, 2))], {"stride": (1, 1)}, ShapeError),
    ("conv", [LINE, np.ones((3, 2, 2)), np.ones(2)], {}, ShapeError),
    ("conv", [F, np.ones((3, 2))], {}, ShapeError),
    ("conv", [np.ones((1, 2, 5), np.int64), np.ones((3, 2, 2), np.int64)], {}, DTypeError),
    ("conv_transpose", [LINE, np.ones((3, 2, 2))], {}, ShapeError),
    ("conv_transpose", [LINE, np.ones((2, 2, 2))], {"output_padding": 1}, ShapeError),
    ("conv_transpose", [LINE[..., :1], np.ones((2, 2, 2))], {"padding": 1}, ShapeError),
    ("conv_weight", [LINE, np.ones((1, 3, 5))], {"kernel": (2,)}, ShapeError),
    ("unfold", [LINE], {"kernel": (2, 2)}, ShapeError),
    ("fold", [LINE], {"kernel": (2,), "sizes": (5,)}, ShapeError),
    ("max_pool", [LINE], {"kernel": (6,)}, ShapeError),
    ("max_pool", [LINE], {"kernel": (2,), "padding": 2}, ShapeError),
    ("max_pool", [LINE], {"kernel": (1, 1, 1)}, ShapeError),
    ("avg_pool", [np.ones((1, 2, 5), np.int64)], {"kernel": (2,)}, DTypeError),
    ("avg_pool_backward", [LINE], {"kernel": (2,), "sizes": (5,)}, ShapeError),
    ("adaptive_avg_pool", [LINE], {"sizes": (0,)}, ShapeError),
    ("interpolate", [LINE], {"sizes": (3,), "mode": "cubic"}, UsageError),
    ("interpolate", [LINE], {"sizes": (3,), "align_corners": True}, ShapeError),
    ("squeeze", [F], {"axes": (0,)}, ShapeError),
    ("unsqueeze", [F], {"axes": (0, -4)}, ShapeError),
    ("diagonal", [F], {"axes": (0, -2)}, ShapeError),
    ("flip", [F], {"axes": (2,)}, ShapeError),
    ("roll", [F], {"shifts": (1,), "axes": (0, 1)}, ShapeError),
    ("roll", [F], {"shifts": (1, 1), "axes": (1, -1)}, ShapeError),
    ("tile", [F], {"repeats": (2,)}, ShapeError),
    ("tile", [F], {"repeats": (2, -1)}, ShapeError),
    ("repeat_interleave", [F], {"repeats": -1, "axis": 0}, ShapeError),
    ("pad", [F], {"widths": ((1, -1),)}, ShapeError),
    ("pad", [F], {"widths": ((3, 0),), "mode": "reflect"}, ShapeError),
    ("pad", [np.ones((2, 0))], {"widths": ((1, 0),), "mode": "replicate"}, ShapeError),
    ("pad", [F], {"widths": ((1, 0),), "mode": "circular"}, UsageError),
    ("pad", [F], {"widths": ((1, 0),) * 3}, ShapeError),
    ("pad_backward", [F], {"widths": ((2, 2),)}, ShapeError),
    ("tril", [np.ones(3)], {}, ShapeError),
    ("iota", [F], {"axis": 2}, ShapeError),
    ("gather", [F, N.astype(np.int32)], {"axis": 0}, DTypeError),
    ("gather", [F, np.ones((2, 4), np.int64)], {"axis": 0}, ShapeError),
    ("gather", [F, np.ones(2, np.int64)], {"axis": 0}, ShapeError),
    ("scatter", [F, N, np.ones((2, 2))], {"axis": 0}, ShapeError),
    ("scatter", [F, N, N], {"axis": 0}, DTypeError),
    ("scatter_add", [F, F, F], {"axis": 0}, DTypeError),
    ("index", [F, F], {}, DTypeError),
    ("index", [F, N, N, N], {}, ShapeError),
    ("index", [F, N, np.ones((2, 4), np.int64)], {}, ShapeError),
    ("index", [F, N], {"axis": 2}, ShapeError),
    ("index_sum", [F, N], {"shape": (4, 4)}, ShapeError),
    ("index_put", [F, np.ones((2, 4, 3)), N], {}, ShapeError),
    ("index_put", [F, N, N], {}, DTypeError),
    ("index_add", [F, np.ones((1, 2, 3, 3)), N], {}, ShapeError),
    ("index_fill", [F, B], {"value": 0.0}, DTypeError),
    ("one_hot", [F], {"classes": 3}, DTypeError),
    ("one_hot", [N], {"classes": -1}, UsageError),
    ("bincount", [F], {"length": 3}, DTypeError),
    ("bincount", [N], {"length": -1}, UsageError),
    ("nonzero", [F], {"size": -1}, UsageError),
    ("uniform", [KEY], {"stream": 2**32, "shape": (2,)}, UsageError),
    ("normal", [np.zeros(2)], {"stream": 0, "shape": (2,)}, DTypeError),
    ("gumbel", [KEY], {"stream": 0, "shape": (2,), "dtype": int64}, DTypeError),
    ("randint", [KEY], {"stream": 0, "shape": (2,), "low": 3, "high": 3}, UsageError),
    ("bernoulli", [N, KEY], {"stream": 0}, DTypeError),
    ("dropout", [F, KEY], {"stream": 0, "p": 1.5}, UsageError),
    ("dropout", [N, KEY], {"stream": 0, "p": 0.5}, DTypeError),
    ("stochastic_round", [F, KEY], {"stream": 0}, DTypeError),
    ("multinomial", [F, KEY], {"stream": 0, "samples": 4}, ShapeError),
    ("multinomial", [np.ones((2, 0)), KEY], {"stream": 0, "samples": 1, "replacement": True}, ShapeError),
    ("scatter_sum", [F, np.ones((2, 2), np.int64)], {"axis": 0, "shape": (2, 3)}, ShapeError),
]


@pytest.mark.parametrize(("name", "inputs", "attrs", "error"), REFUSED)
def test_wrong_operands_are_refused_before_any_kernel(name: str, inputs: list, attrs: dict, error: type) -> None:
    with pytest.raises(error) as caught:
        call(name, *(from_numpy(x) for x in inputs), **attrs)
    assert name in str(caught.value)
    assert caught.value.got is not None


@pytest.mark.parametrize(
    ("name", "inputs", "attrs"),
    [
        ("embedding", [np.ones((3, 2)), np.array([0, 3])], {}),
        ("embedding", [np.ones((3, 2)), np.array([-1])], {}),
        ("embedding_backward", [np.ones((1, 2)), np.array([3])], {"rows": 3}),
        ("cross_entropy", [np.ones((2, 3)), np.array([0, 3])], {}),
        ("kv_append", [np.ones((1, 1, 3, 2)), np.ones((1, 1, 2, 2)), np.asarray(2)], {}),
        *(
            ("kv_append_paged", [POOL, np.ones((1, 1, 2, 2)), *_table(*t)], {})
            for t in (([0, 1], 3), ([0, 2], 1), ([0, -1], 1))
        ),
        ("sdpa_paged", [np.ones((1, 1, 1, 2)), POOL, POOL, *_table([0, -1], 2)], {"scale": 1.0}),
        ("grouped_matmul", [np.ones((3, 2)), np.ones((2, 2, 2)), np.array([0, 2, 4])], {}),
        ("grouped_matmul", [np.ones((3, 2)), np.ones((2, 2, 2)), np.array([0, 4, 3])], {}),
        ("grouped_outer", [np.ones((3, 2)), np.ones((3, 2)), np.array([1, 3])], {}),
        ("gather", [np.ones(3), np.array([3])], {"axis": 0}),
        ("scatter", [np.ones(3), np.array([3]), np.ones(1)], {"axis": 0}),
        ("scatter_add", [np.ones(3), np.array([-1]), np.ones(1)], {"axis": 0}),
        ("index", [np.ones(3), np.array([3])], {}),
        ("index", [np.ones((3, 4)), np.array([0]), np.array([-5])], {}),
        ("index", [np.ones((3, 4)), np.array([-4]), np.array([0])], {}),
        ("index", [np.ones((3, 0)), np.array([0])], {"axis": 1}),
        ("index_sum", [np.ones(1), np.array([3])], {"shape": (3,)}),
        ("index_put", [np.ones(3), np.ones(1), np.array([3])], {}),
        ("index_add", [np.ones(3), np.ones(1), np.array([-4])], {}),
        ("index_fill", [np.ones(3), np.array([3])], {"value": 0.0}),
        ("one_hot", [np.array([4])], {"classes": 4}),
        ("one_hot", [np.array([-1])], {"classes": 4}),
        ("bincount", [np.array([4])], {"length": 4}),
        ("bincount", [np.array([-1])], {"length": 4}),
        ("gather", [np.ones(3), np.array([-1])], {"axis": 0}),
        ("scatter_sum", [np.ones(1), np.array([3])], {"axis": 0, "shape": (3,)}),
    ],
)
def test_an_index_out_of_range_raises_and_names_the_op(name: str, inputs: list, attrs: dict) -> None:
    with pytest.raises(IndexError, match=name) as caught:
        call(name, *(from_numpy(x) for x in inputs), **attrs)
    assert isinstance(caught.value, GraphwrightError)


@pytest.mark.parametrize(
    ("name", "operands", "attrs"),
    [
        ("scatter", [np.array([0, 3]), np.ones(2)], {"axis": 0}),
        ("scatter_add", [np.array([0, 3]), np.ones(2)], {"axis": 0}),
        ("index_put", [np.ones(2), np.array([0, 3])], {}),
        ("index_add", [np.ones(2), np.array([0, -4])], {}),
        ("index_fill", [np.array([0, 3])], {"value": 1.0}),
    ],
)
def test_an_index_out_of_range_is_found_before_the_first_write(name: str, operands: list, attrs: dict) -> None:
    x = from_numpy(np.zeros(3))
    with pytest.raises(IndexError):
        compute(get(name), [x, *map(from_numpy, operands)], get(name).complete(attrs), [x])
    assert not x.to_numpy().any()


def test_out_must_have_the_exact_spec() -> None:
    x = from_numpy(np.ones((2, 3)))
    for shape, kind in (((3, 2), "f8"), ((2, 3), "f4")):
        with pytest.raises(ShapeError, match="out"):
            compute(get("tanh"), [x], {}, [from_numpy(np.zeros(shape, kind))])


def test_out_is_overwritten_completely_and_its_version_rises() -> None:
    from graphwright.testing.oracle import assert_bits, poisoned

    for name in OPS:
        inputs, attrs = draws(name, 1)[0]
        arrays = [from_numpy(x) for x in inputs]
        fresh = compute(OPS[name], arrays, attrs)
        outs = [poisoned(r.copy()) for r in fresh]
        versions = [o.storage.version for o in outs]
        given = compute(OPS[name], arrays, attrs, outs)
        for before, out, r, mine in zip(versions, outs, fresh, given, strict=True):
            assert mine is out
            assert out.storage.version == before + 1
            assert_bits(out, r, what=name)


def _read_only(array: NDArray) -> NDArray:
    array.storage.readonly = True
    return array


def test_out_that_is_read_only_is_refused() -> None:
    from graphwright.array import ReadOnlyArray

    out = _read_only(from_numpy(np.zeros(3)))
    with pytest.raises(ReadOnlyArray):
        compute(get("tanh"), [from_numpy(np.ones(3))], {}, [out])
    assert not out.to_numpy().any()


def test_out_may_overlap_an_operand_only_if_the_op_allows_it() -> None:
    from graphwright.array import Layout
    from graphwright.errors import AliasError

    block = from_numpy(np.arange(8.0))
    front, back = block.view(Layout((4,), (1,), 0)), block.view(Layout((4,), (1,), 2))
    for name in OPS:
        row = OPS[name]
        if row.arity != 1 or row.attrs or row.view is not None or not row.traits.elementwise:
            continue
        if row.specs([front.spec], {}) != (front.spec,):
            continue
        with pytest.raises(AliasError):
            compute(row, [front], {}, [back])
        if (0, 0) in row.traits.inplace:
            compute(row, [front], {}, [front])
    square = block.view(Layout((2, 2), (2, 1)))
    with pytest.raises(AliasError):
        compute(get("matmul"), [square, square.copy()], {}, [square])
    compute(get("tanh"), [front], {}, [block.view(Layout((4,), (1,), 4))])


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].traits.inplace or OPS[n].traits.updates_states])
def test_in_place_gives_the_same_bits(name: str) -> None:
    from graphwright.testing.oracle import assert_bits

    inputs, attrs = draws(name, 1)[0]
    row = OPS[name]
    fresh = compute(row, [from_numpy(x) for x in inputs], attrs)
    for out, port in row.inplace(len(inputs), len(fresh)):
        arrays = [from_numpy(x.copy()) for x in inputs]
        if arrays[port].spec != fresh[out].spec:
            continue
        outs = [arrays[port] if o == out else r.copy() for o, r in enumerate(fresh)]
        for mine, other in zip(compute(row, arrays, attrs, outs), fresh, strict=True):
            assert_bits(mine, other, what=f"{name} over operand {port}")


@pytest.mark.parametrize("shapes", [((), ()), ((64, 64), ()), ((), (64, 64)), ((64,), (64, 1))])
def test_where_of_broadcast_operands_fills_the_result(shapes: tuple[tuple[int, ...], ...]) -> None:
    rng = np.random.default_rng(0)
    mask, a, b = rng.normal(size=(64, 64)) > 0, *(np.asarray(rng.normal(size=s), np.float32) for s in shapes)
    out = from_numpy(np.zeros((64, 64), np.float32))
    compute(get("where"), [from_numpy(x) for x in (mask, a, b)], {}, [out])
    assert out.to_numpy().tobytes() == np.where(mask, a, b).tobytes()


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].traits.keeps_zero and OPS[n].arity in (1, 2)])
def test_kernels_have_the_declared_keeps_zero(name: str) -> None:
    zeros = [from_numpy(np.zeros(3)) for _ in range(int(str(OPS[name].arity)))]
    assert not compute(OPS[name], zeros, OPS[name].complete({}))[0].to_numpy().any()


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].traits.annihilated])
def test_kernels_have_the_declared_annihilators(name: str) -> None:
    one, zero = (from_numpy(np.full(3, v)) for v in (1.0, 0.0))
    for operands in ([one, zero], [zero, one]):
        assert not compute(OPS[name], operands, {})[0].to_numpy().any()


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].traits.linear_in or OPS[n].traits.jointly_linear])
def test_ops_declared_linear_are_linear(name: str) -> None:
    """Scaling the operands that an op is linear in scales its result."""
    row = OPS[name]
    inputs, attrs = draws(name, 1)[0]
    joint = row.traits.jointly_linear
    for ports in [range(len(inputs))] if joint else [[port] for port in row.traits.linear_in]:
        scaled = [2.0 * x if i in ports else x for i, x in enumerate(inputs)]
        scaled = scaled[:2] if row.traits.addend == 2 else scaled
        before = compute(row, [from_numpy(x) for x in inputs[: len(scaled)]], attrs)[0].to_numpy()
        np.testing.assert_allclose(compute(row, [from_numpy(x) for x in scaled], attrs)[0].to_numpy(), 2.0 * before)
