"""The choice of the next id against numpy's whole sorts, by its kernel and by the VM: hostile logits, every rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from choosing import chosen
from graphwright.array import CPU, NDArray, backend, from_numpy
from graphwright.array.vm.encode.operands import View
from graphwright.array.vm.running.segment import VmSegment
from graphwright.ops import OPS, compute

KINDS = ("flat", "peaked", "whole", "sparse", "huge", "equal", "tiny", "signs", "nan", "inf", "none")
SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 97, 300)


def logits(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    z = rng.normal(size=n) * rng.choice([0.3, 3.0])
    if kind == "peaked":
        z *= 40
    elif kind == "whole":  # ties in every filter
        z = np.round(z)
    elif kind == "sparse":
        z[rng.random(n) < 0.7] = -np.inf
    elif kind == "huge":
        z *= 1e37
    elif kind == "equal":
        z[:] = rng.choice([0.0, -0.0, 3.5])
    elif kind == "tiny":  # subnormal
        z *= 1e-42
    elif kind == "signs":
        z = rng.choice([-1.0, 0.0, -0.0, 1.0], n)
    elif kind in ("nan", "inf"):
        z[rng.integers(0, n)] = rng.choice([np.nan, -np.nan]) if kind == "nan" else np.inf
    elif kind == "none":
        z[:] = -np.inf
    return z.astype(np.float32)


def operands(kind: str, n: int, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    options = ([1, 1, 1.3, 0.7], [0, 0, 0.5, -1], [0, 0.25], [0, 1, 0.5, 1.7], [1, 1, 0.9, 0.5, 1e-9], [0, 0, 0.1, 1])
    rules = np.array([[rng.choice(o) for o in options] for _ in range(rows)], np.float32)
    words = (-(2**63), 2**63), (0, 2**32)  # seed and stream; then position and top_k
    keys = [
        [*(rng.integers(*w) for w in words), rng.choice([-1, 0, 5, 2**31]), rng.choice([0, 1, 7, 99])]
        for _ in range(rows)
    ]
    seen = np.full((rows, 6, 2), -1, np.int32)
    for row in seen:
        count = min(n, int(rng.integers(0, 7)))  # up to as many as there is room for
        row[:count, 0], row[:count, 1] = rng.permutation(n)[:count], rng.integers(0, 3, count)
    return [np.stack([logits(kind, n, rng) for _ in range(rows)]), rules, np.array(keys, np.int64), seen]


def by_kernel(given_: list[np.ndarray]) -> list[np.ndarray]:
    return [o.to_numpy() for o in compute(OPS["sample_token"], [from_numpy(x) for x in given_], {})]


def without_vm(given_: list[np.ndarray]) -> list[np.ndarray]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHWRIGHT_NATIVE", "0")
        return by_kernel(given_)


def by_vm(given_: list[np.ndarray]) -> list[np.ndarray]:
    def view(a: NDArray) -> View:
        return View(a.dtype, a.shape, a.strides, backend(CPU).address(a))

    ins = [from_numpy(x) for x in given_]
    outs = [from_numpy(np.full(len(given_[0]), 9)), from_numpy(np.full_like(given_[0], 7.0))]
    form = OPS["sample_token"].vm
    assert form is not None
    rows = form.rows([view(a) for a in outs], [view(a) for a in ins], {})
    assert rows is not None
    VmSegment([rows])()
    return [a.to_numpy() for a in outs]


@pytest.mark.parametrize("run", [by_kernel, without_vm, by_vm])
@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), n=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
def test_ids_and_filtered_logits_match_full_sorting(run, kind: str, n: int, seed: int) -> None:
    given_ = operands(kind, n, 8, np.random.default_rng(seed))
    ids, kept = run(given_)
    for b, (token, z) in enumerate(chosen(*row) for row in zip(*given_, strict=True)):
        assert (ids[b], b) == (token, b)
        np.testing.assert_array_equal(kept[b], z)


@pytest.mark.parametrize("run", [by_kernel, without_vm])
def test_a_vocabulary_of_32000_matches_full_sorting(run) -> None:
    """The sums of many shares, the noise that is not computed, buckets that are full."""
    rng = np.random.default_rng(4)
    given_ = operands("flat", 32_000, 5, rng)
    given_[0][:] *= [[1], [0.1], [4], [10], [0.01]]
    given_[1][:] = [[1, 0, 0, 1, p, m] for p, m in ((1, 0), (0.95, 0), (0.9, 0.02), (0.5, 0), (1, 0.9))]
    given_[2][:, 2:] = [[9, 0], [10, 0], [11, 40], [12, 3000], [13, 0]]
    ids, kept = run(given_)
    for b, (token, z) in enumerate(chosen(*row) for row in zip(*given_, strict=True)):
        assert ids[b] == token
        assert np.isfinite(kept[b]).sum() == pytest.approx(np.isfinite(z).sum(), abs=1)  # shares by another exp
