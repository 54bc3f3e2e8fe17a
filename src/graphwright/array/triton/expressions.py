"""Triton source of elementwise ops, built by running formulas on values that write lines of source.

Values of 16-bit dtypes are held in float32 and rounded to their dtype where an op ends, so a fused kernel rounds where
separate kernels do. Functions that Triton lacks, or that a GPU only approximates, are built from exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isinf, isnan
from typing import Any, NamedTuple

from graphwright.array.dtype import DType, bfloat16, bool_, float16, float32, float64, int32, int64
from graphwright.array.formulas import activations, specialise
from graphwright.array.spec import Spec

Attrs = Mapping[str, Any]

HELD: dict[DType, str] = {
    float16: "float32", bfloat16: "float32", float32: "float32", float64: "float64", int32: "int32", int64: "int64",
    bool_: "int1",
}  # fmt: skip
"""Dtype of an array -> Triton's name of the dtype in which a kernel holds its elements."""


class Lines:
    """Lines of source, and the names given to values so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def assign(self, text: str, kind: str) -> Value:
        """Append `name = text` and return the new value."""
        self.count += 1
        name = f"v{self.count}"
        self.lines.append(f"{name} = {text}")
        return Value(self, name, kind)


class Value:
    """A value of a kernel: its name in the source, and its dtype `kind` under Triton's name."""

    __slots__ = ("kind", "lines", "name")
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # == writes a comparison

    def __init__(self, lines: Lines, name: str, kind: str) -> None:
        self.lines, self.name, self.kind = lines, name, kind

    def _binary(self, other: Any, sign: str, swap: bool = False, kind: str = "") -> Value:
        a, b = self.name, text(other)
        return self.lines.assign(f"{b} {sign} {a}" if swap else f"{a} {sign} {b}", kind or self.kind)

    def __add__(self, other: Any) -> Value:
        return self._binary(other, "+")

    def __radd__(self, other: Any) -> Value:
        return self._binary(other, "+", True)

    def __sub__(self, other: Any) -> Value:
        return self._binary(other, "-")

    def __rsub__(self, other: Any) -> Value:
        return self._binary(other, "-", True)

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "*")

    def __rmul__(self, other: Any) -> Value:
        return self._binary(other, "*", True)

    def __truediv__(self, other: Any) -> Value:
        return _quotient(self, other, self)

    def __rtruediv__(self, other: Any) -> Value:
        return _quotient(other, self, self)

    def __neg__(self) -> Value:
        return self.lines.assign(f"-{self.name}", self.kind)

    def __lt__(self, other: Any) -> Value:
        return self._binary(other, "<", kind="int1")

    def __le__(self, other: Any) -> Value:
        return self._binary(other, "<=", kind="int1")

    def __gt__(self, other: Any) -> Value:
        return self._binary(other, ">", kind="int1")

    def __ge__(self, other: Any) -> Value:
        return self._binary(other, ">=", kind="int1")

    def __eq__(self, other: object) -> Any:
        return self._binary(other, "==", kind="int1")

    def __ne__(self, other: object) -> Any:
        return self._binary(other, "!=", kind="int1")

    def __and__(self, other: Value) -> Value:
        return self._binary(other, "&")

    def __or__(self, other: Value) -> Value:
        return self._binary(other, "|")

    def __xor__(self, other: Value) -> Value:
        return self._binary(other, "^")

    def call(self, function: str, *others: Any, kind: str = "") -> Value:
        """Return `function(self, *others)`, a function of triton.language."""
        return self.lines.assign(f"tl.{function}({', '.join([self.name, *map(text, others)])})", kind or self.kind)

    def to(self, kind: str) -> Value:
        """Return the value converted to another dtype; a number is true unless it is 0."""
        if kind == self.kind:
            return self
        if kind == "int1":
            return self != (0.0 if self.kind.startswith("float") else 0)
        return self.lines.assign(f"{self.name}.to(tl.{kind})", kind)

    def like(self, number: float) -> Value:
        """Return `number` in the shape and dtype of this value."""
        return self.lines.assign(f"tl.full({self.name}.shape, {text(number)}, tl.{self.kind})", self.kind)


def text(other: Any) -> str:
    """Return the source of a value or a number; infinities and NaN are names that each kernel's file defines."""
    if isinstance(other, Value):
        return other.name
    if isinstance(other, float) and (isnan(other) or isinf(other)):
        return "NAN" if isnan(other) else "INF" if other > 0 else "-INF"
    return repr(other)


