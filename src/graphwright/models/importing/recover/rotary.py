"""Rotary embeddings written out -> `rope`; tables of cosines and sines of positions -> `rope_table`."""

from __future__ import annotations

from typing import Any

from graphwright.array import int64
from graphwright.models.importing.recover.regions import SUMS, Regions
from graphwright.program.kinds import CONST, PARAM
from graphwright.program.op_graph import Value

# by name: as in regions.py
REARRANGED = ("concat", "neg", "slice", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten")


def recover_rope(s: Regions) -> None:
    """Replace x·cos + rotated(x)·sin for heads x [B, H, T, D], rotated in whole or in their first entries.

    Also where the two halves are computed apart, from tables of half the width.
    """
    tables: dict[Any, tuple[Value, Value]] = {}
    for root in s.values("concat"):
        parts = _two_halves(s, root)
        if parts is not None and not _replace(s, root, *parts, "half", tables):
            s.leave("rope", root, "no rotation by these tables gives the same result")
    for root in s.values("add", "junction"):
        found = _rotation(s, root)
        if found is None:
            continue
        x, cos, sin = found
        if not any(_replace(s, root, x, cos, sin, style, tables) for style in ("half", "interleaved")):
            s.leave("rope", root, "no rotation by these tables gives the same result")
    for root in s.values("rope"):
        _with_rest(s, root)
    for root in s.values("rope"):
        s.found("rope", root)


def _rotation(s: Regions, root: Value) -> tuple[Value, Value, Value] | None:
    """Return x and the tables [B, 1, T, d] of a sum of x·cos and rotated(x)·sin."""
    terms = s.p.operands(root.node)
    if len(terms) != 2 or len(s.shape(root)) != 4:
        return None
    for first, second in (terms, terms[::-1]):
        pairs = s.parts(first, "mul"), s.parts(second, "mul")
        if pairs[0] is None or pairs[1] is None:
            return None
        for x, cos in (pairs[0], pairs[0][::-1]):
            for rotated, sin in (pairs[1], pairs[1][::-1]):
                fits = s.p.spec(x) == s.p.spec(root) == s.p.spec(rotated) and s.shape(cos) == s.shape(sin)
                if fits and s.is_op(rotated, "concat", "reshape", "flatten") and _rearranges(s, rotated, x):
                    return x, cos, sin
    return None


def _two_halves(s: Regions, root: Value) -> tuple[Value, Value, Value] | None:
    """Return x and the tables [B, 1, T, d/2] of a·cos - b·sin and b·cos + a·sin, joined, with the halves a, b of x."""
    halves = s.p.operands(root.node)
    if len(halves) != 2 or len(s.shape(root)) != 4 or s.attr(root, "axis") not in (-1, 3):
        return None
    first, second = s.parts(halves[0], "sub"), s.parts(halves[1], *SUMS)
    pairs = [pair for v in (*(first or ()), *(second or ())) if (pair := s.parts(v, "mul")) is not None]
    if len(pairs) != 4:
        return None
    for a, cos in (pairs[0], pairs[0][::-1]):
        for b, sin in (pairs[1], pairs[1][::-1]):
            whole = s.parts(a, "slice")
            if whole is None or whole != s.parts(b, "slice") or s.p.spec(whole[0]) != s.p.spec(root):
                continue
            if s.shape(cos) == s.shape(sin) and s.shape(cos)[3:] == s.shape(a)[3:]:
                return whole[0], cos, sin
    return None


def _rearranges(s: Regions, rotated: Value, x: Value) -> bool:
    """Return whether a value is made of entries of x by ops that rearrange and negate them."""
    stack = [rotated]
    while stack:
        value = stack.pop()
        if value == x:
            continue
        if not s.is_op(value, *REARRANGED):
            return False
        stack += s.p.operands(value.node)
    return True


def _replace(
    s: Regions, root: Value, x: Value, cos: Value, sin: Value, style: str, tables: dict[Any, tuple[Value, Value]]
) -> bool:
    """Replace a rotation if its tables are those of positions; else read halves of the tables that it has."""
    width, path = s.shape(x)[3], s.module(root)
    if not isinstance(width, int) or width % 2 or s.shape(cos)[-1] not in (width, width // 2):
        return False
    for source in (_of_positions, _halves):
        made = source(s, cos, sin, style, width, tables)
        if made is None:
            continue
        pair, leaves = made
        batch, _, length, _ = s.shape(x)
        if s.shape(pair[0])[:-1] not in ((batch, length), (1, length)):  # positions are along another axis
            s.sweep(v.node for v in pair)
            continue
        new = s.add("rope", [x, *pair], f"{path}rope", root, style=style)
        if s.p.spec(new) == s.p.spec(root) and s.agree(root, new, dict.fromkeys((x, *leaves))):
            s.replace(root, new)
            return True
        s.sweep([new.node])
    return False


def _of_positions(
    s: Regions, cos: Value, sin: Value, style: str, width: int, tables: dict[Any, tuple[Value, Value]]
) -> tuple[tuple[Value, Value], list[Value]] | None:
    """Return tables made by `rope_table`, and the positions that they are made of."""
    source = _angles(s, cos)
    if source is None or source != _angles(s, sin):
        return None
    positions, frequencies, scale = source
    key = (positions, frequencies, scale, s.p.spec(cos).dtype)
    if key not in tables or not all(v.node in s.p.graph for v in tables[key]):
        home = f"{s.module(s.above(cos, 'unsqueeze')[-1])}rope_table"
        node = s.add("rope_table", [positions, frequencies], home, scale=scale).node
        pair = (Value(node), Value(node, 1))
        if s.p.spec(cos).dtype is not s.p.spec(pair[0]).dtype:
            pair = tuple(s.add("cast", [v], f"{home}.cast", dtype=s.p.spec(cos).dtype) for v in pair)
        tables[key] = (pair[0], pair[1])
    return tables[key], [positions]


def _angles(s: Regions, table: Value) -> tuple[Value, Value, float] | None:
    """Return positions int64 [B, T], frequencies [d/2] and the factor of a table of cosines or sines."""
    scale, at = 1.0, table
    while not s.is_op(at, "cos", "sin"):
        scaled = s.scaled(at)
        if scaled is not None:
            at, scale = scaled[0], scale * scaled[1]
        elif s.is_op(at, "cast", "unsqueeze", "stop_gradient", "concat", "expand", "flatten", "reshape", "slice",
                     "repeat_interleave"):  # fmt: skip
            at = s.p.operands(at.node)[0]
        else:
            return None
    stack, found = [s.p.operands(at.node)[0]], dict[str, Value]()
    while stack:
        value = stack.pop()
        spec = s.p.spec(value)
        if spec.dtype is int64 and len(spec.shape) == 2:
            found["positions"] = value
        elif s.is_op(value, CONST, PARAM) and len(spec.shape) == 1:
            found["frequencies"] = value
        elif s.is_op(value, "mul", "matmul", "concat", "cast", "unsqueeze", "expand", "permute", "stop_gradient",
                     "reshape", "flatten", "squeeze", "repeat_interleave"):  # fmt: skip
            stack += s.p.operands(value.node)
        else:
            return None
    if len(found) < 2:
        return None
    return found["positions"], found["frequencies"], scale


def _halves(
    s: Regions, cos: Value, sin: Value, style: str, width: int, tables: dict[Any, tuple[Value, Value]]
) -> tuple[tuple[Value, Value], list[Value]] | None:
    """Return the tables [B, T, d/2] that are half of tables [B, 1, T, d], or these; None for tables of other axes."""
    if len(s.shape(cos)) != 4 or s.shape(cos)[1] != 1:
        return None
    key = (cos, sin, style, width)
    if key not in tables or not all(v.node in s.p.graph for v in tables[key]):
        tables[key] = _half(s, cos, style, width), _half(s, sin, style, width)
    return tables[key], [cos, sin]


def _half(s: Regions, table: Value, style: str, rotated: int) -> Value:
    width, path = s.shape(table)[-1], f"{s.p.path(table)}.half"
    assert isinstance(width, int)
    if width < rotated:
        return s.add("squeeze", [table], path, axes=(1,))
    part = s.add("slice", [table], path, axis=-1, start=0, size=width // 2, step=1 if style == "half" else 2)
    return s.add("squeeze", [part], path, axes=(1,))


def _with_rest(s: Regions, root: Value) -> None:
    """Let a rotation of the first entries of heads, whose other entries follow it, take whole heads."""
    whole = s.next(root, "concat")
    first, *tables = s.p.operands(root.node)
    part = s.parts(first, "slice")
    if whole is None or s.p.operands(whole.node)[0] != root:
        return
    x = part[0] if part is not None and s.p.spec(part[0]) == s.p.spec(whole) else first
    path = s.p.path(root.node)
    if s.p.spec(x) != s.p.spec(whole):
        return
    new = s.add("rope", [x, *tables], path, whole, style=s.attr(root, "style"))
    if s.agree(whole, new, dict.fromkeys((x, *tables))):
        s.replace(whole, new)
        s.rename(new, path)
    else:
        s.sweep([new.node])
