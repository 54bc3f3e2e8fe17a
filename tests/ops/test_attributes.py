"""Each attribute of an op accepts the values of its annotation and no others, however the op is built."""

from __future__ import annotations

from math import inf, nan
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import float32, from_numpy
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import OPS, call, op
from graphwright.ops.attributes import Attr, PerAxis, Shape, StaticSize
from graphwright.ops.rules import UnaryFloat
from graphwright.settings import AtLeastOne, Number, Positive, Range

PROBES: list[Any] = [
    None, True, False, 0, 1, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**400, 0.0, -0.5, 1.5, inf, -inf, nan, "x",
    "B", "a b", "class", "tanh", float32, (), (1,), (1, 2), (-1,), (True,), ("B", 3), ("a'b",), (1.5,), ((0, 1),), [1],
    {}, b"x",
]  # fmt: skip


def whole(v: Any) -> bool:
    return type(v) is int and -(2**63) <= v < 2**63


def each(v: Any, test: Any) -> bool:
    return type(v) is tuple and all(test(x) for x in v)


ORACLE: list[tuple[Any, Any]] = [
    (int, whole),
    (bool, lambda v: type(v) is bool),
    (float, lambda v: type(v) is float),
    (Number, lambda v: type(v) is float and np.isfinite(v)),
    (Positive, lambda v: type(v) is float and np.isfinite(v) and v > 0),
    (AtLeastOne | None, lambda v: v is None or (whole(v) and v >= 1)),  # pyright: ignore[reportOperatorIssue]
    (Annotated[int, Range(-1, 1, whole=True)], lambda v: type(v) is int and abs(v) <= 1),
    (Literal["none", "tanh"], lambda v: type(v) is str and v in ("none", "tanh")),
    (StaticSize, lambda v: whole(v) and v >= 0),
    (Shape, lambda v: each(v, lambda n: n == "B" if isinstance(n, str) else whole(n) and n >= 0)),
    (PerAxis, lambda v: whole(v) or each(v, whole)),
    (tuple[int, int], lambda v: each(v, whole) and len(v) == 2),
    (tuple[tuple[int, int], ...], lambda v: v == () or v == ((0, 1),)),
    (type(float32), lambda v: v is float32),
    (int | float | None, lambda v: v is None or whole(v) or type(v) is float),
]


@pytest.mark.parametrize(("kind", "oracle"), ORACLE, ids=range(len(ORACLE)))
def test_an_annotation_accepts_exactly_its_values(kind: Any, oracle: Any) -> None:
    fits = Attr(kind).fits
    wrong = [v for v in PROBES if fits(v) != bool(oracle(v))]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("softmax", {"axis": np.int32(-1)}, {"axis": -1}),
        ("leaky_relu", {"slope": 1}, {"slope": 1.0}),
        ("leaky_relu", {"slope": np.float32(0.5)}, {"slope": 0.5}),
        ("reshape", {"shape": [np.int64(2), "B"]}, {"shape": (2, "B")}),
        ("pad", {"widths": [[1, 2]]}, {"widths": ((1, 2),), "mode": "constant", "value": 0.0}),
        ("cast", {"dtype": "float32"}, {"dtype": float32}),
        ("sort", {"descending": np.True_}, {"axis": -1, "descending": True}),
    ],
)
def test_values_are_converted_to_their_types(name: str, given: dict[str, Any], stored: dict[str, Any]) -> None:
    row = OPS[name]
    found = row.complete(given)
    assert found == stored
    assert [type(v) for v in found.values()] == [type(v) for v in stored.values()]
    row.check_attrs(found)


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("softmax", {"axis": "x"}),
        ("softmax", {"axis": True}),
        ("sort", {"descending": "x"}),
        ("rms_norm", {"eps": "x"}),
        ("rms_norm", {"eps": inf}),
        ("triu", {"diagonal": 2**70}),
        ("expand", {"shape": ("a b", 3)}),
        ("expand", {"shape": ("import", 3)}),
        ("clamp", {"low": 2**70}),
        ("gelu", {"approximate": "erf"}),
        ("unsqueeze", {"axes": (0.5,)}),
        ("diagonal", {"axes": (0,)}),
        ("softmax", {"axes": 0}),
        ("reshape", {}),
        ("sum", {"axes": ...}),
    ],
)
def test_invalid_attributes_are_refused_wherever_an_op_is_built(name: str, attrs: dict[str, Any]) -> None:
    x = gw.tensor(np.ones((3, 3), "f4"))
    b = gw.Builder()
    value, weight = b.input("x", (3, 3)), b.input("w", (3,))
    operands = [weight] if name == "rms_norm" else []
    with pytest.raises(UsageError) as eager:
        call(name, x, *[x[0] for _ in operands], **attrs)
    with pytest.raises(UsageError) as built:
        b.op(name, value, *operands, name="node", **attrs)
    b.output(b.tanh(value, name="t"), "y")
    p = b.build()
    with pytest.raises(UsageError), p.edit("add") as e:
        e.add(name, "t", *["w" for _ in operands], **attrs)
    assert built.value.where == "node"
    assert eager.value.what == built.value.what


def test_a_range_does_not_contain_ints_without_a_float() -> None:
    assert 10**400 not in Range(0)
    assert 2**53 + 1 not in Range(0, 2**53)
    assert 3 in Range(0, 3, whole=True)


def test_an_attribute_without_a_type_is_refused_when_the_op_is_defined() -> None:
    with pytest.raises(UsageError, match="no type") as info:

        @op("untyped")
        class Untyped(UnaryFloat):
            """x."""

            attrs, vjp, sample, emit, onnx = {"slope": 0.1}, None, None, "{0}", "Identity"

    assert info.value.got == "slope"
    assert "untyped" not in OPS


@pytest.mark.parametrize("name", ["B); import os #", "", "T\n", "class", "1x"])
def test_names_of_dimensions_are_identifiers(name: str) -> None:
    b = gw.Builder()
    with pytest.raises(ShapeError):
        b.input("x", (name, 4))
    b.output(b.tanh(b.input("x", ("B", 4))), "y")
    p = b.build()
    with pytest.raises(ShapeError), p.edit("add") as e:
        e.input("z", (name, 4))
    with pytest.raises(ShapeError):
        gw.array.Spec.from_json(["float32", [name]])


def test_equal_values_of_different_types_do_not_share_a_cached_call() -> None:
    x = from_numpy(np.array([[1, 2], [3, 4]]))
    assert call("full_like", x, value=1).to_numpy().tolist() == [[1, 1], [1, 1]]
    with pytest.raises(UsageError):
        call("softmax", x, axis=True)