def _quotient(a: Any, b: Any, like: Value) -> Value:
    """a / b, rounded to nearest; Triton's `/` of float32 is off by up to 2 units in the last place."""
    if like.kind != "float32":
        return like.lines.assign(f"{text(a)} / {text(b)}", like.kind)
    a, b = (x if isinstance(x, Value) else like.like(x) for x in (a, b))
    return like.lines.assign(f"tl.div_rn({a.name}, {b.name})", like.kind)


# -- functions ---------------------------------------------------------------------------------------------------------
def select(condition: Value, a: Any, b: Any) -> Value:
    """a where the condition holds, else b; a number takes the dtype of the other operand."""
    kind = next((x.kind for x in (a, b) if isinstance(x, Value)), "float32")
    if not isinstance(a, Value) and not isinstance(b, Value):
        a = condition.lines.assign(f"tl.full({condition.name}.shape, {text(a)}, tl.float32)", "float32")
    return condition.lines.assign(f"tl.where({condition.name}, {text(a)}, {text(b)})", kind)


def maximum(a: Value, b: Any) -> Value:
    """max(a, b), NaN if one of them is."""
    return a.lines.assign(f"tl.maximum({a.name}, {_typed(b, a)}{_nan(a)})", a.kind)


def minimum(a: Value, b: Any) -> Value:
    """min(a, b), NaN if one of them is."""
    return a.lines.assign(f"tl.minimum({a.name}, {_typed(b, a)}{_nan(a)})", a.kind)


def _typed(b: Any, a: Value) -> str:
    """Return the source of b in the dtype of a; Triton's functions would read a number as a float32."""
    return text(b) if isinstance(b, Value) else a.like(b).name


def _nan(a: Value) -> str:
    return ", propagate_nan=tl.PropagateNan.ALL" if a.kind.startswith("float") else ""


def polynomial(x: Value, *factors: float) -> Value:
    """Return Σ factors[k]·xᵏ by Horner's rule."""
    total: Any = x * factors[-1] + factors[-2]
    for factor in factors[-3::-1]:
        total = total * x + factor
    return total


def expm1(x: Value) -> Value:
    """eˣ - 1; near 0 by its Taylor series in float32, by Kahan's quotient (eˣ - 1)·x / ln eˣ in float64."""
    e = x.call("exp")
    if x.kind == "float64":
        quotient = (e - 1.0) * x / e.call("log")
        inner = select((e == 1.0) | (e == inf), x, quotient)
        return select(absolute(x) < 0.5, inner, e - 1.0)
    series = x * polynomial(x, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040, 1 / 40320, 1 / 362880)
    return select(absolute(x) < 0.7, series, e - 1.0)


def log1p(x: Value) -> Value:
    """ln(1 + x); near 0 as 2·artanh(x / (2 + x)) by its series in float32, by Kahan's quotient in float64."""
    w = 1.0 + x
    if x.kind == "float64":
        quotient = w.call("log") * x / (w - 1.0)
        return select(absolute(x) < 0.5, select(w == 1.0, x, quotient), w.call("log"))
    s = x / (2.0 + x)
    series = 2.0 * s * polynomial(s * s, 1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9)
    return select(absolute(x) < 0.25, series, w.call("log"))


def tanh(x: Value) -> Value:
    """(1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x, from expm1, which is accurate near 0."""
    m = expm1(absolute(x) * -2.0)
    size = -m / (2.0 + m)
    return select(x < 0.0, -size, size)


def absolute(x: Value) -> Value:
    """|x|."""
    return x.call("abs")


def nearest(x: Value) -> Value:
    """The nearest integer, ties to even; numbers of 2²³ (float64: 2⁵²) and more are integers already."""
    low = x.call("floor")
    rest, half = x - low, low * 0.5
    odd = half != half.call("floor")
    up = (rest > 0.5) | ((rest == 0.5) & odd)
    limit = 2.0**52 if x.kind == "float64" else 2.0**23
    return select(absolute(x) < limit, select(up, low + 1.0, low), x)


