"""Attention over patterns as dense attention with a constant mask, for formats that have no patterns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphwright.array import from_numpy
from graphwright.autograd import Variable
from graphwright.models.codegen.patterns import pattern_of, sparse_attentions, why_not_masked
from graphwright.models.errors import ExportError
from graphwright.program.derived.rewrite import rewrite
from graphwright.program.kinds import CONST
from graphwright.program.op_graph import Value
from graphwright.program.primitives import add_op, add_source
from graphwright.program.weights import add_weight

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.patterns import Pattern
    from graphwright.program.program import Program

MOST = 1 << 26
"""Entries of the largest mask: one plane of 8192 tokens."""


def check_masked(p: Program) -> None:
    """Raise ExportError for the first attention over a pattern that a constant mask cannot express."""
    for node in sparse_attentions(p):
        pattern, why = pattern_of(p, node), why_not_masked(p, node)
        if pattern is not None and not why and (size := pattern.planes * pattern.tokens[0] * pattern.tokens[1]) > MOST:
            why = f"its mask would have {size:,} entries, and at most {MOST:,} are written"
        if why:
            raise ExportError("this attention over a pattern cannot be written as one with a mask", where=p.path(node),
                              got=why)  # fmt: skip


def with_masks(p: Program) -> Program:
    """Return the program, or a copy in which each attention over a pattern is dense, with the pattern's mask.

    The masks have the tokens of the patterns, so longer texts fail. Call `check_masked` first.
    """
    sparse = set(sparse_attentions(p))
    masks: dict[int, Value] = {}

    def attention(new: Program, node: NodeId, operands: list[Value]) -> Value | None:
        pattern = pattern_of(p, node)
        if node not in sparse or pattern is None:
            return None
        if id(pattern) not in masks:
            masks[id(pattern)] = _constant(new, pattern)
        return _dense(new, p.path(node), p.attrs(node), operands, pattern, masks[id(pattern)])

    return rewrite(p, p.name, attention)[0] if sparse else p


def _constant(new: Program, pattern: Pattern) -> Value:
    """Add the mask of a pattern, bool [planes, queries, keys]."""
    name = new.free_name(f"{pattern.name or 'pattern'}.mask")
    array = from_numpy(pattern.to_dense())
    key = new.weights.free_key(name)
    add_weight(new.weights, key, Variable(array, name=key))
    return Value(add_source(new, CONST, name, array.spec, {"key": key}))


def _dense(
    new: Program, path: str, attrs: Any, operands: list[Value], pattern: Pattern, mask: Value
) -> Value:  # fmt: skip
    """Add softmax(scale · q kᵀ where the mask is true) v; return the result [B, H, Tq, Dv].

    With a softcap c, scores s become c·tanh(s / c) before the mask.
    """
    q, k, v = operands[:3]
    heads, groups = new.spec(q).shape[1], new.spec(k).shape[1]
    assert isinstance(heads, int)
    assert isinstance(groups, int)

    def add(label: str, op: str, ins: list[Value], **given: Any) -> Value:
        return Value(add_op(new, op, ins, given, new.free_name(f"{path}.{label}")))

    rows = add("rows", "iota", [q], axis=2)
    if "q_start" in attrs["optional"]:
        start = operands[4 + attrs["optional"].index("q_start")]
        rows = add("positions", "add", [rows, start])
    seen = add("seen_rows", "index", [mask, rows], axis=1)
    seen = add("seen", "index", [seen, add("columns", "iota", [k], axis=2)], axis=2)
    split = {"axis": 0, "sizes": (groups, heads // groups)}
    if pattern.planes == heads:
        seen = add("seen_heads", "unsqueeze", [add("seen_groups", "unflatten", [seen], **split)], axes=(0,))
    else:
        seen = add("seen_heads", "unsqueeze", [seen], axes=(0, 1) if pattern.planes == 1 else (0, 2))
    q = add("q", "unflatten", [q], axis=1, sizes=(groups, heads // groups))
    k, v = (add(label, "unsqueeze", [t], axes=(2,)) for label, t in (("k", k), ("v", v)))
    scores = add("scores", "matmul", [q, add("k_t", "permute", [k], axes=(0, 1, 2, 4, 3))])
    scaled = add("scaled", "mul", [scores, add("scale", "full_like", [scores], value=attrs["scale"])])
    if (cap := attrs["softcap"]) is not None:
        limit = add("softcap", "full_like", [scores], value=cap)
        scaled = add("bounded", "mul", [add("tanh", "tanh", [add("ratio", "div", [scaled, limit])]), limit])
    mixed = add("mixed", "matmul", [add("weights", "softmax", [scaled, seen]), v])
    return add("out", "flatten", [mixed], start=1, end=2)
