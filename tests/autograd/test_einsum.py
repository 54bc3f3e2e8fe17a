"""einsum against numpy on written and random equations, and its gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.autograd import einsum, tensor
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.testing.gradcheck import gradcheck
from graphwright.testing.oracle import assert_close

SIZES = {"a": 2, "b": 3, "c": 4, "d": 1, "i": 3, "j": 2, "k": 5}
RNG = np.random.default_rng(11)


def arrays(equation: str) -> list[np.ndarray]:
    """Operands of the sizes of their labels; `...` is two axes of 2 and 3."""
    shapes = [t.replace("...", "ab") if "..." in t else t for t in equation.replace(" ", "").split("->")[0].split(",")]
    return [RNG.normal(size=[SIZES[c] for c in t]) for t in shapes]


EQUATIONS = [
    *("ij,jk->ik", "ij,jk", "bij,bjk->bik", "i,i->", "i,j->ij", "ij->ji", "ij->", "ij->j", "ii->i", "ii", "aii->a"),
    *("iji->ij", "iii->i", "ij,ij->ij", "ij,ij->", "ij,kj->ik", "abi,cbi->ac", "ai,bi,ci->abc", "ij,jk,ka->ia"),
    *(
        "ij,kd->ik",
        "i,ij,j->",
        "...ij,...jk->...ik",
        "...i,...i->...",
        "...ij->...ji",
        "ij,k->ijk",
        "ba",
        "ij , jk -> ki",
    ),
    *("...ci,jk->...jc", "i...,i...->...", "->", ",->", ",ij->ij"),
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_matches_numpy(equation: str) -> None:
    operands = arrays(equation)
    assert_close(einsum(equation, *map(tensor, operands)), np.einsum(equation, *operands), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "equation", ["ij,jk->ik", "aii->a", "ai,bi,ci->abc", "...i,...i->...", "iji,jk->k", "i,ij,j->"]
)
def test_gradients_flow_to_each_operand(equation: str) -> None:
    gradcheck(lambda *xs: einsum(equation, *xs), arrays(equation))


@given(data=st.data())
def test_random_equations_match_numpy(data: st.DataObject) -> None:
    labels = st.lists(st.sampled_from("abcdijk"), max_size=4)
    terms = ["".join(data.draw(labels)) for _ in range(data.draw(st.integers(1, 3)))]
    used = sorted(set("".join(terms)))
    result = "".join(data.draw(st.permutations(used))[: data.draw(st.integers(0, len(used)))])
    equation = ",".join(terms) + "->" + result
    operands = arrays(equation)
    assert_close(einsum(equation, *map(tensor, operands)), np.einsum(equation, *operands), rtol=1e-11, atol=1e-12)


def test_axes_of_size_1_broadcast_and_empty_axes_sum_to_zero() -> None:
    a, b = RNG.normal(size=(1, 3)), RNG.normal(size=(3, 4))
    full = np.broadcast_to(a, (2, 3))
    assert_close(einsum("ij,jk->ik", tensor(a), tensor(b)), a @ b, rtol=1e-13)
    assert_close(
        einsum("ij,ik->jk", tensor(a), tensor(RNG.normal(size=(2, 4)) * 0 + 1)),
        np.einsum("ij,ik->jk", full, np.ones((2, 4))),
        rtol=1e-13,
    )
    assert einsum("ij,jk->ik", tensor(np.ones((2, 0))), tensor(np.ones((0, 3)))).tolist() == [[0] * 3] * 2
    assert einsum("...i,...i->...", tensor(np.ones((2, 1, 3))), tensor(np.ones((4, 3)))).shape == (2, 4)


@pytest.mark.parametrize(
    ("equation", "error"),
    [
        ("ij,jk->ik", ShapeError),  # sizes differ
        ("ij->ik", UsageError),  # one operand too many
        ("ij,kk->i1", UsageError),
        ("ij,kl->im", UsageError),  # a label from nowhere
        ("ij,kl->ii", UsageError),
        ("ijk,kl->i", ShapeError),  # ranks
        ("i..j,kl->i", UsageError),
        ("ij,kk->i", ShapeError),  # a diagonal of a matrix that is not square
    ],
)
def test_invalid_equations_are_refused(equation: str, error: type) -> None:
    with pytest.raises(error):
        einsum(equation, tensor(np.ones((2, 3))), tensor(np.ones((2, 3))))


def test_einsum_multiplies_integers_and_refuses_two_dtypes() -> None:
    assert einsum("ij,jk->ik", tensor([[2]]), tensor([[3]])).tolist() == [[6]]
    with pytest.raises(DTypeError):
        einsum("ij,jk->ik", tensor([[1]]), tensor([[1.0]]))