_PRIMITIVES: dict[str, Any] = {
    "exp": lambda x: x.call("exp"),
    "log": lambda x: x.call("log"),
    "sine": lambda x: x.call("sin"),
    "cosine": lambda x: x.call("cos"),
    "erf": lambda x: x.call("erf"),
    "sqrt": lambda x: x.call("sqrt_rn" if x.kind == "float32" else "sqrt"),
    "log1p": log1p,
    "tanh": tanh,
    "absolute": absolute,
    "maximum": maximum,
    "select": select,
}
FORMULAS: Any = specialise(activations, _PRIMITIVES)
"""`array.formulas.activations`, writing source."""
_sqrt, _log = _PRIMITIVES["sqrt"], _PRIMITIVES["log"]


# -- ops ---------------------------------------------------------------------------------------------------------------
class Row(NamedTuple):
    """The row that a kernel holds, for ops that depend on all of its entries.

    Attributes:
        inside: name of the mask of the entries that exist; the others may have any value.
        count: name of their number.
    """

    inside: str
    count: str


Emitted = Callable[[Sequence[Value], Attrs, Sequence[DType]], Value]
"""(operands, attributes, dtypes of the result and of the operands) -> the result, not yet rounded."""
EXPRESSIONS: dict[str, Emitted] = {}
INTEGERS: set[str] = set()
"""The ops that also take integers."""
BOOLS = frozenset(
    ("copy", "logical_not", "isnan", "eq", "ne", "logical_and", "logical_or", "logical_xor", "bitwise_and",
     "bitwise_or", "bitwise_xor", "where", "cast", "full_like")
)  # fmt: skip
"""The ops that also take bools."""
ROWS: dict[str, Callable[[Sequence[Value], Attrs, Sequence[DType], Row], Value]] = {}
"""The ops that depend on whole rows along the last axis."""


def _unary(name: str, function: Callable[[Value], Value], integers: bool = False) -> None:
    EXPRESSIONS[name] = lambda ins, attrs, dtypes: function(ins[0])
    if integers:
        INTEGERS.add(name)


def _binary(name: str, function: Callable[[Value, Value], Value], integers: bool = True) -> None:
    EXPRESSIONS[name] = lambda ins, attrs, dtypes: function(ins[0], ins[1])
    if integers:
        INTEGERS.add(name)


def _truth(x: Value) -> Value:
    return x.to("int1")


for _name, _function in {
    "sigmoid": FORMULAS.sigmoid, "tanh": tanh, "silu": FORMULAS.silu, "softplus": FORMULAS.softplus,
    "sech": FORMULAS.sech, "logsigmoid": lambda x: -FORMULAS.softplus(-x), "sign": FORMULAS.sign,
    "step": FORMULAS.step, "floor": lambda x: x.call("floor"), "ceil": lambda x: x.call("ceil"), "round": nearest,
    "exp": lambda x: x.call("exp"), "expm1": expm1, "log": _log, "log1p": log1p, "sqrt": _sqrt,
    "rsqrt": lambda x: 1.0 / _sqrt(x), "reciprocal": lambda x: 1.0 / x, "sin": lambda x: x.call("sin"),
    "cos": lambda x: x.call("cos"), "erf": lambda x: x.call("erf"), "exp2": lambda x: x.call("exp2"),
}.items():  # fmt: skip
    _unary(_name, _function)
for _name, _function in {
    "neg": lambda x: -x, "abs": absolute, "copy": lambda x: x, "logical_not": lambda x: _truth(x) == 0,
    "isnan": lambda x: x != x,
}.items():  # fmt: skip
    _unary(_name, _function, True)
for _name, _function in {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "minimum": minimum,
    "maximum": maximum, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: _truth(a) & _truth(b), "logical_or": lambda a, b: _truth(a) | _truth(b),
    "logical_xor": lambda a, b: _truth(a) ^ _truth(b), "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b, "bitwise_xor": lambda a, b: a ^ b,
}.items():  # fmt: skip
    _binary(_name, _function)
_binary("div", lambda a, b: a / b, False)
_binary("swiglu", lambda a, b: FORMULAS.silu(a) * b, False)
_binary("bce_with_logits", FORMULAS.bce_with_logits, False)


def _op(function: Emitted) -> Emitted:
    """Register the function of the op that it is named after."""
    EXPRESSIONS[function.__name__.removeprefix("_")] = function
    return function


