"""Kernels that stay bound to small arrays: the bits of a new binding for new operands, other attributes, threads."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from op_cases import draws

from graphwright.array import NDArray, empty, from_numpy
from graphwright.errors import IndexOutOfRange
from graphwright.ops import OPS, call, compute
from graphwright.ops.call import CachedBindings
from graphwright.testing.oracle import assert_bits

COMPUTED = [name for name, row in OPS.items() if row.view is None]


@pytest.fixture(autouse=True)
def uses(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The cache of dispatch facts, empty at first."""
    known: dict = {}
    monkeypatch.setattr(sys.modules["graphwright.ops.call"], "_known", known)
    return known


def cached(uses: dict) -> list[CachedBindings]:
    """Uses whose binding is cached."""
    return [use.cached for use in uses.values() if use.cached is not None]


def newly_bound(name: str, arrays: list[NDArray], attrs: dict) -> tuple[NDArray, ...]:
    """Results written into given memory, which binds the kernel again."""
    specs = OPS[name].specs([a.spec for a in arrays], attrs)
    return compute(OPS[name], arrays, attrs, [empty(s.sizes, s.dtype) for s in specs])


@pytest.mark.parametrize("name", COMPUTED)
def test_cached_bindings_compute_the_same_as_new_ones(name: str) -> None:
    row = OPS[name]
    for inputs, attrs in draws(name, 2):
        for turn in range(3):  # learned, bound and kept, run again
            arrays = [from_numpy(np.roll(x, turn) if x.dtype == np.float64 else x) for x in inputs]
            before = [a.tobytes() for a in arrays]
            results = compute(row, arrays, attrs)
            assert [a.tobytes() for a in arrays] == before
            for made, other in zip(results, newly_bound(name, arrays, attrs), strict=True):
                assert_bits(made, other, what=name)
            again = compute(row, arrays, attrs)
            assert not {id(a.storage) for a in results} & {id(a.storage) for a in again}


def losses(scores: np.ndarray, smoothing: float = 0.0) -> NDArray:
    return call("cross_entropy", from_numpy(scores), from_numpy(np.array([1, 2, 0])), smoothing=smoothing)[0]


def test_only_small_kernels_of_many_calls_are_cached(uses: dict) -> None:
    losses(np.zeros((3, 5)))
    assert len(cached(uses)) == 1
    call("cumsum", from_numpy(np.zeros(4)), axis=0)  # one call
    call("cross_entropy", from_numpy(np.zeros((4096, 5))), from_numpy(np.zeros(4096, np.int64)))  # not small
    call("sech", from_numpy(np.zeros((5, 3))).permute(1, 0))  # a copy would have other strides
    assert len(cached(uses)) == 1
    call("sech", from_numpy(np.zeros((5, 3))))
    assert len(cached(uses)) == 2


def test_zeros_of_different_signs_are_bound_separately(uses: dict) -> None:
    scores = np.random.default_rng(0).normal(size=(3, 5))
    for smoothing in (0.0, -0.0, 0.0, 0):
        losses(scores, smoothing)
    (use,) = cached(uses)
    assert len(use.bound) == 2  # the integer is converted to 0.0
    assert all(len(pool) == 1 for pool in use.bound.values())


def test_a_kernel_that_raised_is_bound_again(uses: dict) -> None:
    losses(np.zeros((3, 5)))
    with pytest.raises(IndexOutOfRange):
        call("cross_entropy", from_numpy(np.zeros((3, 5))), from_numpy(np.array([1, 7, 0])))
    assert_bits(losses(np.zeros((3, 5))), np.full(3, np.log(5.0)))
    assert len(cached(uses)) == 1


def test_threads_do_not_share_a_binding() -> None:
    rng = np.random.default_rng(0)
    cases = [rng.normal(size=(3, 5)) for _ in range(8)]
    expected = [losses(x).to_numpy() for x in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for made, other in zip(pool.map(losses, cases), expected, strict=True):
                assert_bits(made, other)
