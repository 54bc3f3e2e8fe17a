"""Every op that the VM has a form for, beside its ATen kernel: samples, sizes around a vector, layouts, axes."""

from __future__ import annotations

import zlib
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest

from graphwright.array import CPU, NDArray, backend, bool_, float32, from_numpy
from graphwright.array.vm.encode import ENCODERS, View, encode
from graphwright.array.vm.segment import BadIndex, VmSegment
from graphwright.ops import OPS, compute

SIZES = (0, 1, 2, 15, 16, 17, 33, 1023, 1024, 1025)
FORMS = sorted(set(ENCODERS) & set(OPS))
ELEMENTWISE = [n for n in FORMS if OPS[n].traits.elementwise and OPS[n].arity in (1, 2) and n != "full_like"]


def view(array: NDArray) -> View:
    return View(array.dtype, array.shape, array.strides, backend(CPU).address(array))


def vm(name: str, arrays: list[NDArray], attrs: dict[str, Any]) -> list[NDArray] | None:
    """Results by the VM into memory of NaNs; None if it has no form."""
    specs = OPS[name].specs([a.spec for a in arrays], attrs)
    hosts = [np.full(s.sizes, np.nan if s.dtype.is_float else 1, s.dtype.numpy) for s in specs]
    outs = [from_numpy(h) for h in hosts]
    rows = encode(name, [view(o) for o in outs], [view(a) for a in arrays], attrs)
    if rows is None:
        return None
    VmSegment([rows])()
    return outs


def agree(name: str, arrays: list[NDArray], attrs: dict[str, Any], atol: float = 2e-6) -> bool:
    """Compare with ATen; False if the VM has no form."""
    found = vm(name, arrays, attrs)
    for mine, other in zip(found or (), compute(OPS[name], arrays, attrs) if found else (), strict=True):
        np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=2e-6, atol=atol, err_msg=name)
    return found is not None


def single(x: np.ndarray) -> NDArray:
    return from_numpy(x.astype(np.float32) if x.dtype == np.float64 else x)


@pytest.mark.parametrize("name", [n for n in FORMS if n != "adamw_step"])
def test_samples_of_every_op(name: str) -> None:
    row, done = OPS[name], 0
    for k in range(12):
        inputs, attrs = row.sample(np.random.default_rng(zlib.crc32(name.encode()) + k))
        atol = 0.05 if name == "linear_int8" else 2e-6  # it rounds activations; `test_vm_few_rows` has the bound
        done += agree(name, [single(np.asarray(x)) for x in inputs], row.complete(attrs), atol)
    assert done >= 2, "the VM takes samples of every op it has"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_sizes_and_layouts(name: str) -> None:
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


def test_three_axes_that_do_not_merge_are_walked() -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, 6)).astype("f4")
    a, b = from_numpy(x[:, ::2, :]), from_numpy(x[:, :3, ::-1][:, :, ::-1][:1])
    assert agree("add", [a, b], {})
    assert agree("exp", [from_numpy(x[:, ::2, :].transpose(1, 0, 2))], {})


AXES = list(chain.from_iterable(combinations(range(3), r) for r in range(1, 4)))


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
def test_reductions_over_any_axes(name: str, keepdims: bool) -> None:
    rng, done = np.random.default_rng(0), 0
    for shape in ((2, 3, 4), (1, 5, 1), (3, 1, 33), (2, 300, 17), (4, 1, 1)):
        for axes in AXES:
            x = rng.normal(size=shape).astype("f4")
            done += agree(name, [from_numpy(x)], {"axes": axes, "keepdims": keepdims}, atol=4e-5)
            done += agree(name, [from_numpy(x.transpose(2, 0, 1))], {"axes": axes, "keepdims": keepdims}, atol=4e-5)
    assert done >= 30


