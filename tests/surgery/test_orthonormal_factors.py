"""Orthonormal factors beside scipy's polar and numpy's QR: nearness, completion, convergence, rotations."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from graphwright import surgery
from graphwright.errors import ShapeError
from graphwright.surgery.orthogonal import methods as products
from graphwright.surgery.orthogonal.methods import (
    condition,
    gain,
    gram_error,
    is_orthogonal,
    newton_schulz,
    orthonormal,
    polar,
    qr,
    second_factor,
)

SHAPES = [(1, 1), (5, 1), (1, 5), (7, 7), (40, 40), (90, 50), (50, 90), (64, 3), (3, 64), (128, 128)]
DEGENERATE = {
    "zero": np.zeros((6, 4)),
    "ones": np.ones((8, 8)),
    "wide ones": np.ones((3, 8)),
    "one entry": np.array([[-3.0]]),
    "zero entry": np.zeros((1, 1)),
    "rank 2": np.outer(np.arange(50.0), np.ones(40)) + np.outer(np.ones(50), np.arange(40.0)),
    "a zero column": np.eye(9)[:, :8] * np.array([1, 2, 0, 4, 5, 6, 7, 8.0]),
    "tiny": 1e-200 * np.ones((4, 4)),
    "huge": 1e150 * (np.eye(40) + 0.1),
    "as large as can be": np.full((40, 40), np.finfo(np.float64).max),
    "subnormal": np.full((3, 40), 5e-324),
    "float32, large": (1e37 * (np.eye(40) + 0.1)).astype(np.float32),
    "float32, small": (1e-37 * (np.eye(40) + 0.1)).astype(np.float32),
    "ill conditioned": np.diag(np.geomspace(1, 1e-14, 48)),
}


def random(shape: tuple[int, int], seed: int, spread: float = 1.0) -> np.ndarray:
    """Gaussian, or with singular values from 1 down to 1 / spread."""
    w = np.random.default_rng(seed).standard_normal(shape)
    if spread == 1.0:
        return w
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return (u * np.geomspace(1, 1 / spread, len(s))) @ vt


@pytest.mark.parametrize("spread", [1.0, 30.0, 3e3, 2e4, 1e8])
@pytest.mark.parametrize("shape", SHAPES)
def test_polar_matches_scipy_and_is_the_nearest_orthonormal_matrix(shape: tuple[int, int], spread: float) -> None:
    for seed in range(4):
        w = random(shape, seed, spread)
        q = polar(w)
        assert q.shape == shape
        assert gram_error(q) <= 1e-10
        wanted = scipy.linalg.polar(w, side="right" if shape[0] >= shape[1] else "left")
        assert np.abs(q - wanted[0]).max() <= 1e-14 * max(spread, 30) * 10
        assert np.linalg.norm(w - q) <= np.linalg.norm(w - qr(w)) * (1 + 1e-12)
        p = second_factor(w, q)
        assert np.abs((q @ p if shape[0] >= shape[1] else p @ q) - w).max() <= 1e-12
        assert np.abs(p - p.T).max() <= 1e-11


@pytest.mark.parametrize("n", [50, 100])
def test_the_gram_method_is_as_accurate_as_an_svd(n: int) -> None:
    for spread in (1e2, 1e4, 9e5):
        u, _, vt = np.linalg.svd(random((n, n), n))
        w = (u * np.geomspace(1, 1 / spread, n)) @ vt
        assert np.abs(polar(w) - u @ vt).max() <= 1e-16 * spread  # eigenvectors of the Gram matrix alone: 1e-16 · κ²


@pytest.mark.parametrize("shape", [(320, 320), (640, 240)])
def test_peak_memory_is_a_few_matrices(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROWS", 8)
    w, one = random(shape, 0), 8 * min(shape) ** 2
    for call, most in ((polar, 3), (newton_schulz, 2), (qr, 2 * shape[0] / shape[1])):
        call(w)  # what is made once is no memory of a call
        tracemalloc.start()
        q = call(w)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - q.nbytes <= (most + 0.5) * one, call.__name__


@pytest.mark.parametrize("shape", SHAPES)
def test_qr_has_a_positive_diagonal_and_keeps_orthonormal_matrices(shape: tuple[int, int]) -> None:
    w = random(shape, 1)
    q = qr(w)
    r = q.T @ w if shape[0] >= shape[1] else (w @ q.T).T
    assert gram_error(q) <= 1e-13
    assert np.abs(np.tril(r, -1)).max() <= 1e-12
    assert np.diagonal(r).min() >= 0
    assert np.abs(qr(q) - q).max() <= 1e-14


@pytest.mark.parametrize("method", ["polar", "qr", "newton_schulz"])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_matrices_get_a_full_orthonormal_factor(name: str, method: str) -> None:
    q = orthonormal(DEGENERATE[name], method)
    assert q.shape == DEGENERATE[name].shape
    assert np.isfinite(q).all()
    assert gram_error(q.astype(np.float64)) <= (1e-10 if q.dtype == np.float64 else 5e-6)


@pytest.mark.parametrize("call", [polar, qr, newton_schulz, lambda w: surgery.svd(w, 1)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_entries_are_refused_with_their_index(call: Any, value: float) -> None:
    w = random((40, 36), 0)
    w[3, 5] = w[4, 0] = value
    with pytest.raises(surgery.NonFiniteWeight, match=r"w\[3, 5\]: the weight is not finite"):
        call(w)


@pytest.mark.parametrize("n", [64, 256, 512])
def test_newton_schulz_polishes_to_the_polar_factor(n: int) -> None:
    w = random((n, n), n).astype(np.float32)
    q, u = newton_schulz(w), polar(w)
    assert q.dtype == np.float32
    assert gram_error(q.astype(np.float64)) <= 5e-6
    assert np.linalg.norm(q - u) <= 2e-6 * n**0.5
    rough = newton_schulz(w, polish=False)
    assert 0.05 < gram_error(rough.astype(np.float64)) < 0.7  # quintic steps alone are not orthogonal
    assert gram_error(newton_schulz(w, tol=0.1).astype(np.float64)) > 1e-4  # the tolerance counts


def test_newton_schulz_falls_back_if_a_singular_value_stalls() -> None:
    w = random((40, 40), 0)
    w[:, 7] = 0.0
    assert gram_error(newton_schulz(w)) <= 1e-10


@given(st.integers(2, 5), st.integers(0, 10_000))
def test_the_nearest_rotation_is_better_than_every_other_choice_of_signs(n: int, seed: int) -> None:
    w = random((n, n), seed)
    q = polar(w, special=True)
    u, _, vt = np.linalg.svd(w)
    assert np.linalg.det(q) == pytest.approx(1.0)
    for signs in itertools.product((1.0, -1.0), repeat=n):
        other = (u * signs) @ vt
        if np.linalg.det(other) > 0:
            assert np.linalg.norm(w - q) <= np.linalg.norm(w - other) + 1e-9


def test_special_needs_a_square_matrix_and_the_polar_method() -> None:
    with pytest.raises(ShapeError, match="square"):
        orthonormal(np.ones((3, 2)), "polar", special=True)
    with pytest.raises(ShapeError, match="polar"):
        orthonormal(np.ones((3, 3)), "qr", special=True)


def test_condition_and_gain_match_singular_values() -> None:
    assert condition(np.diag([1.0, 1e-8])) == pytest.approx(1e8, rel=1e-6)  # not seen from the largest value alone
    assert condition(np.ones((4, 4))) == np.inf
    for shape in SHAPES:
        q = polar(random(shape, 3))
        assert condition(q) - 1 <= 1e-8
        assert gain(q) == (pytest.approx(1.0, abs=1e-9), pytest.approx(1.0, abs=1e-9))
    low, high = gain(np.diag([3.0, 0.5]))
    assert 0.5 <= low < high <= 3.0
    assert not is_orthogonal(np.eye(3) * 1.001)
    assert not is_orthogonal(np.full((2, 2), np.nan))
    assert is_orthogonal(np.eye(3)[:2])


@pytest.mark.parametrize("n", [2, 3, 5, 8, 17, 64])
def test_the_logarithm_inverts_exp_on_rotations(n: int) -> None:
    rng = np.random.default_rng(n)
    pairs = n // 2
    cases = {
        "random": rng.uniform(-np.pi, np.pi, pairs),
        "wide": np.full(pairs, 3.0),
        "half turns": np.full(pairs, np.pi),
        "repeated": np.full(pairs, 0.7),
        "almost half": np.where(np.arange(pairs) % 2, np.pi - 1e-7, np.pi),
        "none": np.zeros(pairs),
    }
    for name, angles in cases.items():
        basis = scipy.stats.ortho_group.rvs(n, random_state=rng)
        planes = scipy.linalg.block_diag(*([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]] for t in angles),
                                         *([[1.0]] if n % 2 else []))  # fmt: skip
        q = basis @ planes @ basis.T
        a = surgery.lie_log(q)
        assert np.abs(a + a.T).max() == 0, name
        assert np.abs(surgery.lie_exp(a) - q).max() <= 1e-10, name
        found = np.sort(np.abs(np.linalg.eigvals(a).imag))[n % 2 :: 2]
        assert np.abs(found - np.sort(np.abs(angles))).max() <= 1e-6, name  # the shortest one
    if n % 2 == 0:
        assert np.abs(surgery.lie_exp(surgery.lie_log(-np.eye(n))) + np.eye(n)).max() <= 1e-12


@given(st.integers(1, 12), st.integers(0, 1000), st.floats(0.01, 60))
def test_exp_matches_scipy_and_exp_of_the_negative_is_its_inverse(n: int, seed: int, size: float) -> None:
    a = surgery.skew(random((n, n), seed)) * size
    q = surgery.lie_exp(a)
    assert np.abs(q - scipy.linalg.expm(a)).max() <= 1e-11 * max(size, 1)
    assert np.abs(q @ surgery.lie_exp(-a) - np.eye(n)).max() <= 1e-11 * max(size, 1)
    assert np.linalg.det(q) == pytest.approx(1.0)


def test_cayley_agrees_with_exp_to_third_order() -> None:
    a = surgery.skew(random((6, 6), 0))
    errors = [np.abs(surgery.cayley(h * a) - surgery.lie_exp(h * a)).max() for h in (0.1, 0.05, 0.025)]
    assert [errors[0] / errors[1], errors[1] / errors[2]] == pytest.approx([8, 8], rel=0.1)
    assert gram_error(surgery.cayley(50 * a)) <= 1e-12
    turn = surgery.lie_exp(0.3 * surgery.so_generator(4, 1, 3))
    assert turn[:, 1] @ np.eye(4)[3] == pytest.approx(np.sin(0.3))  # axis 1 goes towards axis 3


def test_reflections_and_matrices_that_are_not_skew_are_refused() -> None:
    with pytest.raises(surgery.NotRotation, match="reflection"):
        surgery.lie_log(np.diag([1.0, 1.0, -1.0]))
    with pytest.raises(surgery.NotRotation, match="not orthogonal"):
        surgery.lie_log(np.eye(3) * 1.1)
    with pytest.raises(surgery.NotRotation, match="not orthogonal"):
        surgery.lie_log(np.full((2, 2), np.nan))
    for refused in (surgery.cayley, surgery.lie_exp):
        with pytest.raises(ValueError, match="not skew"):
            refused(np.eye(2))
        with pytest.raises(ValueError, match="not skew"):
            refused(np.full((2, 2), np.nan))
        with pytest.raises(ShapeError):
            refused(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="not two different axes"):
        surgery.so_generator(3, 1, 1)