@_op
def _relu(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    return select(ins[0] < 0, 0.0 if dtypes[0].is_float else 0, ins[0])


@_op
def _leaky_relu(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    return select(ins[0] > 0.0, ins[0], ins[0] * float(attrs["slope"]))


@_op
def _elu(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    below = select(ins[0] > 0.0, 0.0, ins[0])
    return select(ins[0] > 0.0, ins[0], expm1(below) * float(attrs["alpha"]))


@_op
def _gelu(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    return (FORMULAS.gelu_tanh if attrs["approximate"] == "tanh" else FORMULAS.gelu)(ins[0])


@_op
def _clamp(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    x = ins[0]
    x = x if attrs["low"] is None else maximum(x, attrs["low"])
    return x if attrs["high"] is None else minimum(x, attrs["high"])


@_op
def _isinf(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    return absolute(ins[0]) == inf if dtypes[1].is_float else ins[0] != ins[0]


@_op
def _isfinite(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    return absolute(ins[0]) < inf if dtypes[1].is_float else ins[0] == ins[0]


@_op
def _where(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    return select(*ins)


@_op
def _cast(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    return ins[0].to(HELD[dtypes[0]])


@_op
def _full_like(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    value = attrs["value"]
    return ins[0].like(float(value) if dtypes[0].is_float else bool(value) if dtypes[0] is bool_ else int(value))


@_op
def _junction(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType]) -> Value:
    total = ins[0]
    for other in ins[1:]:
        total = total + other
    return total


INTEGERS |= {"relu", "clamp", "isinf", "isfinite", "where", "cast", "full_like", "junction"}


def _rms_norm(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType], row: Row) -> Value:
    x, w = ins
    square = x.lines.assign(f"tl.where({row.inside}, {(x * x).name}, 0.0)", x.kind)
    mean = x.lines.assign(f"tl.sum({square.name}, 0) / {row.count}", x.kind)
    unit = x / _sqrt(mean + float(attrs["eps"]))
    if attrs["cast_before_scale"]:
        unit = rounded(unit, dtypes[2])
    return unit * (1.0 + w if attrs["unit_offset"] else w)


def _softmax(ins: Sequence[Value], attrs: Attrs, dtypes: Sequence[DType], row: Row) -> Value:
    x = ins[0]
    seen = x.lines.assign(f"tl.where({row.inside}, {x.name}, -INF)", x.kind)
    if len(ins) == 1:
        e = (seen - x.lines.assign(f"tl.max({seen.name}, 0)", x.kind)).call("exp")
        return e / _row_sum(e, x)
    mask = x.lines.assign(f"{row.inside} & {ins[1].name}", "int1")
    seen = select(mask, seen, -inf)
    top = x.lines.assign(f"tl.max({seen.name}, 0)", x.kind)
    alone = x.lines.assign(f"tl.max({mask.name}.to(tl.int32), 0)", "int32") == 0  # all entries are excluded
    top = select((top == -inf) & alone, 0.0, top)
    e = select(mask, (seen - top).call("exp"), 0.0)
    total = _row_sum(e, x)
    return e / select(total == 0.0, 1.0, total)


def _row_sum(e: Value, x: Value) -> Value:
    return x.lines.assign(f"tl.sum({e.name}, 0)", x.kind)


ROWS |= {"rms_norm": _rms_norm, "softmax": _softmax}


OPERANDS_FIRST = {"where": 1}
"""Op -> the first operand that has the dtype of the others; those before are conditions."""


def rounded(x: Value, dtype: DType) -> Value:
    """Round a value that is held in float32 to the 16-bit dtype, which it keeps being held in."""
    if not dtype.is_low:
        return x
    return x.lines.assign(f"{x.name}.to(tl.{dtype.name}).to(tl.float32)", x.kind)


def refusal(name: str, out: Spec, ins: Sequence[Spec], attrs: Attrs) -> str:
    """Return why a kernel cannot be generated for this use of an op, or ""."""
    if name not in EXPRESSIONS and name not in ROWS:
        return "no_form"
    dtypes = [out.dtype, *(s.dtype for s in ins)]
    if not ins or any(d not in HELD for d in dtypes):
        return "dtype"
    if name in ROWS:
        last = attrs.get("axis", -1) in (-1, len(out.shape) - 1)
        return "" if last and out.shape else "layout"
    fixed = OPERANDS_FIRST.get(name, 0)
    if dtypes[1 + fixed] is bool_:
        return "" if name in BOOLS else "dtype"
    return "" if name in INTEGERS or dtypes[1 + fixed].is_float else "dtype"
