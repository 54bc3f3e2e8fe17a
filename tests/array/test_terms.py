"""Formulas on terms against the same formulas in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphwright.array.cpu.terms import PRIMITIVES, Term
from graphwright.array.formulas import gates, optimizers, specialise

ON_TENSORS: Any = specialise(optimizers, PRIMITIVES)
FORMULAS: dict[str, Callable[..., Any]] = {
    "a multiple": lambda f, x, y, z: x * 0.3,
    "a product": lambda f, x, y, z: 0.3 * x * (y * 0.7),
    "a quotient": lambda f, x, y, z: -(x / y),
    "a sum of multiples": lambda f, x, y, z: 0.3 * x + y * 0.7,
    "a product plus a multiple": lambda f, x, y, z: x * y + 0.7 * z,
    "a multiple less a quotient": lambda f, x, y, z: z * 0.2 - 0.3 * x / y,
    "a sum of three": lambda f, x, y, z: x + y + y * z,
    "a scaled sum": lambda f, x, y, z: z - 0.5 * (x + 0.3 * y),
    "a sum times a tensor": lambda f, x, y, z: (x + 0.3 * y) * z,
    "a sum over a tensor": lambda f, x, y, z: (x - y) / z,
    "a number added": lambda f, x, y, z: x / (y * z + 0.1),
    "with_decay": lambda f, x, y, z: f.with_decay(-x, 0.1, y),
    "momentum": lambda f, x, y, z: f.momentum(x, y / z, 0.9, 1.0),
    "rmsprop_square": lambda f, x, y, z: f.rmsprop_square(x, y, 0.9, 0.1),
    "rmsprop_centered": lambda f, x, y, z: f.rmsprop_centered(x, y),
    "rmsprop_update": lambda f, x, y, z: f.rmsprop_update(-x, y, 0.1),
    "rmsprop_update of a variance": lambda f, x, y, z: f.rmsprop_update(x, f.rmsprop_centered(y * 9.0, z), 0.1),
    "lerp": lambda f, x, y, z: f.lerp(x, -y, 0.3),
    "lion_update": lambda f, x, y, z: z - f.lion_update(x, -y, 0.01, 0.3),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_on_terms_is_that_in_numpy_and_changes_no_operand(name: str) -> None:
    x, y, z = np.random.default_rng(0).uniform(0.2, 1.0, (3, 4, 5))
    operands = [torch.tensor(a) for a in (x, y, z)]
    out = Term(torch.empty(4, 5, dtype=torch.float64), torch.empty(4, 5, dtype=torch.float64))
    out.assign(FORMULAS[name](ON_TENSORS, *(Term(out.scratch, t) for t in operands)))
    np.testing.assert_allclose(out.x.numpy(), FORMULAS[name](optimizers, x, y, z), rtol=1e-14)
    for tensor, before in zip(operands, (x, y, z), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), before)


def test_a_term_is_assigned_to_its_own_operand() -> None:
    b, g, scratch = (torch.tensor(a) for a in np.random.default_rng(0).uniform(0.2, 1.0, (3, 7)))
    expected = optimizers.momentum(b.numpy(), g.numpy() / np.sqrt(g.numpy()), 0.9, 1.0)
    buffer, grad = Term(scratch, b), Term(scratch, g)
    root = PRIMITIVES["sqrt"](grad)
    buffer.assign(ON_TENSORS.momentum(buffer, grad / root, 0.9, 1.0))
    np.testing.assert_allclose(b.numpy(), expected, rtol=1e-14)


def test_gumbel_noise_overwrites_its_uniform_numbers() -> None:
    u = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    expected = -np.log(-np.log(u.numpy()))
    specialise(gates, PRIMITIVES).gumbel(Term(u, u)).write(u)
    np.testing.assert_allclose(u.numpy(), expected, rtol=1e-14)


def test_a_sum_of_two_sums_is_refused() -> None:
    x = Term(torch.empty(3), torch.ones(3))
    with pytest.raises(AssertionError, match="a sum to a sum"):
        _ = (x + x * 2.0) + (x + x * 3.0)
