"""The gradient harness finds what it is for: every op's vjp is broken in several ways and each break is reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graphwright.autograd import tensor
from graphwright.autograd.apply import apply
from graphwright.errors import UsageError
from graphwright.ops import OPS, Op
from graphwright.testing.gradcheck import GradientMismatch, all_masks, check_masks, gradcheck, gradgradcheck, mutants
from seeds import deep
from values import vjp_of

NOT_A_DERIVATIVE = {"scale_gradient", "send", "recv"}  # one rank alone sends nothing
DIFFERENTIABLE = [name for name, row in OPS.items() if row.vjp is not None and name not in NOT_A_DERIVATIVE]


def _sample(name: str, seed: int = 3):
    inputs, attrs = OPS[name].sample(np.random.default_rng(seed))
    return [np.asarray(x) for x in inputs], OPS[name].complete(attrs)


def _passes(row: Op, seed: int) -> bool:
    inputs, attrs = _sample(row.name, seed)
    wrt = [next(i for i, x in enumerate(inputs) if x.dtype == np.float64)]
    try:
        gradcheck(lambda *xs: apply(row, xs, attrs), inputs, wrt=wrt)
    except GradientMismatch:
        return False
    return True


SLOPED = [name for name in DIFFERENTIABLE if not OPS[name].traits.flat]  # of a gradient 0 every multiple is right


@pytest.mark.parametrize("name", SLOPED[:: deep(1, 3)])
def test_each_planted_bug_in_each_vjp_is_found(name: str) -> None:
    seeds = range(3, 9)  # of one draw the gradient may be 0
    assert all(_passes(OPS[name], seed) for seed in seeds)
    for bug, broken in mutants(OPS[name]):
        assert not all(_passes(broken, seed) for seed in seeds), bug


@pytest.mark.parametrize(
    "name", [n for n in DIFFERENTIABLE if n in ("sub", "mul", "div", "where", "maximum", "matmul")]
)
def test_swapped_outputs_are_found_by_masked_checks(name: str) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(3, 3)) + 2 for _ in range(2)]
    inputs = [rng.random((3, 3)) < 0.5, *inputs] if name == "where" else inputs
    row, vjp = OPS[name], vjp_of(name)

    def swapped(g, ins, outs, attrs, needs):
        *head, a, b = vjp(g, ins, outs, attrs, (True,) * len(needs))
        return tuple(x if need else None for x, need in zip((*head, b, a), needs, strict=True))

    def reference(arrays, seeds, mask):
        from torch_ops_for_harness import torch_grads

        return torch_grads(name, arrays, seeds, mask)

    count = check_masks(row, inputs, {}, reference)
    assert count == 3
    with pytest.raises(GradientMismatch, match=name):
        check_masks(replace(row, vjp=swapped), inputs, {}, reference)


def test_a_wrong_second_derivative_is_found() -> None:
    row = OPS["sin"]
    bent = replace(row, vjp=lambda g, ins, outs, attrs, needs: (g * tensor(np.cos(ins[0].numpy())),))
    gradcheck(lambda x: apply(bent, [x], {}), [np.array([0.3, 1.2])])
    with pytest.raises(GradientMismatch):
        gradgradcheck(lambda x: apply(bent, [x], {}), [np.array([0.3, 1.2])])
    gradgradcheck(lambda x: apply(row, [x], {}), [np.array([0.3, 1.2])])


def test_checking_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        gradcheck(lambda x: x + 1, [np.ones(2, np.float32)])
    with pytest.raises(UsageError):
        gradcheck(lambda x: x + 1, [np.ones((0, 2))])
    with pytest.raises(UsageError):
        gradcheck(lambda x: x.detach(), [np.ones(2)])


def test_a_missing_gradient_of_one_operand_is_found() -> None:
    with pytest.raises(GradientMismatch, match="operand 1"):
        gradcheck(lambda a, b: a * b.detach(), [np.array([2.0]), np.array([3.0])])


def test_all_masks_excludes_only_the_empty_mask() -> None:
    assert len(list(all_masks(3))) == 7
    assert (False, False, False) not in all_masks(3)
