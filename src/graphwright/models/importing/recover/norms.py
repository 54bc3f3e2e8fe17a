"""Norms written out: x / √(mean x² + eps) · w -> `rms_norm`, the same of x - mean -> `layer_norm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphwright.models.importing.recover.regions import SUMS, Regions, rows
from graphwright.program.op_graph import Value


def recover_norms(s: Regions) -> None:
    """Replace norms over the last axis; a weight may be used as w, or as 1 + w as in Gemma."""
    for root in s.values("rsqrt", "sqrt", "pow"):
        found = _quotient(s, root)
        if found is None:
            continue
        x, out, eps = found
        if not any(_replace(s, *use, eps) for use in _uses(s, x, out)):
            s.leave("norm", root, "no norm with a weight gives the same result")


def _quotient(s: Regions, root: Value) -> tuple[Value, Value, float] | None:
    """Return x, its quotient by the root of its mean square and eps, for the value √(mean square + eps) or 1 / that."""
    operand = s.p.operands(root.node)[0]
    power = s.with_number(root, "pow")
    if s.is_op(root, "pow") and (power is None or power[1] not in (0.5, -0.5)):
        return None
    inverse = s.is_op(root, "rsqrt") or (power is not None and power[1] < 0)
    shifted = s.with_number(operand, *SUMS)
    mean = s.parts(shifted[0], "mean") if shifted is not None else None
    if shifted is None or mean is None or not s.attr(shifted[0], "keepdims"):
        return None
    x = _squared(s, mean[0])
    if x is None or s.attr(shifted[0], "axes") not in ((-1,), (len(s.shape(x)) - 1,)):
        return None
    out = s.next(root, "mul" if inverse else "div")
    if out is None or x not in s.p.operands(out.node) or (not inverse and s.p.operands(out.node)[0] != x):
        return None
    return x, out, shifted[1]


def _squared(s: Regions, value: Value) -> Value | None:
    """Return x of x², written as a product or as a power."""
    pair = s.parts(value, "mul")
    if pair is not None and pair[0] == pair[1]:
        return pair[0]
    power = s.with_number(value, "pow")
    if power is not None:
        return power[0] if power[1] == 2 else None
    square = s.parts(value, "square")
    return square[0] if square is not None else None


def _uses(s: Regions, x: Value, unit: Value) -> Iterator[tuple[str, Value, list[Value], Value, dict[str, Any]]]:
    """Yield (op, value to replace, operands, value that is drawn in rows, attributes) of norms that this may be."""
    outs, at = [unit], unit
    while (onward := s.next(at, "cast", "mul", *SUMS)) is not None:
        outs.append(at := onward)
    centred = _centred(s, x)
    for out in outs[::-1]:
        scale = _other(s, out, "mul")
        if centred is not None:
            bias = _other(s, out, *SUMS)
            below = s.above(next(v for v in s.p.operands(out.node) if v != bias), "cast")[-1] if bias else None
            inner = _other(s, below, "mul") if below is not None else None
            for weights in ([inner, bias] if inner and bias else None, [scale] if scale else None, []):
                if weights is not None and (weights or out == unit):
                    yield "layer_norm", out, [centred, *weights], centred, {}
            continue
        if scale is None and out == unit:
            continue
        source = s.above(x, "cast")[-1]
        for weight, offset in _weights(s, out, scale):
            for first in (True, False):
                given = {"unit_offset": offset, "cast_before_scale": first}
                yield "rms_norm", out, [source, weight], source, given


def _other(s: Regions, value: Value, *ops: str) -> Value | None:
    """Return the operand [D] of a product or sum with rows [.., D]."""
    pair = s.parts(value, *ops) or []
    return next((v for v in pair if len(s.shape(v)) == 1 and s.shape(v) == s.shape(value)[-1:]), None)


def _weights(s: Regions, out: Value, scale: Value | None) -> Iterator[tuple[Value, bool]]:
    """Yield (weight, whether it is used as 1 + weight) for the factor of a norm, of a product or a cast of it."""
    if scale is None and s.is_op(out, "cast"):
        scale = _other(s, s.p.operands(out.node)[0], "mul")
    if scale is None:
        return
    for factor in s.above(scale, "cast"):
        shifted = s.with_number(factor, *SUMS)
        if shifted is not None and shifted[1] == 1.0:
            yield s.above(shifted[0], "cast")[-1], True
        yield factor, False


def _centred(s: Regions, x: Value) -> Value | None:
    """Return x of x - mean x over the last axis."""
    pair = s.parts(x, "sub")
    mean = s.parts(pair[1], "mean") if pair is not None else None
    if (
        pair is None
        or mean is None
        or mean[0] != pair[0]
        or s.attr(pair[1], "axes")[0] not in (-1, len(s.shape(x)) - 1)
    ):
        return None
    return s.above(pair[0], "cast")[-1]


def _replace(
    s: Regions, op: str, out: Value, operands: list[Value], source: Value, attrs: dict[str, Any], eps: float
) -> bool:
    if s.p.spec(source) != s.p.spec(out) or len({s.p.spec(v).dtype for v in operands}) > 1:
        return False
    new = s.add(op, operands, f"{s.module(out)}{op}", out, eps=eps, **attrs)
    draws = {**dict.fromkeys(operands), source: rows}
    if s.agree(out, new, draws):
        s.replace(out, new)
        s.found(op, new)
        return True
    s.sweep([new.node])
    return False
