"""Low rank, trains, rings and their refinement beside numpy's SVD, tensorly and brute force."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
import tensorly.decomposition
from hypothesis import given
from hypothesis import strategies as st

from graphwright import surgery as sg
from graphwright.surgery.factorise.compress import allocate
from graphwright.surgery.factorise.factors import contraction_order, parameters, reconstruct, split, to_tensor
from graphwright.surgery.factorise.methods import (
    LowRankFit,
    RingMethod,
    Unfolding,
    contract,
    recover,
    refine,
    relative_error,
    ring,
    train,
)


def matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((48, 48)))[0] for _ in range(2))
    return {
        "gaussian": rng.standard_normal((48, 60)),
        "decaying": (u * 0.7 ** np.arange(48)) @ v,
        "kronecker": np.kron(rng.standard_normal((8, 8)), rng.standard_normal((8, 8))),
        "zero": np.zeros((48, 36)),
        "one row": rng.standard_normal((48, 1)) @ np.ones((1, 48)),
        "prime": rng.standard_normal((97, 64)),
    }


def relative(w: np.ndarray, new: np.ndarray) -> float:
    norm = np.linalg.norm(w)
    return float(np.linalg.norm(w - new) / norm) if norm else float(np.linalg.norm(new))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_the_error_of_an_svd_is_the_norm_of_dropped_values(m: int, n: int, rank: int, seed: int) -> None:
    w = np.random.default_rng(seed).standard_normal((m, n))
    rank = min(rank, m, n)
    found = sg.svd(w, rank)
    sigma = np.linalg.svd(w, compute_uv=False)
    assert np.linalg.norm(w - reconstruct(found)) ** 2 == pytest.approx((sigma[rank:] ** 2).sum(), rel=1e-10, abs=1e-24)
    assert np.linalg.norm(found.outer, axis=0) == pytest.approx(np.linalg.norm(found.inner, axis=1))  # √σ on both sides
    assert parameters(found) == rank * (m + n)


def test_a_matrix_of_rank_5_is_found_exactly() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((20, 5)) @ rng.standard_normal((5, 20))
    assert relative(w, reconstruct(sg.svd(w, 5))) <= 1e-12
    assert LowRankFit.of(w).rank_for(1e-12) == 5


@pytest.mark.parametrize("rows", [4, 400])  # fewer inputs than channels as well
def test_asvd_minimises_the_output_error(rows: int) -> None:
    rng = np.random.default_rng(rows)
    w = rng.standard_normal((20, 16))
    x = rng.standard_normal((rows, 16)) * np.geomspace(1, 0.01, 16)
    gram = x.T @ x / rows
    for rank in (1, 3, 7, 15):
        aware, plain = (reconstruct(f) for f in (sg.asvd(w, rank, gram), sg.svd(w, rank)))
        lost = [np.linalg.norm(x @ (w - new).T) for new in (aware, plain)]
        assert lost[0] <= lost[1] * (1 + 1e-9)
        fit = LowRankFit.of(w, gram)
        ridge = 1e-6 * np.trace(gram) / 16 * np.linalg.norm(w - aware) ** 2
        assert lost[0] ** 2 / rows + ridge == pytest.approx((fit.s[rank:] ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("name", matrices())
def test_trains_and_rings_meet_the_prescribed_error(name: str, order: int, closed: bool) -> None:
    w = matrices()[name]
    fit = RingMethod(w, order, closed, True, 0)
    for error in (0.01, 0.1, 0.3, 0.5):
        found = fit.within_error(error)
        assert found.shape == w.shape
        assert relative(w, found.reconstruct()) <= error * (1 + 1e-12)
        sizes = [r * o * i * s for r, o, i, s in zip(found.ranks, *found.modes, found.ranks[1:], strict=False)]
        assert parameters(found) == sum(sizes) == sum(core.array.size for core in found.cores)
    assert relative(w, fit.within_error(0.0).reconstruct()) <= 1e-13
    assert parameters(fit.within_error(0.3)) <= parameters(fit.within_error(0.01))


def test_a_kronecker_product_is_a_train_of_rank_1() -> None:
    found = RingMethod(matrices()["kronecker"], 2, False, True, 0).within_error(1e-12)
    assert found.modes == ((8, 8), (8, 8))
    assert found.ranks == (1, 1, 1)
    assert sg.compression_ratio(found) == 64 * 64 / (2 * 64)  # above 10; once defined, and above 1 is smaller
    assert relative(matrices()["kronecker"], found.reconstruct()) < 1e-12


def test_trains_and_rings_match_tensorly() -> None:
    tensor = np.random.default_rng(1).standard_normal((6, 7, 8))
    ours = train(Unfolding.of(tensor), ranks=(4, 5))
    theirs = tensorly.decomposition.tensor_train(tensor, [1, 4, 5, 1])
    assert [c.shape for c in ours] == [tuple(c.shape) for c in theirs]
    assert np.abs(contract(ours) - theirs.to_tensor()).max() <= 1e-12
    ours = ring(Unfolding.of(tensor), ranks=(2, 3, 5))
    theirs = tensorly.decomposition.tensor_ring(tensor, [2, 3, 5, 2])
    assert [c.shape for c in ours] == [tuple(c.shape) for c in theirs]
    assert relative_error(tensor, ours) == pytest.approx(relative(tensor, theirs.to_tensor()), rel=0.2)


def test_the_ring_is_never_larger_than_the_train() -> None:
    for name, w in matrices().items():
        open_, closed = (RingMethod(w, 3, c, True, 0).within_error(0.2) for c in (False, True))
        assert parameters(closed) <= parameters(open_), name


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 100))
def test_sweeps_never_raise_the_error_and_each_core_is_optimal(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensor = rng.standard_normal([s + 1 for s in sizes])
    ranks = [*rng.integers(1, 4, len(sizes))]
    shapes = zip(ranks, tensor.shape, [*ranks[1:], ranks[0]], strict=True)
    start = [rng.standard_normal(shape) for shape in shapes]
    cores, errors = refine(tensor, start, 4)
    assert all(b <= a for a, b in itertools.pairwise(errors))
    assert relative_error(tensor, cores) == pytest.approx(errors[-1], rel=1e-6, abs=1e-9)


def test_contraction_of_a_ring_is_the_trace_of_its_slices() -> None:
    rng = np.random.default_rng(0)
    cores = [rng.standard_normal(s) for s in ((2, 3, 4), (4, 5, 3), (3, 2, 2))]
    full = contract(cores)
    for i, j, k in itertools.product(range(3), range(5), range(2)):
        assert full[i, j, k] == pytest.approx(np.trace(cores[0][:, i] @ cores[1][:, j] @ cores[2][:, k]))


@pytest.mark.parametrize(
    ("shape", "ranks"), [((8, 8, 8), (2, 2, 2)), ((8, 9, 10), (3, 3, 3)), ((6, 6, 6, 6), (2, 3, 2, 3))]
)
def test_planted_rings_are_recovered(shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    found = 0
    for seed in range(10):
        rng = np.random.default_rng(100 + seed)
        planted = [rng.standard_normal((ranks[k], p, ranks[(k + 1) % len(ranks)])) for k, p in enumerate(shape)]
        tensor = contract(planted)
        cores, errors = recover(tensor, ranks, 300, seed=seed)
        assert [c.shape for c in cores] == [c.shape for c in planted]
        assert len(errors) <= 301
        assert relative_error(tensor, cores) == pytest.approx(errors[-1], abs=1e-10)
        found += errors[-1] <= 1e-8
    assert found >= 9


def test_degenerate_tensors_can_be_refined() -> None:
    zero = np.zeros((3, 4, 2))
    cores, errors = refine(zero, ring(Unfolding.of(zero)), 5)
    assert errors == [0.0]
    assert not contract(cores).any()
    ones = np.ones((4, 4, 4))
    rng = np.random.default_rng(0)
    start = [rng.standard_normal((3, 4, 3)) for _ in range(3)]
    assert refine(ones, start, 20)[1][-1] <= 1e-8  # normal equations of rank 1


@given(st.integers(1, 700), st.integers(2, 4))
def test_sizes_are_split_into_modes_or_padded(n: int, order: int) -> None:
    def factorable(size: int) -> bool:
        count, rest, p = 0, size, 2
        while rest > 1:
            while rest % p == 0:
                rest, count = rest // p, count + 1
            p += 1
        return count >= order

    modes = split(n, order)
    assert len(modes) == order
    assert prod(modes) >= n
    assert prod(modes) == next(size for size in itertools.count(n) if factorable(size))
    with pytest.raises(ValueError, match="too small"):
        split(n, 1)
    if prod(modes) != n:
        with pytest.raises(sg.NotFactorable) as refused:
            split(n, order, pad=False)
        assert refused.value.order == order


def test_padding_zeros_are_removed_from_the_reconstruction() -> None:
    w = matrices()["prime"]
    fit = RingMethod(w, 3, False, True, 0)
    assert prod(fit.out) == 98
    tensor = to_tensor(w, fit.out, fit.inner)
    assert np.linalg.norm(tensor) == pytest.approx(np.linalg.norm(w))
    assert np.abs(fit.within_error(0.0).reconstruct() - w).max() <= 1e-12
    with pytest.raises(sg.NotFactorable):
        RingMethod(w, 3, False, False, 0)


@given(st.data())
def test_the_contraction_order_has_the_lowest_cost(data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 4))
    sizes = {f"{side}{k}": data.draw(st.integers(1, 6)) for side in "oi" for k in range(1, d + 1)}
    sizes |= {f"b{k}": data.draw(st.integers(1, 6)) for k in range(d)}
    cores = [(f"b{k - 1}", f"o{k}", f"i{k}", f"b{k % d}") if d > 1 else ("o1", "i1") for k in range(1, d + 1)]
    start = [f"i{k}" for k in range(1, d + 1)]

    def cost(order: tuple[int, ...]) -> int:
        value, total = set(start), 0
        for k in order:
            total += 2 * prod(sizes[name] for name in value | set(cores[k]))
            value ^= set(cores[k])
        return total

    steps, flops = contraction_order(start, cores, sizes)
    assert flops == cost(tuple(s.core for s in steps)) == min(cost(o) for o in itertools.permutations(range(d)))


def lost(spectra: list[np.ndarray], ranks: list[int | None]) -> float:
    return sum(float((s[r:] ** 2).sum()) for s, r in zip(spectra, ranks, strict=True) if r is not None)


def test_allocated_ranks_lose_no_more_than_equal_shares() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        shapes = [(int(m), int(n)) for m, n in rng.integers(8, 40, (6, 2))]
        spectra = [np.sort(rng.random(min(s)) ** rng.uniform(0.3, 4))[::-1] for s in shapes]
        budget = int(0.5 * sum(m * n for m, n in shapes))
        ranks = allocate(spectra, shapes, budget)
        used = sum(m * n if r is None else r * (m + n) for r, (m, n) in zip(ranks, shapes, strict=True))
        assert used <= budget
        uniform: list[int | None] = [max(int(0.5 * m * n / (m + n)), 1) for m, n in shapes]
        assert lost(spectra, ranks) <= lost(spectra, uniform) + 1e-12


def test_allocation_matches_brute_force_for_equal_costs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        spectra = [np.sort(rng.random(6))[::-1] for _ in range(3)]
        weights = list(rng.uniform(0.1, 3, 3))
        shapes = [(30, 30)] * 3
        for count in (3, 5, 9):
            ranks = allocate(spectra, shapes, 60 * count, weights)
            scaled = [s * w**0.5 for s, w in zip(spectra, weights, strict=True)]
            best = min(lost(scaled, list(r)) for r in itertools.product(range(1, 7), repeat=3) if sum(r) <= count)
            assert lost(scaled, ranks) == pytest.approx(best)
    assert allocate([np.ones(4), np.ones(4)], [(8, 8)] * 2, 1000, max_rank=2) == [2, 2]
    assert allocate([np.ones(8), np.full(8, 9.0)], [(8, 8)] * 2, 64 + 32) == [2, None]  # dense is no larger


def test_trains_with_outer_ranks_other_than_1_are_refused() -> None:
    cores = [np.ones((1, 2, 2, 3)), np.ones((3, 2, 2, 1))]
    assert sg.TensorTrain(cores, (4, 4)).ranks == (1, 3, 1)
    with pytest.raises(ValueError, match="must be 1"):
        sg.TensorTrain(cores[::-1], (4, 4))