@pytest.mark.parametrize("n", [1, 4095, 4096, 4097, 2**20])
def test_long_sums_keep_their_digits(n: int) -> None:
    x = np.full(n, 0.1, np.float32)
    (found,) = vm("sum", [from_numpy(x)], {"axes": (0,), "keepdims": False}) or [None]
    assert found is not None
    assert abs(found.item() - x.astype("f8").sum()) <= 1e-6 * x.sum(dtype="f8")
    (found,) = vm("sum", [from_numpy(x[:65536].reshape(-1, 1))], {"axes": (0,), "keepdims": False}) or [None]
    assert found is not None
    assert abs(found.item() - x[:65536].astype("f8").sum()) <= 1e-6 * x[:65536].sum(dtype="f8")


@pytest.mark.parametrize("scale", [1.0, 800.0])
@pytest.mark.parametrize("classes", [1, 2, 10, 16, 17, 100])
def test_losses_of_large_scores(scale: float, classes: int) -> None:
    rng = np.random.default_rng(0)
    scores = from_numpy((scale * rng.normal(size=(7, classes))).astype("f4"))
    targets = rng.integers(0, classes, 7)
    targets[2] = -100
    attrs = OPS["cross_entropy"].complete({})
    assert agree("cross_entropy", [scores, from_numpy(targets)], attrs)
    _, lse = compute(OPS["cross_entropy"], [scores, from_numpy(targets)], attrs)
    grad = from_numpy(rng.normal(size=7).astype("f4"))
    assert agree("cross_entropy_backward", [scores, from_numpy(targets), lse, grad], attrs)
    assert agree("softmax", [scores], OPS["softmax"].complete({}))


@pytest.mark.parametrize("target", [3, -1, 10**12])
def test_a_target_outside_the_classes_is_refused(target: int) -> None:
    scores = from_numpy(np.zeros((2, 3), np.float32))
    with pytest.raises(BadIndex):
        vm("cross_entropy", [scores, from_numpy(np.array([0, target]))], OPS["cross_entropy"].complete({}))


@pytest.mark.parametrize("in_place", [True, False])
def test_fifty_steps_of_adamw(in_place: bool) -> None:
    """Two parameters; a step that found an infinity changes nothing."""
    rng = np.random.default_rng(0)
    attrs = OPS["adamw_step"].complete({"weight_decay": 0.1})
    shapes = [(5, 7), (3,)]
    state = [*(rng.normal(size=s) for s in shapes), *(np.zeros(s) for s in (*shapes, *shapes, (), ()))]
    ours = [from_numpy(np.asarray(a, "f4")) for a in state]
    theirs = [a.copy() for a in ours]
    scalars: list[NDArray] = []
    for step in range(1, 51):
        grads = [from_numpy(rng.normal(size=s).astype("f4")) for s in shapes]
        scalars = [from_numpy(np.asarray(0.01)), from_numpy(np.asarray(step % 10 == 0, np.float32))]
        outs = ours if in_place else [a.copy() for a in ours]
        rows = encode("adamw_step", [view(o) for o in outs], [view(a) for a in (*scalars, *grads, *ours)], attrs)
        assert rows is not None
        VmSegment([rows])()
        ours = outs
        theirs = list(compute(OPS["adamw_step"], [*scalars, *grads, *theirs], attrs))
    assert ours[-1].item() == 45
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=2e-6, atol=1e-7)
    lr, found = view(from_numpy(np.asarray(0.01))), view(from_numpy(np.zeros((), np.float32)))
    assert encode("adamw_step", [], [lr, found], {**attrs, "amsgrad": True}) is None


def test_conditions_and_comparisons_with_nan() -> None:
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


def test_other_dtypes_have_no_form() -> None:
    x = from_numpy(np.ones(3))
    assert encode("add", [view(x)], [view(x), view(x)], {}) is None
    ids = from_numpy(np.ones(3, np.int64))
    assert encode("add", [view(ids)], [view(ids), view(ids)], {}) is None
    assert view(x).dtype is not float32
