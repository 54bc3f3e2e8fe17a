"""The checks of each op's gradient find each bug that is planted in its vjp: a sign, an exchange, a term left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, zip_longest
from typing import Any

import numpy as np
import pytest
from op_cases import differentiable, draws
from torch_ops import torch_grads

from graphwright.autograd.apply import apply
from graphwright.errors import GraphwrightError
from graphwright.ops import OPS, Op
from graphwright.testing.gradcheck import check_masks, gradcheck
from mutations import function_mutants
from seeds import deep
from values import vjp_of

COUNT = 40
"""Draws of operands, as many as it takes to reach each branch of each vjp."""

TIES = "test_gradients_at_ties_are_split: a tie has no difference quotient, and a draw has none"
SUMMED = "the engine sums what the vjp did not"
SAME = {
    ("add", "gradients 0 and 1 swapped"): "both are g",
    **{("junction", f"gradients {a} and {b} swapped"): "all are g" for a, b in combinations(range(3), 2)},
    **{
        (name, f"_extremum: `g * 0.5` without its {side} side"): TIES
        for name in ("minimum", "maximum")
        for side in ("right", "left")
    },
    ("send", "gradient 0 negated"): "one rank alone sends nothing; tests/distributed has several",
    ("amax", "vjp: `g / ties` without its right side"): TIES,
    ("amin", "vjp: `g / ties` without its right side"): TIES,
    ("bce", "_log: `-100.0` without its sign"): "test_binary_cross_entropy_at_0_and_1 has probabilities of 0 and 1",
    ("logsumexp", "vjp: `-inf` without its sign"): "test_logsumexp_of_extreme_values has rows of -inf",
    ("rms_norm", "vjp: `len(x.shape) - 1` without its left side"): SUMMED,
    ("linear", "transposed: `rank - 1` without its left side"): "linear has flattened all but two axes",
    ("solve", "transposed: `rank - 1` without its left side"): "solve takes matrices only",
}
"""Mutants that compute the same, or the same where there is a derivative, with the reason."""


def wrapped(row: Op, change: Callable[[list[Any]], list[Any]]) -> Op:
    right = vjp_of(row.name)

    def vjp(g, ins, outs, attrs, needs):
        grads = change(list(right(g, ins, outs, attrs, (True,) * len(needs))))
        return tuple(x if need else None for x, need in zip_longest(grads, needs))

    return replace(row, vjp=vjp)


def mutants(row: Op, ports: list[int]) -> Iterator[tuple[str, Op]]:
    """Each returned gradient with its sign flipped, each two exchanged, each term of the source changed."""
    for port in ports:
        yield f"gradient {port} negated", wrapped(row, lambda grads, i=port: [*grads[:i], -grads[i], *grads[i + 1 :]])
    for a, b in combinations(ports, 2):

        def swap(grads: list[Any], a: int = a, b: int = b) -> list[Any]:
            grads[a], grads[b] = grads[b], grads[a]
            return grads

        yield f"gradients {a} and {b} swapped", wrapped(row, swap)
    for what, vjp in function_mutants(vjp_of(row.name)):
        yield what, replace(row, vjp=vjp)


def ports(name: str, inputs: list[np.ndarray]) -> list[int]:
    """Operands that a gradient belongs to; cos and sin of rope are made of positions."""
    blind = {"rope": (1, 2)}.get(name, ())
    return [i for i, x in enumerate(inputs) if x.dtype == np.float64 and i not in blind]


def check(row: Op, inputs: list[np.ndarray], attrs: dict[str, Any]) -> None:
    """Against torch under every mask; rope, whose table torch would differentiate, by difference quotients."""
    if row.name == "rope":
        gradcheck(lambda *xs: apply(row, xs, attrs), inputs, wrt=ports(row.name, inputs))
    else:
        check_masks(row, inputs, attrs, lambda xs, seeds, mask: torch_grads(row.name, xs, attrs, seeds, mask))


def found(row: Op, cases: list[tuple[list[np.ndarray], dict[str, Any]]]) -> bool:
    for inputs, attrs in cases:
        try:
            check(row, inputs, attrs)
        except (GraphwrightError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return True  # a wrong gradient, or a mutant that does not even run
    return False


@pytest.mark.parametrize("name", differentiable()[:: deep(1, 4)])
def test_each_bug_in_a_vjp_is_found(name: str) -> None:
    row, cases = OPS[name], draws(name, COUNT)
    check(row, *cases[0])
    missed = [what for what, broken in mutants(row, ports(name, cases[0][0])) if not found(broken, cases)]
    assert sorted(missed) == sorted(what for op, what in SAME if op == name)
