"""Sizes computed from named sizes: equal to Python's arithmetic for all values, and equal texts for equal sizes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphwright.array import float32
from graphwright.array.sizes import Size, bound, divided, folded, is_dim_text, names_of, product, renamed, total
from graphwright.array.spec import Spec, check_dims, sample_sizes
from graphwright.errors import ShapeError

STEPS = {"Add": operator.add, "Mul": operator.mul, "Div": operator.floordiv}
NAMES = ("B", "T", "length")


def build(draw, depth: int):
    """Return a function that computes with three numbers."""
    kind = draw(st.sampled_from(["name", "int"] if not depth else ["name", "int", "+", "-", "*", "//"]))
    if kind == "name":
        i = draw(st.integers(0, 2))
        return lambda v: v[i]
    if kind == "int":
        n = draw(st.integers(0, 5))
        return lambda v: n + 0 * v[0]
    a, b = build(draw, depth - 1), build(draw, depth - 1)
    if kind == "//":
        k = draw(st.integers(1, 5))
        return lambda v: a(v) // k
    return {"+": lambda v: a(v) + b(v), "-": lambda v: a(v) - b(v), "*": lambda v: a(v) * b(v)}[kind]


@st.composite
def formulas(draw):
    return build(draw, 3)


@given(formulas(), st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=4))
def test_sizes_are_those_of_pythons_arithmetic(formula, cases):
    dim = formula([Size.of(n) for n in NAMES]).dim
    for case in cases:
        wanted = formula(case)
        dims: dict[Any, int] = dict(zip(NAMES, case, strict=True))
        assert Size.of(dim).value(dims) == wanted
        if wanted >= 0:
            assert bound(dim, dims) == wanted
        elif isinstance(dim, str):
            with pytest.raises(ShapeError, match="negative"):
                bound(dim, dims)
        least = Size.of(dim).least
        assert least is None or least <= wanted
        assert folded(dim, lambda d, dims=dims: dims.get(d, d), lambda kind, a, b: STEPS[kind](a, b)) == wanted
        if isinstance(dim, str):
            assert is_dim_text(dim)
            assert Size.of(dim).dim == dim
            assert eval(dim, {}, dims) == wanted
            assert set(names_of(dim)) <= set(NAMES)
        if wanted >= 0:
            assert Size.of(bound(dim, {"B": case[0]})).value(dims) == wanted


@given(formulas(), formulas())
def test_a_product_is_divisible_by_its_factors(left, right):
    a, b = (f([Size.of(n) for n in NAMES]) for f in (left, right))
    if b.terms:
        found = divided(a * b, b)
        assert found is not None
        assert found.dim == a.dim
        assert divided(a * b + 1, b) is None or b.dim in (1, -1)


@pytest.mark.parametrize(("text", "wanted"), [
    (Size.of("T") * "B", "B*T"), (Size.of("T") - 1 + 1, "T"), (Size.of("T") * 2 - "T", "T"),
    ((Size.of("T") * 2 + 3) // 2, "T+1"), ((Size.of("T") - 1) // 2 + 1, "(T+1)//2"), (Size.of("T") * 0, 0),
    ((Size.of("T") - 1) * "B", "B*T-B"), (Size.of("T") // 2 * "B", "B*(T//2)"), ((Size.of("T") - 4) * 2, "2*T-8"),
])  # fmt: skip
def test_texts_are_canonical(text, wanted):
    assert text.dim == wanted


def test_only_canonical_texts_are_dimensions():
    wrong = ("T*B", "T+0", "1*T", "T - 1", "T**2", "f(T)", "T.x", "", "3", "(B+T)*T", "T//0", "T//B", "class", "BB***")
    long = ("+".join(f"a{i}" for i in range(400)), "(" * 300 + "T" + ")" * 300, "__import__('os')")
    for text in wrong + long:
        assert not is_dim_text(text)
    for text in ("T", "B*T", "-B+T", "T//2", "(T+1)//2", "2*((T+1)//2)*B"):
        assert is_dim_text(text)
    assert not is_dim_text(3)


def test_specs_hold_computed_sizes():
    spec = Spec(("B*T", "T-1", 4), float32)
    assert spec.bind({"B": 2, "T": 5}) == Spec((10, 4, 4), float32)
    assert spec.bind({"T": 5}) == Spec(("5*B", 4, 4), float32)
    assert Spec.from_json(spec.to_json()) == spec
    assert sample_sizes([spec]) == {"B": 3, "T": 4}
    with pytest.raises(ShapeError, match="T-1 is negative"):
        spec.bind({"B": 2, "T": 0})
    with pytest.raises(ShapeError):
        check_dims(("B*T",))
    assert (product(("B", 2, "T")), total(("T", -1)), product((2, 3)), total((2, 3))) == ("2*B*T", "T-1", 6, 5)
    assert renamed("B*(T//2)", "run.") == "run.B*(run.T//2)"


def test_a_lower_bound_holds_for_names_from_one():
    b, t = Size.of("B"), Size.of("T")
    assert ((b * t - b + 1).least, (b * t).least, (t // 2).least, (b + t - 1).least) == (1, 1, 0, 1)
    assert ((b - t).least, (3 - b).least) == (None, None)


def test_division_by_what_does_not_divide_is_refused():
    for by in ("T", Size.of("B") + 1, 0, -2):
        with pytest.raises(ShapeError, match="divided"):
            _ = Size.of("B") // by
