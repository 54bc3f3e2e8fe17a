"""Linear algebra against torch: values, gradients, second gradients, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import ComputeError, DTypeError, ShapeError, UsageError

RNG = np.random.default_rng(3)
SQUARE, TALL = RNG.normal(size=(2, 3, 3)), RNG.normal(size=(2, 4, 3))
SQUARE_4 = np.random.default_rng(5).normal(size=(4, 4))
SYMMETRIC = SQUARE @ SQUARE.swapaxes(-1, -2) + 3 * np.eye(3)

CASES: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "det": (lambda L, a: L.det(a), [SQUARE]),
    "slogdet": (lambda L, a: L.slogdet(a).logabsdet, [SQUARE]),
    "inv": (lambda L, a: L.inv(a), [SQUARE]),
    "solve": (lambda L, a, b: L.solve(a, b), [SQUARE, TALL.swapaxes(-1, -2)]),
    "solve of a vector": (lambda L, a, b: L.solve(a, b), [SQUARE[0], SQUARE[1, 0]]),
    "right solve": (lambda L, a, b: L.solve(a, b, left=False), [SQUARE, TALL]),
    "triangular": (lambda L, a, b: L.solve_triangular(a, b, upper=True), [SYMMETRIC, SQUARE]),
    "cholesky": (lambda L, a: L.cholesky((a + a.mT) * 0.5), [SYMMETRIC]),
    "eigenvalues": (lambda L, a: L.eigvalsh((a + a.mT) * 0.5), [SYMMETRIC]),
    "projector": (lambda L, a: (lambda v: v[..., :1] @ v[..., :1].mT)(L.eigh((a + a.mT) * 0.5)[1]), [SYMMETRIC]),
    "singular values": (lambda L, a: L.svdvals(a), [TALL]),
    "left projector": (lambda L, a: (lambda u: u[..., :2] @ u[..., :2].mT)(L.svd(a, full_matrices=False)[0]), [TALL]),
    "right projector": (
        lambda L, a: (lambda v: v[..., :2, :].mT @ v[..., :2, :])(L.svd(a, full_matrices=False)[2]),
        [TALL.swapaxes(-1, -2)],
    ),
    "qr": (lambda L, a: (lambda q, r: q @ r * 2.0 + q @ q.mT @ a)(*L.qr(a)), [TALL]),
    "wide qr": (lambda L, a: (lambda q, r: q @ r * 2.0 + q @ q.mT @ a + r)(*L.qr(a)), [TALL.swapaxes(-1, -2)]),
    "complete qr of wide": (lambda L, a: L.qr(a, "complete")[1].abs(), [TALL.swapaxes(-1, -2)]),
    "full svd of tall": (lambda L, a: L.svd(a)[1], [TALL]),
    "full svd of wide": (
        lambda L, a: (lambda v: v[..., :2, :].mT @ v[..., :2, :])(L.svd(a)[2]),
        [TALL.swapaxes(-1, -2)],
    ),
    "triangle of qr": (lambda L, a: L.qr(a)[1].abs(), [TALL]),
    "pinv": (lambda L, a: L.pinv(a), [TALL]),
    "lstsq": (lambda L, a, b: L.lstsq(a, b).solution, [TALL, TALL]),
    "cond": (lambda L, a: L.cond(a), [SQUARE]),
    "matrix_exp": (lambda L, a: L.matrix_exp(a), [SQUARE * 3]),
    "matrix_power": (lambda L, a: L.matrix_power(a, -3), [SQUARE]),
    "nuclear norm": (lambda L, a: L.matrix_norm(a, "nuc"), [TALL]),
    "norm 2": (lambda L, a: L.norm(a, 2, (-2, -1), True), [TALL]),
    "norm 1": (lambda L, a: L.matrix_norm(a, 1), [TALL]),
    "vector_norm": (lambda L, a: L.vector_norm(a, 3, 1), [TALL]),
    "unit triangle": (lambda L, a, b: L.solve_triangular(a, b, upper=False, unitriangular=True), [SQUARE, SQUARE]),
    "multi_dot": (lambda L, a, b: L.multi_dot([a, b, a]), [SQUARE[0], SQUARE[1]]),
    "cross": (lambda L, a, b: L.cross(a, b), [TALL, TALL[:1] * 2 + 1]),
    "vecdot": (lambda L, a, b: L.vecdot(a, b, dim=1), [TALL, TALL + 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    function, hosts = CASES[name]
    mine = [gw.tensor(h, requires_grad=True) for h in hosts]
    theirs = [torch.tensor(h, requires_grad=True) for h in hosts]
    found, truth = function(gw.linalg, *mine), function(torch.linalg, *theirs)
    np.testing.assert_allclose(found.detach().numpy(), truth.detach().numpy(), rtol=1e-8, atol=1e-9)
    factor = RNG.normal(size=tuple(truth.shape))
    (found * gw.tensor(factor)).sum().backward()
    (truth * torch.tensor(factor)).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["det", "inv", "solve", "cholesky", "eigenvalues", "singular values", "pinv"])
def test_second_gradients_are_those_of_torch(name: str) -> None:
    function, hosts = CASES[name]
    mine = [gw.tensor(h, requires_grad=True) for h in hosts]
    theirs = [torch.tensor(h, requires_grad=True) for h in hosts]
    factor = RNG.normal(size=hosts[0].shape)
    found, truth = function(gw.linalg, *mine), function(torch.linalg, *theirs)
    (first,) = gw.grad((found * found).sum(), mine[0], create_graph=True)
    (other,) = torch.autograd.grad((truth * truth).sum(), theirs[0], create_graph=True)
    (first * gw.tensor(factor)).sum().backward()
    (other * torch.tensor(factor)).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-6, atol=1e-7)


def test_older_names_and_methods() -> None:
    a, t = gw.tensor(SQUARE), torch.tensor(SQUARE)
    for name in ("det", "inverse", "logdet", "pinverse", "matrix_exp"):
        np.testing.assert_allclose(getattr(a, name)().numpy(), getattr(t, name)().numpy(), rtol=1e-9)
    for mine, theirs in (
        (gw.svd(a)[1], torch.svd(t)[1]),
        (gw.cholesky(gw.tensor(SYMMETRIC)), torch.linalg.cholesky(torch.tensor(SYMMETRIC))),
    ):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-9)


def test_an_inverse_is_traced() -> None:
    p = gw.trace(lambda x: x.inverse(), gw.tensor(SQUARE[0]))
    np.testing.assert_allclose(p.run(x=SQUARE[1])["out"].to_numpy(), np.linalg.inv(SQUARE[1]), rtol=1e-9)


def test_invalid_operands_are_refused() -> None:
    for error, call in (
        (ShapeError, lambda: gw.linalg.inv(gw.ones(2, 3))),
        (ShapeError, lambda: gw.linalg.det(gw.ones(3))),
        (ShapeError, lambda: gw.linalg.solve(gw.eye(3), gw.ones(2, 2))),
        (DTypeError, lambda: gw.linalg.det(gw.tensor([[1, 2], [3, 4]]))),
        (ShapeError, lambda: gw.linalg.solve(gw.eye(3), gw.tensor(1.0))),
        (ShapeError, lambda: gw.linalg.solve(gw.ones(2, 3, 3), gw.ones(4, 3, 2))),
        (DTypeError, lambda: gw.linalg.solve(gw.eye(3), gw.ones(3, dtype="float64"))),
        (UsageError, lambda: gw.linalg.matrix_power(gw.eye(2), 1.5)),  # pyright: ignore[reportArgumentType]
        (ComputeError, lambda: gw.linalg.inv(gw.zeros(2, 2))),
        (ComputeError, lambda: gw.linalg.cholesky(-gw.eye(2))),
        (UsageError, lambda: gw.linalg.qr(gw.eye(2), "r")),
        (UsageError, lambda: gw.linalg.matrix_norm(gw.eye(2), 3)),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_gradient_of_a_determinant_is_the_cofactors_also_of_singular_matrices(rank: int) -> None:
    host = np.diag([2.0, 3.0, 0.0]) if rank == 2 else np.outer(*SQUARE[0][:2]) * rank
    host = host[[1, 0, 2]]
    cofactors = np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        minor = np.delete(np.delete(host, i, 0), j, 1)
        cofactors[i, j] = (-1) ** (i + j) * (minor[0, 0] * minor[1, 1] - minor[0, 1] * minor[1, 0])
    a = gw.tensor(np.stack([host, SQUARE[0]]), requires_grad=True)
    gw.linalg.det(a).sum().backward()
    assert a.grad is not None
    np.testing.assert_allclose(a.grad.numpy()[0], cofactors, atol=1e-12)
    np.testing.assert_allclose(a.grad.numpy()[1], np.linalg.det(SQUARE[0]) * np.linalg.inv(SQUARE[0]).T, rtol=1e-9)


@pytest.mark.parametrize(
    "values", [[3, 2, 1, 0.5], [3, 2, 1, 1e-13], [3, 2, 1, 0], [3, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]
)
def test_second_gradients_of_a_determinant_also_of_singular_matrices(values: list[float]) -> None:
    u, v = (np.linalg.qr(RNG.normal(size=(4, 4)))[0] for _ in range(2))
    host, towards = u @ np.diag(np.array(values, float)) @ v, RNG.normal(size=(4, 4))

    def cofactors(t: float) -> np.ndarray:
        at, made = host + t * towards, np.zeros((4, 4))
        for i, j in np.ndindex(4, 4):
            made[i, j] = (-1) ** (i + j) * np.linalg.det(np.delete(np.delete(at, i, 0), j, 1))
        return made

    slope = (8 * (cofactors(1) - cofactors(-1)) - cofactors(2) + cofactors(-2)) / 12  # exact for cubic polynomials
    a = gw.tensor(np.stack([host, SQUARE_4]), requires_grad=True)
    (first,) = gw.grad(gw.linalg.det(a).sum(), a, create_graph=True)
    np.testing.assert_allclose(first[0].detach().numpy(), cofactors(0), atol=1e-12)
    (first[0] * gw.tensor(towards)).sum().backward()
    assert a.grad is not None
    np.testing.assert_allclose(a.grad.numpy()[0], slope, atol=1e-7)


def test_singular_and_infinite_matrices() -> None:
    singular = gw.tensor([[[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 2.0]]])
    assert gw.linalg.cond(singular, 1).tolist() == [float("inf"), 2.0]
    assert gw.linalg.cond(gw.ones(0, 0)).item() == 0.0
    assert gw.linalg.matrix_exp(gw.tensor([[float("inf"), 0.0], [0.0, 1.0]])).isnan().any().item()
    unread = gw.tensor([[float("nan"), 2.0], [float("nan"), 0.0]])
    found = gw.linalg.solve_triangular(unread, gw.eye(2), upper=True, unitriangular=True)
    assert found.tolist() == [[1.0, -2.0], [0.0, 1.0]]


def test_full_factors_without_a_gradient_say_so() -> None:
    q, _ = gw.linalg.qr(gw.tensor(TALL, requires_grad=True), "complete")
    with pytest.raises(UsageError, match="no gradient"):
        q.sum().backward()
